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

logger = logging.getLogger(__name__)


class BrokenReport:
    """Keeps the lists of the processes the same, each image in them once."""

    def __init__(self, lists: Sequence[BrokenImages], processes: Processes, folder: Path | None = None):
        """Start with what the lists hold.

        Args:
            lists: Where the loaders of this process note what they meet: one for each dataset.
            processes: This one among the others.
            folder: Where to list them; None for nowhere.
        """
        self._lists, self._processes, self._folder = lists, processes, folder
        self._known = 0

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    @property
    def has_news(self) -> bool:
        """Whether this process has met images that the others have not heard of."""
        return len(self) > self._known

    def share(self) -> None:
        """Tell each other, and list all; all processes must take part.

        Raises:
            BrokenImagesError: In all of them, if there are more than allowed in one of the datasets.
        """
        gathered = self._processes.gather([list(images) for images in self._lists])
        try:
            for number, images in enumerate(self._lists):
                images.add(image for lists in gathered for image in lists[number])
        finally:
            if self._processes.is_main:
                self._publish()
            self._known = len(self)

    def _publish(self) -> None:
        everything = [image for images in self._lists for image in images]
        where = ""
        if self._folder is not None:
            where = f", all in {write_report(self._folder, everything)}"
        new = len(everything) - self._known
        logger.warning("left out %d broken images%s; the last: %s", new, where, printable(everything[-1]))

    def state(self) -> list[list[tuple[str, str]]]:
        """For a checkpoint: name and reason of each, by dataset."""
        return [[(image.name, image.reason) for image in images] for images in self._lists]

    def restore(self, state: list[list[tuple[str, str]]]) -> None:
        """Take up what a run has met before."""
        for images, entries in zip(self._lists, state, strict=True):
            images.add(BrokenImage(name, reason) for name, reason in entries)


AnyBatch = TypeVar("AnyBatch")


class RankSync:
    """Fetches batches; what one process has met on the way, all of them answer."""

    def __init__(self, processes: Processes, interruption: Interruption, broken: BrokenReport):
        """Watch for signals and broken images.

        Args:
            processes: This one among the others.
            interruption: Signals to this process.
            broken: Broken images of all processes.
        """
        self.processes, self._interruption, self._broken = processes, interruption, broken

    def fetch(self, batches: Iterator[AnyBatch], count: int = 1) -> list[AnyBatch]:
        """The next batches of this process, fewer where they end; all processes must call it equally often.

        Raises:
            InterruptedBySignalError: In all of them, if one was told to stop.
            BrokenImagesError: In all of them, if together they met more broken images than allowed.
        """
        fetched = self.read(batches, count)
        self.agree()
        return fetched

    def read(self, batches: Iterator[AnyBatch], count: int = 1) -> list[AnyBatch]:
        """The first half of `fetch`: whoever reads ahead agrees when the batches are needed."""
        with suppress(BrokenImagesError):  # which is news, and raised by all when they agree
            return list(islice(batches, count))
        return []

    def agree(self) -> None:
        """The second half of `fetch`."""
        is_told_to_stop, is_news = self.processes.any(self._interruption.number is not None, self._broken.has_news)
        if is_news:
            self._broken.share()
        if is_told_to_stop:
            raise InterruptedBySignalError(self._interruption.number or signal.SIGTERM)
