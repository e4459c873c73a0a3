"""What can be set about a training run: sections of documented fields with the paper's ImageNet recipe as defaults.

The documentation, type and bounds that stand here are all there is: parsing, error messages, YAML comments and command
line help are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Bounds:
    """Where a number must lie; of a tuple, each number."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """Whether `value` lies within."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = (("≥", self.at_least), (">", self.above), ("≤", self.at_most), ("<", self.below))
        return " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)


def _option(default: Any, documentation: str, **bounds: float) -> Any:
    """A field with its default, its documentation and the bounds of its numbers."""
    metadata = {"documentation": documentation, "bounds": Bounds(**bounds)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunSection:
    """Where the run goes and what it continues."""

    output: str = _option("out/train", "Folder under which the run's own folder is made.")
    experiment: str | None = _option(None, "Name of the run's folder; null: from the time and the model.")
    resume: str | None = _option(
        None, "Continue a run: auto (the newest valid checkpoint of this experiment, if any), a checkpoint or a run."
    )
    start_anew: bool = _option(
        False, "Start from zero if nothing can be resumed; move what is there to previous-N in the run's folder."
    )
    device: str = _option("auto", "auto, cpu, cuda or cuda:N.")


@dataclass(frozen=True)
class TaskSection:
    """What is to be learnt."""

    name: Literal["classification", "detection", "segmentation"] = _option(
        "classification", "classification (of images), detection (of objects) or segmentation (classes of pixels)."
    )


@dataclass(frozen=True)
class DetectionSection:
    """What is built around the model for task.name=detection, and at what size it looks at images."""

    head: Literal["mask_rcnn", "retinanet"] = _option(
        "mask_rcnn", "mask_rcnn (boxes and masks) or retinanet (boxes), with torchvision's heads."
    )
    width: int = _option(256, "Channels of the pyramid and of the heads' convolutions.", at_least=8)
    sampled_boxes: int = _option(512, "Proposals of an image that a step of mask_rcnn looks at.", at_least=1)
    shorter_side: int = _option(800, "Pixels that the shorter side of images is resized to.", at_least=32)
    longest_side: int = _option(1333, "Pixels that the longer side may have at most.", at_least=32)
    multi_scale_from: int | None = _option(
        None,
        "In training, the shorter side is chosen at random from this, in steps of 32, to shorter_side; null: it is "
        "shorter_side.",
        at_least=32,
    )
    smallest_anchor: int = _option(
        32, "Side in pixels of the anchors on the finest level; it doubles with each of the five levels.", at_least=1
    )


@dataclass(frozen=True)
class SegmentationSection:
    """What is built around the model for task.name=segmentation, and at what size it looks at images."""

    head: Literal["semantic_fpn", "upernet"] = _option("semantic_fpn", "semantic_fpn or upernet.")
    width: int | None = _option(None, "Channels of the decoder; null: the papers', 256 and 512.", at_least=8)
    crop: int = _option(
        512, "Pixels of the side of training crops; images to evaluate on get it as their shorter side.", at_least=32
    )
    scale: tuple[float, float] = _option(
        (0.5, 2.0), "Smallest and largest share of crop that the shorter side of a training image is resized to.",
        above=0,
    )  # fmt: skip
    inference: Literal["whole", "sliding"] = _option(
        "whole", "Evaluate whole images at once, or by sliding windows of the size of crops."
    )
    window_step: int | None = _option(None, "Pixels from one window to the next; null: two thirds of crop.", at_least=1)


@dataclass(frozen=True)
class ModelSection:
    """The network and the weights it starts from."""

    name: str = _option(
        "inline_deit_tiny",
        "A model of this library (`inline models --all`) or of timm. For detection and segmentation it is the "
        "backbone, and must be one of this library's with a pyramid: pvt, swin or cswin.",
    )
    arguments: Mapping[str, Any] = _option({}, "Further arguments of the model, such as {depth: 4, patch_size: 2}.")
    num_classes: int | None = _option(None, "Outputs of the head; null: as many as the data has classes.", at_least=1)
    img_size: int | tuple[int, int] | None = _option(
        None, "Side in pixels, or [height, width]; null: the model's own.", at_least=1
    )
    in_chans: int = _option(3, "Channels of the images.", at_least=1)
    drop_path: float | None = _option(
        None, "Rate of stochastic depth at the last block; null: the model's own.", at_least=0, below=1
    )
    initial_checkpoint: str | None = _option(
        None,
        "Weights to start from. A head of another number of classes is started anew; a backbone takes those of a "
        "classifier, and of detectors and segmenters.",
    )
    require_checkpoint: bool = _option(
        False, "Refuse to start without initial_checkpoint: for recipes whose learning rate needs trained weights."
    )

    def __post_init__(self) -> None:
        # Lists become tuples, as they do on the way back from YAML: equal settings compare equal.
        object.__setattr__(self, "arguments", {key: _with_tuples(value) for key, value in self.arguments.items()})


@dataclass(frozen=True)
class DataSection:
    """The images and how they are read."""

    dataset: str = _option(
        "folder",
        "folder (a subfolder per class), digits (in the package), cifar10, hfds/NAME (Hugging Face) or wds/PATTERN "
        "(WebDataset); for detection coco (COCO's format), for segmentation pairs (images and maps of labels).",
    )
    dir: str | None = _option(None, "Folder of the data; not needed for digits and hfds.")
    train_split: str = _option("train", "Split or subfolder to train on.")
    val_split: str = _option("validation", "Split or subfolder to evaluate on; of a folder, val will do as well.")
    class_map: str | None = _option(None, "File that lists the classes, one per line, in the order of their indices.")
    repair: bool = _option(
        False, "Repair faults of coco and pairs in what is used, as the report before training says; files stay."
    )
    allow_outside_files: bool = _option(False, "Read files that annotations or folder settings name outside of dir.")
    reduce_zero_label: bool = _option(
        False, "Of pairs: 0 in maps means other and is ignored, 1 is the first class, as in ADE20K and in scenes."
    )
    image_folder: str | None = _option(
        None, "Of pairs: folder of the images below dir, such as img/{split}; null: by one of the usual names."
    )
    map_folder: str | None = _option(None, "Of pairs: folder of the maps of labels below dir, likewise.")
    workers: int = _option(
        4, "Processes that read images, per device, at most one to a core; 0: the main process does.", at_least=0
    )
    timeout: float = _option(180.0, "Seconds that they may take for a batch before the run fails.", above=0)
    in_memory: bool = _option(
        False,
        "Keep every image, decoded, on the device, and augment whole batches there: for small data. It needs "
        "augmentation.crop=padded and data.crop_pct=1; of auto_augment it knows RandAugment.",
    )
    crop_pct: float | None = _option(
        None,
        "Share of the resized image's side that evaluation keeps (the centre); null: the model's own.",
        above=0,
        at_most=1,
    )


@dataclass(frozen=True)
class AugmentationSection:
    """What is done to training images. All of it is seeded by training.seed, the epoch and the image."""

    crop: Literal["resized", "padded"] = _option(
        "resized", "resized: a random part, resized (see scale, ratio). padded: pad by crop_padding, then crop."
    )
    scale: tuple[float, float] = _option(
        (0.08, 1.0), "Smallest and largest part of the area that a resized crop takes.", above=0, at_most=1
    )
    ratio: tuple[float, float] = _option(
        (0.75, 1.3333333333333333), "Smallest and largest width over height of a resized crop.", above=0
    )
    crop_padding: int = _option(4, "Pixels added on each side before a padded crop; 0: no crop.", at_least=0)
    hflip: float = _option(0.5, "Probability of a left-right flip.", at_least=0, at_most=1)
    vflip: float = _option(0.0, "Probability of an upside-down flip.", at_least=0, at_most=1)
    auto_augment: str | None = _option(
        "rand-m9-mstd0.5-inc1", "timm's description of RandAugment, AugMix or AutoAugment; null: none."
    )
    color_jitter: float = _option(
        0.4, "Strength of colour changes; without effect beside auto_augment, as in timm.", at_least=0
    )
    reprob: float = _option(0.25, "Probability of erasing a rectangle.", at_least=0, at_most=1)
    remode: Literal["pixel", "rand", "const"] = _option(
        "pixel", "Fill of erased rectangles: noise per pixel, one random colour, or the mean colour."
    )
    recount: int = _option(1, "Largest number of rectangles erased.", at_least=1)
    mixup: float = _option(0.8, "Alpha of mixup; 0: off.", at_least=0)
    cutmix: float = _option(1.0, "Alpha of CutMix; 0: off.", at_least=0)
    mixup_prob: float = _option(1.0, "Probability of mixing a batch, where either is on.", at_least=0, at_most=1)
    mixup_switch_prob: float = _option(0.5, "Probability of CutMix where both are on.", at_least=0, at_most=1)
    mixup_mode: Literal["batch", "pair", "elem"] = _option("batch", "Whether a batch, pair or image draws its own mix.")
    mixup_off_epoch: int = _option(0, "Epoch from which nothing is mixed; 0: mixed to the end.", at_least=0)


@dataclass(frozen=True)
class OptimizerSection:
    """How weights are updated. Nothing one-dimensional decays, nor what the model's no_weight_decay() names."""

    name: str = _option("adamw", "An optimiser of timm.")
    lr: float = _option(
        5e-4, "Learning rate at its highest, for lr_base_size images per update: see there.", at_least=0
    )
    lr_base_size: int | None = _option(
        512,
        "lr, schedule.min_lr and schedule.warmup_lr are multiplied by (images per update) / lr_base_size; "
        "null: taken as they are.",
        at_least=1,
    )
    weight_decay: float = _option(0.05, "Weight decay.", at_least=0)
    momentum: float = _option(0.9, "Momentum of optimisers that have one, such as sgd.", at_least=0, below=1)
    betas: tuple[float, float] | None = _option(
        (0.9, 0.999), "Decay of the moments, in optimisers of Adam's kind; null: the optimiser's own.", at_least=0,
        below=1,
    )  # fmt: skip
    eps: float | None = _option(
        1e-8, "Term for stability, in optimisers that have one; null: the optimiser's own.", above=0
    )
    layer_decay: float | None = _option(
        None,
        "Factor of the learning rate from each layer to the one below; null: one rate for all.",
        above=0,
        at_most=1,
    )


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over time; it changes with every update."""

    name: Literal["cosine", "tanh", "poly", "step", "multistep"] = _option(
        "cosine", "Curve of the learning rate, as timm's."
    )
    warmup_epochs: int = _option(20, "Epochs of linear rise, part of training.epochs.", at_least=0)
    warmup_updates: int | None = _option(
        None, "Updates of linear rise, in place of warmup_epochs; null: as warmup_epochs says.", at_least=0
    )
    warmup_lr: float = _option(5e-7, "Learning rate at the start of the rise; scaled as optimizer.lr.", at_least=0)
    min_lr: float = _option(5e-6, "Learning rate at the end; scaled as optimizer.lr.", at_least=0)
    cooldown_epochs: int = _option(0, "Epochs at min_lr after training.epochs.", at_least=0)
    decay_epochs: int = _option(30, "Epochs between steps of the step schedule.", at_least=1)
    decay_milestones: tuple[int, ...] = _option(
        (), "Epochs after which the multistep schedule takes a step.", at_least=1
    )
    decay_rate: float = _option(0.1, "Factor of each step; power of the poly schedule.", above=0)


@dataclass(frozen=True)
class LossSection:
    """What a classifier minimises: cross entropy. Detectors and segmenters have the losses of their heads."""

    smoothing: float = _option(0.1, "Label smoothing.", at_least=0, below=1)


@dataclass(frozen=True)
class EmaSection:
    """A moving average of the weights, which is evaluated and saved beside them."""

    enabled: bool = _option(False, "Keep such an average.")
    decay: float = _option(
        0.9996, "Share of the old average at each update of decay_base_size images: see there.", at_least=0, below=1
    )
    decay_base_size: int | None = _option(
        4096, "decay is taken to the power (images per update) / decay_base_size; null: taken as it is.", at_least=1
    )
    warmup: bool = _option(False, "Start with a small decay: for short runs.")


@dataclass(frozen=True)
class TrainingSection:
    """How long, how many images at once, in what precision."""

    epochs: int = _option(300, "Passes over the data, without the schedule's cool-down.", at_least=0)
    updates: int | None = _option(
        None, "Updates of the weights in all, in place of epochs; null: as epochs says.", at_least=1
    )
    batch_size: int = _option(
        128, "Images of one forward pass on one device; with total_batch_size, at most.", at_least=1
    )
    total_batch_size: int | None = _option(
        None,
        "Images per update over all devices: divided among them, and accumulated where batch_size is too small. null: "
        "batch_size × grad_accum_steps × devices.",
        at_least=1,
    )
    grad_accum_steps: int | None = _option(
        None, "Forward passes per update; null: as total_batch_size needs, otherwise 1.", at_least=1
    )
    validation_batch_size: int | None = _option(
        None, "Images of one forward pass in evaluation; null: batch_size.", at_least=1
    )
    validation_interval: int = _option(1, "Epochs from one evaluation to the next.", at_least=1)
    amp: Literal["bf16", "fp16", "auto", "off"] = _option(
        "bf16",
        "Precision of matrix products: bf16, fp16 (with loss scaling), auto (bf16 where the device has it, otherwise "
        "fp16; what --amp alone stands for) or off (float32).",
    )
    compile: bool = _option(False, "Compile the model with torch.compile.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = _option(
        "default",
        "Mode of torch.compile. reduce-overhead records each pass once, as a CUDA graph: for models so small that "
        "launching their kernels takes longer than running them.",
    )
    grad_checkpointing: bool = _option(False, "Recompute blocks in the backward pass: less memory, more time.")
    clip_grad: float | None = _option(None, "Largest norm of the gradient; null: any.", above=0)
    seed: int = _option(
        42, "Seed of the initial weights, of the order of the data and of its augmentation.", at_least=0
    )
    deterministic: bool = _option(False, "Use deterministic algorithms only: same results each time, slower on a GPU.")


@dataclass(frozen=True)
class CheckpointsSection:
    """What is saved, and what is kept of it. A run that is told to stop always saves first."""

    interval_epochs: int = _option(1, "Epochs from one checkpoint to the next.", at_least=1)
    interval_steps: int | None = _option(
        None, "Updates from one checkpoint to the next within an epoch; null: at ends of epochs only.", at_least=1
    )
    keep_last: int = _option(3, "How many of the newest to keep.", at_least=1)
    keep_best: int = _option(1, "How many of the best to keep besides.", at_least=0)
    metric: str | None = _option(
        None,
        "What makes a checkpoint the best: top1, top5 or loss; of detectors box_ap, box_ap50, … and mask_ap, …; of "
        "segmenters miou, macc or aacc. null: the first of these.",
    )


@dataclass(frozen=True)
class LoggingSection:
    """What is reported, and where."""

    interval: int = _option(50, "Updates from one line of the log to the next.", at_least=1)
    tensorboard: bool = _option(True, "Write curves for TensorBoard into the run's folder.")
    wandb: bool = _option(False, "Report to Weights & Biases.")
    wandb_project: str = _option("inline-attention", "Project there.")


@dataclass(frozen=True)
class DistributedSection:
    """How several processes, as torchrun starts them, share the work."""

    strategy: Literal["ddp", "fsdp2"] = _option(
        "ddp", "ddp: every device has the whole model. fsdp2: parameters and optimiser states are divided."
    )
    timeout_minutes: float = _option(10.0, "How long processes wait for each other before the run fails.", above=0)


@dataclass(frozen=True)
class LimitsSection:
    """How much may go wrong before the run stops."""

    broken_image_share: float = _option(
        0.01, "Largest share of training images that cannot be read.", at_least=0, at_most=1
    )
    broken_image_count: int = _option(1000, "Largest number of them; both limits hold.", at_least=0)
    nan_losses_in_a_row: int = _option(
        10, "Updates that may be skipped one after another because loss or gradients are not finite.", at_least=0
    )


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a training run."""

    run: RunSection = field(default_factory=RunSection)
    task: TaskSection = field(default_factory=TaskSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    augmentation: AugmentationSection = field(default_factory=AugmentationSection)
    detection: DetectionSection = field(default_factory=DetectionSection)
    segmentation: SegmentationSection = field(default_factory=SegmentationSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    loss: LossSection = field(default_factory=LossSection)
    ema: EmaSection = field(default_factory=EmaSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    checkpoints: CheckpointsSection = field(default_factory=CheckpointsSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    distributed: DistributedSection = field(default_factory=DistributedSection)
    limits: LimitsSection = field(default_factory=LimitsSection)


def _with_tuples(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_with_tuples(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _with_tuples(item) for key, item in value.items()}
    return value
