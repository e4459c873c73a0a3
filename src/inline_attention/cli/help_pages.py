"""Layout of help pages: order and panels of the commands, wrapped paragraphs, flags without a type."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

PANELS = {
    "Start here": ("demo", "models", "recipes"),
    "Train and predict": ("train", "eval", "predict", "linearize"),
    "Weights and data": ("convert", "export", "data"),
    "Understand and compare": ("analyze", "ablate", "report"),
    "Measure speed": ("bench",),
}
LINE_BREAK = re.compile(r"(?<=\S)\n(?!\s|[*-] )")  # inside a paragraph, not before a list entry or an indented line


def arrange_help(group: Any) -> None:
    """Prepare the help pages of a group and of all its commands."""
    names = [name for panel in PANELS.values() for name in panel if name in group.commands]
    group.commands = {name: group.commands[name] for name in (*names, *group.commands)}
    for panel, commands in PANELS.items():
        for name in commands:
            if name in group.commands:
                group.commands[name].rich_help_panel = panel
    help_names = group.context_settings.get("help_option_names", ["--help"])
    for command in _walk(group):
        if command.help:  # typer keeps the line breaks of the source
            command.help = LINE_BREAK.sub(" ", inspect.cleandoc(command.help))
        help_option = command.get_help_option(typer.Context(command, help_option_names=help_names))
        for option in (*command.params, help_option):
            if getattr(option, "is_flag", False):
                option.metavar = ""  # in place of <bool>


def _walk(command: Any) -> Iterator[Any]:
    yield command
    for child in getattr(command, "commands", {}).values():
        yield from _walk(child)
