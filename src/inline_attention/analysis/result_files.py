"""Measurements as files: one CSV for spreadsheets, one JSON with everything that is needed to understand them."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import write_json, write_text


def flat_row(row: Any) -> dict[str, Any]:
    """A dataclass as one row of plain values: its fields, those of dataclasses in it, and its properties.

    What is not finite becomes None, for which JSON has a word.
    """
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        flat |= flat_row(value) if dataclasses.is_dataclass(value) else {field.name: value}
    flat |= {name: getattr(row, name) for name, entry in vars(type(row)).items() if isinstance(entry, property)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in flat.items()
    }


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows that all have the same columns, whole or not at all; sequences are left to the JSON."""
    rows = [{key: value for key, value in row.items() if not isinstance(value, (list, tuple))} for row in rows]
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, file.getvalue())


def result_file(folder: Path, name: str) -> Path:
    """Where the results of an analysis are, all of them."""
    return folder / f"{name}.json"


def write_results(
    folder: Path,
    name: str,
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    subjects: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> list[Path]:
    """Write `NAME.json` with all tables, and each table as CSV: the first as `NAME.csv`, others as `NAME-TABLE.csv`.

    Args:
        folder: Where to; it must exist.
        name: Of the analysis.
        tables: Rows by the name of their table.
        subjects: What was analysed.
        settings: With what options.

    Returns:
        The files.
    """
    content = {
        "analysis": name,
        "environment": describe_environment(),
        "settings": settings,
        "subjects": list(subjects),
        "tables": {table: list(rows) for table, rows in tables.items()},
    }
    files = [result_file(folder, name)]
    write_json(files[0], content)
    for number, (table, rows) in enumerate(tables.items()):
        files.append(folder / (f"{name}.csv" if number == 0 else f"{name}-{table}.csv"))
        write_csv(files[-1], rows)
    return files
