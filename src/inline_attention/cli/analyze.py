"""`inline analyze`: argument parsing only. What an analysis needs is imported when it runs, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

analyze_app = typer.Typer(
    no_args_is_help=True,
    help="Check the paper's argument on your own models and images: tables (CSV, JSON) and pictures (PNG, SVG). "
    "Without --checkpoint or --model, small untrained twins on handwritten digits show what comes out; "
    "`inline train digits` trains such models in a minute.",
)

Checkpoints = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint", "-c", help="A run of `inline train`, a checkpoint, or a file of weights; repeatable.",
        show_default=False,
    ),
]  # fmt: skip
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="A model by name: untrained, with its twins; with one --checkpoint, what its weights are of.",
        show_default=False,
    ),
]  # fmt: skip
DataFolder = Annotated[Path | None, typer.Option("--data-dir", help="Folder of pictures.", show_default=False)]
Dataset = Annotated[
    str | None,
    typer.Option(
        help="folder, digits, cifar10, hfds/NAME or wds/PATTERN.", show_default="folder with --data-dir, else digits"
    ),
]
Split = Annotated[str, typer.Option(help="Split or subfolder of a dataset.")]
Images = Annotated[int, typer.Option("--images", "-n", min=1, help="How many, drawn at random.")]
Size = Annotated[
    str | None,
    typer.Option(help="Pixels of the images: 224, or height and width, 192x320.", show_default="the model's"),
]
Layers = Annotated[
    list[int] | None,
    typer.Option(
        "--layer", help="Number of an attention layer, from 0; -1 is the last; repeatable.", show_default="all"
    ),
]
Heads = Annotated[
    list[int] | None, typer.Option("--head", help="Number of a head, from 0; repeatable.", show_default="all")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Workers = Annotated[int, typer.Option("--workers", "-j", min=0, help="Processes that read images.")]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images to run at once.")]
Seed = Annotated[int, typer.Option(help="Of everything random.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for tables and pictures; made if missing.")]


@dataclass(frozen=True)
class CommonOptions:
    """What all analyses of models take; see `inline analyze confusion --help`."""

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
        """For result files."""
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
        typer.Option("--layer", help="Number of an attention layer; repeatable.", show_default="first, middle, last"),
    ] = None,
    head: Heads = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries to try per head and image.")] = 8,
    device: Device = "auto",
    seed: Seed = 0,
    output: Output = Path("out/analyze"),
) -> None:
    """Look for different queries with equal weights, and check the keys' rank: is this model's attention one-to-one?

    Softmax, InLine and linear attention are tried with every feature map on the queries and keys of your model.
    Partners are constructed (docs/math.md says how) and searched for. The rank of [K, 1] then says for every head of
    every layer whether the propositions hold.
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
        float, typer.Option(min=0, max=1, help="Relative difference up to which rows of weights count as equal.")
    ] = 0.01,
    worst: Annotated[int, typer.Option(min=1, help="Images to show per model.")] = 4,
    batch_size: BatchSize = 8,
    workers: Workers = 2,
    device: Device = "auto",
    seed: Seed = 0,
    output: Output = Path("out/analyze"),
) -> None:
    """Count pairs of queries that get the same attention although they differ, image by image."""
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
    sides: Annotated[str, typer.Option(help="Sides of neighbourhoods in tokens, odd.")] = "3,5,7",
    batch_size: BatchSize = 8,
    workers: Workers = 2,
    device: Device = "auto",
    seed: Seed = 0,
    output: Output = Path("out/analyze"),
) -> None:
    """Measure how much attention stays in each query's neighbourhood, with and without the local residual."""
    options = _common(checkpoint, model, data_dir, dataset, split, size, device, seed, output)
    odd_sides = _odd_sides(sides)
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
    sides: Annotated[str, typer.Option(help="Sides of hidden neighbourhoods in tokens, odd.")] = "3,5,7",
    batch_size: BatchSize = 32,
    workers: Workers = 2,
    device: Device = "auto",
    seed: Seed = 0,
    output: Output = Path("out/analyze"),
) -> None:
    """Measure accuracy with each query's neighbourhood hidden from it, against as many random tokens.

    Needs images in folders by class, or a dataset with classes. A local 3×3 term is measured twice: without the hidden
    tokens, and as it is.
    """
    options = _common(checkpoint, model, data_dir, dataset, split, size, device, seed, output)
    odd_sides = _odd_sides(sides)
    from inline_attention.cli.analyze_runs import run_masking

    run_masking(
        options,
        images=images, sides=odd_sides, batch_size=batch_size, workers=workers,
    )  # fmt: skip


@analyze_app.command("attention-map")
def attention_map(
    image: Annotated[Path | None, typer.Argument(help="A picture.", show_default="a digit")] = None,
    checkpoint: Checkpoints = None,
    model: Models = None,
    size: Size = None,
    token: Annotated[
        list[str] | None,
        typer.Option("--token", help="Row and column of a query on the layer's grid, such as 3,5; repeatable.",
                     show_default="three where the picture has detail"),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(help="Number of an attention layer, from 0; -1 is the last.", show_default="the middle"),
    ] = None,
    head: Annotated[
        list[int] | None,
        typer.Option("--head", help="Number of a head; of several the mean is shown.", show_default="all"),
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    output: Output = Path("out/analyze"),
) -> None:  # fmt: skip
    """See where tokens of a picture look, model beside model, and the kernels of the local residual."""
    options = _common(checkpoint, model, None, None, "validation", size, device, seed, output)
    places = [_place(text) for text in token or ()]
    from inline_attention.cli.analyze_runs import run_attention_map

    run_attention_map(
        options,
        image=image, tokens=places, layer=layer, heads=head,
    )  # fmt: skip


@analyze_app.command()
def scaling(
    model: Annotated[str, typer.Option(help="A model by name; its twins are measured too.")] = "inline_deit_tiny",
    sizes: Annotated[
        str | None, typer.Option(help="Sides of images in pixels.", show_default="224,448,896; on a GPU to 1792")
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(help="Sides of windows in tokens, at the first size; for Swin models.", show_default="none"),
    ] = None,
    batch_size: BatchSize = 1,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="To spend on measuring each size.")] = 2.0,
    output: Output = Path("out/analyze"),
) -> None:
    """Measure time, memory and multiply-adds of a model and its twins as images or windows grow."""
    image_sizes = None if sizes is None else _numbers(sizes, "--sizes")
    window_sides = [] if windows is None else _numbers(windows, "--windows")
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
        size=None if size is None else _height_and_width(size),
        device=device,
        seed=seed,
        output=output,
    )


def _numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(
            f"expected whole numbers ≥ 1 separated by commas, such as 224,448, got {text!r}", param_hint=option
        )
    return sorted({int(part) for part in parts})


def _odd_sides(text: str) -> list[int]:
    sides = _numbers(text, "--sides")
    if any(side < 3 or side % 2 == 0 for side in sides):
        raise typer.BadParameter(
            f"a neighbourhood has its query in the middle and is at least 3 wide, such as 3,5,7, got {text!r}",
            param_hint="--sides",
        )
    return sides


def _height_and_width(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(
            f"expected pixels, such as 224, or height and width, such as 192x320, got {text!r}", param_hint="--size"
        )
    return int(parts[0]), int(parts[-1])


def _place(text: str) -> tuple[int, int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"expected row and column, such as 3,5, got {text!r}", param_hint="--token")
    return int(parts[0]), int(parts[1])
