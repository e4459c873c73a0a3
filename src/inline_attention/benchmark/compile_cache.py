"""Compile in several processes at once, within a time limit. Later processes find the results on disk."""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager

from inline_attention.support.signals import children_ignore_interrupts

RAISE_AGAIN_AFTER = 5.0  # seconds; interrupted code may swallow an exception


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
