"""Mixed precision: autocast dtype and loss scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}


class Precision:
    """Autocast to bfloat16 or float16, or none (`dtype` is None); `scaler` scales losses for float16 on GPUs."""

    def __init__(self, amp: str, device: torch.device):
        """Choose by "bf16", "fp16", "auto" (bf16 if the device has it, else fp16) or "off"."""
        if amp == "auto":
            amp = "bf16" if _has_bfloat16(device) else "fp16"
        if amp not in DTYPES:
            raise ValueError(f"amp must be bf16, fp16, auto or off, got {amp!r}")
        self.dtype, self._device = DTYPES[amp], device
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16" and device.type == "cuda")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward passes."""
        return nullcontext() if self.dtype is None else torch.autocast(self._device.type, self.dtype)


def _has_bfloat16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
