"""What a contestant's measurement gives, and how results are written: JSON and Markdown, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from inline_attention.benchmark.timing import Timing
from inline_attention.support.files import write_atomically

Status = Literal["timed", "WRONG", "out of memory", "not available"]


class WrongResultError(Exception):
    """A contestant whose result is not what it should be: it must not be timed."""


@dataclass(frozen=True)
class Measurement:
    """What came of one contestant in one case.

    Attributes:
        contestant: Its name.
        status: Whether it was timed, and if not, why in a word.
        timing: Of one call, where it was timed.
        error: Largest relative error found before timing; None where there is nothing to compare with.
        note: Why it was not timed, in a sentence.
        peak_bytes: Peak memory of one call, where it was measured.
    """

    contestant: str
    status: Status
    timing: Timing | None = None
    error: float | None = None
    note: str = ""
    peak_bytes: int | None = None

    @property
    def milliseconds(self) -> float | None:
        """Median, or None."""
        return None if self.timing is None else self.timing.milliseconds

    @classmethod
    def failure(cls, contestant: str, error: Exception) -> Measurement:
        """The measurement of a contestant that raised `error`."""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, WrongResultError):
            return cls(contestant, "WRONG", note=reason)
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return cls(contestant, "out of memory", note=reason)
        named = reason if isinstance(error, ValueError) else f"{type(error).__name__}: {reason}"
        return cls(contestant, "not available", note=named)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """‖actual - exact‖ / ‖exact‖ in float64."""
    exact = exact.double()
    return ((actual.double() - exact).norm() / exact.norm()).item()


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient where both are known."""
    return None if numerator is None or not denominator else numerator / denominator


def notes_of(measurements: Sequence[Measurement]) -> list[str]:
    """Why contestants were not timed, or not as they should be, each reason once."""
    notes = [f"{item.contestant}: {item.status}: {item.note}" for item in measurements if item.note]
    if any(item.timing is not None and item.timing.method == "events" for item in measurements):
        notes.append(
            "\\* could not be captured in a CUDA graph: timed by events around its calls, which may include the host"
        )
    return list(dict.fromkeys(notes))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_markdown(path: Path, title: str, environment: Mapping[str, str], body: str) -> None:
    """Write a Markdown page: title, where it was measured, body."""
    facts = "\n".join(f"- {key}: {value}" for key, value in environment.items())
    write_text(path, f"# {title}\n\n{facts}\n\n{body}\n")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; file names that are not UTF-8 are escaped, in JSON in its own notation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8", "backslashreplace"))
