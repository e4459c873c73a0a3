"""What autocast asks of an op that PyTorch does not know."""

from __future__ import annotations

from typing import Any

import torch

from inline_attention.ops.validation import FLOATING_DTYPES


def autocast_enabled(tensor: Any) -> bool:
    """Whether autocast is on where a tensor is; not for what is none."""
    if not isinstance(tensor, torch.Tensor):
        return False
    device_type = tensor.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)  # asking about meta tensors raises


def as_autocast(tensor: Any) -> Any:
    """In the autocast dtype where autocast is on; float64 and what is no tensor of numbers stay."""
    if not autocast_enabled(tensor) or tensor.dtype not in FLOATING_DTYPES or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
