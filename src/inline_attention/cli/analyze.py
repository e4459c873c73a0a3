"""`inline analyze`: one command per analysis. What an analysis needs is imported when it runs."""

# No `from __future__ import annotations`: `analysis` reads the annotations.
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from inline_attention.cli.options import (
    DEFAULT_MAX_PIXELS,
    BatchSize,
    Device,
    Level,
    MaxPixels,
    Memory,
    Output,
    Seed,
    parse_numbers,
    parse_odd_sides,
    parse_size,
    parse_token,
)

analyze_app = typer.Typer(
    no_args_is_help=True,
    help="Check the paper's argument on your own models and images: tables (CSV, JSON) and pictures (PNG, SVG). "
    "Without --checkpoint and --model, small untrained models and handwritten digits are used.",
)

Images = Annotated[int, Option("--images", "-n", min=1, help="Number of images, drawn at random.")]
Layers = Annotated[
    list[int] | None, Option("--layer", help="Attention layer, from 0; -1 is the last; repeatable.", show_default="all")
]
Heads = Annotated[list[int] | None, Option("--head", help="Head, from 0; repeatable.", show_default="all")]
Workers = Annotated[int, Option("--workers", "-j", min=0, help="Processes that read images.")]


@dataclass(kw_only=True)
class ModelOptions:
    """Options of all analyses of models."""

    checkpoint: Annotated[
        list[Path] | None,
        Option("--checkpoint", "-c", help="Run, checkpoint or weights file; repeatable.", show_default=False),
    ] = None
    model: Annotated[
        list[str] | None,
        Option(help="Model name: untrained with its twins, or the checkpoint's model.", show_default=False),
    ] = None
    size: Annotated[
        str | None, Option(help="Image size in pixels: 224, or height and width, 192x320.", show_default="the model's")
    ] = None
    device: Device = "auto"
    seed: Seed = 0
    output: Output = Path("out/analyze")
    image_size: tuple[int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        self.image_size = None if self.size is None else (parse_size(self.size)[0], parse_size(self.size)[-1])

    def described(self) -> dict[str, Any]:
        """Return the options for result files."""
        return {"size": self.image_size, "seed": self.seed}


@dataclass(kw_only=True)
class PictureOptions(ModelOptions):
    """Options of analyses of models on a dataset."""

    data_dir: Annotated[Path | None, Option(help="Picture folder.", show_default=False)] = None
    dataset: Annotated[
        str | None,
        Option(
            help="folder, digits, cifar10, hfds/NAME or wds/PATTERN.",
            show_default="folder with --data-dir, else digits",
        ),
    ] = None
    split: Annotated[str, Option(help="Split or subfolder of a dataset.")] = "validation"
    source: str = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.source = self.dataset or ("digits" if self.data_dir is None else "folder")

    def described(self) -> dict[str, Any]:
        """Return the options for result files."""
        place = {"data_dir": str(self.data_dir)} if self.data_dir else {}
        return {"dataset": self.source, "split": self.split, **super().described(), **place}


def analysis(function: Callable[..., None]) -> None:
    """Register a command. The fields of its first parameter, a dataclass, are options like its other parameters."""
    options, *own = inspect.signature(function).parameters.values()
    shared = list(inspect.signature(options.annotation).parameters.values())

    def command(**arguments: Any) -> None:
        common = options.annotation(**{parameter.name: arguments.pop(parameter.name) for parameter in shared})
        function(common, **arguments)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *shared)]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = function.__doc__
    analyze_app.command(function.__name__.replace("_", "-"))(command)


@analysis
def injectivity(
    options: PictureOptions,
    images: Images = 2,
    layer: Annotated[
        list[int] | None,
        Option("--layer", help="Attention layer, from 0; repeatable.", show_default="first, middle, last"),
    ] = None,
    head: Heads = None,
    queries: Annotated[int, Option(min=1, help="Queries per head and image.")] = 8,
) -> None:
    """Search for different queries with equal weights, and check the rank of the keys.

    Softmax, InLine and linear attention are tried with every feature map on the queries and keys of your model.
    Colliding queries are constructed (see docs/math.md) and searched for. The rank of [K, 1] decides for every head
    whether its attention is one-to-one.
    """
    from inline_attention.analysis.injectivity import draw_injectivity, survey_injectivity
    from inline_attention.cli.analyze_runs import Survey
    from inline_attention.cli.analyze_tables import collision_table, condition_table

    survey = Survey("injectivity", options, images=images)
    found = survey.measure(survey_injectivity, layers=layer, heads=head, queries=queries, seed=options.seed)
    rates = {label: rates for label, (rates, _) in found.items()}
    conditions = {label: conditions for label, (_, conditions) in found.items()}
    survey.finish(
        [collision_table(rates), condition_table(conditions)],
        {"collisions": rates, "keys": conditions},
        {"layers": layer, "heads": head, "queries": queries},
        lambda: draw_injectivity(rates, conditions, survey.note, options.output),
    )


@analysis
def confusion(
    options: PictureOptions,
    images: Images = 64,
    layer: Layers = None,
    head: Heads = None,
    tolerance: Annotated[
        float, Option(min=0, max=1, help="Largest relative difference of equal rows of weights.")
    ] = 0.01,
    worst: Annotated[int, Option(min=1, help="Number of images to show per model.")] = 4,
    batch_size: BatchSize = 8,
    workers: Workers = 2,
) -> None:
    """Count pairs of different queries that get the same attention, per image."""
    from inline_attention.analysis.confusion import draw_confusion, draw_worst_images, survey_confusion
    from inline_attention.cli.analyze_runs import Survey
    from inline_attention.cli.analyze_tables import confusion_table

    survey = Survey("confusion", options, images=images, batch_size=batch_size, workers=workers)
    found = survey.measure(survey_confusion, layers=layer, heads=head, tolerance=tolerance, worst=worst)
    counts = {label: counts for label, (counts, _) in found.items()}
    worst_images = {label: shown for label, (_, shown) in found.items()}

    def draw() -> list[Path]:
        files = draw_confusion(survey.styles, counts, tolerance, survey.note, options.output)
        return files + draw_worst_images(worst_images, tolerance, survey.note, options.output)

    settings = {"layers": layer, "heads": head, "tolerance": tolerance}
    survey.finish([confusion_table(counts, tolerance)], {"confusion": counts}, settings, draw)


@analysis
def locality(
    options: PictureOptions,
    images: Images = 64,
    layer: Layers = None,
    head: Heads = None,
    sides: Annotated[str, Option(help="Odd sides of neighborhoods in tokens.")] = "3,5,7",
    batch_size: BatchSize = 8,
    workers: Workers = 2,
) -> None:
    """Measure how much attention stays in each query's neighborhood, with and without the local residual."""
    odd_sides = parse_odd_sides(sides)
    from inline_attention.analysis.locality import draw_locality, survey_locality
    from inline_attention.cli.analyze_runs import Survey
    from inline_attention.cli.analyze_tables import locality_table

    survey = Survey("locality", options, images=images, batch_size=batch_size, workers=workers)
    measured = survey.measure(survey_locality, layers=layer, heads=head, sides=odd_sides)
    survey.finish(
        [locality_table(measured, odd_sides)],
        {"locality": measured},
        {"layers": layer, "heads": head, "sides": odd_sides},
        lambda: draw_locality(survey.styles, measured, survey.note, options.output),
    )


@analysis
def masking(
    options: PictureOptions,
    images: Images = 1000,
    sides: Annotated[str, Option(help="Odd sides of hidden neighborhoods in tokens.")] = "3,5,7",
    batch_size: BatchSize = 32,
    workers: Workers = 2,
) -> None:
    """Measure accuracy with each query's neighborhood hidden, compared with as many random tokens.

    Needs a dataset with classes, such as one folder per class. A local 3×3 term is measured twice: with the same tokens
    hidden from it, and unchanged.
    """
    odd_sides = parse_odd_sides(sides)
    from inline_attention.analysis.masking import draw_masking, survey_masking
    from inline_attention.cli.analyze_runs import Survey
    from inline_attention.cli.analyze_tables import masking_table

    survey = Survey("masking", options, images=images, batch_size=batch_size, workers=workers, labelled=True)
    results = survey.measure(survey_masking, sides=odd_sides, seed=options.seed)
    survey.finish(
        [masking_table(results, odd_sides)],
        {"masking": results},
        {"sides": odd_sides},
        lambda: draw_masking(results, survey.note, options.output),
    )


@analysis
def linearize(
    options: PictureOptions,
    images: Images = 64,
    free: Annotated[
        float, Option(min=0, max=100, help="Loss of the final tokens that counts as free, in percent.")
    ] = 10.0,
    batch_size: BatchSize = 8,
    workers: Workers = 2,
) -> None:
    """Measure which blocks of a softmax network can go linear without training, and suggest --keep-softmax.

    For each block: the share of softmax's output beyond the mean value that InLine and linear attention explain, and
    what the final tokens (and top-1, if the pictures have the model's classes) lose if this block alone is converted,
    and if all blocks that lose less are converted too.
    """
    from inline_attention.analysis.linearize import draw_linearize, survey_linearize
    from inline_attention.cli.analyze_runs import Survey
    from inline_attention.cli.analyze_tables import linearize_table
    from inline_attention.cli.printing import say

    sample = {"images": images, "batch_size": batch_size, "workers": workers}
    survey = Survey("linearize", options, **sample, labelled=None, of_softmax=True)
    found = survey.measure(survey_linearize)
    survey.finish(
        [linearize_table(found)],
        {"linearize": {label: result.blocks for label, result in found.items()}},
        {"free": free, "keep_softmax": {label: result.keep_softmax(free) for label, result in found.items()}},
        lambda: draw_linearize(found, survey.note, options.output, free=free),
    )
    for label, result in found.items():
        kept = result.keep_softmax(free)
        blocks = ",".join(map(str, kept)) + "," * (len(kept) == 1)  # one number alone would count blocks
        advice = f"linearize with --keep-softmax {blocks}" if kept else "all blocks can go linear"
        say(f"{label}: {advice}; at most {free:g} % is lost without training", err=True)


@analysis
def attention_map(
    options: ModelOptions,
    image: Annotated[Path | None, Argument(help="Picture file.", show_default="a digit")] = None,
    token: Annotated[
        list[str] | None,
        Option(
            help="Row and column of a query token, such as 3,5; repeatable.",
            show_default="three where the picture has detail",
        ),
    ] = None,
    layer: Annotated[
        int | None, Option(help="Attention layer, from 0; -1 is the last.", show_default="the middle")
    ] = None,
    head: Annotated[list[int] | None, Option(help="Head, from 0; several are averaged.", show_default="all")] = None,
    evidence: Annotated[
        list[str] | None, Option(help="Class whose evidence the slide's page shows; repeatable.", show_default=False)
    ] = None,
    level: Level = None,
    max_pixels: MaxPixels = DEFAULT_MAX_PIXELS,
    memory: Memory = "4GiB",
) -> None:
    """Draw the attention of single tokens of a picture, and the kernels of the local residual.

    Tiled files too large to decode are streamed at full resolution. Their maps are averaged over cells of tokens, and
    --evidence shows which parts of the slide speak for a class.
    """
    tokens = [parse_token(text) for text in token or ()]
    from inline_attention.analysis import attention_map as maps
    from inline_attention.analysis.subjects import weights_note
    from inline_attention.cli.analyze_runs import finish, load_subjects, measure_slide, start, warn_of_earlier
    from inline_attention.cli.analyze_tables import map_table
    from inline_attention.cli.printing import fail
    from inline_attention.data.datasets import digits
    from inline_attention.data.images import limit_aspect_ratio, load_image
    from inline_attention.tasks.classification.prediction import Streaming

    streaming, chosen = Streaming(max_pixels, level, memory), {"layer": layer, "heads": head}
    console = start(options.output)
    name = "a digit" if image is None else image.name
    settings, shown = options.described() | {"image": name}, []
    if image is not None and streaming.applies_to(image):
        subjects, found, shown = measure_slide(options, image, streaming, evidence or (), tokens=tokens, **chosen)
        settings["level"] = level or 0
    elif evidence:
        fail("--evidence is shown on the page of a slide; give a tiled file, with --level 0 if it is small")
    else:
        if image is None:
            picture = digits("validation").load(options.seed % 360)
        else:
            picture = load_image(image, max_pixels=max_pixels)
        subjects, found = load_subjects(options, for_digits=image is None), []
        warn_of_earlier(options.output, "attention-map")
        for subject in subjects:
            pixels = subject.transform()(limit_aspect_ratio(picture))
            # The others follow the first model: the same places of the picture, whatever their grids.
            places = [item.token for item in found[0].maps] if found else tokens
            grid = found[0].grid_size if found else None
            found.append(maps.measure_attention_maps(subject, pixels, tokens=places, token_grid=grid, **chosen))
    rows = {"weights": list(maps.weight_rows(found)), "kernels": list(maps.kernel_rows(found))}
    if shown:
        rows["evidence"] = list(maps.evidence_rows(shown))
    finish(
        console, options.output, "attention-map", [map_table(found)], subjects, rows, settings,
        lambda: maps.draw_attention_maps(found, name, weights_note(subjects), options.output),
    )  # fmt: skip


@analyze_app.command()
def scaling(
    model: Annotated[str, Option(help="Model name; its twins are measured too.")] = "inline_deit_tiny",
    sizes: Annotated[
        str | None, Option(help="Image sizes in pixels.", show_default="224,448,896; on a GPU to 1792")
    ] = None,
    windows: Annotated[
        str | None, Option(help="Window sides in tokens, at the first size (Swin).", show_default="none")
    ] = None,
    batch_size: BatchSize = 1,
    device: Annotated[str, Option(help="auto, cuda or cpu.")] = "auto",
    seconds: Annotated[float, Option(min=0, help="Seconds of measuring per size.")] = 2.0,
    output: Output = Path("out/analyze"),
) -> None:
    """Measure time, memory and multiply-adds of a model and its twins as images or windows grow."""
    image_sizes = parse_numbers(sizes, "--sizes", "224,448")
    window_sides = parse_numbers(windows, "--windows", "7,14") or []
    from inline_attention.analysis.scaling import draw_scaling, measure_scaling
    from inline_attention.benchmark.environment import describe_environment
    from inline_attention.benchmark.results import flat_row
    from inline_attention.cli.analyze_runs import finish, start, warn_of_earlier
    from inline_attention.cli.analyze_tables import scaling_table
    from inline_attention.cli.bench import resolve_device
    from inline_attention.cli.printing import counting
    from inline_attention.models.registry import ATTENTIONS

    console = start(output)
    place = resolve_device(device)
    warn_of_earlier(output, "scaling")
    image_sizes = image_sizes or ([224, 448, 896] if place.type == "cpu" else [224, 448, 896, 1792])
    with counting("measuring", (len(image_sizes) + len(window_sides)) * len(ATTENTIONS), console) as advance:
        points = measure_scaling(
            model, sizes=image_sizes, windows=window_sides, batch=batch_size, device=place, seconds=seconds,
            on_progress=advance,
        )  # fmt: skip
    environment = describe_environment()
    machine = environment["machine"] if place.type == "cpu" else f"{environment['gpu']}, torch {environment['torch']}"
    finish(
        console, output, "scaling", [scaling_table(points)], [], {"scaling": [flat_row(point) for point in points]},
        {"device": str(place), "seconds": seconds}, lambda: draw_scaling(points, machine, output),
    )  # fmt: skip
