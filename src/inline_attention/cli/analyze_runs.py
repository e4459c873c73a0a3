"""`inline analyze`: load models and pictures, measure with progress, print tables, write results and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from inline_attention.analysis.attention_map import (
    AttentionMaps,
    EvidenceMap,
    measure_slide_evidence,
    measure_slide_maps,
)
from inline_attention.analysis.linearize import softmax_subject
from inline_attention.analysis.scaling import twins_of
from inline_attention.analysis.slide_page import write_slide_page
from inline_attention.analysis.subjects import (
    PictureSample,
    Subject,
    as_probed_softmax,
    open_pictures,
    trained_subject,
    untrained_subject,
    weights_note,
    with_distinct_labels,
)
from inline_attention.benchmark.results import flat_row, write_results
from inline_attention.cli.analyze import ModelOptions, PictureOptions
from inline_attention.cli.printing import (
    draw_if_possible,
    fail,
    make_console,
    make_folder,
    progress_bar,
    say,
    streaming_task,
    warn,
    writing_to,
)
from inline_attention.data.datasets import open_dataset
from inline_attention.data.slides import open_slide
from inline_attention.data.sources import DataError, ImageSource
from inline_attention.models import list_models
from inline_attention.recipes.small import DIGITS
from inline_attention.support.figures import numbered_styles
from inline_attention.tasks.classification.prediction import Streaming

DEFAULT_MODEL, SOFTMAX_MODEL = "inline_deit_tiny", "vit_tiny_patch16_224"
SHOWN_BROKEN = 3
Result = TypeVar("Result")
Rows = Mapping[str, Sequence[Mapping[str, Any]]]


class Survey:
    """An analysis of models on a sample of pictures.

    For pictures, `note` says in small print whether weights are trained, and `styles` are line styles by label.
    """

    def __init__(
        self,
        name: str,
        options: PictureOptions,
        *,
        images: int,
        batch_size: int = 1,
        workers: int = 0,
        labelled: bool | None = False,
        of_softmax: bool = False,
    ):
        """Open pictures, with classes if `labelled` (None: if they have any), and load models, see `load_subjects`."""
        self._name, self._options = name, options
        self._console = start(options.output)
        in_memory = options.source == "digits"  # nothing to read: processes would only cost time
        source = _open_source(options, labelled)
        self._sample = PictureSample(
            source, images=images, seed=options.seed, batch_size=batch_size, workers=0 if in_memory else workers
        )
        arguments = {"num_classes": len(source.class_names)} if labelled else {}
        self._subjects = load_subjects(options, for_digits=in_memory, of_softmax=of_softmax, **arguments)
        warn_of_earlier(options.output, name)
        self._settings = options.described() | {"images": images}
        self.note = weights_note(self._subjects)
        self.styles = numbered_styles({subject.label: subject.kind for subject in self._subjects})

    def measure(self, survey: Callable[..., Result], **arguments: Any) -> dict[str, Result]:
        """Return what a survey finds for each model, by label, with a progress bar for each."""
        results: dict[str, Result] = {}
        with progress_bar(self._console) as progress:
            for subject in self._subjects:
                task = progress.add_task(subject.label, total=len(self._sample))

                def advance(share: float, task: TaskID = task) -> None:
                    progress.advance(task, share * len(self._sample))

                results[subject.label] = survey(subject, self._sample, on_progress=advance, **arguments)
        return results

    def finish(
        self,
        tables: Sequence[Table],
        measured: Mapping[str, Mapping[str, Sequence[Any]]],
        settings: Mapping[str, Any],
        draw: Callable[[], list[Path]],
    ) -> None:
        """Print tables, write results, which are given by table and label, draw them, and name skipped pictures."""
        rows = {
            name: [{"model": label} | flat_row(item) for label, items in by_label.items() for item in items]
            for name, by_label in measured.items()
        }
        skipped = self._sample.skipped
        all_settings = {**self._settings, **settings, "skipped": skipped}
        finish(self._console, self._options.output, self._name, tables, self._subjects, rows, all_settings, draw)
        for name, reason in list(skipped.items())[:SHOWN_BROKEN]:
            warn(f"skipped {name}: {reason}")
        if len(skipped) > SHOWN_BROKEN:
            warn(f"and {len(skipped) - SHOWN_BROKEN:,} more, which the JSON lists")


def start(output: Path) -> Console:
    """Create the output folder and return the console. It is better to learn before measuring that it is unwritable."""
    make_folder(output)
    return make_console()


def warn_of_earlier(output: Path, analysis: str) -> None:
    """Warn if results will be replaced; call it when models and pictures are known to be there."""
    earlier = output / f"{analysis}.json"
    if earlier.exists():
        warn(f"{earlier} and what belongs to it will be replaced; --output takes another folder")


def finish(
    console: Console,
    output: Path,
    name: str,
    tables: Sequence[Table],
    subjects: Sequence[Subject],
    rows: Rows,
    settings: Mapping[str, Any],
    draw: Callable[[], list[Path]],
) -> None:
    """Print tables, write results and pictures, and print where they are."""
    for table in tables:
        console.print(table)
    with writing_to(output):
        described = [subject.described() for subject in subjects]
        files = write_results(output, name, rows, subjects=described, settings=settings)
        files += draw_if_possible(draw) or []
    say(f"Analysis written to {output}: {', '.join(file.name for file in files)}")


def _open_source(options: PictureOptions, labelled: bool | None) -> ImageSource:
    if labelled is None:
        with suppress(DataError):
            return open_dataset(options.source, options.data_dir, options.split)
    return (open_dataset if labelled else open_pictures)(options.source, options.data_dir, options.split)


def measure_slide(
    options: ModelOptions, path: Path, streaming: Streaming, classes: Sequence[str], **arguments: Any
) -> tuple[list[Subject], list[AttentionMaps], list[EvidenceMap]]:
    """Return the models whose attention can be streamed, their maps of a slide and their evidence for classes.

    The page of the slide is written too.
    """
    if options.size is not None:
        fail(f"{path.name} is read in parts, which cannot be resized; choose a --level instead of a --size")
    subjects = [subject for subject in load_subjects(options, for_digits=False) if subject.kind != "softmax"]
    if not subjects:
        fail("the weights of softmax attention need quadratic memory on such images; use an InLine model")
    found: list[AttentionMaps] = []
    evidence: list[EvidenceMap] = []
    with open_slide(path, streaming.level or 0) as slide, progress_bar(make_console(stderr=True)) as progress:
        warn_of_earlier(options.output, "attention-map")
        height, width = slide.size
        for subject in subjects:
            sentence = f"{path.name}: streaming {width}×{height} pixels through {subject.label}"
            begin = streaming_task(progress)
            if classes:  # first: a class that is not known is an error before anything runs
                reading = {"memory": streaming.memory, "on_progress": begin(f"{sentence} for class evidence")}
                evidence += measure_slide_evidence(subject, slide, classes, **reading)
            reading = {"memory": streaming.memory, "on_progress": begin(sentence)}
            found.append(measure_slide_maps(subject, slide, **reading, **arguments))
        with writing_to(options.output):
            write_slide_page(options.output / "slide", slide, found, weights_note(subjects), evidence)
    say(f"to zoom into: {options.output / 'slide' / 'index.html'}", err=True)
    return subjects, found, evidence


def load_subjects(
    options: ModelOptions, *, for_digits: bool, of_softmax: bool = False, **arguments: Any
) -> list[Subject]:
    """Return the models of the options, or small untrained ones, with their twins unless they are `of_softmax`.

    `arguments` are those of untrained models.
    """
    common: dict[str, Any] = {"size": options.image_size, "device": options.device}
    checkpoints, models = options.checkpoint or [], options.model or []
    if checkpoints:
        if len(models) > 1 or (models and len(checkpoints) > 1):
            fail(
                "--model names the model of one --checkpoint, "
                f"got {len(models)} models and {len(checkpoints)} checkpoints; analyze them separately"
            )
        load, name = softmax_subject if of_softmax else trained_subject, models[0] if models else None
        return with_distinct_labels([load(path, model_name=name, **common) for path in checkpoints])
    if for_digits and not models:
        arguments = DIGITS.config.model.model_arguments()
    names, known = models or [SOFTMAX_MODEL if of_softmax else DEFAULT_MODEL], list_models()
    if not of_softmax:
        twins = ([name, *twins_of(name).values()] if name in known else [name] for name in names)
        names = list(dict.fromkeys(chain(*twins)))
    elif models or for_digits:
        common["prepare"] = as_probed_softmax
    else:
        fail("expected a softmax model with trained weights; name a run or a file with --checkpoint")
    subjects = [untrained_subject(name, seed=options.seed, **common, **arguments) for name in names]
    warn(f"untrained weights: {', '.join(subject.label for subject in subjects)}; --checkpoint takes trained ones")
    return subjects
