"""Questions about hooks, asked before a module call is skipped or fused."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules import module as torch_module


def has_hooks(*modules: nn.Module) -> bool:
    """True if any of the modules, or PyTorch globally, has forward or backward hooks, or torch.fx is tracing."""
    # torch has no public names for these.
    if torch_module._has_any_global_hook() or is_fx_symbolic_tracing():  # pyright: ignore[reportPrivateUsage]
        return True
    for module in modules:  # not `any`, whose generator takes longer than the question
        if (
            module._forward_hooks  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
            or module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
            or module._backward_hooks  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
            or module._backward_pre_hooks  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        ):
            return True
    return False


def must_be_called(*modules: nn.Module) -> bool:
    """True if a module has hooks, or a `forward` set on the instance, as offloading libraries do."""
    for module in modules:
        if "forward" in module.__dict__:
            return True
    return has_hooks(*modules)


def has_private_output(module: nn.Module) -> bool:
    """True if only the caller of a module sees its output: no hooks and no function modes."""
    if must_be_called(module):
        return False
    return torch._C._len_torch_function_stack() == 0  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
