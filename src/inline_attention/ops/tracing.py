"""Whether tensors are plain values that may be looked at, or stand-ins that a transform is tracing."""

from __future__ import annotations

from typing import cast

import torch
from torch.autograd import forward_ad


def are_plain_eager_tensors(*tensors: torch.Tensor) -> bool:
    """True when the tensors hold data that Python may branch on: nothing compiles, exports, traces or transforms."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        # Inside vmap, grad or jvp a tensor's values cannot be read; torch has no public name for the question.
        and not torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        and all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)  # fake tensors are subclasses
        and all(tensor.device.type != "meta" for tensor in tensors)
    )


def is_transformed() -> bool:
    """Whether anything but plain eager execution may be going on: compiling, tracing, `torch.func`, dual levels."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return True
    level = cast(int, forward_ad._current_level)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    return level >= 0 or torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def is_exporting() -> bool:
    """Whether `torch.export` is tracing: the graph must then serve every size, and may not ask about sizes.

    Not `torch.compiler.is_exporting`: the compiler of torch 2.11 takes that for true in whatever it compiles.
    """
    return torch.compiler._is_exporting_flag  # pyright: ignore[reportPrivateUsage]
