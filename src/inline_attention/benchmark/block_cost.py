"""Measure what one transformer block costs the host in a training step: launches and microseconds.

The batch is one, so that the GPU waits for the host and never the host for the GPU.

Shapes: `B` batch, `N` tokens, `C` channels.
"""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from inline_attention.benchmark.models import LARGEST_ERROR, OURS, ModelCase, build_contestant, set_backend
from inline_attention.benchmark.results import check_close
from inline_attention.benchmark.timing import Call, measure_host_overheads, synchronize
from inline_attention.layers.block import Block

PATCH_SIZE = 16
WARM_UP_CALLS = 3  # the first compiles
REPEATS_AND_ROUNDS = {"cuda": (30, 15), "cpu": (1, 3)}
LAUNCH = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|Memcpy|Memset)")


class BlockCost(NamedTuple):
    """Host time of one pass, and the kernels, copies and fills that the host starts; None on a CPU."""

    launches: int | None
    microseconds: float


def measure_blocks(case: ModelCase, device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, BlockCost]]:
    """Return the cost of the first block of InLine and its rivals, by contestant and pass ("forward", "backward").

    The model must have patches of 16² pixels. The dtype is that of autocast; float32 is no autocast.
    """
    calls = prepare_blocks(case, device, dtype)
    repeats, rounds = REPEATS_AND_ROUNDS[device.type]
    microseconds = measure_host_overheads(calls, device, repeats=repeats, rounds=rounds)
    costs = {name: BlockCost(count_launches(call, device), microseconds[name]) for name, call in calls.items()}
    result: dict[str, dict[str, BlockCost]] = {}
    for name in case.contestants:
        forward, both = costs[f"{name} forward"], costs[f"{name} both"]
        launches = None if forward.launches is None or both.launches is None else both.launches - forward.launches
        backward = BlockCost(launches, both.microseconds - forward.microseconds)
        result[name] = {"forward": forward, "backward": backward}
    return result


def prepare_blocks(case: ModelCase, device: torch.device, dtype: torch.dtype) -> dict[str, Call]:
    """Compile, check and warm up the blocks of all contestants; return their calls "NAME forward" and "NAME both"."""
    torch._dynamo.reset()  # blocks share their code, and a piece of code is compiled for few variants only
    calls: dict[str, Call] = {}
    for name in case.contestants:
        calls[f"{name} forward"], calls[f"{name} both"] = _prepare(name, case, device, dtype)
    return calls


def count_launches(call: Call, device: torch.device) -> int | None:
    """Return how many kernels, copies and fills a warm call starts; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        synchronize(device)
    return sum(LAUNCH.match(event.name) is not None for event in profiler.events() or ())


def _prepare(contestant: str, case: ModelCase, device: torch.device, dtype: torch.dtype) -> tuple[Call, Call]:
    blocks = cast(nn.Sequential, build_contestant(contestant, case, device).train().blocks)
    block = blocks[0]
    side = case.size // PATCH_SIZE
    grid = ((side, side),) if isinstance(block, Block) else ()
    channels = cast(nn.LayerNorm, block.norm1).normalized_shape[0]
    generator = torch.Generator(device).manual_seed(0)
    tokens, grad = torch.randn(2, 1, 1 + side**2, channels, generator=generator, device=device)
    tokens.requires_grad_()
    runnable: Any = torch.compile(block, dynamic=False) if case.execution == "compiled" else block

    def forward() -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return runnable(tokens, *grid)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(), [tokens, *block.parameters()], grad)

    if contestant == OURS:
        exact_tokens = tokens.detach().double().requires_grad_()
        exact = set_backend(copy.deepcopy(block), "eager").double()(exact_tokens, *grid)
        exact_gradient = torch.autograd.grad(exact, exact_tokens, grad.double())[0]
        check_close("block's output", forward(), exact, LARGEST_ERROR[dtype])
        check_close("block's gradient", both()[0], exact_gradient, LARGEST_ERROR[dtype])
    for _ in range(WARM_UP_CALLS):
        forward()
        both()
    return forward, both
