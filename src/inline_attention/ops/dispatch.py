"""Which backend runs a call: an ordered table, each entry able to say why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from inline_attention.ops import reference
from inline_attention.ops.backends import cuda, eager, triton
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.validation import unknown_name


def _always(call: AttentionCall) -> bool:
    del call
    return True


class Backend(NamedTuple):
    """One implementation of the op.

    `unsupported_reason` returns why it cannot run a call, or None. `can_be_automatic` is False for calls that it can
    run, but "auto" must not give to it.
    """

    name: str
    unsupported_reason: Callable[[AttentionCall], str | None]
    run: Callable[[AttentionCall], Tensor]
    can_be_automatic: Callable[[AttentionCall], bool] = _always


# Fastest first. "auto" takes the first that can run the call.
AUTO_BACKENDS: tuple[Backend, ...] = (
    Backend("cuda", cuda.unsupported_reason, cuda.run),
    Backend("triton", triton.unsupported_reason, triton.run, triton.can_be_automatic),
    Backend("eager", eager.unsupported_reason, eager.run),
)
# Reachable by name only: quadratic memory.
NAMED_BACKENDS: tuple[Backend, ...] = (Backend("reference", reference.unsupported_reason, reference.run),)

BACKEND_NAMES: tuple[str, ...] = ("auto", *(backend.name for backend in (*AUTO_BACKENDS, *NAMED_BACKENDS)))


def select(name: str, call: AttentionCall) -> Backend:
    """Return the backend that runs `call`; raise ValueError for an unknown name, or with the backend's reason."""
    if name == "auto":
        for backend in AUTO_BACKENDS:
            if backend.can_be_automatic(call) and backend.unsupported_reason(call) is None:
                return backend
        raise AssertionError("the last automatic backend must accept every valid call")
    for backend in (*AUTO_BACKENDS, *NAMED_BACKENDS):
        if backend.name == name:
            reason = backend.unsupported_reason(call)
            if reason is not None:
                raise ValueError(f"backend {name!r} cannot run this call: {reason}; backend='auto' picks one that can")
            return backend
    raise unknown_name("backend", name, BACKEND_NAMES)
