"""Write scenes to disk as one dataset in both the COCO and the ADE20K format.

    DIR/images/{training,validation}/000000.jpg
    DIR/annotations/{training,validation}/000000.png    class number of each pixel, 0 for no class
    DIR/annotations/instances_{train,val}.json          boxes and masks of objects
    DIR/classes.txt                                     names of classes 1, 2, …
    DIR/preview.png                                     a few images with their annotations drawn on them
    DIR/scenes.json                                     the settings that produce the dataset again

Everything is written to a folder beside it and renamed at the end: a dataset is complete or not there.
"""

from __future__ import annotations

import colorsys
import glob
import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from inline_attention.data.coco.annotations import CocoAnnotations, CocoCategory, CocoImage, CocoObject
from inline_attention.data.coco.masks import Extent, encode_mask, extent_of
from inline_attention.data.randomness import derived_seed
from inline_attention.data.scenes.rendering import OBJECT_KINDS, SEMANTIC_CLASSES, Scene, category_number, render_scene
from inline_attention.data.sources import DataError
from inline_attention.support.files import UNFINISHED, AnyPath, read_bounded, replace_folder
from inline_attention.support.signals import children_ignore_interrupts
from inline_attention.support.untrusted import parse_json

MANIFEST = "scenes.json"
JPEG_QUALITY = (80, 96)
FEW_FOR_PROCESSES = 64  # starting processes takes longer than drawing so many
SPLITS = {"training": "train", "validation": "val"}  # ADE20K's name of each, and COCO's
PREVIEWED, COLUMNS, GAP = 8, 4, 8  # scenes of the preview, and pixels between them
_Drawn = tuple[CocoImage, list[CocoObject]]


@dataclass(frozen=True)
class ScenesPlan:
    """Settings that determine a dataset of scenes."""

    images: int = 2000  # to train on
    validation_images: int = 200
    size: int = 320  # pixels of the longer side
    seed: int = 0

    def __post_init__(self):
        if self.images < 1 or self.validation_images < 1:
            given = f"got {self.images} and {self.validation_images}"
            raise ValueError(f"a dataset needs at least one image to train on and one to validate on, {given}")


def write_scenes(
    folder: AnyPath,
    plan: ScenesPlan,
    *,
    overwrite: bool = False,
    workers: int = 1,
    on_progress: Callable[[], None] | None = None,
) -> Path:
    """Draw and write a dataset; returns its folder.

    Args:
        folder: Output folder; must be empty or not be there yet.
        plan: Settings of the dataset.
        overwrite: Replace a dataset of scenes that is there, and remove what killed generations have left beside it.
        workers: Processes to draw with; more than one only from a program that guards its start by `__name__`.
        on_progress: Called after each image.

    Raises:
        DataError: If something else is in the folder, or a process died.
        OSError: If nothing can be written there, or the disk is full.
    """
    folder = Path(folder)
    _check_free(folder, overwrite)
    for old in leftovers(folder) if overwrite else ():
        shutil.rmtree(old)
    if plan.images + plan.validation_images < FEW_FOR_PROCESSES:
        workers = 1
    categories = tuple(CocoCategory(category_number(kind), kind) for kind in OBJECT_KINDS)
    with replace_folder(folder) as new, _mapping(workers) as mapped:
        for (split, short_name), count in zip(SPLITS.items(), (plan.images, plan.validation_images), strict=True):
            for kind in ("images", "annotations"):
                (new / kind / split).mkdir(parents=True)
            images: list[CocoImage] = []
            objects: list[CocoObject] = []
            for image, drawn in mapped(partial(_write_scene, new, plan, split), range(count)):
                images.append(image)
                objects += (replace(item, id=number) for number, item in enumerate(drawn, start=len(objects) + 1))
                if on_progress is not None:
                    on_progress()
            annotations = CocoAnnotations("scenes", tuple(images), categories, tuple(objects))
            (new / "annotations" / f"instances_{short_name}.json").write_text(json.dumps(annotations.to_json()))
        (new / "classes.txt").write_text("".join(f"{name}\n" for name in SEMANTIC_CLASSES))
        shown = range(min(PREVIEWED, plan.images))
        scenes = [render_scene(plan.seed, "training", index, plan.size) for index in shown]
        _draw_preview(scenes).save(new / "preview.png")
        (new / MANIFEST).write_text(json.dumps({"kind": "inline scenes", **asdict(plan)}, indent=2) + "\n")
    return folder


def leftovers(folder: AnyPath) -> list[Path]:
    """Return unfinished folders beside a dataset, of killed or running generations."""
    folder = Path(folder).resolve()
    return sorted(folder.parent.glob(f"{glob.escape(UNFINISHED + folder.name)}-*"))


def _draw_preview(scenes: Sequence[Scene]) -> Image.Image:
    """Images with boxes and names, each above its map of classes."""
    count = len(SEMANTIC_CLASSES)
    # Neighbors in number are far apart in hue, neighbors in hue apart in brightness. Black is what has no name.
    hues = [colorsys.hsv_to_rgb(5 * number % count / count, 0.75, 1 - number % 3 / 4) for number in range(count)]
    class_colors = (np.array([(0, 0, 0), *hues]) * 255).astype(np.uint8)
    cell = max(max(scene.image.shape[:2]) for scene in scenes) + GAP
    columns = min(COLUMNS, len(scenes))
    rows = -(-len(scenes) // columns)
    sheet = Image.new("RGB", (columns * cell - GAP, 2 * rows * cell - GAP), "white")
    for number, scene in enumerate(scenes):
        image = Image.fromarray(scene.image)
        draw = ImageDraw.Draw(image)
        for kind, _, (left, top, right, bottom) in _objects(scene):
            draw.rectangle((left, top, right - 1, bottom - 1), outline="yellow")
            draw.text((left + 2, max(0, top - 11)), kind, fill="yellow", stroke_width=1, stroke_fill="black")
        left, top = number % columns * cell, number // columns * 2 * cell
        sheet.paste(image, (left, top))
        sheet.paste(Image.fromarray(class_colors[scene.semantic_map()]), (left, top + cell))
    return sheet


def _objects(scene: Scene) -> Iterator[tuple[str, np.ndarray, Extent]]:
    for number, kind in enumerate(scene.kinds, start=1):
        mask = scene.visible_mask(number)
        extent = extent_of(mask)
        assert extent is not None, "invisible objects are not drawn"
        yield kind, mask, extent


def _write_scene(folder: Path, plan: ScenesPlan, split: str, index: int) -> _Drawn:
    """Write the image and its map of classes; returns its annotations, with objects numbered within the image."""
    scene = render_scene(plan.seed, split, index, plan.size)
    name = f"{index:06d}"
    quality = np.random.default_rng(derived_seed("jpeg", plan.seed, split, index)).integers(*JPEG_QUALITY)
    Image.fromarray(scene.image).save(folder / "images" / split / f"{name}.jpg", quality=int(quality))
    Image.fromarray(scene.semantic_map()).save(folder / "annotations" / split / f"{name}.png")
    image = CocoImage(index + 1, f"{name}.jpg", *scene.instances.shape)
    objects: list[CocoObject] = []
    for number, (kind, mask, (left, top, right, bottom)) in enumerate(_objects(scene), start=1):
        box = left, top, right - left, bottom - top
        category, area = category_number(kind), float(mask.sum())
        objects.append(CocoObject(number, image.id, category, box, area, encode_mask(mask), is_crowd=False))
    return image, objects


@contextmanager
def _mapping(workers: int) -> Iterator[Callable[[Callable[[int], _Drawn], Iterable[int]], Iterator[_Drawn]]]:
    """Yield a `map` that keeps the order, in this process or over several."""
    if workers <= 1:
        yield map
        return
    # Not forked: a process that has run torch holds threads, and a fork of it may never wake up.
    executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))

    def map_in_order(function: Callable[[int], _Drawn], items: Iterable[int]) -> Iterator[_Drawn]:
        with children_ignore_interrupts():
            return executor.map(function, items, chunksize=8)

    try:
        yield map_in_order
    except BrokenProcessPool as error:
        raise DataError("a process that draws scenes died, perhaps for want of memory; use fewer workers") from error
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.terminate()  # `shutdown` would wait for the scenes that they draw
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _check_free(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; give a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    manifest: Any = None
    with suppress(OSError, ValueError):
        manifest = parse_json(read_bounded(folder / MANIFEST, 2**16))
    if not isinstance(manifest, dict) or manifest.get("kind") != "inline scenes":
        raise DataError(f"{folder} holds something else than scenes, and is left alone; give another folder")
    if not overwrite:
        raise DataError(f"{folder} already holds scenes; give another folder, or overwrite them with --overwrite")
