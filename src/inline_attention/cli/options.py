"""Options of several commands, and parsing of their values, without heavy imports, so that usage errors are quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

Output = Annotated[Path, Option("--output", "-o", help="Output folder; created if missing.")]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, Option(help="Random seed.")]
BatchSize = Annotated[int, Option("--batch-size", "-b", min=1, help="Images per batch.")]
Level = Annotated[
    int | None, Option(min=0, help="Level of tiled files to stream. 0 is the finest.", show_default="0 if streamed")
]
MaxPixels = Annotated[int, Option(min=1, help="Pixels above which tiled files are streamed and others refused.")]
Memory = Annotated[str, Option(help="Memory for streaming, such as 512MiB.")]
DEFAULT_MAX_PIXELS = 200_000_000  # that of `data.images`, which is slow to import
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
OutsideFiles = Annotated[bool, Option("--allow-outside-files", help="Also read files outside the data folder.")]


def split_names(text: str) -> list[str]:
    """Return names separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_numbers(text: str | None, option: str, example: str = "64,256") -> list[int] | None:
    """Return distinct positive whole numbers in ascending order; None if the option is not given."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        message = f"expected whole numbers ≥ 1 separated by commas, such as {example}, got {text!r}"
        raise typer.BadParameter(message, param_hint=option)
    return sorted({int(part) for part in parts})


def parse_odd_sides(text: str) -> list[int]:
    """Return sides of neighborhoods: odd numbers from 3 on."""
    sides = parse_numbers(text, "--sides", "3,5,7") or []
    if any(side < 3 or side % 2 == 0 for side in sides):
        message = f"expected odd sides of at least 3 tokens, with the query in the middle, such as 3,5,7, got {text!r}"
        raise typer.BadParameter(message, param_hint="--sides")
    return sides


def parse_size(text: str, example: str = "224, or height and width, such as 192x320") -> tuple[int, ...]:
    """Return one number, or height and width."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"expected pixels, such as {example}, got {text!r}", param_hint="--size")
    return tuple(int(part) for part in parts)


def parse_token(text: str) -> tuple[int, int]:
    """Return row and column."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"expected row and column, such as 3,5, got {text!r}", param_hint="--token")
    return int(parts[0]), int(parts[1])
