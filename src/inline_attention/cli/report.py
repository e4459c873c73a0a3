"""`inline report`: write one page with the argument for InLine, from your own runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from inline_attention.benchmark.cost import CostPoint
from inline_attention.cli.printing import fail, make_console, say, warn
from inline_attention.report.measurement import KeptMeasurements, find_runs, gather
from inline_attention.support.files import write_atomically

PAGE_SUFFIXES = (".html", ".htm")


def run_report(
    runs: Sequence[Path],
    output: Path,
    *,
    ablations: Sequence[Path] = (),
    device: str = "auto",
    cost: Sequence[CostPoint] | None = None,
    console: Console | None = None,
) -> None:
    """Measure what is missing, write the page, print its path; see `inline report --help`.

    Measurements are kept beside the page, in NAME.measurements.json. `cost` is that of attention, if measured before.
    """
    console = console or make_console()
    if output.is_dir():
        fail(f"expected a file to write, such as {output / 'report.html'}, got the folder {output}")
    if output.suffix.lower() not in PAGE_SUFFIXES:
        fail(f"--output names the page, which is HTML: expected a name such as {output.stem}.html, got {output}")
    from inline_attention.report.page import render

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with console.status("reading the runs") as status:
            kept = KeptMeasurements(output.with_suffix(".measurements.json"))
            evidence = gather(
                find_runs(runs), kept, ablations=ablations, cost=cost, device=device, on_step=status.update
            )
        write_atomically(output, render(evidence))
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror or error}; choose another file with --output")
    for section, reasons in evidence.missing.items():
        for reason in reasons:
            warn(f"left out of {section}: {reason}")
    say(f"Report written to {output}: open it in a browser")
