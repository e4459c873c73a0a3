"""What detection and segmentation share: a task around a backbone, and its metadata in files of weights."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from timm.data.config import resolve_data_config
from torch import Tensor, nn

from inline_attention.data.batch import Normalize, Target, UnequalBatch
from inline_attention.data.broken import BrokenImages
from inline_attention.data.findings import DataReport
from inline_attention.data.loading import Loader, SampleLoader, Samples
from inline_attention.data.sampling import Batches
from inline_attention.data.sources import DataError
from inline_attention.models.checkpoints import CheckpointError, CheckpointMismatchError, load_checkpoint
from inline_attention.models.described import (
    check_description,
    check_model_size,
    conversion_of,
    parse_class_names,
    parse_note,
)
from inline_attention.models.reading import Checkpoint
from inline_attention.models.running_cost import check_running_cost
from inline_attention.support.settings import ConfigError, Problem, settings_of
from inline_attention.support.text import printable, show_difference, some_of
from inline_attention.tasks.pyramid import BACKBONE, BACKBONE_MODEL, DenseModel
from inline_attention.tasks.task import DataSection, ModelSection, Objective, Reading, Task, TaskData

Options = TypeVar("Options")
TASK, OPTIONS = "task", "task_options"  # entries of a file's metadata; files without a task are of classifiers


class DenseTask(Task, Generic[Options]):
    """A detector or segmenter around a backbone."""

    options_type: ClassVar[type[Any]]
    dataset: ClassVar[str]  # the one value of data.dataset
    library: ClassVar[str]  # optional dependency that computes the metrics
    flags: ClassVar[tuple[str, ...]] = ()  # data settings that are saved with the weights
    build: ClassVar[Callable[..., DenseModel]]  # from options, name and arguments of the backbone, number of classes
    evaluation_side: int | None = None  # shorter side in pixels of images to evaluate on; None for the options'

    def __init__(self, data: DataSection, model: ModelSection, options: Options | None = None, *, flip: float = 0.5):
        """Choose data, backbone, options of the model, and probability of a horizontal flip in training."""
        self._data, self._model, self._flip = data, model, flip
        # The head around a backbone has the classes.
        self._arguments = {key: value for key, value in model.model_arguments().items() if key != "num_classes"}
        self.options: Options = self.options_type() if options is None else options

    @classmethod
    def of_checkpoint(cls, file: Checkpoint, data: DataSection) -> tuple[Self, list[str]]:
        """Return the task that a file of weights was trained for, and its class names.

        Raises:
            CheckpointError: If the file is of another task or version, or damaged, or describes a refused model.
        """
        recorded = file.metadata.get(TASK, "classification")
        if recorded != cls.name:
            message = f"{file.path} is of a model for {printable(recorded)[:60]}, not for {cls.name}"
            raise CheckpointError(f"{message}; choose another file")
        content: dict[str, Any] | None = parse_note(file, OPTIONS, dict)
        class_names = parse_class_names(file)
        if content is None or class_names is None:
            raise CheckpointError(f"{file.path} does not say how its model was built; train it again")
        known = settings_of(cls.options_type)
        if differing := sorted(content.keys() ^ {*known, "flip", "backbone", "backbone_arguments", *cls.flags}):
            raise CheckpointError(
                f"{file.path} is of another version of inline-attention: {printable(', '.join(differing[:3]))[:200]} "
                "is known to one of the two alone; use the version that wrote it"
            )
        flip, flags = content["flip"], {name: content[name] for name in cls.flags}
        try:
            if type(flip) not in (int, float) or not 0 <= flip <= 1:
                raise ValueError("flip must be a number from 0 to 1")
            if not all(type(value) is bool for value in flags.values()):
                raise ValueError(f"{' and '.join(flags)} must be true or false")
            conversion = conversion_of(file)
            backbone = check_description(content["backbone"], content["backbone_arguments"], file.weights, conversion)
            options = cls.options_type(**{name: known[name].convert(content[name]) for name in known})
            cls._check_options(options)
            task = cls(replace(data, **flags), ModelSection.of(*backbone, conversion), options, flip=float(flip))
            with torch.device("meta"):  # a model that is far larger than its weights is never allocated
                model = task.build_model(class_names)
            check_model_size("model", model, file.weights)
            side = options.evaluation_sides()[0]
            check_running_cost(lambda: model.eval().run_without_values([torch.empty(3, side, side)]), file.weights)
        except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
            reason = printable(error)[:600]
            raise CheckpointError(f"{file.path} describes a model that is refused: {reason}") from error
        return task, class_names

    @classmethod
    def load(cls, file: Checkpoint) -> tuple[Self, DenseModel, list[str]]:
        """Return the task of a file of weights, its model with these weights, and its class names."""
        task, class_names = cls.of_checkpoint(file, DataSection())
        model = task.build_model(class_names)
        load_checkpoint(model, file)
        return task, model, class_names

    def open(self) -> TaskData:
        """Open and check both splits."""
        choice = self._data
        options = {"repair": choice.repair, "allow_outside": choice.allow_outside_files}
        splits = {"train_split": choice.train_split, "validation_split": choice.val_split}
        try:
            opened = self._open(choice.dir or "", num_classes=self._model.num_classes, **splits, **options)
        except DataError as error:
            raise ConfigError([Problem("data", str(error))], "the data") from error
        if opened.problems:
            is_repairable = any(found.is_repairable for report in opened.reports if report.problems for found in report)
            advice = "--repair (data.repair=true) repairs what is marked so" if is_repairable else None
            raise ConfigError([Problem("data", problem) for problem in opened.problems], "the data", advice)
        return TaskData(opened.train, self._validation(opened), notes_of(opened.reports))

    @abstractmethod
    def open_validation(self, class_names: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
        """Return the validation images, which must have a model's classes (`DataError`), and notes on repairs."""

    def build_model(self, class_names: Sequence[str]) -> DenseModel:
        """Build the model around its backbone."""
        model = self.build(self.options, self._model.name, self._arguments, len(class_names))
        self.notes = (model.backbone.note,) if model.backbone.note else ()
        file, conversion, later_conversion = self._model.initial_weights()
        if conversion is not None:
            conversion.apply(model.backbone.model)
        if file is not None:
            self.start = initialize_from(model, file, self.name)
        if later_conversion is not None:
            later_conversion.apply(model.backbone.model)
        return model

    def training_loader(
        self, source: Any, model: nn.Module, reading: Reading, broken: BrokenImages
    ) -> Loader[UnequalBatch]:
        """Return transformed images."""
        samples, batches = self._training_samples(source), self._training_batches(source, reading)
        return SampleLoader(samples, batches, replace_broken=True, **_loading(model, reading, broken))

    def validation_loader(
        self, source: Any, model: nn.Module, reading: Reading, broken: BrokenImages
    ) -> Loader[UnequalBatch]:
        """Return resized images, in order."""
        samples, batches = self._validation_samples(source), reading.evaluation_batches(len(source))
        return SampleLoader(samples, batches, replace_broken=False, **_loading(model, reading, broken))

    def objective(self, class_names: Sequence[str], rank: int) -> Objective:
        """Return the sum of the model's losses."""
        del class_names, rank
        return self._loss

    def metadata(self, class_names: Sequence[str]) -> dict[str, str]:
        """Return all that is needed to build the model again, and what the numbers in its data mean."""
        described = {"backbone": self._model.name, "backbone_arguments": self._arguments}
        flags = {name: getattr(self._data, name) for name in self.flags}
        options: Any = self.options
        return {
            TASK: self.name,
            "model": self._model.name,
            OPTIONS: json.dumps({**asdict(options), **described, "flip": self._flip, **flags}),
            "class_names": json.dumps(list(class_names)),
        }

    def _loss(self, runnable: nn.Module, batch: UnequalBatch) -> Tensor:
        losses: dict[str, Tensor] = runnable(batch.images, [self._model_target(target) for target in batch.targets])
        return torch.stack(list(losses.values())).sum()

    @classmethod
    def _check_options(cls, options: Any) -> None:
        """Refuse options that a file may not ask for."""

    @abstractmethod
    def _open(self, folder: str, **options: Any) -> Any: ...

    def _validation(self, opened: Any) -> Any:
        return opened.validation

    @abstractmethod
    def _training_samples(self, source: Any) -> Samples: ...

    def _training_batches(self, source: Any, reading: Reading) -> Batches:
        return reading.training_batches(len(source))

    @abstractmethod
    def _validation_samples(self, source: Any) -> Samples: ...

    def _model_target(self, target: Target) -> Any:
        return target


def _loading(model: nn.Module, reading: Reading, broken: BrokenImages) -> dict[str, Any]:
    assert isinstance(model, DenseModel)
    return {"normalize": normalization(model), "broken": broken, **reading.loading}


def normalization(model: DenseModel) -> Normalize:
    """Return the normalization with the backbone's mean and standard deviation."""
    described = resolve_data_config({}, model=model.backbone.model)
    return Normalize(described["mean"], described["std"])


def notes_of(reports: Sequence[DataReport]) -> tuple[str, ...]:
    """Return the reports of repairs as notes."""
    return tuple(str(report) for report in reports if report)


def check_same_classes(location: object, kind: str, found: Sequence[str], class_names: Sequence[str]) -> None:
    """Refuse data whose classes differ from the model's: its labels mean something else."""
    if list(found) != list(class_names):
        theirs, known = show_difference(found, class_names)
        raise DataError(f"{location} has the {kind} {theirs}, the model knows {known}; they must be the same")


def initialize_from(model: DenseModel, file: Checkpoint, task: str) -> str:
    """Load the weights of a file that fit the model (`CheckpointMismatchError`), and return a description of them.

    A file of the same task with the same heads is loaded completely, except for layers that depend on the number of
    classes if that differs. From all other files, such as those of classifiers, the backbone is loaded.
    """
    own, recorded = model.state_dict(), file.metadata.get(TASK)
    if recorded == task and _head_shapes(own) == _head_shapes(file.weights):
        of_classes = {
            name
            for name, value in file.weights.items()
            if name in own and value.shape != own[name].shape and value.shape[1:] == own[name].shape[1:]
        }
        kept = {name: value for name, value in file.weights.items() if name not in of_classes}
        _load(model, replace(file, weights=kept), of_classes)
        left_out = f" but {len(of_classes)} tensors that go with its classes" if of_classes else ""
        return f"all of {file.path}{left_out}"
    weights = file.weights
    if recorded is not None:
        weights = {
            name.removeprefix(BACKBONE_MODEL): value
            for name, value in weights.items()
            if name.startswith(BACKBONE_MODEL)
        }
    _load(model.backbone.model, replace(file, weights=weights))
    return f"the backbone of {file.path}; all else is random"


def _head_shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return shapes of all but the backbone, without the first dimension, which depends on the number of classes."""
    return {name: value.shape[1:] for name, value in weights.items() if not name.startswith(BACKBONE)}


def _load(model: nn.Module, file: Checkpoint, absent: Collection[str] = ()) -> None:
    """Load weights. No names may be missing from them except the absent ones."""
    # Not strict: a classifier's head, and the norm before it, have no place in a backbone.
    missing = tuple(name for name in load_checkpoint(model, file, strict=False).missing if name not in absent)
    if missing:
        raise CheckpointMismatchError(
            f"{file.path} lacks {len(missing)} weights of the model: {some_of(missing)}; it must be of the same model "
            "with the same arguments",
            missing,
        )
