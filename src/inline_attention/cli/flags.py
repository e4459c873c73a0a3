"""Settings from the command line: a recipe or a YAML file, timm's flags and `--set key=value`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from inline_attention.cli.printing import fail
from inline_attention.engine.config import FLAGS, TrainConfig, check_recipe_file, read_config, with_overrides
from inline_attention.recipes import get_recipe
from inline_attention.support.text import did_you_mean


def read_settings(recipe: str, overrides: Sequence[str]) -> TrainConfig:
    """Return the settings of a recipe or of a YAML file, changed by overrides `key=value`."""
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        return with_overrides(get_recipe(recipe).config, overrides)
    config = read_config(path)
    check_recipe_file(config, overrides, str(path))
    return with_overrides(config, overrides)


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """Return timm's flags as overrides `key=value`; exit with the nearest flag if one is unknown."""
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
    """Return one line per flag, for `inline train --flags`."""
    lines = []
    for flag in FLAGS:
        values = "".join(f" {chr(ord('A') + i)}" for i in range(flag.num_values)) if flag.num_values > 1 else " VALUE"
        if flag.bare is not None:
            values = " [VALUE]"
        usage = ", ".join(flag.names) + (values if flag.num_values else "")
        lines.append(f"{usage}: {flag.setting.documentation}")
    return "\n\n".join(lines)


def _alone(value: str) -> tuple[str]:
    return (value,)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)
