"""Faults that a check found in a dataset: the count of each kind, the first few by name, and the repair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from inline_attention.support.text import printable

FIRST_OFFENDERS = 5
LONGEST_NAME = 400  # characters


@dataclass
class Finding:
    """One kind of fault.

    Attributes:
        fault: Fault, in the plural, such as "boxes without area".
        repair: Repair of the fault.
        count: How many there are.
        first: The first of them, by name.
    """

    fault: str
    repair: str
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, offender: str) -> None:
        """Count one."""
        self.count += 1
        if len(self.first) < FIRST_OFFENDERS:
            self.first.append(offender if len(offender) <= LONGEST_NAME else f"{offender[:LONGEST_NAME]}…")


@dataclass(frozen=True)
class DataReport:
    """All that is wrong with a dataset.

    Attributes:
        location: The dataset.
        checked: What was looked at, such as "118,287 images, 860,001 objects".
        findings: One for each kind of fault that was met.
        repaired: Whether the faults have been repaired in what is used; files are never changed.
    """

    location: str
    checked: str
    findings: tuple[Finding, ...]
    repaired: bool

    def __len__(self) -> int:
        """Faults of all kinds."""
        return sum(finding.count for finding in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __bool__(self) -> bool:
        """True if anything was found."""
        return bool(self.findings)

    def count(self, fault: str) -> int:
        """Return the number of faults of a kind."""
        return sum(finding.count for finding in self.findings if finding.fault == fault)

    @property
    def problems(self) -> list[str]:
        """A sentence for each kind of fault that stands in the way of training; none if they were repaired."""
        if self.repaired:
            return []
        return [
            printable(f"{self.location}: {_described(finding)}; repairing: {finding.repair}")
            for finding in self.findings
        ]

    def __str__(self) -> str:
        """A few lines for people."""
        lines = [f"{self.location} ({self.checked}): {'nothing wrong' if not self else f'{len(self):,} faults'}"]
        for finding in self.findings:
            done = f": {finding.repair}" if self.repaired else f" (repairing: {finding.repair})"
            lines.append(f"  {_described(finding)}{done}")
        return "\n".join(map(printable, lines))


class Findings:
    """Faults in the counting."""

    def __init__(self):
        self._by_fault: dict[str, Finding] = {}

    def add(self, fault: str, offender: str, *, repair: str) -> None:
        """Count a fault of a kind; arguments as the attributes of `Finding`."""
        self._by_fault.setdefault(fault, Finding(fault, repair)).add(offender)

    def report(self, location: str, checked: str, *, repaired: bool) -> DataReport:
        """All faults met so far."""
        return DataReport(location, checked, tuple(self._by_fault.values()), repaired)


def _described(finding: Finding) -> str:
    more = f" and {finding.count - len(finding.first):,} more" if finding.count > len(finding.first) else ""
    return f"{finding.count:,} {finding.fault} ({', '.join(finding.first)}{more})"
