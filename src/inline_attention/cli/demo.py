"""`inline demo`: measure injectivity and cost, print both as tables, draw both as pictures."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from inline_attention.analysis.cost import (
    ATTENTIONS,
    DEFAULT_SIZES,
    CostPoint,
    describe_machine,
    measure_attention_cost,
)
from inline_attention.analysis.injectivity import COLLISION_TOLERANCE, InjectivityResult, measure_injectivity
from inline_attention.cli.printing import fail, progress_bar


def run_demo(output: Path, sizes: Sequence[int] | None = None) -> None:
    """Measure, print the tables, write pictures and tables to `output`, print its path last.

    Args:
        output: Folder to write to; made if missing.
        sizes: Numbers of tokens to measure, ascending; `DEFAULT_SIZES` by default.

    Raises:
        typer.Exit: With code 1 where matplotlib is missing or the folder cannot be written; the reason is printed.
    """
    try:
        from inline_attention.analysis import plots
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        fail("the demo draws with matplotlib, which is not installed: pip install 'inline-attention[plots]'")
    with _writing_to(output):
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()  # better to learn it now than after measuring

    console = Console()
    results = measure_injectivity()
    points = _measure_cost_with_progress(console, sizes or DEFAULT_SIZES)
    console.print(_injectivity_table(results))
    console.print(_cost_table(points))

    machine = describe_machine()
    with _writing_to(output):
        plots.draw_injectivity(results, output / "injectivity.png")
        plots.draw_cost(points, machine, output / "cost.png")
        _write_csv(
            output / "injectivity.csv",
            ("queries", "feature_map", "attention", "largest_difference", "smallest_difference", "verdict"),
            (
                (r.case.name, r.feature_map_name, r.kind, r.largest_difference, r.smallest_difference, r.verdict)
                for r in results
            ),
        )
        _write_csv(output / "cost.csv", (*CostPoint._fields, "machine"), ((*point, machine) for point in points))
    typer.echo("injectivity.png, injectivity.csv, cost.png and cost.csv are in")
    typer.echo(output)


def _measure_cost_with_progress(console: Console, sizes: Sequence[int]) -> list[CostPoint]:
    with progress_bar(console) as progress:
        task = progress.add_task("measuring time and memory", total=len(sizes) * len(ATTENTIONS))
        return measure_attention_cost(sizes=sizes, on_progress=lambda _: progress.advance(task))


def _injectivity_table(results: Sequence[InjectivityResult]) -> Table:
    table = Table(
        title="Do different queries get different weights?",
        caption=f"|Δw|: largest difference between the weights of two queries. collide: ≤ {COLLISION_TOLERANCE:g}",
        box=box.SIMPLE_HEAD,
    )
    for header in ("queries on", "φ(x)", "attention"):
        table.add_column(header, no_wrap=True)
    table.add_column("max |Δw|", justify="right")
    table.add_column("min |Δw|", justify="right")
    table.add_column("verdict")
    for index, result in enumerate(results):
        verdict = f"[bold red]{result.verdict}[/]" if result.verdict == "collide" else f"[green]{result.verdict}[/]"
        table.add_row(
            result.case.name,
            result.feature_map_name,
            "InLine" if result.kind == "inline" else result.kind,
            f"{result.largest_difference:.1e}",
            f"{result.smallest_difference:.1e}",
            verdict,
            end_section=index + 1 < len(results) and results[index + 1].case.name != result.case.name,
        )
    return table


def _cost_table(points: Sequence[CostPoint]) -> Table:
    notes = [f"{ATTENTIONS[point.kind].label}, N = {point.tokens}: {point.note}" for point in points if point.note]
    notes.append("SDPA on a CPU never stores the N × N weights: its memory grows like N too")
    table = Table(title="Cost of one forward call", caption="\n".join(notes), box=box.SIMPLE_HEAD)
    table.add_column("tokens N", justify="right")
    table.add_column("attention", no_wrap=True)
    for header in ("time\nms", "time\n÷ InLine", "peak memory\nMiB", "memory\n÷ InLine"):
        table.add_column(header, justify="right")
    inline = {point.tokens: point for point in points if point.kind == "inline"}
    for index, point in enumerate(points):
        reference = inline[point.tokens]
        starts_size = index == 0 or points[index - 1].tokens != point.tokens
        table.add_row(
            f"{point.tokens:,}" if starts_size else "",
            ATTENTIONS[point.kind].label,
            _number(point.milliseconds),
            _ratio(point.milliseconds, reference.milliseconds),
            _number(None if point.peak_bytes is None else point.peak_bytes / 2**20),
            _ratio(point.peak_bytes, reference.peak_bytes),
            end_section=index + 1 < len(points) and points[index + 1].tokens != point.tokens,
        )
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}"


def _ratio(value: float | None, reference: float | None) -> str:
    return "n/a" if value is None or not reference else f"{_number(value / reference)}×"


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


@contextmanager
def _writing_to(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fail(f"cannot write to {output}: {error.strerror}; choose another folder with --output")
