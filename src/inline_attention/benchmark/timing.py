"""Time callables on a GPU or a CPU: CUDA graphs, contestants in turns, medians with their spread.

On a GPU, calls are captured in a CUDA graph, so that the GPU is timed and not the host. Calls that cannot be captured
are timed by events around them, and `Timing.method` says so.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

WARM_UP_CALLS = 3  # the first compiles and tunes, the next ones settle the allocator
GRAPH_MILLISECONDS = 1.0  # work per graph: long enough to hide its launch
MOST_CALLS_PER_GRAPH = 32
MOST_ROUNDS = 100
SECONDS_PER_LAUNCH = 0.05
COPY_BYTES = 1 << 30
CPU_COPY_BYTES = 1 << 26

Call = Callable[[], object]
# GPU time of a CUDA graph; between events if none can be captured; between events to include the host; host's clock.
Method = Literal["graph", "events", "throughput", "clock"]


@dataclass(frozen=True)
class Timing:
    """Time of one call."""

    milliseconds: float  # median
    low: float  # 10th percentile
    high: float  # 90th percentile
    runs: int  # number of measurements; each is the mean over the calls of one launch
    method: Method

    @property
    def spread(self) -> float:
        """90th minus 10th percentile, over the median."""
        return (self.high - self.low) / self.milliseconds


@dataclass(frozen=True)
class Work:
    """Warm calls, ready to be timed."""

    launch: Call  # starts the calls; on a GPU it need not wait for them
    calls: int  # per launch
    device: torch.device
    method: Method
    from_idle: bool = False  # wait for the device before each launch, so that a slow host shows


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads inside the `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def release_memory(device: torch.device) -> None:
    """Free the memory that earlier contestants have left in caches."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Start to measure the peak memory of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def read_peak(device: torch.device, occupied: int) -> int | None:
    """Return the peak memory of a GPU since `reset_peak` in bytes, minus `occupied`; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - occupied


def prepare_work(calls: Sequence[Call], device: torch.device, pool: Any = None) -> Work:
    """Warm up, and on a GPU capture the calls in a CUDA graph, repeated until it is long enough to time.

    The calls are one, or the same on several inputs, which the caller keeps alive. `pool` is a result of
    `torch.cuda.graph_pool_handle()`: memory shared by graphs that never run at the same time.
    """
    if device.type != "cuda":
        _run(calls)
        return Work(lambda: _run(calls), len(calls), device, "clock")
    side_stream = torch.cuda.Stream(device)  # capture forbids the default stream, so warm-up avoids it too
    side_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side_stream):
        _run(list(itertools.islice(itertools.cycle(calls), WARM_UP_CALLS)))
        estimate = _milliseconds(Work(calls[0], 1, device, "events"))
        can_be_captured = not any(_waits_for_device(call) for call in calls)
    torch.cuda.current_stream(device).wait_stream(side_stream)
    torch.cuda.synchronize(device)
    wanted = min(MOST_CALLS_PER_GRAPH, math.ceil(GRAPH_MILLISECONDS / max(estimate, 1e-3)))
    repeated = list(calls) * max(1, math.ceil(wanted / len(calls)))
    graph = _capture(repeated, device, pool) if can_be_captured else None
    if graph is not None:
        return Work(graph.replay, len(repeated), device, "graph")
    _run(repeated)  # a faulty call raises here
    return Work(lambda: _run(repeated), len(repeated), device, "events")


def prepare_throughput(call: Call, device: torch.device) -> Work:
    """Return work that times a warm call as users run it, host included: many times in a row, from an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    calls = max(1, math.ceil(SECONDS_PER_LAUNCH / (time.perf_counter() - start)))
    return Work(lambda: _run([call] * calls), calls, device, "throughput", from_idle=True)


def host_work(call: Call, device: torch.device, calls: int = 100) -> Work:
    """Return work that times the host alone, for a warm call so small that the device keeps up."""
    return Work(lambda: _run([call] * calls), calls, device, "clock", from_idle=True)


def interleaved_timings(
    works: Mapping[str, Work], *, seconds: float, at_least: int = 3, at_most: int = MOST_ROUNDS
) -> dict[str, Timing]:
    """Time works on one device for so many seconds, in turns, so that a disturbance affects all.

    `at_least` and `at_most` bound the number of rounds, however long they take.
    """
    if not works:
        return {}
    device = next(iter(works.values())).device
    keeps_busy = device.type == "cuda" and not any(work.from_idle for work in works.values())
    lead_in = min(works.values(), key=_milliseconds) if keeps_busy else None
    milliseconds: dict[str, list[float]] = {name: [] for name in works}
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < at_least or (rounds < at_most and time.perf_counter() < deadline):
        if lead_in is not None:
            lead_in.launch()  # untimed: keeps the GPU busy while the host queues the first contestant
        reads: dict[str, Callable[[], float]] = {}
        for name, work in works.items():
            if work.from_idle:
                synchronize(device)
            reads[name] = _time_launch(work)
        synchronize(device)
        for name, read in reads.items():
            milliseconds[name].append(read() / works[name].calls)
        rounds += 1
    return {name: _summary(values, works[name].method) for name, values in milliseconds.items()}


def measure_copy_rate(device: torch.device) -> float:
    """Return the bytes per second, read and written, of a large copy within the device's memory."""
    size = CPU_COPY_BYTES
    if device.type == "cuda":
        size = min(COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.randint(1 << 30, (size // 4,), dtype=torch.int32, device=device)  # zeros may copy faster than data
    target = torch.empty_like(source)
    # A copy captured in a graph may use the slower copy engine; a trivial kernel shows the rate.
    works = {
        "copy": prepare_work([lambda: target.copy_(source)], device),
        "kernel": prepare_work([lambda: torch.neg(source, out=target)], device),
    }
    timings = interleaved_timings(works, seconds=0.5, at_least=10)
    return 2 * size / (1e-3 * min(timing.milliseconds for timing in timings.values()))


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _waits_for_device(call: Call) -> bool:
    """Return True if a call waits for the GPU, which no graph can hold, or fails.

    A failed capture would also show it, but PyTorch can then draw no random numbers on the GPU (its issue 171263).
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def _capture(calls: Sequence[Call], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool):
            _run(calls)
        graph.replay()
        torch.cuda.synchronize(device)
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a failed capture leaves its own behind
        torch.cuda.synchronize(device)
        return None
    return graph


def _milliseconds(work: Work) -> float:
    read = _time_launch(work)
    synchronize(work.device)
    return read()


def _time_launch(work: Work) -> Callable[[], float]:
    """Launch the work; return a function that reads its milliseconds, on a GPU after it has finished."""
    if work.device.type != "cuda" or work.method == "clock":
        start = time.perf_counter()
        work.launch()
        elapsed = 1e3 * (time.perf_counter() - start)
        return lambda: elapsed
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work.launch()
    end.record()
    return lambda: begin.elapsed_time(end)


def _summary(milliseconds: Sequence[float], method: Method) -> Timing:
    ordered = sorted(milliseconds)
    tenth = round(0.1 * (len(ordered) - 1))
    return Timing(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered), method)
