"""How much attention stays near its query, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from inline_attention.report.charts import (
    Scale,
    Series,
    Style,
    legend,
    line_panel,
    linear_scale,
)
from inline_attention.report.evidence import Evidence, Run
from inline_attention.report.html import Html, table, tag
from inline_attention.report.sections.section import (
    Section,
    left_out,
    listed,
    reasons,
    runs_with,
)


def locality_section(evidence: Evidence) -> Section:
    """Share of |w| in the neighbourhood by layer."""
    title = "Locality: how much attention stays near"
    runs = runs_with(evidence, "locality")
    if not runs:
        return left_out("locality", title, evidence)
    sides = sorted({row["side"] for run in runs for row in run.found["locality"]})
    panels = [_locality_panel(runs, side) for side in sides]
    entries = [(_term_label(run, term), run.style, term == "with") for run in runs for term in _terms(run)]
    least = sides[0]
    means = listed(
        f"{100 * fmean(row['share'] for row in _locality_rows(run, least, term)):.0f} % of {_term_label(run, term)}"
        for run in runs
        for term in _terms(run)
    )
    uniform = 100 * fmean(row["uniform"] for row in _locality_rows(runs[0], least, "without"))
    body = [
        [run.label, str(row["layer"]), f"{row['side']}×{row['side']}",
         "yes" if row["local_term"] == "with" else "no", f"{100 * row['share']:.1f}", f"{100 * row['uniform']:.1f}"]
        for run in runs
        for row in run.found["locality"]
    ]  # fmt: skip
    return Section(
        "locality",
        title,
        "Each line follows one model through its layers: the share of its attention |w| that a token spends on the "
        f"tokens right around it. In the {least}×{least} neighbourhood lie, on average over layers, {means}; uniform "
        f"attention would spend {uniform:.0f} % there.",
        tag("div", legend([*entries, ("uniform attention", Style("uniform"), False)]),
            tag("div", *panels, class_="panels")),
        table(["model", "layer", "tokens", "with 3×3 term", "share of |w| %", "uniform %"], body, caption="Locality"),
        reasons(evidence, "locality"),
    )  # fmt: skip


def _terms(run: Run) -> list[str]:
    return list(dict.fromkeys(row["local_term"] for row in run.found["locality"]))


def _term_label(run: Run, term: str) -> str:
    return f"{run.label} with its 3×3 term" if term == "with" else run.label


def _locality_rows(run: Run, side: int, term: str) -> list[Mapping[str, Any]]:
    return [row for row in run.found["locality"] if row["side"] == side and row["local_term"] == term]


def _locality_panel(runs: Sequence[Run], side: int) -> Html:
    series = [
        Series(_term_label(run, term), run.style, [(row["layer"], 100 * row["share"]) for row in rows], term == "with")
        for run in runs
        for term in _terms(run)
        if (rows := _locality_rows(run, side, term))
    ]
    uniform = [(row["layer"], 100 * row["uniform"]) for row in _locality_rows(runs[0], side, "without")]
    series.insert(0, Series("uniform attention", Style("uniform"), uniform, markers=False))
    layers = sorted({round(layer) for line in series for layer, _ in line.points})
    x = Scale("layer", layers[0] - 0.3, layers[-1] + 0.3, [(layer, str(layer)) for layer in _thinned(layers)])
    y = linear_scale("% of |w|", [value for line in series for _, value in line.points], zero=True, percent=True)
    description = f"Share of attention in the {side}×{side} neighbourhood by layer; the numbers are in the table below."
    return line_panel(f"{side}×{side} tokens", series, x, y, description=description)


def _thinned(layers: Sequence[int]) -> list[int]:
    return list(layers[:: max(1, -(-len(layers) // 9))])
