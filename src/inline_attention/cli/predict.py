"""`inline predict`: print and draw what is in pictures."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from inline_attention.cli.options import (
    DEFAULT_MAX_PIXELS,
    AsJson,
    BatchSize,
    Device,
    Level,
    MaxPixels,
    Memory,
    parse_size,
)
from inline_attention.cli.printing import fail, make_console, progress_bar, say, say_json, streaming_task, warn
from inline_attention.support.text import printable

if TYPE_CHECKING:
    from inline_attention.cli.predictors import Predictor

LARGEST_SAVED = 2048  # pixels along a side of a streamed picture
WRITABLE = (".jpg", ".jpeg", ".png", ".webp")


def predict(
    images: Annotated[list[Path], Argument(help="Pictures and folders of pictures.", show_default=False)],
    checkpoint: Annotated[
        Path | None,
        Option("--checkpoint", "-c", help="Weights file, run or hub folder.", show_default="the shipped model"),
    ] = None,
    model: Annotated[str | None, Option(help="Model name.", show_default="the file's")] = None,
    top: Annotated[int, Option(min=1, help="Number of classes or objects to print.")] = 5,
    least_score: Annotated[float, Option(min=0, max=1, help="Hide detections below this score.")] = 0.5,
    size: Annotated[
        str | None,
        Option(
            help="Shorter side (1024), or height and width (800x1333); no crop.",
            show_default="the model's, with its crop",
        ),
    ] = None,
    save: Annotated[
        Path | None, Option(help="Write annotated pictures to this file or folder.", show_default=False)
    ] = None,
    level: Level = None,
    max_pixels: MaxPixels = DEFAULT_MAX_PIXELS,
    memory: Memory = "4GiB",
    as_json: AsJson = False,
    device: Device = "auto",
    batch_size: BatchSize = 8,
) -> None:
    """Predict classes (classifier), objects (detector) or classes of pixels (segmenter) in pictures.

    Pictures that cannot be read are reported and skipped. If you named such a picture yourself, the exit code is 1.
    A classifier streams tiled files above --max-pixels at full resolution.
    """
    given = () if size is None else parse_size(size, "1024, or height and width, such as 800x1333")
    from inline_attention.cli.predictors import build_predictor
    from inline_attention.data.images import SUFFIXES, find_images
    from inline_attention.data.slides import SLIDE_SUFFIXES
    from inline_attention.models.registry import shipped_models
    from inline_attention.tasks.classification.prediction import Streaming

    if checkpoint is None:
        name, checkpoint = next(iter(shipped_models().items()), (None, None))
        if checkpoint is None:
            fail("no model comes with this version; name weights or a run with --checkpoint")
        say(f"model: {name}, which comes with the package; --checkpoint names another", err=True)

    image_size = None if not given else given[0] if len(given) == 1 else (given[0], given[1])
    files = find_images(images, SUFFIXES | SLIDE_SUFFIXES)
    if not files:
        fail(f"there is no picture in {', '.join(map(str, images))}")
    targets = _save_targets(files, save) if save else [None] * len(files)
    contents: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd pictures and weights; the results say what matters
        progress = progress_bar(make_console(stderr=True), redirect_stdout=sys.stdout.isatty())
        predictor = build_predictor(
            checkpoint, model_name=model, top=top, size=image_size, least_score=least_score, device=device,
            batch_size=batch_size, streaming=Streaming(max_pixels, level, memory, streaming_task(progress)),
        )  # fmt: skip
        stream = _with_advice(predictor.results(files))
        with progress:
            for target, result in zip(targets, progress.track(stream, len(files), description="images"), strict=True):
                found = {"error": result.error} if result.error else predictor.content(result)
                contents.append({"path": str(result.path), **found})
                if not as_json or result.error:
                    _print_result(result, predictor)
                if target and not result.error:
                    _save_annotated(result, predictor, target)
    if as_json:
        say_json(contents)
    broken = [file for file, content in zip(files, contents, strict=True) if "error" in content]
    if len(broken) == len(files):
        fail(f"no picture could be used, of {len(files)} tried")
    if broken:
        warn(f"{len(broken)} of {len(files)} files skipped")
    if save:
        say(f"Annotated pictures written to {save}", err=as_json)
    if not set(broken).isdisjoint(images):
        raise typer.Exit(1)


def _with_advice(results: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from results
    except (RuntimeError, ValueError, AssertionError) as error:  # out of memory, a size the model does not take
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(f"the model cannot run on these images ({reason}); try another --size or a smaller --batch-size")


def _print_result(result: Any, predictor: Predictor) -> None:
    if result.error:
        say(printable(f"skipped {result.path}: {result.error}"), err=True, color="red")
        return
    say(printable(result.path), bold=True)  # one line each: a name with a line break must not look like a result
    for line in predictor.lines(result):
        say(f"  {printable(line)}")


def _save_targets(files: list[Path], save: Path) -> list[Path]:
    """Return a path for each annotated picture: `save` itself, or distinct names in that folder."""
    if len(files) == 1 and save.suffix and not save.is_dir():
        if save.suffix.lower() not in WRITABLE:
            fail(f"--save writes {', '.join(WRITABLE)}, got {save}")
        targets = [save]
    else:
        targets = []
        for file in files:
            suffix = file.suffix if file.suffix.lower() in WRITABLE else ".png"
            names = (f"{file.stem}{number}{suffix}" for number in ("", *(f"-{n}" for n in range(2, len(files) + 1))))
            targets.append(next(save / name for name in names if save / name not in targets))
    originals = {file.resolve() for file in files}
    if any(target.resolve() in originals for target in targets):
        fail(f"--save {save} would overwrite the pictures themselves; choose another place")
    try:
        targets[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"cannot write to {targets[0].parent}: {error.strerror}; choose another place with --save")
    return targets


def _save_annotated(result: Any, predictor: Predictor, target: Path) -> None:
    from inline_attention.data.images import load_image
    from inline_attention.data.slides import open_slide

    try:
        if getattr(result, "level", None) is None:
            picture = load_image(result.path)
        else:
            with open_slide(result.path, result.level) as slide:
                picture = slide.thumbnail(LARGEST_SAVED)
        predictor.annotated(picture, result).save(target, quality=92)
    except (OSError, ValueError) as error:
        fail(f"cannot write {target}: {error}; choose another place with --save")
