"""GPU microseconds of each kernel of the CUDA backend, from the profiler.

    python benchmarks/gpu_kernels.py [--head-dim 32] [--channels 192]

For tuning, not for claims: a profiler sees kernels one by one, without the gaps between them. The history of changes
and their effects is in benchmarks/results/kernel_history.md.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Annotated

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from inline_attention import inline_attention_qkvpacked

ELEMENTS = 25_000_000
TOKENS = (196, 784, 3136, 16384, 65536)
REPEATS = 20


def kernel_times(batch: int, tokens: int, heads: int, head_dim: int) -> dict[str, float]:
    """Return median microseconds per kernel of one forward and backward pass with the local term, bfloat16."""
    side = math.isqrt(tokens)
    qkv = torch.randn(batch, tokens, 3, heads, head_dim, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(batch, heads, head_dim, 3, 3, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(batch, tokens, heads, head_dim, device="cuda").bfloat16()

    def step() -> None:
        out = inline_attention_qkvpacked(qkv, local_weight=weight, grid_size=(side, side), backend="cuda")
        torch.autograd.grad(out, (qkv, weight), grad)

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if event.name.startswith("inline_"):
            times[event.name.removeprefix("inline_")].append(event.device_time)
    return {name: statistics.median(values) for name, values in times.items()}


def main(
    head_dim: Annotated[int, typer.Option(help="32 or 64.")] = 32,
    channels: Annotated[int, typer.Option(help="Heads times head dim.")] = 192,
) -> None:
    for tokens in TOKENS:
        batch = max(1, round(ELEMENTS / (tokens * channels)))
        times = kernel_times(batch, tokens, channels // head_dim, head_dim)
        parts = "  ".join(f"{name} {microseconds:.1f}" for name, microseconds in times.items())
        print(f"N={tokens} B={batch}: {parts}  sum {sum(times.values()):.1f} µs", flush=True)


if __name__ == "__main__":
    typer.run(main)
