"""Distillation: a student with converted attention learns from its teacher, the same model with softmax attention.

The student matches logits and labels, or features (no labels needed), or the output of each attention (a first phase).
Logits and labels can also come from another classifier: a larger model, or a convolutional network.

Shapes: `B` batch, `N` tokens, `P` prefix tokens, `C` channels, `K` classes, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImages
from inline_attention.data.loading import ImageLoader
from inline_attention.data.sampling import SampledBatches
from inline_attention.data.sources import ImageSource
from inline_attention.data.transforms import evaluation_options, evaluation_transform
from inline_attention.layers.attention import KernelAttention
from inline_attention.layers.calibration import calibratable_layers, calibrate_attention
from inline_attention.models.checkpoints import number_of_classes
from inline_attention.models.described import (
    Description,
    conversion_of,
    create_described_model,
    describable,
    parse_class_names,
    parse_note,
    read_description,
)
from inline_attention.models.reading import Checkpoint, open_checkpoint
from inline_attention.support.settings import ConfigError, Problem, setting
from inline_attention.support.text import printable, show_difference
from inline_attention.tasks.classification.task import AugmentationSection, ClassificationTask, Objective
from inline_attention.tasks.task import CLASSIFICATION, Collectives, DataSection, Metrics, ModelSection, TaskData

FINAL_NORMS = ("norm", "layernorm", "post_layernorm")  # names of the layer whose output are a model's tokens
Size = tuple[int, int]


@dataclass(frozen=True)
class DistillationSection:
    """Learning from a teacher: the same model before model.attention replaced its attention, or another classifier."""

    match: Literal["off", "logits", "features", "attention"] = setting(
        "off",
        "logits: with labels. features: tokens, no labels. attention: output of each attention. off: no teacher.",
        tasks=CLASSIFICATION,
    )
    teacher: str | None = setting(
        None, "Weights of the teacher, also of another model; null: model.initial_checkpoint."
    )
    teacher_size: int | tuple[int, int] | None = setting(
        None, "Image side or [height, width] of the teacher; null: the student's, or another model's own.", at_least=1
    )
    calibration_images: int = setting(
        16, "Training pictures on which InLine's scores are fitted to softmax's at the start; 0: none.", at_least=0
    )
    temperature: float = setting(2.0, "Temperature of the logits.", above=0)
    logits_weight: float = setting(1.0, "Weight of the teacher's logits.", at_least=0)
    labels_weight: float = setting(0.5, "Weight of the labels, if logits are matched.", at_least=0)
    features_weight: float = setting(1.0, "Weight of the teacher's tokens.", at_least=0)

    @property
    def uses_labels(self) -> bool:
        """True if the labels of the data matter."""
        return self.match in ("off", "logits")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if the loss has no terms."""
        if self.match == "logits" and not (self.logits_weight or self.labels_weight):
            yield "logits_weight", "expected it or labels_weight above 0, got 0 for both; or set match=features"


class DistillationTask(ClassificationTask):
    """Classification, or features alone, learned from a teacher. `build_model` makes the models of both."""

    teacher: nn.Module  # the softmax model, in evaluation mode
    student: nn.Module  # the model with converted attention

    def __init__(
        self,
        data: DataSection,
        model: ModelSection,
        augmentation: AugmentationSection | None,
        distillation: DistillationSection,
        **options: Any,
    ):
        """Choose data, model and what to match. Options: see `ClassificationTask`."""
        source = distillation.teacher or model.initial_checkpoint
        if source is None:
            message = "expected the teacher's weights, got null; add --initial-checkpoint FILE"
            raise ConfigError([Problem("distillation.teacher", message)])
        super().__init__(data, model, augmentation, **options)
        self._settings, self._source = distillation, source
        if model.initial_checkpoint is None and self.other_teacher is None:
            self._model = replace(model, initial_checkpoint=source)
        self._pictures: ImageSource | None = None  # to train on
        self._compiled_teacher: Callable[[Tensor], Tensor] | None = None
        if not distillation.uses_labels:
            self.metrics = FeatureMetrics.NAMES

    def open(self) -> TaskData:
        """Open and check both splits; without labels, pictures need no classes and get those of the teacher."""
        self._check_teacher()
        opened = super().open()
        self._pictures = opened.train
        if self._settings.uses_labels:
            self._check_classes(opened.class_names)
            return opened
        names = self._teacher_classes
        return replace(opened, train=_relabelled(opened.train, names), validation=_relabelled(opened.validation, names))

    def build_model(self, class_names: Sequence[str]) -> nn.Module:
        """Build the teacher, then the student with the same weights and other attention."""
        if self.other_teacher is None and conversion_of(self._file) is not None:
            message = f"expected weights of softmax attention, got {self._source}, whose attention is converted already"
            raise ConfigError([Problem("distillation.teacher", message)])
        self.teacher = self.teacher_task().build_model(class_names).eval().requires_grad_(False)
        student = self.student = self._build_student(class_names)
        if self._settings.match == "attention":
            student.requires_grad_(False)
            for name in converted_attentions(student):
                student.get_submodule(name).requires_grad_(True)
        return student

    def _build_student(self, class_names: Sequence[str]) -> nn.Module:
        """Build the student; with weights of the teacher's size at another, its position embeddings are resampled."""
        size, teacher_size = self._model.img_size, self._settings.teacher_size
        if teacher_size is None or size in (None, teacher_size) or not self._starts_at_teacher_size():
            return super().build_model(class_names)
        task = ClassificationTask(self._data, replace(self._model, img_size=teacher_size))
        student: Any = task.build_model(class_names)
        if not hasattr(student, "set_input_size"):
            expected = f"expected {teacher_size}, the teacher's size, since {self._model.name} has a fixed size"
            raise ConfigError([Problem("model.img_size", f"{expected}, got {size}")])
        student.set_input_size(img_size=size)
        self.start, self._preparation = task.start, task._preparation
        return student

    def prepare(self, model: nn.Module) -> None:
        """Fit a student with the teacher's weights to softmax, unless a first phase has trained it already."""
        start = self._model.initial_checkpoint
        if start is None or self._model.attention is None or conversion_of(open_checkpoint(start)) is not None:
            return  # random weights, an attention of the model's own, or calibrated already
        if not self._settings.calibration_images or not calibratable_layers(model):
            return
        source = self.open().train if self._pictures is None else self._pictures
        count = min(self._settings.calibration_images, len(source))
        described = self.image_settings(model)
        loader = ImageLoader(
            source,
            evaluation_transform(described["input_size"][1:], **evaluation_options(described)),
            SampledBatches(len(source), count, count, self._seed),
            normalize=Normalize(described["mean"], described["std"]),
            broken=BrokenImages(len(source)),
            replace_broken=True,
            device=next(model.parameters()).device,
        )
        (batch,) = loader.epoch()
        gains = torch.cat([*calibrate_attention(model, batch.images).values()])
        self.notes = (
            *self.notes,
            f"calibration on {count} pictures: InLine's scores times {gains.min():.2f} to {gains.max():.2f} by head",
        )

    def _starts_at_teacher_size(self) -> bool:
        """True if the student's first weights are the teacher's, or say that they are of images of its size."""
        start = self._model.initial_checkpoint
        if start is None or start == self._source:
            return True
        size = (parse_note(open_checkpoint(start), "model_arguments", dict) or {}).get("img_size")
        return size is not None and to_2tuple(size) == self._teacher_pixels()

    def teacher_task(self) -> ClassificationTask:
        """Return the task of the teacher alone, at its own image size, without distillation.

        It has softmax attention, unless it is another model than the student.
        """
        size, other = self._settings.teacher_size, self.other_teacher
        if other is None:
            own: Any = {"attention": None, "keep_softmax": (), "conversion_options": {}}
            section = replace(self._model, img_size=size or self._model.img_size, drop_path=None, **own)
        else:
            arguments = other.arguments if size is None else {**other.arguments, "img_size": size}
            section = ModelSection.of(other.name, arguments, other.conversion)
        section = replace(section, initial_checkpoint=self._source)
        return ClassificationTask(self._data, section, self._augmentation, smoothing=self._smoothing, seed=self._seed)

    def objective(self, class_names: Sequence[str], rank: int) -> Any:
        """Return the loss of the match; the teacher moves to the student's device."""
        teacher = self.teacher.to(next(self.student.parameters()).device)
        if self._settings.match == "attention":
            return AttentionObjective(teacher, self.student)
        labels = super().objective(class_names, rank) if self._settings.uses_labels else None
        size, run = self._teacher_pixels(), teacher if self._compiled_teacher is None else self._compiled_teacher
        if self.other_teacher is not None:
            ours, theirs = self.image_settings(self.student), self.teacher_task().image_settings(teacher)
            size, run = theirs["input_size"][1:], _renormalized(run, ours, theirs, next(teacher.parameters()).device)
        return DistillationObjective(teacher, self.student, self._settings, size, labels, run_teacher=run)

    def compile(self, mode: str) -> None:
        """Compile the teacher, which costs as much as the student's forward pass."""
        if self._settings.match != "attention":  # there, hooks come and go
            self._compiled_teacher = torch.compile(self.teacher, mode=mode)

    def evaluator(self, source: ImageSource, device: torch.device) -> Any:
        """Return an evaluator of accuracy, or of the agreement with the teacher's features."""
        if self._settings.uses_labels:
            return super().evaluator(source, device)
        return FeatureEvaluator(self.teacher.to(device), self._teacher_pixels())

    def metadata(self, class_names: Sequence[str]) -> dict[str, str]:
        """Return the metadata of the student; without labels, class names only if the teacher's file has them."""
        notes = super().metadata(class_names)
        if not self._settings.uses_labels and parse_class_names(self._file) is None:
            del notes["class_names"]
        return notes

    @cached_property
    def _file(self) -> Checkpoint:
        return open_checkpoint(self._source)

    @cached_property
    def other_teacher(self) -> Description | None:
        """The teacher, if its file says that it is another model than the student before its conversion."""
        is_named = "model" in self._file.metadata
        if not is_named or self._source == self._model.initial_checkpoint or self._fits_student(self._file):
            return None
        return read_description(self._file)

    def _fits_student(self, file: Checkpoint) -> bool:
        """True if weights have the student's shapes before its conversion, but for classes and image size."""
        arguments = self._model.model_arguments()
        described = describable(self._model.name, arguments)
        own = {name: value for name, value in arguments.items() if name not in described}
        with torch.device("meta"):
            model: Any = create_described_model(self._model.name, described, **own)
        head = id(getattr(model.get_classifier(), "weight", None))
        return all(
            name in file.weights and file.weights[name].shape == weight.shape
            for name, weight in model.named_parameters()
            if weight.ndim in (2, 4) and id(weight) != head and "relative_position" not in name
        )

    def _check_teacher(self) -> None:
        """Refuse to match more than logits with another model."""
        if self.other_teacher is None:
            return
        pair = f"since the teacher, {self.other_teacher.name}, is another model than the student, {self._model.name}"
        if self._settings.match != "logits":
            raise ConfigError([Problem("distillation.match", f"expected logits, {pair}, got {self._settings.match}")])
        if weight := self._settings.features_weight:
            message = f"expected 0, {pair}, and has other tokens, got {weight:g}"
            advice = "add --set distillation.features_weight=0"
            raise ConfigError([Problem("distillation.features_weight", f"{message}; {advice}")])

    @cached_property
    def _teacher_classes(self) -> list[str]:
        """Class names of the teacher's head, numbers if its file has none; empty without a head."""
        count, names = self._count_teacher_classes(), parse_class_names(self._file)
        return names if names is not None and len(names) == count else [str(number) for number in range(count)]

    def _count_teacher_classes(self) -> int:
        if self.other_teacher is not None:
            return self.other_teacher.classes_in(self._file) or 0
        with torch.device("meta"):  # the model knows the name of the head
            model = create_described_model(self._model.name, {})
        return number_of_classes(self._file.weights, model) or 0

    def _check_classes(self, class_names: Sequence[str]) -> None:
        """Refuse a teacher of other classes: its logits would say something else than the labels."""
        count, names = self._count_teacher_classes(), parse_class_names(self._file)
        advice = "fine-tune the teacher on this data first (`inline train finetune`)"
        if self.other_teacher is None:
            advice += ", or match features alone"
        if count != len(class_names):
            found = f"{count} classes" if count else f"no classifier of {self._model.name}"
            if not count and "model" not in self._file.metadata:
                advice = "the file names no model; `inline convert FILE --model NAME --output FILE` adds the name"
            message = f"the teacher in {self._source} has {found}, the data {len(class_names)} classes"
            raise ConfigError([Problem("distillation.teacher", f"{message}; {advice}")])
        if names is not None and list(names) != list(class_names):
            theirs, ours = show_difference([printable(name) for name in names], list(class_names))
            message = f"the teacher in {self._source} knows the classes {theirs}, the data has {ours}"
            raise ConfigError([Problem("distillation.teacher", f"{message}; {advice}")])

    def _teacher_pixels(self) -> Size | None:
        """Height and width of the teacher's images; None if they are the student's."""
        size = self._settings.teacher_size
        return None if size is None else (size, size) if isinstance(size, int) else (size[0], size[1])


def _renormalized(
    run: Callable[[Tensor], Tensor], before: Mapping[str, Any], after: Mapping[str, Any], device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return a function that takes images normalized by one mean and std, and runs a model that expects others."""
    if (before["mean"], before["std"]) == (after["mean"], after["std"]):
        return run
    mean, std, new_mean, new_std = (
        torch.tensor(settings[name], device=device)[:, None, None]
        for settings in (before, after)
        for name in ("mean", "std")
    )
    scale, shift = std / new_std, (mean - new_mean) / new_std
    return lambda images: run(images * scale + shift)


def _relabelled(source: ImageSource, class_names: Sequence[str]) -> ImageSource:
    """Return the same pictures with the classes of a teacher; their labels are not used."""
    pictures = copy.copy(source)
    pictures.class_names, pictures.targets = tuple(class_names), np.zeros(len(source), dtype=np.int64)
    return pictures


class DistillationObjective:
    """Match the teacher's logits and tokens, and the labels if there is an objective for them.

    Without labels, the model's output (logits, or pooled features) is matched by its unexplained share.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        settings: DistillationSection,
        teacher_size: Size | None,
        labels: Objective | None,
        *,
        run_teacher: Callable[[Tensor], Tensor] | None = None,
    ):
        """Attach to both models; `run_teacher` is the compiled teacher."""
        self._settings, self._size, self._labels = settings, teacher_size, labels
        self._prefix = getattr(student, "num_prefix_tokens", 0)
        self._run_teacher = teacher if run_teacher is None else run_teacher
        self._tokens, self._expected_tokens = Recorder(), Recorder()
        if settings.features_weight:
            # Not per call: torch.compile does not see hooks that come later.
            self._tokens.attach(student, token_layer(student), training=True)
            self._expected_tokens.attach(teacher, token_layer(teacher), training=False)

    def __call__(self, runnable: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        settings = self._settings
        images, targets = (batch.images, batch.targets) if self._labels is None else self._labels.mixed(batch)
        with torch.no_grad():
            expected = self._run_teacher(resized_images(images, self._size))
        expected_tokens = self._expected_tokens.take()
        logits = runnable(images)
        if self._labels is None:
            loss = unexplained_share(logits, expected)
        else:
            loss = torch.zeros((), device=logits.device)
            if settings.logits_weight:
                loss = loss + settings.logits_weight * soft_cross_entropy(logits, expected, settings.temperature)
            if settings.labels_weight:
                loss = loss + settings.labels_weight * self._labels.loss(logits, targets)
        if (tokens := self._tokens.take()) is not None:
            tokens = resized_tokens(tokens, images.shape[-2:], expected_tokens.shape[1], self._size, self._prefix)
            loss = loss + settings.features_weight * unexplained_share(tokens, expected_tokens)
        return loss


class AttentionObjective:
    """Match each attention's output with the teacher's on the teacher's own inputs, so that blocks learn apart."""

    def __init__(self, teacher: nn.Module, student: nn.Module):
        self._teacher = teacher
        self._outputs = {name: Recorder() for name in converted_attentions(student)}
        self._inputs: dict[str, Tensor] = {}
        for name, recorder in self._outputs.items():
            layer = student.get_submodule(name)
            layer.register_forward_pre_hook(self._teachers_input(name))
            recorder.attach(student, layer, training=True)

    def __call__(self, runnable: nn.Module, batch: Batch) -> Tensor:
        """Return the unexplained share of the teacher's outputs, the mean over all attentions."""
        layers = {name: self._teacher.get_submodule(name) for name in self._outputs}
        with torch.no_grad(), _recorded_calls(layers) as calls:
            self._teacher(batch.images)
        self._inputs.update((name, arguments[0]) for name, (arguments, _) in calls.items())
        runnable(batch.images)
        self._inputs.clear()
        shares = [unexplained_share(output.take(), calls[name][1]) for name, output in self._outputs.items()]
        return torch.stack(shares).mean()

    def _teachers_input(self, name: str) -> Any:
        def replace_input(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            given = self._inputs.get(name) if module.training else None
            return None if given is None else (given, *arguments[1:])

        return replace_input


class Recorder:
    """Keeps the last output of a layer."""

    def __init__(self) -> None:
        self._output: Tensor | None = None

    def attach(self, model: nn.Module, layer: nn.Module, *, training: bool) -> None:
        """Record the layer's output whenever the model is in training mode, or in evaluation mode."""

        def keep(_layer: nn.Module, _arguments: tuple[Any, ...], output: Tensor) -> None:
            if model.training is training:
                self._output = output

        layer.register_forward_hook(keep)

    def take(self) -> Any:
        """Return the output and forget it; None if nothing was recorded."""
        output, self._output = self._output, None
        return output


@contextmanager
def _recorded_calls(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[tuple[Any, ...], Tensor]]]:
    """Record the arguments and output tokens of layers, by name."""
    calls: dict[str, tuple[tuple[Any, ...], Tensor]] = {}

    def record(name: str, _layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        calls[name] = arguments, output

    handles = [layer.register_forward_hook(partial(record, name)) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def converted_attentions(model: nn.Module) -> list[str]:
    """Return the names of the attentions that are not softmax."""
    return [name for name, module in model.named_modules() if isinstance(module, KernelAttention)]


def token_layer(model: nn.Module) -> nn.Module:
    """Return the layer whose output are the model's final tokens `[B, N, C]`: its last norm, or else its last block."""
    for name in FINAL_NORMS:
        if isinstance(layer := getattr(model, name, None), nn.Module):
            return layer
    names = [name for name, module in model.named_modules() if hasattr(module, "qkv") and hasattr(module, "proj")]
    if not names:
        raise ValueError(f"{type(model).__name__} has no tokens to match: it has no attention over tokens")
    return model.get_submodule(names[-1].rpartition(".")[0])


def resized_images(images: Tensor, size: Size | None) -> Tensor:
    """Return images `[B, 3, H, W]` in a size; None leaves them as they are."""
    if size is None or tuple(images.shape[-2:]) == tuple(size):
        return images
    return F.interpolate(images, size=size, mode="bicubic", antialias=True)


def run_with_tokens(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return a model's output `[B, K]` and final tokens `[B, N, C]`."""
    with _recorded_calls({"tokens": token_layer(model)}) as calls:
        output = model(images)
    return output, calls["tokens"][1]


def soft_cross_entropy(logits: Tensor, expected: Tensor, temperature: float) -> Tensor:
    """Return T² · KL(teacher ‖ student) of logits `[B, K]` at a temperature, the mean over images."""
    student, teacher = (F.log_softmax(values.float() / temperature, dim=-1) for values in (logits, expected))
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def unexplained_share(found: Tensor, expected: Tensor) -> Tensor:
    """Return 1 - R²: squared error over the variance of `expected` `[..., C]` around the mean of its vectors."""
    found, expected = found.float(), expected.float()
    spread = (expected - expected.flatten(0, -2).mean(0)).square().sum()
    smallest = 1e-6 * expected.square().sum()  # one image alone has no variance
    return (found - expected).square().sum() / torch.maximum(spread, smallest).clamp(min=1e-12)


def resized_tokens(tokens: Tensor, pixels: Sequence[int], count: int, new_pixels: Size | None, prefix: int) -> Tensor:
    """Return tokens `[B, N, C]` of images of H×W pixels on the grid of `count` tokens of images of another size."""
    if new_pixels is None or tuple(new_pixels) == tuple(pixels):
        return tokens
    grid, new_grid = _grid(tokens.shape[1] - prefix, pixels), _grid(count - prefix, new_pixels)
    maps = tokens[:, prefix:].mT.unflatten(-1, grid).float()
    maps = F.interpolate(maps, size=new_grid, mode="bilinear", antialias=True)
    return torch.cat([tokens[:, :prefix].float(), maps.flatten(-2).mT], dim=1)


def _grid(count: int, pixels: Sequence[int]) -> Size:
    """Return height and width of the grid of so many tokens over an image of H×W pixels."""
    height = max(1, round((count * pixels[0] / pixels[1]) ** 0.5))
    if count % height:
        raise ValueError(
            f"{count} tokens are no grid in the shape of {pixels[0]}×{pixels[1]} pixels; use square images"
        )
    return height, count // height


@dataclass(frozen=True)
class FeatureMetrics(Metrics):
    """Share of the teacher's variance that the student explains, R² in percent, and number of images."""

    NAMES: ClassVar[Mapping[str, bool]] = {"token_r2": True, "output_r2": True}  # see `Task.metrics`

    token_r2: float
    output_r2: float
    count: int

    def __str__(self) -> str:
        shares = f"{self.token_r2:.3f} % of the teacher's tokens, {self.output_r2:.3f} % of its output"
        return f"agreement: {shares} explained (R²), {self.count} images"


class FeatureEvaluator:
    """Compares a student's tokens and output with its teacher's; see `Evaluator`."""

    def __init__(self, teacher: nn.Module, teacher_size: Size | None):
        self._teacher, self._size = teacher, teacher_size
        self._sums: dict[str, Variance] = {"tokens": Variance(), "output": Variance()}
        self._count = 0

    @torch.no_grad()
    def add(self, model: nn.Module, batch: Batch) -> None:
        """Compare a batch."""
        output, tokens = run_with_tokens(model, batch.images)
        teacher = self._teacher.to(batch.images.device)
        expected, expected_tokens = run_with_tokens(teacher, resized_images(batch.images, self._size))
        count, pixels = expected_tokens.shape[1], batch.images.shape[-2:]
        prefix = getattr(model, "num_prefix_tokens", 0)
        tokens = resized_tokens(tokens, pixels, count, self._size, prefix)
        self._sums["tokens"].add(tokens, expected_tokens)
        self._sums["output"].add(output, expected)
        self._count += len(batch)

    def compute(self, collectives: Collectives) -> FeatureMetrics:
        """Compute the metrics over all ranks."""
        gathered = collectives.gather((self._count, self._sums))
        count = sum(images for images, _ in gathered)
        if count == 0:
            raise ValueError("there is no picture to evaluate on; check the data's validation split")
        shares = {key: 100 * Variance.total(sums[key] for _, sums in gathered).explained for key in self._sums}
        return FeatureMetrics(shares["tokens"], shares["output"], count)


class Variance:
    """Squared errors, and the variance of what was expected, over many batches."""

    def __init__(self) -> None:
        self.error, self.squares, self.number = 0.0, 0.0, 0
        self.sum: Tensor = torch.zeros(())  # of each channel, on the CPU

    def add(self, found: Tensor, expected: Tensor) -> None:
        """Add vectors `[..., C]`."""
        found, expected = (values.detach().flatten(0, -2).double() for values in (found, expected))
        self.add_beyond(found, expected)
        self.sum = self.sum + expected.sum(0).cpu()
        self.number += len(expected)

    def add_beyond(self, found: Tensor, expected: Tensor) -> None:
        """Add vectors whose mean is known and has been subtracted: the variance is around zero."""
        self.error += (found - expected).double().square().sum().item()
        self.squares += expected.double().square().sum().item()

    @classmethod
    def total(cls, parts: Iterator[Variance]) -> Variance:
        """Return the sum over ranks."""
        whole = cls()
        for part in parts:
            vars(whole).update({name: value + vars(part)[name] for name, value in vars(whole).items()})
        return whole

    @property
    def explained(self) -> float:
        """R²: one minus the errors' share of the variance; below zero if the mean would be closer."""
        spread = self.squares - self.sum.square().sum().item() / max(self.number, 1)
        return 1 - self.error / spread if spread > 0 else float("nan")
