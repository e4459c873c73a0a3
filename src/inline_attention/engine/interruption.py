"""Stop at the next safe moment after SIGTERM or SIGINT: save, then exit with the code that shells expect."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

AT_ONCE = 128 + signal.SIGINT  # exit code after a second SIGINT
# torchrun passes a SIGINT on that the terminal has sent to all of its processes already.
TORCHRUN_GRACE = 3.0  # seconds
END = 0  # no signal has this number
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_wakeup_descriptors: set[int] = set()  # pipes that are written to when a signal comes
_masks: list[Iterable[int]] = []  # signals that were blocked before a fork


class InterruptedBySignalError(RuntimeError):
    """A run stopped because of a signal, after saving."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        self.folder: Path | None = None  # of the run, if it can be resumed


class Interruption:
    """The number of the first signal, or None."""

    number: int | None = None

    def note(self, number: int, _: FrameType | None) -> None:
        """Handle a signal. Later ones do not change the number."""
        self.number = self.number or number


@contextmanager
def noted_interruptions() -> Iterator[Interruption]:
    """Note signals instead of ending the process; restore the previous handlers at the end.

    After a first signal, a SIGINT ends the process at once with exit code 130, whatever it waits for: a picture on a
    dead network disk, a data worker, another rank. Python runs no handler while the main thread waits in C code, so a
    second thread watches. In another thread than the main one Python handles no signals, and there are none to note.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    previous = {number: signal.signal(number, interruption.note) for number in SIGNALS}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    previous_descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _wakeup_descriptors.add(writing)
    watcher = threading.Thread(target=_end_at_second, args=(reading,), name="signals", daemon=True)
    watcher.start()
    try:
        yield interruption
    finally:
        signal.set_wakeup_fd(previous_descriptor)
        for number, handler in previous.items():
            signal.signal(number, handler)
        _wakeup_descriptors.discard(writing)
        os.write(writing, bytes([END]))
        watcher.join()
        os.close(reading)
        os.close(writing)


def _end_at_second(reading: int) -> None:
    """Read the numbers of signals from a pipe; end the process if a SIGINT follows another signal."""
    first = None
    while True:
        for number in os.read(reading, 256):
            if number == END:
                return
            if number not in SIGNALS:
                continue
            now = time.monotonic()
            if first is None:
                first = now
            elif number == signal.SIGINT and not ("TORCHELASTIC_RUN_ID" in os.environ and now < first + TORCHRUN_GRACE):
                _end_at_once()


def _end_at_once() -> None:
    with suppress(OSError):
        os.write(2, b"\nstopped at once by a second SIGINT; nothing was saved after the last checkpoint\n")
    with suppress(Exception):
        for child in multiprocessing.active_children():  # they would wait for what blocks them
            if child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
    os._exit(AT_ONCE)


# A forked child has a copy of the pipe: its signals, which a terminal sends to all, must not count as ours.


def _before_fork() -> None:
    if _wakeup_descriptors:
        _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS))


def _after_fork_in_parent() -> None:
    if _masks:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _after_fork_in_child() -> None:
    if _wakeup_descriptors:
        signal.set_wakeup_fd(-1)
        _wakeup_descriptors.clear()
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
