"""Time and peak memory of one attention call by the number of tokens.

Every point is measured in its own process, because the peak memory of a process never decreases. The processes are
forked from a server that has only imported torch: they start quickly and inherit no thread pool. A script that calls
this needs the usual `if __name__ == "__main__":` of multiprocessing.

Shapes: `B` batch (one image), `N` tokens, `H` heads, `D` head dim.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from inline_attention.benchmark.timing import Work, interleaved_timings
from inline_attention.ops import inline_attention_qkvpacked
from inline_attention.support.figures import Axes, Chart, LegendEntry, Panel, Style, draw_line, log_axes
from inline_attention.support.signals import children_ignore_interrupts

DEFAULT_SIZES = (196, 784, 3136, 12544)  # 14² (a 224² image in 16² patches), 28², 56², 112²
HEADS, HEAD_DIM = 6, 32  # of DeiT-T's InLine blocks
EXPLICIT_WEIGHTS_LIMIT = 1 << 30  # bytes of the N×N weights of all heads; more might not fit
WARM_UP_TOKENS = 16
REPEATS = 20  # timed calls per point, unless they take longer than
SECONDS_PER_POINT = 2.0
KILLED = -9  # exit code of a process ended by SIGKILL, as by the out-of-memory killer


class CostPoint(NamedTuple):
    """The cost of one attention call of one size."""

    kind: str  # key of `ATTENTIONS`
    tokens: int  # N
    milliseconds: float | None  # median wall-clock time of one forward call; None if it was not run
    runs: int  # number of timed calls
    # Peak resident memory of the process during one call, minus that before it: the output and intermediate results,
    # not the input. Linux counts in steps of about 128 KiB, so a very small call has 0. None if it was not run, or the
    # platform cannot measure it.
    peak_bytes: int | None
    note: str = ""  # reason for missing values


class Attention(NamedTuple):
    """An attention to measure: `run` takes qkv `[B, N, 3, H, D]` and local weights `[B, H, D, 3, 3]`."""

    label: str
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def measure_attention_cost(
    kinds: Sequence[str] | None = None,
    sizes: Sequence[int] = DEFAULT_SIZES,
    *,
    on_progress: Callable[[CostPoint], None] = lambda _: None,
) -> list[CostPoint]:
    """Measure kinds of attention, by default all, on one image, `HEADS` heads, float32, forward only, on the CPU.

    Returns one point per size, a number of tokens, and kind; `on_progress` is called with each. Raises `ValueError` if
    a kind is unknown, or a size is below one.
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
            gibibytes = HEADS * tokens**2 * torch.float32.itemsize / 2**30
            limit = EXPLICIT_WEIGHTS_LIMIT / 2**30
            if kind == "softmax_explicit" and gibibytes > limit:
                note = f"skipped: its weights alone take {gibibytes:.1f} GiB (limit {limit:.0f} GiB)"
                points.append(CostPoint(kind, tokens, None, 0, None, note))
            else:
                points.append(_measure_in_child(context, kind, tokens))
            on_progress(points[-1])
    return points


def squarest_grid(tokens: int) -> tuple[int, int]:
    """Return height and width, as equal as possible, of a grid of so many tokens."""
    height = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
    return height, tokens // height


def _softmax(qkv: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _softmax_explicit(qkv: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.transpose(1, 3).unbind(2)
    weights = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1)
    return (weights @ v).transpose(1, 2)


def _inline(qkv: torch.Tensor, local_weight: torch.Tensor) -> torch.Tensor:
    return inline_attention_qkvpacked(qkv, local_weight=local_weight, grid_size=squarest_grid(qkv.shape[1]))


ATTENTIONS: dict[str, Attention] = {
    "softmax": Attention("softmax (SDPA)", _softmax),
    "softmax_explicit": Attention("softmax, explicit weights", _softmax_explicit),
    "linear": Attention(
        "linear", lambda qkv, _: inline_attention_qkvpacked(qkv, normalization="divide", feature_map="relu")
    ),
    "inline": Attention("InLine", _inline),
}


def _process_context() -> ForkServerContext | SpawnContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():  # Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The default is __main__, but the server must not run the caller's script.
    context.set_forkserver_preload([__name__])
    return context


def _measure_in_child(context: ForkServerContext | SpawnContext, kind: str, tokens: int) -> CostPoint:
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, kind, tokens, torch.get_num_threads())
    process = context.Process(target=_measure_and_send, args=arguments, daemon=True)
    with children_ignore_interrupts():
        process.start()
    sender.close()  # so that recv() raises when the child ends without an answer
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == KILLED:
            return CostPoint(kind, tokens, None, 0, None, "its process was killed, probably because memory ran out")
        raise RuntimeError(
            f"measuring {kind!r} at {tokens} tokens failed, the reason is printed above; "
            'if this is a script, call it under `if __name__ == "__main__":`'
        ) from None
    finally:
        process.kill()  # needed only after an interrupt
        process.join()
        receiver.close()


def _measure_and_send(sender: Connection, kind: str, tokens: int, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process
    torch.set_num_threads(threads)
    run = ATTENTIONS[kind].run
    generator = torch.Generator().manual_seed(0)
    local_weight = torch.randn(1, HEADS, HEAD_DIM, 3, 3, generator=generator)
    qkv = torch.randn(1, tokens, 3, HEADS, HEAD_DIM, generator=generator)
    with torch.inference_mode():
        # The first call initializes libraries.
        run(qkv[:, :WARM_UP_TOKENS].contiguous(), local_weight)
        with suppress(OSError):  # resets the recorded peak on Linux; elsewhere the warm-up leaves it close
            Path("/proc/self/clear_refs").write_text("5")
        before = peak_resident_bytes()
        run(qkv, local_weight)
        after = peak_resident_bytes()
        work = Work(lambda: run(qkv, local_weight), 1, qkv.device, "clock")
        timing = interleaved_timings({kind: work}, seconds=SECONDS_PER_POINT, at_least=1, at_most=REPEATS)[kind]
    peak = None if before is None or after is None else after - before
    note = "" if peak is not None else "this platform cannot measure the peak memory of a process"
    sender.send(CostPoint(kind, tokens, timing.milliseconds, timing.runs, peak, note))


def peak_resident_bytes() -> int | None:
    """Return the peak memory of this process in bytes; None if the platform cannot tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def cost_chart(points: Sequence[CostPoint]) -> Chart:
    """Return time and peak memory by the number of tokens, on logarithmic axes."""
    kinds = list(dict.fromkeys(point.kind for point in points))
    styles = {kind: Style("softmax", 1) if kind == "softmax_explicit" else Style(kind) for kind in kinds}
    sizes = sorted({point.tokens for point in points})
    milliseconds = [(point, point.milliseconds) for point in points if point.milliseconds]
    mebibytes = [(point, point.peak_bytes / 2**20) for point in points if point.peak_bytes]

    def draw(axes: Axes, measured: list[tuple[CostPoint, float]], unit: str) -> None:
        if not measured:
            axes.text(0.5, 0.5, "not available on this platform", transform=axes.transAxes, ha="center")
            return
        for kind in kinds:
            draw_line(axes, styles[kind], [(point.tokens, value) for point, value in measured if point.kind == kind])
        axes.set(xlabel="tokens N", ylabel=unit)
        log_axes(axes, sizes)

    panels = [
        Panel("Time of one forward call (ms)", lambda axes: draw(axes, milliseconds, "ms"),
              "Time of one forward call in ms by tokens, both logarithmic."),
        Panel("Peak memory beyond the input (MiB)", lambda axes: draw(axes, mebibytes, "MiB"),
              "Peak memory beyond the input in MiB by tokens, both logarithmic."),
    ]  # fmt: skip
    return Chart(panels, [LegendEntry(ATTENTIONS[kind].label, styles[kind]) for kind in kinds])


def draw_cost(points: Sequence[CostPoint], machine: str, folder: Path) -> list[Path]:
    """Write `cost.png` and `cost.svg`, with the description of the machine in small print."""
    small_print = (
        f"One image, {HEADS} heads of dim {HEAD_DIM}, float32, median of up to {REPEATS} calls. {machine}. PyTorch's "
        "SDPA on a CPU never stores the N × N weights (a flash algorithm): its memory grows like N too. “Explicit "
        "weights” stores them."
    )
    for point in points:
        small_print += f" {ATTENTIONS[point.kind].label}, N = {point.tokens:,}: {point.note}." if point.note else ""
    title = "Cost of attention over one image"
    return cost_chart(points).save(folder, "cost", title=title, small_print=small_print, width=6.0)
