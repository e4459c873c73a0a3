"""The command `inline`: argument parsing only. What a command needs is imported when it runs, so that help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inline_attention import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"inline-attention {__version__}")
        raise typer.Exit


@app.callback()
def inline(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Injective linear attention (InLine) for vision."""
    del version  # its callback has done the work


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the pictures and tables; made if missing.")
    ] = Path("out/demo"),
    sizes: Annotated[
        str | None,
        typer.Option(help="Numbers of tokens to measure, such as 64,256.", show_default="196,784,3136,12544"),
    ] = None,
) -> None:
    """Show in under a minute, on a CPU, what InLine is: injective as softmax, cheap as linear attention."""
    token_counts = None if sizes is None else _parse_sizes(sizes)
    from inline_attention.cli.demo import run_demo

    run_demo(output, token_counts)


def _parse_sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(
            f"expected whole numbers ≥ 1 separated by commas, such as 64,256, got {text!r}", param_hint="--sizes"
        )
    return sorted({int(part) for part in parts})
