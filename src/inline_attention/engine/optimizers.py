"""timm's optimizers. Muon updates matrices of one shape together.

timm's Muon takes one matrix after the other, each in some 30 small operations.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.optim.muon import muon
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inline_attention.engine.config import ResolvedValues, optimizer_arguments

MUON_SETTINGS = [name for name in inspect.signature(muon).parameters if name != "params"]
# To `muon`, a stack is the weight of a convolution that has a matrix at each place.
STACK_SETTINGS = {"conv_mode": "batched", "normalize_spatial": False}


def create_optimizer(model: nn.Module, resolved: ResolvedValues, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer that the settings ask for."""
    optimizer = create_optimizer_v2(model, **optimizer_arguments(resolved, device))
    if resolved.config.optimizer.name == "muon":
        optimizer.register_step_pre_hook(update_matrices_together)
    return optimizer


@torch.no_grad()
def update_matrices_together(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Update matrices of one shape by timm's `muon` at once, and hide their gradients from the step that follows.

    The first step is timm's alone: it decides which parameters are matrices for Muon.
    """
    for group in optimizer.param_groups:
        settings = {name: group[name] for name in MUON_SETTINGS if name in group} | STACK_SETTINGS
        for parameters in _stacks(optimizer, group["params"]):
            momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            weight, gradient, momentum = (torch.stack(tensors) for tensors in (parameters, gradients, momenta))
            matrices = [stack.flatten(2).permute(1, 2, 0) for stack in (weight, gradient, momentum)]
            muon(*([stack] for stack in matrices), **settings)
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [*parameters, *momenta], [*weight, *momentum]
            )
            for parameter in parameters:
                parameter.grad = None


def _stacks(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> list[list[Tensor]]:
    """Return lists of matrices of one shape, of those that Muon updated before; sharded ones are left to timm."""
    stacks: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        is_matrix = parameter.ndim >= 2 and parameter.shape[1:].numel() == parameter.shape[1]  # [out, in, 1], too
        has_momentum = state.get("use_muon") and "momentum_buffer" in state
        if is_matrix and has_momentum and parameter.grad is not None and not isinstance(parameter, DTensor):
            stacks[parameter.shape, parameter.dtype, parameter.device].append(parameter)
    return [stack for stack in stacks.values() if len(stack) > 1]
