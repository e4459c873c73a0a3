"""Measure contestants, and write results atomically as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.timing import Timing, Work, interleaved_timings, release_memory
from inline_attention.support.files import write_atomically

Status = Literal["timed", "WRONG", "out of memory", "not available"]


class WrongResultError(Exception):
    """A contestant returns wrong results and must not be timed."""


@dataclass(frozen=True)
class Measurement:
    """The measurement of one contestant in one case."""

    contestant: str
    status: Status
    timing: Timing | None = None
    error: float | None = None  # largest relative error found before timing; None if there is nothing to compare with
    note: str = ""  # why it was not timed, in a sentence
    peak_bytes: int | None = None

    @property
    def milliseconds(self) -> float | None:
        """Median time, or None."""
        return None if self.timing is None else self.timing.milliseconds

    @classmethod
    def failure(cls, contestant: str, error: Exception) -> Measurement:
        """Return the measurement of a contestant that raised `error`."""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, WrongResultError):
            return cls(contestant, "WRONG", note=reason)
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return cls(contestant, "out of memory", note=reason)
        named = reason if isinstance(error, ValueError) else f"{type(error).__name__}: {reason}"
        return cls(contestant, "not available", note=named)


def measure_contestants(
    names: Iterable[str],
    prepare: Callable[[str], tuple[Work, float | None, int | None]],
    device: torch.device,
    *,
    seconds: float,
    at_least: int,
    on_ready: Callable[[Measurement], None] = lambda _: None,
) -> list[Measurement]:
    """Prepare each contestant, then time all in turns. If one fails, its note says why, and the others are timed.

    `prepare` checks and warms up a contestant and returns its work, relative error and peak memory; then `on_ready` is
    called with the measurement so far.
    """
    works: dict[str, Work] = {}
    outcomes: list[Measurement] = []
    for name in names:
        try:
            works[name], error, peak_bytes = prepare(name)
            outcomes.append(Measurement(name, "timed", error=error, peak_bytes=peak_bytes))
        except Exception as failure:  # compilers have exceptions of their own
            outcomes.append(Measurement.failure(name, failure))
            release_memory(device)
        on_ready(outcomes[-1])
    timings = interleaved_timings(works, seconds=seconds, at_least=at_least)
    return [dataclasses.replace(outcome, timing=timings.get(outcome.contestant)) for outcome in outcomes]


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ‖actual - exact‖ / ‖exact‖ in float64."""
    exact = exact.double()
    return ((actual.double() - exact).norm() / exact.norm()).item()


def check_close(what: str, actual: torch.Tensor, exact: torch.Tensor, limit: float) -> float:
    """Return the relative error; raise `WrongResultError` if it exceeds the limit."""
    error = relative_error(actual, exact)
    if not error <= limit:
        raise WrongResultError(f"relative error {error:.1e} of the {what} exceeds {limit:.0e}")
    return error


def check_finite(what: str, values: torch.Tensor) -> None:
    """Raise `WrongResultError` if a value is NaN or infinite."""
    if not values.isfinite().all():
        raise WrongResultError(f"some values of the {what} are not finite")


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the quotient, or None if one is unknown."""
    return None if numerator is None or not denominator else numerator / denominator


def describe(measurements: Iterable[Measurement]) -> str:
    """Return the time or the status of each contestant in one line."""
    return ", ".join(
        f"{item.contestant} {item.status if item.milliseconds is None else f'{item.milliseconds:.4g} ms'}"
        for item in measurements
    )


def notes_of(measurements: Sequence[Measurement]) -> list[str]:
    """Return why contestants were not timed, or not in a CUDA graph; each reason once."""
    notes = [f"{item.contestant}: {item.status}: {item.note}" for item in measurements if item.note]
    if any(item.timing is not None and item.timing.method == "events" for item in measurements):
        notes.append("\\* could not be captured in a CUDA graph: timed by events, which may include the host")
    return list(dict.fromkeys(notes))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_markdown(path: Path, title: str, environment: Mapping[str, str], body: str) -> None:
    """Write a Markdown page: title, environment, body."""
    facts = "\n".join(f"- {key}: {value}" for key, value in environment.items())
    write_text(path, f"# {title}\n\n{facts}\n\n{body}\n")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; file names that are not UTF-8 are escaped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8", "backslashreplace"))


def flat_row(row: Any) -> dict[str, Any]:
    """Return a dataclass as a flat dict: its fields, those of nested dataclasses, and its properties; NaN is None."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        flat |= flat_row(value) if dataclasses.is_dataclass(value) else {field.name: value}
    flat |= {name: getattr(row, name) for name, entry in vars(type(row)).items() if isinstance(entry, property)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in flat.items()
    }


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with equal columns atomically; columns of sequences are left out, they are in the JSON file."""
    rows = [{key: value for key, value in row.items() if not isinstance(value, (list, tuple))} for row in rows]
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, file.getvalue())


def write_results(
    folder: Path,
    name: str,
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    subjects: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> list[Path]:
    """Write `NAME.json` with all tables, and each table as CSV: the first as `NAME.csv`, others as `NAME-TABLE.csv`.

    `tables` has the rows of each table, `subjects` the descriptions of the models. Return the files.
    """
    content = {
        "analysis": name,
        "environment": describe_environment(),
        "settings": settings,
        "subjects": list(subjects),
        "tables": {table: list(rows) for table, rows in tables.items()},
    }
    files = [folder / f"{name}.json"]
    write_json(files[0], content)
    for number, (table, rows) in enumerate(tables.items()):
        files.append(folder / (f"{name}.csv" if number == 0 else f"{name}-{table}.csv"))
        write_csv(files[-1], rows)
    return files
