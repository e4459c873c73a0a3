"""`inline predict`: name what is in pictures."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console

from inline_attention.cli.printing import fail, progress_bar
from inline_attention.data.images import find_images, load_image
from inline_attention.models.checkpoints import CheckpointError
from inline_attention.tasks.classification.annotation import annotate
from inline_attention.tasks.classification.prediction import ImageClassifier, ImageResult

WRITABLE = (".jpg", ".jpeg", ".png", ".webp")


def run_predict(
    paths: list[Path],
    *,
    checkpoint: Path,
    model_name: str | None,
    top: int,
    size: int | tuple[int, int] | None,
    save: Path | None,
    as_json: bool,
    device: str,
    batch_size: int,
) -> None:
    """Classify pictures and print the likeliest classes of each; see `inline predict --help` for the arguments.

    Raises:
        typer.Exit: With code 1 where no picture could be read, or nothing could be run or saved; the reason is printed.
    """
    files = find_images(paths)
    if not files:
        fail(f"there is no picture in {', '.join(map(str, paths))}")
    targets = _save_targets(files, save) if save else [None] * len(files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on odd pictures and weights; what matters of them is in the results
        try:
            classifier = ImageClassifier.from_checkpoint(checkpoint, model_name=model_name, size=size, device=device)
        except (CheckpointError, ValueError) as error:
            fail(error)
        results: list[ImageResult] = []
        stream = _failing_cleanly(classifier.classify_files(files, top=top, batch_size=batch_size))
        with progress_bar(Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as progress:
            for target, result in zip(targets, progress.track(stream, len(files), description="images"), strict=True):
                results.append(result)
                if not as_json or result.error:
                    _print_result(result)
                if target and not result.error:
                    _save_annotated(result, target)
    if as_json:
        typer.echo(json.dumps([_as_json(result) for result in results], indent=2, ensure_ascii=False))
    broken = sum(bool(result.error) for result in results)
    if broken == len(results):
        fail(f"no picture could be used, of {broken} tried")
    if broken:
        typer.secho(f"{broken} of {len(results)} files skipped", fg="yellow", err=True)
    if save:
        typer.echo(f"annotated: {save}", err=as_json)


def _failing_cleanly(results: Iterator[ImageResult]) -> Iterator[ImageResult]:
    try:
        yield from results
    except (RuntimeError, ValueError, AssertionError) as error:  # out of memory, a size the model does not take
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(f"the model cannot run on these images ({reason}); try another --size or a smaller --batch-size")


def _print_result(result: ImageResult) -> None:
    if result.error:
        typer.secho(f"skipped {result.path}: {result.error}", fg="red", err=True)
        return
    typer.secho(result.path, bold=True)
    for prediction in result.predictions:
        typer.echo(f"  {prediction.probability:6.1%}  {prediction.name}")


def _as_json(result: ImageResult) -> dict[str, object]:
    if result.error:
        return {"path": str(result.path), "error": result.error}
    return {"path": str(result.path), "predictions": [asdict(prediction) for prediction in result.predictions]}


def _save_targets(files: list[Path], save: Path) -> list[Path]:
    """Where each annotated picture goes: to `save` itself, or into it as a folder, under names that do not collide."""
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


def _save_annotated(result: ImageResult, target: Path) -> None:
    try:
        annotate(load_image(result.path), result.predictions).save(target, quality=92)
    except (OSError, ValueError) as error:
        fail(f"cannot write {target}: {error}; choose another place with --save")
