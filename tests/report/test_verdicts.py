"""Verdicts follow from the numbers: large differences tell something, small samples and noise do not."""

import math
import random

import pytest

from inline_attention.analysis.confusion import ImageConfusion
from inline_attention.analysis.masking import Hiding, MaskingResult
from inline_attention.analysis.predictions import Answer
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
    assert judge_confusion([confused("linear", linear), confused("inline", inline)]).outcome == outcome


@pytest.mark.parametrize(("images", "outcome"), [(1000, "supports"), (10, "too small to tell")])
def test_masking_needs_pictures(images, outcome):
    found = [MaskingResult(Hiding("neighbourhood", 3, "hidden"), 60.0, 90.0, images),
             MaskingResult(Hiding("random", 3, "hidden"), 70.0, 90.0, images)]  # fmt: skip
    assert judge_masking([Run("a", "inline", "a", "digits", masking=found)]).outcome == outcome


@pytest.mark.parametrize(("power", "outcome"), [(2, "supports"), (1, "too small to tell"), (0.5, "contradicts")])
def test_cost_is_judged_by_powers(power, outcome):
    points = [CostPoint(kind, n, n**p, 5, None) for n in (64, 256) for kind, p in (("softmax", power), ("inline", 1))]
    assert judge_cost(points).outcome == outcome


def test_one_run_each_says_nothing_about_seeds_and_much_about_its_pictures():
    def answered(kind, right):
        answers = [Answer(i, str(i), "a", 0.5, "a", 0.5, i < right) for i in range(300)]
        return Run(kind, kind, kind, "digits", answers=answers)

    assert judge_answers([answered("linear", 200), answered("inline", 260)]).outcome == "supports"
    assert judge_answers([answered("linear", 260), answered("inline", 261)]).outcome == "too small to tell"
    assert judge_curves([run(), run("linear_deit_tiny", "linear")]).outcome == "too small to tell"


def test_the_page_begins_with_a_summary_and_repeats_each_verdict_in_its_section():
    page = render(evidence(run(), run("linear_deit_tiny", "linear"))).replace("<wbr>", "")
    summary, rest = page.split("</header>")[0], page.split("<main>")[1]
    for name in ("injectivity", "confusion", "locality", "masking", "ablation", "cost", "curves", "answers"):
        assert f'<a href="#{name}">' in summary.split("<nav")[0], name
        section = rest[rest.index(f'<section id="{name}"') :].split("</section>")[0]
        assert section.count('class="judged"') == 1, name
    assert summary.index("95 % confidence interval") < summary.index("<nav")
