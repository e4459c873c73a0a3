"""Does a section's measurement support the argument? One rule for all sections.

A claim is a difference that should be positive. It is supported if the 95 % confidence interval of the difference (by
Student's t, over pictures, layers or seeds) is above zero, contradicted if it is below zero, and otherwise too small to
tell. Fewer than three observations never tell anything. A claim without the runs it needs is not tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any, Literal

from inline_attention.ablation.tables import AblationFile
from inline_attention.analysis.collision_cases import InjectivityResult
from inline_attention.analysis.softmax_series import SeriesCurves
from inline_attention.benchmark.cost import CostPoint
from inline_attention.report.measurement import Run
from inline_attention.support.figures import KIND_LABELS

Outcome = Literal["supports", "contradicts", "too small to tell", "not tested"]
RULE = (
    "Rule: a difference counts if its 95 % confidence interval (Student's t, over pictures, layers or seeds) does not "
    "contain zero."
)
LEAST_OBSERVATIONS = 3
# 97.5 % quantiles of Student's t by degrees of freedom; the next smaller entry counts, which is on the safe side.
STUDENT_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04,
             60: 2.00, 120: 1.98}  # fmt: skip
SMALL_SCORES = 0.5  # standard deviation of scores up to which softmax's series is judged
LEAST_EXPONENT_GAP = 0.25  # by which softmax's cost must grow faster; timings vary by less
LEAST_MEMORY_RATIO = 1.1  # between memories that differ; the system counts in steps
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Verdict:
    """A claim of the argument, what the numbers say about it, and the numbers."""

    claim: str
    outcome: Outcome
    numbers: str  # what is missing, if the claim is not tested


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half width of the 95 % interval of paired differences."""
    if len(values) < LEAST_OBSERVATIONS:
        return fmean(values) if values else 0.0, math.inf
    return fmean(values), _quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def unpaired_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the difference of means and the half width of its 95 % interval, without assuming equal variances."""
    difference = (fmean(first) if first else 0.0) - (fmean(second) if second else 0.0)
    if min(len(first), len(second)) < LEAST_OBSERVATIONS:
        return difference, math.inf
    error = math.sqrt(variance(first) / len(first) + variance(second) / len(second))
    return difference, _quantile(min(len(first), len(second)) - 1) * error


def outcome_of(difference: float, half_width: float) -> Outcome:
    """Return what a difference says about the claim that it is positive."""
    if not abs(difference) > half_width:
        return "too small to tell"
    return "supports" if difference > 0 else "contradicts"


def judge_injectivity(results: Sequence[InjectivityResult]) -> Verdict:
    """Judge constructed queries, which are exact: one collision is a proof, and needs no statistics."""
    collided = {result.kind for result in results if result.verdict == "collide"}
    names = ", ".join(sorted(collided)) or "none"
    return Verdict(
        "Linear attention gives some different queries the same weights; softmax and InLine do not",
        "supports" if collided == {"linear"} else "contradicts",
        f"constructed queries collide under: {names}",
    )


def judge_series(curves: Sequence[SeriesCurves]) -> Verdict:
    """Judge the largest difference from softmax's output while scores are small, which is exact like the queries."""

    def largest(item: SeriesCurves, kind: str) -> float:
        values = zip(item.sizes, item.outputs[kind], item.outputs["softmax"], strict=True)
        return max(abs(ours - softmax) for size, ours, softmax in values if 0 < size <= SMALL_SCORES)

    inline, linear = ([largest(item, kind) for item in curves] for kind in ("inline", "linear"))
    return Verdict(
        "While scores are small, InLine's output is closer to softmax's than linear attention's is",
        "supports" if all(ours < theirs for ours, theirs in zip(inline, linear, strict=True)) else "contradicts",
        f"largest differences {max(inline):.2g} and {max(linear):.2g}, for scores of a standard deviation up to "
        f"{SMALL_SCORES}",
    )


def judge_confusion(runs: Sequence[Run]) -> list[Verdict]:
    """Judge the share of confused pairs, picture by picture, of linear attention against InLine and against softmax."""
    claim = "On real pictures, linear attention confuses more query pairs than"
    return [
        _paired(
            f"{claim} {KIND_LABELS[kind]}", runs, ("linear", kind), "confusion", "pictures",
            lambda run: {item.image: item.percent for item in run.confusion or ()}, form=".2g",
        )
        for kind in ("inline", "softmax")
    ]  # fmt: skip


def judge_locality(runs: Sequence[Run]) -> Verdict:
    """Judge the share of attention near a token, layer by layer, of InLine with its 3×3 term against linear."""

    def percents(run: Run) -> dict[int, float]:
        items, term = run.locality or (), "with" if run.kind == "inline" else "without"
        side = min(item.side for item in items)
        return {item.layer: 100 * item.share for item in items if (item.side, item.local_term) == (side, term)}

    claim = "InLine with its 3×3 term attends to the neighborhood more than linear attention"
    return _paired(claim, runs, ("inline", "linear"), "locality", "layers", percents)


def judge_masking(runs: Sequence[Run]) -> Verdict:
    """Judge whether InLine loses more without the neighborhood than without as many random tokens."""
    claim = "Hiding the neighborhood costs InLine more than hiding as many random tokens"
    measured = _runs_of(runs, ("inline",), "masking")
    if isinstance(measured, str):
        return Verdict(claim, "not tested", measured)
    found = {
        item.hiding.where: item for item in reversed(measured[0].masking or ()) if item.hiding.local_term != "kept"
    }  # of the smallest side
    if not {"neighborhood", "random"} <= found.keys():
        return Verdict(claim, "not tested", "needs a neighborhood smaller than the token grid")
    near, random = found["neighborhood"], found["random"]
    # Both are of the same pictures; as if they were not, the error is larger, which is on the safe side.
    error = math.hypot(near.standard_error, random.standard_error)
    half_width = _quantile(near.images - 1) * error if near.images >= LEAST_OBSERVATIONS else math.inf
    return _judged(claim, (near.drop - random.drop, half_width), f"{near.images} pictures")


def judge_ablation(file: AblationFile) -> Verdict:
    """Judge whether the highest mean of an ablation differs from the lowest, over seeds."""
    means = [result for result in file.results if result.top1_mean is not None]
    if len(means) < 2:
        claim = f"{file.title}: one variant is better than another"
        return Verdict(claim, "not tested", "needs two variants with results")
    best, worst = (pick(means, key=lambda result: result.top1_mean or 0.0) for pick in (max, min))
    claim = f"{file.title}: {best.label} is better than {worst.label}"
    top1 = ([run.top1 for run in result.runs.values() if run.top1 is not None] for result in (best, worst))
    return _judged(claim, unpaired_interval(*top1), f"{best.seeds} and {worst.seeds} seeds")


def judge_cost(points: Sequence[CostPoint]) -> list[Verdict]:
    """Judge the power of the number of tokens that time grows with, and the memory at the largest size."""
    times, memories = (
        {
            kind: {point.tokens: value for point in points if point.kind == kind and (value := getattr(point, name))}
            for kind in ("softmax", "inline")
        }
        for name in ("milliseconds", "peak_bytes")
    )
    claim = "Softmax's time grows with a higher power of the number of tokens than InLine's"
    if min(map(len, times.values())) < 2:
        time = Verdict(claim, "not tested", "needs the times of softmax and InLine at two sizes")
    else:
        softmax, inline = (
            math.log(found[max(found)] / found[min(found)]) / math.log(max(found) / min(found))
            for found in times.values()
        )
        numbers = f"N^{softmax:.2f} and N^{inline:.2f}; a gap of {LEAST_EXPONENT_GAP} counts"
        time = Verdict(claim, outcome_of(softmax - inline, LEAST_EXPONENT_GAP), numbers)
    claim = "InLine takes less memory than softmax (SDPA) at the largest size"
    sizes = memories["softmax"].keys() & memories["inline"].keys()
    if not sizes:
        return [time, Verdict(claim, "not tested", "needs the peak memory of softmax and InLine at one size")]
    softmax, inline = (found[max(sizes)] for found in memories.values())
    numbers = (
        f"{inline / MEBIBYTE:.1f} and {softmax / MEBIBYTE:.1f} MiB at {max(sizes):,} tokens; "
        f"a factor of {LEAST_MEMORY_RATIO} counts"
    )
    return [time, Verdict(claim, outcome_of(math.log(softmax / inline), math.log(LEAST_MEMORY_RATIO)), numbers)]


def judge_curves(runs: Sequence[Run]) -> Verdict:
    """Judge the accuracy of several runs of InLine and linear attention: one run each says nothing about seeds."""
    ends: dict[str, list[float]] = {"inline": [], "linear": []}
    for run in runs:
        if run.kind in ends and run.curves is not None and run.curves.epochs:
            top1 = run.curves.epochs[-1].best_known_top1
            ends[run.kind] += [] if top1 is None else [top1]
    claim = "InLine ends at a higher accuracy than linear attention, whatever the seed"
    if not all(ends.values()):
        lacking = _runs_of(runs, ("linear", "inline"), "curves")
        return Verdict(claim, "not tested", lacking if isinstance(lacking, str) else "needs accuracies of both runs")
    over = f"{len(ends['inline'])} InLine and {len(ends['linear'])} linear run{'s' * (len(ends['linear']) > 1)}"
    return _judged(claim, unpaired_interval(ends["inline"], ends["linear"]), over)


def judge_answers(runs: Sequence[Run]) -> Verdict:
    """Judge the accuracy on the same pictures of one run of InLine and one of linear attention."""
    claim = "This InLine model classifies more pictures correctly than this linear one"
    return _paired(
        claim, runs, ("inline", "linear"), "answers", "pictures",
        lambda run: {answer.index: 100.0 * answer.is_right for answer in run.answers or ()},
    )  # fmt: skip


def _paired(
    claim: str,
    runs: Sequence[Run],
    kinds: tuple[str, str],
    measurement: str,
    observations: str,
    percents: Callable[[Run], Mapping[Any, float]],
    form: str = ".1f",
) -> Verdict:
    """Judge the percents of the first kind of attention minus those of the second, by picture or layer."""
    compared = _runs_of(runs, kinds, measurement)
    if isinstance(compared, str):
        return Verdict(claim, "not tested", compared)
    first, second = map(percents, compared)
    differences = [value - second[key] for key, value in first.items() if key in second]
    return _judged(claim, interval(differences), f"{len(differences)} {observations}", form)


def _runs_of(runs: Sequence[Run], kinds: Sequence[str], measurement: str) -> list[Run] | str:
    """Return the first run of each kind of attention that has a measurement, or a sentence on what is missing."""
    found: list[Run] = []
    for kind in kinds:
        of_kind = [run for run in runs if run.kind == kind]
        measured = [run for run in of_kind if getattr(run, measurement)]
        if not of_kind:
            return f"needs {'an' if kind == 'inline' else 'a'} {KIND_LABELS[kind]} run of the same model"
        if not measured:
            return f"needs this measurement of {of_kind[0].label}"
        found.append(measured[0])
    return found


def _quantile(degrees: int) -> float:
    return STUDENT_T[max(known for known in STUDENT_T if known <= max(degrees, 1))]


def _judged(claim: str, found: tuple[float, float], over: str, form: str = ".1f") -> Verdict:
    """Return the verdict on a difference with its half width, and the observations."""
    difference, half_width = found
    points = f"{difference:+{form}} points".replace("-", "−")
    if math.isinf(half_width):
        each = "of each " if " and " in over else ""
        numbers = f"{points} over {over}; at least {LEAST_OBSERVATIONS} {each}are needed"
    else:
        numbers = f"{points} ± {half_width:{form}} over {over}"
    return Verdict(claim, outcome_of(*found), numbers)
