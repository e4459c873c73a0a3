"""What is lost when neighbourhoods are hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inline_attention.report.charts import (
    bar_legend,
    bar_panel,
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

HIDING = {"neighbourhood": "its neighbourhood hidden", "random": "as many random tokens hidden"}
LOCAL_TERMS = {"none": "no 3×3 term", "hidden": "hidden from the 3×3 term too", "kept": "3×3 term still sees all"}


def masking_section(evidence: Evidence) -> Section:
    """Accuracy with neighbourhoods hidden."""
    title = "Masking: what is lost without the neighbourhood"
    runs = runs_with(evidence, "masking")
    if not runs:
        return left_out("masking", title, evidence)
    panels, costs = [], []
    for run in runs:
        rows = [row for row in run.found["masking"] if row["side"]]
        terms = list(dict.fromkeys(row["local_term"] for row in rows))
        panels += [_masking_panel(run, term, [row for row in rows if row["local_term"] == term]) for term in terms]
        smallest = [row for row in rows if row["local_term"] == terms[0] and row["side"] == rows[0]["side"]]
        drops = {row["where"]: row["drop"] for row in smallest}
        costs.append(f"{run.label} {drops['neighbourhood']:.1f} points ({drops['random']:.1f} at random)")
    body = [
        [run.label, LOCAL_TERMS[row["local_term"]], HIDING.get(row["where"], "nothing hidden"),
         f"{row['side']}×{row['side']}" if row["side"] else "", f"{row['top1']:.1f}", f"{row['drop']:.1f}",
         f"{row['standard_error']:.1f}", str(row["images"])]
        for run in runs
        for row in run.found["masking"]
    ]  # fmt: skip
    header = ["model", "3×3 term", "hidden", "tokens", "top-1 %", "points lost", "± points", "pictures"]
    return Section(
        "masking",
        title,
        "The bars are the accuracy left when every token is kept from seeing those around it, or as many others drawn "
        f"at random; the dashed line is with nothing hidden. Hiding the smallest neighbourhood costs {listed(costs)}.",
        tag("div", bar_legend([(text, f"hide-{where}") for where, text in HIDING.items()]),
            tag("div", *panels, class_="panels")),
        table(header, body, caption="Accuracy with tokens hidden", text_columns=4),
        reasons(evidence, "masking"),
    )  # fmt: skip


def _masking_panel(run: Run, term: str, rows: Sequence[Mapping[str, Any]]) -> Html:
    sides = sorted({row["side"] for row in rows})
    groups = [
        (f"{side}×{side}", [(f"hide-{row['where']}", row["top1"]) for row in rows if row["side"] == side])
        for side in sides
    ]
    title = run.label if term == "none" else f"{run.label}, {LOCAL_TERMS[term]}"
    y = linear_scale("top-1 (%)", [100.0], zero=True, percent=True)
    spoken = listed(f"{row['top1']:.1f} % with {HIDING[row['where']]} ({row['side']}×{row['side']})" for row in rows)
    level = rows[0]["baseline_top1"]
    description = f"{title}: {level:.1f} % with nothing hidden, {spoken}."
    return bar_panel(title, groups, y, x_label="tokens hidden around each token", level=level, description=description)
