"""`inline train`: a recipe or a file of settings, timm's flags, and the run they describe."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from inline_attention.cli.printing import fail, say
from inline_attention.engine.checkpoint_format import EMA_WEIGHTS, WEIGHTS
from inline_attention.engine.checkpoints import BEST, LAST
from inline_attention.engine.config import FLAGS, TrainConfig, check_recipe_file, read_config, with_overrides
from inline_attention.engine.durable_files import follow_pointer
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.train import train
from inline_attention.engine.trainer import CHECKPOINTS
from inline_attention.recipes import get_recipe
from inline_attention.support.text import did_you_mean


def run_train(recipe: str, settings: Sequence[str], flags: Sequence[str]) -> None:
    """Train and say where the result is.

    Args:
        recipe: Name of a recipe, or a YAML file of settings.
        settings: Overrides `key=value`.
        flags: What else was on the command line: timm's flags.

    Raises:
        typer.Exit: 1 for what is wrong with the settings or the data, 130 or 143 after SIGINT or SIGTERM.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if recipe.startswith("-"):
        fail(f"expected a recipe before all flags, as in `inline train digits {recipe}`, got {recipe}")
    try:
        config = read_settings(recipe, [*overrides_of(flags), *settings])
        folder, metrics = train(config)
    except InterruptedBySignalError as error:
        say(f"{error}; saved. Go on with the same command and --resume {error.folder}", err=True)
        raise typer.Exit(error.exit_code) from error
    except OSError as error:  # the run's folder: nothing else is written, and pictures have errors of their own
        fail(f"{error}; make room or make it writable, then go on with --resume auto")
    if int(os.environ.get("RANK", "0")) > 0:  # of torchrun's processes the first speaks for all
        return
    if metrics is not None:
        say(str(metrics))
    say(_where_weights_are(folder / CHECKPOINTS))


def read_settings(recipe: str, overrides: Sequence[str]) -> TrainConfig:
    """Return the settings of a recipe or of a YAML file, changed by overrides `key=value`."""
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        return with_overrides(get_recipe(recipe).config, overrides)
    config = read_config(path)
    check_recipe_file(config, overrides, str(path))
    return with_overrides(config, overrides)


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """timm's flags as overrides `key=value`.

    Raises:
        typer.Exit: For an unknown flag, naming the nearest.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for number, flag in enumerate(FLAGS):
        if flag.num_values == 0:
            parser.add_argument(*flag.names, dest=str(number), action="store_const", const=())
        elif flag.bare is not None:
            parser.add_argument(*flag.names, dest=str(number), nargs="?", type=_alone, const=(flag.bare,))
        else:
            parser.add_argument(*flag.names, dest=str(number), nargs=flag.num_values)
    given, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        names = [name for flag in FLAGS for name in flag.names]
        hint = did_you_mean(unknown[0], names) or "; `inline train --flags` lists the flags"
        fail(f"unknown argument {unknown[0]}{hint}")
    return [override for number, values in vars(given).items() for override in FLAGS[int(number)].overrides(*values)]


def flags_help() -> str:
    """One line per flag, for the command's help."""
    lines = []
    for flag in FLAGS:
        values = "".join(f" {chr(ord('A') + i)}" for i in range(flag.num_values)) if flag.num_values > 1 else " VALUE"
        if flag.bare is not None:
            values = " [VALUE]"
        usage = ", ".join(flag.names) + (values if flag.num_values else "")
        lines.append(f"{usage}: {flag.setting.documentation}")
    return "\n\n".join(lines)


def _where_weights_are(checkpoints: Path) -> str:
    """A line for people. Without a figure to be the best by, only the last checkpoint is there."""
    for kind in (BEST, LAST):
        for name in (EMA_WEIGHTS, WEIGHTS):  # where there is an average, the figures are its
            file = follow_pointer(checkpoints / kind) / name
            if file.is_file():
                return f"{kind} weights: {file}"
    return f"no weights were saved in {checkpoints}"


def _alone(value: str) -> tuple[str]:
    return (value,)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)
