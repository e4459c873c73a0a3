"""The report's page: well-formed, self-contained, safe from the names in it, complete or saying why not."""

import math
import re
from html.parser import HTMLParser

import pytest
import torch

from inline_attention.analysis.training_curves import EpochFigures, TrainingCurves
from inline_attention.benchmark.cost import CostPoint
from inline_attention.report import charts
from inline_attention.report.evidence import Evidence, Run
from inline_attention.report.html import Html, join, table, tag
from inline_attention.report.page import render
from inline_attention.report.pictures import map_address

HOSTILE = """<script>alert(1)</script>"'&"><img src=x onerror=alert(2)>"""
VOID = {"meta", "img", "input", "br"}
PART_NAMES = ["injectivity", "confusion", "locality", "masking", "ablation", "cost", "curves", "answers"]


class Outline(HTMLParser):
    """Notes elements, and fails on one that is not closed where it was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.attributes = [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, name, attributes):
        self.elements.append(name)
        self.attributes += [(name, key, value or "") for key, value in attributes]
        assert len({key for key, _ in attributes}) == len(attributes), f"<{name}> has an attribute twice"
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name, name


def curves(label):
    epochs = tuple(EpochFigures(epoch, 2 / epoch, 1.5, 10.0 * epoch, None) for epoch in (1, 2, 3))
    return TrainingCurves(label, label, "digits", 3, epochs)


def run(label="inline_deit_tiny", kind="inline", truth="cat", picture="cat.png"):
    """A run of which everything was measured."""
    terms = ("hidden", "kept") if kind == "inline" else ("none",)
    masking = [{"where": "nothing", "side": 0, "local_term": terms[-1], "top1": 90.0, "drop": 0.0}] + [
        {"where": where, "side": side, "local_term": term, "top1": 90.0 - 10 * side, "drop": 10.0 * side}
        for term in terms for side in (3, 5) for where in ("neighbourhood", "random")
    ]  # fmt: skip
    answer = {"index": 4, "truth": truth, "guess": "dog", "probability": 0.7, "truth_probability": 0.2}
    return Run(
        label=label,
        style=charts.Style(kind),
        model_name=f"{kind}_deit_tiny",
        dataset="digits",
        curves=curves(label),
        found={
            "confusion": {"tolerance": 0.01, "images": [{"image": picture, "confused": 3, "distinct": 60}]},
            "locality": [
                {"layer": layer, "side": side, "local_term": term, "share": 0.4, "uniform": 0.3}
                for layer in (0, 1) for side in (3, 5) for term in ("without", "with")[: 2 if kind == "inline" else 1]
            ],
            "masking": [row | {"baseline_top1": 90.0, "standard_error": 1.0, "images": 50} for row in masking],
            "answers": [answer],
        },
        pictures=[{"index": 4, "name": picture, "picture": "data:image/png;base64,AAAA", "layer": 1, "token": [0, 1],
                   "weights": [[-1.0, 2.0], [0.0, 3.0]]}],
    )  # fmt: skip


def ablation(title="Ablation of digits"):
    environment = {"machine": "a CPU", "gpu": "none", "torch": "2.11", "commit": "abc", "date": "2026-01-01"}
    figures = {"parameters": 1e6, "macs": 2e6, "images_per_second": 10.0, "note": ""}
    results = [
        {"label": name, "values": {"feature_map": name}, "top1_mean": 70.0, "top1_std": 1.0, "seeds": 2, **figures,
         "runs": {"0": {"top1": 69.0}, "1": {"top1": 71.0}}}
        for name in ("relu", "identity")
    ]  # fmt: skip
    missing = {"values": {"feature_map": "exp"}, "top1_mean": None, "top1_std": None, "seeds": 0, "runs": {}}
    nothing = {"parameters": None, "macs": None, "images_per_second": None, "note": "diverged"}
    return {"title": title, "environment": environment, "results": [*results, missing | nothing]}


def evidence(*runs, **fields):
    points = [CostPoint(kind, n, n / 100, 5, n * 1000) for n in (64, 256) for kind in ("softmax", "linear", "inline")]
    return Evidence(list(runs), **({"cost": points, "cost_machine": "a CPU", "ablations": [ablation()]} | fields))


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
    assert set(re.findall(r"https?://[^\s\"'<]+", complete)) == {"http://www.w3.org/2000/svg"}  # a name, no address
    assert "default-src 'none'" in complete.replace("&#x27;", "'")


def test_every_chart_and_picture_says_what_it_shows(complete):
    for svg in re.findall(r"<svg[^>]*>", complete):
        assert re.search(r'aria-label="[^"]+"|aria-hidden="true"', svg), svg
    for image in re.findall(r"<img[^>]*>", complete):
        assert 'alt="' in image
    for name in ("confusion", "locality", "masking", "cost", "curves"):
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
            ablations=[ablation(HOSTILE)],
            missing={"confusion": [HOSTILE], "maps": [HOSTILE]},
            environment={"machine": HOSTILE},
        )
    )
    outline = Outline(page)
    assert outline.elements.count("script") == Outline(render(evidence(run()))).elements.count("script")
    assert not [key for _, key, _ in outline.attributes if key.startswith("on")]
    assert all(
        value.startswith("data:image/png") for name, key, value in outline.attributes if (name, key) == ("img", "src")
    )


def test_what_is_missing_is_said_in_a_sentence():
    bare = Run("inline_deit_tiny", charts.Style("inline"), "inline_deit_tiny", "digits")
    names = ("confusion", "locality", "masking", "answers", "maps", "curves")
    page = render(Evidence([bare], missing={name: [f"why no {name}"] for name in names}))
    Outline(page)
    for name in ("confusion", "locality", "masking", "answers", "curves"):
        assert f"Left out: why no {name}" in part(page, name)
        assert 'role="img"' not in part(page, name)
    assert "No ablation was given" in part(page, "ablation")
    assert "not measured" in part(page, "cost")


def test_a_part_that_one_run_lacks_shows_the_others():
    page = render(evidence(run(), Run("bare", charts.Style("linear"), "linear_deit_tiny", "digits"),
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


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "a < b", tag("b", '"')) == "<p>a &lt; b<b>&quot;</b></p>"
    assert tag("p", class_='"><i>', hidden=True, title=None) == '<p class="&quot;&gt;&lt;i&gt;" hidden=""></p>'
    assert join(["<", Html("<br>"), None]) == "&lt;<br>"
    assert tag("circle", cx=1.23456, cy=2.0) == '<circle cx="1.23" cy="2"></circle>'
    assert "<td class=\"number\">&lt;1</td>" in table(["a", "b"], [["x", "<1"]], caption="c")  # fmt: skip


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [0.003, 0.0071], [12.0, 99.7], [-3.0, 40_000.0], []])
def test_axes_hold_their_values_with_few_round_ticks(values):
    scale = charts.linear_scale("%", values)
    assert all(scale.low <= value <= scale.high for value in values)
    assert 2 <= len(scale.ticks) <= 7
    assert len({text for _, text in scale.ticks}) == len(scale.ticks)
    assert all(math.isfinite(scale.place(value, 0, 100)) for value in values)


def test_epochs_are_whole():
    scale = charts.linear_scale("epoch", [1.0, 2.0], zero=True, whole=True)
    assert [text for _, text in scale.ticks] == ["0", "1", "2"]


def test_a_percentage_does_not_go_beyond_a_hundred():
    assert charts.linear_scale("%", [97.3, 99.9], percent=True).high <= 100
    assert charts.linear_scale("%", [100.0], zero=True, percent=True).ticks[-1] == (100.0, "100")


def test_names_too_long_for_a_chart_are_cut_and_shown_in_full_when_pointed_at():
    long = "a run with a name that goes on and on, well beyond what fits " * 2
    row = charts.DotRow(long, charts.Style("inline"), [1.0], 1.0, "1.0")
    drawn = charts.dot_rows([row], charts.linear_scale("%", [1.0]), description="d")
    (label,) = re.findall(r"</title>([^<]*…)</text>", drawn)
    assert len(label) < 50
    assert f"<title>{long}</title>" in drawn


def test_logarithmic_axes_are_in_powers_of_ten():
    scale = charts.logarithmic_scale("ms", [0.3, 40.0])
    assert [text for _, text in scale.ticks] == ["0.1", "1", "10", "100"]
    assert scale.place(10.0, 0, 3) == pytest.approx(2)


def test_maps_are_orange_above_zero_and_blue_below_and_clear_at_zero():
    import base64
    import io

    from PIL import Image

    address = map_address(torch.tensor([[2.0, -1.0, 0.0]]), largest=2.0)
    picture = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    above, below, none = (picture.getpixel((x, 0)) for x in range(3))
    assert above == (213, 94, 0, 255)
    assert below[:3] == (0, 114, 178)
    assert below[3] == 128
    assert none[3] == 0
