"""Tensors that depend on sizes alone, made once: masks and indices of windows.

Each takes a dozen operations on a few thousand numbers, which cost the host more than the GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from inline_attention.ops.tracing import is_exporting, is_plain_execution

MAX_TOTAL_BYTES = 2**25  # of one function
MAX_TENSOR_BYTES = 2**22

P = ParamSpec("P")


def cache_by_shape(
    make: Callable[Concatenate[torch.device, P], Tensor],
) -> Callable[Concatenate[torch.device, P], Tensor]:
    """Cache the results of a function of a device and numbers. Callers must not write to a result.

    Only plain eager execution uses the cache. A compiler folds constants by itself. A CUDA graph keeps reading memory
    that the cache may free, so a graph under capture gets tensors of its own.
    """
    cache: dict[Hashable, Tensor] = {}
    lock = threading.Lock()

    @functools.wraps(make)
    def look_up(device: torch.device, *arguments: P.args, **options: P.kwargs) -> Tensor:
        if is_exporting() or not is_plain_execution():
            return make(device, *arguments, **options)
        stream = None
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return make(device, *arguments, **options)
            # On another stream a tensor may not be ready yet, nor its memory be its own until the end.
            stream = torch.cuda.current_stream(device)
        key = (device, stream, arguments, *options.items())
        found = cache.get(key)
        if found is not None:
            return found
        with torch.inference_mode(False):  # a tensor made in inference mode could not be used in training
            made = make(device, *arguments, **options)
        if made.nbytes > MAX_TENSOR_BYTES:
            return made
        with lock:
            if sum(tensor.nbytes for tensor in cache.values()) + made.nbytes > MAX_TOTAL_BYTES:
                cache.clear()
            return cache.setdefault(key, made)  # another thread may have made the same tensor meanwhile

    return look_up
