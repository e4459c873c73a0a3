"""What a model and its twins cost as images, or windows, grow: time, memory and multiply-adds. No accuracy is involved.

Memory is that of tensors made in one forward pass, without weights and images. On a GPU it is what PyTorch's allocator
handed out; on a CPU what operations returned, so that scratch space inside one of them does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from inline_attention.analysis.tensor_memory import peak_tensor_bytes
from inline_attention.benchmark.model_size import measure_model_size
from inline_attention.benchmark.timing import interleaved_timings, prepare_throughput, release_memory
from inline_attention.models import create_model, list_models
from inline_attention.models.registry import TWINS

Axis: TypeAlias = Literal["resolution", "window"]
LEAST_ROUNDS = 3
KINDS = ("inline", *TWINS)


@dataclass(frozen=True)
class ScalingPoint:
    """The cost of one model at one size.

    Attributes:
        model: Its name.
        attention: "inline", "softmax" or "linear".
        axis: What grows: the image's "resolution", or the "window" of windowed attention.
        size: Side of the image in pixels.
        window: Side of the window in tokens; None for the model's own.
        batch: Images.
        milliseconds: Median time of one forward pass; None where it failed.
        spread: From the 10th to the 90th percentile, over the median.
        peak_bytes: Of one forward pass.
        macs: Multiply-adds of the batch.
        note: Why something is missing.
    """

    model: str
    attention: str
    axis: Axis
    size: int
    window: int | None
    batch: int
    milliseconds: float | None
    spread: float | None
    peak_bytes: int | None
    macs: int
    note: str = ""


def twins_of(name: str) -> dict[str, str]:
    """The names of a model and its twins, by their attention.

    Raises:
        ValueError: If there is no such model in this library.
    """
    kind, _, rest = name.partition("_")
    if kind not in KINDS or name not in list_models():
        raise ValueError(f"there is no model {name!r} in this library; `inline models --all` lists them")
    return {kind: f"{kind}_{rest}" for kind in KINDS}


def measure_scaling(
    name: str,
    *,
    sizes: Sequence[int],
    windows: Sequence[int] = (),
    batch: int = 1,
    device: torch.device | None = None,
    seconds: float = 1.0,
    on_progress: Callable[[ScalingPoint], None] | None = None,
) -> list[ScalingPoint]:
    """Measure a model and its twins, which take turns, at growing resolutions and then at growing windows.

    Args:
        name: Of the model or one of its twins.
        sizes: Sides of square images in pixels.
        windows: Sides of windows in tokens, at the first of `sizes`; for models with a `window_size`.
        batch: Images at once.
        device: Where; the CPU by default.
        seconds: Time to spend on each size, as far as `LEAST_ROUNDS` allow.
        on_progress: Called with each point.

    Raises:
        ValueError: If there is no such model, or windows are given for one that has none.
    """
    names = twins_of(name)
    if windows and "_swin_" not in name:
        raise ValueError(f"{name} has no windows to enlarge; leave --windows out, or take a Swin model")
    device = device or torch.device("cpu")
    steps: list[tuple[int, int | None]] = [(size, None) for size in sizes]
    steps += [(sizes[0], window) for window in windows]
    points: list[ScalingPoint] = []
    for size, window in steps:
        axis: Axis = "resolution" if window is None else "window"
        arguments = {} if window is None else {"window_size": window}
        for point in _measure_step(names, axis, size, window, arguments, batch, device, seconds):
            points.append(point)
            if on_progress is not None:
                on_progress(point)
    return points


def _measure_step(
    names: dict[str, str],
    axis: Axis,
    size: int,
    window: int | None,
    arguments: dict[str, Any],
    batch: int,
    device: torch.device,
    seconds: float,
) -> list[ScalingPoint]:
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    works: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    notes: dict[str, str] = {}
    for kind, model_name in names.items():
        try:
            forward = _forward_pass(model_name, images, arguments)
            forward()
            peaks[kind] = peak_tensor_bytes(forward, device)
            works[kind] = prepare_throughput(forward, device)
        except (RuntimeError, MemoryError) as error:  # most of all, out of memory: the others are to be measured
            notes[kind] = (str(error).strip() or type(error).__name__).splitlines()[0]
            release_memory(device)
    timings = interleaved_timings(works, seconds=seconds, at_least=LEAST_ROUNDS)
    release_memory(device)
    return [
        ScalingPoint(
            model=model_name,
            attention=kind,
            axis=axis,
            size=size,
            window=window,
            batch=batch,
            milliseconds=timings[kind].milliseconds if kind in timings else None,
            spread=timings[kind].spread if kind in timings else None,
            peak_bytes=peaks.get(kind),
            macs=batch * measure_model_size(model_name, input_size=(3, size, size), **arguments).macs,
            note=notes.get(kind, ""),
        )
        for kind, model_name in names.items()
    ]


def _forward_pass(model_name: str, images: torch.Tensor, arguments: dict[str, Any]) -> Callable[[], object]:
    with images.device:
        model = create_model(model_name, **arguments).eval()

    def forward() -> object:
        with torch.inference_mode():
            return model(images)

    return forward
