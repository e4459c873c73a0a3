"""The models to analyze: from a run, a weights file, or untrained by name, with images prepared for each.

Shapes: `B` batch, `H`, `W` height and width of images in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timm.data.config import resolve_data_config
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from inline_attention.analysis.probes import attention_layers
from inline_attention.data.batch import Normalize
from inline_attention.data.transforms import Transform, evaluation_options, evaluation_transform
from inline_attention.engine.checkpoint_format import find_weights
from inline_attention.layers.attention import KernelAttention
from inline_attention.models import create_model
from inline_attention.models.described import read_description
from inline_attention.models.reading import open_checkpoint
from inline_attention.ops.reference import KIND_OF_NORMALIZATION, AttentionKind
from inline_attention.support.text import printable
from inline_attention.tasks.classification.prediction import ImageClassifier


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
    path: Path, *, model_name: str | None = None, size: tuple[int, int] | None = None, device: str = "auto"
) -> Subject:
    """Load a model with its weights; of a run folder, the best checkpoint is taken.

    Images are as large as in training unless a size (H, W) is given. Raises `CheckpointError` if there are no weights,
    or they do not fit.
    """
    file = open_checkpoint(find_weights(path))
    classifier = ImageClassifier.from_checkpoint(file, model_name=model_name, device=device)
    described = read_description(file, model_name)
    return _subject(
        classifier.model,
        described.name,
        file.path,
        # Only names from the file itself can be matched with those of a dataset.
        None if described.class_names is None else tuple(described.class_names),
        size or described.image_size,
        described.crop_pct,
    )


def untrained_subject(
    model_name: str, *, size: tuple[int, int] | None = None, seed: int = 0, device: str = "auto", **arguments: Any
) -> Subject:
    """Build a model with random weights; `arguments` are those of `create_model`."""
    torch.manual_seed(seed)
    classifier = ImageClassifier(create_model(model_name, **arguments), [], device=device)
    native: Any = to_2tuple(arguments["img_size"]) if "img_size" in arguments else None
    # A trained model of unusual size is evaluated on the whole picture.
    crop_pct = 1.0 if native else None
    return _subject(classifier.model, model_name, None, None, size or native, crop_pct)


def with_distinct_labels(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the same subjects; several of one model get their runs or numbers as labels."""
    labels = [subject.model_name for subject in subjects]
    distinct: list[Subject] = []
    for number, subject in enumerate(subjects, start=1):
        if labels.count(subject.model_name) == 1:
            distinct.append(subject)
            continue
        run = f"#{number}" if subject.weights is None else printable(_run_name(subject.weights))
        label = f"{subject.model_name} ({run})"
        taken = {other.label for other in distinct}
        distinct.append(replace(subject, label=label if label not in taken else f"{subject.model_name} (#{number})"))
    return distinct


def weights_note(subjects: Sequence[Subject]) -> str:
    """Return a sentence for the small print of figures: trained or untrained weights."""
    untrained = [subject.label for subject in subjects if subject.weights is None]
    if len(untrained) == len(subjects):
        return "Untrained weights."
    return f"Untrained weights: {', '.join(untrained)}." if untrained else "Trained weights."


def _subject(
    model: nn.Module,
    model_name: str,
    weights: Path | None,
    class_names: tuple[str, ...] | None,
    size: tuple[int, int] | None,
    crop_pct: float | None,
) -> Subject:
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
    return Subject(model_name, model_name, kind, model, weights, class_names, (height, width), config)


def _run_name(weights: Path) -> str:
    """Return the name of the run's folder: not `checkpoints`, `best` or `last`."""
    parts = [part for part in weights.parent.parts if part not in ("checkpoints", "best", "last", "/")]
    return parts[-1] if parts else weights.stem
