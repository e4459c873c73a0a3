"""How often unlike queries get like attention, picture by picture."""

from __future__ import annotations

from statistics import fmean, median

from inline_attention.report.charts import (
    DotRow,
    dot_rows,
    linear_scale,
)
from inline_attention.report.evidence import Evidence
from inline_attention.report.html import table, tag
from inline_attention.report.sections.section import (
    Section,
    left_out,
    listed,
    reasons,
    runs_with,
)


def confusion_section(evidence: Evidence) -> Section:
    """Confused pairs of every picture."""
    title = "Confusion: unlike queries, like attention"
    lead = (
        "Each dot is one held-out picture: the share of its query pairs, over all layers and heads, whose rows of "
        "weights coincide although the queries differ. "
    )
    shares = {
        run.label: [100 * image["confused"] / max(image["distinct"], 1) for image in run.found["confusion"]["images"]]
        for run in runs_with(evidence, "confusion")
    }
    if not shares:
        return left_out("confusion", title, evidence)
    runs = runs_with(evidence, "confusion")
    tolerance = runs[0].found["confusion"]["tolerance"]
    means = listed(f"{fmean(values):.2g} % with {label}" for label, values in shares.items())
    rows = [DotRow(run.label, run.style, shares[run.label], fmean(shares[run.label]),
                   f"mean {fmean(shares[run.label]):.2g} %") for run in runs]  # fmt: skip
    x = linear_scale("confused pairs of queries (% of those that differ)", [v for s in shares.values() for v in s],
                     zero=True, percent=True)  # fmt: skip
    body = [
        [label, str(len(values)), f"{min(values):.2f}", f"{median(values):.2f}", f"{fmean(values):.2f}",
         f"{max(values):.2f}"]
        for label, values in shares.items()
    ]  # fmt: skip
    return Section(
        "confusion",
        title,
        f"{lead}On average that is {means}.",
        tag("div", dot_rows(rows, x, description=f"Share of confused pairs per picture, on average {means}."),
            class_="wide"),
        table(["model", "pictures", "least %", "median %", "mean %", "most %"], body, caption="Confused pairs"),
        (f"Coincide: ‖w − w′‖ ≤ {tolerance:g} of what the rows have beyond uniform attention. That linear attention "
         "can confuse queries does not mean that it does so on these pictures; softmax, too, does where it looks at "
         "one key alone.",
         *reasons(evidence, "confusion")),
    )  # fmt: skip
