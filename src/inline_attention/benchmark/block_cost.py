"""What one transformer block costs the host in a training step: launches and microseconds, forward and backward.

A batch of one, so that the GPU waits for the host and never the host for the GPU.

Shapes: `B` batch, `N` tokens, `C` channels.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from inline_attention.benchmark.models import LARGEST_ERROR, OURS, ModelCase, build_contestant, set_backend
from inline_attention.benchmark.results import WrongResultError, relative_error
from inline_attention.benchmark.timing import measure_host_overheads, synchronize
from inline_attention.layers.block import Block

PATCH_SIZE = 16
WARM_UP_CALLS = 3  # the first compiles
REPEATS_AND_ROUNDS = {"cuda": (30, 15), "cpu": (1, 3)}
LAUNCH = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|Memcpy|Memset)")
Call = Callable[[], object]


@dataclass(frozen=True)
class BlockCost:
    """Cost of one pass of one block.

    Attributes:
        launches: Kernels, copies and fills that the host starts; None on a CPU.
        microseconds: Time of the host.
    """

    launches: int | None
    microseconds: float

    def __sub__(self, other: BlockCost) -> BlockCost:
        """The cost of what this does beyond the other."""
        launches = None if self.launches is None or other.launches is None else self.launches - other.launches
        return BlockCost(launches, self.microseconds - other.microseconds)


def measure_blocks(case: ModelCase, device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, BlockCost]]:
    """Cost of the first block of InLine and its rivals, by contestant and pass ("forward", "backward").

    Args:
        case: A model of patches of 16² pixels; its batch is not used.
        device: Where to run.
        dtype: Dtype of autocast; float32 for no autocast.

    Raises:
        WrongResultError: InLine's output or gradients are not what they should be.
    """
    torch._dynamo.reset()  # blocks share their code, and a piece of code is compiled for few variants only
    calls: dict[str, Call] = {}
    for name in (OURS, *case.rivals):
        forward, both = _prepare(name, case, device, dtype)
        calls[f"{name} forward"], calls[f"{name} both"] = forward, both
    repeats, rounds = REPEATS_AND_ROUNDS[device.type]
    microseconds = measure_host_overheads(calls, device, repeats=repeats, rounds=rounds)
    costs = {name: BlockCost(count_launches(call, device), microseconds[name]) for name, call in calls.items()}
    return {
        name: {"forward": costs[f"{name} forward"], "backward": costs[f"{name} both"] - costs[f"{name} forward"]}
        for name in (OURS, *case.rivals)
    }


def compile_blocks(case: ModelCase, device: torch.device, dtype: torch.dtype) -> None:
    """Compile the blocks of all contestants, so that later processes find them on disk."""
    torch._dynamo.reset()
    for name in (OURS, *case.rivals):
        _prepare(name, case, device, dtype)


def count_launches(call: Call, device: torch.device) -> int | None:
    """How many kernels, copies and fills a warm call starts; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        synchronize(device)
    return sum(LAUNCH.match(event.name) is not None for event in profiler.events() or ())


def _prepare(contestant: str, case: ModelCase, device: torch.device, dtype: torch.dtype) -> tuple[Call, Call]:
    """Warm calls of a checked block: forward, and forward with backward."""
    blocks = cast(nn.Sequential, build_contestant(contestant, case, device).train().blocks)
    block = blocks[0]
    side = case.size // PATCH_SIZE
    grid = ((side, side),) if isinstance(block, Block) else ()
    channels = cast(nn.LayerNorm, block.norm1).normalized_shape[0]
    generator = torch.Generator(device).manual_seed(0)
    size = (1, 1 + side**2, channels)
    tokens = torch.randn(size, generator=generator, device=device).requires_grad_()
    grad = torch.randn(size, generator=generator, device=device)
    runnable: Any = torch.compile(block, dynamic=False) if case.execution == "compiled" else block

    def forward() -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return runnable(tokens, *grid)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(), [tokens, *block.parameters()], grad)

    if contestant == OURS:
        exact = set_backend(copy.deepcopy(block), "eager").double()
        exact_tokens = tokens.detach().double().requires_grad_()
        expected = exact(exact_tokens, *grid)
        expected_gradient = torch.autograd.grad(expected, exact_tokens, grad.double())[0]
        for name, actual, value in (
            ("output", forward(), expected),
            ("gradient", both()[0], expected_gradient),
        ):
            error, limit = relative_error(actual, value), LARGEST_ERROR[dtype]
            if not error <= limit:
                raise WrongResultError(f"relative error {error:.1e} of the block's {name} exceeds {limit:.0e}")
    for _ in range(WARM_UP_CALLS):
        forward()
        both()
    return forward, both
