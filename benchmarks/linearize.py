"""Linearize a softmax ViT: accuracy of students by share of the teacher's epochs, with and without labels; speed.

    python benchmarks/linearize.py digits
    python benchmarks/linearize.py cifar10 --data-dir DIR [--runs out/linearize] [--time-limit 560] [--seeds 2]
    python benchmarks/linearize.py tiny-imagenet-100 --data-dir DIR
    python benchmarks/linearize.py speed

A softmax ViT of timm is trained by the engine. Its attention is replaced (InLine or linear, with and without the local
3×3 term), and students are distilled for 0 to 25 % of the teacher's epochs. Without labels, the student of a backbone
without head matches tokens alone, and a linear probe is trained on teacher and student. After the time limit or a kill,
the same command resumes; finished runs are not repeated. `speed` compares ViT-S and ViT-B with their conversions.

DIR of cifar10: cifar-10-binary.tar.gz, packed or unpacked, or folders train/CLASS and test/CLASS. Of tiny-imagenet-100:
folders train/CLASS and validation/CLASS. Results: benchmarks/results/linearize_DATASET.{json,md,png}, rewritten after
every run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import timm
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from inline_attention import convert_attention
from inline_attention.ablation.runs import UnusableRunError, finish_run, run_folder
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.linearized import measure_speed
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.engine.checkpoint_format import find_weights
from inline_attention.engine.config import ConfigError, TrainConfig, with_overrides
from inline_attention.engine.evaluate import evaluate_task
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.processes import joined_processes
from inline_attention.engine.train import build_task, train
from inline_attention.models.checkpoints import open_checkpoint, save_weights
from inline_attention.recipes import get_recipe
from inline_attention.support.figures import Axes, Chart, LegendEntry, Panel, Style, draw_line, light_grid
from inline_attention.tasks.task import find_device

RESULTS = Path(__file__).parent / "results"
MODEL = "vit_tiny_patch16_224"
# name: (attention, options of the layer, style of its line)
VARIANTS: dict[str, tuple[str, dict[str, Any], Style]] = {
    "InLine": ("inline", {}, Style("inline")),
    "InLine without 3×3": ("inline", {"local_residual": False}, Style("inline", 1)),
    "linear with 3×3": ("linear", {"local_residual": True}, Style("linear")),
    "linear": ("linear", {}, Style("linear", 1)),
}
LONG = (
    "training.batch_size=512", "training.total_batch_size=512", "training.validation_interval=5",
    "optimizer.lr=1e-3", "optimizer.lr_base_size=512", "schedule.warmup_epochs=5", "augmentation.mixup=0.8",
    "augmentation.cutmix=1.0", "augmentation.auto_augment=rand-m9-mstd0.5-inc1", "checkpoints.keep_last=1",
    "checkpoints.interval_epochs=5",
)  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """A dataset, the teacher's settings, and the students' lengths in percent of the teacher's epochs."""

    recipe: str
    epochs: int
    overrides: tuple[str, ...]
    shares: tuple[int, ...] = (1, 5, 10, 25)
    probe_share: int = 10

    def student_epochs(self, share: int) -> int:
        """Return the epochs of a student."""
        return max(1, round(self.epochs * share / 100))


EXPERIMENTS = {
    "digits": Experiment(
        "digits",
        60,
        (
            "model.arguments={patch_size: 2, embed_dim: 64, num_heads: 2, depth: 3}", "training.batch_size=64",
            "training.total_batch_size=64", "optimizer.lr=1e-3", "training.validation_interval=60",
            "checkpoints.keep_last=1", "checkpoints.interval_epochs=60",
        ),
        shares=(2, 10),
    ),
    "cifar10": Experiment(
        "cifar10", 160, ("model.arguments={patch_size: 2}", "model.img_size=32", *LONG), shares=(1, 5, 10, 25)
    ),
    "tiny-imagenet-100": Experiment(
        "cifar10",
        120,
        (
            "model.arguments={patch_size: 4}", "model.img_size=64", "model.num_classes=100", "data.dataset=folder",
            "augmentation.crop_padding=8", *LONG,
        ),
    ),
}  # fmt: skip
# Students differ from their teacher in these; data and augmentation are the same.
STUDENT_SECTIONS = ("optimizer", "schedule", "loss")


def teacher_settings(
    experiment: Experiment, data_dir: Path | None, runs: Path, seed: int, overrides: Sequence[str]
) -> TrainConfig:
    """Return the settings of the softmax teacher."""
    data = [] if data_dir is None else [f"data.dir={data_dir}", f"data.workers={max(1, (os.cpu_count() or 2) - 1)}"]
    if experiment.recipe == "cifar10" and data_dir is not None and (data_dir / "train").is_dir():
        data += ["data.dataset=folder", *(["data.val_split=test"] if (data_dir / "test").is_dir() else [])]
    fixed = [f"model.name={MODEL}", "model.drop_path=null", f"training.epochs={experiment.epochs}"]
    place = [f"run.output={runs}", f"run.experiment=teacher-seed{seed}", f"training.seed={seed}"]
    quiet = ["logging.tensorboard=false"]
    config = get_recipe(experiment.recipe).config
    return with_overrides(config, [*fixed, *experiment.overrides, *data, *quiet, *overrides, *place])


def student_settings(teacher: TrainConfig, weights: Path, variant: str, epochs: int, **match: Any) -> TrainConfig:
    """Return the settings of a student that learns from a teacher's weights."""
    recipe = get_recipe("linearize_classifier").config
    attention, options, _ = VARIANTS[variant]
    model: Any = replace(
        teacher.model, initial_checkpoint=str(weights), attention=attention, conversion_options=options
    )
    name = f"{variant.replace(' ', '_').replace('×', 'x')}-{epochs}-{match.get('match', 'logits')}"
    return replace(
        teacher,
        **{section: getattr(recipe, section) for section in STUDENT_SECTIONS},
        model=model,
        run=replace(teacher.run, experiment=f"{name}-seed{teacher.training.seed}"),
        distillation=replace(recipe.distillation, **match),
        training=replace(teacher.training, epochs=epochs, validation_interval=epochs, clip_grad=1.0),
    )


def top1_of(config: TrainConfig) -> float:
    """Return the accuracy of a task's model before any training."""
    with joined_processes(config.run.device) as processes:
        task = build_task(config)
        data = task.open()
        training = config.training
        arguments = (processes, config.data, training.batch_size, training.amp)
        return evaluate_task(task, data.validation, data.class_names, *arguments).figures["top1"]


def measure_seed(
    experiment: Experiment, teacher: TrainConfig, stop_at: float, found: dict[str, Any]
) -> Iterator[tuple[str, float]]:
    """Yield each result of a seed as it comes: its name and top-1. Results that are in `found` are not repeated."""
    outcome = finish_run(teacher, stop_at=stop_at, on_epoch=show)
    if outcome.top1 is None:
        raise UnusableRunError(f"the teacher failed: {outcome.failure}")
    yield "teacher", outcome.top1
    weights = find_weights(run_folder(teacher) / "checkpoints" / "last")
    for variant in VARIANTS:
        if key(variant, 0) not in found:
            yield key(variant, 0), top1_of(student_settings(teacher, weights, variant, 1))
    for share in experiment.shares:
        for variant in VARIANTS:
            config = student_settings(teacher, weights, variant, experiment.student_epochs(share))
            outcome = finish_run(config, stop_at=stop_at, on_epoch=show)
            yield key(variant, share), math.nan if outcome.top1 is None else outcome.top1
    if "probe of the student" not in found:
        yield from probe(experiment, teacher, weights, stop_at)


def key(variant: str, share: int) -> str:
    return f"{variant}, {share} %"


def probe(experiment: Experiment, teacher: TrainConfig, weights: Path, stop_at: float) -> Iterator[tuple[str, float]]:
    """Distill a backbone without head on features alone; yield the linear probes of teacher and student."""
    file = open_checkpoint(weights)
    backbone = weights.parents[2] / f"backbone-seed{teacher.training.seed}.safetensors"
    arguments = {**json.loads(file.metadata["model_arguments"]), "num_classes": 0}
    notes = {"model": teacher.model.name, "model_arguments": json.dumps(arguments)}
    headless = {name: value for name, value in file.weights.items() if not name.startswith("head.")}
    save_weights(headless, backbone, metadata=notes)
    epochs = experiment.student_epochs(experiment.probe_share)
    config = student_settings(teacher, backbone, "InLine", epochs, match="features")
    config = replace(config, augmentation=replace(config.augmentation, mixup=0.0, cutmix=0.0))
    config = replace(config, run=replace(config.run, resume="auto"))

    def epoch_done(row: Mapping[str, Any]) -> None:
        show(row)
        if time.monotonic() > stop_at:
            raise InterruptedBySignalError(15)

    folder, _ = train(config, on_epoch=epoch_done)
    trained = replace(config.model, initial_checkpoint=str(find_weights(folder)))
    distillation = replace(config.distillation, teacher=str(backbone))
    with joined_processes(config.run.device) as processes:
        task: Any = build_task(replace(config, model=trained, distillation=distillation))
        student = task.build_model([])
        labelled = build_task(replace(teacher, model=replace(teacher.model, initial_checkpoint=None)))
        data = labelled.open()
        for name, model in (("teacher", task.teacher), ("student", student)):
            yield f"probe of the {name}", linear_probe(model.to(processes.device).eval(), labelled, data, processes)


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


def show(row: Mapping[str, Any]) -> None:
    accuracy = f", top-1 {row['top1']:.2f} %" if "top1" in row else ""
    print(f"  epoch {row['epoch']}, loss {row['train_loss']:.4f}{accuracy}", flush=True)


def write_results(name: str, experiment: Experiment, found: dict[str, dict[str, float]], output: Path) -> None:
    """Write JSON, Markdown and the picture of all seeds so far."""
    environment = describe_environment()
    content = {"environment": environment, "dataset": name, "teacher_epochs": experiment.epochs, "seeds": found}
    write_json(output / f"linearize_{name}.json", content)
    shares = (0, *experiment.shares)
    epochs = ["0", *(str(experiment.student_epochs(share)) for share in experiment.shares)]
    header = ["student", *(f"{share} % ({count} epochs)" for share, count in zip(shares, epochs, strict=True))]
    rows = [[variant, *(summary(found, key(variant, share)) for share in shares)] for variant in VARIANTS]
    text = [
        f"Softmax teacher ({MODEL}), {experiment.epochs} epochs: top-1 {summary(found, 'teacher')} % of the held-out "
        f"pictures, {len(found)} seeds (± standard deviation). Students start from its weights and learn from its "
        "logits, its tokens and the labels. Columns: share of the teacher's epochs.",
        markdown_table(header, rows),
        f"Without labels, {experiment.student_epochs(experiment.probe_share)} epochs on tokens and pooled features "
        f"alone: linear probe of the teacher {summary(found, 'probe of the teacher')} %, of the InLine student "
        f"{summary(found, 'probe of the student')} %.",
    ]
    write_markdown(output / f"linearize_{name}.md", f"Linearizing a ViT: {name}", environment, "\n\n".join(text))
    draw(name, experiment, found, output)


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

    def panel(axes: Axes) -> None:
        for variant, (_, _, style) in VARIANTS.items():
            places = [(share, values_of(found, key(variant, share))) for share in shares]
            draw_line(axes, style, [(share, fmean(values)) for share, values in places if values])
        if teacher := values_of(found, "teacher"):
            axes.axhline(fmean(teacher), color=Style("softmax").color, linewidth=1.6)
        axes.set(xlabel="share of the teacher's epochs, %", ylabel="top-1, %")
        light_grid(axes)

    legend = [LegendEntry(variant, style) for variant, (_, _, style) in VARIANTS.items()]
    chart = Chart([Panel("", panel, "Top-1 by share of the teacher's epochs.", 3.6)], [*legend, TEACHER_ENTRY])
    note = f"{MODEL} on {name}, {experiment.epochs} epochs of the teacher, mean of {len(found)} seeds."
    chart.save(
        output, f"linearize_{name}", title=f"Linearizing a ViT: {name}", small_print=note, width=8.6, formats=("png",)
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


def main(
    dataset: Annotated[str, typer.Argument(help="digits, cifar10, tiny-imagenet-100 or speed.")],
    data_dir: Annotated[Path | None, typer.Option(help="Data folder.", exists=True, file_okay=False)] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs. Existing ones are resumed.")] = Path("out/linearize"),
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds.")] = 2,
    time_limit: Annotated[float, typer.Option(help="Seconds after which runs are saved and stopped.")] = math.inf,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Setting of the teacher; repeatable.")] = None,
) -> None:
    if dataset == "speed":
        measure_models(output, device)
        return
    if dataset not in EXPERIMENTS:
        raise typer.BadParameter(f"expected one of {', '.join(EXPERIMENTS)} or speed, got {dataset!r}")
    experiment, stop_at = EXPERIMENTS[dataset], time.monotonic() + time_limit
    overrides = [f"run.device={device}", *(set_ or ())]
    path = output / f"linearize_{dataset}.json"
    found: dict[str, dict[str, float]] = json.loads(path.read_text())["seeds"] if path.exists() else {}
    try:
        for seed in range(seeds):
            results = found.setdefault(str(seed), {})
            teacher = teacher_settings(experiment, data_dir, runs / dataset, seed, overrides)
            for name, top1 in measure_seed(experiment, teacher, stop_at, results):
                results[name] = top1
                print(f"seed {seed}, {name}: {top1:.2f} %", flush=True)
                write_results(dataset, experiment, found, output)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except InterruptedBySignalError as error:
        print(f"{error}; saved. The same command resumes")
    print(output / f"linearize_{dataset}.md")


if __name__ == "__main__":
    typer.run(main)
