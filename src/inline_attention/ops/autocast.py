"""Autocast for operations that PyTorch has no rule for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inline_attention.ops.validation import FLOATING_DTYPES


def autocast_enabled(tensor: Any) -> bool:
    """True if autocast is enabled for the tensor's device; False for other values."""
    if not isinstance(tensor, Tensor):
        return False
    device_type = tensor.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)  # asking about meta tensors raises


def as_autocast(tensor: Any) -> Any:
    """Cast a floating-point tensor to the autocast dtype if autocast is enabled; return anything else as it is."""
    if not autocast_enabled(tensor) or tensor.dtype not in FLOATING_DTYPES or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
