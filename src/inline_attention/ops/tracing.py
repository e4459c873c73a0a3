"""Whether a tensor is a plain value that may be looked at, or a stand-in that a transform is tracing."""

from __future__ import annotations

import torch


def is_plain_eager_tensor(tensor: torch.Tensor) -> bool:
    """True when `tensor` holds data that Python may branch on: no compiler, exporter, tracer or `torch.func` above."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        # Inside vmap, grad or jvp a tensor's values cannot be read; torch has no public name for the question.
        and not torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)  # fake and meta tensors are subclasses or have no data
        and tensor.device.type != "meta"
    )
