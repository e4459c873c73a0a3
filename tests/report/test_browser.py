"""The report in a real browser: the query can be dragged and moved by keys, and nothing complains.

Needs playwright and a Chromium, which `make test` sets up where it can; skipped where either is missing.
"""

import json

import pytest
import torch

from inline_attention.analysis.collision_cases import KEYS
from inline_attention.ops import attention_weights
from inline_attention.report.page import render
from report.written_evidence import evidence, run

KINDS = ("softmax", "linear", "inline")

pytestmark = pytest.mark.xdist_group("browser")  # one process starts the browser and draws the page


@pytest.fixture(scope="module")
def rendered():
    """The page with three runs, as text."""
    return render(evidence(run(), run("softmax_deit_tiny", "softmax"), run("linear_deit_tiny", "linear")))


@pytest.fixture
def page(browser, rendered, tmp_path):
    """The page on a phone; in the end nothing may have been complained about or fetched."""
    path = tmp_path / "report.html"
    path.write_text(rendered, encoding="utf-8")
    context = browser.new_context(viewport={"width": 360, "height": 760}, has_touch=True)
    opened = context.new_page()
    complaints, fetched = [], []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: fetched.append(request.url))
    opened.goto(path.as_uri())
    opened.locator("#plane-drawing").scroll_into_view_if_needed()
    yield opened
    assert complaints == []
    assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []
    context.close()


def shown(page):
    return {kind: json.loads(page.get_attribute(f"#plane-{kind}", "data-weights")) for kind in KINDS}


def expected(query, feature_map="relu"):
    """The same weights by the library's reference."""
    q = torch.tensor(query, dtype=torch.float64).view(1, 1, 1, 2)
    k = torch.tensor(KEYS, dtype=torch.float64).view(1, -1, 1, 2)
    return {
        kind: attention_weights(q, k, kind=kind, feature_map="identity" if kind == "softmax" else feature_map)
        .flatten()
        .tolist()
        for kind in KINDS
    }


def test_dragging_changes_the_weights_to_what_the_library_computes(page):
    before = shown(page)
    assert before == {kind: pytest.approx(weights) for kind, weights in expected((2.0, 1.0)).items()}
    box = page.locator("#plane-query .query").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    scale = page.locator("#plane-drawing").bounding_box()["width"] / 5  # pixels of one unit
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - scale, y - scale, steps=5)
    page.mouse.up()
    after = shown(page)
    for kind, weights in expected((1.0, 2.0)).items():
        assert after[kind] == pytest.approx(weights, abs=0.02)
        assert after[kind] != pytest.approx(before[kind], abs=0.02)


def test_a_tap_moves_the_query(page):
    before = shown(page)
    box = page.locator("#plane-drawing").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.2)
    assert shown(page) != before


def test_the_second_query_is_confused_by_linear_attention_alone(page):
    verdicts = {kind: page.inner_text(f"#plane-{kind}-verdict") for kind in KINDS}
    assert "told apart" in verdicts["softmax"]
    assert "told apart" in verdicts["inline"]
    assert "the same weights" in verdicts["linear"]
    page.locator("#plane-ghost").fill("1")
    assert "only one query" in page.inner_text("#plane-linear-verdict")


def test_the_arrow_keys_move_the_query_and_the_feature_map_can_be_changed(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#plane-query")
    for key in ("ArrowRight", "ArrowUp", "Shift+ArrowLeft"):
        page.keyboard.press(key)
    moved = (2.0 + 0.1 - 0.5, 1.0 + 0.1)
    assert page.get_attribute("#plane-query", "aria-valuetext") == "x 1.6, y 1.1"
    assert shown(page) == {kind: pytest.approx(weights) for kind, weights in expected(moved).items()}
    page.get_by_label("identity").check()
    identity = expected(moved, "identity")
    assert shown(page) == {kind: pytest.approx(weights) for kind, weights in identity.items()}
    page.focus("#plane-query")
    page.keyboard.press("Home")
    assert page.get_attribute("#plane-query", "aria-valuetext") == "x 2.0, y 1.0"


@pytest.mark.parametrize("width", [320, 360, 1180])
def test_nothing_is_wider_than_the_screen(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_charts_use_the_width_of_a_desktop(page):
    page.set_viewport_size({"width": 1280, "height": 800})
    for name in ("confusion", "locality", "masking", "ablation", "cost", "curves"):
        boxes = [chart.bounding_box() for chart in page.locator(f"#{name} .chart").all() if chart.is_visible()]
        width = max(box["x"] + box["width"] for box in boxes) - min(box["x"] for box in boxes)
        assert width > 0.9 * page.locator(f"#{name}").bounding_box()["width"], name


def test_it_can_be_printed(page):
    page.emulate_media(media="print")
    assert not page.is_visible(".controls")
    assert page.is_visible("#curves .chart >> nth=0")
