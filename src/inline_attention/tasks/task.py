"""The interface between tasks and the training engine."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from inline_attention.data.broken import BrokenImages
from inline_attention.data.loading import DEFAULT_TIMEOUT, Loader
from inline_attention.data.sampling import EvaluationBatches, TrainingBatches
from inline_attention.models.described import Conversion, conversion_of, conversion_problems, model_family
from inline_attention.models.reading import Checkpoint, open_checkpoint
from inline_attention.support.settings import ConfigError, Problem, setting
from inline_attention.support.text import install_command, printable

Value = TypeVar("Value")
# Model arguments that are settings of their own, and their names.
ARGUMENT_SETTINGS = {
    "in_chans": "in_chans",
    "num_classes": "num_classes",
    "img_size": "img_size",
    "drop_path_rate": "drop_path",
}
CLASSIFICATION, DENSE, PIXELS = ("classification",), ("detection", "segmentation"), ("segmentation",)


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional dependency, or raise an ImportError that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{package} is not installed: {install_command(extra)}") from error


def find_device(name: str) -> torch.device:
    """Return the device of a name ("auto": a GPU if there is one), or raise ValueError if it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        has_no_gpu = name.startswith("cuda") and not torch.cuda.is_available()
        reason = "PyTorch finds no GPU here" if has_no_gpu else str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used here ({reason}); try 'cpu' or 'auto'") from error
    return device


@dataclass(frozen=True)
class DataSection:
    """The images and how they are read."""

    dataset: str = setting(
        "folder", "folder, pictures (no classes), digits, cifar10, hfds/NAME, wds/PATTERN; coco; pairs."
    )
    dir: str | None = setting(None, "Data folder; not needed for digits and hfds.")
    train_split: str = setting("train", "Training split or subfolder.")
    val_split: str = setting("validation", "Validation split or subfolder; in folders, val is found too.")
    class_map: str | None = setting(None, "File of class names, one per line.", tasks=CLASSIFICATION + PIXELS)
    repair: bool = setting(False, "Repair faults of coco and pairs in memory.", tasks=DENSE)
    reduce_zero_label: bool = setting(False, "Ignore label 0 of pairs; label 1 is the first class.", tasks=PIXELS)
    image_folder: str | None = setting(
        None, "Image folder of pairs, such as img/{split}; null: a usual name.", tasks=PIXELS
    )
    map_folder: str | None = setting(None, "Label map folder of pairs below dir; null: a usual name.", tasks=PIXELS)
    allow_outside_files: bool = setting(
        False, "Read files that annotations or folder settings name outside of dir.", tasks=DENSE
    )
    workers: int = setting(4, "Worker processes per device; 0: read in the main process.", at_least=0, at_most=4096)
    timeout: float = setting(180.0, "Seconds that a worker may take for a batch.", above=0)
    in_memory: bool = setting(
        False, "Keep images on the device; needs augmentation.crop=padded and data.crop_pct=1.", tasks=CLASSIFICATION
    )
    crop_pct: float | None = setting(
        None, "Share of the image that evaluation keeps; null: the model's.", tasks=CLASSIFICATION, above=0, at_most=1
    )

    @property
    def needs_folder(self) -> bool:
        """True if the dataset is read from `dir`."""
        return self.dataset in ("folder", "pictures", "cifar10", "coco", "pairs")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a missing folder."""
        if self.needs_folder and self.dir is None:
            yield "dir", "expected the folder of the data, got null; add --data-dir DIR"


@dataclass(frozen=True)
class ModelSection:
    """The network and its initial weights."""

    name: str = setting("inline_deit_tiny", "Model or backbone (`inline models --all`), or timm's.")
    arguments: Mapping[str, Any] = setting({}, "Further model arguments, such as {depth: 4, patch_size: 2}.")
    num_classes: int | None = setting(None, "Classes; null: as many as the data has.", at_least=1, at_most=10**6)
    img_size: int | tuple[int, int] | None = setting(
        None, "Image side or [height, width]; null: the model's.", at_least=1
    )
    in_chans: int = setting(3, "Image channels.", tasks=CLASSIFICATION, at_least=1)
    drop_path: float | None = setting(None, "Stochastic depth rate; null: the model's own.", at_least=0, below=1)
    initial_checkpoint: str | None = setting(None, "Weights to start from; a head of other classes is new.")
    attention: Literal["inline", "linear"] | None = setting(None, "Replace the softmax attention; null: keep it.")
    keep_softmax: tuple[int, ...] = setting((), "Numbers of the attentions to keep softmax; -1: the last.")
    conversion_options: Mapping[str, Any] = setting(
        {}, "Options of the new attention, such as {local_residual: false}."
    )
    require_checkpoint: bool = setting(False, "Refuse to start without initial_checkpoint, for fine-tuning recipes.")

    def __post_init__(self) -> None:
        # Lists become tuples, as they do on the way back from YAML: equal settings compare equal.
        object.__setattr__(self, "arguments", _with_tuples(self.arguments))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a missing checkpoint, and arguments that are settings of their own."""
        if self.require_checkpoint and self.initial_checkpoint is None:
            message = "expected a file of trained weights, from which this recipe starts, got null"
            yield "initial_checkpoint", f"{message}; add --initial-checkpoint FILE"
        if self.attention is None and (self.keep_softmax or self.conversion_options):
            message = "expected inline or linear, as keep_softmax or conversion_options are set, got null"
            yield "attention", f"{message}; add --set model.attention=inline"
        found = conversion_problems(self.attention or "inline", self.keep_softmax, self.conversion_options)
        for name, message in found.items():
            yield name.replace("options", "conversion_options"), message
        for name, field in ARGUMENT_SETTINGS.items():
            if name in self.arguments:
                message = f"expected it as model.{field}; set model.{field}={self.arguments[name]}"
                yield f"arguments.{name}", message

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any], conversion: Conversion | None) -> Self:
        """Return the settings of a model that a file describes."""
        if conversion is None:
            return cls(name, arguments)
        attention: Any = conversion.attention
        own = cls(name, arguments, attention=attention)
        return replace(own, keep_softmax=conversion.keep_softmax, conversion_options=conversion.options)

    @property
    def attention_kind(self) -> str:
        """What the attention is converted to, or else the first part of the model's name."""
        return self.attention or self.name.partition("_")[0]

    @property
    def conversion(self) -> Conversion | None:
        """How the model's attention is replaced; None if it is not."""
        if self.attention is None:
            return None
        return Conversion(self.attention, self.keep_softmax, self.conversion_options)

    def initial_weights(self) -> tuple[Checkpoint | None, Conversion | None, Conversion | None]:
        """Return the initial weights, and the conversions before and after they are loaded.

        Weights of softmax attention are loaded before the conversion, those of converted attention after it.
        """
        file = None if self.initial_checkpoint is None else open_checkpoint(self.initial_checkpoint)
        converted = None if file is None else conversion_of(file)
        conversion = self.conversion or converted
        noted = "" if file is None else file.metadata.get("model", "")
        if self.conversion is None and converted is not None and model_family(noted) != model_family(self.name):
            message = f"{self.initial_checkpoint} is of {printable(noted)[:60] or 'another model'}, not of {self.name}"
            raise ConfigError([Problem("model.name", f"{message}; add --model with the name of its model")])
        if self.conversion is not None and converted is not None and self.conversion.attention == converted.attention:
            conversion = replace(self.conversion, options={**converted.options, **self.conversion.options})
        return (file, conversion, None) if file is None or converted is not None else (file, None, conversion)

    def model_arguments(self, num_classes: int | None = None) -> dict[str, Any]:
        """Return the arguments of `create_model` besides the name; `num_classes` is used if the settings name none."""
        given = {name: getattr(self, field) for name, field in ARGUMENT_SETTINGS.items()}
        given["num_classes"] = self.num_classes or num_classes
        return {name: value for name, value in given.items() if value is not None} | dict(self.arguments)

    def input_size(self, model: nn.Module) -> tuple[int, int, int]:
        """Return channels, height and width of the images for `model`."""
        arguments = self.model_arguments()
        size = arguments.get("img_size") or getattr(model, "pretrained_cfg")["input_size"][1:]  # noqa: B009 - timm's
        height, width = (size, size) if isinstance(size, int) else size
        return arguments["in_chans"], height, width


def _with_tuples(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_with_tuples(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _with_tuples(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class TaskData:
    """Training and validation images, checked, and notes for the user, such as repairs."""

    train: Any
    validation: Any
    notes: tuple[str, ...] = ()

    @property
    def class_names(self) -> list[str]:
        """Class names of the training images."""
        return list(self.train.class_names)


@dataclass(frozen=True)
class Reading:
    """How a rank reads batches: `batch_size` images each, `timeout` seconds at most for a worker to prepare one."""

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
        """Options of a batch sampler."""
        return {"rank": self.rank, "world_size": self.world_size}

    def training_batches(self, length: int) -> TrainingBatches:
        """Return a sampler that shuffles the samples every epoch."""
        return TrainingBatches(length, self.batch_size, seed=self.seed, **self.share)

    def evaluation_batches(self, length: int) -> EvaluationBatches:
        """Return a sampler that takes every sample once, over all ranks."""
        return EvaluationBatches(length, self.batch_size, **self.share)


class Collectives(Protocol):
    """Sum and gather values across ranks."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, in each."""
        ...

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks."""
        ...


MetricTable: TypeAlias = Mapping[str, Mapping[str, float]]  # rows by name, of columns by name, in percent


class Metrics:
    """The result of an evaluation; as text, one line for the user."""

    @property
    def figures(self) -> dict[str, float]:
        """Metrics by the names of `Task.metrics`, which are columns of summary.csv: all fields but the count."""
        return {name: value for name, value in vars(self).items() if name != "count"}

    @property
    def tables(self) -> list[MetricTable]:
        """Details, such as metrics per class."""
        return []


class Evaluator(Protocol):
    """Collects predictions and computes metrics."""

    def add(self, model: nn.Module, batch: Any) -> None:
        """Run the model, in evaluation mode, on a batch of a validation loader."""
        ...

    def compute(self, collectives: Collectives) -> Metrics:
        """Compute the metrics over all ranks, which all call it and get the same; ValueError if there is no sample."""
        ...


# Takes the model in training mode, perhaps wrapped, and a training batch. Returns the loss.
Objective: TypeAlias = Callable[[nn.Module, Any], Tensor]


class Task(ABC):
    """What a model learns: its data, model, loss and metrics."""

    name: ClassVar[str]
    metrics: Mapping[str, bool]  # by name, if higher is better; the first decides which checkpoint is the best
    start: str | None = None  # description of the initial weights after `build_model`; None for random ones
    notes: tuple[str, ...] = ()  # sentences about the model for the user, after `build_model`

    @abstractmethod
    def open(self) -> TaskData:
        """Open and check both splits.

        Raises:
            ConfigError: With all problems.
        """

    @abstractmethod
    def build_model(self, class_names: Sequence[str]) -> nn.Module:
        """Build the model on the CPU with its initial weights; random ones come from torch's global generator."""

    def prepare(self, model: nn.Module) -> None:  # noqa: B027
        """Finish the initial weights of a built model on its device, before anything wraps it."""

    @abstractmethod
    def training_loader(self, source: Any, model: nn.Module, reading: Reading, broken: BrokenImages) -> Loader[Any]:
        """Return training batches, in another order each epoch."""

    @abstractmethod
    def validation_loader(self, source: Any, model: nn.Module, reading: Reading, broken: BrokenImages) -> Loader[Any]:
        """Return validation batches, in order."""

    def sampling_options(self, batch_size: int) -> dict[str, int]:
        """Return what else decides which samples an update gets, beside seed, images and updates per epoch."""
        del batch_size
        return {}

    @abstractmethod
    def objective(self, class_names: Sequence[str], rank: int) -> Objective:
        """Return the loss function of a rank."""

    def compile(self, mode: str) -> None:  # noqa: B027
        """Compile the models that `objective` uses beside the trained one, before it is called."""

    @abstractmethod
    def evaluator(self, source: Any, device: torch.device) -> Evaluator:
        """Return a new evaluator for the validation data."""

    @abstractmethod
    def metadata(self, class_names: Sequence[str]) -> dict[str, str]:
        """Return the metadata that files of weights need to be used elsewhere."""
