"""The report's page: well-formed, self-contained, safe from the names in it, complete or saying why not."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("matplotlib")

from inline_attention.report.measurement import Evidence, Run
from inline_attention.report.page import map_address, render
from inline_attention.support.figures import LIGHT
from report.written_evidence import Outline, ablation, evidence, run

HOSTILE = """<script>alert(1)</script>"'&"><img src=x onerror=alert(2)>{{ 7 * 7 }}</style></svg>"""
PART_NAMES = ["injectivity", "series", "confusion", "locality", "masking", "ablation", "cost", "curves", "answers"]


@pytest.fixture(scope="module")
def complete():
    return render(evidence(run(), run("softmax_deit_tiny", "softmax"), run("linear_deit_tiny", "linear")))


def part(page, name):
    (found,) = re.findall(rf'<section id="{name}".*?</section>', page, flags=re.DOTALL)
    return found


def test_a_complete_page_is_well_formed_and_has_every_part_in_order(complete):
    outline = Outline(complete)
    assert re.findall(r'<section id="(\w+)"', complete) == PART_NAMES
    assert outline.elements.count("h1") == 1
    assert outline.elements.count("h2") == len(PART_NAMES)
    assert "Left out" not in complete
    assert len(complete) < 1_000_000


def test_the_page_fetches_nothing(complete):
    outline = Outline(complete)
    for element, key, value in outline.attributes:
        if key in ("src", "srcset", "poster", "data", "action"):
            assert value.startswith("data:"), (element, value)
        if key == "href":
            assert value.startswith("#"), (element, value)
    assert "link" not in outline.elements
    assert not re.search(r"@import|url\(", complete)
    assert not re.search(r"https?://", complete)
    assert "default-src 'none'" in complete.replace("&#x27;", "'")


def test_every_chart_and_picture_says_what_it_shows(complete):
    for svg in re.findall(r"<svg[^>]*>", complete):
        assert re.search(r'aria-label="[^"]+"|aria-hidden="true"', svg), svg
    for image in re.findall(r"<img[^>]*>", complete):
        assert 'alt="' in image
    for name in ("series", "confusion", "locality", "masking", "cost", "curves"):
        section = part(complete, name)
        assert "<svg" in section
        assert 'role="img"' in section
        assert "<details>" in section
    for name, unit in (("cost", "MiB"), ("curves", "epoch"), ("masking", "top-1 (%)"), ("locality", "% of |w|")):
        assert unit in part(complete, name)
    for name in ("locality", "masking", "cost", "curves"):
        assert 'class="legend"' in part(complete, name)


def test_ids_are_unique_and_links_lead_somewhere(complete):
    attributes = Outline(complete).attributes
    ids = [value for _, key, value in attributes if key == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for _, key, value in attributes if key == "href"} <= set(ids)


def test_hostile_names_stay_text():
    page = render(
        evidence(
            run(label=HOSTILE, truth=HOSTILE, picture=HOSTILE),
            ablations=[ablation(HOSTILE, HOSTILE)],
            missing={"confusion": [HOSTILE], "pictures": [HOSTILE]},
            environment={"machine": HOSTILE},
        )
    )
    outline = Outline(page)
    assert page.count("</style>") == 1
    assert outline.elements.count("script") == Outline(render(evidence(run()))).elements.count("script")
    assert not [key for _, key, _ in outline.attributes if key.startswith("on")]
    assert all(
        value.startswith("data:image/png") for name, key, value in outline.attributes if (name, key) == ("img", "src")
    )


def test_what_is_missing_is_said_in_a_sentence():
    bare = Run("inline_deit_tiny", "inline", "inline_deit_tiny", "digits")
    names = ("confusion", "locality", "masking", "answers", "pictures", "curves")
    page = render(Evidence([bare], missing={name: [f"why no {name}"] for name in names}))
    Outline(page)
    for name in ("confusion", "locality", "masking", "answers", "curves"):
        assert f"Left out: why no {name}" in part(page, name)
        assert 'role="img"' not in part(page, name)
    assert 'id="ablation"' not in page
    assert 'href="#ablation"' not in page
    assert "not measured" in part(page, "cost")


def test_a_part_that_one_run_lacks_shows_the_others():
    page = render(evidence(run(), Run("bare", "linear", "linear_deit_tiny", "digits"),
                           missing={"confusion": ["bare: no checkpoint"]}))  # fmt: skip
    section = part(page, "confusion")
    assert "Left out: bare: no checkpoint" in section
    assert "<svg" in section


def test_sentences_are_made_from_the_figures():
    section = part(render(evidence(run())), "confusion")
    assert "5 % with inline_deit_tiny" in section  # 3 of 60
    masking = part(render(evidence(run())), "masking")
    assert "inline_deit_tiny 30.0 points (30.0 at random)" in masking
    assert "×4 for InLine" in part(render(evidence(run())), "cost")


def test_minus_signs_are_those_of_the_charts(complete):
    cards = part(complete, "answers").split("<details>")[0]
    assert "<span>−1.0×</span>" in cards
    assert not re.search(r">-\d", complete)


def test_maps_have_one_color_above_uniform_another_below_and_none_at_uniform():
    address = map_address(np.array([[3.0, 0.0, 1.0]]), largest=2.0)
    picture = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    above, below, none = (picture.getpixel((x, 0)) for x in range(3))
    assert "#{:02x}{:02x}{:02x}".format(*above[:3]) == LIGHT["more"]
    assert above[3] == 255
    assert "#{:02x}{:02x}{:02x}".format(*below[:3]) == LIGHT["less"]
    assert below[3] == 128
    assert none[3] == 0


def test_figures_follow_the_theme(complete):
    """Colors of figures are variables, which the page defines for light and dark."""
    figures = re.findall(r'<svg class="chart".*?</svg>', complete, flags=re.DOTALL)
    assert len(figures) >= 10
    for figure in figures:
        assert re.findall(r"#[0-9a-f]{6}", figure) == []
        assert "var(--ink)" in figure
        assert "font-family" not in figure
    used = set(re.findall(r"var\(--(\w+)\)", "".join(figures)))
    style = complete[: complete.index("</style>")]
    for name in used:
        assert style.count(f"--{name}: #") >= 2


def test_each_attention_has_one_color_everywhere(complete):
    from inline_attention.benchmark import plots
    from inline_attention.support.figures import Style

    for kind in ("inline", "softmax", "linear"):
        assert f"--{kind}: {LIGHT[kind]}" in complete
        assert Style(kind).color == LIGHT[kind]
    assert {style.kind for style, _ in plots.MODEL_STYLES.values()} == {"inline", "softmax"}
    assert {style.kind for style in plots.CONTESTANT_STYLES.values()} == {"inline", "softmax"}


def test_numbers_in_figures_are_not_cut(complete):
    from inline_attention.support.figures import Chart, Panel

    panel = Panel("", lambda axes: axes.set_xlabel("0.123456 #c85000"))
    assert "0.123456 #c85000" in Chart([panel]).svgs("a")[0][2]
