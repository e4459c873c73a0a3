"""Convert Pascal VOC's XML files and YOLO's text files to COCO's format.

The parsers are ours because a dataset with one faulty file must still convert, with a report. Of the libraries,
globox 2.9 (MIT) stops at the first faulty box and expands entities; supervision 0.31 (MIT) stops there too, decodes
every picture and installs av and scipy; datumaro 1.13 restricts the versions of numpy, pandas and pillow; pylabel 0.1
installs opencv with its windows. XML is parsed by defusedxml, which refuses entities and document types.

This module only parses. `checks` finds and repairs faulty boxes, images and categories, as it does before training.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any, Literal, NamedTuple

import yaml

from inline_attention.data.coco.annotations import CocoAnnotations, CocoCategory, CocoImage, CocoObject
from inline_attention.data.coco.checks import WITH_OBJECTS, check_annotations
from inline_attention.data.findings import DataReport
from inline_attention.data.images import ImageError, find_images, image_size, read_in_threads
from inline_attention.data.listed_files import ListedFiles
from inline_attention.data.sources import SPLIT_FOLDERS, DataError, check_folder
from inline_attention.support.files import AnyPath, read_bounded, replace_folder
from inline_attention.support.text import counted, install_command
from inline_attention.support.untrusted import MAX_TEXT_BYTES, load_yaml

LabelFormat = Literal["voc", "yolo"]
SUFFIXES: dict[LabelFormat, str] = {"voc": ".xml", "yolo": ".txt"}
YAML_SUFFIXES = (".yaml", ".yml")
LONGEST_CLASS_NAME = 200  # characters
SPLITS = {"train": "train", "validation": "val"}  # our name of each, and COCO's
_YEAR = re.compile(r"(?<=[a-z])[-_]?(19|20)\d\d$")  # at the end of a folder's name: train2017


class _Object(NamedTuple):
    class_name: str
    box: tuple[float, ...]  # left, top, width, height in pixels
    polygon: list[float] | None = None  # x, y, x, y, … in pixels
    is_difficult: bool = False


class _Labeled(NamedTuple):
    path: Path  # of the image, below the source folder
    size: tuple[int, int]  # height and width as annotated, 0 if unknown
    objects: list[_Object]


@dataclass(frozen=True)
class Conversion:
    """What was converted: images and objects of each split, and what was repaired or left out."""

    counts: dict[str, tuple[int, int]]
    class_names: tuple[str, ...]
    reports: list[DataReport]


def convert_to_coco(
    source: AnyPath,
    output: AnyPath,
    *,
    label_format: LabelFormat | None = None,
    validation_share: float = 0.1,
    seed: int = 0,
    allow_outside: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> Conversion:
    """Read a dataset of boxes and write it as a folder that `open_and_check_coco` reads without a fault.

    Images are linked, or copied to another disk. Files of the source are not changed.

    Args:
        source: Folder with images and one annotation file per image, of the same name.
        output: Folder to write; must be empty or not be there yet.
        label_format: Format of the annotations; None: by the files that are there.
        validation_share: Share of the images to validate on, if the source has no splits.
        seed: Random seed of that choice.
        allow_outside: Use images that are links to files outside of the source folder.
        on_progress: Called after each image.

    Raises:
        DataError: If there is nothing to convert, or something else is in the output folder.
        OSError: If nothing can be written there.
    """
    root, output = check_folder(source, "images with Pascal VOC's or YOLO's annotations"), Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise DataError(f"{output} is not an empty folder, and is left alone; give another one to write to")
    report, files = DataReport(str(root), "", repaired=True), _files(root)
    known_names = _known_classes(root, files)
    labeled = list(_read(root, files, label_format, known_names, report, on_progress))
    objects = counted(sum(len(item.objects) for item in labeled), "objects")
    report.checked = f"{counted(len(labeled), 'annotated images')}, {objects}"
    names = known_names or sorted({item.class_name for image in labeled for item in image.objects})
    alike = Counter(name.casefold() for name in names)
    for name in sorted(names, key=str.casefold):
        if alike[name.casefold()] > 1:
            report.add("class names that differ only by case", name, "kept as different classes")
    annotations, reports, images = {}, [report], ListedFiles(root, allow_outside=allow_outside)
    masks = all(item.polygon for image in labeled for item in image.objects)
    for split, chosen in _split(root, files, labeled, validation_share, seed, report).items():
        raw = _annotations(f"{root} ({split})", chosen, names, report, masks=masks)
        checked = check_annotations(raw, images, masks=masks, every_category=False, repair=True, decode=True)
        annotations[split] = checked.annotations
        reports.append(checked.report)
    _leave_out_unlearned(annotations, report)
    for split, content in annotations.items():
        if not content.images or (split == "train" and not content.objects):
            faults = (str(found) for found in reports if found)
            raise DataError("\n".join([f"{root} has nothing left for the split {split!r}", *faults]))
    _write(root, output, annotations)
    counts = {split: (len(content.images), len(content.objects)) for split, content in annotations.items()}
    return Conversion(counts, annotations["train"].class_names, [found for found in reports if found])


def _read(
    root: Path,
    files: Sequence[Path],
    label_format: LabelFormat | None,
    names: Sequence[str],
    report: DataReport,
    on_progress: Callable[[], None] | None,
) -> Iterator[_Labeled]:
    """Yield the images that have annotations, in order."""
    known = set(files)
    images = [image for path in find_images([root]) if (image := path.relative_to(root)) in known]
    kind = label_format or ("voc" if any(path.suffix.lower() == SUFFIXES["voc"] for path in files) else "yolo")
    paired = _pair(images, [path for path in files if path.suffix.lower() == SUFFIXES[kind]], kind, report)
    if not paired:
        raise DataError(
            f"{root} has {len(images):,} images and no annotations for them; expected NAME.xml (Pascal VOC) or "
            "NAME.txt (YOLO) for each, beside them or in folders such as Annotations or labels"
        )
    if kind == "voc":
        for image in images:
            if image not in paired:
                report.add("images without an annotation file", str(image))
        parse_xml = _xml_parser()
        for image, label_file in sorted(paired.items()):
            if (found := _voc_objects(root / label_file, parse_xml, str(label_file), report)) is not None:
                yield _Labeled(image, *found)
        return
    sizes = read_in_threads(lambda image: image_size(root / image), images, on_progress)
    for image, size in zip(images, sizes, strict=True):
        if isinstance(size, ImageError):
            report.add("images whose file cannot be read", f"{image}: {size.reason}", WITH_OBJECTS)
        elif image not in paired:
            report.add("images without a label file", str(image), "kept as background, without objects")
            yield _Labeled(image, size, [])  # YOLO's way to say that nothing is there
        else:
            objects = _yolo_objects(root / paired[image], names, size, str(paired[image]), report)
            yield _Labeled(image, size, list(objects))


def _files(root: Path) -> list[Path]:
    """Return what is below the folder, without hidden files and without what was converted from it before."""
    found = [path.relative_to(root) for path in sorted(root.rglob("*"))]
    converted = {path.parents[1] for path in found if path.match(f"*/annotations/{_json_name('train')}")}
    visible = (path for path in found if not any(part.startswith(".") for part in path.parts))
    return [path for path in visible if converted.isdisjoint(path.parents)]


def _pair(images: Sequence[Path], labels: Sequence[Path], kind: LabelFormat, report: DataReport) -> dict[Path, Path]:
    """Return the annotation file of each image that has one: of the same name, in the most similar folder."""
    by_stem: defaultdict[str, list[Path]] = defaultdict(list)
    for image in images:
        by_stem[image.stem].append(image)
    paired: dict[Path, Path] = {}
    for label in labels:
        similarity = {image: len({*image.parts[:-1]} & {*label.parts[:-1]}) for image in by_stem[label.stem]}
        best = [image for image, value in similarity.items() if value == max(similarity.values())]
        if not best and (kind == "voc" or "labels" in label.parts):  # other texts are not about images
            report.add("annotation files whose image is missing", str(label))
        elif len(best) > 1:
            report.add("annotation files that several images fit", str(label))
        elif best and paired.setdefault(best[0], label) != label:
            report.add("annotation files of an image that has one", str(label))
    return paired


def _xml_parser() -> Callable[[bytes], Any]:
    try:
        from defusedxml import ElementTree
    except ModuleNotFoundError:
        missing = "Pascal VOC's XML is read by defusedxml, which is not installed"
        raise DataError(f"{missing}; {install_command('detection')}") from None
    return lambda text: ElementTree.fromstring(text, forbid_dtd=True)


def _voc_objects(
    path: Path, parse_xml: Callable[[bytes], Any], name: str, report: DataReport
) -> tuple[tuple[int, int], list[_Object]] | None:
    """Return (height, width) and the objects of an XML file, or None if it cannot be read."""
    try:
        root = parse_xml(read_bounded(path, MAX_TEXT_BYTES))
        height, width = (max(0, int(float(root.findtext(f"size/{side}") or 0))) for side in ("height", "width"))
    except (OSError, ValueError, LookupError, SyntaxError, OverflowError) as error:  # ElementTree's is a SyntaxError
        reason = "it declares a document type" if type(error).__name__ == "DTDForbidden" else error
        return report.add("XML files that cannot be read", f"{name}: {reason}", "left out with their images")
    objects: list[_Object] = []
    for number, node in enumerate(root.iterfind("object"), start=1):
        where, class_name = f"object {number} in {name}", _class_name(node.findtext("name"))
        try:
            left, top, right, bottom = (float(node.findtext(f"bndbox/{s}")) for s in ("xmin", "ymin", "xmax", "ymax"))
        except (TypeError, ValueError):  # the former from what is missing
            report.add("objects without a box of four numbers", where)
            continue
        if class_name is None:
            report.add("objects without a class", where)
        elif left == right or top == bottom:
            report.add("boxes without area", where)
        else:
            if left > right or top > bottom:
                report.add("boxes with swapped corners", where, "swapped back")
            (left, right), (top, bottom) = sorted((left, right)), sorted((top, bottom))
            # Pixels count from 1, and the last one belongs to the box.
            box = (left - 1, top - 1, right - left + 1, bottom - top + 1)
            is_difficult = (node.findtext("difficult") or "0").strip() == "1"
            objects.append(_Object(class_name, box, is_difficult=is_difficult))
    return (height, width), objects


def _yolo_objects(
    path: Path, names: Sequence[str], size: tuple[int, int], name: str, report: DataReport
) -> Iterator[_Object]:
    """Yield the objects of a text file: `class x y width height` or `class x1 y1 x2 y2 …` in parts of the sides."""
    try:
        lines = read_bounded(path, MAX_TEXT_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        return report.add("text files that cannot be read", f"{name}: {error}", "image kept without objects")
    height, width = size
    for number, line in enumerate(lines, start=1):
        where, words = f"line {number} of {name}", line.split()
        if not words:
            continue
        try:
            first, *values = map(float, words)
            is_polygon = len(values) >= 6 and len(values) % 2 == 0
            if not first.is_integer() or (not is_polygon and len(values) not in (4, 5)):  # a fifth one is a score
                raise ValueError
            class_number = int(first)
        except ValueError:
            report.add("lines that are no box", where)
            continue
        if names and not 0 <= class_number < len(names):
            report.add("objects of an unknown category", f"{where}: category {class_number}")
            continue
        class_name = names[class_number] if names else str(class_number)
        if is_polygon:
            polygon = [value * (height if place % 2 else width) for place, value in enumerate(values)]
            xs, ys = polygon[::2], polygon[1::2]
            yield _Object(class_name, (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)), polygon)
        else:
            x, y, w, h = values[:4]
            yield _Object(class_name, ((x - w / 2) * width, (y - h / 2) * height, w * width, h * height))


def _known_classes(root: Path, files: Sequence[Path]) -> list[str]:
    """Return the class names that a file of the dataset lists, in order; none if there is no such file."""
    lists = [path for path in files if path.name == "classes.txt" or path.suffix == ".names"]
    if lists:
        path = root / min(lists, key=lambda path: len(path.parts))
        return _checked_names([line for line in _text(path).splitlines() if line.strip()], path)
    for path in (root / path for path in files if len(path.parts) == 1 and path.suffix in YAML_SUFFIXES):
        content = _text(path, partial(load_yaml, loader=yaml.SafeLoader))
        if not isinstance(content, dict) or (names := content.get("names")) is None:
            continue
        if isinstance(names, dict):
            by_number = {str(number): name for number, name in names.items()}
            names = [by_number.get(str(number)) for number in range(len(by_number))]
        if not isinstance(names, list) or None in names:
            raise DataError(f"{path} must list the class names in the entry names, or number them from 0 without holes")
        return _checked_names(names, path)
    return []


def _checked_names(names: Sequence[Any], path: Path) -> list[str]:
    checked = [name for given in names if (name := _class_name(str(given)))]
    if len(set(checked)) < len(names):
        raise DataError(f"{path} must list different class names of at most {LONGEST_CLASS_NAME} characters")
    return checked


def _class_name(text: str | None) -> str | None:
    text = (text or "").strip()
    return text if 0 < len(text) <= LONGEST_CLASS_NAME else None


def _text(path: Path, parse: Callable[[str], Any] = str) -> Any:
    try:
        return parse(read_bounded(path, MAX_TEXT_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _split(
    root: Path, files: Sequence[Path], labeled: Sequence[_Labeled], share: float, seed: int, report: DataReport
) -> dict[str, list[_Labeled]]:
    """Return the images of each split: by lists in ImageSets/Main, folders, lists such as train.txt, or by chance."""
    lists: defaultdict[str, set[str]] = defaultdict(set)  # VOC2007 and VOC2012 side by side have one of a name each
    for path in sorted(root.rglob("ImageSets/Main/*.txt")):
        lists[path.stem.lower()] |= {line.split()[0] for line in _text(path).splitlines() if line.strip()}
    named: defaultdict[str, list[_Labeled]] = defaultdict(list)
    if not lists.get("train") and lists.get("trainval"):  # the lists that come with VOC2007's test pictures
        lists["train"] = lists["trainval"] - lists.get("val", set())
    if lists.get("train"):
        for name, members in lists.items():
            named[name] = [item for item in labeled if {item.path.stem, item.path.name} & members]
    else:
        known = {name for names in SPLIT_FOLDERS.values() for name in names}
        for item in labeled:
            parts = [_YEAR.sub("", part.lower()) for part in item.path.parts[:-1]]
            found = [part for part in parts if part in known]
            named[found[0] if found else ""].append(item)
        for path in files if not any(named) else ():  # lists such as Darknet's contain paths, also of other machines
            name = _YEAR.sub("", path.stem.lower())
            if path.suffix == ".txt" and name in known:
                members = {PureWindowsPath(line.strip()).name for line in _text(root / path).splitlines()}
                if listed := [item for item in named[""] if item.path.name in members]:
                    named[name] += listed
                    named[""] = [item for item in named[""] if item.path.name not in members]
    train = named[next((name for name in SPLIT_FOLDERS["train"] if name in named), "")]
    validation = next((named[name] for name in SPLIT_FOLDERS["validation"] if name in named), [])
    if train and not validation:
        chosen = {item.path for item in random.Random(seed).sample(train, max(1, round(share * len(train))))}
        validation = [item for item in train if item.path in chosen]
        train = [item for item in train if item.path not in chosen]
    used = {item.path for item in (*train, *validation)}
    for item in labeled:
        if item.path not in used:
            report.add("images of other splits", str(item.path))
    return {"train": train, "validation": validation}


def _annotations(
    location: str, images: Sequence[_Labeled], names: Sequence[str], report: DataReport, *, masks: bool
) -> CocoAnnotations:
    numbers = {name: number for number, name in enumerate(names, start=1)}
    objects: list[CocoObject] = []
    for image_id, image in enumerate(images, start=1):
        boxes: set[tuple[str, tuple[float, ...]]] = set()
        for item in image.objects:
            where = f"{item.class_name} in {image.path}"
            if (item.class_name, item.box) in boxes:
                report.add("exact duplicates of another box", where, "kept")
            boxes.add((item.class_name, item.box))
            if item.polygon is not None and not masks:
                report.add("polygons that become boxes", where, "mask dropped, since other objects have none")
            if item.class_name not in numbers:
                report.add("objects of an unknown category", where)
                continue
            number, category = len(objects) + 1, numbers[item.class_name]
            polygons = item.polygon and [item.polygon]
            # VOC's protocol neither trains on difficult objects nor counts them, which is what COCO does with crowds.
            objects.append(CocoObject(number, image_id, category, item.box, None, polygons, item.is_difficult))
    listed = (CocoImage(number, image.path.as_posix(), *image.size) for number, image in enumerate(images, start=1))
    categories = (CocoCategory(number, name) for name, number in numbers.items())
    return CocoAnnotations(location, tuple(listed), tuple(categories), tuple(objects))


def _leave_out_unlearned(annotations: dict[str, CocoAnnotations], report: DataReport) -> None:
    """Leave out categories without an object to train on: a check would complain about them."""
    learned = {item.category_id for item in annotations["train"].objects if not item.is_crowd}
    objects = [item for content in annotations.values() for item in content.objects]
    counts = Counter((item.category_id, item.is_crowd) for item in objects)
    for category in annotations["train"].categories:
        if category.id not in learned:
            difficult = counts[category.id, True]
            lost = f"{category.name}: {counted(difficult + counts[category.id, False], 'objects')}"
            why = f", {difficult:,} marked difficult" if difficult else ""
            report.add("categories without an object to train on", lost + why, WITH_OBJECTS)
    for split, content in annotations.items():
        categories = tuple(category for category in content.categories if category.id in learned)
        objects = tuple(item for item in content.objects if item.category_id in learned)
        annotations[split] = replace(content, categories=categories, objects=objects)
        files = {image.id: image.file_name for image in content.images}
        for item in objects:
            if item.is_crowd:
                where = f"{content.category_names[item.category_id]} in {files[item.image_id]}"
                report.add("objects marked difficult", where, "kept as crowd, not trained on")


def _write(root: Path, output: Path, annotations: dict[str, CocoAnnotations]) -> None:
    with replace_folder(output) as new:
        for content in annotations.values():
            for image in content.images:
                target = new / "images" / image.file_name
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(os.path.realpath(root / image.file_name), target)  # takes no space
                except OSError:  # another disk, or a file of another user
                    shutil.copyfile(root / image.file_name, target)
        (new / "annotations").mkdir()
        for split, content in annotations.items():
            (new / "annotations" / _json_name(split)).write_text(json.dumps(content.to_json()))


def _json_name(split: str) -> str:
    return f"instances_{SPLITS[split]}.json"
