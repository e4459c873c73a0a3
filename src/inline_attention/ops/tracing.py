"""Questions about the execution: plain eager tensors, or a compiler, an exporter or a transform that traces."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad


def are_plain_eager_tensors(*tensors: Tensor) -> bool:
    """True if Python may branch on the tensors' values: nothing compiles, exports, traces or transforms."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        # Inside vmap, grad or jvp a tensor's values cannot be read; torch has no public name for the question.
        and not torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        and not _is_making_a_graph()
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)  # fake tensors are subclasses
        and all(tensor.device.type != "meta" for tensor in tensors)
    )


def is_plain_execution(*tensors: Tensor) -> bool:
    """True if the tensors are plain and no dispatch mode, such as a tracer or a FLOP counter, is active."""
    return are_plain_eager_tensors(*tensors) and torch._C._len_torch_dispatch_stack() == 0  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def _is_making_a_graph() -> bool:
    """True if `make_fx` records plain tensors; it does not allow their values to be read."""
    native: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return native._get_dispatch_mode(native._TorchDispatchModeKey.PROXY) is not None


def is_transformed() -> bool:
    """True if a compiler, a tracer, a `torch.func` transform or forward-mode differentiation may be active."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return True
    level = cast(int, forward_ad._current_level)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    return level >= 0 or torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def is_exporting() -> bool:
    """True if `torch.export` is tracing. The graph must serve every size, so code may not branch on sizes.

    Not `torch.compiler.is_exporting`: in torch 2.11 it is also true in compiled code.
    """
    return torch.compiler._is_exporting_flag  # pyright: ignore[reportPrivateUsage]


def unrecorded() -> AbstractContextManager[None]:
    """Return a context in which `torch.jit.trace` does not record, so that sizes are plain numbers, not tensors."""
    return _without_recording() if _is_recording() else nullcontext()


def plain_sizes(sizes: Any) -> Any:
    """Return sizes as numbers, even if `torch.jit.trace` made tensors of them; return anything else as it is."""
    if not isinstance(sizes, (tuple, list)) or not _is_recording():
        return sizes  # pyright: ignore[reportUnknownVariableType]
    with _without_recording():
        return tuple(int(size) if isinstance(size, Tensor) else size for size in cast(Sequence[Any], sizes))


def _is_recording() -> bool:
    return not torch.compiler.is_compiling() and torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def _without_recording() -> Generator[None]:
    native: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    state = native._get_tracing_state()
    native._set_tracing_state(None)
    try:
        yield
    finally:
        native._set_tracing_state(state)
