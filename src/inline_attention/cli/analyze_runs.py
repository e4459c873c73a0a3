"""`inline analyze`: load models and pictures, measure with progress, print tables, write results and pictures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import TaskID

from inline_attention.analysis.attention_map import (
    AttentionMaps,
    draw_attention_maps,
    kernel_rows,
    measure_attention_maps,
    weight_rows,
)
from inline_attention.analysis.confusion import draw_confusion, draw_worst_images, survey_confusion
from inline_attention.analysis.injectivity import draw_injectivity, survey_injectivity
from inline_attention.analysis.locality import draw_locality, survey_locality
from inline_attention.analysis.masking import draw_masking, survey_masking
from inline_attention.analysis.pictures import PictureSample, open_pictures
from inline_attention.analysis.scaling import KINDS, draw_scaling, measure_scaling
from inline_attention.analysis.subjects import (
    Subject,
    trained_subject,
    untrained_subject,
    weights_note,
    with_distinct_labels,
)
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import flat_row, write_results
from inline_attention.cli import analyze_tables as tables
from inline_attention.cli.analyze import CommonOptions
from inline_attention.cli.bench import resolve_device
from inline_attention.cli.printing import fail, make_console, progress_bar, say, warn, writing_to
from inline_attention.data.datasets import digits, open_dataset
from inline_attention.data.images import limit_aspect_ratio, load_image
from inline_attention.engine.config.resolving import model_arguments
from inline_attention.models import list_models
from inline_attention.recipes.small import DIGITS

if TYPE_CHECKING:
    from inline_attention.support.figures import Style

FAMILY_FOR_PHOTOGRAPHS = "deit_tiny"
SHOWN_BROKEN = 3
Result = TypeVar("Result")


def run_injectivity(
    options: CommonOptions, *, images: int, layers: list[int] | None, heads: list[int] | None, queries: int
) -> None:
    """See `inline analyze injectivity --help`."""
    console = _start(options.output, "injectivity")
    sample = _sample(options, images=images, batch_size=1)
    subjects = _load_subjects(options)
    found = _survey(
        console, subjects, survey_injectivity, sample,
        layers=layers, heads=heads, queries=queries, seed=options.seed,
    )  # fmt: skip
    rates = {label: rates for label, (rates, _) in found.items()}
    conditions = {label: conditions for label, (_, conditions) in found.items()}
    console.print(tables.collision_table(subjects, rates))
    console.print(tables.condition_table(subjects, conditions))
    rows = {"collisions": _rows(rates), "keys": _rows(conditions)}
    settings = {"images": images, "layers": layers, "heads": heads, "queries": queries, "skipped": sample.skipped}
    _finish(
        console, options, "injectivity", subjects, rows, settings,
        lambda: draw_injectivity(rates, conditions, weights_note(subjects), options.output),
    )  # fmt: skip


def run_confusion(
    options: CommonOptions,
    *,
    images: int,
    layers: list[int] | None,
    heads: list[int] | None,
    tolerance: float,
    worst: int,
    batch_size: int,
    workers: int,
) -> None:
    """See `inline analyze confusion --help`."""
    console = _start(options.output, "confusion")
    sample = _sample(options, images=images, batch_size=batch_size, workers=workers)
    subjects = _load_subjects(options)
    found = _survey(
        console, subjects, survey_confusion, sample, layers=layers, heads=heads, tolerance=tolerance, worst=worst
    )
    counts = {label: counts for label, (counts, _) in found.items()}
    worst_images = {label: shown for label, (_, shown) in found.items()}
    console.print(tables.confusion_table(subjects, counts, tolerance))

    def draw() -> list[Path]:
        note = weights_note(subjects)
        files = draw_confusion(_styles(subjects), counts, tolerance, note, options.output)
        return files + draw_worst_images(worst_images, tolerance, note, options.output)

    settings = {"images": images, "layers": layers, "heads": heads, "tolerance": tolerance, "skipped": sample.skipped}
    _finish(console, options, "confusion", subjects, {"confusion": _rows(counts)}, settings, draw)


def run_locality(
    options: CommonOptions,
    *,
    images: int,
    layers: list[int] | None,
    heads: list[int] | None,
    sides: list[int],
    batch_size: int,
    workers: int,
) -> None:
    """See `inline analyze locality --help`."""
    console = _start(options.output, "locality")
    sample = _sample(options, images=images, batch_size=batch_size, workers=workers)
    subjects = _load_subjects(options)
    measured = _survey(console, subjects, survey_locality, sample, layers=layers, heads=heads, sides=sides)
    console.print(tables.locality_table(subjects, measured, sides))
    settings = {"images": images, "layers": layers, "heads": heads, "sides": sides, "skipped": sample.skipped}
    _finish(
        console, options, "locality", subjects, {"locality": _rows(measured)}, settings,
        lambda: draw_locality(_styles(subjects), measured, weights_note(subjects), options.output),
    )  # fmt: skip


def run_masking(options: CommonOptions, *, images: int, sides: list[int], batch_size: int, workers: int) -> None:
    """See `inline analyze masking --help`."""
    console = _start(options.output, "masking")
    sample = _sample(options, images=images, batch_size=batch_size, workers=workers, labelled=True)
    subjects = _load_subjects(options, num_classes=len(sample.source.class_names))
    results = _survey(console, subjects, survey_masking, sample, sides=sides, seed=options.seed)
    console.print(tables.masking_table(subjects, results))
    settings = {"images": images, "sides": sides, "skipped": sample.skipped}
    _finish(
        console, options, "masking", subjects, {"masking": _rows(results)}, settings,
        lambda: draw_masking(results, weights_note(subjects), options.output),
    )  # fmt: skip


def run_attention_map(
    options: CommonOptions,
    *,
    image: Path | None,
    tokens: list[tuple[int, int]],
    layer: int | None,
    heads: list[int] | None,
) -> None:
    """See `inline analyze attention-map --help`."""
    console = _start(options.output, "attention-map")
    picture = digits("validation").load(options.seed % 360) if image is None else load_image(image)
    name = "a digit" if image is None else image.name
    subjects = _load_subjects(options, for_digits=image is None)
    maps: list[AttentionMaps] = []
    for subject in subjects:
        pixels = subject.transform()(limit_aspect_ratio(picture))
        # The others follow the first model: the same places of the picture, whatever their grids.
        places = [item.token for item in maps[0].maps] if maps else tokens
        token_grid = maps[0].grid_size if maps else None
        maps.append(
            measure_attention_maps(subject, pixels, layer=layer, heads=heads, tokens=places, token_grid=token_grid)
        )
    console.print(tables.map_table(maps))
    rows = {"weights": list(weight_rows(maps)), "kernels": list(kernel_rows(maps))}
    settings = {"image": name, "seed": options.seed}
    _finish(
        console, options, "attention-map", subjects, rows, settings,
        lambda: draw_attention_maps(maps, name, weights_note(subjects), options.output),
    )  # fmt: skip


def run_scaling(
    model: str,
    *,
    sizes: list[int] | None,
    windows: list[int],
    batch_size: int,
    device: str,
    seconds: float,
    output: Path,
) -> None:
    """See `inline analyze scaling --help`."""
    console = _start(output, "scaling")
    place = resolve_device(device)
    sizes = sizes or ([224, 448, 896] if place.type == "cpu" else [224, 448, 896, 1792])
    with progress_bar(console) as progress:
        task = progress.add_task("measuring", total=(len(sizes) + len(windows)) * len(KINDS))
        points = measure_scaling(
            model, sizes=sizes, windows=windows, batch=batch_size, device=place, seconds=seconds,
            on_progress=lambda _: progress.advance(task),
        )  # fmt: skip
    console.print(tables.scaling_table(points))
    environment = describe_environment()
    machine = environment["machine"] if place.type == "cpu" else f"{environment['gpu']}, torch {environment['torch']}"
    rows = [flat_row(point) for point in points]
    with writing_to(output):
        files = write_results(
            output, "scaling", {"scaling": rows}, subjects=[], settings={"device": str(place), "seconds": seconds}
        )
        files += _draw_if_possible(lambda: draw_scaling(points, machine, output))
    _say_where(console, files)


def _start(output: Path, analysis: str) -> Console:
    # Better to learn all this now than after measuring.
    with writing_to(output):
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()
    earlier = output / f"{analysis}.json"
    if earlier.exists():
        warn(f"{earlier} and what belongs to it will be replaced; --output takes another folder")
    return make_console()


def _load_subjects(
    options: CommonOptions, *, num_classes: int | None = None, for_digits: bool | None = None
) -> list[Subject]:
    """The models that were asked for, or small untrained twins.

    Args:
        options: Options of the command.
        num_classes: Classes of untrained models; the model's own by default.
        for_digits: Whether what is asked for without a name are models for digits; by default, as the dataset says.
    """
    common: dict[str, Any] = {"size": options.size, "device": options.device}
    if options.checkpoints:
        if len(options.models) > 1 or (options.models and len(options.checkpoints) > 1):
            fail(
                "--model names what the weights of one --checkpoint are of, "
                f"got {len(options.models)} models and {len(options.checkpoints)} checkpoints; analyse them separately"
            )
        name = options.models[0] if options.models else None
        return with_distinct_labels([trained_subject(path, model_name=name, **common) for path in options.checkpoints])
    arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    names = [twin for name in options.models for twin in _with_twins(name)]
    if not names:
        names = _with_twins(f"inline_{FAMILY_FOR_PHOTOGRAPHS}")
        if options.dataset == "digits" if for_digits is None else for_digits:
            arguments = model_arguments(DIGITS.config)
    subjects = [untrained_subject(name, seed=options.seed, **common, **arguments) for name in dict.fromkeys(names)]
    warn(f"untrained weights: {', '.join(subject.label for subject in subjects)}; --checkpoint takes trained ones")
    return subjects


def _with_twins(name: str) -> list[str]:
    kind, _, rest = name.partition("_")
    twins = [f"{twin}_{rest}" for twin in KINDS]
    return [name, *(twin for twin in twins if twin != name)] if kind in KINDS and name in list_models() else [name]


def _sample(
    options: CommonOptions, *, images: int, batch_size: int, workers: int = 0, labelled: bool = False
) -> PictureSample:
    open_source = open_dataset if labelled else open_pictures
    source = open_source(options.dataset, options.data_dir, options.split)
    in_memory = options.dataset == "digits"  # nothing to read: processes would only cost time
    return PictureSample(
        source, images=images, seed=options.seed, batch_size=batch_size, workers=0 if in_memory else workers
    )


def _survey(
    console: Console,
    subjects: Sequence[Subject],
    survey: Callable[..., Result],
    sample: PictureSample,
    **arguments: Any,
) -> dict[str, Result]:
    """What a survey finds for each model, by label, with a bar for each."""
    results: dict[str, Result] = {}
    with progress_bar(console) as progress:
        for subject in subjects:
            task = progress.add_task(subject.label, total=len(sample))

            def advance(share: float, task: TaskID = task) -> None:
                progress.advance(task, share * len(sample))

            results[subject.label] = survey(subject, sample, on_progress=advance, **arguments)
    return results


def _report_skipped(skipped: Mapping[str, str]) -> None:
    for name, reason in list(skipped.items())[:SHOWN_BROKEN]:
        warn(f"skipped {name}: {reason}")
    if len(skipped) > SHOWN_BROKEN:
        warn(f"and {len(skipped) - SHOWN_BROKEN:,} more, which the JSON lists")


def _rows(measured: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows of result files: the model's label, then the measurement."""
    return [{"model": label} | flat_row(item) for label, items in measured.items() for item in items]


def _finish(
    console: Console,
    options: CommonOptions,
    name: str,
    subjects: Sequence[Subject],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    settings: Mapping[str, Any],
    draw: Callable[[], list[Path]],
) -> None:
    """Write the results, draw them, and say where they are and what was left out."""
    described = [subject.described() for subject in subjects]
    with writing_to(options.output):
        files = write_results(options.output, name, rows, subjects=described, settings=options.described(**settings))
        files += _draw_if_possible(draw)
    _report_skipped(settings.get("skipped", {}))
    _say_where(console, files)


def _say_where(console: Console, files: Sequence[Path]) -> None:
    names = ", ".join(file.name for file in files)
    console.print(f"{names} are in", soft_wrap=True)
    say(files[0].parent)


def _draw_if_possible(draw: Callable[[], list[Path]]) -> list[Path]:
    try:
        return draw()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        warn("no pictures without matplotlib: pip install 'inline-attention[plots]'")
        return []


def _styles(subjects: Sequence[Subject]) -> dict[str, Style]:
    """Return line styles by label."""
    from inline_attention.support.figures import numbered_styles

    return numbered_styles({subject.label: subject.kind for subject in subjects})
