"""Whether somebody would notice that a module was not called, or was shown fewer tokens, or that its output is gone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as torch_module


def has_hooks(*modules: nn.Module) -> bool:
    """Whether somebody waits for a call of one of the modules, or for the gradients of one; of any module, even."""
    # torch has no public names for the questions.
    if torch_module._has_any_global_hook():  # pyright: ignore[reportPrivateUsage]
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
    """Whether one of the modules has hooks, or a `forward` put on the instance, as offloading libraries do."""
    for module in modules:
        if "forward" in module.__dict__:
            return True
    return has_hooks(*modules)


def is_unseen(module: nn.Module) -> bool:
    """Whether nobody but the caller of a module sees its output; of dispatch modes, the op takes care."""
    if must_be_called(module):
        return False
    return torch._C._len_torch_function_stack() == 0  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
