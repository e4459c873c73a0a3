"""Does a section's measurement support the argument? One rule for all sections.

A claim is a difference that should be positive. It is supported if the 95 % confidence interval of the difference (by
Student's t, over pictures, layers or seeds) is above zero, contradicted if it is below zero, and otherwise too small to
tell. Fewer than three observations never tell anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Literal

from inline_attention.ablation.tables import AblationFile, AblationResult
from inline_attention.analysis.collision_cases import InjectivityResult
from inline_attention.analysis.locality import Locality
from inline_attention.benchmark.cost import CostPoint
from inline_attention.report.measurement import Run

Outcome = Literal["supports", "contradicts", "too small to tell"]
RULE = (
    "Rule: a difference counts if its 95 % confidence interval (Student's t, over pictures, layers or seeds) does not "
    "contain zero."
)
LEAST_OBSERVATIONS = 3
# 97.5 % quantiles of Student's t by degrees of freedom; the next smaller entry counts, which is on the safe side.
STUDENT_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04,
             60: 2.00, 120: 1.98}  # fmt: skip
LEAST_EXPONENT_GAP = 0.25  # by which softmax's cost must grow faster; timings vary by less


@dataclass(frozen=True)
class Verdict:
    """A claim of the argument, what the numbers say about it, and the numbers."""

    claim: str
    outcome: Outcome
    numbers: str


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


def judge_confusion(runs: Sequence[Run]) -> Verdict | None:
    """Judge the share of confused pairs, picture by picture, of linear attention against InLine."""
    linear, inline = _one_of(runs, "linear", "confusion"), _one_of(runs, "inline", "confusion")
    if linear is None or inline is None:
        return None
    theirs, ours = ({item.image: item.percent for item in run.confusion or ()} for run in (linear, inline))
    both = [name for name in theirs if name in ours]
    difference, half_width = interval([theirs[name] - ours[name] for name in both])
    return Verdict(
        "On real pictures, linear attention confuses more query pairs than InLine",
        outcome_of(difference, half_width),
        f"{difference:+.2g} points ± {_width(half_width, '.2g')} over {len(both)} pictures",
    )


def judge_locality(runs: Sequence[Run]) -> Verdict | None:
    """Judge the share of attention near a token, layer by layer, of InLine with its 3×3 term against linear."""
    linear, inline = _one_of(runs, "linear", "locality"), _one_of(runs, "inline", "locality")
    if linear is None or inline is None:
        return None
    ours, theirs = _shares(inline.locality or (), "with"), _shares(linear.locality or (), "without")
    layers = sorted(ours.keys() & theirs.keys())
    difference, half_width = interval([100 * (ours[layer] - theirs[layer]) for layer in layers])
    return Verdict(
        "InLine with its 3×3 term attends to the neighborhood more than linear attention",
        outcome_of(difference, half_width),
        f"{difference:+.1f} points ± {_width(half_width)} over {len(layers)} layers",
    )


def judge_masking(runs: Sequence[Run]) -> Verdict | None:
    """Judge whether InLine loses more without the neighborhood than without as many random tokens."""
    run = _one_of(runs, "inline", "masking")
    if run is None:
        return None
    found = {
        item.hiding.where: item for item in reversed(run.masking or ()) if item.hiding.local_term != "kept"
    }  # of the smallest side
    if not {"neighbourhood", "random"} <= found.keys():
        return None
    near, random = found["neighbourhood"], found["random"]
    # Both are of the same pictures; as if they were not, the error is larger, which is on the safe side.
    error = math.hypot(near.standard_error, random.standard_error)
    half_width = _quantile(near.images - 1) * error if near.images >= LEAST_OBSERVATIONS else math.inf
    difference = near.drop - random.drop
    return Verdict(
        "Hiding the neighborhood costs InLine more than hiding as many random tokens",
        outcome_of(difference, half_width),
        f"{difference:+.1f} points ± {_width(half_width)} over {near.images} pictures",
    )


def judge_ablation(file: AblationFile) -> Verdict | None:
    """Judge whether the highest mean of an ablation differs from the lowest, over seeds."""
    means = [result for result in file.results if result.top1_mean is not None]
    if len(means) < 2:
        return None
    best, worst = (pick(means, key=lambda result: result.top1_mean or 0.0) for pick in (max, min))
    difference, half_width = unpaired_interval(_seeds(best), _seeds(worst))
    return Verdict(
        f"{file.title}: {best.label} is better than {worst.label}",
        outcome_of(difference, half_width),
        f"{difference:+.1f} points ± {_width(half_width)} over {best.seeds} and {worst.seeds} seeds",
    )


def judge_cost(points: Sequence[CostPoint]) -> Verdict | None:
    """Judge the power of the number of tokens that time grows with, between the smallest and the largest size."""
    powers: dict[str, float] = {}
    for kind in ("softmax", "inline"):
        times = {point.tokens: point.milliseconds for point in points if point.kind == kind and point.milliseconds}
        if len(times) > 1:
            first, last = min(times), max(times)
            powers[kind] = math.log((times[last] or 1) / (times[first] or 1)) / math.log(last / first)
    if len(powers) < 2:
        return None
    gap = powers["softmax"] - powers["inline"]
    outcome = outcome_of(gap, LEAST_EXPONENT_GAP)
    return Verdict(
        "Softmax's time grows with a higher power of the number of tokens than InLine's",
        outcome,
        f"N^{powers['softmax']:.2f} and N^{powers['inline']:.2f}; a gap of {LEAST_EXPONENT_GAP} counts",
    )


def judge_curves(runs: Sequence[Run]) -> Verdict | None:
    """Judge the accuracy of several runs of InLine and linear attention: one run each says nothing about seeds."""
    ends: dict[str, list[float]] = {"inline": [], "linear": []}
    for run in runs:
        if run.kind in ends and run.curves is not None and run.curves.epochs:
            top1 = run.curves.epochs[-1].best_known_top1
            ends[run.kind] += [] if top1 is None else [top1]
    if not all(ends.values()):
        return None
    difference, half_width = unpaired_interval(ends["inline"], ends["linear"])
    return Verdict(
        "InLine ends at a higher accuracy than linear attention, whatever the seed",
        outcome_of(difference, half_width),
        f"{difference:+.1f} points ± {_width(half_width)} over {len(ends['inline'])} and {len(ends['linear'])} runs",
    )


def judge_answers(runs: Sequence[Run]) -> Verdict | None:
    """Judge the accuracy on the same pictures of one run of InLine and one of linear attention."""
    linear, inline = _one_of(runs, "linear", "answers"), _one_of(runs, "inline", "answers")
    if linear is None or inline is None:
        return None
    theirs, ours = ({answer.index: answer.is_right for answer in run.answers or ()} for run in (linear, inline))
    both = [index for index in theirs if index in ours]
    difference, half_width = interval([100.0 * (ours[index] - theirs[index]) for index in both])
    return Verdict(
        "This InLine model answers more pictures rightly than this linear one",
        outcome_of(difference, half_width),
        f"{difference:+.1f} points ± {_width(half_width)} over {len(both)} pictures",
    )


def _one_of(runs: Sequence[Run], kind: str, measurement: str) -> Run | None:
    """Return the first run of a kind of attention that has a measurement."""
    return next((run for run in runs if run.kind == kind and getattr(run, measurement)), None)


def _shares(items: Sequence[Locality], term: str) -> Mapping[int, float]:
    """Return the share of attention in the smallest neighborhood by layer."""
    side = min(item.side for item in items)
    return {item.layer: item.share for item in items if (item.side, item.local_term) == (side, term)}


def _seeds(result: AblationResult) -> list[float]:
    return [outcome.top1 for outcome in result.runs.values() if outcome.top1 is not None]


def _quantile(degrees: int) -> float:
    return STUDENT_T[max(known for known in STUDENT_T if known <= max(degrees, 1))]


def _width(half_width: float, form: str = ".1f") -> str:
    return "unknown" if math.isinf(half_width) else f"{half_width:{form}}"
