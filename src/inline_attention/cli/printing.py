"""Printing for all commands: text, errors, tables, JSON and progress.

Everything that comes from files (names of files and classes, metadata) is printed by this module: control characters
and lone surrogates are escaped, and rich's markup is not interpreted.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from inline_attention.support.text import install_command, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

Result = TypeVar("Result")
LOG_WIDTH = 140  # columns of a table in a log, which has no width of its own


def say(message: object, *, err: bool = False, color: str | None = None, bold: bool = False, nl: bool = True) -> None:
    """Print text, colored if the stream is a terminal and NO_COLOR is not set."""
    text, stream = printable_lines(message), sys.stderr if err else sys.stdout
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if (color or bold) and stream.isatty() and not is_plain:
        text = typer.style(text, fg=color, bold=bold or None)
    typer.echo(text, err=err, nl=nl)


def warn(message: object) -> None:
    """Print a note in yellow on stderr."""
    say(message, err=True, color="yellow")


def fail(message: object) -> NoReturn:
    """Print an error in red on stderr and exit with code 1."""
    say(f"error: {message}", err=True, color="red")
    raise typer.Exit(1)


def printable_lines(message: object) -> str:
    """Return text that is safe on a terminal, with its line breaks."""
    return "\n".join(printable(line) for line in str(message).split("\n"))


def say_json(content: object) -> None:
    """Print JSON in valid UTF-8. Characters that are not printable are escaped, as JSON allows."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    typer.echo("".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text))


def make_console(*, stderr: bool = False, log_width: int | None = LOG_WIDTH) -> Console:
    """Return a console that prints text as it is, and leaves out the last columns of a table that is too wide.

    `log_width` are its columns if it is no terminal and COLUMNS is not set.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable_lines(text), **options)

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(_fitted(item, self) if isinstance(item, Table) else item for item in objects), **options)

    console = PlainConsole(stderr=stderr, markup=False, highlight=False, emoji=False)
    if log_width is not None and not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = log_width
    return console


def progress_bar(console: Console, **options: Any) -> Progress:
    """Return a bar with count and time that disappears at the end; it is not shown unless the console is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    class Description(TextColumn):
        def render(self, task: Any) -> Any:
            task.description = printable(task.description)
            return super().render(task)

    columns = (Description("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal, **options)


def streaming_task(progress: Progress) -> Callable[[str], Callable[[float], None]]:
    """Return a function that prints a sentence and starts a bar, for runs that report shares of their work."""

    def start(sentence: str) -> Callable[[float], None]:
        say(sentence, err=True)
        task = progress.add_task("streaming", total=100)
        return lambda share: progress.advance(task, 100 * share)

    return start


def make_table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    texts: int = 0,
    group_by: Callable[[Sequence[Any]], object] | None = None,
    **options: Any,
) -> Table:
    """Return a table with the options of rich's: title and caption.

    The first `texts` columns hold text. Others are right-aligned if a cell starts with a digit. `group_by` returns the
    key of a row: a line separates rows with different keys, and repeated first cells are left out.
    """
    from rich import box
    from rich.table import Table

    table = Table(title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, **options)
    for index, name in enumerate(header):
        is_text = index < texts or not any(str(row[index])[:1].isdigit() for row in rows)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=index < texts, overflow="fold")
    keys = [object() if group_by is None else group_by(row) for row in rows]
    for index, row in enumerate(rows):
        is_first = index == 0 or keys[index] != keys[index - 1] or row[0] != rows[index - 1][0]
        ends = group_by is not None and index + 1 < len(rows) and keys[index] != keys[index + 1]
        table.add_row(row[0] if is_first else "", *row[1:], end_section=ends)
    return table


def _fitted(table: Table, console: Console) -> Table:
    """Return a table that is no wider than the console: without its last columns, which a note names, if need be."""
    from rich.measure import Measurement

    endless, columns = console.options.update(max_width=10**6), [copy.copy(column) for column in table.columns]
    least, most = [], []
    for column in columns:  # headers and text wrap between words, numbers and names do not
        header, *cells = (Measurement.get(console, endless, text) for text in (column.header, *column.cells))
        is_whole = column.no_wrap or column.justify == "right"
        smallest = [header.maximum if column.no_wrap else header.minimum]
        least.append(max(smallest + [cell.maximum if is_whole else cell.minimum for cell in cells]))
        most.append(max(size.maximum for size in (header, *cells)))

    def spare(widths: Sequence[int]) -> int:
        lines = len(widths) + 1 if table.box else 0
        padded = len(widths) - (not table.pad_edge)
        return console.width - sum(widths) - lines - padded * (table.padding[1] + table.padding[3])

    if spare(most) >= 0:
        return table
    shown = len(columns)
    while shown > 1 and spare(least[:shown]) < 0:
        shown -= 1
    left = max(spare(least[:shown]), 0)
    for column, smallest, largest in zip(columns[:shown], least, most, strict=False):
        column.width = min(smallest + left, largest)
        left -= column.width - smallest
    fitted = copy.copy(table)
    fitted.columns = columns[:shown]
    if shown < len(columns):
        names = ", ".join(str(column.header) for column in columns[shown:])
        note = f"Not shown in {console.width} columns: {names}. A wider terminal shows them."
        fitted.caption, fitted.caption_justify = f"{table.caption}\n{note}" if table.caption else note, "left"
    return fitted


def draw_if_possible(draw: Callable[[], Result]) -> Result | None:
    """Return what `draw` returns; without matplotlib, say which extra it needs and return None."""
    try:
        return draw()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        warn(f"no pictures without matplotlib: {install_command('plots')}")
        return None


@contextmanager
def counting(description: str, total: int | None, console: Console | None = None) -> Iterator[Callable[..., None]]:
    """Show a bar while something is counted, and yield the function to call for each item."""
    with progress_bar(console or make_console(stderr=True)) as progress:
        task = progress.add_task(description, total=total)
        yield lambda *_: progress.advance(task)


def make_folder(output: Path) -> None:
    """Create a folder, and fail now, not after the work, if nothing can be written there."""
    with writing_to(output):
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()


@contextmanager
def writing_to(output: Path) -> Iterator[None]:
    """Turn the system's refusal to write into one sentence."""
    try:
        yield
    except OSError as error:
        fail(f"cannot write to {output}: {error.strerror}; choose another folder with --output, or free some space")
