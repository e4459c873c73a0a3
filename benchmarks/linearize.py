"""Linearize a softmax ViT: accuracy of students by share of the teacher's epochs, with and without labels; speed.

    python benchmarks/linearize.py digits
    python benchmarks/linearize.py cifar10-small --data-dir DIR    # a small ViT, about two hours on a CPU
    python benchmarks/linearize.py cifar10 --data-dir DIR [--at-once 2] [--time-limit 560] [--seeds 1]
    python benchmarks/linearize.py tiny-imagenet-100 --data-dir DIR [--only teachers]
    python benchmarks/linearize.py speed

A softmax ViT of timm is trained by the engine. On cifar10 a ResNet, trained first, guides it. On tiny-imagenet-100 it
first has patches twice as large: an epoch has a quarter of the tokens then, and counts as a quarter. The teacher is its
weights in half precision, RUNS/DATASET/teacher-seed0.safetensors, which another machine can go on from. Its attention
is replaced (InLine or linear, with and without the local 3×3 term), and students are distilled for 0 to 25 % of the
teacher's epochs. InLine is calibrated, and class tokens, where the model has one, keep softmax; rows of their own are
without that.
Without labels, the student of a backbone without head matches tokens alone, and a linear probe is trained on teacher
and student. Runs are processes, several at a time; those that matter most come first. After the time limit or a kill,
the same command resumes; finished runs are not repeated. To resume on another machine, take these files of RUNS/DATASET
along: *-seed*.safetensors, *.json and */outcome.json.
`speed` compares ViT-S and ViT-B with their conversions.

DIR of cifar10: cifar-10-binary.tar.gz, packed or unpacked, or folders train/CLASS and test/CLASS. Of tiny-imagenet-100:
folders train/CLASS and validation/CLASS. Results: benchmarks/results/linearize_DATASET.{json,md}, rewritten after every
run, and .png at the end.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import timm
import torch
import torch.nn.functional as F
import typer
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from inline_attention import convert_attention
from inline_attention.ablation.runs import finish_run, read_outcome, run_command, run_folder
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.linearized import measure_speed
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.benchmark.side_by_side import Command, run_side_by_side
from inline_attention.engine.config import ConfigError, TrainConfig, with_overrides
from inline_attention.engine.evaluate import evaluate_task
from inline_attention.engine.processes import joined_processes
from inline_attention.engine.train import build_task, open_sources
from inline_attention.models.checkpoints import open_checkpoint, save_weights
from inline_attention.models.reading import find_weights
from inline_attention.recipes import get_recipe
from inline_attention.support.figures import Axes, Chart, LegendEntry, Panel, Style, draw_line, light_grid
from inline_attention.tasks.task import find_device

RESULTS = Path(__file__).parent / "results"
MODEL = "vit_tiny_patch16_224"
CLASS_TOKEN_TOO = "class token too"
# name: (attention, options of the layer, style of its line)
VARIANTS: dict[str, tuple[str, dict[str, Any], Style]] = {
    "InLine": ("inline", {}, Style("inline")),
    "InLine, not calibrated": ("inline", {}, Style("inline", 3)),
    "InLine without 3×3": ("inline", {"local_residual": False}, Style("inline", 1)),
    "linear with 3×3": ("linear", {"local_residual": True}, Style("linear")),
    "linear": ("linear", {}, Style("linear", 1)),
    f"InLine, {CLASS_TOKEN_TOO}": ("inline", {"softmax_prefix": False}, Style("inline", 2)),
    f"linear, {CLASS_TOKEN_TOO}": ("linear", {"softmax_prefix": False}, Style("linear", 2)),
}
PROBES = ("probe of the teacher", "probe of the student")
NOTES = ("model", "model_arguments", "class_names", "crop_pct")
QUIET = ("logging.tensorboard=false", "checkpoints.keep_last=1", "checkpoints.keep_best=1")
# Strong regularization, or softmax overfits small datasets.
STRONG = (
    "optimizer.name=muon", "optimizer.lr=4e-3", "optimizer.lr_base_size=null", "schedule.warmup_epochs=2",
    "augmentation.mixup=0.8", "augmentation.cutmix=1.0", "augmentation.mixup_prob=1.0",
    "augmentation.auto_augment=rand-m9-mstd0.5-inc1",
    "training.batch_size=256", "training.total_batch_size=256", "training.validation_interval=20",
    "checkpoints.interval_epochs=10",
)  # fmt: skip
COARSE = (
    "optimizer.lr=5e-3", "training.batch_size=512", "training.total_batch_size=512", "augmentation.mixup_off_epoch=0"
)  # fmt: skip
# The teacher itself learns from a convolutional network and from labels, as DeiT does.
GUIDED = ("distillation.match=logits", "distillation.features_weight=0")


@dataclass(frozen=True)
class Experiment:
    """A dataset, the teacher's settings, and the students' lengths in percent of the teacher's epochs.

    Attributes:
        recipe: Recipe whose data settings are used.
        arguments: Arguments of timm's model, among them `patch_size`.
        epochs: Epochs of the teacher.
        overrides: Settings of teacher and students.
        teacher: Settings of the teacher alone.
        coarse_epochs: Epochs of the teacher before, with patches twice as large.
        coarse: Settings of these epochs alone.
        guide: Settings of the guide's training; none without a guide.
        batch: Images per update of the students.
        shares: Students' lengths, in percent.
        probe_share: Length of the student without labels, in percent.
    """

    recipe: str
    arguments: Mapping[str, Any]
    epochs: int
    overrides: tuple[str, ...]
    teacher: tuple[str, ...]
    coarse_epochs: int = 0
    coarse: tuple[str, ...] = ()
    guide: tuple[str, ...] = ()
    batch: int = 128
    shares: tuple[int, ...] = (1, 5, 10, 25)
    probe_share: int = 10

    @property
    def patch(self) -> int:
        """Side of the patches in pixels."""
        return self.arguments["patch_size"]

    @property
    def length(self) -> float:
        """Epochs of the teacher, of which students get a share. Coarse ones have a quarter of the tokens."""
        return self.epochs + self.coarse_epochs / 4

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the students' rows."""
        has_class_token = self.arguments.get("class_token", True)
        return tuple(name for name in VARIANTS if has_class_token or not name.endswith(CLASS_TOKEN_TOO))


# No class token: normalized tokens are averaged, so no softmax is left in a conversion.
POOLED = {"class_token": False, "global_pool": "avg", "fc_norm": False}
EXPERIMENTS = {
    "digits": Experiment(
        "digits",
        arguments={"patch_size": 2, "embed_dim": 64, "num_heads": 2, "depth": 3},
        epochs=60,
        overrides=(),
        teacher=(
            "training.batch_size=64", "training.total_batch_size=64", "optimizer.lr=1e-3",
            "training.validation_interval=60", "checkpoints.interval_epochs=60",
        ),
        batch=64,
    ),
    "cifar10-small": Experiment(
        "cifar10",
        arguments={"patch_size": 4, "embed_dim": 64, "num_heads": 2, "depth": 4},
        epochs=10,
        overrides=("model.img_size=32", "training.amp=off"),
        teacher=(
            "optimizer.name=muon", "optimizer.lr_base_size=null", "optimizer.lr=5e-3", "schedule.warmup_epochs=1",
            "augmentation.reprob=0", "training.batch_size=256", "training.total_batch_size=256",
            "training.validation_interval=10", "checkpoints.interval_epochs=5",
        ),
        shares=(10, 25),
    ),
    "cifar10": Experiment(
        "cifar10",
        arguments={"patch_size": 2, **POOLED},
        epochs=70,
        overrides=("model.img_size=32", "training.compile=true"),
        teacher=(
            *STRONG, "optimizer.lr=5e-3", "schedule.warmup_epochs=4", "training.batch_size=512",
            "training.total_batch_size=512", "augmentation.mixup_off_epoch=60",
        ),
        guide=(
            "model.name=resnet18", "model.arguments={}", "model.img_size=64", "training.epochs=24",
            "optimizer.lr=2e-3", "optimizer.lr_base_size=null", "schedule.warmup_epochs=2",
            "augmentation.crop_padding=8", "augmentation.cutmix=1.0", "augmentation.mixup_prob=0.5",
            "augmentation.mixup_off_epoch=20", "training.validation_interval=8",
        ),
    ),
    "tiny-imagenet-100": Experiment(
        "cifar10",
        arguments={"patch_size": 4, **POOLED},
        epochs=14,
        overrides=(
            "model.img_size=64", "model.num_classes=100", "data.dataset=folder", "augmentation.crop_padding=8",
            "training.compile=true",
        ),
        teacher=(*STRONG, "augmentation.mixup_off_epoch=11"),
        coarse_epochs=72,
        coarse=COARSE,
    ),
}  # fmt: skip
# Students differ from their teacher in these.
STUDENT_SECTIONS = ("optimizer", "schedule", "loss")


@dataclass(frozen=True)
class Place:
    """Where an experiment runs: data, folder of the runs, device, seeds, and the user's own settings."""

    experiment: Experiment
    data_dir: Path | None
    runs: Path
    seed: int  # of the students
    teacher_seed: int
    own: tuple[str, ...]
    at_once: int = 1

    @cached_property
    def images(self) -> int:
        """Number of training images. To list them takes a second, and every student's settings need it."""
        return len(open_sources(self.settings("count")).train)

    @property
    def teacher(self) -> Path:
        """Weights of the teacher."""
        return self.weights("teacher")

    @property
    def stages(self) -> tuple[str, ...]:
        """Runs that the teacher takes, in their order."""
        before = {"guide": self.experiment.guide, "coarse": self.experiment.coarse}
        return (*(stage for stage, settings in before.items() if settings), "teacher")

    def weights(self, stage: str) -> Path:
        """Weights that a stage of the teacher's training ends with."""
        return self.runs / f"{stage}-seed{self.teacher_seed}.safetensors"

    def settings(self, name: str, *overrides: str) -> TrainConfig:
        """Return the settings of a run of the teacher's model on the data."""
        data: list[str] = []
        if self.data_dir is not None:
            # They decode small images once: more of them would take longer to start than they save.
            workers = max(1, min(4, (os.cpu_count() or 2) // self.at_once - 1))
            data = [f"data.dir={self.data_dir}", f"data.workers={workers}"]
            if self.experiment.recipe == "cifar10" and (self.data_dir / "train").is_dir():
                is_cifar = (self.data_dir / "test").is_dir()
                data += ["data.dataset=folder", *(["data.val_split=test"] if is_cifar else [])]
        arguments = json.dumps(dict(self.experiment.arguments))
        fixed = [f"model.name={MODEL}", "model.drop_path=null", f"model.arguments={arguments}"]
        where = [f"run.output={self.runs}", f"run.experiment={name}-seed{self.seed}", f"training.seed={self.seed}"]
        every = [*fixed, *self.experiment.overrides, *data, *QUIET, *overrides, *self.own, *where]
        return with_overrides(get_recipe(self.experiment.recipe).config, every)

    def stage_settings(self, stage: str) -> TrainConfig:
        """Return the settings of a stage of the teacher's training."""
        experiment = self.experiment
        if stage == "guide":
            return self.settings(stage, *experiment.guide)
        own = [f"training.epochs={experiment.epochs}"]
        if stage == "coarse":
            arguments = json.dumps({**experiment.arguments, "patch_size": 2 * experiment.patch})
            own = [f"training.epochs={experiment.coarse_epochs}", f"model.arguments={arguments}", *experiment.coarse]
        elif experiment.coarse:
            own.append(f"model.initial_checkpoint={self.weights('coarse')}")
        if experiment.guide:
            own += [*GUIDED, f"distillation.teacher={self.weights('guide')}"]
        return self.settings(stage, *experiment.teacher, *own)

    def finish_stage(self, stage: str) -> None:
        """Write the weights of a stage in half precision: 11 MB, where some machines hand out 16 at most."""
        file = open_checkpoint(find_weights(run_folder(self.stage_settings(stage)) / "checkpoints" / "last"))
        weights = {name: value.half() if value.is_floating_point() else value for name, value in file.weights.items()}
        notes = {name: file.metadata[name] for name in NOTES if name in file.metadata}
        if stage == "coarse":  # fit patches and positions to the teacher's
            arguments = {**json.loads(notes["model_arguments"]), **self.stage_settings("teacher").model.arguments}
            model: Any = timm.create_model(MODEL, **arguments)
            weights = checkpoint_filter_fn(weights, model)
            notes["model_arguments"] = json.dumps(arguments)
        save_weights(weights, self.weights(stage), metadata=notes)

    def student_settings(self, variant: str, share: int, *, backbone: Path | None = None) -> TrainConfig:
        """Return the settings of a student of the teacher, or, without labels, of a backbone without head."""
        recipe, experiment = get_recipe("linearize_classifier").config, self.experiment
        attention, options, _ = VARIANTS[variant]
        batch = [f"training.batch_size={experiment.batch}", f"training.total_batch_size={experiment.batch}"]
        light = ["augmentation.mixup=0", "augmentation.cutmix=0", "augmentation.reprob=0"]
        match = "logits" if backbone is None else "features"
        pictures = 0 if variant.endswith("not calibrated") else recipe.distillation.calibration_images
        name = f"{variant.replace(' ', '_').replace('×', 'x')}-{share}-{match}"
        base = self.settings(name, *batch, *light, "training.clip_grad=1.0")
        updates = max(1, round(experiment.length * share / 100 * (self.images // experiment.batch)))
        model: Any = replace(
            base.model,
            initial_checkpoint=str(backbone or self.teacher),
            attention=attention,
            conversion_options={"softmax_prefix": True, **options},
        )
        return replace(
            base,
            **{section: getattr(recipe, section) for section in STUDENT_SECTIONS},
            model=model,
            distillation=replace(recipe.distillation, match=match, calibration_images=pictures),
            training=replace(base.training, updates=updates, validation_interval=10**6),
        )


def teacher_commands(places: Sequence[Place], stage: str) -> dict[Command, Place]:
    """Return the commands of a stage of the teachers that are missing."""
    commands: dict[Command, Place] = {}
    for place in places:
        if place.teacher.exists() or place.weights(stage).exists():
            continue
        before = place.stages[: place.stages.index(stage)]
        if not all(place.weights(earlier).exists() for earlier in before):  # a run was stopped
            continue
        commands[run_command(f"{stage}, seed {place.seed}", place.stage_settings(stage), is_alone=False)] = place
    return commands


def student_runs(place: Place, round_: int) -> Iterator[tuple[str, TrainConfig]]:
    """Yield the runs of a round, by name of their result: what decides comes first."""
    for variant in place.experiment.variants:
        _, options, _ = VARIANTS[variant]
        for share in place.experiment.shares:
            is_main = variant == next(iter(VARIANTS))
            importance = 0 if share == 10 else 1 if share == 25 and is_main else 2 if share < 10 else 3
            if options.get("softmax_prefix") is False or variant.endswith("not calibrated"):  # not what decides
                importance = 4 if share == 10 else 5
            if importance == round_:
                yield key(variant, share), place.student_settings(variant, share)


def key(variant: str, share: int) -> str:
    return f"{variant}, {share} %"


def evaluations_file(place: Place, kind: str) -> Path:
    return place.runs / f"{kind}-seed{place.seed}.json"


def evaluate_untrained(place: Place) -> dict[str, float]:
    """Return the accuracy of the teacher and of its conversions without training."""
    configs = {key(variant, 0): place.student_settings(variant, 1) for variant in place.experiment.variants}
    first = next(iter(configs.values()))
    off = replace(first.distillation, match="off")
    plain: Any = replace(first.model, attention=None, conversion_options={})
    configs = {"teacher": replace(first, distillation=off, model=plain), **configs}
    found: dict[str, float] = {}
    with joined_processes(first.run.device) as processes:
        data = build_task(configs["teacher"]).open()
        for name, config in configs.items():
            pictures = replace(config.data, workers=0)  # they are few; workers would start anew for each model
            arguments = (processes, pictures, config.training.batch_size, config.training.amp)
            metrics = evaluate_task(build_task(config), data.validation, data.class_names, *arguments)
            found[name] = metrics.figures["top1"]
    return found


def backbone_of(place: Place) -> Path:
    """Write the teacher without its head; return the file."""
    path = place.runs / f"backbone-seed{place.seed}.safetensors"
    if not path.exists():
        file = open_checkpoint(place.teacher)
        arguments = {**json.loads(file.metadata["model_arguments"]), "num_classes": 0}
        headless = {name: value for name, value in file.weights.items() if not name.startswith("head.")}
        save_weights(headless, path, metadata={"model": MODEL, "model_arguments": json.dumps(arguments)})
    return path


def probe(place: Place) -> dict[str, float]:
    """Distill a student without labels; return the linear probes of the teacher and of it."""
    backbone = backbone_of(place)
    config = place.student_settings("InLine", place.experiment.probe_share, backbone=backbone)
    finish_run(config, is_alone=False)
    trained = replace(config.model, initial_checkpoint=str(find_weights(run_folder(config) / "checkpoints" / "last")))
    distillation = replace(config.distillation, teacher=str(backbone))
    with joined_processes(config.run.device) as processes:
        task: Any = build_task(replace(config, model=trained, distillation=distillation))
        student = task.build_model([])
        labelled = build_task(place.settings("probe"))
        data = labelled.open()
        models = zip(PROBES, (task.teacher, student), strict=True)
        return {
            name: linear_probe(model.to(processes.device).eval(), labelled, data, processes) for name, model in models
        }


@torch.no_grad()
def pooled_features(model: nn.Module, task: Any, source: Any, processes: Any) -> tuple[Tensor, Tensor]:
    """Return a backbone's outputs `[N, C]` and the labels of a split, as evaluation sees it."""
    from inline_attention.data.broken import BrokenImageLimit, BrokenImages

    reading = processes.reading(task._data, 256)
    loader = task.validation_loader(source, model, reading, BrokenImages(len(source), BrokenImageLimit()))
    found = [(model(batch.images).float(), batch.targets) for batch in loader.epoch()]
    loader.close()
    outputs, labels = zip(*found, strict=True)
    return torch.cat(outputs), torch.cat(labels)


def linear_probe(model: nn.Module, task: Any, data: Any, processes: Any) -> float:
    """Train a linear classifier on frozen, standardized features by L-BFGS; return its top-1 in percent."""
    features, labels = pooled_features(model, task, data.train, processes)
    test_features, test_labels = pooled_features(model, task, data.validation, processes)
    mean, std = features.mean(0), features.std(0).clamp(min=1e-6)
    features, test_features = (features - mean) / std, (test_features - mean) / std
    linear = nn.Linear(features.shape[1], len(data.class_names), device=features.device)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(linear(features), labels) + 1e-4 * linear.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        return (linear(test_features).argmax(1) == test_labels).float().mean().item() * 100


def write_results(
    name: str, experiment: Experiment, found: dict[str, dict[str, float]], output: Path, *, one_teacher: bool
) -> None:
    """Write JSON and Markdown of all seeds so far."""
    environment = describe_environment()
    length = experiment.length
    content = {"environment": environment, "dataset": name, "teacher_epochs": length, "one_teacher": one_teacher}
    write_json(output / f"linearize_{name}.json", {**content, "seeds": found})
    shares = (0, *experiment.shares)
    header = ["student", *(f"{share} % ({share / 100 * length:.3g} epochs)" for share in shares)]
    rows = [[variant, *(summary(found, key(variant, share)) for share in shares)] for variant in experiment.variants]
    arguments = ", ".join(f"{argument}={value}" for argument, value in experiment.arguments.items())
    epochs = f"{experiment.epochs} epochs{' guided by a ResNet' if experiment.guide else ''}"
    if experiment.coarse:
        before = f"{experiment.coarse_epochs} epochs with patches of {2 * experiment.patch} pixels"
        epochs = f"{before}, a quarter of the tokens, then {epochs}; by tokens, {length:g} epochs in all"
    seeds = f"{len(found)} seeds{' of students, one teacher' if one_teacher else ''}"
    of_teachers = dict(list(found.items())[:1]) if one_teacher else found
    class_tokens = f" The class token keeps softmax, except in rows with “{CLASS_TOKEN_TOO}”."
    if experiment.variants != tuple(VARIANTS):
        class_tokens = " There is no class token, so no softmax is left."
    text = [
        f"Softmax teacher: {MODEL} ({arguments}), {epochs}. Top-1 {summary(of_teachers, 'teacher')} % of the held-out "
        f"pictures, {seeds} (± standard deviation). Students start from its weights and learn from its logits, its "
        f"tokens and the labels, in batches of {experiment.batch}. InLine starts calibrated on training pictures, "
        f"except where a row says “not calibrated”.{class_tokens} Columns: share of the teacher's epochs; last update, "
        "no selection.",
        markdown_table(header, rows),
        f"Without labels, {experiment.probe_share} % of the epochs on tokens and pooled features alone: linear probe "
        f"of the teacher {summary(of_teachers, PROBES[0])} %, of the InLine student {summary(found, PROBES[1])} %.",
    ]
    write_markdown(output / f"linearize_{name}.md", f"Linearizing a ViT: {name}", environment, "\n\n".join(text))


def values_of(found: Mapping[str, Mapping[str, float]], name: str) -> list[float]:
    return [results[name] for results in found.values() if name in results and math.isfinite(results[name])]


def summary(found: Mapping[str, Mapping[str, float]], name: str) -> str:
    """Return the mean over seeds and its standard deviation."""
    values = values_of(found, name)
    if not values:
        return "—"
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def draw(name: str, experiment: Experiment, found: Mapping[str, Mapping[str, float]], output: Path) -> None:
    """Draw top-1 by share of the teacher's epochs."""
    shares = (0, *experiment.shares)
    measured = [
        variant for variant in experiment.variants if any(values_of(found, key(variant, share)) for share in shares)
    ]

    def panel(title: str, shares: Sequence[int]) -> Panel:
        def draw_shares(axes: Axes) -> None:
            for variant in measured:
                places = [(share, values_of(found, key(variant, share))) for share in shares]
                draw_line(axes, VARIANTS[variant][2], [(share, fmean(values)) for share, values in places if values])
            if teacher := values_of(found, "teacher"):
                axes.axhline(fmean(teacher), color=Style("softmax").color, linewidth=1.6)
            axes.set(xlabel="share of the teacher's epochs, %", ylabel="top-1, %")
            light_grid(axes)

        return Panel(title, draw_shares, "Top-1 by share of the teacher's epochs.", 3.6)

    legend = [LegendEntry(variant, VARIANTS[variant][2]) for variant in measured]
    panels = [panel("untrained and trained", shares), panel("trained", shares[1:])]
    chart = Chart(panels, [*legend, TEACHER_ENTRY])
    note = f"{MODEL} on {name}, {experiment.length:g} epochs of the teacher, mean of at most {len(found)} seeds."
    chart.save(
        output, f"linearize_{name}", title=f"Linearizing a ViT: {name}", small_print=note, width=5.4, formats=("png",)
    )


TEACHER_ENTRY = LegendEntry("softmax teacher", Style("softmax"))


def measure_models(output: Path, device: str) -> None:
    """Write images/s and memory of ViT-S and ViT-B and their conversions."""
    rows, cells = [], []
    for name in ("vit_small_patch16_224", "vit_base_patch16_224"):
        converted = timm.create_model(name)
        convert_attention(converted)
        models = {name: timm.create_model(name), f"{name}, InLine": converted}
        cells += measure_speed(models, find_device(device), on_cell=print)
    for cell in cells:
        speed = cell.note if cell.images_per_second is None else f"{cell.images_per_second:,.1f}"
        memory = "—" if cell.peak_bytes is None else f"{cell.peak_bytes / 2**20:,.0f}"
        rows.append([cell.model, f"{cell.size}²", str(cell.batch), speed, memory])
    environment = describe_environment()
    write_json(output / "linearize_speed.json", {"environment": environment, "cells": [asdict(cell) for cell in cells]})
    table = markdown_table(["model", "images", "batch", "images/s", "peak MiB"], rows)
    write_markdown(output / "linearize_speed.md", "Converted ViTs against softmax", environment, table)


def collect(places: Sequence[Place]) -> dict[str, dict[str, float]]:
    """Return all results so far, by seed."""
    found: dict[str, dict[str, float]] = {}
    for place in places:
        results = found.setdefault(str(place.seed), {})
        for path in (evaluations_file(place, kind) for kind in EVALUATIONS):
            results |= json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if place.teacher.exists():
            for name, config in (run for rounds in ROUNDS for round_ in rounds for run in student_runs(place, round_)):
                if (outcome := read_outcome(config)) is not None:
                    results[name] = math.nan if outcome.top1 is None else outcome.top1
    return found


EVALUATIONS = {"untrained": evaluate_untrained, "probe": probe}
# Rounds between whose runs the seeds do not alternate.
ROUNDS = ((0,), (1, 2, 3), (4, 5))


def student_commands(places: Sequence[Place], arguments: Sequence[str]) -> list[Command]:
    """Return the commands of all runs and evaluations that are missing, the most important first."""

    def evaluation(kind: str, place: Place) -> Command:
        words = (sys.executable, __file__, *arguments, "--evaluate", kind, "--first-seed", str(place.seed))
        return Command(f"{kind}, seed {place.seed}", words, place.runs / f"{kind}-seed{place.seed}.log")

    commands = [evaluation("untrained", place) for place in places if not evaluations_file(place, "untrained").exists()]
    for place, round_ in ((place, round_) for rounds in ROUNDS for place in places for round_ in rounds):
        commands += [
            run_command(f"{name}, seed {place.seed}", config, is_alone=False)
            for name, config in student_runs(place, round_)
            if read_outcome(config) is None
        ]
        is_due = round_ == (1 if place is places[0] else ROUNDS[-1][-1])  # one seed of it decides
        if is_due and not evaluations_file(place, "probe").exists():
            commands.append(evaluation("probe", place))
    return commands


def main(
    dataset: Annotated[str, typer.Argument(help="digits, cifar10-small, cifar10, tiny-imagenet-100 or speed.")],
    data_dir: Annotated[Path | None, typer.Option(help="Data folder.", exists=True, file_okay=False)] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs. Existing ones are resumed.")] = Path("out/linearize"),
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds.")] = 2,
    first_seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    teacher_seed: Annotated[
        int | None, typer.Option(help="Seed of one teacher for all students.", show_default="a teacher per seed")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 1,
    time_limit: Annotated[float, typer.Option(help="Seconds after which runs are saved and stopped.")] = math.inf,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    only: Annotated[str | None, typer.Option(help="teachers: train no students.")] = None,
    evaluate: Annotated[str | None, typer.Option(help="untrained or probe: used by the script itself.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Setting of all runs; repeatable.")] = None,
) -> None:
    if dataset == "speed":
        measure_models(output, device)
        return
    if dataset not in EXPERIMENTS:
        raise typer.BadParameter(f"expected one of {', '.join(EXPERIMENTS)} or speed, got {dataset!r}")
    experiment, stop_at = EXPERIMENTS[dataset], time.monotonic() + time_limit
    own = (f"run.device={device}", *(set_ or ()))
    numbers = range(first_seed, first_seed + (1 if evaluate else seeds))
    places = [
        Place(experiment, data_dir, runs / dataset, seed, seed if teacher_seed is None else teacher_seed, own, at_once)
        for seed in numbers
    ]
    one_teacher = teacher_seed is not None
    teachers = [replace(place, seed=place.teacher_seed) for place in (places[:1] if one_teacher else places)]
    if evaluate is not None:
        (place,) = places
        write_json(evaluations_file(place, evaluate), EVALUATIONS[evaluate](place))
        return

    def finish(commands: Sequence[Command]) -> Iterator[Command]:
        left = None if math.isinf(time_limit) else max(1.0, stop_at - time.monotonic())
        for ended in run_side_by_side(commands, at_once=at_once, time_limit=left):
            print(f"{ended.command.name}: {ended.outcome}, {ended.seconds:.0f} s", flush=True)
            if ended.outcome == "done":
                yield ended.command
            elif ended.outcome == "failed":
                print(ended.command.last_lines(), flush=True)

    try:
        for stage in teachers[0].stages:
            commands = teacher_commands(teachers, stage)
            for command in finish(list(commands)):
                place = commands[command]
                place.finish_stage(stage)
                outcome = read_outcome(place.stage_settings(stage))
                if outcome is not None and outcome.top1 is not None:
                    print(f"{command.name}: top-1 {outcome.top1:.2f} %", flush=True)
        trained = [place for place in places if place.teacher.exists()]
        if only == "teachers":
            return
        words = [dataset, "--runs", str(runs), "--device", device, "--at-once", str(at_once)]
        words += [] if teacher_seed is None else ["--teacher-seed", str(teacher_seed)]
        words += [f"--set={text}" for text in set_ or ()]
        words += [] if data_dir is None else ["--data-dir", str(data_dir)]
        for _ in finish(student_commands(trained, words)):
            write_results(dataset, experiment, collect(places), output, one_teacher=one_teacher)
        found = collect(places)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if not any(found.values()):
        print("no student is finished; the same command resumes")
        return
    write_results(dataset, experiment, found, output, one_teacher=one_teacher)
    draw(dataset, experiment, found, output)
    print((output / f"linearize_{dataset}.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
