"""Mixed precision: in what dtype matrix products are done, and the loss scaling that float16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast to bfloat16 or float16, or none; gradients scaled for float16 on GPUs."""

    def __init__(self, amp: Literal["bf16", "fp16", "off"], device: torch.device):
        """Choose.

        Args:
            amp: "bf16", "fp16" or "off".
            device: Where products are done.
        """
        self._dtype = _DTYPES.get(amp)
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16" and device.type == "cuda")

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward passes."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)
