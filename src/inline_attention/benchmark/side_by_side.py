"""Run commands, or functions that compile, in several processes at once and within a time limit.

A command that fails leaves the others alone, and no process outlives the caller.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inline_attention.support.signals import STOP_SIGNALS, StoppedError, children_ignore_interrupts

Outcome = Literal["done", "failed", "stopped", "not started"]
LOOK_EVERY = 0.2  # seconds
GRACE = 30.0  # seconds for a stopped process to clean up
RAISE_AGAIN_AFTER = 5.0  # seconds; interrupted code may swallow an exception


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


def run_side_by_side(commands: Sequence[Command], *, at_once: int, time_limit: float | None = None) -> Iterator[Ended]:
    """Run commands in this order, `at_once` at a time, and yield each when it ends. Closing the iterator stops all.

    After `time_limit` seconds no more are started, and running ones get SIGTERM, then SIGKILL after `GRACE`.
    They share the processors: more threads than cores would wait for each other. OMP_NUM_THREADS, if set, is kept.

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
                    starts[command], running[command] = time.monotonic(), _start(command, at_once)
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


def _start(command: Command, at_once: int) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if at_once > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))
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


def run_compile_jobs(
    jobs: Mapping[str, Callable[[], object]], processes: int, *, on_progress: Callable[[str], None]
) -> None:
    """Run jobs that compile, several at a time. A job that fails is reported and the others continue.

    Jobs are functions that can be pickled, by name, longest first. A model takes half a minute to compile, most of it
    on one core. A script that calls this needs the usual `if __name__ == "__main__":` of multiprocessing.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_set_up_process) as pool:
        with children_ignore_interrupts():
            futures = {pool.submit(job): name for name, job in jobs.items()}
        for future in as_completed(futures):
            failure = future.exception()
            outcome = "compiled" if failure is None else f"{type(failure).__name__}: {failure}".splitlines()[0]
            on_progress(f"{futures[future]} {outcome}")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in a block that takes longer; no limit outside the main thread, or without SIGALRM."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if seconds == math.inf or not in_main_thread or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), RAISE_AGAIN_AFTER)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _set_up_process() -> None:
    # PyTorch's cache keys name the first loaded module that has a `torch`. In a child that could be its copy of the
    # calling script, which has this name in no other process: the cache would never be hit.
    sys.modules.pop("__mp_main__", None)
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # there are enough processes
