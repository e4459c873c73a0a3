"""`inline bench`: measure attention or models on this machine, print tables, write results and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from inline_attention.cli.options import parse_numbers, split_names
from inline_attention.cli.printing import draw_if_possible, fail, make_console, progress_bar, writing_to
from inline_attention.support.untrusted import UntrustedDataError, parse_json

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from inline_attention.benchmark.attention import AttentionReport, AttentionSettings
    from inline_attention.benchmark.everyday import EverydayReport
    from inline_attention.benchmark.models import ModelReport, ModelSettings
    from inline_attention.benchmark.tables import ResultTable

DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
LOG_WIDTH = 180
Report = TypeVar("Report", "AttentionReport", "ModelReport", "EverydayReport")
Name = TypeVar("Name", bound=str)
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for results; created if missing.")]
Device = Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="bf16, fp16 or fp32.", show_default="bf16 on a GPU, fp32 on a CPU")
]
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")


@bench_app.command("attention")
def bench_attention(
    output: Output = Path("out/bench"),
    device: Device = "auto",
    dtype: Dtype = None,
    tokens: Annotated[
        str | None, typer.Option(help="Values of N.", show_default="196,784,3136,16384,65536; on a CPU to 3136")
    ] = None,
    channels: Annotated[str | None, typer.Option(help="Values of C.", show_default="192,768; on a CPU 192")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Values of D.", show_default="32,64; on a CPU 32")] = None,
    elements: Annotated[
        int | None,
        typer.Option(min=1, help="B·N·C, which sets the batch size.", show_default="25 million; on a CPU 0.6"),
    ] = None,
    passes: Annotated[str, typer.Option(help="forward, forward+backward or both.")] = "forward,forward+backward",
    compiled: Annotated[
        str | None,
        typer.Option(help="Cases to time with torch.compile: none, first or all.", show_default="first; on a CPU none"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few, small sizes.")] = False,
) -> None:
    """Time attention: softmax with PyTorch's kernels, InLine with every backend of this machine."""
    sizes = {
        "tokens": None if tokens is None else parse_numbers(tokens, "--tokens"),
        "channels": None if channels is None else parse_numbers(channels, "--channels"),
        "head_dims": None if head_dim is None else parse_numbers(head_dim, "--head-dim"),
    }
    from inline_attention.benchmark import attention

    place = resolve_device(device)
    chosen = _one_of("--compiled", compiled, ("none", "first", "all"))
    cases = attention.default_cases(place, elements=elements, compiled=chosen, quick=quick, **sizes)
    settings = attention.AttentionSettings(
        place,
        resolve_dtype(dtype, place),
        cases,
        passes=tuple(_each_of("--passes", split_names(passes), attention.PASSES)),
        latency_case=attention.LATENCY_CASE if place.type == "cuda" and not quick else None,
        seconds=0.3 if quick else 1.0,
    )
    report_attention(settings, output, "attention")


@bench_app.command("models")
def bench_models(
    output: Output = Path("out/bench"),
    device: Device = "auto",
    dtype: Dtype = None,
    names: Annotated[str, typer.Option("--models", help="InLine models to time.")] = "inline_deit_tiny",
    sizes: Annotated[
        str | None, typer.Option(help="Image sizes in pixels.", show_default="224,512,1024,2048; on a CPU 224")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", "-b", min=1, help="Images per batch.", show_default="the pixels of 256 at 224²; on a CPU 4"
        ),
    ] = None,
    mode: Annotated[str, typer.Option(help="inference, training or both.")] = "inference",
    rivals: Annotated[
        str, typer.Option(help="timm (softmax), plain (InLine without kernels), softmax (our twin).")
    ] = "timm,plain,softmax",
    execution: Annotated[str, typer.Option(help="compiled, eager or both.")] = "compiled",
    compile_mode: Annotated[str, typer.Option(help="Mode of torch.compile.")] = "default",
    quick: Annotated[bool, typer.Option("--quick", help="Size 224 only, measured briefly.")] = False,
) -> None:
    """Time whole models against their softmax rivals: images per second and peak memory."""
    image_sizes = None if sizes is None else parse_numbers(sizes, "--sizes")
    from inline_attention.benchmark import models

    place = resolve_device(device)
    cases = models.default_cases(
        place,
        models=split_names(names),
        sizes=image_sizes,
        modes=_each_of("--mode", split_names(mode), models.MODES),
        rivals=_each_of("--rivals", split_names(rivals), models.RIVALS),
        executions=_each_of("--execution", split_names(execution), models.EXECUTIONS),
        batch_size=batch_size,
        quick=quick,
    )
    settings = models.ModelSettings(
        place, resolve_dtype(dtype, place), cases, compile_mode=compile_mode, seconds=0.5 if quick else 2.0
    )
    report_models(settings, output, "models")


@bench_app.command("everyday")
def bench_everyday(
    output: Output = Path("out/bench"),
    only: Annotated[str, typer.Option(help="Measure cells whose section or name contains this.")] = "",
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which no further cell is begun.")] = math.inf,
    processes: Annotated[int, typer.Option(min=0, help="Processes that compile ahead; 0 for none.")] = 12,
    add: Annotated[bool, typer.Option("--add", help="Keep cells already measured in the output folder.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny cells on a CPU, as a test.")] = False,
) -> None:
    """Time what users do every day on a GPU: training, converted ViTs, all head dims, masks, host time."""
    report_everyday(output, name="everyday", only=only, budget=budget, processes=processes, add=add, smoke=smoke)


def report_everyday(
    output: Path, *, name: str, only: str, budget: float, processes: int, add: bool, smoke: bool
) -> None:
    """Measure the everyday cells, write NAME.json as results come in, then NAME.md, and print the tables."""
    from inline_attention.benchmark import everyday
    from inline_attention.benchmark.everyday_cells import everyday_cells, smoke_cells
    from inline_attention.benchmark.tables import everyday_tables

    place = resolve_device("cpu" if smoke else "cuda")
    cells = smoke_cells() if smoke else everyday_cells()
    chosen = {cell.name for cell in everyday.choose_cells(cells, only)}
    if not chosen:
        fail(f"--only {only!r} fits no cell; leave it out to measure all")
    earlier = _read_earlier(output / f"{name}.json") if add else None
    shown = tuple(cell for cell in cells if cell.name in chosen.union((earlier or {}).get("cells", ())))
    settings = everyday.EverydaySettings(
        place, resolve_dtype(None, place), shown, budget, 0 if smoke else processes, only=only
    )
    if smoke:
        settings = replace(settings, seconds=0.0)
    measure = partial(everyday.measure_everyday, settings, earlier=earlier)
    _run(measure, everyday_tables, everyday.count_steps(settings), output, name, "Everyday speed", None)


def _read_earlier(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return parse_json(path.read_bytes())
    except UntrustedDataError as error:
        fail(f"{path} is not a result file: {error}; run without --add to replace it")


def report_attention(settings: AttentionSettings, output: Path, name: str) -> None:
    """Measure attention, write NAME.json as results come in, then NAME.md and NAME.png, and print the tables."""
    from inline_attention.benchmark.attention import count_steps, measure_attention
    from inline_attention.benchmark.tables import attention_tables

    def draw(report: AttentionReport, path: Path) -> None:
        from inline_attention.benchmark.plots import draw_attention

        draw_attention(report, path)

    title = f"Attention from packed qkv, {str(settings.dtype).removeprefix('torch.')}"
    _run(partial(measure_attention, settings), attention_tables, count_steps(settings), output, name, title, draw)


def report_models(settings: ModelSettings, output: Path, name: str) -> None:
    """Measure models, write NAME.json as results come in, then NAME.md and NAME.png, and print the table."""
    from inline_attention.benchmark.models import count_steps, measure_models
    from inline_attention.benchmark.tables import model_tables

    def draw(report: ModelReport, path: Path) -> None:
        from inline_attention.benchmark.plots import draw_models

        draw_models(report, path)

    title = f"Models, {str(settings.dtype).removeprefix('torch.')}"
    _run(partial(measure_models, settings), model_tables, count_steps(settings), output, name, title, draw)


def resolve_device(name: str) -> torch.device:
    """Return the device of "auto", "cuda" or "cpu"."""
    import torch

    if name not in ("auto", "cuda", "cpu"):
        fail(f"--device must be auto, cuda or cpu, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        fail("PyTorch finds no GPU here; --device cpu measures the CPU")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; None is bfloat16 on a GPU and float32 on a CPU."""
    import torch

    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        fail(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return getattr(torch, DTYPES[name])


def _run(
    measure: Callable[..., Report],
    tables_of: Callable[[Report], list[ResultTable]],
    steps: int,
    output: Path,
    name: str,
    title: str,
    draw: Callable[[Report, Path], None] | None,
) -> None:
    from inline_attention.benchmark.results import write_json, write_markdown
    from inline_attention.benchmark.tables import as_markdown

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
            with writing_to(output):  # after every case: a run that is cut off leaves its figures
                write_json(output / f"{name}.json", report.as_json())
                write_markdown(output / f"{name}.md", title, report.environment, as_markdown(tables_of(report)))

        report = measure(on_progress=report_progress, on_result=save)
    tables = tables_of(report)
    with writing_to(output):
        has_picture = draw is not None and draw_if_possible(partial(draw, report, output / f"{name}.png"))
        body = as_markdown(tables) + (f"\n\n![{title}]({name}.png)" if has_picture else "")
        write_markdown(output / f"{name}.md", title, report.environment, body)
    for table in tables:
        console.print(_as_rich(table))
        for note in table.notes:
            console.print(f"  {note}", style="dim")
    console.print(f"written to {output / name}.json, .md{', .png' if has_picture else ''}", soft_wrap=True)


def _as_rich(table: ResultTable) -> Table:
    from rich import box
    from rich.table import Table

    rich_table = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, header in enumerate(table.header):
        is_text = all(not row[index][:1].isdigit() for row in table.rows)
        rich_table.add_column(header, justify="left" if is_text else "right", overflow="fold")
    for row in table.rows:
        rich_table.add_row(*row)
    return rich_table


def _each_of(option: str, given: Sequence[str], known: Sequence[Name]) -> list[Name]:
    chosen = [candidate for candidate in known if candidate in given]
    unknown = [name for name in given if name not in known]
    if unknown or not chosen:
        fail(f"{option} takes {', '.join(known)}, separated by commas, got {','.join(given)!r}")
    return chosen


def _one_of(option: str, given: str | None, known: Sequence[Name]) -> Name | None:
    return None if given is None else _each_of(option, [given], known)[0]
