"""Commands that run at the same time, each a process with a file for its output: for work that leaves a machine idle.

What one writes does not get mixed up with another's, what fails does not take others along, and nothing outlives the
time that there is.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["done", "failed", "stopped", "not started"]
LOOK_EVERY = 0.2  # seconds
GRACE = 30.0  # seconds for a stopped process to clean up


class InterruptedRunsError(Exception):
    """SIGINT or SIGTERM; all commands have been stopped."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@dataclass(frozen=True)
class Command:
    """What to run.

    Attributes:
        name: For messages.
        arguments: Program and arguments.
        output: File for what it writes to the console; replaced if it is there.
    """

    name: str
    arguments: tuple[str, ...]
    output: Path

    def last_lines(self, count: int = 15) -> str:
        """The end of its output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-count:])


@dataclass(frozen=True)
class Ended:
    """What became of a command.

    Attributes:
        command: Which one.
        outcome: "failed" if it returned another status than 0, "stopped" or "not started" when the time was over.
        seconds: From its start to its end.
    """

    command: Command
    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class _Running:
    command: Command
    process: subprocess.Popen[bytes]
    start: float

    def ended(self, outcome: Outcome) -> Ended:
        return Ended(self.command, outcome, time.monotonic() - self.start)


def run_side_by_side(
    commands: Sequence[Command],
    *,
    at_once: int,
    time_limit: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Ended]:
    """Run commands, so many at a time, and give each back when it ends.

    Closing the iterator (by an exception or Ctrl-C) stops all processes.

    Args:
        commands: Started in this order.
        at_once: Processes at a time.
        time_limit: Seconds after which no more are started, and those that run get SIGTERM; SIGKILL after `GRACE`.
        environment: Environment variables of the processes; this process's own if None.

    Raises:
        ValueError: If none may run at a time.
        OSError: If one cannot be started.
        InterruptedRunsError: After SIGINT or SIGTERM to this process.
    """
    if at_once < 1:
        raise ValueError(f"at least one command must run at a time, got {at_once=}")
    deadline = float("inf") if time_limit is None else time.monotonic() + time_limit
    waiting, running = list(commands), list[_Running]()
    with _signals_as_exceptions():
        try:
            while waiting or running:
                while waiting and len(running) < at_once and time.monotonic() < deadline:
                    running.append(_started(waiting.pop(0), environment))
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    yield one.ended("done" if one.process.returncode == 0 else "failed")
                if time.monotonic() >= deadline:
                    _stop(running)  # some may still come to their end in the meantime
                    yield from (one.ended("done" if one.process.returncode == 0 else "stopped") for one in running)
                    yield from (Ended(command, "not started", 0.0) for command in waiting)
                    return
                time.sleep(LOOK_EVERY)
        finally:
            _stop(running)


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """A signal must not end this process and leave the others behind."""
    if threading.current_thread() is not threading.main_thread():  # where no handlers can be set
        yield
        return

    def interrupt(number: int, _: object) -> None:
        raise InterruptedRunsError(number)

    earlier = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _started(command: Command, environment: Mapping[str, str] | None) -> _Running:
    command.output.parent.mkdir(parents=True, exist_ok=True)
    with command.output.open("wb") as output:
        process = subprocess.Popen(
            command.arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    return _Running(command, process, time.monotonic())


def _stop(running: Sequence[_Running]) -> None:
    for one in running:
        one.process.terminate()  # does nothing to one that has ended
    last_moment = time.monotonic() + GRACE
    for one in running:
        try:
            one.process.wait(max(0.0, last_moment - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
