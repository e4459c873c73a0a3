"""Time, memory and multiply-adds of a model and its twins as images or windows grow.

Memory is that of tensors made in one forward pass; on a CPU, without scratch memory inside operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inline_attention.benchmark.model_size import measure_model_size
from inline_attention.benchmark.results import measure_contestants
from inline_attention.benchmark.timing import Work, prepare_throughput, read_peak, release_memory, reset_peak
from inline_attention.models import create_model, list_models
from inline_attention.models.registry import ATTENTIONS
from inline_attention.support.figures import KIND_LABELS, Axes, Chart, LegendEntry, Panel, Style, draw_line, log_axes

Axis: TypeAlias = Literal["resolution", "window"]
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class ScalingPoint:
    """The cost of one forward pass of one model at one size."""

    model: str
    attention: str
    axis: Axis  # what grows
    size: int  # side of the image in pixels
    window: int | None  # side of the window in tokens; None for the model's own
    batch: int
    milliseconds: float | None  # median; None if it failed
    spread: float | None  # 90th minus 10th percentile, over the median
    peak_bytes: int | None
    macs: int  # of the batch
    note: str = ""  # reason for missing values


def twins_of(name: str) -> dict[str, str]:
    """Return the names of a model and its twins, by their attention."""
    kind, _, rest = name.partition("_")
    if kind not in ATTENTIONS or name not in list_models():
        raise ValueError(f"there is no model {name!r} in this library; `inline models --all` lists them")
    return {kind: f"{kind}_{rest}" for kind in ATTENTIONS}


def measure_scaling(
    name: str,
    *,
    sizes: Sequence[int],
    windows: Sequence[int] = (),
    batch: int = 1,
    device: torch.device | None = None,
    seconds: float = 1.0,
    on_progress: Callable[[ScalingPoint], None] = lambda _: None,
) -> list[ScalingPoint]:
    """Measure a model and its twins, in turns, on images of growing sizes, then with growing windows at the first size.

    Each size takes so many seconds, unless `LEAST_ROUNDS` take longer.
    """
    names = twins_of(name)
    if windows and "_swin_" not in name:
        raise ValueError(f"{name} has no windows to enlarge; leave out --windows, or choose a Swin model")
    points: list[ScalingPoint] = []
    for size, window in [*((size, None) for size in sizes), *((sizes[0], window) for window in windows)]:
        for point in _measure_step(names, size, window, batch, device or torch.device("cpu"), seconds):
            points.append(point)
            on_progress(point)
    return points


def _measure_step(
    names: dict[str, str], size: int, window: int | None, batch: int, device: torch.device, seconds: float
) -> list[ScalingPoint]:
    arguments: dict[str, Any] = {} if window is None else {"window_size": window}
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)

    def prepare(kind: str) -> tuple[Work, None, int | None]:
        with device:
            model = create_model(names[kind], **arguments).eval()
        forward = torch.inference_mode()(partial(model, images))
        forward()
        peak_bytes = peak_tensor_bytes(forward, device)
        return prepare_throughput(forward, device), None, peak_bytes

    measured = measure_contestants(names, prepare, device, seconds=seconds, at_least=LEAST_ROUNDS)
    release_memory(device)
    return [
        ScalingPoint(
            model=names[found.contestant],
            attention=found.contestant,
            axis="resolution" if window is None else "window",
            size=size,
            window=window,
            batch=batch,
            milliseconds=found.milliseconds,
            spread=None if found.timing is None else found.timing.spread,
            peak_bytes=found.peak_bytes,
            macs=batch * measure_model_size(names[found.contestant], input_size=(3, size, size), **arguments).macs,
            note=found.note,
        )
        for found in measured
    ]


class TensorMemory(TorchDispatchMode):
    """Record the peak memory of tensors made inside the `with` block, without scratch memory inside operations."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self._bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count its new tensors."""
        del types
        # Inputs are known storage: views of them and in-place results are not new.
        self._known.update(_storages((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage not in self._known:
                self._known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, size: int) -> None:
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peak_tensor_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak memory of tensors that a call makes, in bytes, beyond what was allocated before."""
    occupied = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    reset_peak(device)
    with TensorMemory() if device.type == "cpu" else nullcontext() as memory:
        call()
    return read_peak(device, occupied) if memory is None else memory.peak_bytes


def draw_scaling(points: Sequence[ScalingPoint], machine: str, folder: Path) -> list[Path]:
    """Write `scaling.png` and `.svg`: a row per axis (resolution, window), a column per quantity."""
    quantities = {
        "Time of a forward pass (ms)": ("milliseconds", 1),
        "Peak memory of tensors (MiB)": ("peak_bytes", 2**20),
        "Multiply-adds (billions)": ("macs", 1e9),
    }

    def draw(axes: Axes, axis: str, quantity: str, unit: float) -> None:
        shown = [point for point in points if point.axis == axis]
        for kind in ATTENTIONS:
            measured = [point for point in shown if point.attention == kind and getattr(point, quantity)]
            places = [(point.window or point.size, getattr(point, quantity) / unit) for point in measured]
            draw_line(axes, Style(kind), places)
        log_axes(axes, sorted({point.window or point.size for point in shown}), "{x:.0f}²")
        axes.set_xlabel(f"window (tokens), image of {shown[0].size}² pixels" if axis == "window" else "image (pixels)")

    panels = [
        Panel(title, partial(draw, axis=axis, quantity=quantity, unit=unit))
        for axis in dict.fromkeys(point.axis for point in points)
        for title, (quantity, unit) in quantities.items()
    ]
    small_print = (
        f"{machine}. Batch {points[0].batch}, float32, random weights and images. Memory without weights and images. "
        "Median times."
    )
    title = f"Cost of {points[0].model.partition('_')[2]} with each attention"
    legend = [LegendEntry(KIND_LABELS[kind], Style(kind)) for kind in ATTENTIONS]
    return Chart(panels, legend).save(folder, "scaling", title=title, small_print=small_print, columns=3)
