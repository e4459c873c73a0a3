"""`inline eval`: what the model of a checkpoint is worth on a dataset."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from inline_attention.cli.printing import fail, say
from inline_attention.engine.evaluate import evaluate_checkpoint
from inline_attention.tasks.task import MetricTable


def run_eval(checkpoint: Path, results_file: Path | None, **options: Any) -> None:
    """Evaluate, print and, if asked, write the figures as JSON.

    Raises:
        typer.Exit: With code 1 and a reason where that is not possible.
    """
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        say(text, err=True)

    if results_file is not None:  # before the work is done, not after
        if results_file.is_dir():
            fail(f"--results-file {results_file} is a folder; name a file, such as {results_file / 'results.json'}")
        results_file.parent.mkdir(parents=True, exist_ok=True)
    metrics = evaluate_checkpoint(checkpoint, on_note=note, **options)
    if metrics is None:
        return  # another process speaks
    say(str(metrics))
    for table in metrics.tables:
        say("\n" + "\n".join(_lines(table)))
    if results_file is not None:
        assert dataclasses.is_dataclass(metrics)
        assert not isinstance(metrics, type)
        content = {"checkpoint": str(checkpoint), **_with_nulls(dataclasses.asdict(metrics)), "repaired": notes}
        try:
            results_file.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            fail(f"cannot write {results_file}: {error.strerror}; name another file with --results-file")


def _lines(table: MetricTable) -> list[str]:
    """Columns of equal width; a dash where there is nothing to measure."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    names = [" ".join(name.split()) for name in table]
    width = max(map(len, names), default=0)
    lines = [" " * width + "".join(f"  {column:>8}" for column in columns)]
    for name, row in zip(names, table.values(), strict=True):
        cells = ("–" if math.isnan(row[column]) else f"{row[column]:.1f}" for column in columns)
        lines.append(f"{name:<{width}}" + "".join(f"  {cell:>8}" for cell in cells))
    return lines


def _with_nulls(value: Any) -> Any:
    """JSON has no NaN, which figures are of which there is nothing to measure."""
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
