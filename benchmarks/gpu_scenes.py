"""InLine against its softmax twin, trained on generated scenes: box AP50, mask AP50 and mIoU, two seeds, on a GPU.

    python benchmarks/gpu_scenes.py --work DIR [--tasks detection] [--seeds 0,1] [--at-once 4] [--time-limit 480]
    python benchmarks/gpu_scenes.py --smoke --work DIR --output DIR       # a few updates on a CPU, as a test

Mask R-CNN and Semantic FPN on a pyramid with InLine or softmax attention over the whole map, from random weights, with
one recipe, on the same scenes in the same order. Each run is its own `inline train`; several run in parallel, because
one alone does not keep a GPU busy. Their output is in DIR/*.log. Runs in the results are not repeated, so that several
calls complete one table; other settings start a new one. Needs faster-coco-eval and torchmetrics. Results:
benchmarks/results/gpu_scenes.{json,md}.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from inline_attention.benchmark.environment import combined_environment, describe_environment
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.benchmark.side_by_side import Command, run_side_by_side
from inline_attention.data.scenes import ScenesPlan, write_scenes
from inline_attention.engine.config import TrainConfig, to_yaml, with_overrides
from inline_attention.engine.reporting import SUMMARY

RESULTS = Path(__file__).parent / "results"
NAME = "gpu_scenes"
ATTENTIONS = ("inline", "softmax")
FIGURES = {"detection": ("box_ap50", "mask_ap50", "box_ap", "mask_ap"), "segmentation": ("miou", "aacc")}
LABELS = {"box_ap50": "box AP50", "mask_ap50": "mask AP50", "box_ap": "box AP", "mask_ap": "mask AP", "miou": "mIoU",
          "aacc": "aAcc"}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Settings that all jobs share.

    Attributes:
        backbone: Name of the InLine model.
        images: Scenes to train on.
        validation_images: Scenes to measure on.
        pixels: Longer side of a scene.
        batch_size: Images per update.
        lr: Highest learning rate.
    """

    backbone: str = "inline_pvt_tiny"
    images: int = 3000
    validation_images: int = 300
    pixels: int = 256
    batch_size: int = 16
    lr: float = 1e-3


@dataclass(frozen=True)
class Job:
    """A run to do."""

    task: str
    updates: int
    attention: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task}-{self.updates}-{self.attention}-{self.seed}"


@dataclass(frozen=True)
class Run:
    """A finished run; figures in percent."""

    task: str
    updates: int
    attention: str
    seed: int
    figures: dict[str, float]
    seconds: float
    environment: dict[str, str]

    @property
    def job(self) -> Job:
        """The job of this run."""
        return Job(self.task, self.updates, self.attention, self.seed)


def scenes_folder(plan: Plan, work: Path) -> Path:
    """Return the folder of the scenes of a plan."""
    return work / f"scenes-{plan.images}-{plan.validation_images}-{plan.pixels}"


def config_of(plan: Plan, job: Job, work: Path, device: str, workers: int) -> TrainConfig:
    """Return the settings of a run."""
    side, updates = plan.pixels * 4 // 5 // 32 * 32, job.updates
    of_task = {
        "detection": [
            "data.dataset=coco", f"detection.shorter_side={side}", f"detection.longest_side={plan.pixels}",
            "detection.smallest_anchor=16", "detection.sampled_boxes=128",
        ],
        "segmentation": [
            "data.dataset=pairs", "data.reduce_zero_label=true", f"segmentation.crop={side}",
            "segmentation.scale=[0.75, 1.5]",
        ],
    }[job.task]  # fmt: skip
    epochs = -(-updates * plan.batch_size // plan.images)
    return with_overrides(
        TrainConfig(),
        [
            f"task.name={job.task}", *of_task, f"data.dir={scenes_folder(plan, work)}", f"data.workers={workers}",
            f"model.name={plan.backbone.replace('inline', job.attention)}", "model.drop_path=0.0",
            f"training.updates={updates}", f"training.batch_size={plan.batch_size}", f"training.seed={job.seed}",
            f"training.validation_interval={max(1, epochs)}", "training.clip_grad=5.0", f"run.device={device}",
            f"training.amp={'bf16' if device == 'cuda' else 'off'}", f"optimizer.lr={plan.lr}",
            "optimizer.lr_base_size=null", f"schedule.warmup_updates={updates // 10}", "schedule.warmup_lr=1e-6",
            "schedule.min_lr=1e-6", "logging.tensorboard=false", "checkpoints.keep_last=1", "checkpoints.keep_best=0",
            f"run.output={work}", f"run.experiment={job}",
        ],
    )  # fmt: skip


def command_of(config: TrainConfig, job: Job, work: Path) -> Command:
    """Return the command that trains and evaluates once."""
    shutil.rmtree(work / str(job), ignore_errors=True)  # left by a call that was cut short
    settings = work / f"{job}.yaml"
    settings.write_text(to_yaml(config), encoding="utf-8")
    arguments = (sys.executable, "-m", "inline_attention", "train", str(settings))
    return Command(str(job), arguments, work / f"{job}.log")


def figures_of(job: Job, work: Path) -> dict[str, float]:
    """Return the figures of the last evaluation of a run."""
    with (work / str(job) / SUMMARY).open(newline="", encoding="utf-8") as file:
        *_, last = csv.DictReader(file)
    return {name: float(last[name]) for name in FIGURES[job.task]}


def earlier_runs(path: Path, plan: Plan) -> list[Run]:
    """Return the runs of the same plan in the results."""
    if not path.is_file():
        return []
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return [Run(**run) for run in content["runs"]] if content["plan"] == asdict(plan) else []


def write(path: Path, plan: Plan, runs: Sequence[Run]) -> None:
    """Write both files with the runs so far."""
    environment = combined_environment(run.environment for run in runs)
    write_json(
        path.with_suffix(".json"),
        {"environment": environment, "plan": asdict(plan), "runs": [asdict(run) for run in runs]},
    )
    parts = [
        f"{plan.images:,} scenes of {plan.pixels} pixels to train on, {plan.validation_images} to measure on; updates "
        f"of {plan.batch_size} images from random weights; backbone {plan.backbone} and its softmax twin."
    ]
    for task, updates in sorted({(run.task, run.updates) for run in runs}):
        names = FIGURES[task]
        of_task = [run for run in runs if (run.task, run.updates) == (task, updates)]
        rows = [
            [run.attention, str(run.seed), *(f"{run.figures[name]:.2f}" for name in names)]
            for run in sorted(of_task, key=lambda run: (run.attention, run.seed))
        ]
        for attention in ATTENTIONS:
            same = [run for run in of_task if run.attention == attention]
            if len(same) > 1:
                means = (statistics.mean(run.figures[name] for run in same) for name in names)
                rows.append([attention, "mean", *(f"{mean:.2f}" for mean in means)])
        header = ["attention", "seed", *(f"{LABELS[name]} %" for name in names)]
        parts += [f"## {task.capitalize()}, {updates:,} updates", markdown_table(header, rows)]
    parts.append("Several runs share the machine: their times say nothing about attention.")
    write_markdown(path.with_suffix(".md"), "InLine and softmax trained on scenes", environment, "\n\n".join(parts))


def main(
    work: Annotated[Path, typer.Option(help="Folder for scenes and runs.")],
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    tasks: Annotated[str, typer.Option(help="detection, segmentation or both.")] = "detection,segmentation",
    seeds: Annotated[str, typer.Option(help="Random seeds, such as 0,1.")] = "0,1",
    detection_updates: Annotated[int, typer.Option(min=1, help="Updates of a detector.")] = 1200,
    segmentation_updates: Annotated[int, typer.Option(min=1, help="Updates of a segmenter.")] = 1200,
    at_once: Annotated[int, typer.Option(min=1, help="Runs in parallel.")] = 4,
    time_limit: Annotated[float | None, typer.Option(min=1, help="Seconds after which runs are stopped.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few updates on a CPU, as a test.")] = False,
) -> None:
    plan, device = Plan(), "cuda"
    updates = {"detection": detection_updates, "segmentation": segmentation_updates}
    if smoke:
        plan, device = Plan(images=32, validation_images=4, pixels=96, batch_size=2), "cpu"
        updates = dict.fromkeys(FIGURES, 2)
    elif not torch.cuda.is_available():
        raise typer.BadParameter("PyTorch finds no GPU here; --smoke tries the script on a CPU")
    if unknown := set(tasks.split(",")) - set(FIGURES):
        raise typer.BadParameter(f"expected tasks of {', '.join(FIGURES)}, got {', '.join(sorted(unknown))}")
    cores = os.cpu_count() or 1
    start = time.monotonic()
    if not scenes_folder(plan, work).exists():
        scenes = ScenesPlan(plan.images, plan.validation_images, plan.pixels)
        write_scenes(scenes_folder(plan, work), scenes, workers=cores)
        print(f"scenes: {time.monotonic() - start:.0f} s", flush=True)
    environment = describe_environment()
    runs = earlier_runs(output / f"{NAME}.json", plan)
    # Twins one after the other, so that a call that is cut short leaves pairs.
    jobs = [
        job
        for task in tasks.split(",")
        for seed in map(int, seeds.split(","))
        for attention in ATTENTIONS
        if (job := Job(task, updates[task], attention, seed)) not in {run.job for run in runs}
    ]
    workers = max(1, cores // at_once - 1)  # one core of each share is for the run itself
    commands = {command_of(config_of(plan, job, work, device, workers), job, work): job for job in jobs}
    complete = True
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more would compete with the workers
    for ended in run_side_by_side(
        list(commands),
        at_once=at_once,
        time_limit=None if time_limit is None else max(1.0, start + time_limit - time.monotonic()),
    ):
        job, seconds = commands[ended.command], ended.seconds
        if ended.outcome == "done":
            runs.append(Run(**asdict(job), figures=figures_of(job, work), seconds=seconds, environment=environment))
            print(f"{job}: {seconds:.0f} s, {runs[-1].figures}", flush=True)
            write(output / NAME, plan, runs)
            continue
        complete = False
        print(f"{job}: {ended.outcome} after {seconds:.0f} s", flush=True)
        if ended.outcome != "not started":
            print(ended.command.last_lines(), flush=True)
    if not complete:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
