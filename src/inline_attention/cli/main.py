"""The command `inline`. What a command needs is imported when it runs, so that help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from inline_attention import __version__
from inline_attention.cli.analyze import analyze_app
from inline_attention.cli.bench import bench_app
from inline_attention.cli.convert import convert
from inline_attention.cli.data import data_app
from inline_attention.cli.evaluate import evaluate
from inline_attention.cli.export import export
from inline_attention.cli.group import Commands
from inline_attention.cli.linearize import linearize
from inline_attention.cli.lists import models, recipes_app
from inline_attention.cli.options import Device, Output, parse_numbers
from inline_attention.cli.predict import predict
from inline_attention.cli.printing import say
from inline_attention.cli.train import TAKES_FLAGS, Recipe, Settings, train

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # its commands inherit them
)
app.add_typer(analyze_app, name="analyze")
app.add_typer(bench_app, name="bench")
app.add_typer(recipes_app, name="recipes")
app.add_typer(data_app, name="data")
app.command()(models)
app.command()(convert)
app.command()(export)
app.command()(predict)
app.command(context_settings=TAKES_FLAGS)(train)
app.command(context_settings=TAKES_FLAGS)(linearize)
app.command("eval")(evaluate)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"inline-attention {__version__}")
        raise typer.Exit


@app.callback()
def inline(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Injective linear attention (InLine) for vision."""
    del version  # its callback has done the work


@app.command()
def demo(
    output: Output = Path("out/demo"),
    sizes: Annotated[
        str | None, Option(help="Numbers of tokens to measure, such as 64,256.", show_default="196,784,3136,12544")
    ] = None,
    training: Annotated[
        bool, Option("--train/--no-train", help="Train InLine and its twins on handwritten digits.")
    ] = True,
    epochs: Annotated[int | None, Option(min=1, help="Number of epochs.", show_default="the recipe's")] = None,
) -> None:
    """Measure, draw and train InLine, softmax and linear attention on a CPU, in 3 minutes.

    The files of an earlier demo in the output folder are replaced.
    """
    token_counts = None if sizes is None else parse_numbers(sizes, "--sizes")
    from inline_attention.cli.demo import run_demo

    run_demo(output, token_counts, training=training, epochs=epochs)


@app.command(context_settings=TAKES_FLAGS)
def ablate(
    context: typer.Context,
    recipe: Recipe,
    axes: Annotated[
        list[str],
        Option("--axis", help="What to vary, such as feature_map or heads=2,4; repeatable.", show_default=False),
    ],
    seeds: Annotated[int, Option(min=1, help="Number of seeds per combination.")] = 3,
    output: Annotated[Path, Option("--output", "-o", help="Output folder. Existing runs there are resumed.")] = Path(
        "out/ablation"
    ),
    settings: Settings = None,
    at_once: Annotated[int, Option(min=1, help="Runs in parallel. With several, no speeds are recorded.")] = 1,
) -> None:
    """Train variants of a recipe with several seeds and compare them: `inline ablate digits --axis feature_map`.

    Axes: feature_map, normalization, local_residual, window, heads and attention. Several axes give all combinations.
    The flags of `inline train` apply to all runs: --model, --data-dir, --epochs, -b, --device and others.
    """
    from inline_attention.cli.ablate import run_ablate

    run_ablate(recipe, axes, seeds, output, settings or [], context.args, at_once)


@app.command()
def report(
    runs: Annotated[list[Path], Argument(help="Run folders, or folders that contain runs.", show_default=False)],
    output: Annotated[Path, Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    ablation: Annotated[list[Path] | None, Option(help="Folder or JSON file of `inline ablate`; repeatable.")] = None,
    device: Device = "auto",
) -> None:
    """Write a page that checks the argument for InLine on your own runs: `inline report out/demo/digits_runs`.

    Measurements are cached beside the page, in report.measurements.json.
    """
    from inline_attention.cli.report import run_report

    run_report(runs, output, ablations=ablation or [], device=device)
