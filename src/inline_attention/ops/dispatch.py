"""Which backend runs a call: an ordered table, each entry able to say why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from inline_attention.ops import reference
from inline_attention.ops.backends import cuda, eager, triton
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.validation import unknown_name


class Backend(NamedTuple):
    """One implementation of the op."""

    name: str
    unsupported_reason: Callable[[AttentionCall], str | None]  # why it cannot run a call, or None
    run: Callable[[AttentionCall], Tensor]
    by_name_only: tuple[str, ...] = ()  # device types on which "auto" does not take it


def _never_unsupported(_: AttentionCall) -> None:
    return None


# Fastest first. "auto" takes the first that can run the call.
AUTO_BACKENDS: tuple[Backend, ...] = (
    Backend("cuda", cuda.unsupported_reason, cuda.run),
    Backend("triton", triton.unsupported_reason, triton.run, by_name_only=("cpu",)),  # the interpreter is for tests
    Backend("eager", _never_unsupported, eager.run),
)
# Reachable by name only: quadratic memory.
NAMED_BACKENDS: tuple[Backend, ...] = (Backend("reference", reference.unsupported_reason, reference.run),)

BACKEND_NAMES: tuple[str, ...] = ("auto", *(backend.name for backend in (*AUTO_BACKENDS, *NAMED_BACKENDS)))


def select(name: str, call: AttentionCall) -> Backend:
    """Return the backend that runs `call`; raise ValueError for an unknown name, or with the backend's reason."""
    if name == "auto":
        for backend in AUTO_BACKENDS:
            if call.q.device.type not in backend.by_name_only and backend.unsupported_reason(call) is None:
                return backend
        raise AssertionError("the last automatic backend must accept every valid call")
    for backend in (*AUTO_BACKENDS, *NAMED_BACKENDS):
        if backend.name == name:
            reason = backend.unsupported_reason(call)
            if reason is not None:
                raise ValueError(f"backend {name!r} cannot run this call: {reason}; backend='auto' picks one that can")
            return backend
    raise unknown_name("backend", name, BACKEND_NAMES)
