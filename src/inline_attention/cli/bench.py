"""`inline bench`: measure attention or models on this machine, print tables, write results and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import Option

from inline_attention.cli.options import Output, parse_numbers, split_names
from inline_attention.cli.printing import (
    draw_if_possible,
    fail,
    make_console,
    make_table,
    progress_bar,
    say,
    writing_to,
)
from inline_attention.support.files import read_bounded
from inline_attention.support.untrusted import MAX_TEXT_BYTES, UntrustedDataError, parse_json

if TYPE_CHECKING:
    import torch

    from inline_attention.benchmark.attention import AttentionReport, AttentionSettings
    from inline_attention.benchmark.everyday import EverydayReport
    from inline_attention.benchmark.models import ModelReport, ModelSettings
    from inline_attention.benchmark.tables import ResultTable

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LOG_WIDTH = 180
Report = TypeVar("Report", "AttentionReport", "ModelReport", "EverydayReport")
Name = TypeVar("Name", bound=str)
Device = Annotated[str, Option("--device", help="auto, cuda or cpu.")]
Dtype = Annotated[
    str | None, Option("--dtype", help="bf16, fp16 or fp32.", show_default="bf16 on a GPU, fp32 on a CPU")
]
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")


@bench_app.command("attention")
def bench_attention(
    output: Output = Path("out/bench"),
    device: Device = "auto",
    dtype: Dtype = None,
    tokens: Annotated[
        str | None, Option(help="Values of N.", show_default="196,784,3136,16384,65536; on a CPU to 3136")
    ] = None,
    channels: Annotated[str | None, Option(help="Values of C.", show_default="192,768; on a CPU 192")] = None,
    head_dim: Annotated[str | None, Option(help="Values of D.", show_default="32,64; on a CPU 32")] = None,
    elements: Annotated[
        int | None, Option(min=1, help="B·N·C, which sets the batch size.", show_default="25 million; on a CPU 0.6")
    ] = None,
    passes: Annotated[str, Option(help="forward, forward+backward or both.")] = "forward,forward+backward",
    compiled: Annotated[
        str | None,
        Option(help="Cases to time with torch.compile: none, first or all.", show_default="first; on a CPU none"),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Few, small sizes.")] = False,
) -> None:
    """Time attention: softmax with PyTorch's kernels, InLine with every backend of this machine."""
    sizes = {
        "tokens": parse_numbers(tokens, "--tokens"),
        "channels": parse_numbers(channels, "--channels"),
        "head_dims": parse_numbers(head_dim, "--head-dim"),
    }
    from inline_attention.benchmark import attention

    place = resolve_device(device)
    chosen = None if compiled is None else _each_of("--compiled", compiled, ("none", "first", "all"))[0]
    settings = attention.AttentionSettings(
        place,
        resolve_dtype(dtype, place),
        attention.default_cases(place, elements=elements, compiled=chosen, quick=quick, **sizes),
        passes=tuple(_each_of("--passes", passes, attention.PASSES)),
        latency_case=attention.LATENCY_CASE if place.type == "cuda" and not quick else None,
        seconds=0.3 if quick else 1.0,
    )
    report(settings, output, "attention")


@bench_app.command("models")
def bench_models(
    output: Output = Path("out/bench"),
    device: Device = "auto",
    dtype: Dtype = None,
    names: Annotated[str, Option("--models", help="InLine models to time.")] = "inline_deit_tiny",
    sizes: Annotated[
        str | None, Option(help="Image sizes in pixels.", show_default="224,512,1024,2048; on a CPU 224")
    ] = None,
    batch_size: Annotated[
        int | None,
        Option(
            "--batch-size", "-b", min=1, help="Images per batch.", show_default="the pixels of 256 at 224²; on a CPU 4"
        ),
    ] = None,
    mode: Annotated[str, Option(help="inference, training or both.")] = "inference",
    rivals: Annotated[
        str, Option(help="timm (softmax), plain (InLine without kernels), softmax (our twin).")
    ] = "timm,plain,softmax",
    execution: Annotated[str, Option(help="compiled, eager or both.")] = "compiled",
    compile_mode: Annotated[str, Option(help="Mode of torch.compile.")] = "default",
    quick: Annotated[bool, Option("--quick", help="Size 224 only, measured briefly.")] = False,
) -> None:
    """Time whole models against their softmax rivals: images per second and peak memory."""
    image_sizes = parse_numbers(sizes, "--sizes")
    from inline_attention.benchmark import models

    place = resolve_device(device)
    cases = models.default_cases(
        place,
        models=split_names(names),
        sizes=image_sizes,
        modes=_each_of("--mode", mode, models.MODES),
        rivals=_each_of("--rivals", rivals, models.RIVALS),
        executions=_each_of("--execution", execution, models.EXECUTIONS),
        batch_size=batch_size,
        quick=quick,
    )
    settings = models.ModelSettings(
        place, resolve_dtype(dtype, place), cases, compile_mode=compile_mode, seconds=0.5 if quick else 2.0
    )
    report(settings, output, "models")


@bench_app.command("everyday")
def bench_everyday(
    output: Output = Path("out/bench"),
    only: Annotated[str, Option(help="Measure cells whose section or name contains this.")] = "",
    budget: Annotated[float, Option(min=0, help="Stop starting new cells after this many seconds.")] = math.inf,
    processes: Annotated[int, Option(min=0, help="Processes that compile ahead; 0 for none.")] = 12,
    add: Annotated[bool, Option("--add", help="Keep cells already measured in the output folder.")] = False,
    smoke: Annotated[bool, Option("--smoke", help="Tiny cells on a CPU, as a test.")] = False,
) -> None:
    """Time what users do every day on a GPU: training, converted ViTs, all head dims, masks, host time."""
    report_everyday(output, name="everyday", only=only, budget=budget, processes=processes, add=add, smoke=smoke)


def report_everyday(
    output: Path, *, name: str, only: str, budget: float, processes: int, add: bool, smoke: bool
) -> None:
    """Measure the everyday cells, write NAME.json and NAME.md as results come in, and print the tables."""
    from inline_attention.benchmark import everyday
    from inline_attention.benchmark.everyday_cells import everyday_cells, smoke_cells
    from inline_attention.benchmark.tables import everyday_tables

    place = resolve_device("cpu" if smoke else "cuda")
    cells = smoke_cells() if smoke else everyday_cells()
    chosen = {cell.name for cell in everyday.choose_cells(cells, only)}
    if not chosen:
        fail(f"--only {only!r} fits no cell; leave it out to measure all")
    earlier = _read_earlier(output / f"{name}.json") if add else None
    settings = everyday.EverydaySettings(
        place,
        resolve_dtype(None, place),
        tuple(cell for cell in cells if cell.name in chosen.union((earlier or {}).get("cells", ()))),
        budget=budget,
        processes=0 if smoke else processes,
        seconds=0.0 if smoke else 0.25,
        only=only,
    )
    measure = partial(everyday.measure_everyday, settings, earlier=earlier)
    _run(measure, everyday_tables, everyday.count_steps(settings), output / name, "Everyday speed", None)


def _read_earlier(path: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(read_bounded(path, MAX_TEXT_BYTES)) if path.exists() else None
        if content is not None and not (isinstance(content, dict) and isinstance(content.get("cells"), dict)):
            raise UntrustedDataError("it holds no cells")
        return content
    except (OSError, ValueError) as error:
        fail(f"{path} is not a result file: {error}; run without --add to replace it")


def report(settings: AttentionSettings | ModelSettings, output: Path, name: str) -> None:
    """Measure, write NAME.json and NAME.md as results come in, then NAME.png, and print the tables."""
    from inline_attention.benchmark import attention, models, plots, tables
    from inline_attention.benchmark.results import dtype_name

    base, dtype = output / name, dtype_name(settings.dtype)
    if isinstance(settings, attention.AttentionSettings):
        measure, steps = partial(attention.measure_attention, settings), attention.count_steps(settings)
        _run(measure, tables.attention_tables, steps, base, f"Attention from packed qkv, {dtype}", plots.draw_attention)
    else:
        measure, steps = partial(models.measure_models, settings), models.count_steps(settings)
        _run(measure, tables.model_tables, steps, base, f"Models, {dtype}", plots.draw_models)


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

    name = name or ("bf16" if device.type == "cuda" else "fp32")
    if name not in DTYPES and name not in DTYPES.values():
        fail(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return getattr(torch, DTYPES.get(name, name))


def _run(
    measure: Callable[[Callable[[Report, str], None]], Report],
    tables_of: Callable[[Report], list[ResultTable]],
    steps: int,
    base: Path,
    title: str,
    draw: Callable[[Report, Path], list[Path]] | None,
) -> None:
    from inline_attention.benchmark.results import write_json, write_markdown
    from inline_attention.benchmark.tables import as_markdown

    console = make_console(log_width=LOG_WIDTH)
    with writing_to(base.parent):
        base.parent.mkdir(parents=True, exist_ok=True)

    def save(report: Report, picture: str = "") -> None:
        with writing_to(base.parent):
            write_json(base.with_suffix(".json"), report.as_json())
            body = as_markdown(tables_of(report)) + picture
            write_markdown(base.with_suffix(".md"), title, report.environment, body)

    with progress_bar(console) as progress:
        task = progress.add_task("measuring", total=steps)

        def show(report: Report, line: str) -> None:
            progress.advance(task)
            console.print(line, style="dim", soft_wrap=True)
            console.file.flush()  # a log is read while the command runs, and kept if it is killed
            save(report)  # after every step: a run that is cut off leaves its figures

        report = measure(show)
    with writing_to(base.parent):
        drawn = None if draw is None else draw_if_possible(partial(draw, report, base.with_suffix(".png")))
    save(report, f"\n\n![{title}]({base.name}.png)" if drawn else "")
    for table in tables_of(report):
        console.print(make_table(table.header, table.rows, title=table.title))
        for note in table.notes:
            console.print(f"  {note}", style="dim")
    names = [f"{base.name}{suffix}" for suffix in (".json", ".md", *([".png"] if drawn else []))]
    say(f"Results written to {base.parent}: {', '.join(names)}")


def _each_of(option: str, given: str, known: Sequence[Name]) -> list[Name]:
    names = split_names(given)
    chosen = [candidate for candidate in known if candidate in names]
    if not chosen or any(name not in known for name in names):
        fail(f"{option} takes {', '.join(known)}, separated by commas, got {','.join(names)!r}")
    return chosen
