"""What all commands print alike: errors and progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def fail(message: object) -> NoReturn:
    """Print an error in red on stderr and exit with code 1."""
    typer.secho(f"error: {message}", fg="red", err=True)
    raise typer.Exit(1)


@contextmanager
def writing_to(output: Path) -> Iterator[None]:
    """Where files are written: what the system refuses ends the command with a sentence."""
    try:
        yield
    except OSError as error:
        fail(f"cannot write to {output}: {error.strerror}; choose another folder with --output")


@contextmanager
def failing_cleanly_out_of_memory() -> Iterator[None]:
    """Where models run: too little memory ends the command with a sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        fail("the GPU's memory is too small for this; try a smaller --size or --batch-size, or --device cpu")
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch has no other name for it on a CPU
            raise
        fail("memory is too small for this; try smaller images or a smaller --batch-size")


def progress_bar(console: Console, **options: Any) -> Progress:
    """A bar that counts, tells the time and goes away; on a console that is no terminal it is not shown."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal, **options)
