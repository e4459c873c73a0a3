"""What a part of the page is, and what all parts share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inline_attention.report.evidence import Evidence, Run
from inline_attention.report.html import Content, Html


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: For links.
        title: Heading.
        lead: What one sees, in two sentences.
        content: Chart and whatever else is to be looked at; None where the part is left out.
        figures: Table of the numbers behind it.
        notes: What is left out and why, and what the reader must know.
    """

    name: str
    title: str
    lead: str
    content: Html | None = None
    figures: Html | None = None
    notes: tuple[Content, ...] = ()


def runs_with(evidence: Evidence, name: str) -> list[Run]:
    """Runs of which something was measured."""
    return [run for run in evidence.runs if name in run.found]


def reasons(evidence: Evidence, name: str) -> tuple[str, ...]:
    """Sentences that say what of a part is left out, and why."""
    return tuple(f"Left out: {reason}" for reason in evidence.missing.get(name, ()))


def left_out(name: str, title: str, evidence: Evidence) -> Section:
    """A part with nothing to show but the reason."""
    return Section(name, title, "", notes=reasons(evidence, name) or ("Left out: no run has what it takes.",))


def listed(parts: Iterable[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *first, last = list(parts) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def number_or_dash(value: float | None, decimals: int) -> str:
    """A number for a table."""
    return "–" if value is None else f"{value:.{decimals}f}"
