"""Timing on a GPU or a CPU: CUDA graphs, contestants that take turns, medians with their spread.

On a GPU the calls of a contestant are captured in a CUDA graph, so that what is timed is the GPU's work and not the
host's. What cannot be captured is timed by events around repeated calls, and says so.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

WARM_UP_CALLS = 3  # the first compiles and tunes, the next ones settle the allocator
GRAPH_MILLISECONDS = 1.0  # of work per graph: the launch of one is then lost in it
MOST_CALLS_PER_GRAPH = 32
MOST_ROUNDS = 100
COPY_BYTES = 1 << 30
CPU_COPY_BYTES = 1 << 26

Method = Literal["graph", "events", "throughput", "clock"]


@dataclass(frozen=True)
class Timing:
    """How long one call takes.

    Attributes:
        milliseconds: Median.
        low: 10th percentile.
        high: 90th percentile.
        runs: Number of measurements; each is the mean over the calls of one launch.
        method: "graph" (GPU time of a replayed CUDA graph), "events" (GPU time between events around calls from the
            host, where a graph could not be captured), "throughput" (the same by intent, the host's share included) or
            "clock" (wall clock).
    """

    milliseconds: float
    low: float
    high: float
    runs: int
    method: Method

    @property
    def spread(self) -> float:
        """From the 10th to the 90th percentile, over the median."""
        return (self.high - self.low) / self.milliseconds


@dataclass(frozen=True)
class Work:
    """Something ready to be timed: `launch` does `calls` calls.

    Attributes:
        launch: Starts the work; on a GPU it need not wait for it.
        calls: By which the measured time is divided.
        device: Where the work is done.
        method: How it is timed.
        from_idle: Wait for the device before each launch, so that a host too slow to keep it busy shows.
    """

    launch: Callable[[], object]
    calls: int
    device: torch.device
    method: Method
    from_idle: bool = False


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Give back what earlier contestants have left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def prepare_work(calls: Sequence[Callable[[], object]], device: torch.device, pool: Any = None) -> Work:
    """Warm up, and on a GPU capture the calls in a CUDA graph, as often as makes it long enough to time.

    Args:
        calls: One call, or the same on several inputs in turn. A graph does not keep the inputs alive; the caller does.
        device: Where they run.
        pool: Result of `torch.cuda.graph_pool_handle()`: memory shared by graphs that never run at once.
    """
    if device.type != "cuda":
        _run(calls)
        return Work(lambda: _run(calls), len(calls), device, "clock")
    side_stream = torch.cuda.Stream(device)  # capture forbids the default stream, so warm-up does without it too
    side_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side_stream):
        for call in itertools.islice(itertools.cycle(calls), WARM_UP_CALLS):
            call()
        estimate = _milliseconds_between_events(calls[0])
        can_be_captured = not any(_waits_for_device(call) for call in calls)
    torch.cuda.current_stream(device).wait_stream(side_stream)
    torch.cuda.synchronize(device)
    wanted = min(MOST_CALLS_PER_GRAPH, math.ceil(GRAPH_MILLISECONDS / max(estimate, 1e-3)))
    repeated = list(calls) * max(1, math.ceil(wanted / len(calls)))
    if not can_be_captured:
        _run(repeated)  # if a call is at fault, it fails here and is reported
        return Work(lambda: _run(repeated), len(repeated), device, "events")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool):
            _run(repeated)
        graph.replay()
        torch.cuda.synchronize(device)
    except RuntimeError:
        # Not everything can be captured. If the call itself is at fault, it fails here once more and is reported.
        torch.cuda.set_stream(stream)  # a failed capture leaves its own behind
        torch.cuda.synchronize(device)
        _run(repeated)
        return Work(lambda: _run(repeated), len(repeated), device, "events")
    return Work(graph.replay, len(repeated), device, "graph")


def interleaved_timings(
    works: Mapping[str, Work], *, seconds: float, at_least: int = 3, at_most: int = MOST_ROUNDS
) -> dict[str, Timing]:
    """Time each work. They take turns, so that a disturbance hits all alike.

    Args:
        works: Already warm, all on one device.
        seconds: When to stop, unless `at_least` rounds are still to do.
        at_least: Rounds to do however long they take.
        at_most: Rounds to stop after however little they took.
    """
    if not works:
        return {}
    device = next(iter(works.values())).device
    keeps_busy = device.type == "cuda" and not any(work.from_idle for work in works.values())
    lead_in = _quickest(works) if keeps_busy else None
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


def prepare_throughput(call: Callable[[], object], device: torch.device, *, seconds_per_launch: float = 0.05) -> Work:
    """A call to be timed as a user runs it, the host's share included: many times in a row, starting from idle.

    The call must be warm.
    """
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    calls = max(1, math.ceil(seconds_per_launch / (time.perf_counter() - start)))
    return Work(lambda: _run([call] * calls), calls, device, "throughput", from_idle=True)


def measure_host_overheads(
    calls: Mapping[str, Callable[[], object]], device: torch.device, *, repeats: int = 100, rounds: int = 15
) -> dict[str, float]:
    """Microseconds of the host per call, by name, on problems so small that the device keeps up.

    The calls must be warm. They take turns, so that a disturbance hits all alike.
    """
    microseconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            microseconds[name].append(1e6 * (time.perf_counter() - start) / repeats)
    synchronize(device)
    return {name: statistics.median(values) for name, values in microseconds.items()}


def measure_copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy within the device's memory."""
    size = CPU_COPY_BYTES
    if device.type == "cuda":
        size = min(COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.randint(1 << 30, (size // 4,), dtype=torch.int32, device=device)  # zeros may copy faster than data
    target = torch.empty_like(source)
    # A copy captured in a graph may go to the slower copy engine; a kernel that does little else shows the rate.
    works = {
        "copy": prepare_work([lambda: target.copy_(source)], device),
        "kernel": prepare_work([lambda: torch.neg(source, out=target)], device),
    }
    timings = interleaved_timings(works, seconds=0.5, at_least=10).values()
    timing = min(timings, key=lambda timing: timing.milliseconds)
    return 2 * size / (1e-3 * timing.milliseconds)


def _run(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _milliseconds_between_events(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _waits_for_device(call: Callable[[], object]) -> bool:
    """Whether a call waits for the GPU, which no graph can hold, or fails.

    Better asked than tried: after a capture that failed, PyTorch can draw no random numbers on the GPU
    (its issue 171263).
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def _quickest(works: Mapping[str, Work]) -> Work:
    def milliseconds(work: Work) -> float:
        read = _time_launch(work)
        synchronize(work.device)
        return read()

    return min(works.values(), key=milliseconds)


def _time_launch(work: Work) -> Callable[[], float]:
    """Launch the work; what is returned gives its milliseconds, on a GPU once it has finished."""
    if work.device.type != "cuda":
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
