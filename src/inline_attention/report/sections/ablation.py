"""Tables of `inline ablate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inline_attention.report.charts import (
    DotRow,
    Style,
    dot_rows,
    linear_scale,
)
from inline_attention.report.evidence import Evidence
from inline_attention.report.html import Content, table, tag
from inline_attention.report.sections.section import (
    Section,
)


def ablation_section(evidence: Evidence) -> Section:
    """Tables of `inline ablate`, if any were given."""
    title = "Ablation: which part does what"
    if not evidence.ablations:
        reason = tag("span", "No ablation was given: ", tag("code", "inline ablate"), " trains one, and ",
                     tag("code", "inline report --ablation"), " shows it here.")  # fmt: skip
        return Section("ablation", title, "", notes=(reason,))
    parts: list[Content] = []
    for content in evidence.ablations:
        results = [result for result in content["results"] if result["top1_mean"] is not None]
        parts += _ablation(content, results)
    best = max((result for content in evidence.ablations for result in content["results"]
                if result["top1_mean"] is not None), key=lambda result: result["top1_mean"], default=None)  # fmt: skip
    found = "" if best is None else f" The highest mean is {_mean_and_spread(best)} % ({best['label']})."
    return Section(
        "ablation",
        title,
        "One recipe, with only what a row names changed: each dot is a run with its own seed, the bar their mean."
        f"{found}",
        tag("div", *parts),
    )


def _mean_and_spread(result: Mapping[str, Any]) -> str:
    spread = result["top1_std"]
    return f"{result['top1_mean']:.2f}" + ("" if spread is None else f" ± {spread:.2f}")


def _ablation(content: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[Content]:
    """Heading, chart and table of one ablation."""
    parts: list[Content] = [tag("h3", str(content["title"]))]
    if results:
        seeds = [[run["top1"] for run in result["runs"].values() if run["top1"] is not None] for result in results]
        rows = [
            DotRow(result["label"], Style("inline"), dots, result["top1_mean"], _mean_and_spread(result))
            for result, dots in zip(results, seeds, strict=True)
        ]
        x = linear_scale("top-1 (%)", [value for dots in seeds for value in dots])
        parts.append(tag("div", dot_rows(rows, x, description=f"{content['title']}: top-1 by row and seed; the numbers "
                                         "are in the table below."), class_="wide"))  # fmt: skip
    axes = list(content["results"][0]["values"])
    header = [*(axis.replace("_", " ") for axis in axes), "top-1 %", "seeds", "parameters M", "MACs M", "images/s",
              "note"]  # fmt: skip
    body = [
        [*(str(value).lower() for value in result["values"].values()),
         "–" if result["top1_mean"] is None else _mean_and_spread(result), str(result["seeds"]),
         "–" if result["parameters"] is None else f"{result['parameters'] / 1e6:.2f}",
         "–" if result["macs"] is None else f"{result['macs'] / 1e6:,.1f}",
         "–" if result["images_per_second"] is None else f"{result['images_per_second']:,.0f}", result["note"]]
        for result in content["results"]
    ]  # fmt: skip
    numbers = table(header, body, caption=f"{content['title']}: mean ± standard deviation", text_columns=len(axes))
    parts.append(tag("details", tag("summary", "The numbers"), numbers))
    environment = content["environment"]
    names = ("machine", "gpu", "torch", "commit", "date")
    facts = ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name, "none") != "none")
    parts.append(tag("p", f"{facts}.", class_="note"))
    return parts
