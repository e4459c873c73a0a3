"""Settings from the command line: a recipe or a YAML file, timm's flags and `--set key=value`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import timm

from inline_attention.cli.printing import fail, warn
from inline_attention.engine.config import (
    FLAGS,
    ConfigError,
    TrainConfig,
    check_recipe_file,
    read_config,
    with_overrides,
)
from inline_attention.models.described import model_family
from inline_attention.recipes import get_recipe
from inline_attention.support.text import did_you_mean
from inline_attention.tasks.pyramid import SHORTEST_SIDE


def read_settings(recipe: str, overrides: Sequence[str]) -> TrainConfig:
    """Return the settings of a recipe or of a YAML file, changed by overrides `key=value`."""
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        return _with_overrides(get_recipe(recipe).config, overrides)
    config = read_config(path)
    check_recipe_file(config, overrides, str(path))
    return _with_overrides(config, overrides)


def _with_overrides(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """Return changed settings, without what fits the recipe's model or data and not a chosen one of another kind."""
    changed = with_overrides(config, overrides)
    if changed.data.dataset != config.data.dataset:  # which has classes of its own
        config = replace(config, model=replace(config.model, num_classes=None))
    wanted, given = changed.model, config.model
    family = model_family(wanted.name)
    if (family or wanted.name) == (model_family(given.name) or given.name):
        return with_overrides(config, overrides)
    fitting, dropped = replace(given, arguments={}), [*given.arguments]
    is_own_model = wanted.arguments != given.arguments  # made for the images of the recipe
    if isinstance(given.img_size, int) and given.img_size < SHORTEST_SIDE and family != "deit" and not is_own_model:
        fitting, dropped = replace(fitting, img_size=SHORTEST_SIDE if family else None), [*dropped, "img_size"]
    if family is None and not given.drop_path:  # not all of timm's models have it
        fitting = replace(fitting, drop_path=None)
    if dropped and timm.is_model(wanted.name):  # another name is an error soon
        warn(f"--model {wanted.name}: the recipe's {', '.join(dropped)} fit only {given.name}; they are not used")
    return with_overrides(replace(config, model=fitting), overrides)


def with_flags(error: ConfigError) -> ConfigError:
    """Return an error that names the flags of its settings, if they have any."""
    flags = {flag.setting.path: f"{flag.names[0]} ({flag.setting.path})" for flag in reversed(FLAGS)}
    problems = [replace(problem, path=flags.get(problem.path, problem.path)) for problem in error.problems]
    return ConfigError(problems, error.source, error.advice)


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """Return timm's flags as overrides `key=value`; exit with the nearest flag if one is unknown."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for number, flag in enumerate(FLAGS):
        if flag.num_values == 0:
            parser.add_argument(*flag.names, dest=str(number), action="store_const", const=())
        elif flag.bare is not None:
            parser.add_argument(*flag.names, dest=str(number), nargs="?", type=lambda text: (text,), const=(flag.bare,))
        else:
            parser.add_argument(*flag.names, dest=str(number), nargs=flag.num_values)
    given, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        names = [name for flag in FLAGS for name in flag.names]
        hint = did_you_mean(unknown[0], names) or "; `inline train --flags` lists the flags"
        fail(f"unknown argument {unknown[0]}{hint}")
    return [override for number, values in vars(given).items() for override in FLAGS[int(number)].overrides(*values)]


def flags_help() -> str:
    """Return one line per flag, for `inline train --flags`."""
    lines = []
    for flag in FLAGS:
        values = "".join(f" {chr(ord('A') + i)}" for i in range(flag.num_values)) if flag.num_values > 1 else " VALUE"
        if flag.bare is not None:
            values = " [VALUE]"
        usage = ", ".join(flag.names) + (values if flag.num_values else "")
        lines.append(f"{usage}: {flag.setting.documentation}")
    return "\n\n".join(lines)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)
