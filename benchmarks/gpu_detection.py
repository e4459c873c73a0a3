"""Backbones and whole detectors at the resolution of detection: images per second and peak memory, on a GPU.

    python benchmarks/gpu_detection.py [--output DIR] [--compiled] [--time-limit 300]
    python benchmarks/gpu_detection.py --smoke --output DIR        # small images on a CPU, as a test

Backbones: InLine, their softmax twins and ResNet-50 of torchvision's Mask R-CNN, on images of 800 × 1333 and
1600 × 2666 pixels. Inference uses bf16 weights, training (forward and backward) bf16 autocast. The features of an
InLine backbone are checked against the same weights on plain PyTorch in float32 before it is timed.

Detectors: whole Mask R-CNNs on images of 800 × 1333 and on batches of unequal images, with bf16 autocast (at inference
with backbones of bf16 weights, like `inline eval --amp bf16`), from normalized images to boxes and masks of 28 × 28
cells, which are not pasted into pictures. All learn from the same ten objects per image. Scores and boxes are computed,
then replaced by the same random numbers for all, because the time of non-maximum suppression depends on them. Two
differences remain: torchvision rounds its anchors to the features' dtype, and has anchors in the padding.

Results: benchmarks/results/gpu_detection.{json,md}, rewritten after every case.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import typer
from torch import Tensor, nn
from torchvision.models.detection import maskrcnn_resnet50_fpn
from torchvision.models.detection.image_list import ImageList

from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.models import set_backend
from inline_attention.benchmark.results import (
    Measurement,
    check_close,
    describe,
    markdown_table,
    measure_contestants,
    notes_of,
    ratio,
    write_json,
    write_markdown,
)
from inline_attention.benchmark.timing import Work, prepare_throughput, read_peak, release_memory, reset_peak
from inline_attention.cli.bench import resolve_device
from inline_attention.models import create_model
from inline_attention.tasks.detection.models import DetectionOptions, build_detector

RESULTS = Path(__file__).parent / "results"
NAME = "gpu_detection"
RESNET = "torchvision ResNet-50"
NUM_CLASSES = 8
OBJECTS = 10  # per image, in training
LARGEST_ERROR = 2e-2  # relative, of the coarsest features in bf16
LEAST_ROUNDS = 5
GRID_MULTIPLE = 8
Kind = Literal["backbone", "detector"]
Mode = Literal["inference", "training"]


@dataclass(frozen=True)
class Case:
    """Contestants of one kind on images of one size; speeds are given relative to the first.

    Attributes:
        kind: A "backbone" alone, or a whole "detector".
        mode: "inference", or "training": forward and backward.
        height: Height of images in pixels.
        width: Width of images in pixels.
        batch: Images per step.
        contestants: Names of backbones.
        narrowest: Width of the first image of a batch; the others' grow from it to `width`. None for all of one size.
    """

    kind: Kind
    mode: Mode
    height: int
    width: int
    batch: int
    contestants: tuple[str, ...]
    narrowest: int | None = None

    @property
    def size(self) -> str:
        """Height and width of the images as text."""
        return f"{self.height} × {'' if self.narrowest is None else f'{self.narrowest}–'}{self.width}"

    @property
    def widths(self) -> list[int]:
        """Width of each image."""
        return torch.linspace(self.narrowest or self.width, self.width, self.batch).int().tolist()  # pyright: ignore[reportUnknownMemberType]


PVT, SWIN = ("inline_pvt_tiny", "softmax_pvt_tiny"), ("inline_swin_tiny", "softmax_swin_tiny")
CASES = (
    *(
        Case("backbone", mode, height, width, batch, (*family, RESNET))
        for height, width, batch in ((800, 1333, 8), (1600, 2666, 2))
        for mode in ("inference", "training")
        for family in (PVT, SWIN)
    ),
    *(Case("detector", "inference", 800, 1333, batch, (*PVT, *SWIN, RESNET)) for batch in (1, 8)),
    Case("detector", "training", 800, 1333, 4, (*PVT, *SWIN, RESNET)),
    Case("detector", "inference", 800, 1333, 8, (*PVT, *SWIN, RESNET), narrowest=1066),
    Case("detector", "training", 800, 1333, 4, (*PVT, *SWIN, RESNET), narrowest=1066),
)
SMOKE_CASES = (
    Case("backbone", "inference", 64, 96, 1, (*PVT, RESNET)),
    Case("backbone", "training", 64, 96, 1, SWIN),
    Case("detector", "inference", 64, 90, 1, (PVT[0], RESNET)),
    Case("detector", "training", 64, 90, 2, (PVT[0], RESNET), narrowest=70),
)


def measure(case: Case, device: torch.device, *, compiled: bool, seconds: float) -> list[Measurement]:
    """Time all contestants of a case in turns. If one fails, its note says why, and the others are timed."""

    def ready(name: str) -> tuple[Work, float | None, int | None]:
        release_memory(device)
        occupied = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        step, error = prepare(name, case, device, compiled=compiled)
        step()
        reset_peak(device)
        step()
        peak_bytes = read_peak(device, occupied)
        return prepare_throughput(step, device), error, peak_bytes

    return measure_contestants(case.contestants, ready, device, seconds=seconds, at_least=LEAST_ROUNDS)


def prepare(
    name: str, case: Case, device: torch.device, *, compiled: bool
) -> tuple[Callable[[], object], float | None]:
    """Return a checked step of a contestant, and its error against float32."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    images = torch.randn(case.batch, 3, case.height, case.width, device=device)
    with device:
        model = (_detector if case.kind == "detector" else _backbone)(name)
    if case.kind == "detector":
        return _detector_step(model, images, case, dtype), None
    error = _check(model, images[:1], dtype) if name.startswith("inline_") else None
    release_memory(device)  # the copies for the check must not count in its peak
    if case.mode == "inference":
        model, images = model.to(dtype).eval(), images.to(dtype)
        runnable = torch.compile(model, dynamic=False) if compiled else model

        def infer() -> object:
            with torch.inference_mode():
                return runnable(images)

        return infer, error
    model.train()
    runnable = torch.compile(model, dynamic=False) if compiled else model

    def train() -> object:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            features: Sequence[Tensor] = runnable(images)
        loss = torch.stack([feature.float().square().mean() for feature in features]).sum()
        loss.backward()
        return loss

    return train, error


def _detector_step(model: nn.Module, images: Tensor, case: Case, dtype: torch.dtype) -> Callable[[], object]:
    listed = [image[:, :, :width] for image, width in zip(images, case.widths, strict=True)]
    kind = images.device.type
    if case.mode == "inference":
        model.eval()
        (model.parts.backbone if isinstance(model, _ResNetDetector) else cast(Any, model).backbone).to(dtype)

        def detect() -> object:
            with torch.inference_mode(), torch.autocast(kind, dtype, enabled=dtype != torch.float32):
                return model(listed)

        return detect
    model.train()
    targets = [_objects(case.height, width, seed, images.device) for seed, width in enumerate(case.widths)]

    def train() -> object:
        model.zero_grad(set_to_none=True)
        with torch.autocast(kind, dtype, enabled=dtype != torch.float32):
            losses: dict[str, Tensor] = model(listed, targets)
        loss = torch.stack([loss.float() for loss in losses.values()]).sum()
        loss.backward()
        return loss

    return train


def _objects(height: int, width: int, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Return boxes of random places and sizes, each with a mask that fills it."""
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([width, height])
    corners = torch.rand(OBJECTS, 2, generator=generator) * 0.7 * bounds
    boxes = torch.cat([corners, corners + (0.05 + 0.25 * torch.rand(OBJECTS, 2, generator=generator)) * bounds], dim=1)
    masks = torch.zeros(OBJECTS, height, width, dtype=torch.uint8)
    for mask, box in zip(masks, boxes.int().tolist(), strict=True):
        left, top, right, bottom = box
        mask[top:bottom, left:right] = 1
    labels = torch.randint(1, NUM_CLASSES + 1, (OBJECTS,), generator=generator)
    return {"boxes": boxes.to(device), "labels": labels.to(device), "masks": masks.to(device)}


class _SameAnswers:
    """A hook on the layers that score and shift boxes. It replaces their output by the same random numbers for all.

    The numbers are drawn for grids slightly larger than those of the images, so that a slightly wider grid gets the
    same numbers at the same places. About a thousand boxes and classes count as objects.
    """

    def __init__(self, spread: float, background: float = 0.0):
        self.spread, self.background = spread, background
        self._drawn: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        del layer, inputs
        first, channels, *grid = output.shape
        shape = (first, channels, *(-(-side // GRID_MULTIPLE) * GRID_MULTIPLE for side in grid))
        if shape not in self._drawn:
            drawn = self.spread * torch.randn(shape, generator=torch.Generator().manual_seed(0))
            drawn[:, 0] += self.background
            self._drawn[shape] = drawn.to(output.device, torch.float32)
        # Still a function of the output: the backward pass goes through the layer.
        return self._drawn[shape][(..., *(slice(side) for side in grid))] + 0 * output


class _ResNetDetector(nn.Module):
    """torchvision's Mask R-CNN from normalized images to the results of our detectors.

    Its own `forward` also resizes the images, and pastes every mask into a picture.
    """

    def __init__(self, parts: Any):
        super().__init__()
        self.parts = parts

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        canvas = self.parts.transform.batch_images(images).to(next(self.parts.backbone.parameters()).dtype)
        listed = ImageList(canvas, [(image.shape[-2], image.shape[-1]) for image in images])
        features = self.parts.backbone(canvas)
        proposals, proposal_losses = self.parts.rpn(listed, features, targets)
        detections, losses = self.parts.roi_heads(features, proposals, listed.image_sizes, targets)
        return losses | proposal_losses if self.training else detections


class _Levels(nn.Module):
    """torchvision's backbone without its pyramid, with a list of features instead of a dict."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, images: Tensor) -> list[Tensor]:
        return list(self.body(images).values())


def _backbone(name: str) -> nn.Module:
    if name == RESNET:
        return _Levels(_resnet_parts().backbone.body)
    # Stochastic depth belongs to training recipes.
    return create_model(name, features_only=True, drop_path_rate=0.0)


def _detector(name: str) -> nn.Module:
    if name == RESNET:
        parts = _resnet_parts()
        model = _ResNetDetector(parts)
    else:
        model = build_detector(DetectionOptions("mask_rcnn"), name, {}, NUM_CLASSES)
        parts = cast(Any, model).heads
    parts.rpn.head.cls_logits.register_forward_hook(_SameAnswers(1.0))
    parts.rpn.head.bbox_pred.register_forward_hook(_SameAnswers(0.2))
    parts.roi_heads.box_predictor.cls_score.register_forward_hook(_SameAnswers(1.0, background=4.0))
    parts.roi_heads.box_predictor.bbox_pred.register_forward_hook(_SameAnswers(0.5))
    return model


def _resnet_parts() -> Any:
    return maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=NUM_CLASSES + 1)


@torch.no_grad()
def _check(model: nn.Module, image: Tensor, dtype: torch.dtype) -> float:
    """Return the relative error of the coarsest features, in the timed dtype, against plain PyTorch in float32."""
    exact = set_backend(copy.deepcopy(model), "eager").eval()(image)[-1]
    found = copy.deepcopy(model).eval().to(dtype)(image.to(dtype))[-1]
    return check_close("features", found, exact, LARGEST_ERROR)


def _make_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate its workspaces now; otherwise they would count as the first contestant's memory."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)).sum().backward()


def write(
    path: Path, results: Sequence[tuple[Case, list[Measurement]]], environment: dict[str, str], note: str
) -> None:
    """Write both files with the results so far."""
    rows: list[list[str]] = []
    for case, measurements in results:
        first = measurements[0].milliseconds
        for item in measurements:
            speed = ratio(1e3 * case.batch, item.milliseconds)
            relative = ratio(item.milliseconds, first)
            rows.append(
                [
                    f"{case.kind}, {case.mode}",
                    case.size,
                    str(case.batch),
                    item.contestant,
                    item.status if speed is None else f"{speed:,.1f}",
                    "–" if item.milliseconds is None else f"{item.milliseconds:.2f}",
                    "–" if item.peak_bytes is None else f"{item.peak_bytes / 2**20:,.0f}",
                    "–" if relative is None else f"{relative:.2f}×",
                ]
            )
    header = ["what", "image", "batch", "contestant", "images/s", "ms", "peak MiB", "time ÷ first of its case"]
    notes = notes_of([item for _, measurements in results for item in measurements])
    body = "\n\n".join([note, markdown_table(header, rows), *(f"- {line}" for line in notes)])
    write_json(
        path.with_suffix(".json"),
        {
            "environment": environment,
            "note": note,
            "results": [
                {"case": asdict(case), "measurements": [asdict(item) for item in measurements]}
                for case, measurements in results
            ],
        },
    )
    write_markdown(path.with_suffix(".md"), "Backbones and detectors at the resolution of detection", environment, body)


def main(
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    compiled: Annotated[bool, typer.Option(help="Compile backbones; whole detectors run eagerly.")] = False,
    seconds: Annotated[float, typer.Option(help="Seconds of timing per case.")] = 2.0,
    time_limit: Annotated[float, typer.Option(help="Seconds after which no further case is started.")] = math.inf,
    smoke: Annotated[bool, typer.Option("--smoke", help="Small images on a CPU, as a test.")] = False,
) -> None:
    start, environment = time.monotonic(), describe_environment()
    device = resolve_device("cpu" if smoke else "cuda")
    _make_workspaces(device)
    results: list[tuple[Case, list[Measurement]]] = []
    for case in SMOKE_CASES if smoke else CASES:
        if time.monotonic() - start > time_limit:
            print("the time is up: the remaining cases are left out", flush=True)
            break
        results.append((case, measure(case, device, compiled=compiled, seconds=seconds)))
        print(f"{case.kind}, {case.mode}, {case.size}, B={case.batch}: {describe(results[-1][1])}", flush=True)
        execution = "Backbones compiled." if compiled else "Eager execution."
        write(output / NAME, results, environment, f"{execution} Whole detectors are always eager.")


if __name__ == "__main__":
    typer.run(main)
