"""The models to analyze (of a run, of a weights file, or untrained), and samples of pictures prepared for each.

Shapes: `B` batch, `H`, `W` height and width of images in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

import torch
from timm.data.config import resolve_data_config
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from inline_attention.analysis.probes import (
    AnyAttention,
    LayerAttention,
    attention_layers,
    capture_attention,
    choose_heads,
)
from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImages
from inline_attention.data.datasets import open_dataset
from inline_attention.data.images import find_images
from inline_attention.data.loading import ImageLoader
from inline_attention.data.sampling import SampledBatches
from inline_attention.data.sources import DataError, ImageSource, PictureSource
from inline_attention.data.transforms import Transform, evaluation_options, evaluation_transform
from inline_attention.layers.attention import KernelAttention, SoftmaxAttention
from inline_attention.layers.conversion import convert_attention
from inline_attention.models import create_model
from inline_attention.models.checkpoints import load_checkpoint
from inline_attention.models.described import create_described_model, read_description
from inline_attention.models.reading import Checkpoint, CheckpointError, find_weights, open_checkpoint
from inline_attention.ops.reference import KIND_OF_NORMALIZATION, AttentionKind
from inline_attention.support.text import printable
from inline_attention.tasks.task import find_device

OnProgress: TypeAlias = Callable[[float], None]  # called with the share of the work just done; shares sum to one
NOT_A_RUN = ("checkpoints", "best", "last", "/")  # folders on the way from a run to its weights
HeadOfImage: TypeAlias = tuple[LayerAttention, int, int]  # a layer, and the numbers of an image and a head in it


@dataclass(frozen=True)
class Subject:
    """A model to analyze."""

    label: str  # in tables and pictures
    model_name: str
    kind: AttentionKind  # of the first layer: InLine pyramids end in softmax
    model: nn.Module  # in evaluation mode
    weights: Path | None  # None if untrained
    class_names: tuple[str, ...] | None  # if the file has them
    image_size: tuple[int, int]
    data_config: dict[str, Any]  # timm's: mean, std, interpolation, crop

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @property
    def note(self) -> str:
        """The origin of the weights, for messages."""
        return "untrained weights" if self.weights is None else f"weights of {printable(self.weights)}"

    def transform(self) -> Transform:
        """Return the transform from a picture to a uint8 tensor `[3, H, W]`."""
        return evaluation_transform(self.image_size, **evaluation_options(self.data_config))

    def normalization(self) -> Normalize:
        """Return the module that turns uint8 pixels into model inputs."""
        return Normalize(self.data_config["mean"], self.data_config["std"])

    def normalize(self, pixels: Tensor) -> Tensor:
        """Return model inputs `[B, 3, H, W]` from uint8 pixels, on the model's device."""
        return self.normalization()(pixels).to(self.device)

    def described(self) -> dict[str, Any]:
        """Return a description for result files; layers by their number."""
        return {
            "label": self.label,
            "model": self.model_name,
            "attention": self.kind,
            "weights": None if self.weights is None else str(self.weights),
            "image_size": list(self.image_size),
            "layers": list(attention_layers(self.model)),
        }


def trained_subject(
    path: Path | Checkpoint,
    *,
    model_name: str | None = None,
    size: tuple[int, int] | None = None,
    device: str = "auto",
    **arguments: Any,
) -> Subject:
    """Load a model with its weights; of a run folder, the best checkpoint is taken. It needs no head.

    Images are as large as in training unless a size (H, W) is given. `arguments` are those of `create_model` and come
    before the file's. A model of timm gets this library's softmax, see `as_probed_softmax`. Raises `CheckpointError` if
    there are no weights, or they do not fit; `ValueError` without attention over tokens.
    """
    file = path if isinstance(path, Checkpoint) else open_checkpoint(find_weights(path))
    described = read_description(file, model_name)
    name, names = described.name, described.class_names
    classes = arguments["num_classes"] = described.classes_in(file, **arguments) or 0
    if classes and names is not None and len(names) != classes:
        raise CheckpointError(f"{file.path} names {len(names)} classes, its head has {classes}; convert it again")
    model: Any = create_described_model(name, described.arguments, described.conversion, **arguments)
    load_checkpoint(model, file)
    described.note_preparation(model)
    if size is not None and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=size)
    if not any(isinstance(module, AnyAttention) for module in model.modules()):
        as_probed_softmax(model)
    model = model.eval().to(find_device(device))
    subject = describe_subject(model, name, size or described.image_size, described.crop_pct)
    # Only names from the file itself can be matched with those of a dataset.
    return replace(subject, weights=file.path, class_names=tuple(names) if classes and names is not None else None)


def as_probed_softmax(model: nn.Module) -> None:
    """Replace timm's softmax attention by this library's, in place, so that it can be observed; outputs stay equal."""
    if not any(isinstance(module, SoftmaxAttention) for module in model.modules()):
        convert_attention(model, attention=SoftmaxAttention)
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    for layer in attention_layers(model).values():
        if not isinstance(layer, SoftmaxAttention):
            raise ValueError(f"{type(model).__name__} has other attention than softmax already: {type(layer).__name__}")
        layer.default_grid_size = None if grid is None else (grid[0], grid[1])


def check_has_head(subject: Subject) -> None:
    """Raise `ValueError` for a model that cannot classify."""
    if getattr(subject.model, "num_classes", None) == 0:
        raise ValueError(
            f"{subject.label} has no head to classify with; train one on pictures with classes: "
            "inline train finetune --initial-checkpoint FILE"
        )


def untrained_subject(
    model_name: str,
    *,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    device: str = "auto",
    prepare: Callable[[nn.Module], None] = lambda _: None,
    **arguments: Any,
) -> Subject:
    """Build a model with random weights, changed by `prepare`; `arguments` are those of `create_model`."""
    torch.manual_seed(seed)
    model = create_model(model_name, **arguments).eval()
    prepare(model)
    model = model.to(find_device(device))
    native: Any = to_2tuple(arguments["img_size"]) if "img_size" in arguments else None
    # A trained model of unusual size is evaluated on the whole picture.
    return describe_subject(model, model_name, size or native, crop_pct=1.0 if native else None)


def with_distinct_labels(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the same subjects; several of one model get their runs or numbers as labels."""
    names = [subject.model_name for subject in subjects]
    distinct: list[Subject] = []
    for number, (name, subject) in enumerate(zip(names, subjects, strict=True), start=1):
        label = name if names.count(name) == 1 else f"{name} (#{number})"
        if names.count(name) > 1 and subject.weights is not None:
            folders = [part for part in subject.weights.parent.parts if part not in NOT_A_RUN]
            of_run = f"{name} ({printable([subject.weights.stem, *folders][-1])})"
            label = label if of_run in {other.label for other in distinct} else of_run
        distinct.append(replace(subject, label=label))
    return distinct


def weights_note(subjects: Sequence[Subject]) -> str:
    """Return a sentence for the small print of figures: trained or untrained weights."""
    untrained = [subject.label for subject in subjects if subject.weights is None]
    if len(untrained) == len(subjects):
        return "Untrained weights."
    return f"Untrained weights: {', '.join(untrained)}." if untrained else "Trained weights."


def describe_subject(
    model: nn.Module, model_name: str, size: tuple[int, int] | None, crop_pct: float | None
) -> Subject:
    """Return a subject of a built model at a size (H, W) and crop; None for the model's own."""
    wanted = {"crop_pct": crop_pct} | ({} if size is None else {"input_size": (3, *size)})
    config: dict[str, Any] = resolve_data_config(wanted, model=model)
    height, width = config["input_size"][1:]
    least = getattr(model, "largest_stride", 1)
    if min(height, width) < least:
        raise ValueError(
            f"{model_name} needs images of at least {least}×{least} pixels, got {height}×{width}; enlarge --size"
        )
    first = next(iter(attention_layers(model).values()))
    kind = KIND_OF_NORMALIZATION[first.normalization] if isinstance(first, KernelAttention) else "softmax"
    return Subject(model_name, model_name, kind, model, None, None, (height, width), config)


class Chosen(TypedDict, total=False):
    """The numbers of the layers and heads that a survey looks at, all by default, and a function to show progress."""

    layers: Sequence[int] | None
    heads: Sequence[int] | None
    on_progress: OnProgress


def open_pictures(dataset: str, data_dir: Path | None, split: str) -> ImageSource:
    """Open pictures whose classes do not matter: a folder need not be sorted by class, and may be a single picture."""
    if dataset not in ("", "folder") or data_dir is None:
        return open_dataset(dataset, data_dir, split)
    files = find_images([data_dir])
    if not files or not data_dir.exists():
        what = "holds no picture" if data_dir.exists() else "does not exist"
        raise DataError(f"{data_dir} {what}; give a folder of pictures with --data-dir, or --dataset digits")
    return PictureSource(str(data_dir), files)


@dataclass
class PictureSample:
    """Some pictures of a source, drawn at random and read again for every model that is analyzed."""

    source: ImageSource
    _: KW_ONLY
    images: int | None = None  # None for all
    seed: int = 0
    batch_size: int = 8
    workers: int = 0  # processes that read
    skipped: dict[str, str] = field(default_factory=dict)  # pictures that could not be read so far: reasons by name

    def __len__(self) -> int:
        """Number of pictures, unreadable ones included."""
        return len(self.source) if self.images is None else min(self.images, len(self.source))

    def batches(
        self, subject: Subject, *, normalized: bool = False, passes: int = 1, on_progress: OnProgress = lambda _: None
    ) -> Iterator[Batch]:
        """Yield uint8 pictures in a model's size and crop; unreadable ones are left out and recorded.

        Normalized, they are inputs on the model's device, with classes numbered as in the model. Progress is that of
        one of so many passes. Raises `BrokenImagesError` if too many are broken, `DataError` if the model does not know
        their classes.
        """
        broken = BrokenImages(len(self))
        loader = ImageLoader(
            _with_classes_of(subject, self.source) if normalized else self.source,
            subject.transform(),
            SampledBatches(len(self.source), self.images, self.batch_size, self.seed),
            normalize=subject.normalization() if normalized else None,
            broken=broken,
            replace_broken=False,
            workers=self.workers,
            device=subject.device if normalized else "cpu",
        )
        try:
            for batch in loader.epoch():
                yield batch
                on_progress(len(batch) / len(self) / passes)
        finally:
            loader.close()
            self.skipped |= {image.name: image.reason for image in broken}


def captured_images(
    subject: Subject, sample: PictureSample, **chosen: Unpack[Chosen]
) -> Iterator[tuple[str, Tensor, list[HeadOfImage]]]:
    """Yield the name of each picture, its uint8 pixels, and its place in what the chosen heads did with its batch."""
    for batch in sample.batches(subject, on_progress=chosen.get("on_progress", lambda _: None)):
        layers = capture_attention(subject.model, subject.normalize(batch.images), layers=chosen.get("layers"))
        for image, index in enumerate(batch.indices.tolist()):
            places = [(layer, image, head) for layer in layers for head in choose_heads(layer, chosen.get("heads"))]
            yield sample.source.name(index), batch.images[image], places


def _with_classes_of(subject: Subject, source: ImageSource) -> ImageSource:
    """Return the pictures with classes numbered as in the model."""
    if subject.class_names is not None:
        return source.with_classes(subject.class_names)
    expected, found = getattr(subject.model, "num_classes", None), len(source.class_names)
    if expected not in (None, found):
        raise DataError(
            f"{subject.label} has {expected} classes without names, {source.location} has {found} classes; give the "
            "data that the model was trained on"
        )
    return source
