"""Faults that a check found in a dataset: the count of each kind, the first few by name, and the repair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from inline_attention.support.text import counted, printable, shortened

Source = TypeVar("Source")
FIRST_OFFENDERS = 5
LONGEST_NAME = 400  # characters
LEFT_OUT = "left out"  # a repair
KEPT_AS_LABELS = "kept, so that labels stay the same; nothing will be learned of them"  # a repair of classes
NOT_POSSIBLE = "not possible; "  # begins a repair that is none; what to do instead follows


@dataclass
class Finding:
    """One kind of fault, such as "boxes without area": its repair, its count, and the first of them by name."""

    fault: str
    repair: str
    count: int = 0
    first: list[str] = field(default_factory=list)

    @property
    def is_repairable(self) -> bool:
        """True if it can be repaired."""
        return not self.repair.startswith(NOT_POSSIBLE)

    @property
    def advice(self) -> str:
        """How it can be repaired, or what to do instead."""
        return f"repairing: {self.repair}" if self.is_repairable else self.repair.removeprefix(NOT_POSSIBLE)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.first):,} more" if self.count > len(self.first) else ""
        return f"{counted(self.count, self.fault)} ({', '.join(self.first)}{more})"


@dataclass
class DataReport:
    """All that is wrong with a dataset, by the name of the fault."""

    location: str
    checked: str  # what was looked at, such as "118,287 images, 860,001 objects"
    repaired: bool  # True if the faults have been repaired in what is used; files are never changed
    findings: dict[str, Finding] = field(default_factory=dict)

    def add(self, fault: str, offender: str, repair: str = LEFT_OUT) -> None:
        """Count a fault; the offender is left out unless another repair is given. See `Finding`."""
        finding = self.findings.setdefault(fault, Finding(fault, repair))
        finding.count += 1
        if len(finding.first) < FIRST_OFFENDERS:
            finding.first.append(shortened(offender, LONGEST_NAME + 1))

    def __len__(self) -> int:
        """Faults of all kinds."""
        return sum(finding.count for finding in self)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings.values())

    def count(self, fault: str) -> int:
        """Return the number of faults of a kind."""
        return self.findings[fault].count if fault in self.findings else 0

    @property
    def problems(self) -> list[str]:
        """One sentence for each kind of fault that prevents training; none if faults were repaired."""
        if self.repaired:
            return []
        return [printable(f"{self.location}: {finding}; {finding.advice}") for finding in self]

    def __str__(self) -> str:
        """Return a few lines for people."""
        lines = [f"{self.location} ({self.checked}): {counted(len(self), 'faults') if len(self) else 'nothing wrong'}"]
        repaired = "  {0}: {0.repair}" if self.repaired else "  {0} ({0.advice})"
        return "\n".join(map(printable, [*lines, *map(repaired.format, self)]))


@dataclass(frozen=True)
class OpenedSplits(Generic[Source]):
    """Training and validation data, as far as they could be opened, and all that is wrong with them.

    A problem is one sentence. Repaired faults are only in the reports; each split has one.
    """

    train: Source | None
    validation: Source | None
    problems: list[str] = field(default_factory=list)
    reports: list[DataReport] = field(default_factory=list)


def each_once(problems: Iterable[str]) -> list[str]:
    """Problems without repetitions: both splits may be the same. Names from files are shown as text."""
    return [printable(problem) for problem in dict.fromkeys(problems)]
