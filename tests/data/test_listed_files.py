"""Names in annotation files and settings that lead out of the data folder."""

import json
import os

import pytest

from data.coco_files import annotation, write_coco
from data.conftest import noise
from inline_attention.data.coco.annotations import read_annotations
from inline_attention.data.coco.checks import check_annotations, open_and_check_coco
from inline_attention.data.coco.source import CocoSource
from inline_attention.data.images import ImageError
from inline_attention.data.segmentation import find_pair_folders
from inline_attention.data.sources import DataError

OUTSIDE = "images whose file is outside of the data folder"
ONE_OUTSIDE = "1 image whose file is outside of the data folder"


def coco_with_name(root, name):
    """Write a dataset whose third image has another name; returns the annotation file."""
    objects = [annotation(n, image_id=n, category_id=c) for n, c in ((1, 3), (2, 7), (3, 90))]
    for split in ("train", "val"):
        file = write_coco(root, objects, split=split)
    file = root / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    content["images"][2]["file_name"] = name
    file.write_text(json.dumps(content))
    return file


@pytest.fixture
def root(tmp_path):
    """A data folder beside a secret that must not be read."""
    noise(3).save(tmp_path / "secret.jpg")
    (tmp_path / "data" / "train2017").mkdir(parents=True)
    (tmp_path / "data" / "train2017" / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (tmp_path / "data" / "train2017" / "folder").symlink_to(tmp_path)
    (tmp_path / "data" / "train2017" / "hop").symlink_to("link.jpg")
    return tmp_path / "data"


NAMES = {
    "absolute": "{outside}/secret.jpg",
    "dots": "../../secret.jpg",
    "dots in the middle": "x/../../../secret.jpg",
    "link": "link.jpg",
    "link to a link": "hop",
    "link to a folder": "folder/secret.jpg",
    "device": "/dev/zero",
    "Windows drive": "C:\\secret.jpg",
    "Windows drive, relative": "C:secret.jpg",
    "Windows share": "\\\\host\\share\\secret.jpg",
    "Windows dots": "..\\..\\secret.jpg",
    "NUL": "1.jpg\0/../../secret.jpg",
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_that_leads_out_is_refused_and_not_opened(root, kind, monkeypatch):
    file = coco_with_name(root, NAMES[kind].format(outside=root.parent))
    opened, real_open = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **options: opened.append(str(path)) or real_open(path, *rest))
    found = open_and_check_coco(root)
    assert [finding.count for report in found.reports for finding in report if finding.fault == OUTSIDE] == [1]
    (problem,) = [problem for problem in found.problems if ONE_OUTSIDE in problem]
    assert "--allow-outside-files (data.allow_outside_files=true) reads them" in problem
    assert problem.isprintable()

    repaired = open_and_check_coco(root, repair=True)
    assert len(repaired.train) == 2

    source = CocoSource(read_annotations(file), root / "train2017", masks=False)
    with pytest.raises(ImageError, match="allow it with --allow-outside-files"):
        source.load(2)
    monkeypatch.undo()
    assert any(path.endswith("1.jpg") for path in opened)
    assert not any("secret" in path or path.endswith(("link.jpg", "hop", "zero")) for path in opened)


@pytest.mark.parametrize("kind", ["absolute", "dots", "dots in the middle", "link", "link to a link"])
def test_it_is_read_if_the_user_allows_it(root, kind):
    (root / "train2017" / "x").mkdir()
    coco_with_name(root, NAMES[kind].format(outside=root.parent))
    opened = open_and_check_coco(root, allow_outside=True)
    assert opened.problems == []
    assert opened.train.load(2).size == (48, 40)


def test_links_inside_the_data_and_to_the_image_folder_are_followed(tmp_path):
    pool = tmp_path / "elsewhere" / "train2017"
    root = tmp_path / "data"
    coco_with_name(root, "../pool/4.jpg")
    pool.parent.mkdir()
    (root / "train2017").rename(pool)
    (root / "train2017").symlink_to(pool)  # a folder that a cluster shares
    (root / "pool").mkdir()
    (pool / "3.jpg").rename(root / "pool" / "4.jpg")
    problems = open_and_check_coco(root).problems
    assert any(ONE_OUTSIDE in problem for problem in problems), "'..' is relative to where the link leads"
    (pool / "4.jpg").symlink_to(root / "pool" / "4.jpg")
    coco_with_name(root, "4.jpg")
    (root / "val2017" / "1.jpg").rename(root / "pool" / "1.jpg")
    (root / "val2017" / "1.jpg").symlink_to("../pool/1.jpg")
    assert open_and_check_coco(root).problems == []


def test_check_alone_takes_the_image_folder_for_the_data_folder(root):
    file = coco_with_name(root, "../val2017/1.jpg")
    report = check_annotations(read_annotations(file), root / "train2017").report
    assert report.count(OUTSIDE) == 1
    assert open_and_check_coco(root).problems == []


@pytest.mark.parametrize("name", ["../{split}", "{outside}/images", "images/../../{split}", "..\\{split}", "a\0b"])
@pytest.mark.parametrize("setting", ["image_folder", "map_folder"])
def test_folders_of_pairs_stay_below_the_data_folder(tmp_path, setting, name):
    root = tmp_path / "data"
    for folder in ("images/train", "annotations/train"):
        (root / folder).mkdir(parents=True)
    (tmp_path / "train").mkdir()
    (tmp_path / "images").mkdir()
    given = name.replace("{outside}", str(tmp_path))
    with pytest.raises(DataError, match=rf"^{setting} .*; allow it with --allow-outside-files"):
        find_pair_folders(root, "train", **{setting: given})
    with pytest.raises(DataError, match=rf"^{setting} .*; allow it with"):
        find_pair_folders(root, "../../x", **{setting: "images/{split}"})
    if name in ("../{split}", "{outside}/images"):
        assert find_pair_folders(root, "train", **{setting: given}, allow_outside=True)
