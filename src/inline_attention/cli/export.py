"""`inline export`: write a classifier as ONNX, as a torch.export program, as a page, or for the Hugging Face Hub."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Option

from inline_attention.cli.options import parse_size
from inline_attention.cli.printing import fail, make_console, make_table, say, warn
from inline_attention.support.text import counted

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from inline_attention.models.hub import ModelCard
    from inline_attention.tasks.classification.export import Comparison
    from inline_attention.tasks.classification.prediction import ImageClassifier


class Format(StrEnum):
    """What `inline export` writes."""

    onnx = "onnx"
    torch_export = "torch-export"
    web = "web"
    hub = "hub"


ENDINGS = {Format.onnx: ".onnx", Format.torch_export: ".pt2", Format.web: "_web", Format.hub: "_hub"}
EXAMPLES = "examples"  # subfolder of a model's folder with pictures to compare on
MOST_EXAMPLES = 8
MOST_PIXELS = 2**26  # of all pictures to compare on, which are in memory together


class Pictures(NamedTuple):
    """Pictures to compare on."""

    images: Tensor  # prepared, [B, 3, H, W]
    targets: Tensor | None  # [B] classes, if they are the model's
    source: str
    examples: list[tuple[str, Image]]  # some of the pictures, with their names, to be shown


def export(
    checkpoint: Annotated[Path, Argument(help="Weights file, run, hub folder or shipped model.", show_default=False)],
    file_format: Annotated[
        Format | None, Option("--format", help="What to write.", show_default="onnx; torch-export for .pt2")
    ] = None,
    int8: Annotated[bool, Option("--int8", help="Linear layers in 8-bit integers (onnx, web).")] = False,
    size: Annotated[
        str | None, Option(help="Side, height and width (192x320), or dynamic.", show_default="the model's")
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="File or folder to write.", show_default="beside the checkpoint")
    ] = None,
    data_dir: Annotated[
        Path | None, Option(help="Labeled pictures to compare on.", show_default="handwritten digits")
    ] = None,
    split: Annotated[str, Option(help="Split or subfolder of --data-dir.")] = "validation",
    pictures: Annotated[
        Path | None, Option(help="Picture or folder of pictures to compare on, without labels.")
    ] = None,
    images: Annotated[int, Option(min=1, help="Number of pictures to compare on.")] = 32,
    model: Annotated[str | None, Option(help="Model name.", show_default="the file's")] = None,
    speed: Annotated[bool, Option("--speed/--no-speed", help="Size slider beside softmax's twin (web).")] = True,
    force: Annotated[bool, Option("--force", help="Replace the output if it exists.")] = False,
) -> None:
    """Export a classifier, and compare the file with the model on pictures.

    Formats: onnx; torch-export (a program for `torch.export.load`); web (a folder with a page that runs the model in a
    browser, without network); hub (a folder for the Hugging Face Hub, whose model card you complete).
    """
    if file_format is None:
        file_format = Format.torch_export if output is not None and output.suffix == ".pt2" else Format.onnx
    is_dynamic = size == "dynamic"
    sides = () if size is None or is_dynamic else parse_size(size, "224, 192x320 or dynamic")
    if int8 and file_format not in (Format.onnx, Format.web):
        fail(f"--int8 is for --format onnx and web, got {file_format.value}; leave one of them out")
    if file_format is Format.hub and size is not None:
        fail("--size is for onnx, torch-export and web: a model on the hub takes images of any size")
    if file_format is Format.web and is_dynamic:
        fail("--size dynamic is for onnx and torch-export: the page has a size of its own, and a slider for others")
    if not speed and file_format is not Format.web:
        fail(f"--no-speed is for --format web, got {file_format.value}; leave one of them out")
    if data_dir is not None and pictures is not None:
        fail("give --data-dir or --pictures, not both")
    checkpoint, beside = _find_checkpoint(checkpoint)
    target = output or beside.with_name(beside.name + ENDINGS[file_format])
    _check_target(target, file_format, force)
    import torch

    from inline_attention.models.checkpoints import open_checkpoint
    from inline_attention.models.described import read_description
    from inline_attention.models.reading import find_weights
    from inline_attention.tasks.classification.prediction import ImageClassifier
    from inline_attention.tasks.dense import TASK

    weights = find_weights(checkpoint)
    file = open_checkpoint(weights)
    if TASK in file.metadata:
        fail(f"{checkpoint} is of a model for {file.metadata[TASK]}; only classifiers can be exported")
    classifier = ImageClassifier.from_checkpoint(file, model_name=model, device="cpu")
    if file_format is Format.hub:
        from inline_attention.models.hub import save_pretrained

        names, card = read_description(file, model).class_names, _card_of_run(weights)
        crop_pct = classifier.preparation["crop_pct"]
        save_pretrained(classifier.model, target, class_names=names, crop_pct=crop_pct, card=card)
        lacks = "a license" if card.figures else "a license and figures"
        say(f"Model written to {target}. Complete {target / 'README.md'}: it lacks {lacks}.")
        return
    if sides:
        classifier = classifier.for_size((sides[0], sides[-1]))
    height, width = classifier.preparation["input_size"][1:]
    images = min(images, MOST_PIXELS // (height * width))
    if images == 0:
        fail(f"{height}×{width} pixels are too many to export for; expected {MOST_PIXELS:,} at most (--size 8192)")
    found = _read_pictures(classifier, data_dir, split, pictures, images)
    if data_dir is None and pictures is None and (checkpoint / EXAMPLES).is_dir():
        own = _read_pictures(classifier, None, split, checkpoint / EXAMPLES, images)  # few: compare on digits, too
        compared = torch.cat([own.images, found.images])
        found = Pictures(compared, None, f"the model's examples and {found.source}", own.examples)
    target.parent.mkdir(parents=True, exist_ok=True)
    if file_format is Format.web:
        from inline_attention.analysis.web_page import export_page

        results = export_page(
            classifier, target, found.images, found.targets, found.examples, int8=int8, with_speed=speed
        )
    else:
        from inline_attention.tasks.classification.export import export_classifier

        results = export_classifier(
            classifier, target, file_format.value, found.images, found.targets, dynamic=is_dynamic, int8=int8
        )
    make_console().print(_table(results, f"{counted(len(found.images), 'pictures')} ({found.source})"))
    is_page = file_format is Format.web
    say(f"Page written to {target / 'index.html'}: open it in a browser" if is_page else f"Model written to {target}.")


def _find_checkpoint(given: Path) -> tuple[Path, Path]:
    """Return the checkpoint that a path or the name of a shipped model means, and the path to write beside."""
    if not given.exists():
        from inline_attention.models.registry import shipped_models

        if (folder := shipped_models().get(str(given))) is not None:
            return folder, Path(given.name)  # not into the package
    return given, given.with_suffix("")


def _card_of_run(weights: Path) -> ModelCard:
    """Return a model card with what the run of a checkpoint measured; an empty one for other files."""
    from inline_attention.engine.checkpoint_format import open_training_checkpoint
    from inline_attention.models.checkpoints import CheckpointError
    from inline_attention.models.hub import ModelCard

    try:
        run = open_training_checkpoint(weights.parent)
    except CheckpointError:
        return ModelCard()
    figures = {} if run.metric is None else {"top-1 on the run's own validation images": f"{run.metric:.2f} %"}
    return ModelCard(figures=figures, training={"epochs": run.epoch, "updates": run.step})


def _check_target(target: Path, file_format: Format, force: bool) -> None:
    """Refuse to replace what exists, unless forced; never replace a folder that is no page by one."""
    is_folder = file_format in (Format.web, Format.hub)
    if not target.exists() or (is_folder and target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        fail(f"{target} exists already; choose another --output, or --force to replace it")
    if file_format is Format.web and not ((target / "index.html").is_file() and (target / "data").is_dir()):
        fail(f"{target} is not a page of an earlier export, so it is not replaced; choose another --output")


def _read_pictures(
    classifier: ImageClassifier, data_dir: Path | None, split: str, pictures: Path | None, count: int
) -> Pictures:
    """Read the pictures to compare on. Digits are no examples for a model of other classes."""
    import torch

    from inline_attention.data.datasets import open_dataset
    from inline_attention.data.images import ImageError, find_images, load_image
    from inline_attention.data.sources import DataError

    if pictures is not None:
        loaded, examples = [], []
        for path in find_images([pictures])[:count]:
            try:
                picture = load_image(path)
            except ImageError as error:
                warn(f"skipped {path}: {error.reason}")
                continue
            loaded.append(classifier.prepare_image(picture))
            if len(examples) < MOST_EXAMPLES:
                examples.append((path.stem, picture))
        if not loaded:
            fail(f"there is no picture that can be used in {pictures}")
        return Pictures(torch.stack(loaded), None, str(pictures), examples)
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
    shown = indices[:: max(1, len(indices) // MOST_EXAMPLES)][:MOST_EXAMPLES] if is_labeled or data_dir else []
    examples = [(source.class_names[source.targets[index]], source.load(index)) for index in shown]
    where = "handwritten digits" if data_dir is None else str(data_dir)
    return Pictures(torch.stack(loaded), targets, where, examples)


def _table(results: list[Comparison], title: str) -> object:
    rows = []
    for result in results:
        quality = [f"{result.difference:.1e}", f"{result.agreement:.1%}"]
        quality += ["–" if result.accuracy is None else f"{result.accuracy:.1%}"]
        rows.append([result.name, f"{result.size / 2**20:.1f}", f"{result.milliseconds:.1f}", *quality])
    return make_table(["", "MiB", "ms", "difference", "agreement", "accuracy"], rows, texts=1, title=title)
