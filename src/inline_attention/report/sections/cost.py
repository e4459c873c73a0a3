"""Time and memory of attention against the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from inline_attention.benchmark.cost import ATTENTIONS, HEAD_DIM, HEADS, CostPoint
from inline_attention.report.charts import (
    Series,
    Style,
    legend,
    line_panel,
    listed_scale,
    logarithmic_scale,
)
from inline_attention.report.html import table, tag
from inline_attention.report.sections.section import (
    Section,
    listed,
)


def cost_section(points: Sequence[CostPoint], machine: str) -> Section:
    """Time and memory by number of tokens."""
    title = "Cost: time and memory against tokens"
    sizes = sorted({point.tokens for point in points})
    if not points or len(sizes) < 2:
        return Section("cost", title, "", notes=("Left out: the cost of attention was not measured.",))
    x = listed_scale("tokens N", sizes)
    panels = []
    for name, unit, values in (
        ("time of one call", "ms", {p: p.milliseconds for p in points}),
        ("peak memory", "MiB", {p: p.peak_bytes / 2**20 if p.peak_bytes else None for p in points}),
    ):
        known = [value for value in values.values() if value]
        if not known:
            continue
        series = [
            Series(label, style, [(point.tokens, value) for point, value in values.items()
                                  if point.kind == kind and value])
            for kind, label, style in _cost_kinds(points)
        ]  # fmt: skip
        panels.append(line_panel(f"{name} ({unit})", [line for line in series if line.points], x,
                                 logarithmic_scale(unit, known),
                                 description=f"{name} in {unit} against tokens, both logarithmic; "
                                             "the numbers are in the table below."))  # fmt: skip
    growth = listed(
        f"×{ratio:,.0f} for {label}" for kind, label, _ in _cost_kinds(points)
        if (ratio := _growth(points, kind)) is not None
    )  # fmt: skip
    body = [
        [ATTENTIONS[point.kind].label, f"{point.tokens:,}",
         "–" if point.milliseconds is None else f"{point.milliseconds:,.2f}",
         "–" if point.peak_bytes is None else f"{point.peak_bytes / 2**20:,.1f}", point.note]
        for point in points
    ]  # fmt: skip
    return Section(
        "cost",
        title,
        "Both axes are logarithmic, so a steeper line is a higher power of the number of tokens. From "
        f"{sizes[0]:,} to {sizes[-1]:,} tokens, {sizes[-1] / sizes[0]:,.0f} times as many, time grows {growth}.",
        tag("div", legend([(label, style, False) for _, label, style in _cost_kinds(points)]),
            tag("div", *panels, class_="panels")),
        table(["attention", "tokens", "ms", "MiB", "note"], body, caption="Cost of one forward call"),
        (f"One image, {HEADS} heads of {HEAD_DIM} channels, float32, forward, {machine}.",),
    )  # fmt: skip


def _cost_kinds(points: Sequence[CostPoint]) -> list[tuple[str, str, Style]]:
    kinds = dict.fromkeys(point.kind for point in points)
    styles = {"softmax_explicit": Style("softmax", 1)}
    return [(kind, ATTENTIONS[kind].label, styles.get(kind, Style(kind))) for kind in kinds]


def _growth(points: Sequence[CostPoint], kind: str) -> float | None:
    times = {point.tokens: point.milliseconds for point in points if point.kind == kind}
    first, last = times[min(times)], times[max(times)]
    return last / first if first and last else None
