"""Bound the memory and time that a model from a file takes to run, in proportion to the weights that the file holds.

The model runs once on the meta device, which knows shapes but holds and computes nothing. A few kilobytes can describe
windows, classes or an image size for which one pass takes hundreds of gigabytes, or hours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

LEAST_BYTES, BYTES_PER_BYTE = 2**30, 64  # of the largest tensor, whatever the file holds and for each byte of it
LEAST_WORK, WORK_PER_PARAMETER = 5 * 10**11, 4 * 10**6  # floating-point operations; half a minute on a CPU core
WORK_PER_ELEMENT = 32  # a CPU computes as much while it waits for one number from memory


class RunningCostError(ValueError):
    """A model would take memory or time out of proportion to its file."""


def check_running_cost(run: Callable[[], object], weights: Mapping[str, Tensor]) -> None:
    """Refuse a model if a tensor of its run on the meta device, or all operations, are out of proportion to its file.

    That raises `RunningCostError`. `weights` are the tensors of the file.
    """
    meter = _Meter(
        LEAST_BYTES + BYTES_PER_BYTE * sum(value.nbytes for value in weights.values()),
        LEAST_WORK + WORK_PER_PARAMETER * sum(value.numel() for value in weights.values()),
    )
    with torch.device("meta"), torch.no_grad(), _FusedAttention(meter), meter:
        run()


class _Meter(TorchDispatchMode):
    """Counts operations, and raises as soon as a limit is passed."""

    def __init__(self, most_bytes: int, most_work: int):
        super().__init__()
        self._most_bytes, self._most_work, self._work = most_bytes, most_work, 0

    def add(self, work: int) -> None:
        self._work += work
        if self._work > self._most_work:
            raise RunningCostError(f"it would take more than {self._most_work:.1e} operations for one image")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    if tensor.nbytes > self._most_bytes:
                        size = f"{tensor.nbytes / 2**30:,.1f} GiB for one tensor of one image"
                        raise RunningCostError(f"it would take {size}; {self._most_bytes / 2**30:.1f} can be")
                    self.add(WORK_PER_ELEMENT * tensor.numel())
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.add(count(*args, **(kwargs or {}), out_val=out))
        return out


class _FusedAttention(TorchFunctionMode):
    """Softmax attention as it is on CPUs and GPUs, without a tensor of scores, which the meta device would form."""

    def __init__(self, meter: _Meter):
        super().__init__()
        self._meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or len(args) < 3:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        work_per_score = 2 * (query.shape[-1] + value.shape[-1]) + WORK_PER_ELEMENT  # the latter for the softmax
        self._meter.add(query.shape[:-1].numel() * key.shape[-2] * work_per_score)
        return query.new_empty(*query.shape[:-1], value.shape[-1])
