"""Tensors that depend on sizes alone, made once: masks and indices of windows.

Each takes a dozen or more operations on a few thousand numbers, which cost the host far more than the GPU, and a model
in eager mode takes as long for one image as its host does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Concatenate, ParamSpec

import torch

from inline_attention.ops.tracing import is_exporting, is_plain_execution

MOST_KEPT = 2**25  # bytes, of one function
LARGEST_KEPT = 2**22  # bytes, of one tensor

P = ParamSpec("P")


def remembered(
    make: Callable[Concatenate[torch.device, P], torch.Tensor],
) -> Callable[Concatenate[torch.device, P], torch.Tensor]:
    """Keep what a function of a device and of numbers returns. Whoever is given it must not write to it.

    In plain eager execution only. A compiler folds constants by itself; a CUDA graph goes on reading the memory of what
    is forgotten here, so one that is being recorded gets tensors of its own.
    """
    kept: dict[Hashable, torch.Tensor] = {}
    total = 0  # bytes

    @functools.wraps(make)
    def look_up(device: torch.device, *arguments: P.args, **options: P.kwargs) -> torch.Tensor:
        nonlocal total
        if is_exporting() or not is_plain_execution():
            return make(device, *arguments, **options)
        stream = None
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return make(device, *arguments, **options)
            # On another stream a tensor may not be ready yet, nor its memory be its own until the end.
            stream = torch.cuda.current_stream(device)
        key = (device, stream, arguments, *options.items())
        found = kept.get(key)
        if found is None:
            with torch.inference_mode(False):  # what is made in inference mode could not be used in training
                found = make(device, *arguments, **options)
            if found.nbytes <= LARGEST_KEPT:
                if total + found.nbytes > MOST_KEPT:
                    kept.clear()
                    total = 0
                kept[key] = found
                total += found.nbytes
        return found

    return look_up
