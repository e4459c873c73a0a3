"""Run commands at the same time, each in a process with a file for its output, within a time limit.

A command that fails leaves the others alone, and no process outlives the caller.
"""

from __future__ import annotations

import math
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inline_attention.support.signals import STOP_SIGNALS, StoppedError

Outcome = Literal["done", "failed", "stopped", "not started"]
LOOK_EVERY = 0.2  # seconds
GRACE = 30.0  # seconds for a stopped process to clean up


@dataclass(frozen=True)
class Command:
    """A command line, its name in messages, and the file for its output."""

    name: str
    arguments: tuple[str, ...]
    output: Path

    def last_lines(self, count: int = 15) -> str:
        """Return the end of its output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-count:])


@dataclass(frozen=True)
class Ended:
    """The outcome of a command: "failed" by its exit code, "stopped" or "not started" because the time was up."""

    command: Command
    outcome: Outcome
    seconds: float


def run_side_by_side(
    commands: Sequence[Command],
    *,
    at_once: int,
    time_limit: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Ended]:
    """Run commands, several at a time, and yield each when it ends. Closing the iterator stops all processes.

    Args:
        commands: Commands, started in this order.
        at_once: Processes at a time.
        time_limit: Seconds after which no more are started, and running ones get SIGTERM, then SIGKILL after `GRACE`.
        environment: Environment variables of the processes; this process's own if None.

    Raises:
        ValueError: If `at_once` is below one.
        OSError: If a process cannot be started.
        StoppedError: After SIGINT or SIGTERM to this process.
    """
    if at_once < 1:
        raise ValueError(f"at least one command must run at a time, got {at_once=}")
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    waiting = list(commands)
    starts: dict[Command, float] = {}
    running: dict[Command, subprocess.Popen[bytes]] = {}

    def ended(command: Command, outcome: Outcome) -> Ended:
        return Ended(command, outcome, time.monotonic() - starts[command])

    with _signals_as_exceptions():
        try:
            while waiting or running:
                while waiting and len(running) < at_once and time.monotonic() < deadline:
                    command = waiting.pop(0)
                    starts[command], running[command] = time.monotonic(), _start(command, environment)
                for command, process in list(running.items()):
                    if process.poll() is not None:
                        del running[command]
                        yield ended(command, "done" if process.returncode == 0 else "failed")
                if time.monotonic() >= deadline:
                    _stop(running.values())  # some may still finish
                    for command, process in running.items():
                        yield ended(command, "done" if process.returncode == 0 else "stopped")
                    yield from (Ended(command, "not started", 0.0) for command in waiting)
                    return
                time.sleep(LOOK_EVERY)
        finally:
            _stop(running.values())


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Raise an exception on a signal, which would otherwise end this process and leave the others behind."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return

    def interrupt(number: int, _: object) -> None:
        raise StoppedError(number)

    earlier = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _start(command: Command, environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    command.output.parent.mkdir(parents=True, exist_ok=True)
    command.output.unlink(missing_ok=True)  # it may be a link to a file elsewhere, or a FIFO
    with command.output.open("xb") as output:
        return subprocess.Popen(
            command.arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )


def _stop(processes: Collection[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()  # does nothing to one that has ended
    last_moment = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, last_moment - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
