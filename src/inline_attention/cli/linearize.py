"""`inline linearize`: replace the softmax attention of a trained model, distill, and print what it cost and gained."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from inline_attention.cli.options import parse_size
from inline_attention.cli.printing import counting, fail, make_console, make_table, say
from inline_attention.cli.train import Settings

if TYPE_CHECKING:
    from rich.table import Table

    from inline_attention.benchmark.linearized import SpeedCell
    from inline_attention.engine.config import TrainConfig
    from inline_attention.engine.linearize import Linearized

OUTPUT = "out/linearize"
ANALYZED_IMAGES = 64
TITLES = {"top1": "top-1 %", "top5": "top-5 %", "loss": "loss", "token_r2": "tokens, R² %", "output_r2": "output, R² %"}


def parse_kept(text: str) -> int | list[int]:
    """Return how many blocks keep softmax, given as one number, or which ones, given as a list."""
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isdecimal() for part in parts):
        message = f"expected how many blocks, such as 2, or which ones, from 0, such as 4,8 (4, for one), got {text!r}"
        raise typer.BadParameter(message, param_hint="--keep-softmax")
    return sorted({int(part) for part in parts}) if "," in text else int(text)


def linearize(
    context: typer.Context,
    model: Annotated[
        str, Argument(help="timm model, run of `inline train`, weights file or hub folder.", show_default=False)
    ],
    features: Annotated[bool, Option("--features", help="Match features on pictures without labels.")] = False,
    size: Annotated[
        str | None, Option(help="Image size to deploy at: 512, or 384x640.", show_default="the teacher's")
    ] = None,
    keep_softmax: Annotated[
        str | None, Option(help="Blocks that keep softmax: 4,8; or 2, the two that lose most.", show_default="none")
    ] = None,
    attention_epochs: Annotated[int, Option(min=0, help="Epochs of a first phase on each attention's output.")] = 0,
    speed: Annotated[bool, Option("--speed/--no-speed", help="Measure images/s and memory by image size.")] = True,
    settings: Settings = None,
) -> None:
    """Replace softmax by InLine attention in a trained model: `inline linearize MODEL --data-dir DIR`.

    The softmax model is the teacher: its conversion learns from its logits, tokens and the labels, or with --features
    from its tokens alone. The flags of `inline train` apply: --epochs, --data-dir, -b, --lr, --device, --output,
    --experiment, --resume and others.
    """
    pixels, kept = None if size is None else parse_size(size), 0 if keep_softmax is None else parse_kept(keep_softmax)
    from inline_attention.cli.flags import overrides_of
    from inline_attention.engine.config import with_overrides
    from inline_attention.engine.interruption import InterruptedBySignalError
    from inline_attention.engine.linearize import linearize as run
    from inline_attention.engine.processes import joined_processes

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    given = [*overrides_of(context.args), *(settings or ())]
    given += [] if pixels is None else [f"model.img_size={json.dumps([pixels[0], pixels[-1]])}"]
    given += [f"model.keep_softmax={kept}"] if isinstance(kept, list) else []
    config = read_linearize_settings(model, given, features=features)
    is_main = int(os.environ.get("RANK", "0")) == 0
    with joined_processes(config.run.device, config.distributed.timeout_minutes):  # once: a second time can fail
        if isinstance(kept, int) and kept:
            blocks = _blocks_to_keep(config, kept, is_main=is_main)
            config = with_overrides(config, [f"model.keep_softmax={blocks}"])
        try:
            result = run(config, attention_epochs=attention_epochs, on_note=say)
        except InterruptedBySignalError as error:
            say(f"{error}; saved. To resume, add --resume auto to the command", err=True)
            raise typer.Exit(error.exit_code) from error
        except OSError as error:
            fail(f"{error}; make room or make it writable, then add --resume auto to the command")
    if not is_main:
        return
    cells = _measure_speed(result, config) if speed else []
    make_console().print(result_table(result, cells))
    name, before, after = result.first_figures()
    if after < before:
        advice = "train longer (--epochs), on more pictures, or with a lower --lr"
        say(f"{TITLES.get(name, name)} is lower than without training ({before:.2f} → {after:.2f}): {advice}")
    if result.weights is None:
        say("no weights were saved: nothing was trained")
    elif result.has_head:
        say(f"Weights written to {result.weights}: `inline predict PICTURES -c {result.weights}` uses them")
    else:
        use = f"`inline train finetune --initial-checkpoint {result.folder} --data-dir DIR` adds a head"
        say(f"Weights written to {result.weights}: {use}")


def _blocks_to_keep(config: TrainConfig, count: int, *, is_main: bool) -> list[int]:
    """Return the blocks that change the features most when they alone are converted, or those of the run to resume."""
    from inline_attention.analysis.linearize import blocks_that_lose_most
    from inline_attention.engine.linearize import blocks_kept_before, check_linearization

    check_linearization(config)  # before pictures are read
    blocks = blocks_kept_before(config)
    if blocks is None:
        if is_main:
            say(f"measuring which blocks lose most, on {ANALYZED_IMAGES} pictures")
        blocks = blocks_that_lose_most(config, count, images=ANALYZED_IMAGES)
    if is_main:
        say(f"blocks that keep softmax: {', '.join(map(str, blocks))} (`inline analyze linearize` shows all)")
    return blocks


def read_linearize_settings(model: str, given: Sequence[str], *, features: bool) -> TrainConfig:
    """Return the settings of the recipe for a model, changed by overrides `key=value`.

    Pretrained weights of timm are written to the run's folder first, unless they are there.
    """
    import timm

    from inline_attention.cli.flags import read_settings
    from inline_attention.engine.config import with_overrides
    from inline_attention.engine.linearize import TEACHER_FILE, describe_teacher, fetch_teacher
    from inline_attention.recipes import get_recipe
    from inline_attention.support.text import did_you_mean

    recipe, path = "linearize_features" if features else "linearize_classifier", Path(model)
    plain = with_overrides(get_recipe(recipe).config, given)
    experiment = plain.run.experiment or (path.resolve().stem if path.exists() else model)
    output = plain.run.output if plain.run.output != type(plain.run)().output else OUTPUT
    place = [f"run.output={json.dumps(output)}", f"run.experiment={json.dumps(experiment)}"]
    name = next((text.partition("=")[2] for text in reversed(given) if text.startswith("model.name=")), None)
    if path.exists():
        source, name = path, None if name is None else json.loads(name)
    else:
        if not timm.is_model(model):
            hint = did_you_mean(model, timm.list_models()) or "; `inline models --all` lists models"
            fail(f"expected a model of timm, a run or a file of weights, got {model}{hint}")
        if name is not None:
            fail(f"--model names the model of a weights file, got {model}, which is a model itself; leave --model out")
        name = model
        if plain.model.initial_checkpoint is None:
            source = Path(output, experiment, TEACHER_FILE)
            fetch_teacher(model, source)
        else:
            source = Path(plain.model.initial_checkpoint)
    described = describe_teacher(source, name)
    if not features and path.exists() and not any(text.startswith(("data.dir=", "data.dataset=")) for text in given):
        described += _data_of_run(path)
    return read_settings(recipe, [*place, *described, *given, *place])


def _data_of_run(path: Path) -> list[str]:
    """Return the settings of the data that a run was trained on, as in `inline eval -c RUN`; none if it is no run."""
    from inline_attention.engine.evaluate import data_of_run

    data = data_of_run(path)
    names = () if data is None else ("dataset", "dir", "val_split")
    return [f"data.{name}={json.dumps(getattr(data, name))}" for name in names]


def _measure_speed(result: Linearized, config: TrainConfig) -> list[SpeedCell]:
    from dataclasses import asdict

    from inline_attention.benchmark.environment import describe_environment
    from inline_attention.benchmark.linearized import SIZES, measure_speed
    from inline_attention.engine.linearize import LINEARIZED, TEACHER, write_speed
    from inline_attention.tasks.task import find_device

    assert result.teacher is not None
    assert result.student is not None
    models = {TEACHER: result.teacher.cpu(), LINEARIZED: result.student.cpu()}
    with counting("measuring speed", len(models) * len(SIZES)) as advance:
        cells = measure_speed(models, find_device(config.run.device), on_cell=advance)
    write_speed(result, [asdict(cell) for cell in cells], describe_environment())
    return cells


def result_table(result: Linearized, cells: Sequence[SpeedCell]) -> Table:
    """Return one table: accuracy or agreement, parameters, speed and memory of teacher, conversion and result."""
    from inline_attention.engine.linearize import CONVERTED, LINEARIZED, TEACHER

    stages = (TEACHER, CONVERTED, LINEARIZED)
    rows: list[list[str]] = []
    for name in result.figures[LINEARIZED]:
        values = [result.figures.get(stage, {}).get(name) for stage in stages]
        rows.append([TITLES.get(name, name), *("—" if value is None else f"{value:.2f}" for value in values)])
    rows.append(["parameters", *(f"{result.parameters[stage]:,}" for stage in stages)])
    for size in dict.fromkeys(cell.size for cell in cells):
        at_size = {cell.model: cell for cell in cells if cell.size == size}
        rows.append([f"images/s at {size}²", *(_cell(at_size.get(stage), "speed") for stage in stages)])
        rows.append([f"memory at {size}², MiB", *(_cell(at_size.get(stage), "memory") for stage in stages)])
    caption = ["R²: share of the teacher's variance that is explained."] if TEACHER not in result.figures else []
    if cells:
        caption.append("Memory: peak beyond weights and images, in batches of a constant number of pixels.")
    header = ("", "softmax teacher", "converted, untrained", "linearized")
    return make_table(header, rows, texts=1, title="Linearized", caption="\n".join(caption))


def _cell(cell: Any, kind: str) -> str:
    if cell is None:
        return "—"
    value = cell.images_per_second if kind == "speed" else cell.peak_bytes
    if cell.images_per_second is None:
        return cell.note if kind == "speed" else "—"
    if value is None:
        return "—"
    if kind == "memory":
        return f"{value / 2**20:,.0f}"
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"
