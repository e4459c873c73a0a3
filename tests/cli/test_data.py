"""`inline data` from the outside."""

import json

import pytest
from typer.testing import CliRunner

from data.coco_files import annotation, write_coco
from inline_attention.cli.main import app


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, ["data", *map(str, arguments)])


def test_scenes(invoke, tmp_path):
    output = tmp_path / "made" / "on demand"
    small = ("--images", 12, "--size", 64, "--seed", 5)
    result = invoke("scenes", "--output", output, *small)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"Scenes written to {output}: preview.png shows some"
    assert "12 pictures to train on, 1 to validate on" in result.output
    manifest = json.loads((output / "scenes.json").read_text())
    assert manifest == {"kind": "inline scenes", "images": 12, "validation_images": 1, "size": 64, "seed": 5}
    assert len(list(output.glob("images/*/*.jpg"))) == len(list(output.glob("annotations/*/*.png"))) == 13

    again = invoke("scenes", "--output", output, *small)
    assert again.exit_code == 1
    assert "already holds scenes" in again.output
    (output.parent / ".unfinished-on demand-00000000").mkdir()
    third = invoke("scenes", "--output", output, "--images", 3, "--size", 64, "--overwrite")
    assert third.exit_code == 0
    assert "is unfinished" in third.output.replace("\n", " ")
    assert [path.name for path in output.parent.iterdir()] == ["on demand"]
    assert len(list(output.glob("images/training/*.jpg"))) == 3


def test_scenes_that_cannot_be_written(invoke, tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    result = invoke("scenes", "--output", blocker / "scenes", "--images", 1)
    assert result.exit_code == 1
    assert "cannot write to" in result.output
    assert invoke("scenes", "--output", tmp_path / "x", "--size", 20).exit_code == 2


def test_check(invoke, tmp_path):
    assert invoke("scenes", "--output", tmp_path / "scenes", "--images", 40, "--size", 64).exit_code == 0
    detection = ("check", tmp_path / "scenes", "--task", "detection")
    segmentation = ("check", tmp_path / "scenes", "--task", "segmentation")
    good = invoke(*detection)
    assert (good.exit_code, good.output.count("nothing wrong")) == (0, 2)
    assert invoke(*segmentation, "--reduce-zero-label").exit_code == 0
    shifted = invoke(*segmentation)
    assert shifted.exit_code == 1
    assert "labels outside of the list of classes" in shifted.output
    assert invoke("check", tmp_path / "scenes").output == good.output  # the task is that of the annotations
    (tmp_path / "scenes" / "annotations").rename(tmp_path / "scenes" / "kept")
    neither = invoke("check", tmp_path / "scenes")
    assert (neither.exit_code, "`inline data convert` converts" in neither.output) == (1, True)
    (tmp_path / "scenes" / "masks").symlink_to(tmp_path / "scenes" / "kept")
    assert "labels outside of the list of classes" in invoke("check", tmp_path / "scenes").output
    (tmp_path / "scenes" / "masks").unlink()
    (tmp_path / "scenes" / "kept").rename(tmp_path / "scenes" / "annotations")

    (tmp_path / "scenes" / "images" / "training" / "000003.jpg").unlink()
    bad = invoke(*detection)
    assert bad.exit_code == 1
    assert "1 image whose file is missing (000003.jpg (image 4)) (repairing: left out with their objects)" in bad.output
    assert bad.output.count("missing") == 1
    assert "cannot be used for training" in bad.output
    (tmp_path / "empty").mkdir()
    empty = invoke("check", tmp_path / "empty", "--task", "detection")
    assert empty.exit_code == 1
    assert "has no annotations of the split 'train'" in empty.output


@pytest.mark.parametrize("task", [("--task", "detection"), ("--task", "segmentation"), ()], ids=str)
def test_check_of_no_folder(invoke, tmp_path, task):
    (tmp_path / "file").touch()
    for name, what in (("absent", "does not exist"), ("file", "is not a folder")):
        result = invoke("check", tmp_path / name, *task)
        assert result.exit_code == 1
        (line,) = result.output.splitlines()
        assert line.startswith(f"error: the data folder {tmp_path / name} {what}; give one that holds ")


def test_check_of_boxes_without_masks(invoke, tmp_path):
    boxes = [annotation(number, category_id=number, segmentation=[]) for number in (3, 7, 90)]
    for split in ("train", "val"):
        write_coco(tmp_path, boxes, split=split)
    check = ("check", tmp_path, "--task", "detection")
    found = invoke(*check)
    assert found.exit_code == 0, found.output
    assert (
        found.output.count("(3 images, 3 objects; boxes only: fit for faster_rcnn and retinanet): nothing wrong") == 2
    )
    assert "boxes only:" not in invoke(*check, "--boxes-only").output
    required = invoke(*check, "--masks")
    assert required.exit_code == 1
    assert required.output.count("1 annotation file without a single mask") == 1
    assert "(train with --set detection.head=faster_rcnn, or add masks)" in required.output
    assert required.output.count(": 1 fault\n") == 1
    assert "repair" not in required.output


def test_slides(invoke, tmp_path):
    small = ("--images", 2, "--validation-images", 2, "--size", 128, "--mark-size", 8)
    result = invoke("slides", "--output", tmp_path / "new", *small)
    assert result.exit_code == 0, result.output
    assert "2 slides to train on, 2 to validate on" in result.output
    assert result.output.splitlines()[-1].startswith(f"Slides written to {tmp_path / 'new'}: ")
    names = [str(path.relative_to(tmp_path / "new")) for path in (tmp_path / "new").rglob("*.tif")]
    assert sorted(names)[0] == "train/different/000001.tif"
    assert len(names) == 4
    from inline_attention.data.datasets import open_dataset

    source = open_dataset("folder", tmp_path / "new", "train")
    assert list(source.class_names) == ["different", "same"]
    assert source.load(0).size == (128, 128)
    assert invoke("slides", "--output", tmp_path / "new", *small, "--seed", 1).exit_code == 1
    assert (
        "mark_size must be 8 to 16 pixels"
        in invoke("slides", "--output", tmp_path / "x", "--size", 128, "--mark-size", 99).output
    )
