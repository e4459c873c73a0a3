"""The page of a slide: its tiles are the slide, and it can be moved, zoomed and covered in a real browser."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("tifffile")

from inline_attention.analysis import slide_page
from inline_attention.analysis.attention_map import AttentionMaps, EvidenceMap, TokenMap
from inline_attention.data.marked_slides import Mark, write_slide
from inline_attention.data.slides import open_slide

SIDE = 1100


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slide")
    write_slide(folder / "a<b>.tif", SIDE, (Mark("ring", 200, 300), Mark("cross", 900, 800)), 96, 0)
    weights = torch.rand(69, 69, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 69**2
    item = TokenMap((18, 12), weights, torch.empty(0), 1 / 69**2)
    maps = AttentionMaps(
        "model </script>", "inline", 3, "blocks.3", (0,), (69, 69), torch.empty(3, 1, 1), (item,), None, 16
    )
    spots = torch.full((69, 69), -1.0, dtype=torch.float64)
    spots[16:22, 9:15] = 8.0  # around the ring
    evidence = EvidenceMap("model", "ring", 0.5, spots, 16)
    with open_slide(folder / "a<b>.tif") as slide:
        slide_page.write_slide_page(folder / "page", slide, [maps], "Untrained weights.", [evidence])
        pixels = slide.read_rows(0, SIDE)
    return folder / "page", pixels


def test_tiles_are_the_slide(written):
    folder, pixels = written
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    assert names == sorted(
        ["index.html", "overlays/0.png", "overlays/1.png", "tiles/2/0_0.jpg"]
        + [f"tiles/0/{row}_{column}.jpg" for row in range(3) for column in range(3)]
        + [f"tiles/1/{row}_{column}.jpg" for row in range(2) for column in range(2)]
    )
    tile = np.asarray(Image.open(folder / "tiles" / "0" / "1_2.jpg"), dtype=float)
    expected = pixels[:, 512:1024, 1024:].permute(1, 2, 0).numpy()
    assert np.abs(tile - expected).mean() < 6  # JPEG of noise
    assert Image.open(folder / "tiles" / "2" / "0_0.jpg").size == (275, 275)
    page = (folder / "index.html").read_text()
    assert "a&lt;b&gt;.tif" in page
    assert page.count("</script>") == 1


def test_a_page_that_cannot_be_written_leaves_nothing(written, tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slide_page, "_write_overlays", failing)
    with open_slide(written[0].parent / "a<b>.tif") as slide, pytest.raises(OSError, match="No space left"):
        slide_page.write_slide_page(tmp_path / "page", slide, [], "")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_looks_like_a_place_of_the_page_stays_a_name(written, tmp_path):
    (tmp_path / "@SLIDE@.tif").symlink_to(written[0].parent / "a<b>.tif")
    with open_slide(tmp_path / "@SLIDE@.tif") as slide:
        page = slide_page.write_slide_page(tmp_path / "page", slide, [], "@TITLE@").read_text()
    assert "<title>@SLIDE@.tif</title>" in page
    assert "<p>@TITLE@ Red" in page


def test_what_a_link_leads_to_is_not_replaced(written, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "kept.txt").touch()
    (tmp_path / "page").symlink_to(tmp_path / "target")
    with open_slide(written[0].parent / "a<b>.tif") as slide, pytest.raises(OSError, match="not replaced"):
        slide_page.write_slide_page(tmp_path / "page", slide, [], "")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["kept.txt"]


def test_an_earlier_page_is_replaced(written, tmp_path):
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "old.txt").touch()
    with open_slide(written[0].parent / "a<b>.tif") as slide:
        slide_page.write_slide_page(tmp_path / "page", slide, [], "")
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == ["index.html", "overlays", "tiles"]
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def view_box(page):
    return page.locator("#view").bounding_box()


@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("viewport", [(1000, 700), (360, 740)], ids=["desk", "phone"])
def test_in_a_browser(written, browser, viewport, tmp_path):
    context = browser.new_context(viewport={"width": viewport[0], "height": viewport[1]}, has_touch=viewport[0] < 500)
    page = context.new_page()
    complaints, fetched = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto((written[0] / "index.html").as_uri())

    def state():
        return json.loads(page.get_attribute("#view", "data-state"))

    start = state()
    assert start["overlay"] == "0"
    names = page.locator("#overlay option").all_text_contents()
    assert names == ["none", "model: evidence for ring, logit 0.50", "model </script>, layer 3: cell 18,12"]
    page.wait_for_load_state("networkidle")
    page.screenshot(path=tmp_path / "evidence.png")
    shown, canvas = np.asarray(Image.open(tmp_path / "evidence.png").convert("RGB"), dtype=int), view_box(page)

    def red(x, y):  # beyond blue, at a pixel of the slide
        row, column = (canvas[axis] + (place - start[axis]) * start["scale"] for axis, place in (("y", y), ("x", x)))
        return shown[round(row), round(column), 0] - shown[round(row), round(column), 2]

    assert red(192, 304) > red(600, 304) + 50
    page.keyboard.press("+")
    zoomed = state()
    assert zoomed["scale"] == pytest.approx(1.5 * start["scale"])
    page.keyboard.press("ArrowRight")
    assert state()["x"] > zoomed["x"]
    page.keyboard.press("]")
    page.keyboard.press("o")
    assert (state()["opacity"], state()["overlay"]) == (60, "1")
    page.keyboard.press("o")
    assert state()["overlay"] == ""
    box = view_box(page)
    before, middle = state(), (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(middle[0] - 40, middle[1] - 30)
    page.mouse.up()
    assert state()["x"] == pytest.approx(before["x"] + 40 / before["scale"])
    assert state()["y"] == pytest.approx(before["y"] + 30 / before["scale"])
    page.mouse.wheel(0, -600)
    page.wait_for_function(f"JSON.parse(view.dataset.state).scale > {before['scale']}")
    assert state()["level"] == 0
    page.keyboard.press("0")
    page.keyboard.press("o")
    assert state()["scale"] == pytest.approx(start["scale"])
    page.wait_for_load_state("networkidle")
    page.screenshot(path=tmp_path / "page.png")
    shown = np.asarray(Image.open(tmp_path / "page.png").convert("RGB"), dtype=int)
    row, column = (round(value) for value in (middle[1], middle[0]))
    assert shown[row - 20 : row + 20, column - 20 : column + 20].std() > 1, "the slide must be drawn"
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport[0]
    assert complaints == []
    assert [url for url in fetched if not url.startswith("file:")] == []
    context.close()


@pytest.mark.xdist_group("browser")
def test_overlays_end_with_the_slide(written, browser, tmp_path):
    """Although their last cells reach beyond it."""
    page = browser.new_page(viewport={"width": 1000, "height": 700})
    page.goto((written[0] / "index.html").as_uri())
    for key in ["o"] + ["+"] * 6 + ["ArrowRight"] * 80:  # the right edge of the slide comes to the middle
        page.keyboard.press(key)
    page.wait_for_load_state("networkidle")
    page.screenshot(path=tmp_path / "edge.png")
    shown, box = np.asarray(Image.open(tmp_path / "edge.png").convert("RGB"), dtype=int), view_box(page)
    row = shown[round(box["y"] + box["height"] / 2)]
    assert row[480].max() > 100
    assert row[510].tolist() == [17, 17, 17]
    page.close()


def changed_by(page, keys):
    """Press keys; return what each changed in the view."""
    states = [json.loads(page.get_attribute("#view", "data-state"))]
    for key in keys:
        page.keyboard.press(key)
        page.evaluate("new Promise(requestAnimationFrame)")
        states.append(json.loads(page.get_attribute("#view", "data-state")))
    return [{name for name in old if name != "level" and old[name] != new[name]} for old, new in pairwise(states)]


@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("viewport", [(1280, 800), (390, 844)], ids=["desk", "phone"])
def test_keys_work_with_any_focus(written, browser, viewport):
    page = browser.new_page(viewport={"width": viewport[0], "height": viewport[1]})
    page.goto((written[0] / "index.html").as_uri())
    arrows, zoom = ["ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"], ["+", "-", "=", "0"]
    moves, zooms = [{"x"}, {"y"}, {"x"}, {"y"}], [{"x", "y", "scale"}] * 4
    assert changed_by(page, arrows + zoom + ["o"]) == [*moves, *zooms, {"overlay"}], "after load"
    page.locator("#view").click()
    assert changed_by(page, arrows + zoom + ["o"]) == [*moves, *zooms, {"overlay"}]
    page.locator("#in").click()
    assert changed_by(page, arrows + zoom) == moves + zooms
    page.locator("#opacity").click()
    assert changed_by(page, arrows) == [{"opacity"}] * 4
    assert changed_by(page, [*zoom, "]", "o"]) == [*zooms, {"opacity"}, {"overlay"}]
    page.locator("#overlay").focus()
    page.locator("#overlay").select_option(index=0)
    assert changed_by(page, ["ArrowDown", "ArrowUp", "m"]) == [{"overlay"}] * 3
    assert changed_by(page, [*zoom, "]", "o"]) == [*zooms, {"opacity"}, set()]
    page.locator("#overlay").click()
    page.locator("#overlay").select_option(index=2)
    assert changed_by(page, arrows + zoom) == moves + zooms, "after an overlay was picked by mouse"
    page.close()
