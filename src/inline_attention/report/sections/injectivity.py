"""What injectivity is: a plane to play with."""

from __future__ import annotations

from inline_attention.analysis.injectivity import measure_injectivity
from inline_attention.report.html import table
from inline_attention.report.plane import plane
from inline_attention.report.sections.section import (
    Section,
)


def injectivity_section() -> Section:
    """The plane to play with; its table needs no run."""
    results = measure_injectivity()
    rows = [
        [result.case.name, "InLine" if result.kind == "inline" else result.kind, result.feature_map_name,
         f"{result.smallest_difference:.1e}", "the same" if result.verdict == "collide" else "different"]
        for result in results
    ]  # fmt: skip
    header = ["queries", "attention", "φ", "smallest difference of weights", "weights"]
    return Section(
        "injectivity",
        "Injectivity: different queries, different weights?",
        "A query is a point in this plane, and each bar is the weight it gives to one of six keys. Drag the query: a "
        "second one, on the same ray, always gets the same weights from linear attention, which cannot tell the two "
        "apart; softmax and InLine can.",
        plane(),
        table(header, rows, caption="Queries built to collide, measured in float64", text_columns=3),
        ("Linear attention divides the scores of a query by their sum, and with that forgets how long the query is. "
         "InLine subtracts their mean instead; its weights sum to one as well, and may be negative. With ReLU, it too "
         "loses what ReLU drops: drag the query to the lower left. The paper's φ, the identity, drops nothing.",),
    )  # fmt: skip
