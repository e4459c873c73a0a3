"""Images that cannot be read: counted, listed, and no more of them than allowed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from inline_attention.support.files import AnyPath, write_atomically
from inline_attention.support.text import printable

FIRST_OFFENDERS = 5
REPORT_NAME = "broken_images.csv"


class BrokenImagesError(RuntimeError):
    """More images are broken than the limit allows. `broken` are those found until then."""

    def __init__(self, message: str, broken: tuple[BrokenImage, ...] = ()):
        super().__init__(message)
        self.broken = broken


@dataclass(frozen=True)
class BrokenImage:
    """An image that cannot be read: its path or other name, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.name}: {self.reason}")


@dataclass(frozen=True)
class BrokenImageLimit:
    """Limits of broken images in a dataset. Both hold, and at least one image must be readable."""

    count: int = 1000  # maximum number of broken images
    share: float = 0.5  # maximum share of the dataset, from 0 to 1

    def __post_init__(self):
        if self.count < 0 or not 0 <= self.share <= 1:
            expected = "the limit of broken images must be a count of at least 0 and a share from 0 to 1"
            raise ValueError(f"{expected}, got count={self.count}, share={self.share}")

    def allowed(self, total: int) -> int:
        """Return how many of `total` images may be broken."""
        return max(0, min(self.count, int(self.share * total), total - 1))


class BrokenImages:
    """The broken images of one dataset, met so far by this process."""

    def __init__(self, total: int, limit: BrokenImageLimit | None = None):
        """Start with none of `total` images of the dataset; a limit given is one of the settings of a run."""
        self.total = total
        self._advice = "repair or remove them"
        if limit is not None:
            self._advice += ", or raise limits.broken_image_share and limits.broken_image_count with --set"
        self.allowed = (limit or BrokenImageLimit()).allowed(total)
        self._found: dict[str, BrokenImage] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[BrokenImage]:
        return iter(self._found.values())

    def add(self, broken: Iterable[BrokenImage]) -> list[BrokenImage]:
        """Note some; returns those not met before, for the log.

        Raises `BrokenImagesError` if they are more than allowed; they are noted all the same.
        """
        new = [image for image in broken if image.name not in self._found]
        self._found.update((image.name, image) for image in new)
        if len(self) > self.allowed:
            listed = [str(image) for image in list(self)[:FIRST_OFFENDERS]]
            if len(self) > FIRST_OFFENDERS:
                listed.append(f"and {len(self) - FIRST_OFFENDERS:,} more")
            found = f"at least {len(self):,} of {self.total:,} images cannot be read"
            advice = f"at most {self.allowed:,} may be broken; {self._advice}"
            raise BrokenImagesError("\n  ".join([f"{found}, {advice}:", *listed]), tuple(self))
        return new


def write_report(folder: AnyPath, images: Iterable[BrokenImage]) -> Path:
    """Write broken images to a CSV file with the columns path and reason, in place of the one from before."""
    path = Path(folder) / REPORT_NAME
    content = io.StringIO(newline="")
    rows = ((printable(image.name), printable(image.reason)) for image in images)
    csv.writer(content).writerows([("path", "reason"), *rows])
    write_atomically(path, content.getvalue())
    return path
