"""timm's optimizers, with a faster Muon.

timm's Muon updates one matrix after the other, in about 30 operations each: a GPU waits for the 1,500 launches of a
ViT-T longer than it computes. Here, matrices of one shape are updated together.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inline_attention.engine.config import ResolvedValues, optimizer_arguments


def create_optimizer(model: nn.Module, resolved: ResolvedValues, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer that the settings ask for."""
    optimizer = create_optimizer_v2(model, **optimizer_arguments(resolved, device))
    if resolved.config.optimizer.name == "muon":
        optimizer.register_step_pre_hook(update_matrices_together)
    return optimizer


@torch.no_grad()
def update_matrices_together(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Update matrices of the same shape by timm's `muon` at once, and hide their gradients from the step that follows.

    The first step is timm's: it decides which parameters are matrices for Muon. To `muon`, a stack is the weight of a
    convolution that has a matrix at each place.
    """
    from timm.optim.muon import muon

    options = [option for option in inspect.signature(muon).parameters if option != "params"]
    for group in optimizer.param_groups:
        settings = {option: group[option] for option in options if option in group}
        settings |= {"conv_mode": "batched", "normalize_spatial": False}
        for parameters in _stacks(optimizer, group["params"]):
            momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            weight, gradient, momentum = (torch.stack(tensors) for tensors in (parameters, gradients, momenta))
            muon(*([stack.permute(1, 2, 0)] for stack in (weight, gradient, momentum)), **settings)
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [*parameters, *momenta], [*weight, *momentum]
            )
            for parameter in parameters:
                parameter.grad = None


def _stacks(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> list[list[Tensor]]:
    """Return lists of matrices of one shape, of those that Muon updated before."""
    stacks: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        is_sharded = isinstance(parameter, DTensor)
        if parameter.grad is not None and parameter.ndim == 2 and not is_sharded:
            state = optimizer.state.get(parameter, {})
            if state.get("use_muon") and "momentum_buffer" in state:
                stacks[parameter.shape, parameter.dtype, parameter.device].append(parameter)
    return [stack for stack in stacks.values() if len(stack) > 1]
