"""The report as one HTML page: sections with sentences, figures and tables, rendered by a Jinja2 template.

The template escapes all text. Only our own figures are inserted as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import jinja2
import numpy as np
from PIL import Image

from inline_attention.ablation.tables import ablation_panel, mean_and_spread
from inline_attention.analysis.collision_cases import COLLISION_TOLERANCE, KEYS, collision_cases, measure_injectivity
from inline_attention.analysis.confusion import TOLERANCE, confusion_panel
from inline_attention.analysis.locality import Locality, locality_chart
from inline_attention.analysis.masking import TERM_LABELS, WHERE_LABELS, masking_chart
from inline_attention.analysis.training_curves import curves_chart
from inline_attention.benchmark.cost import ATTENTIONS, HEAD_DIM, HEADS, cost_chart
from inline_attention.ops.call import SMALLEST_MEAN_SCORE
from inline_attention.report.measurement import AblationFile, Evidence, png_address
from inline_attention.support.figures import DARK, KIND_LABELS, LIGHT, Chart, Style, numbered_styles
from inline_attention.support.files import write_atomically
from inline_attention.support.text import printable

LEAST_FULL = 3.0  # times uniform: the weight of full color, unless a larger one exists


class Table(NamedTuple):
    """A table; the first `text_columns` columns are text, the others numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1


class Part(NamedTuple):
    """A chart with its table, and a heading and a note where a section has several."""

    chart: Chart | None
    table: Table
    heading: str = ""
    note: str = ""


@dataclass(frozen=True)
class Content:
    """What a section says in two sentences, its charts and tables, and explanations."""

    lead: str = ""
    parts: Sequence[Part] = ()
    notes: Sequence[str] = ()


def write_page(evidence: Evidence, path: Path) -> None:
    """Write the report atomically."""
    write_atomically(path, render(evidence))


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
    query = [float(value) for value in collision_cases()[0].queries[2]]
    page = environment.get_template("page.html").render(
        light=LIGHT,
        dark=DARK,
        plane={"keys": KEYS, "query": query, "same": COLLISION_TOLERANCE, "smallest": SMALLEST_MEAN_SCORE},
        labels=KIND_LABELS,
        runs=_run_table(evidence),
        sections=[_section(evidence, name, *section, styles) for name, section in SECTIONS.items()],
        cards=_cards(evidence, styles),
        facts=_facts(evidence.environment, ("machine", "gpu", "timm", "inline_attention", "commit", "date")),
    )
    return f"{page.strip()}\n"


def _section(
    evidence: Evidence, name: str, title: str, make: Callable[..., Content | None], styles: Mapping[str, Style]
) -> dict[str, Any]:
    """Return a section for the template: its content, and the reasons why something is left out."""
    missing = evidence.missing.get(name, []) + (evidence.missing.get("pictures", []) if name == "answers" else [])
    reasons = [f"Left out: {reason}" for reason in dict.fromkeys(missing)]
    content = make(evidence, styles)
    if content is None:
        content = Content(notes=[] if reasons else ["Left out: no run has the data for it."])
    return {"name": name, "title": title, **vars(content), "notes": [*content.notes, *reasons]}


def _run_table(evidence: Evidence) -> Table:
    rows = []
    for run in evidence.runs:
        epochs = [] if run.curves is None else run.curves.epochs
        top1 = _number(epochs[-1].best_known_top1 if epochs else None, 2)
        rows.append([run.label, top1, str(len(epochs)), run.dataset, run.model_name])
    header = ["run", "top-1 %", "epochs", "data", "model"]
    if all(run.label == run.model_name for run in evidence.runs):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return Table("Runs, with the accuracy after their last epoch", header, rows)


def _injectivity(_evidence: Evidence, _styles: Mapping[str, Style]) -> Content:
    rows = [
        [result.case.name, KIND_LABELS[result.kind], result.feature_map_name, f"{result.smallest_difference:.1e}",
         "the same" if result.verdict == "collide" else "different"]
        for result in measure_injectivity()
    ]  # fmt: skip
    header = ["queries", "attention", "φ", "smallest difference of weights", "weights"]
    return Content(
        "A query is a point in this plane, and each bar is the weight it gives to one of six keys. Drag the query: a "
        "second one, on the same ray, always gets the same weights from linear attention, which cannot tell the two "
        "apart; softmax and InLine can.",
        [Part(None, Table("Queries constructed to collide, measured in float64", header, rows, 3))],
        ["Linear attention divides the scores of a query by their sum, so the length of the query is lost. InLine "
         "subtracts their mean instead; its weights also sum to one, and may be negative. With ReLU, InLine also loses "
         "what ReLU drops: drag the query to the lower left. The paper's φ, the identity, drops nothing."],
    )  # fmt: skip


def _confusion(evidence: Evidence, styles: Mapping[str, Style]) -> Content | None:
    images = {run.label: run.confusion for run in evidence.runs if run.confusion}
    if not images:
        return None
    shares = {label: [item.percent for item in items] for label, items in images.items()}
    means = _listed(f"{fmean(values):.2g} % with {label}" for label, values in shares.items())
    rows = [
        [label, str(len(values)), *(f"{summary(values):.2f}" for summary in (min, median, fmean, max))]
        for label, values in shares.items()
    ]
    return Content(
        "Each dot is one validation picture: the share of its query pairs, over all layers and heads, whose rows of "
        f"weights are equal although the queries differ. On average that is {means}.",
        [Part(Chart([confusion_panel(styles, images)]),
              Table("Confused pairs", ["model", "pictures", "least %", "median %", "mean %", "most %"], rows))],
        [f"Equal: ‖w − w′‖ ≤ {TOLERANCE:g} of the rows' difference from uniform attention. Linear attention "
         "can confuse queries, but need not do so here. Softmax confuses queries that attend to one key only."],
    )  # fmt: skip


def _locality(evidence: Evidence, styles: Mapping[str, Style]) -> Content | None:
    measured = {run.label: run.locality for run in evidence.runs if run.locality}
    if not measured:
        return None
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
    header = ["model", "layer", "tokens", "with 3×3 term", "share of |w| %", "uniform %"]
    return Content(
        "Each line follows one model through its layers: the share of its attention |w| that a token spends on the "
        f"tokens around it. The {least}×{least} neighborhood gets, on average over layers, {means}; uniform attention "
        f"would spend {uniform:.0f} % there.",
        [Part(locality_chart(styles, measured), Table("Locality", header, rows))],
    )


def _masking(evidence: Evidence, _styles: Mapping[str, Style]) -> Content | None:
    results = {run.label: run.masking for run in evidence.runs if run.masking}
    if not results:
        return None
    costs = []
    for label, items in results.items():
        drops = {item.hiding.where: item.drop for item in reversed(items)}  # of the first side and local term
        costs.append(f"{label} {drops.get('neighbourhood', 0):.1f} points ({drops.get('random', 0):.1f} at random)")
    rows = [
        [label, TERM_LABELS[item.hiding.local_term], WHERE_LABELS.get(item.hiding.where, "nothing hidden"),
         f"{item.hiding.side}×{item.hiding.side}" if item.hiding.side else "", f"{item.top1:.1f}", f"{item.drop:.1f}",
         f"{item.standard_error:.1f}", str(item.images)]
        for label, items in results.items()
        for item in items
    ]  # fmt: skip
    header = ["model", "3×3 term", "hidden", "tokens", "top-1 %", "points lost", "± points", "pictures"]
    return Content(
        "The bars are the accuracy when every token is kept from seeing the tokens around it, or as many others drawn "
        f"at random; the dashed line is with nothing hidden. Hiding the smallest neighborhood costs {_listed(costs)}.",
        [Part(masking_chart(results), Table("Accuracy with tokens hidden", header, rows, 4))],
    )


def _ablation(evidence: Evidence, _styles: Mapping[str, Style]) -> Content:
    if not evidence.ablations:
        note = "No ablation was given: `inline ablate` trains one, and `inline report --ablation` shows it here."
        return Content(notes=[note])
    results = [result for file in evidence.ablations for result in file.results if result.top1_mean is not None]
    best = max(results, key=lambda result: result.top1_mean or 0, default=None)
    found = "" if best is None else (
        f" The highest mean is {mean_and_spread(best.top1_mean, best.top1_std)} % ({best.label})."
    )  # fmt: skip
    return Content(
        f"One recipe with one thing changed per row: each dot is a run with its own seed, the bar their mean.{found}",
        [_ablation_part(file) for file in evidence.ablations],
    )


def _ablation_part(file: AblationFile) -> Part:
    axes = list(file.results[0].values)
    rows = [
        [*(str(value).lower() for value in result.values.values()),
         mean_and_spread(result.top1_mean, result.top1_std), str(result.seeds),
         _number(result.parameters, 2, 1e6), _number(result.macs, 1, 1e6), _number(result.images_per_second, 0),
         result.note]
        for result in file.results
    ]  # fmt: skip
    names = [axis.replace("_", " ") for axis in axes]
    header = [*names, "top-1 %", "seeds", "parameters M", "MACs M", "images/s", "note"]
    has_means = any(result.top1_mean is not None for result in file.results)
    return Part(
        Chart([ablation_panel([asdict(result) for result in file.results])]) if has_means else None,
        Table(f"{file.title}: mean ± standard deviation", header, rows, len(axes)),
        heading=file.title,
        note=f"{_facts(file.environment, ('machine', 'gpu', 'torch', 'commit', 'date'))}.",
    )


def _cost(evidence: Evidence, _styles: Mapping[str, Style]) -> Content:
    points = evidence.cost
    sizes = sorted({point.tokens for point in points})
    if len(sizes) < 2:
        return Content(notes=["Left out: the cost of attention was not measured."])
    growth: list[str] = []
    for kind in dict.fromkeys(point.kind for point in points):
        times = {point.tokens: point.milliseconds for point in points if point.kind == kind}
        first, last = times[min(times)], times[max(times)]
        growth += [f"×{last / first:,.0f} for {ATTENTIONS[kind].label}"] if first and last else []
    rows = [
        [ATTENTIONS[point.kind].label, f"{point.tokens:,}", _number(point.milliseconds, 2),
         _number(point.peak_bytes, 1, 2**20), point.note]
        for point in points
    ]  # fmt: skip
    return Content(
        "Both axes are logarithmic, so a steeper line is a higher power of the number of tokens. From "
        f"{sizes[0]:,} to {sizes[-1]:,} tokens, {sizes[-1] / sizes[0]:,.0f} times as many, "
        f"time grows {_listed(growth)}.",
        [Part(cost_chart(points),
              Table("Cost of one forward call", ["attention", "tokens", "ms", "MiB", "note"], rows))],
        [f"One image, {HEADS} heads of {HEAD_DIM} channels, float32, forward, {evidence.cost_machine}."],
    )  # fmt: skip


def _curves(evidence: Evidence, styles: Mapping[str, Style]) -> Content | None:
    runs = [run.curves for run in evidence.runs if run.curves is not None]
    if not runs:
        return None
    lasts = [(run.label, run.epochs[-1].best_known_top1) for run in runs]
    ended = _listed(f"{label} {top1:.1f} %" for label, top1 in lasts if top1 is not None)
    rows = [
        [run.label, str(epoch.epoch), _number(epoch.train_loss, 3), _number(epoch.validation_loss, 3),
         _number(epoch.best_known_top1, 2)]
        for run in runs
        for epoch in run.epochs
    ]  # fmt: skip
    return Content(
        "Left, accuracy on the validation pictures after every epoch; right, the loss that training lowers."
        + (f" They end at {ended}." if ended else ""),
        [Part(curves_chart(styles, runs),
              Table("Epochs of every run", ["run", "epoch", "training loss", "validation loss", "top-1 %"], rows))],
    )  # fmt: skip


def _answers(evidence: Evidence, _styles: Mapping[str, Style]) -> Content | None:
    if not any(run.shown for run in evidence.runs):
        return None
    rights = _listed(
        f"{sum(answer.is_right for answer in run.answers)} of {len(run.answers)} right with {run.label}"
        for run in evidence.runs
        if run.answers
    )
    rows = [
        [run.label, picture.name, answer.truth, answer.guess, f"{100 * answer.probability:.1f}",
         f"{100 * answer.truth_probability:.1f}"]
        for run in evidence.runs
        for picture, answer in run.shown
    ]  # fmt: skip
    header = ["model", "picture", "true class", "answer", "probability %", "of the true class %"]
    return Content(
        "These are the pictures that the models, taken together, find hardest; each map shows which tokens the ringed "
        f"token attends to, orange above zero and blue below. Of all pictures tried, there were {rights}.",
        [Part(None, Table("Answers to the pictures shown", header, rows, 4))],
        ["Maps: mean over the heads of the middle layer, without the 3×3 term; one scale for all maps of a picture, "
         f"fully colored at the largest weight, or at {LEAST_FULL:g} times uniform attention."],
    )  # fmt: skip


SECTIONS: Mapping[str, tuple[str, Callable[..., Content | None]]] = {
    "injectivity": ("Injectivity: different queries, different weights?", _injectivity),
    "confusion": ("Confusion: different queries, same attention", _confusion),
    "locality": ("Locality: how much attention stays near", _locality),
    "masking": ("Masking: what is lost without the neighborhood", _masking),
    "ablation": ("Ablation: which part does what", _ablation),
    "cost": ("Cost: time and memory against tokens", _cost),
    "curves": ("Learning: epoch by epoch", _curves),
    "answers": ("Answers: the hardest pictures, and where the models look", _answers),
}


def _cards(evidence: Evidence, styles: Mapping[str, Style]) -> list[dict[str, Any]]:
    """Return one card per picture: what it shows, and each model's answer and attention map."""
    cards: dict[tuple[int, str], dict[str, Any]] = {}
    for run in evidence.runs:
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
                f"tokens, in layer {picture.layer}: from {weights.min():.1f} to {weights.max():.1f} times uniform",
                "answer": answer,
            }
            card = {"name": picture.name, "truth": answer.truth, "figures": []}
            cards.setdefault((picture.index, picture.name), card)["figures"].append(figure)
    for card in cards.values():
        largest = max(LEAST_FULL, *(np.abs(figure["weights"]).max() for figure in card["figures"]))
        for figure in card["figures"]:
            figure["map"] = map_address(figure["weights"], largest)
    return list(cards.values())


def map_address(weights: np.ndarray, largest: float) -> str:
    """Return weights `[h, w]` as a PNG address: InLine's color above zero, softmax's below, opaque at `largest`."""
    positive, negative = ([int(LIGHT[kind][i : i + 2], 16) for i in (1, 3, 5)] for kind in ("inline", "softmax"))
    pixels = np.empty((*weights.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where(weights[..., None] >= 0, positive, negative)
    pixels[..., 3] = np.clip(np.abs(weights) / max(largest, 1e-12) * 255, 0, 255).round()
    return png_address(Image.fromarray(pixels))


def _facts(environment: Mapping[str, str], names: Sequence[str]) -> str:
    known = [(name, environment[name]) for name in names if environment.get(name, "none") != "none"]
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in known)


def _listed(parts: Iterable[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    *first, last = list(parts) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _number(value: float | None, decimals: int, unit: float = 1) -> str:
    return "–" if value is None else f"{value / unit:,.{decimals}f}"
