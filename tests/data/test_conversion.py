"""Pascal VOC and YOLO become COCO: boxes to the pixel, every fault counted, nothing a file says obeyed."""

import json
import time
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from inline_attention.cli.main import app
from inline_attention.data.coco import open_and_check_coco
from inline_attention.data.coco.conversion import convert_to_coco
from inline_attention.data.sources import DataError

CORNERS = "<bndbox><xmin>{1}</xmin><ymin>{2}</ymin><xmax>{3}</xmax><ymax>{4}</ymax></bndbox>"
BOX = f"<object><name>{{0}}</name>{{5}}{CORNERS}</object>"


def picture(path, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "gray").save(path)


def box(name, *corners, more=""):
    return BOX.format(name, *corners, more)


def voc(root, name, *objects, size=(40, 30), image=True):
    if image:
        picture(root / "JPEGImages" / f"{name}.jpg")
    path = root / "Annotations" / f"{name}.xml"
    path.parent.mkdir(parents=True, exist_ok=True)
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    path.write_text(f"<annotation><filename>{name}.jpg</filename>{sides}{''.join(objects)}</annotation>")
    return path


def yolo(root, name, *lines, split="train"):
    picture(root / "images" / split / f"{name}.jpg")
    path = root / "labels" / split / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def ten_good(root):
    for number in range(10):
        voc(root, f"good{number}", box("cat", 5, 6, 20, 16), box("dog", 1, 1, 40, 30))


def objects_of(folder, split="train"):
    content = json.loads((folder / "annotations" / f"instances_{split}.json").read_text())
    files = {image["id"]: image["file_name"] for image in content["images"]}
    names = {category["id"]: category["name"] for category in content["categories"]}
    return {(files[item["image_id"]], names[item["category_id"]], *item["bbox"]) for item in content["annotations"]}


def faults_of(conversion):
    return {finding.fault: finding.count for report in conversion.reports for finding in report}


def passes(folder, **options):
    opened = open_and_check_coco(folder, masks=None, **options)
    assert opened.problems == []
    assert [report for report in opened.reports if report] == []
    return opened


def test_boxes_of_voc_are_exact(tmp_path):
    root, output = tmp_path / "voc", tmp_path / "coco"
    ten_good(root)
    lists = root / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("".join(f"good{n}\n" for n in range(7)))
    (lists / "val.txt").write_text("good7 1\ngood8 1\n")
    found = convert_to_coco(root, output)
    assert faults_of(found) == {"images of other splits": 1}
    assert found.counts == {"train": (7, 14), "validation": (2, 4)}
    # Pixels count from 1, and both corners belong to the box.
    assert ("JPEGImages/good0.jpg", "cat", 4, 5, 16, 11) in objects_of(output)
    assert ("JPEGImages/good8.jpg", "dog", 0, 0, 40, 30) in objects_of(output, "val")
    assert len(passes(output).train) == 7


def test_every_fault_of_voc_is_counted_and_the_rest_is_used(tmp_path):
    root, output = tmp_path / "voc", tmp_path / "coco"
    ten_good(root)
    voc(root, "broken").write_text("<annotation><object>")
    voc(root, "absent", box("cat", 1, 1, 5, 5), image=False)
    voc(root, "other_size", box("cat", 1, 1, 5, 5), size=(400, 300))
    voc(root, "no_size", box("cat", 1, 1, 5, 5), size=(0, 0))
    voc(
        root,
        "boxes",
        box("cat", 20, 16, 5, 6),
        box("cat", 5, 5, 5, 9),
        box("cat", 30, 20, 60, 29),
        box("cat", 90, 90, 95, 95),
        box("cat", 1, 1, "x", 9),
        box("cat", 1, 1, "nan", 9),
        box("", 1, 1, 9, 9),
        box("dog", 2, 2, 9, 9, more="<difficult>1</difficult>"),
    )
    picture(root / "JPEGImages" / "alone.jpg")
    (root / "JPEGImages" / "no_picture.jpg").write_text("no picture")
    voc(root, "no_picture", box("cat", 1, 1, 5, 5), image=False)
    found = convert_to_coco(root, output, validation_share=0.2)
    assert faults_of(found) == {
        "images without an annotation file": 1,
        "annotation files whose image is missing": 1,
        "XML files that cannot be read": 1,
        "boxes with swapped corners": 1,
        "boxes without area": 1,
        "objects without a box of four numbers": 1,
        "objects without a class": 1,
        "images of another size than the annotations say": 1,
        "images without a size": 1,
        "images whose file cannot be read": 1,
        "objects without a box of four finite numbers": 1,
        "boxes that leave their image": 1,
        "boxes wholly outside of their image": 1,
        "objects marked difficult": 1,
    }
    passes(output)
    both = objects_of(output) | objects_of(output, "val")
    mended = {item[1:] for item in both if item[0] == "JPEGImages/boxes.jpg"}
    assert mended == {("cat", 4, 5, 16, 11), ("cat", 29, 19, 11, 10), ("dog", 1, 1, 8, 8)}
    contents = [json.loads(path.read_text()) for path in (output / "annotations").iterdir()]
    assert sum(item["iscrowd"] for content in contents for item in content["annotations"]) == 1


def test_boxes_of_yolo_are_exact_and_pictures_without_labels_are_background(tmp_path):
    root, output = tmp_path / "yolo", tmp_path / "coco"
    (root).mkdir()
    (root / "data.yaml").write_text("train: /etc\nval: ../outside\nnc: 3\nnames: [cat, dog, horse]\n")
    yolo(root, "a", "0 0.5 0.5 0.25 0.5", "1 0.9 0.5 0.4 0.2 0.87")
    yolo(root, "b", "7 0.5 0.5 0.1 0.1", "cat 1 1 1 1", "0 0.5", "", "1 0.5 0.5 0 0.1", "1 0.25 0.5 0.1 0.2")
    picture(root / "images" / "train" / "empty.jpg")
    yolo(root, "c", "0 0.5 0.5 0.5 0.5", "2 0.5 0.5 0.5 0.5", split="val")
    found = convert_to_coco(root, output)
    assert faults_of(found) == {
        "objects of an unknown category": 1,
        "lines that are no box": 2,
        "boxes without area": 1,
        "boxes that leave their image": 1,
        "categories without an object to train on": 1,
        "images without a label file": 1,
    }
    assert found.class_names == ("cat", "dog")
    assert found.counts == {"train": (3, 3), "validation": (1, 1)}
    assert objects_of(output, "val") == {("images/val/c.jpg", "cat", 10, 7.5, 20, 15)}
    train = {item[:2]: item[2:] for item in objects_of(output)}
    assert train["images/train/a.jpg", "cat"] == (15, 7.5, 10, 15)
    assert train["images/train/a.jpg", "dog"] == pytest.approx((28, 12, 12, 6))
    passes(output)


def test_polygons_of_yolo_become_masks_if_all_objects_have_one(tmp_path):
    root = tmp_path / "yolo"
    for name, split in (("a", "train"), ("b", "valid")):
        yolo(root, name, "3 0.25 0.25 0.75 0.25 0.75 0.75 0.25 0.75", split=split)
    convert_to_coco(root, tmp_path / "masks")
    target = passes(tmp_path / "masks").train.target(0)
    assert target["masks"].sum() == pytest.approx(20 * 15, abs=20)
    yolo(root, "c", "3 0.5 0.5 0.5 0.5")
    assert faults_of(convert_to_coco(root, tmp_path / "boxes")) == {"polygons that become boxes": 2}
    assert "masks" not in passes(tmp_path / "boxes").train.target(0)


def test_classes_that_disappear_duplicates_and_names_that_differ_by_case_are_reported(tmp_path):
    root = tmp_path / "voc"
    ten_good(root)
    hard = [box("WBC", 2, 2, number, 9, more="<difficult>1</difficult>") for number in (9, 10)]
    voc(root, "more", *hard, box("cat", 1, 1, 5, 5), box("cat", 1, 1, 5, 5), *[box("Cat", 1, 1, n, 5) for n in (6, 7)])
    lists = root / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("more\ngood0\n")
    (lists / "val.txt").write_text("\n".join(f"good{n}" for n in range(1, 10)))
    found = convert_to_coco(root, tmp_path / "coco")
    text = str(found.reports[0])
    assert "1 category without an object to train on (WBC: 2 objects, 2 marked difficult): left out" in text
    assert "1 exact duplicate of another box (cat in JPEGImages/more.jpg): kept" in text
    assert "2 class names that differ only by case (Cat, cat): kept as different classes" in text
    assert found.class_names == ("Cat", "cat", "dog")


def test_lists_of_two_years_add_up_and_trainval_is_trained_on(tmp_path):
    root = tmp_path / "VOCdevkit"
    for year in ("VOC2007", "VOC2012"):
        for name in "abcd":
            voc(root / year, f"{year}_{name}", box("cat", 5, 6, 20, 16))
    lists = [root / year / "ImageSets" / "Main" for year in ("VOC2007", "VOC2012")]
    for folder in lists:
        folder.mkdir(parents=True)
    (lists[0] / "trainval.txt").write_text("VOC2007_a\nVOC2007_b.jpg\n")
    (lists[0] / "test.txt").write_text("VOC2007_c\nVOC2007_d\n")
    (lists[1] / "trainval.txt").write_text("VOC2012_a\nVOC2012_b\nVOC2012_c\n")
    (lists[1] / "aeroplane_train.txt").write_text("VOC2012_d -1\n")  # the lists of a class are not splits
    assert faults_of(convert_to_coco(root, tmp_path / "out")) == {"images of other splits": 1}
    trained = {file.rpartition("/")[2] for file, *_ in objects_of(tmp_path / "out")}
    assert trained == {"VOC2007_a.jpg", "VOC2007_b.jpg", "VOC2012_a.jpg", "VOC2012_b.jpg", "VOC2012_c.jpg"}
    validated = {file.rpartition("/")[2] for file, *_ in objects_of(tmp_path / "out", "val")}
    assert validated == {"VOC2007_c.jpg", "VOC2007_d.jpg"}


def test_folders_of_splits_may_end_with_a_year(tmp_path):
    root = tmp_path / "source"
    for number in range(9):
        yolo(root, f"p{number}", "0 .5 .5 .2 .2", split="train2017" if number < 6 else "val2017")
    assert not faults_of(convert_to_coco(root, tmp_path / "out"))
    assert {file.split("/")[1] for file, *_ in objects_of(tmp_path / "out")} == {"train2017"}
    assert {file.split("/")[1] for file, *_ in objects_of(tmp_path / "out", "val")} == {"val2017"}


def test_lists_of_paths_beside_the_images_name_the_splits(tmp_path):
    root = tmp_path / "darknet" / "data"
    for number in range(9):
        picture(root / "obj" / f"p{number}.jpg")
        (root / "obj" / f"p{number}.txt").write_text("0 .5 .5 .2 .2")
    (root / "obj.names").write_text("cat\n")
    (root / "train.txt").write_text("".join(f"data/obj/p{n}.jpg\n" for n in range(5)))
    (root / "valid.txt").write_text("".join(f"C:\\obj\\p{n}.jpg\r\n" for n in range(4, 8)))
    found = convert_to_coco(root.parent, tmp_path / "out")
    assert found.class_names == ("cat",)
    assert found.counts == {"train": (5, 5), "validation": (3, 3)}, "no image is in both"
    assert faults_of(found) == {"images of other splits": 1}


def test_files_of_windows_and_of_other_tools(tmp_path):
    root = tmp_path / "yolo"
    for number in range(4):
        yolo(root, f"p{number}", f"{number % 2}.0 .5 .5 .2 .2")
    labels = root / "labels" / "train"
    (labels / "p0.txt").write_bytes("\ufeff0 .5 .5 .2 .2\r\n".encode())
    (labels / "p1.txt").rename(labels / "p1.TXT")
    for name, text in (("pets.yaml", "names: {'0': cat, '1': dog}"), ("classes.txt", "\ufeffcat\r\ndog\r\n")):
        (root / name).write_text(text)
        found = convert_to_coco(root, tmp_path / name)
        assert (found.class_names, faults_of(found)) == (("cat", "dog"), {})
        assert sum(objects for _, objects in found.counts.values()) == 4


def test_a_conversion_inside_of_the_source_is_not_read_again(tmp_path):
    ten_good(tmp_path)
    first, second = (convert_to_coco(tmp_path, tmp_path / "converted" / name) for name in ("first", "second"))
    assert first == second


def test_truncated_images_are_left_out(tmp_path):
    root, output = tmp_path / "voc", tmp_path / "coco"
    ten_good(root)
    path = root / "JPEGImages" / "good3.jpg"
    path.write_bytes(path.read_bytes()[:-20])
    assert faults_of(convert_to_coco(root, output)) == {"images whose file cannot be read": 1}
    passes(output, decode=True)


def test_a_random_split_depends_on_the_seed_alone(tmp_path):
    ten_good(tmp_path / "voc")
    splits = []
    for place, seed in enumerate((1, 1, 2)):
        convert_to_coco(tmp_path / "voc", tmp_path / str(place), validation_share=0.3, seed=seed)
        splits.append(objects_of(tmp_path / str(place), "val"))
    assert splits[0] == splits[1] != splits[2]
    assert len(splits[0]) == 6


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))


@pytest.mark.parametrize(
    "text",
    [
        f'<!DOCTYPE a [<!ENTITY l0 "ha">{LAUGHS}]><annotation><object><name>&l9;</name></object></annotation>',
        '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation><name>&x;</name></annotation>',
        '<!DOCTYPE a SYSTEM "http://localhost:9/a.dtd"><annotation/>',
        "<a>" * 100_000 + "</a>" * 100_000,
        "<a>" * 300_000,
        "<?xml version='1.0' encoding='no-such'?><annotation/>",
        "<annotation><size><width>" + "9" * 5000 + "</width></size></annotation>",
        "",
    ],
    ids=["laughs", "file", "network", "deep", "too_long", "encoding", "digits", "empty"],
)
def test_hostile_xml_is_refused_and_the_rest_is_converted(tmp_path, text):
    root = tmp_path / "voc"
    ten_good(root)
    voc(root, "hostile").write_text(text)
    started = time.process_time()
    found = convert_to_coco(root, tmp_path / "coco")
    assert time.process_time() - started < 5
    counts = faults_of(found)
    expected = {
        "images of another size than the annotations say",
        "XML files that cannot be read",
        "images without a size",
    }
    assert sum(counts.values()) == 1, counts
    assert set(counts) <= expected
    assert not any("root:" in str(report) for report in found.reports)


def test_class_names_from_files_are_bounded(tmp_path):
    yolo(tmp_path / "yolo", "a", "0 0.5 0.5 0.5 0.5")
    for text in ("names: 3", "names: [a, a]", f"names: [{'x' * 500}]", "[" * 1000, "names: &a [*a]"):
        (tmp_path / "yolo" / "data.yaml").write_text(text)
        with pytest.raises(DataError, match=r"data\.yaml"):
            convert_to_coco(tmp_path / "yolo", tmp_path / "coco")
    assert not (tmp_path / "coco").exists()


def test_links_that_leave_the_folder_are_not_followed_unasked(tmp_path):
    root = tmp_path / "voc"
    ten_good(root)
    picture(tmp_path / "private.jpg")
    voc(root, "link", box("cat", 1, 1, 5, 5), image=False)
    (root / "JPEGImages" / "link.jpg").symlink_to(tmp_path / "private.jpg")
    found = convert_to_coco(root, tmp_path / "coco")
    assert faults_of(found) == {"images whose file is outside of the data folder": 1}
    assert faults_of(convert_to_coco(root, tmp_path / "allowed", allow_outside=True)) == {}


def test_the_output_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    ten_good(tmp_path / "voc")
    monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        convert_to_coco(tmp_path / "voc", tmp_path / "coco")
    assert [path.name for path in tmp_path.iterdir()] == ["voc"]


def test_the_command_reports_and_says_what_comes_next(tmp_path):
    root, output = tmp_path / "voc", tmp_path / "coco"
    ten_good(root)
    voc(root, "broken").write_text("<annotation")
    done = CliRunner().invoke(app, ["data", "convert", str(root), "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert "1 XML file that cannot be read (Annotations/broken.xml" in done.output
    assert "2 classes: cat, dog" in done.output
    assert done.output.splitlines()[-1].startswith(f"Dataset written to {output}: check it with `inline data check")
    checked = CliRunner().invoke(app, ["data", "check", str(output), "--task", "detection"])
    assert checked.exit_code == 0, checked.output
    assert "boxes only: fit for faster_rcnn and retinanet): nothing wrong" in checked.output
    again = CliRunner().invoke(app, ["data", "convert", str(root), "--output", str(output)])
    assert again.exit_code == 1
    assert "is not an empty folder" in again.output
    numbers = tmp_path / "yolo"
    for number in range(2):
        yolo(numbers, f"p{number}", "7 .5 .5 .2 .2")
    unnamed = CliRunner().invoke(app, ["data", "convert", str(numbers), "--output", str(tmp_path / "unnamed")])
    assert "1 class: 7; list their names in classes.txt" in unnamed.output
    empty = CliRunner().invoke(app, ["data", "convert", str(output), "--output", str(tmp_path / "x")])
    assert "no annotations for them; expected NAME.xml" in empty.output.replace("\n", " ")
