"""Attention on a CPU: InLine with its local residual against softmax, time and peak memory.

    python benchmarks/cpu_attention.py

float32, two threads, C = 192 in 6 heads, from packed qkv. Contestants: `softmax` (PyTorch's SDPA), `plain` (InLine by
the literal formula and one grouped convolution of B·C groups, in plain PyTorch) and `inline` (this library). Nothing is
timed before its outputs and gradients agree with float64. Results: benchmarks/results/cpu_attention.{json,md,png}.

Shapes: `B` batch, `N` tokens, `H` heads, `D` head dim, `C` = H·D.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress

from inline_attention import inline_attention_qkvpacked
from inline_attention.benchmark.cost import CostPoint, measure_attention_cost
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import markdown_table, relative_error, write_json, write_markdown
from inline_attention.benchmark.timing import interleaved_timings, prepare_work

RESULTS = Path(__file__).parent / "results"
THREADS = 2
HEADS, HEAD_DIM = 6, 32
LARGEST_ERROR = 1e-5  # relative, float32 against float64
MEMORY_KINDS = ("softmax", "linear", "inline")
MEMORY_SIZES = (784, 3136, 12544, 50176)

Attention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One size: `batch` images of side² tokens, timed for `seconds` per mode."""

    side: int
    batch: int
    seconds: float

    @property
    def tokens(self) -> int:
        """N."""
        return self.side * self.side


@dataclass(frozen=True)
class Row:
    """Median milliseconds of one case by contestant, and the error found before timing."""

    tokens: int
    batch: int
    worst_error: float
    forward: dict[str, float]
    forward_backward: dict[str, float]


CASES = [Case(14, 64, 8.0), Case(28, 16, 10.0), Case(56, 4, 12.0), Case(128, 1, 24.0)]


def softmax(qkv: torch.Tensor, local_weight: torch.Tensor, side: int) -> torch.Tensor:
    del local_weight, side
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def plain(qkv: torch.Tensor, local_weight: torch.Tensor, side: int) -> torch.Tensor:
    """InLine by the literal formula: out = phi(q) S + (1 - z) vbar, and a convolution with B·C groups."""
    B, N, _, H, D = qkv.shape
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    scale = D**-0.5
    product = k.transpose(-1, -2) @ v * (scale / N)
    key_mean, value_mean = k.mean(2, keepdim=True), v.mean(2, keepdim=True)
    z = scale * (q @ key_mean.transpose(-1, -2))
    out = (q @ product + (1 - z) * value_mean).transpose(1, 2)
    grid = v.transpose(-1, -2).reshape(1, B * H * D, side, side)
    local = F.conv2d(grid, local_weight.reshape(B * H * D, 1, 3, 3), padding=1, groups=B * H * D)
    return out + local.view(B, H, D, N).permute(0, 3, 1, 2)


def inline(qkv: torch.Tensor, local_weight: torch.Tensor, side: int) -> torch.Tensor:
    return inline_attention_qkvpacked(qkv, local_weight=local_weight, grid_size=(side, side))


CONTESTANTS: dict[str, Attention] = {"softmax": softmax, "plain": plain, "inline": inline}


def draw(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return leaves qkv and local_weight, and an output gradient."""
    generator = torch.Generator().manual_seed(case.side)
    qkv = torch.randn(case.batch, case.tokens, 3, HEADS, HEAD_DIM, generator=generator)
    local_weight = torch.randn(case.batch, HEADS, HEAD_DIM, 3, 3, generator=generator)
    grad = torch.randn(case.batch, case.tokens, HEADS, HEAD_DIM, generator=generator)
    return qkv.requires_grad_(), local_weight.requires_grad_(), grad


def check(case: Case) -> float:
    """Return the largest relative error of outputs and gradients of `plain` and `inline` on one image; exit if wrong.

    Below N = 1000 they are compared with the explicit float64 reference. Above, where N×N matrices do not fit, they are
    compared with the literal formula in float64, which the smaller cases have checked against the reference.
    """
    qkv, local_weight, grad = (tensor[:1].detach() for tensor in draw(case))

    def reference(qkv: torch.Tensor, local_weight: torch.Tensor, side: int) -> torch.Tensor:
        return inline_attention_qkvpacked(qkv, local_weight=local_weight, grid_size=(side, side), backend="reference")

    def evaluate(attention: Attention, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (qkv, local_weight)]
        out = attention(leaves[0], leaves[1], case.side)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    exact = evaluate(reference if case.tokens < 1000 else plain, torch.float64)
    candidates = [evaluate(plain, torch.float64), evaluate(inline, torch.float32)]
    errors = [relative_error(a, e) for candidate in candidates for a, e in zip(candidate, exact, strict=True)]
    worst = max(errors)
    if not worst <= LARGEST_ERROR:
        sys.exit(f"N = {case.tokens}: relative error {worst:.1e} exceeds {LARGEST_ERROR:.0e}; nothing was timed")
    return worst


def time_case(case: Case) -> dict[str, dict[str, float]]:
    """Return median milliseconds by mode and contestant."""
    qkv, local_weight, grad = draw(case)

    def forward(attention: Attention) -> Callable[[], object]:
        def run() -> None:
            with torch.inference_mode():
                attention(qkv, local_weight, case.side)

        return run

    def forward_backward(attention: Attention) -> Callable[[], object]:
        leaves = (qkv,) if attention is softmax else (qkv, local_weight)
        return lambda: torch.autograd.grad(attention(qkv, local_weight, case.side), leaves, grad)

    def medians(prepare: Callable[[Attention], Callable[[], object]]) -> dict[str, float]:
        cpu = torch.device("cpu")
        works = {name: prepare_work([prepare(attention)], cpu) for name, attention in CONTESTANTS.items()}
        return {name: timing.milliseconds for name, timing in interleaved_timings(works, seconds=case.seconds).items()}

    return {"forward": medians(forward), "forward_backward": medians(forward_backward)}


def draw_plot(rows: Sequence[Row], memory: Sequence[CostPoint]) -> None:
    """Write cpu_attention.png."""
    from inline_attention.support.figures import Chart, LegendEntry, Panel, Style, draw_line, log_axes

    styles = {
        "softmax": (Style("softmax"), "softmax (SDPA)"),
        "plain": (Style("inline", 1, 0.45, "^"), "InLine, plain PyTorch"),
        "inline": (Style("inline"), "InLine"),
        "linear": (Style("linear"), "linear"),
    }

    def draw(axes: Any, lines: dict[str, list[tuple[int, float]]], label: str) -> None:
        for name, points in lines.items():
            draw_line(axes, styles[name][0], points)
        axes.set(xlabel="tokens N", ylabel=label)
        log_axes(axes, sorted({tokens for points in lines.values() for tokens, _ in points}))

    forward = {name: [(row.tokens, row.forward[name] / row.batch) for row in rows] for name in CONTESTANTS}
    both = {name: [(row.tokens, row.forward_backward[name] / row.batch) for row in rows] for name in CONTESTANTS}
    peaks = {name: [(p.tokens, mebibytes(p)) for p in memory if p.kind == name] for name in MEMORY_KINDS}
    panels = [
        Panel("forward", lambda axes: draw(axes, forward, "milliseconds per image")),
        Panel("forward + backward", lambda axes: draw(axes, both, "milliseconds per image")),
        Panel("forward, peak memory", lambda axes: draw(axes, peaks, "MiB beyond the input")),
    ]
    Chart(panels, [LegendEntry(label, style) for style, label in styles.values()]).save(
        RESULTS,
        "cpu_attention",
        title="Attention on a CPU",
        small_print=f"float32, {THREADS} threads, C = {HEADS * HEAD_DIM} in {HEADS} heads. Medians.",
        formats=("png",),
    )


def report(rows: list[Row], memory: list[CostPoint]) -> str:
    """Return the tables as Markdown."""
    modes = ("forward", "forward_backward")
    header = ["N", "B", *(f"{mode.replace('_', '+')} {name} (ms)" for mode in modes for name in CONTESTANTS)]
    header += ["forward: softmax / InLine", "forward+backward: softmax / InLine"]
    table = [
        [
            str(row.tokens),
            str(row.batch),
            *(f"{times[name]:.1f}" for times in (row.forward, row.forward_backward) for name in CONTESTANTS),
            *(f"{times['softmax'] / times['inline']:.1f}×" for times in (row.forward, row.forward_backward)),
        ]
        for row in rows
    ]
    memory_table = [
        [str(tokens), *(f"{mebibytes(point):.1f}" for point in memory if point.tokens == tokens)]
        for tokens in MEMORY_SIZES
    ]
    return "\n\n".join(
        [
            markdown_table(header, table),
            "Medians; contestants take turns. Largest relative error of outputs and gradients against float64: "
            f"{max(row.worst_error for row in rows):.1e}.",
            "Peak memory of one forward call on one image, beyond its input (process peak):",
            markdown_table(["N", *(f"{kind} (MiB)" for kind in MEMORY_KINDS)], memory_table),
            "PyTorch's softmax on a CPU is memory-linear too: it never stores its weights.",
            "![time and memory](cpu_attention.png)",
        ]
    )


def mebibytes(point: CostPoint) -> float:
    return float("nan") if point.peak_bytes is None else point.peak_bytes / 2**20


def main() -> None:
    torch.set_num_threads(THREADS)
    where = describe_environment()
    console = Console()
    with Progress(console=console) as progress:
        task = progress.add_task("attention on the CPU", total=len(CASES) + 1)
        memory = measure_attention_cost(MEMORY_KINDS, MEMORY_SIZES)
        progress.advance(task)
        rows: list[Row] = []
        for case in CASES:
            worst_error = check(case)
            rows.append(Row(case.tokens, case.batch, worst_error, **time_case(case)))
            progress.advance(task)
    content = {"cases": [asdict(row) for row in rows], "memory": [point._asdict() for point in memory]}
    write_json(RESULTS / "cpu_attention.json", {"environment": where, **content})
    write_markdown(RESULTS / "cpu_attention.md", "Attention on a CPU", where, report(rows, memory))
    draw_plot(rows, memory)
    console.print(report(rows, memory))
    console.print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
