"""`inline analyze`: options of all analyses. What an analysis needs is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from inline_attention.cli.options import parse_numbers, parse_odd_sides, parse_size, parse_token

analyze_app = typer.Typer(
    no_args_is_help=True,
    help="Check the paper's argument on your own models and images: tables (CSV, JSON) and pictures (PNG, SVG). "
    "Without --checkpoint and --model, small untrained models and handwritten digits are used.",
)

Checkpoints = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint", "-c", help="Run, checkpoint or weights file; repeatable.",
        show_default=False,
    ),
]  # fmt: skip
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="Model name: untrained with its twins, or the checkpoint's model.",
        show_default=False,
    ),
]  # fmt: skip
DataFolder = Annotated[Path | None, typer.Option("--data-dir", help="Picture folder.", show_default=False)]
Dataset = Annotated[
    str | None,
    typer.Option(
        help="folder, digits, cifar10, hfds/NAME or wds/PATTERN.", show_default="folder with --data-dir, else digits"
    ),
]
Split = Annotated[str, typer.Option(help="Split or subfolder of a dataset.")]
Images = Annotated[int, typer.Option("--images", "-n", min=1, help="Number of images, drawn at random.")]
Size = Annotated[
    str | None,
    typer.Option(help="Image size in pixels: 224, or height and width, 192x320.", show_default="the model's"),
]
Layers = Annotated[
    list[int] | None,
    typer.Option("--layer", help="Attention layer, from 0; -1 is the last; repeatable.", show_default="all"),
]
Heads = Annotated[list[int] | None, typer.Option("--head", help="Head, from 0; repeatable.", show_default="all")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Workers = Annotated[int, typer.Option("--workers", "-j", min=0, help="Processes that read images.")]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images per batch.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Output folder; created if missing.")]


@dataclass(frozen=True)
class CommonOptions:
    """Options that all analyses of models share; see `inline analyze confusion --help`."""

    checkpoints: tuple[Path, ...]
    models: tuple[str, ...]
    data_dir: Path | None
    dataset: str
    split: str
    size: tuple[int, int] | None
    device: str
    seed: int
    output: Path

    def described(self, **more: Any) -> dict[str, Any]:
        """Return the options for result files."""
        settings = {"dataset": self.dataset, "split": self.split, "size": self.size, "seed": self.seed}
        return settings | ({"data_dir": str(self.data_dir)} if self.data_dir else {}) | more


@analyze_app.command()
def injectivity(
    checkpoint: Checkpoints = None,
    model: Models = None,
    data_dir: DataFolder = None,
    dataset: Dataset = None,
    split: Split = "validation",
    images: Images = 2,
    size: Size = None,
    layer: Annotated[
        list[int] | None,
        typer.Option("--layer", help="Attention layer, from 0; repeatable.", show_default="first, middle, last"),
    ] = None,
    head: Heads = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries per head and image.")] = 8,
    device: Device = "auto",
    seed: Seed = 0,
    output: Output = Path("out/analyze"),
) -> None:
    """Search for different queries with equal weights, and check the rank of the keys.

    Softmax, InLine and linear attention are tried with every feature map on the queries and keys of your model.
    Colliding queries are constructed (see docs/math.md) and searched for. The rank of [K, 1] decides for every head
    whether its attention is one-to-one.
    """
    options = _common(checkpoint, model, data_dir, dataset, split, size, device, seed, output)
    from inline_attention.cli.analyze_runs import run_injectivity

    run_injectivity(
        options,
        images=images, layers=layer, heads=head, queries=queries,
    )  # fmt: skip


@analyze_app.command()
def confusion(
    checkpoint: Checkpoints = None,
    model: Models = None,
    data_dir: DataFolder = None,
    dataset: Dataset = None,
    split: Split = "validation",
    images: Images = 64,
    size: Size = None,
    layer: Layers = None,
    head: Heads = None,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Largest relative difference of equal rows of weights.")
    ] = 0.01,
    worst: Annotated[int, typer.Option(min=1, help="Number of images to show per model.")] = 4,
    batch_size: BatchSize = 8,
    workers: Workers = 2,
    device: Device = "auto",
    seed: Seed = 0,
    output: Output = Path("out/analyze"),
) -> None:
    """Count pairs of different queries that get the same attention, per image."""
    options = _common(checkpoint, model, data_dir, dataset, split, size, device, seed, output)
    from inline_attention.cli.analyze_runs import run_confusion

    run_confusion(
        options,
        images=images, layers=layer, heads=head, tolerance=tolerance, worst=worst, batch_size=batch_size,
        workers=workers,
    )  # fmt: skip


@analyze_app.command()
def locality(
    checkpoint: Checkpoints = None,
    model: Models = None,
    data_dir: DataFolder = None,
    dataset: Dataset = None,
    split: Split = "validation",
    images: Images = 64,
    size: Size = None,
    layer: Layers = None,
    head: Heads = None,
    sides: Annotated[str, typer.Option(help="Odd sides of neighborhoods in tokens.")] = "3,5,7",
    batch_size: BatchSize = 8,
    workers: Workers = 2,
    device: Device = "auto",
    seed: Seed = 0,
    output: Output = Path("out/analyze"),
) -> None:
    """Measure how much attention stays in each query's neighborhood, with and without the local residual."""
    options = _common(checkpoint, model, data_dir, dataset, split, size, device, seed, output)
    odd_sides = parse_odd_sides(sides)
    from inline_attention.cli.analyze_runs import run_locality

    run_locality(
        options,
        images=images, layers=layer, heads=head, sides=odd_sides, batch_size=batch_size, workers=workers,
    )  # fmt: skip


@analyze_app.command()
def masking(
    checkpoint: Checkpoints = None,
    model: Models = None,
    data_dir: DataFolder = None,
    dataset: Dataset = None,
    split: Split = "validation",
    images: Images = 1000,
    size: Size = None,
    sides: Annotated[str, typer.Option(help="Odd sides of hidden neighborhoods in tokens.")] = "3,5,7",
    batch_size: BatchSize = 32,
    workers: Workers = 2,
    device: Device = "auto",
    seed: Seed = 0,
    output: Output = Path("out/analyze"),
) -> None:
    """Measure accuracy with each query's neighborhood hidden, compared with as many random tokens.

    Needs a dataset with classes, such as one folder per class. A local 3×3 term is measured twice: with the same tokens
    hidden from it, and unchanged.
    """
    options = _common(checkpoint, model, data_dir, dataset, split, size, device, seed, output)
    odd_sides = parse_odd_sides(sides)
    from inline_attention.cli.analyze_runs import run_masking

    run_masking(
        options,
        images=images, sides=odd_sides, batch_size=batch_size, workers=workers,
    )  # fmt: skip


@analyze_app.command("attention-map")
def attention_map(
    image: Annotated[Path | None, typer.Argument(help="Picture file.", show_default="a digit")] = None,
    checkpoint: Checkpoints = None,
    model: Models = None,
    size: Size = None,
    token: Annotated[
        list[str] | None,
        typer.Option("--token", help="Row and column of a query token, such as 3,5; repeatable.",
                     show_default="three where the picture has detail"),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(help="Attention layer, from 0; -1 is the last.", show_default="the middle"),
    ] = None,
    head: Annotated[
        list[int] | None,
        typer.Option("--head", help="Head, from 0; several are averaged.", show_default="all"),
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    output: Output = Path("out/analyze"),
) -> None:  # fmt: skip
    """Draw the attention of single tokens of a picture, and the kernels of the local residual."""
    options = _common(checkpoint, model, None, None, "validation", size, device, seed, output)
    places = [parse_token(text) for text in token or ()]
    from inline_attention.cli.analyze_runs import run_attention_map

    run_attention_map(
        options,
        image=image, tokens=places, layer=layer, heads=head,
    )  # fmt: skip


@analyze_app.command()
def scaling(
    model: Annotated[str, typer.Option(help="Model name; its twins are measured too.")] = "inline_deit_tiny",
    sizes: Annotated[
        str | None, typer.Option(help="Image sizes in pixels.", show_default="224,448,896; on a GPU to 1792")
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(help="Window sides in tokens, at the first size (Swin).", show_default="none"),
    ] = None,
    batch_size: BatchSize = 1,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="Seconds of measuring per size.")] = 2.0,
    output: Output = Path("out/analyze"),
) -> None:
    """Measure time, memory and multiply-adds of a model and its twins as images or windows grow."""
    image_sizes = None if sizes is None else parse_numbers(sizes, "--sizes", "224,448")
    window_sides = parse_numbers(windows, "--windows", "7,14") or []
    from inline_attention.cli.analyze_runs import run_scaling

    run_scaling(
        model,
        sizes=image_sizes,
        windows=window_sides,
        batch_size=batch_size,
        device=device,
        seconds=seconds,
        output=output,
    )


def _common(
    checkpoints: list[Path] | None,
    models: list[str] | None,
    data_dir: Path | None,
    dataset: str | None,
    split: str,
    size: str | None,
    device: str,
    seed: int,
    output: Path,
) -> CommonOptions:
    return CommonOptions(
        checkpoints=tuple(checkpoints or ()),
        models=tuple(models or ()),
        data_dir=data_dir,
        dataset=dataset or ("digits" if data_dir is None else "folder"),
        split=split,
        size=None if size is None else (parse_size(size)[0], parse_size(size)[-1]),
        device=device,
        seed=seed,
        output=output,
    )
