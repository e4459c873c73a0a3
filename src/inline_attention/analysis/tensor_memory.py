"""The peak memory of tensors during a computation, on any device and without a process of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """While inside, adds up the bytes of tensors that operations make, and takes off those of tensors that are freed.

    What an operation uses within itself is not seen, nor are tensors from before.

    Attributes:
        peak_bytes: The most that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count what it made."""
        del types
        # Those from before are known from the first time that they are read: views of them and results in place are
        # nothing new.
        self._known.update(_storages((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self._bytes -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peak_tensor_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Peak memory of tensors that a call makes, in bytes, on top of what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with TensorMemory() as memory:
        call()
    return memory.peak_bytes
