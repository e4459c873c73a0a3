"""The report as one HTML page: the numbers, figures and tables that the Jinja2 template `page.html` puts into words.

The template escapes all text. Only our own figures are inserted as markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean, median
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape
from PIL import Image, ImageColor

from inline_attention.ablation.tables import AblationFile, ablation_panel, mean_and_spread, text_rows
from inline_attention.analysis.collision_cases import COLLISION_TOLERANCE, KEYS, collision_cases, measure_injectivity
from inline_attention.analysis.confusion import TOLERANCE, ImageConfusion, confusion_panel
from inline_attention.analysis.locality import Locality, locality_chart
from inline_attention.analysis.masking import TERM_LABELS, WHERE_LABELS, MaskingResult, masking_chart
from inline_attention.analysis.softmax_series import SMALL_PRINT, measure_series, series_chart
from inline_attention.analysis.training_curves import TrainingCurves, curves_chart
from inline_attention.benchmark.cost import ATTENTIONS, HEAD_DIM, HEADS, cost_chart
from inline_attention.ops.call import SMALLEST_MEAN_SCORE
from inline_attention.report import verdicts
from inline_attention.report.measurement import Evidence, Run, png_address
from inline_attention.support.figures import DARK, KIND_LABELS, LIGHT, Chart, Style, numbered_styles
from inline_attention.support.text import number, printable

LEAST_FULL = 2.0  # times uniform: the difference from uniform of full color, unless a larger one exists


def render(evidence: Evidence) -> str:
    """Return the page's HTML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("inline_attention.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    styles = numbered_styles({run.label: run.kind for run in evidence.runs})
    missing = {name: [f"Left out: {reason}" for reason in reasons] for name, reasons in evidence.missing.items()}
    missing["answers"] = list(dict.fromkeys(missing.get("answers", []) + missing.get("pictures", [])))
    environment.filters["breakable"] = _breakable
    runs = evidence.runs
    confusion, locality, masking = (
        {run.label: found for run in runs if (found := getattr(run, name))}
        for name in ("confusion", "locality", "masking")
    )
    curves = [run.curves for run in runs if run.curves is not None]
    judged = {
        "injectivity": [verdicts.judge_injectivity(measure_injectivity())],
        "series": [verdicts.judge_series(_series_curves())],
        "confusion": verdicts.judge_confusion(runs),
        "locality": [verdicts.judge_locality(runs)],
        "masking": [verdicts.judge_masking(runs)],
        "ablation": [verdicts.judge_ablation(file) for file in evidence.ablations],
        "cost": verdicts.judge_cost(evidence.cost),
        "curves": [verdicts.judge_curves(runs)],
        "answers": [verdicts.judge_answers(runs)],
    }
    page = environment.get_template("page.html").render(
        light=LIGHT,
        dark=DARK,
        labels=KIND_LABELS,
        runs=_run_rows(runs),
        rule=verdicts.RULE,
        verdicts=judged,
        sections={
            "injectivity": _injectivity(),
            "series": _series(),
            "confusion": confusion and _confusion(confusion, styles),
            "locality": locality and _locality(locality, styles),
            "masking": masking and _masking(masking),
            "ablation": evidence.ablations and _ablation(evidence.ablations),
            "cost": _cost(evidence),
            "curves": curves and _curves(curves, styles),
            "answers": any(run.shown for run in runs) and _answers(runs, styles),
        },
        missing=missing,
        facts=_facts(evidence.environment, ("machine", "gpu", "timm", "inline_attention", "commit", "date")),
    )
    return f"{page.strip()}\n"


def _run_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row per run; the model is left out if it is the label of all."""
    rows = []
    for run in runs:
        epochs = [] if run.curves is None else run.curves.epochs
        top1 = number(epochs[-1].best_known_top1 if epochs else None, 2)
        rows.append([run.label, top1, str(len(epochs)), run.dataset, run.model_name])
    return [row[:-1] for row in rows] if all(run.label == run.model_name for run in runs) else rows


def _injectivity() -> dict[str, Any]:
    query = [float(value) for value in collision_cases()[0].queries[2]]
    rows = [
        [result.case.name, KIND_LABELS[result.kind], result.feature_map_name, f"{result.smallest_difference:.1e}",
         "the same" if result.verdict == "collide" else "different"]
        for result in measure_injectivity()
    ]  # fmt: skip
    plane = {"keys": KEYS, "query": query, "same": COLLISION_TOLERANCE, "smallest": SMALLEST_MEAN_SCORE}
    return {"plane": plane, "rows": rows}


_series_curves = cache(measure_series)


def _series() -> dict[str, Any]:
    curves = _series_curves()
    middle = len(curves[0].sizes) // 2
    rows = [
        [item.keys, *(f"{item.outputs[kind][middle]:.3f}" for kind in ("softmax", "inline", "linear"))]
        for item in curves
    ]  # fmt: skip
    size = f"{curves[0].sizes[middle]:g}"
    return {"chart": series_chart(curves), "note": SMALL_PRINT, "size": size, "rows": rows}


def _confusion(images: Mapping[str, Sequence[ImageConfusion]], styles: Mapping[str, Style]) -> dict[str, Any]:
    shares = {label: [item.percent for item in items] for label, items in images.items()}
    rows = [
        [label, str(len(values)), *(f"{summary(values):.2g}" for summary in (min, median, fmean, max))]
        for label, values in shares.items()
    ]
    means = _listed(f"{fmean(values):.2g} % with {label}" for label, values in shares.items())
    chart = Chart([confusion_panel(styles, images)])
    return {"means": means, "tolerance": f"{TOLERANCE:g}", "chart": chart, "rows": rows}


def _locality(measured: Mapping[str, Sequence[Locality]], styles: Mapping[str, Style]) -> dict[str, Any]:
    least = min(item.side for items in measured.values() for item in items)

    def mean(items: Sequence[Locality], term: str, value: str) -> float:
        return 100 * fmean(getattr(item, value) for item in items if (item.side, item.local_term) == (least, term))

    means = _listed(
        f"{mean(items, term, 'share'):.0f} % of {label}{' with its 3×3 term' if term == 'with' else ''}"
        for label, items in measured.items()
        for term in dict.fromkeys(item.local_term for item in items)
    )
    uniform = mean(next(iter(measured.values())), "without", "uniform")
    rows = [
        [label, str(item.layer), f"{item.side}×{item.side}", "yes" if item.local_term == "with" else "no",
         f"{100 * item.share:.1f}", f"{100 * item.uniform:.1f}"]
        for label, items in measured.items()
        for item in items
    ]  # fmt: skip
    chart = locality_chart(styles, measured)
    return {"side": f"{least}×{least}", "means": means, "uniform": f"{uniform:.0f}", "chart": chart, "rows": rows}


def _masking(results: Mapping[str, Sequence[MaskingResult]]) -> dict[str, Any]:
    costs = []
    for label, items in results.items():
        drops = {item.hiding.where: item.drop for item in reversed(items)}  # of the first side and local term
        near, random = (_decimal(drops.get(where, 0)) for where in ("neighborhood", "random"))
        costs.append(f"{label} {near} points ({random} at random)")
    rows = [
        [label, TERM_LABELS[item.hiding.local_term], WHERE_LABELS.get(item.hiding.where, "nothing hidden"),
         f"{item.hiding.side}×{item.hiding.side}" if item.hiding.side else "", f"{item.top1:.1f}", f"{item.drop:.1f}",
         f"{item.standard_error:.1f}", str(item.images)]
        for label, items in results.items()
        for item in items
    ]  # fmt: skip
    return {"costs": _listed(costs), "chart": masking_chart(results), "rows": rows}


def _ablation(ablations: Sequence[AblationFile]) -> dict[str, Any]:
    files = []
    for file in ablations:
        has_means = any(result.top1_mean is not None for result in file.results)
        chart = Chart([ablation_panel(file.results)]) if has_means else None
        axes = [axis.replace("_", " ") for axis in file.results[0].values]
        facts = _facts(file.environment, ("machine", "gpu", "commit", "date"))
        rows = text_rows(file.results)
        files.append({"title": file.title, "chart": chart, "axes": axes, "rows": rows, "facts": facts})
    results = [result for file in ablations for result in file.results if result.top1_mean is not None]
    best = max(results, key=lambda result: result.top1_mean or 0, default=None)
    highest = "" if best is None else f"{mean_and_spread(best.top1_mean, best.top1_std)} % ({best.label})"
    return {"highest": highest, "files": files}


def _cost(evidence: Evidence) -> dict[str, Any] | None:
    points = evidence.cost
    sizes = sorted({point.tokens for point in points})
    if len(sizes) < 2:
        return None
    growth, memory = list[str](), list[str]()
    for kind in dict.fromkeys(point.kind for point in points):
        times = {point.tokens: point.milliseconds for point in points if point.kind == kind}
        first, last = times[min(times)], times[max(times)]
        growth += [f"×{last / first:,.0f} for {ATTENTIONS[kind].label}"] if first and last else []
        peaks = [point.peak_bytes for point in points if point.kind == kind and point.tokens == sizes[-1]]
        memory += [f"{peak / 2**20:.1f} MiB for {ATTENTIONS[kind].label}" for peak in peaks if peak]
    rows = [
        [ATTENTIONS[point.kind].label, f"{point.tokens:,}", number(point.milliseconds, 2),
         number(point.peak_bytes, 1, 2**20), point.note]
        for point in points
    ]  # fmt: skip
    sizes = f"{sizes[0]:,} to {sizes[-1]:,} tokens, {sizes[-1] / sizes[0]:,.0f} times as many"
    memory = f"At the largest size, one call takes {_listed(memory)}." if memory else ""
    settings = f"{HEADS} heads of {HEAD_DIM} channels, float32, forward, {evidence.environment['machine']}"
    words = {"sizes": sizes, "growth": _listed(growth), "memory": memory, "settings": settings}
    return {**words, "chart": cost_chart(points), "rows": rows}


def _curves(runs: Sequence[TrainingCurves], styles: Mapping[str, Style]) -> dict[str, Any]:
    lasts = [(run.label, run.epochs[-1].best_known_top1) for run in runs]
    rows = [
        [run.label, str(epoch.epoch), number(epoch.train_loss, 3), number(epoch.validation_loss, 3),
         number(epoch.best_known_top1, 2)]
        for run in runs
        for epoch in run.epochs
    ]  # fmt: skip
    ended = _listed(f"{label} {top1:.1f} %" for label, top1 in lasts if top1 is not None)
    return {"ended": ended, "chart": curves_chart(styles, runs), "rows": rows}


def _answers(runs: Sequence[Run], styles: Mapping[str, Style]) -> dict[str, Any]:
    rights = _listed(
        f"{run.label} {sum(answer.is_right for answer in run.answers)} of {len(run.answers)}"
        for run in runs
        if run.answers
    )
    rows = [
        [run.label, picture.name, answer.truth, answer.guess, f"{100 * answer.probability:.1f}",
         f"{100 * answer.truth_probability:.1f}"]
        for run in runs
        for picture, answer in run.shown
    ]  # fmt: skip
    return {"rights": rights, "full": f"{1 + LEAST_FULL:g}", "cards": _cards(runs, styles), "rows": rows}


def _cards(runs: Sequence[Run], styles: Mapping[str, Style]) -> list[dict[str, Any]]:
    """Return one card per picture: what it shows, and each model's answer and attention map."""
    cards: dict[tuple[int, str], dict[str, Any]] = {}
    for run in runs:
        for picture, answer in run.shown:
            weights = np.array(picture.weights)
            (height, width), (row, column) = weights.shape, picture.token
            figure = {
                "label": run.label,
                "kind": styles[run.label].kind,
                "picture": picture.picture,
                "weights": weights,
                "ring": f"left:{100 * column / width:.2f}%;top:{100 * row / height:.2f}%;"
                f"width:{100 / width:.2f}%;height:{100 / height:.2f}%",
                "spoken": f"Attention of {run.label} from row {row + 1}, column {column + 1} of {height}×{width} "
                f"tokens, in layer {picture.layer}: from {_decimal(weights.min())} to {_decimal(weights.max())} "
                "times uniform",
                "answer": answer,
            }
            card = {"name": picture.name, "truth": answer.truth, "figures": []}
            cards.setdefault((picture.index, picture.name), card)["figures"].append(figure)
    for card in cards.values():
        largest = max(LEAST_FULL, *(np.abs(figure["weights"] - 1).max() for figure in card["figures"]))
        card["scale"] = [f"{_decimal(1 - largest)}×", "uniform", f"{_decimal(1 + largest)}×"]
        for figure in card["figures"]:
            figure["map"] = map_address(figure["weights"], largest)
    return list(cards.values())


def map_address(weights: np.ndarray, largest: float) -> str:
    """Return weights `[h, w]` in multiples of uniform as a PNG address: one color above uniform, another below.

    A color is opaque where a weight differs from uniform by `largest`.
    """
    above, below = (ImageColor.getrgb(LIGHT[kind]) for kind in ("more", "less"))
    pixels = np.empty((*weights.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where(weights[..., None] >= 1, above, below)
    pixels[..., 3] = np.clip(np.abs(weights - 1) / max(largest, 1e-12) * 255, 0, 255).round()
    return png_address(Image.fromarray(pixels))


def _breakable(text: str) -> Markup:
    """Return text whose names may be broken after an underscore or a slash, not within a word."""
    return Markup(re.sub(r"([_/])", r"\1<wbr>", str(escape(printable(text)))))


def _decimal(value: float) -> str:
    """Return a number with one decimal, with the minus sign that charts have."""
    return f"{value:.1f}".replace("-", "−")


def _facts(environment: Mapping[str, str], names: Sequence[str]) -> str:
    known = [(name, environment[name]) for name in names if environment.get(name, "none") != "none"]
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in known)


def _listed(parts: Iterable[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    *first, last = list(parts) or [""]
    return f"{', '.join(first)} and {last}" if first else last
