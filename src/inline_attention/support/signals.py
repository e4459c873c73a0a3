"""Signals that end a program: quietly the first time, at once the second time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived. `exit_code` is what a shell expects: 130 or 143."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class StopOnSignal:
    """Raises `StoppedError` in the main thread on the first SIGINT or SIGTERM; the second ends the process at once."""

    def __init__(self) -> None:
        self.exit_code: int | None = None  # 128 plus the number of the first signal
        self._process = os.getpid()

    def install(self) -> None:
        """Handle both signals, except those that this process was started to ignore (as by nohup)."""
        self._process = os.getpid()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._stop)
                _end_at_next(number)

    def uninstall(self) -> None:
        """Give both signals back to the system, which ends the process."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) == self._stop:
                signal.signal(number, signal.SIG_DFL)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        # An import is not interrupted by an exception: C code may swallow it, and leave modules half imported.
        if self.exit_code is not None or os.getpid() != self._process or _is_importing(frame):
            os._exit(128 + number)
        self.exit_code = 128 + number
        raise StoppedError(number)


stop_on_signal = StopOnSignal()


def _end_at_next(number: int) -> None:
    """Let the system end the process at the second signal, even while C code blocks and Python runs no handler.

    The handler in place is called once. Then the system's own action is in force, as with System V's `signal`. Where
    the C library lacks that function, nothing changes: a second signal waits until Python can handle it.
    """
    if sys.platform != "linux":
        return
    with suppress(ImportError, AttributeError, OSError):
        import ctypes

        current = ctypes.pythonapi.PyOS_getsig
        current.restype, current.argtypes = ctypes.c_void_p, [ctypes.c_int]
        install = ctypes.CDLL(None).sysv_signal
        install.restype, install.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
        install(number, current(number))


@contextmanager
def children_ignore_interrupts() -> Iterator[None]:
    """Start processes that never see SIGINT: Ctrl-C reaches this process, which ends them without their tracebacks.

    SIGINT is blocked for the calling thread meanwhile, and delivered afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
