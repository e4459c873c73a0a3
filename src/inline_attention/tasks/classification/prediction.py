"""Picture files in, named classes out: a classifier from a file of weights.

Shapes: `B` batch, `K` classes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from timm.data.config import resolve_data_config
from timm.data.imagenet_info import ImageNetInfo
from timm.data.transforms_factory import create_transform
from torch import nn

from inline_attention.data.images import DEFAULT_MAX_PIXELS, ImageError, limit_aspect_ratio, load_image
from inline_attention.data.slides import SLIDE_SUFFIXES, needs_streaming, open_slide
from inline_attention.models.checkpoints import load_checkpoint
from inline_attention.models.described import create_described_model, read_description
from inline_attention.models.reading import Checkpoint, CheckpointError, open_checkpoint
from inline_attention.models.streaming import streamed
from inline_attention.tasks.task import find_device

LARGEST_RESIZED_ASPECT = 20  # of a picture resized by its shorter side; a thread of pixels would take minutes


@dataclass(frozen=True)
class Prediction:
    """One class, with its probability from 0 to 1."""

    index: int
    name: str
    probability: float


@dataclass(frozen=True)
class ImageResult:
    """The likeliest classes of one file, or the reason why it could not be used."""

    path: Path
    predictions: tuple[Prediction, ...] = ()
    error: str = ""
    level: int | None = None  # that was streamed, see `Streaming`


@dataclass(frozen=True)
class Streaming:
    """What to do with tiled files that are too large to decode whole. They run at full size, see `streamed`."""

    max_pixels: int = DEFAULT_MAX_PIXELS  # larger images are streamed, or refused if they are not tiled
    level: int | None = None  # to read of every tiled file, however small; None: the finest of those that are streamed
    memory: str | int = "4GiB"  # for a run, see `streamed`
    # Called with a sentence when a run starts; returns a function to call with shares of work done.
    on_start: Callable[[str], Callable[[float], None]] | None = None

    def applies_to(self, path: Path) -> bool:
        """True if a file is to be streamed."""
        if self.level is not None and path.suffix.lower() in SLIDE_SUFFIXES:
            return True
        return needs_streaming(path, self.max_pixels)


class ImageClassifier:
    """A model that takes picture files.

    Attributes:
        model: The model, in evaluation mode.
        class_names: One name per class.
    """

    def __init__(
        self,
        model: nn.Module,
        class_names: list[str],
        *,
        size: int | tuple[int, int] | None = None,
        device: str = "auto",
        native_size: tuple[int, int] | None = None,
        crop_pct: float | None = None,
    ):
        """Set up.

        Args:
            model: A classifier with timm's `pretrained_cfg`, which says how images are prepared.
            class_names: One name per class.
            size: Pixels of the shorter side, the aspect ratio being kept and nothing cropped; or (height, width)
                exactly. By default the model's native size and crop.
            device: "cpu", "cuda", …; "auto" for a GPU where there is one.
            native_size: (height, width) that the model was trained for; that of its `pretrained_cfg` by default.
            crop_pct: Share of the resized picture's side that is kept at the native size; by default the model's.

        Raises:
            ValueError: If the size is too small for the model, or there is no such device.
        """
        least = getattr(model, "largest_stride", 1)
        if size is not None and min([size] if isinstance(size, int) else size) < least:
            raise ValueError(f"images must be at least {least} pixels high and wide, got size {size}; enlarge it")
        self.device = find_device(device)
        self.model = model.eval().to(self.device)
        self.class_names = class_names
        self._size = size
        native = {} if native_size is None else {"input_size": (3, *native_size)}
        self._config: dict[str, Any] = resolve_data_config(native | {"crop_pct": crop_pct}, model=model)
        self._native_transform = create_transform(**self._config)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str] | Checkpoint,
        *,
        model_name: str | None = None,
        size: int | tuple[int, int] | None = None,
        device: str = "auto",
    ) -> Self:
        """Build the model that a file of weights is of, with as many classes as its head has.

        Args:
            path: File of weights, or the result of `open_checkpoint`.
            model_name: The model's name; by default what the file says, as converted files do.
            size: Image size, see the constructor.
            device: Device, see the constructor.

        Raises:
            CheckpointError: If the file cannot be used, or does not say which model it is of.
            ValueError: If there is no such model, size or device.
        """
        file = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        described = read_description(file, model_name)
        classes = described.needed_classes_in(file)
        class_names = _class_names(file.path, described.class_names, classes)
        arguments = {**described.arguments, "num_classes": classes}
        model = create_described_model(described.name, arguments, described.conversion)
        load_checkpoint(model, file)
        described.note_preparation(model)
        native_size, crop_pct = described.image_size, described.crop_pct
        return cls(model, class_names, size=size, device=device, native_size=native_size, crop_pct=crop_pct)

    @property
    def preparation(self) -> dict[str, Any]:
        """How images are prepared: timm's `input_size`, `crop_pct`, `interpolation`, `mean` and `std`."""
        return dict(self._config)

    def for_size(self, size: tuple[int, int]) -> ImageClassifier:
        """Return the same classifier for images that are resized and cropped to (height, width)."""
        options: dict[str, Any] = {"device": str(self.device), "crop_pct": self._config["crop_pct"]}
        return ImageClassifier(self.model, self.class_names, native_size=size, **options)

    def classify_files(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        top: int = 5,
        batch_size: int = 8,
        streaming: Streaming | None = None,
    ) -> Iterator[ImageResult]:
        """Classify files in order, in batches of images of equal size; the result of a broken one is its error.

        Args:
            paths: Picture files.
            top: Number of classes to return, the likeliest first.
            batch_size: Largest number of images to run at once.
            streaming: Settings for files that are too large to decode whole.
        """
        streaming = streaming or Streaming()
        batch: list[tuple[Path, torch.Tensor]] = []
        for path in map(Path, paths):
            if streaming.applies_to(path):
                yield from self._drain(batch, top)
                yield self._classify_slide(path, top, streaming)
                continue
            try:
                image = self.prepare(path, max_pixels=streaming.max_pixels)
            except ImageError as error:
                yield from self._drain(batch, top)
                yield ImageResult(path, error=error.reason)
                continue
            if len(batch) == batch_size or (batch and image.shape != batch[0][1].shape):
                yield from self._drain(batch, top)
            batch.append((path, image))
        yield from self._drain(batch, top)

    def _classify_slide(self, path: Path, top: int, streaming: Streaming) -> ImageResult:
        level = streaming.level or 0
        try:
            if self._size is not None:
                raise ImageError(path, "is read in parts, which cannot be resized; choose a level instead of a size")
            with open_slide(path, level) as slide:
                height, width = slide.size
                sentence = f"{path.name}: streaming {width}×{height} pixels, level {level} of {len(slide.level_sizes)}"
                on_progress = streaming.on_start(sentence) if streaming.on_start else None
                logits = streamed(self.model, streaming.memory, on_progress=on_progress)(slide)
        except ImageError as error:
            return ImageResult(path, error=error.reason)
        except ValueError as error:  # an image smaller than a patch, too little memory, another model
            return ImageResult(path, error=str(error))
        return replace(self._results([path], logits, top)[0], level=level)

    def prepare(self, path: str | os.PathLike[str], *, max_pixels: int = DEFAULT_MAX_PIXELS) -> torch.Tensor:
        """Read, resize and normalize one picture: `[3, H, W]`.

        Raises:
            ImageError: If it cannot be read, or would be too large.
        """
        image = load_image(path, max_pixels=max_pixels)
        if self._size is None:
            return self.prepare_image(image)
        if isinstance(self._size, int):
            scale = self._size / min(image.size)
            height, width = round(image.height * scale), round(image.width * scale)
            if max(height, width) > LARGEST_RESIZED_ASPECT * min(height, width):
                message = f"is too long and thin to be enlarged to {width}×{height}; give height and width"
                raise ImageError(path, message)
        else:
            height, width = self._size
        if height * width > DEFAULT_MAX_PIXELS:
            raise ImageError(path, f"would become {width}×{height} pixels large; give height and width instead")
        exact = {"input_size": (3, height, width), "crop_pct": 1.0, "crop_mode": "squash"}
        return create_transform(**(self._config | exact))(image)  # pyright: ignore[reportReturnType, reportCallIssue]

    def prepare_image(self, image: Image.Image) -> torch.Tensor:
        """Resize, crop and normalize an image for the native size: `[3, H, W]`."""
        return self._native_transform(limit_aspect_ratio(image))  # pyright: ignore[reportReturnType, reportCallIssue]

    def _drain(self, batch: list[tuple[Path, torch.Tensor]], top: int) -> list[ImageResult]:
        if not batch:
            return []
        paths, images = zip(*batch, strict=True)
        batch.clear()
        with torch.inference_mode():
            return self._results(paths, self.model(torch.stack(images).to(self.device)), top)

    def _results(self, paths: Sequence[Path], logits: torch.Tensor, top: int) -> list[ImageResult]:
        probabilities = logits.float().softmax(-1)  # [B, K]
        values, indices = (best.tolist() for best in probabilities.topk(min(top, probabilities.shape[1])))
        return list(map(self._result, paths, values, indices))

    def _result(self, path: Path, probabilities: list[float], indices: list[int]) -> ImageResult:
        if math.isnan(probabilities[0]):
            return ImageResult(path, error="gives NaN; are there NaN in the weights?")
        best = zip(indices, probabilities, strict=True)
        return ImageResult(path, tuple(Prediction(index, self.class_names[index], share) for index, share in best))


def _class_names(path: Path, names: list[str] | None, classes: int) -> list[str]:
    """Return the file's own names, ImageNet's for 1000 classes, or numbers."""
    if names is None:
        name = ImageNetInfo().index_to_description if classes == 1000 else "class {}".format
        return [name(index) for index in range(classes)]
    if len(names) != classes:
        raise CheckpointError(
            f"{path} has class_names in its metadata, expected a JSON list of {classes}, got {len(names)}; "
            "convert it again"
        )
    return names
