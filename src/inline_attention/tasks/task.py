"""What the training engine asks of a task. The loop, its checkpoints, signals and progress are the same for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from inline_attention.data.broken import BrokenImageLimit, BrokenImages
from inline_attention.data.loading import DEFAULT_TIMEOUT, Loader
from inline_attention.data.sampling import EvaluationBatches

Value = TypeVar("Value")


class UnusableDataError(ValueError):
    """Data that cannot be trained on.

    Attributes:
        problems: All that is wrong with it, a sentence each.
        setting: What it is that holds them.
        advice: What to do about them, if there is one thing to do about all.
    """

    def __init__(self, problems: Sequence[str], setting: str = "data", advice: str | None = None):
        super().__init__("\n".join(problems))
        self.problems, self.setting, self.advice = list(problems), setting, advice


@dataclass(frozen=True)
class DataChoice:
    """Which data, and what to make of it.

    Attributes:
        dataset: Its kind, as the task names it.
        folder: Where it is.
        train_split: Split or subfolder to train on.
        validation_split: Split or subfolder to evaluate on.
        class_file: Lists the classes.
        num_classes: How many there must be; None for as many as there are.
        repair: Repair what can be repaired in what is used; files stay as they are.
        reduce_zero_label: As for `LabelRules`.
        image_folder: As for `find_pair_folders`.
        map_folder: As for `find_pair_folders`.
        allow_outside_files: Read files that annotations or `image_folder` name outside of `folder`.
    """

    dataset: str
    folder: str | None = None
    train_split: str = "train"
    validation_split: str = "validation"
    class_file: str | None = None
    num_classes: int | None = None
    repair: bool = False
    reduce_zero_label: bool = False
    image_folder: str | None = None
    map_folder: str | None = None
    allow_outside_files: bool = False


@dataclass(frozen=True)
class ModelChoice:
    """Which model, and what it starts from.

    Attributes:
        name: Of the model or, of a detector or segmenter, of its backbone.
        arguments: Arguments that describe its architecture, as files may hold them.
        own_arguments: Further arguments, from the command line or from code. Files never set them.
        initial_checkpoint: File of weights to start from; random ones if None.
        grad_checkpointing: Whether to recompute blocks in the backward pass.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    initial_checkpoint: str | None = None
    grad_checkpointing: bool = False
    own_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskData:
    """The pictures of a run, checked.

    Attributes:
        train: To train on.
        validation: To evaluate on.
        notes: What the user should know of them, such as what was repaired.
    """

    train: Any
    validation: Any
    notes: tuple[str, ...] = ()

    @property
    def class_names(self) -> list[str]:
        """Of what is to be learnt."""
        return list(self.train.class_names)


@dataclass(frozen=True)
class Reading:
    """How batches are made, and on which of several processes.

    Attributes:
        batch_size: Images of one batch of this process.
        seed: Of the order and of what is done to images.
        workers: Processes that prepare images.
        device: Where batches go.
        rank: This process.
        world_size: Number of processes.
        timeout: Seconds after which a process that prepares images is taken to hang.
    """

    batch_size: int
    device: torch.device
    seed: int = 0
    workers: int = 0
    rank: int = 0
    world_size: int = 1
    timeout: float = DEFAULT_TIMEOUT

    @property
    def loading(self) -> dict[str, Any]:
        """Options of a `SampleLoader`."""
        return {"seed": self.seed, "workers": self.workers, "device": self.device, "timeout": self.timeout}

    @property
    def share(self) -> dict[str, int]:
        """Options of what deals out samples."""
        return {"rank": self.rank, "world_size": self.world_size}

    def evaluation_batches(self, length: int) -> EvaluationBatches:
        """Every sample once, over all processes."""
        return EvaluationBatches(length, self.batch_size, **self.share)


class Collectives(Protocol):
    """What several processes can do with what each has; one by itself can, too."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in each."""
        ...

    def gather(self, value: Value) -> list[Value]:
        """What each process has."""
        ...


MetricTable: TypeAlias = Mapping[str, Mapping[str, float]]  # rows by name, of columns by name, in percent


class Metrics(Protocol):
    """What an evaluation found."""

    @property
    def figures(self) -> dict[str, float]:
        """By the names that `Task.metrics` has, and that columns of tables get."""
        ...

    @property
    def tables(self) -> list[MetricTable]:
        """All there is to say beyond the line for people."""
        ...

    def __str__(self) -> str:
        """A line for people."""
        ...


AnyMetrics = TypeVar("AnyMetrics", bound=Metrics, covariant=True)


class Evaluator(Protocol[AnyMetrics]):
    """Collects what a model makes of images, and measures it in the end."""

    def add(self, model: nn.Module, batch: Any) -> None:
        """Run the model, which is in evaluation mode, on a batch of a validation loader."""
        ...

    def compute(self, collectives: Collectives) -> AnyMetrics:
        """Measure what all processes have collected; the result is the same in each, and all must ask.

        Raises:
            ValueError: If there is nothing to measure.
        """
        ...


class Objective(Protocol):
    """What is minimised."""

    def __call__(self, runnable: nn.Module, batch: Any) -> Tensor:
        """The loss of a training batch; `runnable` is the model in training mode, or what is wrapped around it."""
        ...


class Task(Protocol):
    """What a model is to learn: its data, its parts, its loss and its figures.

    Attributes:
        name: Such as "detection".
        metrics: Names of its figures, that by which checkpoints are judged first, and whether more of each is better.
        start: What the model that was built began with, in words; None for random weights.
    """

    name: str
    metrics: Mapping[str, bool]
    start: str | None

    def open(self) -> TaskData:
        """Open and check the data.

        Raises:
            UnusableDataError: With everything that is wrong with it.
        """
        ...

    def build_model(self, class_names: Sequence[str]) -> nn.Module:
        """The model on the CPU, with the weights it starts from; random ones by torch's global generator."""
        ...

    def training_loader(self, source: Any, model: nn.Module, reading: Reading, broken: BrokenImages) -> Loader[Any]:
        """Batches to train on, in another order each epoch."""
        ...

    def validation_loader(self, source: Any, model: nn.Module, reading: Reading, broken: BrokenImages) -> Loader[Any]:
        """Batches to evaluate on, in order."""
        ...

    def objective(self, class_names: Sequence[str], rank: int) -> Objective:
        """What is minimised; `rank` is this process among others."""
        ...

    def evaluator(self, source: Any, device: torch.device) -> Evaluator[Metrics]:
        """For one evaluation of a model on validation data."""
        ...

    def metadata(self, class_names: Sequence[str]) -> dict[str, str]:
        """What files of weights need to say to be used elsewhere."""
        ...


@dataclass(frozen=True)
class Loaders:
    """Batches for training and validation, and what could not be read of either."""

    train: Loader[Any]
    validation: Loader[Any]
    broken: BrokenImages
    broken_validation: BrokenImages


def build_loaders(
    task: Task,
    data: TaskData,
    model: nn.Module,
    *,
    training: Reading,
    validation: Reading,
    limit: BrokenImageLimit,
) -> Loaders:
    """Loaders of this process's share.

    Args:
        task: Knows how.
        data: What it opened.
        model: What batches are for.
        training: How training batches are made.
        validation: How validation batches are made.
        limit: How many images may be broken, of each.
    """
    broken, broken_validation = (BrokenImages(len(source), limit) for source in (data.train, data.validation))
    return Loaders(
        task.training_loader(data.train, model, training, broken),
        task.validation_loader(data.validation, model, validation, broken_validation),
        broken,
        broken_validation,
    )
