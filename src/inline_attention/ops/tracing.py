"""Whether tensors are plain values that may be looked at, or stand-ins that a transform is tracing."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.autograd import forward_ad


def are_plain_eager_tensors(*tensors: torch.Tensor) -> bool:
    """True when the tensors hold data that Python may branch on: nothing compiles, exports, traces or transforms."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        # Inside vmap, grad or jvp a tensor's values cannot be read; torch has no public name for the question.
        and not torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        and not _is_making_a_graph()
        and all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)  # fake tensors are subclasses
        and all(tensor.device.type != "meta" for tensor in tensors)
    )


def is_plain_execution(*tensors: torch.Tensor) -> bool:
    """Whether the tensors are plain ones and no dispatch mode, such as a tracer or a counter of FLOPs, watches them."""
    return are_plain_eager_tensors(*tensors) and torch._C._len_torch_dispatch_stack() == 0  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def _is_making_a_graph() -> bool:
    """Whether `make_fx` records plain tensors, whose values it does not let be read."""
    native: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return native._get_dispatch_mode(native._TorchDispatchModeKey.PROXY) is not None


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


def unrecorded() -> AbstractContextManager[None]:
    """A context that `torch.jit.trace` does not see: sizes are plain numbers in it, about which one may ask.

    Where it records, the size of a tensor is a tensor.
    """
    return _without_recording() if _is_recording() else nullcontext()


def plain_sizes(sizes: Any) -> Any:
    """Sizes, as numbers also where `torch.jit.trace` has made tensors of them; anything else as it is."""
    if not isinstance(sizes, (tuple, list)) or not _is_recording():
        return sizes  # pyright: ignore[reportUnknownVariableType]
    with _without_recording():
        return tuple(int(size) if isinstance(size, torch.Tensor) else size for size in cast(Sequence[Any], sizes))


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
