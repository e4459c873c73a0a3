"""`inline predict`: say and draw what is in pictures."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from inline_attention.cli.predictors import PredictOptions, Predictor, Result, build_predictor
from inline_attention.cli.printing import fail, make_console, progress_bar, say, say_json, warn
from inline_attention.data.images import find_images, load_image

WRITABLE = (".jpg", ".jpeg", ".png", ".webp")


def run_predict(
    paths: list[Path],
    *,
    checkpoint: Path,
    options: PredictOptions,
    save: Path | None,
    as_json: bool,
) -> None:
    """Run a model on pictures and print what it found in each; see `inline predict --help` for the arguments.

    Raises:
        typer.Exit: With code 1 if a picture that was named could not be read, or none could, or nothing could be run or
            saved. The reason is printed.
    """
    files = find_images(paths)
    if not files:
        fail(f"there is no picture in {', '.join(map(str, paths))}")
    targets = _save_targets(files, save) if save else [None] * len(files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on odd pictures and weights; what matters of them is in the results
        predictor = build_predictor(checkpoint, options)
        contents: list[dict[str, Any]] = []
        stream = _failing_cleanly(predictor.results(files))
        with progress_bar(make_console(stderr=True), redirect_stdout=sys.stdout.isatty()) as progress:
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
    if save:
        say(f"annotated: {save}", err=as_json)
    if broken:
        warn(f"{len(broken)} of {len(files)} files skipped")
    if not set(broken).isdisjoint(paths):  # asked for by name; what else a folder holds is no error
        raise typer.Exit(1)


def _failing_cleanly(results: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from results
    except (RuntimeError, ValueError, AssertionError) as error:  # out of memory, a size the model does not take
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(f"the model cannot run on these images ({reason}); try another --size or a smaller --batch-size")


def _print_result(result: Result, predictor: Predictor) -> None:
    if result.error:
        say(f"skipped {result.path}: {result.error}", err=True, color="red")
        return
    say(result.path, bold=True)
    for line in predictor.lines(result):
        say(f"  {line}")


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


def _save_annotated(result: Result, predictor: Predictor, target: Path) -> None:
    try:
        predictor.annotated(load_image(result.path), result).save(target, quality=92)
    except (OSError, ValueError) as error:
        fail(f"cannot write {target}: {error}; choose another place with --save")
