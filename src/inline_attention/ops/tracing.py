"""How the code is executed: plain eager tensors, a compiler, an exporter, a transform or autocast."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

_Function = TypeVar("_Function")
_NATIVE: Any = torch._C  # pyright: ignore[reportPrivateUsage]
# float64 is left as it is, as PyTorch's own attention leaves it.
_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def constant_when_compiled(function: _Function) -> _Function:
    """Mark a function as `torch.compiler.assume_constant_result` does, whose import of the compiler takes seconds."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


def are_plain_eager_tensors(*tensors: Tensor) -> bool:
    """True if Python may branch on the tensors' values: nothing compiles, exports, traces or transforms."""
    return (
        not _is_compiled_or_recorded()
        # Inside vmap, grad or jvp a tensor's values cannot be read; torch has no public name for the question.
        and not _NATIVE._are_functorch_transforms_active()
        # `make_fx` records plain tensors and does not allow their values to be read.
        and _NATIVE._get_dispatch_mode(_NATIVE._TorchDispatchModeKey.PROXY) is None
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)  # fake tensors are subclasses
        and all(tensor.device.type != "meta" for tensor in tensors)
    )


def is_plain_execution(*tensors: Tensor) -> bool:
    """True if the tensors are plain and no dispatch mode, such as a tracer or a FLOP counter, is active."""
    return are_plain_eager_tensors(*tensors) and _NATIVE._len_torch_dispatch_stack() == 0


def is_transformed() -> bool:
    """True if a compiler, a tracer, a `torch.func` transform or forward-mode differentiation may be active."""
    return _is_compiled_or_recorded() or _is_func_transformed()


def transform_reason() -> str | None:
    """Return why no fused kernel can run under the active transform, or None."""
    if is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return "exported and recorded graphs consist of PyTorch's own operations"
    if _is_func_transformed():
        return "has no batching rule and no forward-mode derivative, which the active torch.func transform needs"
    return None


def is_exporting() -> bool:
    """True if `torch.export` is tracing. The graph must serve every size that is left open (`are_open`).

    Not `torch.compiler.is_exporting`: in torch 2.11 it is also true in compiled code.
    """
    return torch.compiler._is_exporting_flag  # pyright: ignore[reportPrivateUsage]


def are_open(*sizes: int) -> bool:
    """True if `torch.export` is tracing and leaves one of the sizes open: code may not branch on them."""
    return is_exporting() and any(isinstance(size, torch.SymInt) for size in sizes)  # pyright: ignore[reportUnnecessaryIsInstance]


def unrecorded() -> AbstractContextManager[None]:
    """Return a context in which `torch.jit.trace` does not record, so that sizes are plain numbers, not tensors."""
    return _without_recording() if _is_recording() else nullcontext()


def plain_sizes(sizes: Any) -> Any:
    """Return sizes as numbers, even if `torch.jit.trace` made tensors of them; return anything else as it is."""
    if not isinstance(sizes, (tuple, list)) or not _is_recording():
        return sizes  # pyright: ignore[reportUnknownVariableType]
    with _without_recording():
        return tuple(int(size) if isinstance(size, Tensor) else size for size in cast(Sequence[Any], sizes))


def autocast_enabled(tensor: Any) -> bool:
    """True if autocast is enabled for the tensor's device; False for other values."""
    if not isinstance(tensor, Tensor):
        return False
    device_type = tensor.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)  # asking about meta tensors raises


def as_autocast(tensor: Any) -> Any:
    """Cast a floating-point tensor to the autocast dtype if autocast is enabled; return anything else as it is."""
    if not autocast_enabled(tensor) or tensor.dtype not in _AUTOCAST_DTYPES:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _is_compiled_or_recorded() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def _is_recording() -> bool:
    return not torch.compiler.is_compiling() and torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def _is_func_transformed() -> bool:
    level = cast(int, forward_ad._current_level)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    return level >= 0 or _NATIVE._are_functorch_transforms_active()


@contextmanager
def _without_recording() -> Generator[None]:
    state = _NATIVE._get_tracing_state()
    _NATIVE._set_tracing_state(None)
    try:
        yield
    finally:
        _NATIVE._set_tracing_state(state)
