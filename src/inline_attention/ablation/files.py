"""Results of an ablation as files: JSON with every run, CSV and Markdown with the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inline_attention.ablation.tables import CellResult, as_markdown, rows
from inline_attention.analysis.result_files import write_csv
from inline_attention.benchmark.environment import combined_environment, describe_environment
from inline_attention.benchmark.results import write_json, write_markdown


def write_ablation(
    folder: Path, name: str, results: Sequence[CellResult], *, title: str, about: str, settings: Mapping[str, Any]
) -> list[Path]:
    """Write `NAME.json`, `NAME.csv` and `NAME.md`, over those from before.

    Args:
        folder: Made if missing.
        name: Of the files.
        results: In the order of the table.
        title: Of the Markdown page.
        about: What stands below it, in Markdown: how these were trained.
        settings: For the JSON: with what options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = latest_environment(results)
    content = {"analysis": "ablation", "title": title, "environment": environment, "settings": dict(settings)}
    files = [folder / f"{name}.{ending}" for ending in ("json", "csv", "md")]
    write_json(files[0], {**content, "results": plain_results(results)})
    write_csv(files[1], rows(results))
    write_markdown(files[2], title, environment, f"{about}\n\n{as_markdown(results)}")
    return files


def latest_environment(results: Sequence[CellResult]) -> dict[str, str]:
    """Where the last of the runs was made; all of them are named where they differ in device, versions or commit."""
    found = [outcome.environment for result in results for outcome in result.outcomes.values()]
    return combined_environment(found) if found else describe_environment()


def plain_results(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Rows of the table, each with its values by axis and all of its runs, as JSON has them."""
    return [
        {
            **row,
            "label": result.cell.label,
            "values": dict(result.cell.values),
            "runs": {str(seed): dataclasses.asdict(outcome) for seed, outcome in result.outcomes.items()},
        }
        for row, result in zip(rows(results), results, strict=True)
    ]
