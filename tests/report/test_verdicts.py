"""Verdicts follow from the numbers: large differences tell something, small samples and noise do not."""

import math
import random

import pytest

from inline_attention.analysis.confusion import ImageConfusion
from inline_attention.analysis.masking import Hiding, MaskingResult
from inline_attention.analysis.predictions import Answer
from inline_attention.analysis.softmax_series import SeriesCurves
from inline_attention.benchmark.cost import CostPoint
from inline_attention.report.measurement import Run
from inline_attention.report.page import render
from inline_attention.report.verdicts import (
    interval,
    judge_answers,
    judge_confusion,
    judge_cost,
    judge_curves,
    judge_masking,
    judge_series,
    outcome_of,
    unpaired_interval,
)
from report.written_evidence import evidence, run


def test_intervals_are_student_s():
    mean, half_width = interval([1.0, 2.0, 3.0, 4.0])
    assert (mean, half_width) == (2.5, pytest.approx(3.18 * math.sqrt(5 / 3) / 2))
    assert interval([5.0, 5.0])[1] == math.inf
    assert unpaired_interval([1.0, 2.0, 3.0], [1.0])[1] == math.inf


def test_the_interval_covers_the_truth_as_often_as_it_says():
    numbers = random.Random(0)
    covered = 0
    for _ in range(2000):
        mean, half_width = interval([numbers.gauss(1.0, 2.0) for _ in range(5)])
        covered += abs(mean - 1.0) <= half_width
    assert 0.93 < covered / 2000 < 0.97


@pytest.mark.parametrize(
    ("difference", "half_width", "outcome"),
    [(2, 1, "supports"), (-2, 1, "contradicts"), (1, 2, "too small to tell"), (0, 0, "too small to tell"),
     (9, math.inf, "too small to tell")],
)  # fmt: skip
def test_an_outcome_needs_an_interval_without_zero(difference, half_width, outcome):
    assert outcome_of(difference, half_width) == outcome


def confused(kind, shares):
    return Run(kind, kind, kind, "digits", confusion=[ImageConfusion(str(i), 100, n) for i, n in enumerate(shares)])


@pytest.mark.parametrize(
    ("linear", "inline", "outcome"),
    [
        ([20, 21, 19, 22], [1, 2, 0, 3], "supports"),
        ([1, 2, 0, 3], [20, 21, 19, 22], "contradicts"),
        ([1, 30, 2, 9], [3, 20, 9, 8], "too small to tell"),
        ([20, 21], [1, 2], "too small to tell"),
    ],
)
def test_confusion_is_judged_picture_by_picture(linear, inline, outcome):
    runs = [confused("linear", linear), confused("inline", inline)]
    assert [verdict.outcome for verdict in judge_confusion(runs)] == [outcome, "not tested"]


def test_softmax_that_confuses_most_contradicts_the_argument():
    runs = [confused("linear", [1, 2, 0, 3]), confused("softmax", [20, 21, 19, 22])]
    verdict = judge_confusion(runs)[1]
    assert (verdict.outcome, verdict.numbers[:10]) == ("contradicts", "−19 points")


@pytest.mark.parametrize(("images", "outcome"), [(1000, "supports"), (10, "too small to tell")])
def test_masking_needs_pictures(images, outcome):
    found = [MaskingResult(Hiding("neighborhood", 3, "hidden"), 60.0, 90.0, images),
             MaskingResult(Hiding("random", 3, "hidden"), 70.0, 90.0, images)]  # fmt: skip
    assert judge_masking([Run("a", "inline", "a", "digits", masking=found)]).outcome == outcome


@pytest.mark.parametrize(("power", "outcome"), [(2, "supports"), (1, "too small to tell"), (0.5, "contradicts")])
def test_cost_is_judged_by_powers(power, outcome):
    points = [CostPoint(kind, n, n**p, 5, None) for n in (64, 256) for kind, p in (("softmax", power), ("inline", 1))]
    time, memory = judge_cost(points)
    assert (time.outcome, memory.outcome) == (outcome, "not tested")


@pytest.mark.parametrize(
    ("softmax", "inline", "outcome"),
    [(10.9, 13.2, "contradicts"), (13.2, 10.9, "supports"), (10.0, 10.2, "too small to tell")],
)
def test_memory_is_judged_at_the_largest_size(softmax, inline, outcome):
    sizes = {64: (9.0, 1.0), 256: (softmax, inline)}
    points = [
        CostPoint(kind, tokens, 1.0, 5, round(mebibytes * 2**20))
        for tokens, pair in sizes.items()
        for kind, mebibytes in zip(("softmax", "inline"), pair, strict=True)
    ]
    verdict = judge_cost(points)[1]
    assert verdict.outcome == outcome
    assert f"{inline} and {softmax} MiB at 256 tokens" in verdict.numbers


def test_one_run_each_says_nothing_about_seeds_and_much_about_its_pictures():
    def answered(kind, right):
        answers = [Answer(i, str(i), "a", 0.5, "a", 0.5, i < right) for i in range(300)]
        return Run(kind, kind, kind, "digits", answers=answers)

    assert judge_answers([answered("linear", 200), answered("inline", 260)]).outcome == "supports"
    assert judge_answers([answered("linear", 260), answered("inline", 261)]).outcome == "too small to tell"
    verdict = judge_curves([run(), run("linear_deit_tiny", "linear")])
    assert verdict.outcome == "too small to tell"
    assert verdict.numbers == "+0.0 points over 1 InLine and 1 linear run; at least 3 of each are needed"


SECTIONS = ("injectivity", "confusion", "locality", "masking", "ablation", "cost", "curves", "answers")


@pytest.mark.parametrize(
    "given",
    [evidence(run(), run("linear_deit_tiny", "linear")), evidence(run()),
     evidence(Run("a", "softmax", "a", "digits"), cost=[])],
    ids=["twins", "one run", "nothing measured"],
)  # fmt: skip
def test_the_summary_has_a_row_for_each_verdict_and_each_section_ends_with_its_own(given):
    page = render(given).replace("<wbr>", "")
    summary, rest = page.split("</header>")[0], page.split("<main>")[1]
    assert "95 % confidence interval" in summary
    for name in SECTIONS:
        section = rest[rest.index(f'<section id="{name}"') :].split("</section>")[0]
        judged = 2 if name in ("confusion", "cost") else 1
        assert section.count('class="judged"') == summary.count(f'<a href="#{name}">') == judged, name
        assert section.rstrip().endswith("</p>")


def test_a_verdict_on_one_run_says_what_is_missing():
    page = render(evidence(run())).replace("<wbr>", "")
    missing = "– not tested</span>: needs a linear run of the same model. The claim: "
    for name in ("confusion", "locality", "curves", "answers"):
        assert missing in page[page.index(f'<section id="{name}"') :].split("</section>")[0], name
    unmeasured = [run(), Run("twin", "linear", "linear_deit_tiny", "digits")]
    assert judge_answers(unmeasured).numbers == "needs this measurement of twin"


def test_series_is_judged_while_scores_are_small():
    def curves(inline):
        outputs = {"softmax": (0.0, 0.4, 9.0), "inline": (0.0, inline, 1.0), "linear": (5.0, 1.0, 9.0)}
        return SeriesCurves("keys", (0.0, 0.5, 2.0), outputs)

    verdict = judge_series([curves(0.5), curves(0.6)])
    assert verdict.outcome == "supports"
    assert verdict.numbers.startswith("largest differences 0.2 and 0.6,")
    assert judge_series([curves(0.5), curves(1.1)]).outcome == "contradicts"


def test_every_section_ends_with_a_verdict():
    page = render(evidence(run()))
    for section in page.split("<section")[1:]:
        assert 'class="judged"' in section, section[:100]
