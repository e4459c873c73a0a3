"""InLine against its softmax twin, trained on generated scenes: box AP50, mask AP50 and mIoU, two seeds, on a GPU.

    python benchmarks/gpu_scenes.py --work DIR [--tasks detection] [--seeds 0,1] [--updates 3000] [--output DIR]
    python benchmarks/gpu_scenes.py --smoke --work DIR --output DIR       # a few updates on a CPU: does it run?

Mask R-CNN and Semantic FPN on a pyramid whose attention is InLine or softmax over the whole map, from random weights,
by one recipe, on the same scenes in the same order. A run that is in the results is not made again, so that several
calls, each on a machine lent for a while, make up one table; other settings begin a new one. Needs faster-coco-eval and
torchmetrics. Results: benchmarks/results/gpu_scenes.{json,md}.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from inline_attention.analysis.benchmark.environment import describe_environment
from inline_attention.analysis.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.data.scenes import ScenesPlan, write_scenes
from inline_attention.engine.config import TrainConfig, with_overrides
from inline_attention.engine.running import train

RESULTS = Path(__file__).parent / "results"
NAME = "gpu_scenes"
ATTENTIONS = ("inline", "softmax")
FIGURES = {"detection": ("box_ap50", "mask_ap50", "box_ap", "mask_ap"), "segmentation": ("miou", "aacc")}
LABELS = {"box_ap50": "box AP50", "mask_ap50": "mask AP50", "box_ap": "box AP", "mask_ap": "mask AP", "miou": "mIoU",
          "aacc": "aAcc"}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """All that results depend on, besides task, attention and seed.

    Attributes:
        backbone: Name of the InLine model.
        images: Scenes to train on.
        validation_images: Scenes to measure on.
        pixels: Of the longer side of a scene.
        updates: Of the weights.
        batch_size: Images of an update.
        lr: Learning rate at its highest.
    """

    backbone: str = "inline_pvt_tiny"
    images: int = 4000
    validation_images: int = 400
    pixels: int = 320
    updates: int = 3000
    batch_size: int = 16
    lr: float = 4e-4


@dataclass(frozen=True)
class Run:
    """One training run and what came of it; figures in percent."""

    task: str
    attention: str
    seed: int
    figures: dict[str, float]
    seconds: float
    images_per_second: float


def config_of(plan: Plan, task: str, attention: str, seed: int, work: Path, device: str) -> TrainConfig:
    """The settings of a run."""
    side = plan.pixels * 4 // 5 // 32 * 32
    of_task = {
        "detection": [
            "data.dataset=coco", f"detection.shorter_side={side}", f"detection.longest_side={plan.pixels}",
            "detection.smallest_anchor=16",
        ],
        "segmentation": [
            "data.dataset=pairs", "data.reduce_zero_label=true", f"segmentation.crop={side}",
            "segmentation.scale=[0.75, 1.5]",
        ],
    }[task]  # fmt: skip
    epochs = -(-plan.updates * plan.batch_size // plan.images)
    return with_overrides(
        TrainConfig(),
        [
            f"task.name={task}", *of_task, f"data.dir={work / 'scenes'}", f"data.workers={min(8, os.cpu_count() or 1)}",
            f"model.name={plan.backbone.replace('inline', attention)}", "model.drop_path=0.0",
            f"training.updates={plan.updates}", f"training.batch_size={plan.batch_size}", f"training.seed={seed}",
            f"training.validation_interval={max(1, epochs)}", "training.clip_grad=5.0", f"run.device={device}",
            f"training.amp={'bf16' if device == 'cuda' else 'off'}", f"optimizer.lr={plan.lr}",
            "optimizer.lr_base_size=null", f"schedule.warmup_updates={plan.updates // 10}", "schedule.warmup_lr=1e-6",
            "schedule.min_lr=1e-6", "logging.tensorboard=false", "checkpoints.keep_last=1", "checkpoints.keep_best=0",
            f"run.output={work}", f"run.experiment={task}-{attention}-{seed}",
        ],
    )  # fmt: skip


def measure(plan: Plan, task: str, attention: str, seed: int, work: Path, device: str) -> Run:
    """Train and evaluate once."""
    shutil.rmtree(work / f"{task}-{attention}-{seed}", ignore_errors=True)  # of a call that was cut short
    start = time.perf_counter()
    _, metrics = train(config_of(plan, task, attention, seed, work, device))
    seconds = time.perf_counter() - start
    assert metrics is not None, "the last epoch is always evaluated"
    figures = {name: metrics.figures[name] for name in FIGURES[task]}
    return Run(task, attention, seed, figures, seconds, plan.updates * plan.batch_size / seconds)


def earlier_runs(path: Path, plan: Plan) -> list[Run]:
    """Runs of the same plan that are in the results."""
    if not path.is_file():
        return []
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return [Run(**run) for run in content["runs"]] if content["plan"] == asdict(plan) else []


def write(path: Path, plan: Plan, runs: Sequence[Run], environment: dict[str, str]) -> None:
    """Both files, as far as there are runs."""
    write_json(
        path.with_suffix(".json"),
        {"environment": environment, "plan": asdict(plan), "runs": [asdict(run) for run in runs]},
    )
    parts = [
        f"{plan.images:,} scenes of {plan.pixels} pixels to train on, {plan.validation_images} to measure on; "
        f"{plan.updates:,} updates of {plan.batch_size} images from random weights; backbone {plan.backbone} and its "
        "softmax twin."
    ]
    for task, names in FIGURES.items():
        of_task = [run for run in runs if run.task == task]
        if not of_task:
            continue
        rows = [
            [run.attention, str(run.seed), *(f"{run.figures[name]:.2f}" for name in names), f"{run.seconds:.0f}",
             f"{run.images_per_second:,.0f}"]
            for run in sorted(of_task, key=lambda run: (run.attention, run.seed))
        ]  # fmt: skip
        for attention in ATTENTIONS:
            same = [run for run in of_task if run.attention == attention]
            if len(same) > 1:
                means = (statistics.mean(run.figures[name] for run in same) for name in names)
                rows.append([attention, "mean", *(f"{mean:.2f}" for mean in means), "", ""])
        header = ["attention", "seed", *(f"{LABELS[name]} %" for name in names), "seconds", "images/s"]
        parts += [f"## {task.capitalize()}", markdown_table(header, rows)]
    parts.append("Seconds include reading, evaluation and checkpoints; images/s are training images over all of them.")
    write_markdown(path.with_suffix(".md"), "InLine and softmax trained on scenes", environment, "\n\n".join(parts))


def main(
    work: Annotated[Path, typer.Option(help="Folder for scenes and runs.")],
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    tasks: Annotated[str, typer.Option(help="detection, segmentation or both.")] = "detection,segmentation",
    seeds: Annotated[str, typer.Option(help="Of weights and order, such as 0,1.")] = "0,1",
    updates: Annotated[int, typer.Option(min=1, help="Of the weights, in each run.")] = Plan.updates,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few updates on a CPU: does it run?")] = False,
) -> None:
    plan, device = Plan(updates=updates), "cuda"
    if smoke:
        plan, device = Plan(images=8, validation_images=2, pixels=96, updates=2, batch_size=2), "cpu"
    elif not torch.cuda.is_available():
        raise typer.BadParameter("PyTorch finds no GPU here; --smoke tries the script on a CPU")
    if not (work / "scenes").exists():
        scenes = ScenesPlan(plan.images, plan.validation_images, plan.pixels)
        write_scenes(work / "scenes", scenes, workers=1 if smoke else os.cpu_count() or 1)
    environment = describe_environment()
    runs = earlier_runs(output / f"{NAME}.json", plan)
    done = {(run.task, run.attention, run.seed) for run in runs}
    # Twins one after the other: a call that is cut short leaves pairs.
    for task in tasks.split(","):
        for seed in map(int, seeds.split(",")):
            for attention in ATTENTIONS:
                if (task, attention, seed) not in done:
                    runs.append(measure(plan, task, attention, seed, work, device))
                    print(runs[-1], flush=True)
                    write(output / NAME, plan, runs, environment)


if __name__ == "__main__":
    typer.run(main)
