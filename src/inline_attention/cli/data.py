"""`inline data`: generate, convert and check datasets."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from inline_attention.cli.options import Output, OutsideFiles, Seed
from inline_attention.cli.printing import counting, fail, make_console, say, writing_to
from inline_attention.support.text import counted, some_of

data_app = typer.Typer(no_args_is_help=True, help="Generate, convert and check datasets.")
MOST_WORKERS = 16


Task = StrEnum("Task", {"detection": "detection", "segmentation": "segmentation"})
LabelFormat = StrEnum("LabelFormat", {"voc": "voc", "yolo": "yolo"})


@data_app.command("scenes")
def scenes(
    output: Output,
    images: Annotated[int, Option(min=1, help="Number of training pictures.")] = 2000,
    validation_images: Annotated[
        int | None, Option(min=1, help="Number of validation pictures.", show_default="a tenth of --images")
    ] = None,
    size: Annotated[int, Option(min=64, max=4096, help="Longer side in pixels.")] = 320,
    seed: Seed = 0,
    workers: Annotated[
        int | None, Option("--workers", "-j", min=1, help="Number of processes.", show_default="one per core")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace existing scenes.")] = False,
) -> None:
    """Generate scenes of textured shapes as a dataset in COCO's and ADE20K's formats."""
    from inline_attention.data.scenes import ScenesPlan, leftovers, write_scenes

    plan = ScenesPlan(images, validation_images or max(1, images // 10), size, seed)
    for path in leftovers(output):
        make_console(stderr=True).print(
            f"{path} is unfinished: a killed generation has left it, or one is running; "
            + ("removed" if overwrite else "--overwrite removes it")
        )
    workers = workers or min(os.cpu_count() or 1, MOST_WORKERS)
    with writing_to(output), counting("drawing scenes", plan.images + plan.validation_images) as advance:
        write_scenes(output, plan, overwrite=overwrite, workers=workers, on_progress=advance)
    say(f"{counted(plan.images, 'pictures')} to train on, {plan.validation_images} to validate on")
    say(f"Scenes written to {output}: preview.png shows some")


@data_app.command("convert")
def convert(
    source: Annotated[Path, Argument(help="Folder with pictures and annotations.", show_default=False)],
    output: Output,
    label_format: Annotated[
        LabelFormat | None, Option("--format", help="Annotation format.", show_default="by the files")
    ] = None,
    validation_share: Annotated[
        float, Option(min=0.001, max=0.999, help="Share to validate on, if there are no splits.")
    ] = 0.1,
    seed: Seed = 0,
    allow_outside_files: OutsideFiles = False,
) -> None:
    """Convert boxes from Pascal VOC's XML or YOLO's text files to COCO's format.

    Reports all that it repairs or leaves out. The source is not changed.
    """
    from inline_attention.data.coco.conversion import convert_to_coco

    with writing_to(output), counting("converting", None) as advance:
        found = convert_to_coco(
            source, output, label_format=None if label_format is None else label_format.value,
            validation_share=validation_share, seed=seed, allow_outside=allow_outside_files, on_progress=advance,
        )  # fmt: skip
    for report in found.reports:
        say(report)
    (train, train_objects), (validation, validation_objects) = found.counts.values()
    hint = "; list their names in classes.txt" if all(map(str.isdecimal, found.class_names)) else ""
    say(f"{counted(len(found.class_names), 'classes')}: {some_of(found.class_names)}{hint}")
    say(
        f"{counted(train, 'pictures')} with {counted(train_objects, 'objects')} to train on, "
        f"{validation:,} with {validation_objects:,} to validate on"
    )
    say(f"Dataset written to {output}: check it with `inline data check {output}`")


@data_app.command("slides")
def slides(
    output: Output,
    images: Annotated[int, Option(min=2, help="Number of training slides.")] = 32,
    validation_images: Annotated[int, Option(min=2, help="Number of validation slides.")] = 8,
    size: Annotated[int, Option(min=64, max=131072, help="Pixels of a side.")] = 4096,
    mark_size: Annotated[
        int | None, Option(min=8, help="Pixels of a mark's side.", show_default="a 32nd of --size")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Generate large tiled TIFFs whose class depends on two small marks far apart.

    A slide has two marks, each a ring or a cross. The class says whether they are the same, which no tile alone shows.
    A killed generation resumes. `inline train --data-dir OUTPUT` reads the folders of classes.
    """
    from inline_attention.data.marked_slides import SlidesPlan, write_slides

    plan = SlidesPlan(images, validation_images, size, mark_size or max(8, size // 32), seed)
    with writing_to(output), counting("drawing slides", images + validation_images) as advance:
        write_slides(output, plan, on_progress=advance)
    say(f"{images} slides to train on, {validation_images} to validate on; slides.csv lists their marks")
    say(f"Slides written to {output}: `inline train RECIPE --data-dir {output}` trains on them")


@data_app.command("check")
def check(
    folder: Annotated[Path, Argument(help="Dataset folder.", show_default=False)],
    task: Annotated[
        Task | None, Option(help="detection (as COCO) or segmentation (as ADE20K).", show_default="by the files")
    ] = None,
    masks: Annotated[
        bool | None,
        Option("--masks/--boxes-only", help="Require a mask for each object.", show_default="if any object has one"),
    ] = None,
    class_file: Annotated[
        Path | None, Option(help="File of class names (segmentation).", show_default="FOLDER/classes.txt")
    ] = None,
    image_folder: Annotated[
        str | None,
        Option(help="Images below FOLDER, such as img/{split} (segmentation).", show_default="by usual names"),
    ] = None,
    map_folder: Annotated[
        str | None, Option(help="Label maps below FOLDER (segmentation).", show_default="by usual names")
    ] = None,
    reduce_zero_label: Annotated[
        bool, Option("--reduce-zero-label", help="Label 0 is no class, label 1 the first (ADE20K).")
    ] = False,
    allow_outside_files: OutsideFiles = False,
) -> None:
    """Check a dataset before training: count the faults, name the first, suggest what to do."""
    from inline_attention.data.coco.checks import open_and_check_coco
    from inline_attention.data.segmentation import open_and_check_pairs

    task = task or _task_of(folder, image_folder, map_folder)
    with counting("checking", None) as advance:
        if task is Task.detection:
            opened = open_and_check_coco(
                folder, masks=masks, allow_outside=allow_outside_files, decode=True, on_progress=advance
            )
        else:
            opened = open_and_check_pairs(
                folder, class_file=class_file, image_folder=image_folder, map_folder=map_folder,
                reduce_zero_label=reduce_zero_label, allow_outside=allow_outside_files, decode=True,
                on_progress=advance,
            )  # fmt: skip
    for report in opened.reports:
        say(report)
    for problem in opened.problems:
        if not any(problem in report.problems for report in opened.reports):
            say(problem)
    if opened.problems:
        fail(f"{folder} cannot be used for training as it is")


def _task_of(folder: Path, image_folder: str | None, map_folder: str | None) -> Task:
    """Return the task that a folder has annotations for, detection first; exit if there are none."""
    from inline_attention.data.segmentation import find_pair_folders
    from inline_attention.data.sources import DataError, check_folder

    check_folder(folder, "annotations and images")
    if any(folder.glob("annotations/instances_*.json")):
        return Task.detection
    try:
        find_pair_folders(folder, "train", image_folder, map_folder, allow_outside=True)
    except DataError:
        fail(
            f"{folder} has neither annotations/instances_*.json (detection, as COCO) nor folders of images and label "
            "maps (segmentation, as ADE20K); `inline data convert` converts Pascal VOC and YOLO, --task says what is "
            "expected, and `inline train` checks pictures in folders of classes"
        )
    return Task.segmentation
