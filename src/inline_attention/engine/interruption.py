"""SIGTERM and SIGINT, answered at the next safe moment: save, then leave with the exit code that shells expect."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class InterruptedBySignalError(RuntimeError):
    """A run stopped because it was told to, after saving."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        self.folder: Path | None = None  # of the run, where there is one to go on with


class Interruption:
    """Remembers the first signal; further ones, while the run saves, change nothing."""

    def __init__(self) -> None:
        self.number: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        del frame
        if self.number is None:
            self.number = number


@contextmanager
def noted_interruptions() -> Iterator[Interruption]:
    """Signals are noted inside instead of killing the process; the handlers from before come back afterwards.

    Python lets the main thread alone handle signals: in another, as in a notebook's, there are none to note.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    previous = {number: signal.signal(number, interruption.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
