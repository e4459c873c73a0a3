"""Images per second and peak memory of a model before and after its attention was converted, by image size.

Each size is bounded by time and memory: what would take too long is left out, what does not fit says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inline_attention.benchmark.cost import peak_resident_bytes
from inline_attention.benchmark.models import constant_pixel_batch
from inline_attention.benchmark.results import Measurement
from inline_attention.benchmark.timing import (
    interleaved_timings,
    prepare_throughput,
    read_peak,
    release_memory,
    reset_peak,
)
from inline_attention.layers.attention import KernelAttention
from inline_attention.support.memory import available_memory

SIZES = (224, 512, 1024, 2048)
LONGEST_CALL = 30.0  # seconds that one batch may be expected to take
SHARE_OF_MEMORY = 0.8  # of what is free
NO_ROOM = "does not fit"


@dataclass(frozen=True)
class SpeedCell:
    """Speed of one model at one image size; without values, `note` says why."""

    model: str
    size: int  # side of the images in pixels, a multiple of the patches' side
    batch: int
    images_per_second: float | None = None
    peak_bytes: int | None = None  # beyond the memory in use before, without the model
    note: str = ""


def measure_speed(
    models: Mapping[str, nn.Module],
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    seconds: float = 1.0,
    on_cell: Callable[[SpeedCell], None] = lambda _: None,
) -> list[SpeedCell]:
    """Measure inference of copies of models: bfloat16 on a GPU, float32 on a CPU, a constant number of pixels a batch.

    Sizes are sides of images, rounded to whole patches. Each cell takes so many seconds; then `on_cell` is called.
    """
    cells: list[SpeedCell] = []
    for name, model in models.items():
        last, side = None, _patch_side(model)
        for size in sorted(sizes):
            cell = _measure(name, model, max(1, round(size / side)) * side, device, seconds, last)
            last = cell if cell.images_per_second else last
            cells.append(cell)
            on_cell(cell)
    return cells


def _measure(
    name: str, model: nn.Module, size: int, device: torch.device, seconds: float, last: SpeedCell | None
) -> SpeedCell:
    batch = constant_pixel_batch(size, device)
    if last is not None and (reason := _too_costly(model, last, size, batch, device)) is not None:
        return SpeedCell(name, size, batch, note=reason)
    for images in dict.fromkeys((batch, 1)):  # a smaller GPU still takes one image
        try:
            return _time(name, model, size, images, device, seconds)
        except Exception as error:  # models refuse sizes in their own ways
            release_memory(device)
            failure = Measurement.failure(name, error)
            if failure.status != "out of memory" and "can't allocate memory" not in str(error):
                return SpeedCell(name, size, images, note=f"not possible: {failure.note}")
    return SpeedCell(name, size, 1, note=NO_ROOM)


def _time(name: str, model: nn.Module, size: int, batch: int, device: torch.device, seconds: float) -> SpeedCell:
    release_memory(device)
    resized: Any = copy.deepcopy(model).eval()
    if hasattr(resized, "set_input_size"):
        resized.set_input_size(img_size=(size, size))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    resized = resized.to(device, dtype)
    images = torch.randn(batch, 3, size, size, device=device, dtype=dtype)
    with torch.inference_mode():
        occupied = _start_of_peak(device)
        resized(images)
        peak = read_peak(device, occupied or 0) if device.type == "cuda" else _peak_since(occupied)
        work = prepare_throughput(lambda: resized(images), device)
        timing = interleaved_timings({name: work}, seconds=seconds, at_least=1)[name]
    return SpeedCell(name, size, batch, batch / (1e-3 * timing.milliseconds), peak)


def _start_of_peak(device: torch.device) -> int | None:
    """Start to measure the peak memory; return what is in use, None if the platform cannot tell."""
    if device.type == "cuda":
        reset_peak(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):  # resets the recorded peak on Linux
        Path("/proc/self/clear_refs").write_text("5")
        return peak_resident_bytes()
    return None  # elsewhere a peak of earlier work would hide this one


def _peak_since(before: int | None) -> int | None:
    after = peak_resident_bytes()
    return None if before is None or after is None else after - before


def _too_costly(model: nn.Module, last: SpeedCell, size: int, batch: int, device: torch.device) -> str | None:
    """Return why a larger size is left out, from the last one that was measured; None if it can be tried."""
    assert last.images_per_second is not None
    ratio = (size / last.size) ** 2
    seconds = batch / last.images_per_second * _cost(model, size) / _cost(model, last.size)
    if seconds > LONGEST_CALL:
        return f"left out: may take {seconds:,.0f} s"
    if device.type != "cuda" and last.peak_bytes:
        needed, free = last.peak_bytes / last.batch * batch * ratio, available_memory()
        if free is not None and needed > SHARE_OF_MEMORY * free:
            return f"{NO_ROOM}: needs about {needed / 2**30:.1f} GiB"
    return None


def _cost(model: nn.Module, size: int) -> float:
    """Return multiply-adds by image size up to a factor: 12 N C² of a block's projections, 2 N² C of its softmax."""
    attentions = [module for module in model.modules() if hasattr(module, "proj") and hasattr(module, "num_heads")]
    softmax = [module for module in attentions if not isinstance(module, KernelAttention)]
    tokens, channels = (size / _patch_side(model)) ** 2, getattr(model, "num_features", 1)
    return tokens * (1 + len(softmax) / max(1, len(attentions)) * tokens / (6 * channels))


def _patch_side(model: nn.Module) -> int:
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", 1)
    return patch if isinstance(patch, int) else patch[0]
