"""All settings of a training run, and timm's flags for them. Defaults are the paper's ImageNet recipe.

Sections that tasks use are declared beside them: `data` and `model` in `tasks.task`; `augmentation`, `loss`,
`detection` and `segmentation` with their tasks. `problems` of a section yields the name of each setting that does not
fit the others, and a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from inline_attention.support.settings import Setting, setting, settings_of, shown
from inline_attention.tasks.classification.distillation import DistillationSection
from inline_attention.tasks.classification.task import AugmentationSection, LossSection
from inline_attention.tasks.detection.models import DetectionOptions
from inline_attention.tasks.segmentation.models import SegmentationOptions
from inline_attention.tasks.task import CLASSIFICATION, DataSection, ModelSection


@dataclass(frozen=True)
class RunSection:
    """Output folder and resuming."""

    output: str = setting("out/train", "Output folder. Each run has a folder in it.")
    experiment: str | None = setting(None, "Name of the run's folder; null: time and model.")
    resume: str | None = setting(None, "Run or checkpoint to resume, or auto: this experiment's newest checkpoint.")
    start_anew: bool = setting(False, "Start from zero if nothing is resumed; move old files to previous-N.")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N.")


@dataclass(frozen=True)
class TaskSection:
    """What the model learns."""

    name: Literal["classification", "detection", "segmentation"] = setting(
        "classification", "classification, detection or segmentation."
    )


@dataclass(frozen=True)
class OptimizerSection:
    """Weight updates. One-dimensional weights, and those in the model's no_weight_decay(), have no weight decay."""

    name: str = setting("adamw", "Optimizer of timm.")
    lr: float = setting(5e-4, "Peak learning rate, per lr_base_size images.", at_least=0)
    lr_base_size: int | None = setting(512, "Rates are multiplied by images per update / this; null: by 1.", at_least=1)
    weight_decay: float = setting(0.05, "Weight decay.", at_least=0)
    momentum: float = setting(0.9, "Momentum of optimizers that have one, such as sgd.", at_least=0, below=1)
    betas: tuple[float, float] | None = setting(
        (0.9, 0.999), "Betas, as of Adam; null: the optimizer's own.", at_least=0, below=1
    )
    eps: float | None = setting(1e-8, "Epsilon of optimizers that have one; null: the optimizer's own.", above=0)
    layer_decay: float | None = setting(
        None, "Learning rate factor per layer from the top; null: none.", tasks=CLASSIFICATION, above=0, at_most=1
    )


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate schedule, updated at every step."""

    name: Literal["cosine", "tanh", "poly", "step", "multistep"] = setting("cosine", "Schedule of timm.")
    warmup_epochs: int = setting(20, "Warm-up epochs, part of training.epochs.", at_least=0)
    warmup_updates: int | None = setting(None, "Warm-up updates; null: use warmup_epochs.", at_least=0)
    warmup_lr: float = setting(5e-7, "Learning rate at the start of the warm-up, scaled as optimizer.lr.", at_least=0)
    min_lr: float = setting(5e-6, "Final learning rate, scaled as optimizer.lr.", at_least=0)
    cooldown_epochs: int = setting(0, "Epochs at min_lr after training.epochs.", at_least=0)
    decay_epochs: int = setting(30, "Epochs between steps of the step schedule.", at_least=1)
    decay_milestones: tuple[int, ...] = setting((), "Epochs after which multistep lowers the rate.", at_least=1)
    decay_rate: float = setting(0.1, "Factor of each step; power of the poly schedule.", above=0)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield milestones that are missing or out of order."""
        epochs = self.decay_milestones
        if self.name == "multistep" and (not epochs or list(epochs) != sorted(set(epochs))):
            message = f"expected the epochs of the steps in ascending order, such as [8, 11], got {shown(epochs)}"
            yield "decay_milestones", f"{message}; set them, or another schedule.name"


@dataclass(frozen=True)
class EmaSection:
    """An exponential moving average of the weights, evaluated and saved beside them."""

    enabled: bool = setting(False, "Keep averaged weights.")
    decay: float = setting(0.9996, "Decay per update of decay_base_size images.", at_least=0, below=1)
    decay_base_size: int | None = setting(4096, "decay is raised to images per update / this; null: to 1.", at_least=1)
    warmup: bool = setting(False, "Start with a small decay, for short runs.")


@dataclass(frozen=True)
class TrainingSection:
    """Length, batch sizes and precision."""

    epochs: int = setting(300, "Epochs, without the schedule's cool-down.", at_least=0)
    updates: int | None = setting(None, "Number of weight updates; null: use epochs.", at_least=1)
    batch_size: int = setting(128, "Largest number of images per forward pass and device.", at_least=1, at_most=2**20)
    total_batch_size: int | None = setting(
        None, "Images per update; null: batch_size × grad_accum_steps × devices.", at_least=1, at_most=2**24
    )
    grad_accum_steps: int | None = setting(None, "Forward passes per update; null: as needed.", at_least=1)
    validation_batch_size: int | None = setting(None, "Images per pass in evaluation; null: batch_size.", at_least=1)
    validation_interval: int = setting(1, "Epochs between evaluations.", at_least=1)
    amp: Literal["bf16", "fp16", "auto", "off"] = setting(
        "bf16", "Mixed precision: bf16, fp16, off, or auto: bf16 if possible."
    )
    compile: bool = setting(False, "Compile the model with torch.compile.", tasks=CLASSIFICATION)
    compile_mode: Literal["auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = setting(
        "auto", "Mode of torch.compile; auto: CUDA graphs where the settings allow them.", tasks=CLASSIFICATION
    )
    grad_checkpointing: bool = setting(False, "Recompute blocks in the backward pass: less memory, more time.")
    clip_grad: float | None = setting(None, "Clip the gradient norm; null: do not.", above=0)
    seed: int = setting(42, "Random seed.", at_least=0)
    deterministic: bool = setting(False, "Use deterministic algorithms only; slower on a GPU.")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a mode of compilation without compilation."""
        if self.compile_mode not in ("auto", "default") and not self.compile:
            message = f"has no effect without training.compile, got {self.compile_mode}"
            yield "compile_mode", f"{message}; leave it out, or set training.compile=true"


@dataclass(frozen=True)
class CheckpointsSection:
    """Saved checkpoints. A run that is stopped by a signal saves one first."""

    interval_epochs: int = setting(1, "Epochs between checkpoints.", at_least=1)
    interval_steps: int | None = setting(None, "Updates between checkpoints within an epoch; null: none.", at_least=1)
    keep_last: int = setting(3, "Number of newest checkpoints to keep.", at_least=1)
    keep_best: int = setting(1, "Number of best checkpoints to keep besides.", at_least=0)
    metric: str | None = setting(None, "Metric of the best checkpoint, such as top1 or box_ap; null: the first.")


@dataclass(frozen=True)
class LoggingSection:
    """Logs and curves."""

    interval: int = setting(50, "Updates between log lines.", at_least=1)
    tensorboard: bool = setting(True, "Write TensorBoard curves to the run's folder.")
    wandb: bool = setting(False, "Report to Weights & Biases.")
    wandb_project: str = setting("inline-attention", "Project name in Weights & Biases.")


@dataclass(frozen=True)
class DistributedSection:
    """Work of several ranks, as torchrun starts them."""

    strategy: Literal["ddp", "fsdp2"] = setting(
        "ddp", "ddp: whole model per device. fsdp2: parameters and optimizer states sharded."
    )
    context_parallel: int = setting(
        1, "Ranks that share the rows of each image, for large images; 1: none.", tasks=CLASSIFICATION, at_least=1
    )
    timeout_minutes: float = setting(10.0, "Minutes to wait for other ranks before the run fails.", above=0)


@dataclass(frozen=True)
class LimitsSection:
    """Faults after which the run stops."""

    broken_image_share: float = setting(0.01, "Largest share of unreadable training images.", at_least=0, at_most=1)
    broken_image_count: int = setting(1000, "Largest number of unreadable images; both limits hold.", at_least=0)
    nan_losses_in_a_row: int = setting(10, "Consecutive updates with non-finite loss or gradients.", at_least=0)


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a training run."""

    run: RunSection = field(default_factory=RunSection)
    task: TaskSection = field(default_factory=TaskSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    augmentation: AugmentationSection = field(default_factory=AugmentationSection)
    detection: DetectionOptions = field(default_factory=DetectionOptions)
    segmentation: SegmentationOptions = field(default_factory=SegmentationOptions)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    loss: LossSection = field(default_factory=LossSection)
    distillation: DistillationSection = field(default_factory=DistillationSection)
    ema: EmaSection = field(default_factory=EmaSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    checkpoints: CheckpointsSection = field(default_factory=CheckpointsSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    distributed: DistributedSection = field(default_factory=DistributedSection)
    limits: LimitsSection = field(default_factory=LimitsSection)


SECTIONS: dict[str, type[Any]] = get_type_hints(TrainConfig)
# Tasks that use a section, for settings that do not say so themselves.
SECTION_TASKS = {
    "augmentation": CLASSIFICATION,
    "detection": ("detection",),
    "distillation": CLASSIFICATION,
    "loss": CLASSIFICATION,
    "segmentation": ("segmentation",),
}
SETTINGS: dict[str, Setting] = {
    described.path: described
    for name, kind in SECTIONS.items()
    for described in settings_of(kind, f"{name}.", SECTION_TASKS.get(name, ())).values()
}


@dataclass(frozen=True)
class Flag:
    """A command line flag: its spellings, and the overrides it stands for, with {0}, {1}, … for its values."""

    names: tuple[str, ...]
    assignments: tuple[str, ...]
    bare: str | None = None  # the value it has if none follows it

    @property
    def setting(self) -> Setting:
        """The setting it is about; others that it touches make room for it."""
        return SETTINGS[self.assignments[0].partition("=")[0]]

    @property
    def num_values(self) -> int:
        """How many values follow it; 0 for a switch."""
        text = " ".join(self.assignments)
        return next(count for count in range(len(text)) if f"{{{count}}}" not in text)

    def overrides(self, *values: object) -> list[str]:
        """The overrides `key=value` that the flag with these values stands for."""
        if len(values) != self.num_values:
            raise ValueError(f"{self.names[0]} takes {self.num_values} values, got {len(values)}: {values}")
        texts = [str(value) for value in values]
        if self.setting.is_text:  # as it is: in quotes, no part of it means anything
            texts = [
                text if text == "null" and self.setting.is_optional else json.dumps(text, ensure_ascii=False)
                for text in texts
            ]
        return [assignment.format(*texts) for assignment in self.assignments]


# Flags by section. --drop-path sets drop_path; others name their setting after "=". -j is another name for --workers.
FLAG_NAMES = {
    "run": "--output --experiment --resume --start-anew --device",
    "model": "--model=name --num-classes --img-size --in-chans --drop-path --initial-checkpoint",
    "data": "--data-dir=dir --dataset --train-split --val-split --class-map --repair --allow-outside-files "
    "--workers,-j --crop-pct",
    "augmentation": "--scale --ratio --hflip --vflip --aa=auto_augment --color-jitter --reprob --remode --recount "
    "--mixup --cutmix --mixup-prob --mixup-switch-prob --mixup-mode --mixup-off-epoch",
    "optimizer": "--opt=name --lr --lr-base=lr --lr-base-size --weight-decay --momentum --opt-betas=betas "
    "--opt-eps=eps --layer-decay",
    "schedule": "--sched=name --warmup-epochs --warmup-lr --min-lr --cooldown-epochs --decay-epochs --decay-rate",
    "loss": "--smoothing",
    "ema": "--model-ema=enabled --model-ema-decay=decay --model-ema-warmup=warmup",
    "training": "--epochs --updates --batch-size,-b --validation-batch-size,-vb --grad-accum-steps,--grad-accum "
    "--val-interval=validation_interval --amp --torchcompile,--compile=compile --torchcompile-mode=compile_mode "
    "--grad-checkpointing --clip-grad --seed",
    "checkpoints": "--checkpoint-hist=keep_last --eval-metric=metric",
    "logging": "--log-interval=interval --log-wandb=wandb --wandb-project",
}
# As in timm, these mean what they say: a recipe's scaling rules do not apply to them, and its other length gives way.
FURTHER_ASSIGNMENTS = {
    "--lr": "optimizer.lr_base_size=null",
    "--model-ema-decay": "ema.decay_base_size=null",
    "--epochs": "training.updates=null",
    "--grad-accum-steps": "training.total_batch_size=null",
    "--torchcompile-mode": "training.compile=true",
}


def _flag(section: str, text: str) -> Flag:
    """Return the flag that an entry of `FLAG_NAMES` describes."""
    spellings, _, field = text.partition("=")
    names = tuple(spellings.split(","))
    setting = SETTINGS[f"{section}.{field or names[0][2:].replace('-', '_')}"]
    value = "true" if setting.annotation is bool else "[{0}, {1}]" if setting.is_pair else "{0}"
    further = [FURTHER_ASSIGNMENTS[names[0]]] if names[0] in FURTHER_ASSIGNMENTS else []
    return Flag(names, (f"{setting.path}={value}", *further), bare="auto" if names[0] == "--amp" else None)


FLAGS: tuple[Flag, ...] = (
    *(_flag(section, text) for section, texts in FLAG_NAMES.items() for text in texts.split()),
    Flag(("--input-size",), ("model.img_size=[{1}, {2}]", "model.in_chans={0}")),
    Flag(("--fsdp2",), ("distributed.strategy=fsdp2",)),
)
