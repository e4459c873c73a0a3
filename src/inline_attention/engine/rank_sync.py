"""Keep ranks in step: before each batch they agree on signals and on broken images."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from inline_attention.data.broken import BrokenImage, BrokenImages, BrokenImagesError, write_report
from inline_attention.engine.interruption import InterruptedBySignalError, Interruption
from inline_attention.engine.processes import Processes
from inline_attention.support.text import printable

AnyBatch = TypeVar("AnyBatch")
logger = logging.getLogger(__name__)


class BrokenReport:
    """Shares the lists of broken images, one per dataset, between ranks, and writes them to the run's folder."""

    def __init__(self, lists: Sequence[BrokenImages], processes: Processes, folder: Path | None = None):
        self._lists, self._processes, self._folder = lists, processes, folder
        self._known = 0

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    @property
    def has_news(self) -> bool:
        """True if this rank has found images that the others do not know."""
        return len(self) > self._known

    def share(self) -> None:
        """Share the lists. All ranks must call it.

        Raises:
            BrokenImagesError: On all ranks, if a dataset has more than allowed.
        """
        gathered = self._processes.gather([list(images) for images in self._lists])
        try:
            for number, images in enumerate(self._lists):
                images.add(image for lists in gathered for image in lists[number])
        finally:
            if self._processes.is_main:
                found = [image for images in self._lists for image in images]
                where = "" if self._folder is None else f", all in {write_report(self._folder, found)}"
                new, last = len(found) - self._known, printable(found[-1])
                logger.warning("left out %d broken images%s; the last: %s", new, where, last)
            self._known = len(self)

    def state(self) -> list[list[tuple[str, str]]]:
        """Return name and reason of each image, by dataset, for a checkpoint."""
        return [[(image.name, image.reason) for image in images] for images in self._lists]

    def restore(self, state: list[list[tuple[str, str]]]) -> None:
        """Restore the lists from a checkpoint."""
        for images, entries in zip(self._lists, state, strict=True):
            images.add(BrokenImage(name, reason) for name, reason in entries)


class RankSync:
    """Fetches batches. Signals and broken images of one rank stop all of them."""

    def __init__(self, processes: Processes, interruption: Interruption, broken: BrokenReport):
        self.processes, self._interruption, self._broken = processes, interruption, broken

    def read(self, batches: Iterator[AnyBatch], count: int = 1) -> list[AnyBatch]:
        """Return the next batches of this rank, fewer at the end. Call `agree` before using them."""
        with suppress(BrokenImagesError):  # raised on all ranks by `agree`
            return list(islice(batches, count))
        return []

    def agree(self) -> None:
        """Synchronize ranks. All must call it.

        Raises:
            InterruptedBySignalError: On all ranks, if one got a signal.
            BrokenImagesError: On all ranks, if there are more broken images than allowed.
        """
        is_stopped, has_news = self.processes.any(self._interruption.number is not None, self._broken.has_news)
        if has_news:
            self._broken.share()
        if is_stopped:
            raise InterruptedBySignalError(self._interruption.number or signal.SIGTERM)
