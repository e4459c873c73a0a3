"""Time and peak memory of one attention call against the number of tokens.

Every point is measured in a process of its own, because the peak of a process never goes down again by itself. The
processes are forked from a server that has imported torch and run nothing, so that they start quickly and inherit no
thread pool. A script that measures needs the usual `if __name__ == "__main__":` of multiprocessing.

Shapes: `B` batch (one image), `N` tokens, `H` heads, `D` head dim.
"""

from __future__ import annotations

import math
import multiprocessing
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from inline_attention.ops import inline_attention_qkvpacked
from inline_attention.support.signals import children_ignore_interrupts

DEFAULT_SIZES = (196, 784, 3136, 12544)  # 14² (a 224² image in 16² patches), 28², 56², 112²
HEADS, HEAD_DIM = 6, 32  # of DeiT-T's InLine blocks
EXPLICIT_WEIGHTS_LIMIT = 1 << 30  # bytes of the N×N weights of all heads; beyond it the demo might swap
WARM_UP_TOKENS = 16
REPEATS = 20  # timed calls of one point, unless they take longer than
SECONDS_PER_POINT = 2.0
KILLED = -9  # exit code of a process ended by SIGKILL, as by the out-of-memory killer


class CostPoint(NamedTuple):
    """What one attention call of one size costs.

    Attributes:
        kind: A key of `ATTENTIONS`.
        tokens: N.
        milliseconds: Median wall-clock time of one forward call; None where it was not run.
        runs: How many calls the median is taken over.
        peak_bytes: Peak resident memory of the process during one call, less that before it: the output and
            everything in between, not the input. Linux counts in steps of 128 KiB or so, hence 0 for a very small call.
            None where it was not run or the platform cannot tell.
        note: Why something is missing; empty otherwise.
    """

    kind: str
    tokens: int
    milliseconds: float | None
    runs: int
    peak_bytes: int | None
    note: str = ""


class Attention(NamedTuple):
    """One attention to measure: `run` takes qkv `[B, N, 3, H, D]` and local weights `[B, H, D, 3, 3]`."""

    label: str
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def measure_attention_cost(
    kinds: Sequence[str] | None = None,
    sizes: Sequence[int] = DEFAULT_SIZES,
    *,
    on_progress: Callable[[CostPoint], None] | None = None,
) -> list[CostPoint]:
    """Measure each kind of attention at each size: one image, `HEADS` heads, float32, forward only, on the CPU.

    Args:
        kinds: Keys of `ATTENTIONS`; all of them by default.
        sizes: Numbers of tokens.
        on_progress: Called with each point as soon as it is measured.

    Returns:
        One point per size and kind, sizes in the outer loop.

    Raises:
        ValueError: An unknown kind, or a size below one.
    """
    kinds = list(ATTENTIONS) if kinds is None else kinds
    unknown = [kind for kind in kinds if kind not in ATTENTIONS]
    if unknown:
        raise ValueError(f"kinds must be among {', '.join(map(repr, ATTENTIONS))}, got {unknown[0]!r}")
    if any(tokens < 1 for tokens in sizes):
        raise ValueError(f"sizes must be numbers of tokens ≥ 1, got {list(sizes)}")
    context = _process_context()
    points: list[CostPoint] = []
    for tokens in sizes:
        for kind in kinds:
            weights_bytes = HEADS * tokens**2 * torch.float32.itemsize
            if kind == "softmax_explicit" and weights_bytes > EXPLICIT_WEIGHTS_LIMIT:
                gibibytes = weights_bytes / 2**30
                limit = EXPLICIT_WEIGHTS_LIMIT / 2**30
                note = f"skipped: its weights alone take {gibibytes:.1f} GiB (limit {limit:.0f} GiB)"
                point = CostPoint(kind, tokens, None, 0, None, note)
            else:
                point = _measure_in_child(context, kind, tokens)
            points.append(point)
            if on_progress is not None:
                on_progress(point)
    return points


def describe_machine() -> str:
    """CPU, thread count and torch version: what a timing means nothing without."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    threads = torch.get_num_threads()
    return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}, torch {torch.__version__}"


def _softmax(qkv: torch.Tensor, local_weight: torch.Tensor) -> torch.Tensor:
    del local_weight
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _softmax_explicit(qkv: torch.Tensor, local_weight: torch.Tensor) -> torch.Tensor:
    del local_weight
    q, k, v = qkv.transpose(1, 3).unbind(2)
    weights = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1)
    return (weights @ v).transpose(1, 2)


def _linear(qkv: torch.Tensor, local_weight: torch.Tensor) -> torch.Tensor:
    del local_weight
    return inline_attention_qkvpacked(qkv, normalization="divide", feature_map="relu")


def _inline(qkv: torch.Tensor, local_weight: torch.Tensor) -> torch.Tensor:
    return inline_attention_qkvpacked(qkv, local_weight=local_weight, grid_size=_squarest_grid(qkv.shape[1]))


ATTENTIONS: dict[str, Attention] = {
    "softmax": Attention("softmax (SDPA)", _softmax),
    "softmax_explicit": Attention("softmax, explicit weights", _softmax_explicit),
    "linear": Attention("linear", _linear),
    "inline": Attention("InLine", _inline),
}


def _squarest_grid(tokens: int) -> tuple[int, int]:
    height = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
    return height, tokens // height


def _process_context() -> ForkServerContext | SpawnContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():  # Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The default would be __main__: the server must not run the caller's script.
    context.set_forkserver_preload([__name__])
    return context


def _measure_in_child(context: ForkServerContext | SpawnContext, kind: str, tokens: int) -> CostPoint:
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, kind, tokens, torch.get_num_threads())
    process = context.Process(target=_measure_and_send, args=arguments, daemon=True)
    with children_ignore_interrupts():
        process.start()
    sender.close()  # ours; once the child's is closed too, recv() raises instead of waiting forever
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == KILLED:
            return CostPoint(kind, tokens, None, 0, None, "its process was killed, most likely for want of memory")
        raise RuntimeError(
            f"measuring {kind!r} at {tokens} tokens failed, the reason is printed above; "
            'if this is a script, call it under `if __name__ == "__main__":`'
        ) from None
    finally:
        process.kill()  # has finished already, unless the user interrupted us
        process.join()
        receiver.close()


def _measure_and_send(sender: Connection, kind: str, tokens: int, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process quietly
    torch.set_num_threads(threads)
    sender.send(_measure_here(kind, tokens))


def _measure_here(kind: str, tokens: int) -> CostPoint:
    run = ATTENTIONS[kind].run
    generator = torch.Generator().manual_seed(0)
    local_weight = torch.randn(1, HEADS, HEAD_DIM, 3, 3, generator=generator)
    qkv = torch.randn(1, tokens, 3, HEADS, HEAD_DIM, generator=generator)
    with torch.inference_mode():
        # Libraries set themselves up in the first call; that is no cost of the attention.
        run(qkv[:, :WARM_UP_TOKENS].contiguous(), local_weight)
        _reset_peak()
        before = _peak_resident_bytes()
        run(qkv, local_weight)
        after = _peak_resident_bytes()
        milliseconds: list[float] = []
        deadline = time.perf_counter() + SECONDS_PER_POINT
        while len(milliseconds) < REPEATS and (not milliseconds or time.perf_counter() < deadline):
            start = time.perf_counter()
            run(qkv, local_weight)
            milliseconds.append(1e3 * (time.perf_counter() - start))
    peak = None if before is None or after is None else after - before
    note = "" if peak is not None else "this platform does not tell a process's peak memory"
    return CostPoint(kind, tokens, statistics.median(milliseconds), len(milliseconds), peak, note)


def _reset_peak() -> None:
    """Set the recorded peak to the current size where Linux allows it; elsewhere the warm-up has left it close."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_resident_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
