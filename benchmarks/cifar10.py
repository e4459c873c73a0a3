"""CIFAR-10 from scratch: InLine-DeiT-T and its softmax and linear twins, one recipe, several seeds.

    python benchmarks/cifar10.py --data-dir DIR [--runs out/cifar10] [--time-limit 560] [--only softmax:1] [--long]
        [--at-once 3]

All models use the recipe `cifar10` (32×32 pictures as 256 tokens of 2×2 pixels) for the same number of epochs. Runs are
in the folder --runs. After the time limit or a kill, the same command resumes; finished runs are not repeated. Results:
benchmarks/results/cifar10.{json,md}, rewritten after every run.

`--long` trains InLine with one seed for longer, with Muon and more augmentation. Its goal is 92 % in ten minutes.
Results: benchmarks/results/cifar10_long.{json,md}.

DIR contains cifar-10-binary.tar.gz, packed or unpacked, or a folder of pictures per class under train/ and test/.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from inline_attention.ablation.grid import Cell, cell, grid
from inline_attention.ablation.runs import FinishedRun, UnusableRunError, collect, train_cells, train_side_by_side
from inline_attention.ablation.tables import AblationResult, as_markdown, latest_environment, plain_results
from inline_attention.benchmark.results import write_json, write_markdown
from inline_attention.engine.config import ConfigError, TrainConfig, with_overrides
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.recipes import get_recipe

RESULTS = Path(__file__).parent / "results"
ATTENTIONS = ("inline", "softmax", "linear")
LONG = (
    "training.epochs=105",
    "training.batch_size=1024",
    "training.total_batch_size=1024",
    "training.validation_interval=15",
    "model.drop_path=0.0",
    "optimizer.name=muon",
    "optimizer.lr=5e-3",
    "optimizer.lr_base_size=1024",
    "augmentation.mixup=0.8",
    "augmentation.cutmix=1.0",
    "augmentation.mixup_off_epoch=85",
    "augmentation.auto_augment=rand-m9-mstd0.5-inc1",
)
GOAL_TOP1, GOAL_SECONDS = 92.0, 600.0
# Few evaluations and checkpoints: the time between the ends of two epochs is then training time.
SPARSE = ("training.validation_interval=5", "checkpoints.interval_epochs=5", "checkpoints.keep_last=1")


def cifar10_settings(data_dir: Path, compile_model: bool, overrides: Sequence[str], at_once: int = 1) -> TrainConfig:
    """Return the recipe's settings for this data and so many runs at a time."""
    data = [f"data.dir={data_dir}", f"data.workers={max(1, min(8, (os.cpu_count() or 1) // at_once - 1))}"]
    if (data_dir / "train").is_dir():
        data += ["data.dataset=folder", "data.val_split=test"]
    compiling = ("training.compile=true", "training.compile_mode=reduce-overhead") if compile_model else ()
    return with_overrides(get_recipe("cifar10").config, [*data, *SPARSE, *compiling, *overrides])


def describe(config: TrainConfig) -> str:
    training = config.training
    how = f"compiled ({training.compile_mode})" if training.compile else "eager"
    return (
        f"{training.epochs} epochs, batch {training.batch_size}, {how}, {training.amp}; top-1 of the test pictures "
        "after the last epoch; images/s without evaluation, from runs alone on the machine."
    )


def leads(results: Sequence[AblationResult]) -> str:
    """Return InLine's lead over its twins, with the standard error of the difference, and the ratio of speeds."""
    inline, *twins = results
    lines = []
    for twin in twins:
        if inline.top1_mean is None or twin.top1_mean is None:
            continue
        line = f"- InLine against {twin.values['attention']}: {inline.top1_mean - twin.top1_mean:+.2f} points"
        if inline.top1_std is not None and twin.top1_std is not None:
            error = math.hypot(inline.top1_std / inline.seeds**0.5, twin.top1_std / twin.seeds**0.5)
            line += f" (standard error {error:.2f})"
        if inline.images_per_second and twin.images_per_second:
            line += f", {inline.images_per_second / twin.images_per_second:.2f}× its training images/s"
        lines.append(line)
    return "\n".join(lines)


def verdict(result: AblationResult) -> str:
    """Return whether the longer run has met its goal."""
    lines = []
    for outcome in result.runs.values():
        if outcome.top1 is None:
            lines.append(f"- {outcome.failure}")
            continue
        met = outcome.top1 >= GOAL_TOP1 and outcome.seconds <= GOAL_SECONDS
        lines.append(
            f"- {outcome.top1:.2f} % after {outcome.epochs} epochs and {outcome.seconds:.0f} s, including reading, "
            f"compiling and evaluating; the goal of {GOAL_TOP1:g} % within {GOAL_SECONDS:g} s is "
            f"{'met' if met else 'missed'}"
        )
    return "\n".join(lines)


def write_results(
    output: Path, name: str, title: str, config: TrainConfig, results: list[AblationResult], overrides: Sequence[str]
) -> None:
    """Write the results of all finished runs."""
    conclusion = leads(results) if len(results) > 1 else verdict(results[0])
    command = shlex.join(["inline", "train", "cifar10", *(word for text in overrides for word in ("--set", text))])
    body = [describe(config), f"`{command}`", as_markdown(results), conclusion]
    environment = latest_environment(results)
    content = {"environment": environment, "recipe": "cifar10", "overrides": list(overrides)}
    write_json(output / f"{name}.json", {**content, "results": plain_results(results)})
    write_markdown(output / f"{name}.md", title, environment, "\n\n".join(filter(None, body)))


def chosen_runs(only: Sequence[str], seeds: Sequence[int]) -> dict[int, list[str]]:
    """Return the attentions to train by seed, from texts `MODEL:SEED`; all if there are none."""
    if not only:
        return {seed: list(ATTENTIONS) for seed in seeds}
    chosen: dict[int, list[str]] = {}
    for text in only:
        name, _, seed = text.partition(":")
        attention = name.partition("_")[0]
        if attention not in ATTENTIONS or not seed.isdigit() or int(seed) not in seeds:
            known = ", ".join(ATTENTIONS)
            raise typer.BadParameter(f"expected one of {known}, then :SEED from 0 to {seeds[-1]}, got {text!r}")
        chosen.setdefault(int(seed), []).append(attention)
    return chosen


def show(cell: Cell, seed: int, row: Mapping[str, Any]) -> None:
    accuracy = f", top-1 {row['top1']:.2f} %" if "top1" in row else ""
    print(f"{cell.label}, seed {seed}: epoch {row['epoch']}, loss {row['train_loss']:.3f}{accuracy}", flush=True)


def train(
    cells: Sequence[Cell], chosen: Mapping[int, Sequence[str]], runs: Path, stop_at: float, at_once: int
) -> Iterator[FinishedRun]:
    """Train the chosen runs seed by seed, or several at a time."""
    if at_once == 1:
        for seed, attentions in chosen.items():
            todo = [item for item in cells if item.values["attention"] in attentions]
            yield from train_cells(todo, [seed], runs, stop_at=stop_at, on_epoch=show)
        return
    everything = {name for attentions in chosen.values() for name in attentions}
    if any(set(attentions) != everything for attentions in chosen.values()):
        raise typer.BadParameter("--at-once takes the same models with every seed")
    todo = [item for item in cells if item.values["attention"] in everything]
    limit = None if math.isinf(stop_at) else max(1.0, stop_at - time.monotonic())
    yield from train_side_by_side(todo, list(chosen), runs, at_once=at_once, time_limit=limit, on_trouble=print)


def main(
    data_dir: Annotated[Path, typer.Option(help="Folder of CIFAR-10.", exists=True, file_okay=False)],
    runs: Annotated[Path, typer.Option(help="Folder of the runs. Existing ones are resumed.")] = Path("out/cifar10"),
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per model.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="MODEL:SEED, such as softmax:1; repeatable.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Do the longer run of InLine instead.")] = False,
    compile_model: Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile.")] = True,
    time_limit: Annotated[float, typer.Option(help="Seconds after which runs are saved and stopped.")] = math.inf,
    at_once: Annotated[int, typer.Option(min=1, help="Runs in parallel. With several, speeds mean nothing.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Setting as key=value; repeatable.")] = None,
) -> None:
    stop_at = time.monotonic() + time_limit
    overrides = [*(LONG if long else ()), *(set_ or ())]
    name, title = ("cifar10_long", "CIFAR-10: a longer run of InLine") if long else ("cifar10", "CIFAR-10: three twins")
    try:
        config = cifar10_settings(data_dir, compile_model, overrides, at_once)
        if long:
            cells, seeds, chosen = [cell(config, {"attention": "inline"})], 1, {0: ["inline"]}
            runs = runs / "long"
        else:
            cells, chosen = grid(config, {"attention": ATTENTIONS}), chosen_runs(only or [], range(seeds))
        for item, seed, outcome in train(cells, chosen, runs, stop_at, at_once):
            found = outcome.failure or f"{outcome.top1:.2f} %"
            print(f"finished {item.label}, seed {seed}: {found}, {outcome.seconds:.0f} s", flush=True)
            write_results(output, name, title, config, collect(cells, range(seeds), runs), overrides)
    except (ConfigError, UnusableRunError) as error:
        raise typer.BadParameter(str(error)) from error
    except InterruptedBySignalError as error:
        print(f"{error}; saved. The same command resumes")
    print(output / f"{name}.md")


if __name__ == "__main__":
    typer.run(main)
