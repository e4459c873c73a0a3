"""`inline bench`: measure attention or models on this machine, print the tables, write results and pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich import box
from rich.table import Table

from inline_attention.benchmark import attention, everyday, models
from inline_attention.benchmark.everyday_cells import everyday_cells, smoke_cells
from inline_attention.benchmark.results import write_json, write_markdown
from inline_attention.benchmark.tables import ResultTable, as_markdown, attention_tables, everyday_tables, model_tables
from inline_attention.cli.printing import fail, make_console, progress_bar, warn, writing_to
from inline_attention.support.untrusted import UntrustedDataError, parse_json

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
LOG_WIDTH = 180
Report = TypeVar("Report", attention.AttentionReport, models.ModelReport, everyday.EverydayReport)


def run_bench_attention(
    output: Path,
    *,
    device: str,
    dtype: str | None,
    tokens: Sequence[int] | None,
    channels: Sequence[int] | None,
    head_dims: Sequence[int] | None,
    elements: int | None,
    passes: Sequence[str],
    compiled: str | None,
    quick: bool,
) -> None:
    """Measure attention; see `inline bench attention --help` for the arguments.

    Raises:
        typer.Exit: With code 1 where the device is missing or nothing can be written; the reason is printed.
    """
    place = resolve_device(device)
    cases = attention.default_cases(
        place,
        tokens=tokens,
        channels=channels,
        head_dims=head_dims,
        elements=elements,
        compiled=_one_of("--compiled", compiled, ("none", "first", "all")),
        quick=quick,
    )
    settings = attention.AttentionSettings(
        place,
        resolve_dtype(dtype, place),
        cases,
        passes=tuple(_each_of("--passes", passes, attention.PASSES)),
        latency_case=attention.LATENCY_CASE if place.type == "cuda" and not quick else None,
        seconds=0.3 if quick else 1.0,
    )
    report_attention(settings, output, "attention")


def run_bench_models(
    output: Path,
    *,
    device: str,
    dtype: str | None,
    names: Sequence[str],
    sizes: Sequence[int] | None,
    batch_size: int | None,
    modes: Sequence[str],
    rivals: Sequence[str],
    executions: Sequence[str],
    compile_mode: str,
    quick: bool,
) -> None:
    """Measure models; see `inline bench models --help` for the arguments.

    Raises:
        typer.Exit: With code 1 where the device is missing or nothing can be written; the reason is printed.
    """
    place = resolve_device(device)
    cases = models.default_cases(
        place,
        models=names,
        sizes=sizes,
        modes=_each_of("--mode", modes, models.MODES),
        rivals=_each_of("--rivals", rivals, models.RIVALS),
        executions=_each_of("--execution", executions, models.EXECUTIONS),
        batch_size=batch_size,
        quick=quick,
    )
    settings = models.ModelSettings(
        place, resolve_dtype(dtype, place), cases, compile_mode=compile_mode, seconds=0.5 if quick else 2.0
    )
    report_models(settings, output, "models")


def run_bench_everyday(
    output: Path, *, name: str, only: str, budget: float, processes: int, add: bool, smoke: bool
) -> None:
    """Measure what users do every day; see `inline bench everyday --help` for the arguments.

    Raises:
        typer.Exit: With code 1 where the GPU is missing or nothing can be written; the reason is printed.
    """
    place = resolve_device("cpu" if smoke else "cuda")
    cells = everyday.choose_cells(smoke_cells() if smoke else everyday_cells(), only)
    if not cells:
        fail(f"--only {only!r} fits no cell; leave it out to measure all")
    settings = everyday.EverydaySettings(place, resolve_dtype(None, place), cells, budget, 0 if smoke else processes)
    if smoke:
        settings = replace(settings, seconds=0.0)
    earlier = _read_earlier(output / f"{name}.json") if add else None
    _run(
        lambda **callbacks: everyday.measure_everyday(settings, earlier=earlier, **callbacks),
        everyday_tables,
        everyday.count_steps(settings),
        output,
        name,
        "Everyday speed",
        None,
    )


def _read_earlier(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return parse_json(path.read_bytes())
    except UntrustedDataError as error:
        fail(f"{path} is not a result file: {error}; run without --add to replace it")


def report_attention(settings: attention.AttentionSettings, output: Path, name: str) -> None:
    """Measure attention, write NAME.json as results come in, then NAME.md and NAME.png, and print the tables."""
    _run(
        lambda **callbacks: attention.measure_attention(settings, **callbacks),
        attention_tables,
        attention.count_steps(settings),
        output,
        name,
        f"Attention from packed qkv, {str(settings.dtype).removeprefix('torch.')}",
        _draw_attention,
    )


def report_models(settings: models.ModelSettings, output: Path, name: str) -> None:
    """Measure models, write NAME.json as results come in, then NAME.md and NAME.png, and print the table."""
    _run(
        lambda **callbacks: models.measure_models(settings, **callbacks),
        model_tables,
        models.count_steps(settings),
        output,
        name,
        f"Models, {str(settings.dtype).removeprefix('torch.')}",
        _draw_models,
    )


def resolve_device(name: str) -> torch.device:
    """The device of "auto", "cuda" or "cpu"."""
    if name not in ("auto", "cuda", "cpu"):
        fail(f"--device must be auto, cuda or cpu, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        fail("PyTorch finds no GPU here; --device cpu measures the CPU")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype of that name; without one, bfloat16 on a GPU and float32 on a CPU."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        fail(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _run(
    measure: Callable[..., Report],
    tables_of: Callable[[Report], list[ResultTable]],
    steps: int,
    output: Path,
    name: str,
    title: str,
    draw: Callable[[Report, Path], None] | None,
) -> None:
    console = make_console(log_width=LOG_WIDTH)
    with writing_to(output):
        output.mkdir(parents=True, exist_ok=True)
    with progress_bar(console) as progress:
        task = progress.add_task("measuring", total=steps)

        def report_progress(text: str) -> None:
            progress.advance(task)
            console.print(text, style="dim", soft_wrap=True)
            console.file.flush()  # a log is read while the command runs, and kept if it is killed

        def save(report: Report) -> None:
            # After every case: a run that is cut off leaves its figures.
            with writing_to(output):
                write_json(output / f"{name}.json", report.as_json())
                write_markdown(output / f"{name}.md", title, report.environment, as_markdown(tables_of(report)))

        report = measure(on_progress=report_progress, on_result=save)
    tables = tables_of(report)
    with writing_to(output):
        picture = None
        if draw is not None:
            picture = _draw_if_possible(functools.partial(draw, report), output / f"{name}.png")
        body = as_markdown(tables) + (f"\n\n![{title}]({picture.name})" if picture else "")
        write_markdown(output / f"{name}.md", title, report.environment, body)
    for table in tables:
        console.print(_as_rich(table))
        for note in table.notes:
            console.print(f"  {note}", style="dim")
    console.print(f"written to {output / name}.json, .md{', .png' if picture else ''}", soft_wrap=True)


def _draw_attention(report: attention.AttentionReport, path: Path) -> None:
    from inline_attention.benchmark.plots import draw_attention

    draw_attention(report, path)


def _draw_models(report: models.ModelReport, path: Path) -> None:
    from inline_attention.benchmark.plots import draw_models

    draw_models(report, path)


def _draw_if_possible(draw: Callable[[Path], None], path: Path) -> Path | None:
    try:
        draw(path)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        warn("no picture without matplotlib: pip install 'inline-attention[plots]'")
        return None
    return path


def _as_rich(table: ResultTable) -> Table:
    rich_table = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, header in enumerate(table.header):
        is_text = all(not row[index][:1].isdigit() for row in table.rows)
        rich_table.add_column(header, justify="left" if is_text else "right", overflow="fold")
    for row in table.rows:
        rich_table.add_row(*row)
    return rich_table


Name = TypeVar("Name", bound=str)


def _each_of(option: str, given: Sequence[str], known: Sequence[Name]) -> list[Name]:
    chosen = [candidate for candidate in known if candidate in given]
    unknown = [name for name in given if name not in known]
    if unknown or not chosen:
        fail(f"{option} takes {', '.join(known)}, separated by commas, got {','.join(given)!r}")
    return chosen


def _one_of(option: str, given: str | None, known: Sequence[Name]) -> Name | None:
    return None if given is None else _each_of(option, [given], known)[0]
