"""`inline export`: write a classifier as ONNX, as a torch.export program, or for the Hugging Face Hub."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inline_attention.cli.options import parse_size
from inline_attention.cli.printing import fail, make_console, make_table, say, warn

if TYPE_CHECKING:
    from torch import Tensor

    from inline_attention.tasks.classification.export import Comparison
    from inline_attention.tasks.classification.prediction import ImageClassifier


class Format(StrEnum):
    """What `inline export` writes."""

    onnx = "onnx"
    torch_export = "torch-export"
    hub = "hub"


SUFFIXES = {Format.onnx: ".onnx", Format.torch_export: ".pt2", Format.hub: ""}


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Weights file, run or hub folder.", show_default=False)],
    file_format: Annotated[Format, typer.Option("--format", help="File to write.")] = Format.onnx,
    int8: Annotated[bool, typer.Option("--int8", help="Linear layers in 8-bit integers (onnx).")] = False,
    size: Annotated[
        str | None,
        typer.Option(help="Side, height and width (192x320), or dynamic.", show_default="the model's"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="beside the checkpoint")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Labeled pictures to compare on.", show_default="handwritten digits")
    ] = None,
    split: Annotated[str, typer.Option(help="Split or subfolder of --data-dir.")] = "validation",
    pictures: Annotated[
        Path | None, typer.Option(help="Picture or folder of pictures to compare on, without labels.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Number of pictures to compare on.")] = 64,
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the file's")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False,
) -> None:
    """Export a classifier, and compare the file with the model on pictures.

    Formats: onnx; torch-export (a program for `torch.export.load`); hub (a folder for the Hugging Face Hub, whose model
    card you complete).
    """
    is_dynamic = size == "dynamic"
    sides = () if size is None or is_dynamic else parse_size(size, "224, 192x320 or dynamic")
    if int8 and file_format is not Format.onnx:
        fail(f"--int8 is for --format onnx, got {file_format.value}; leave one of them out")
    if file_format is Format.hub and size is not None:
        fail("--size is for onnx and torch-export: a model on the hub takes images of any size")
    if data_dir is not None and pictures is not None:
        fail("give --data-dir or --pictures, not both")
    target = output or checkpoint.with_suffix("").with_name(checkpoint.stem + (SUFFIXES[file_format] or "_hub"))
    if (
        target.exists()
        and not force
        and not (file_format is Format.hub and target.is_dir() and not any(target.iterdir()))
    ):
        fail(f"{target} exists already; choose another --output, or --force to replace it")
    from inline_attention.engine.checkpoint_format import find_weights
    from inline_attention.models.checkpoints import open_checkpoint
    from inline_attention.models.described import read_description
    from inline_attention.tasks.classification.prediction import ImageClassifier
    from inline_attention.tasks.dense import TASK

    file = open_checkpoint(find_weights(checkpoint))
    if TASK in file.metadata:
        fail(f"{checkpoint} is of a model for {file.metadata[TASK]}; only classifiers can be exported")
    classifier = ImageClassifier.from_checkpoint(file, model_name=model, device="cpu")
    if file_format is Format.hub:
        from inline_attention.models.hub import save_pretrained

        names = read_description(file, model).class_names
        save_pretrained(classifier.model, target, class_names=names, crop_pct=classifier.preparation["crop_pct"])
        say(f"Model written to {target}. Complete {target / 'README.md'}: it states no license and no figures yet.")
        return
    from inline_attention.tasks.classification.export import export_classifier

    if sides:
        classifier = classifier.for_size((sides[0], sides[-1]))
    prepared, targets, described = _images(classifier, data_dir, split, pictures, images)
    target.parent.mkdir(parents=True, exist_ok=True)
    results = export_classifier(classifier, target, file_format.value, prepared, targets, dynamic=is_dynamic, int8=int8)
    make_console().print(_table(results, f"{len(prepared)} pictures ({described})"))
    say(f"Model written to {target}.")


def _images(
    classifier: ImageClassifier, data_dir: Path | None, split: str, pictures: Path | None, count: int
) -> tuple[Tensor, Tensor | None, str]:
    """Return prepared images, their classes if they are the model's, and where the images are from."""
    import torch

    from inline_attention.data.datasets import open_dataset
    from inline_attention.data.images import ImageError, find_images, load_image
    from inline_attention.data.sources import DataError

    if pictures is not None:
        loaded = []
        for path in find_images([pictures])[:count]:
            try:
                loaded.append(classifier.prepare_image(load_image(path)))
            except ImageError as error:
                warn(f"skipped {path}: {error.reason}")
        if not loaded:
            fail(f"there is no picture that can be used in {pictures}")
        return torch.stack(loaded), None, str(pictures)
    source = open_dataset(
        "digits" if data_dir is None else "folder", None if data_dir is None else str(data_dir), split
    )
    is_labeled = data_dir is not None or set(source.class_names) <= set(classifier.class_names)
    if is_labeled:
        try:
            source = source.with_classes(classifier.class_names)
        except DataError:
            warn("the classes of the pictures are not the model's: no accuracy")
            is_labeled = False
    step = max(1, len(source) // count)  # from all classes, not from the first
    indices = range(0, len(source), step)[:count]
    loaded = [classifier.prepare_image(source.load(index)) for index in indices]
    targets = torch.from_numpy(source.targets[list(indices)]) if is_labeled else None
    return torch.stack(loaded), targets, "handwritten digits" if data_dir is None else str(data_dir)


def _table(results: list[Comparison], title: str) -> object:
    rows = [
        (
            result.name,
            f"{result.size / 2**20:.1f}",
            f"{result.milliseconds:.1f}",
            f"{result.difference:.1e}",
            f"{result.agreement:.1%}",
            "–" if result.accuracy is None else f"{result.accuracy:.1%}",
        )
        for result in results
    ]
    return make_table(["", "MiB", "ms", "difference", "agreement", "accuracy"], rows, texts=1, title=title)
