"""Where the processes of a run keep in step: before each batch they agree on whether, and with what, to go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from inline_attention.data.broken import BrokenImagesError
from inline_attention.engine.broken_report import BrokenReport
from inline_attention.engine.interruption import InterruptedBySignalError, Interruption
from inline_attention.engine.processes import Processes

AnyBatch = TypeVar("AnyBatch")


class Lockstep:
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
