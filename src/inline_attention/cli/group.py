"""The group of all commands: the layout of help pages, and errors as one sentence and an exit code."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from inline_attention.cli.printing import fail
from inline_attention.support.settings import ConfigError
from inline_attention.support.signals import stop_on_signal
from inline_attention.support.text import install_command

PANELS = {
    "Start here": ("demo", "models", "recipes"),
    "Train and predict": ("train", "eval", "predict", "linearize"),
    "Weights and data": ("convert", "export", "data"),
    "Understand and compare": ("analyze", "ablate", "report"),
    "Measure speed": ("bench",),
}
LINE_BREAK = re.compile(r"(?<=\S)\n(?!\s|[*-] )")  # inside a paragraph, not before a list entry or an indented line
TRACEBACK = "INLINE_TRACEBACK"
# Optional packages, as they are imported, and the extra of pyproject.toml that installs them.
EXTRAS = {
    "datasets": "hub",
    "defusedxml": "detection",
    "faster_coco_eval": "detection",
    "imagecodecs": "slides",
    "jinja2": "plots",
    "markupsafe": "plots",
    "matplotlib": "plots",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "openslide": "slides",
    "tensorboard": "train",
    "tifffile": "slides",
    "torchmetrics": "segmentation",
    "wandb": "wandb",
}


class Commands(TyperGroup):
    """A group whose commands end with one sentence, not a traceback, unless INLINE_TRACEBACK=1 is set."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the arguments. Help pages are printed here, and completion's options are known only now."""
        arrange_help(self)
        return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit with code 1 after an error, 130 or 143 after SIGINT or SIGTERM."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(stop_on_signal.exit_code or 130) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if os.environ.get(TRACEBACK) or hasattr(error, "format_message"):  # typer prints errors of usage
                raise
            if stop_on_signal.exit_code is not None:  # such as a data worker that the signal ended first
                raise typer.Exit(stop_on_signal.exit_code) from None
            fail(sentence(error))


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


def sentence(error: Exception) -> str:
    """Return what an error says to users."""
    text = str(error) or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        command = install_command(EXTRAS[package]) if package in EXTRAS else f"pip install {package or 'it'}"
        return f"this needs {package or error}, which is not installed: {command}"
    if isinstance(error, ConfigError):
        from inline_attention.cli.flags import with_flags

        return str(with_flags(error))
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
        return "the GPU's memory is too small for this; try a smaller --size or --batch-size, or --device cpu"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:  # torch has no other name for it on a CPU
        return "memory is too small for this; try smaller images or a smaller --batch-size"
    if isinstance(error, OSError) and error.strerror:
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
        return f"{' and '.join(names)}: {error.strerror}" if names else error.strerror
    if isinstance(error, (ValueError, OSError, ImportError)) or type(error).__module__.startswith("inline_attention"):
        return text
    return (
        f"unexpected {type(error).__name__}: {text.splitlines()[0]}; if this is a bug in inline-attention, "
        f"{TRACEBACK}=1 shows where"
    )
