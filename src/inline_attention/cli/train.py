"""`inline train`: train a model by a recipe or a file of settings."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from inline_attention.cli.printing import fail, say

ANY_MODEL = "finetune"  # the recipe that takes the model of its initial checkpoint
TAKES_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
Recipe = Annotated[str, Argument(help="Recipe name (`inline recipes`) or YAML file.", show_default=False)]
Settings = Annotated[
    list[str] | None, Option("--set", help="Setting as key=value, such as optimizer.lr=1e-3; repeatable.")
]


def _print_flags(wanted: bool) -> None:
    if wanted:
        from inline_attention.cli.flags import flags_help

        say(flags_help())
        raise typer.Exit


def train(
    context: typer.Context,
    recipe: Recipe,
    settings: Settings = None,
    list_flags: Annotated[
        bool, Option("--flags", callback=_print_flags, is_eager=True, help="List timm's flags and exit.")
    ] = False,
) -> None:
    """Train a model: `inline train digits`, `inline train deit_tiny --data-dir IMAGENET -b 512`.

    timm's flags are accepted too: --model, --data-dir, --dataset, --epochs, --updates, -b, --lr, --amp,
    --torchcompile, --workers, --output, --experiment, --resume, --device and more. `inline train --flags` lists all.
    """
    del list_flags  # its callback has done the work
    from inline_attention.cli.flags import overrides_of, read_settings

    if recipe.startswith("-"):
        fail(f"expected a recipe before all flags, as in `inline train digits {recipe}`, got {recipe}")
    from inline_attention.engine.interruption import InterruptedBySignalError
    from inline_attention.engine.train import train as train_model

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    overrides = [*overrides_of(context.args), *(settings or ())]
    overrides = [*_settings_of_start(recipe, overrides), *overrides]
    given = {override.partition("=")[0] for override in overrides}
    # With -b alone, the total batch is the recipe's, which was not made for a dataset this small.
    fit_batch = "training.batch_size" in given and "training.total_batch_size" not in given
    try:
        folder, metrics = train_model(read_settings(recipe, overrides), fit_batch=fit_batch)
    except InterruptedBySignalError as error:
        say(f"{error}; saved. To resume, add --resume {error.folder} to the command", err=True)
        raise typer.Exit(error.exit_code) from error
    except OSError as error:  # only the run's folder is written, and pictures have errors of their own
        fail(f"{error}; make room or make it writable, then add --resume auto to the command")
    if int(os.environ.get("RANK", "0")) > 0:  # under torchrun the first process prints
        return
    if metrics is not None:
        say(metrics)
    say(_weights_line(folder))


def _settings_of_start(recipe: str, overrides: Sequence[str]) -> list[str]:
    """Return the settings of the model in the initial checkpoint: of recipes for any model, or if --model names it."""
    from inline_attention.engine.config import with_overrides
    from inline_attention.engine.train import settings_of_start
    from inline_attention.recipes import get_recipe

    model = with_overrides(get_recipe(ANY_MODEL).config, overrides).model
    given = {override.partition("=")[0].strip() for override in overrides}
    is_chosen = "model.name" in given
    if model.initial_checkpoint is None or (is_chosen and "model.arguments" in given):
        return []
    if not is_chosen:
        return settings_of_start(Path(model.initial_checkpoint)) if recipe == ANY_MODEL else []
    found = settings_of_start(Path(model.initial_checkpoint))
    is_same = f"model.name={json.dumps(model.name)}" in found
    return [setting for setting in found if is_same and setting.startswith("model.arguments=")]


def _weights_line(folder: Path) -> str:
    """Return where the best weights are, or the last ones if no metric says which are best."""
    from inline_attention.engine.checkpoint_format import evaluated_weights
    from inline_attention.engine.checkpoints import BEST, LAST
    from inline_attention.engine.trainer import CHECKPOINTS

    checkpoints = folder / CHECKPOINTS
    for kind in (BEST, LAST):
        if (file := evaluated_weights(checkpoints / kind)) is not None:
            return f"{kind.capitalize()} weights written to {file}: `inline eval -c {folder}` evaluates them again"
    return f"No weights were saved in {checkpoints}"
