import json
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data.coco_files import SQUARE, annotation, some_mask, write_coco
from data.conftest import noise
from inline_attention.data.coco.annotations import find_annotation_file, find_image_folder, read_annotations
from inline_attention.data.coco.checks import open_and_check_coco
from inline_attention.data.coco.masks import MaskError, MaskSizeError, decode_mask, encode_mask, mask_extent
from inline_attention.data.coco.source import CocoSource
from inline_attention.data.images import ImageError
from inline_attention.data.sources import DataError
from inline_attention.support.text import install_command

reference = pytest.importorskip("pycocotools.mask")


def packed(mask):
    return {**reference.encode(np.asfortranarray(mask)), "size": list(mask.shape)}


def text(segmentation):
    return {**segmentation, "counts": segmentation["counts"].decode()}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.randoms())
def test_run_lengths_are_exact_and_those_of_pycocotools(height, width, random):
    mask = np.array([[random.random() < 0.4 for _ in range(width)] for _ in range(height)], dtype=np.uint8)
    encoded = encode_mask(mask)
    assert (decode_mask(encoded, height, width) == mask).all()
    assert (reference.decode(reference.frPyObjects(encoded, height, width)) == mask).all()
    assert (decode_mask(text(packed(mask)), height, width) == mask).all()


def test_all_ways_to_write_a_mask():
    mask = some_mask()
    for segmentation in (encode_mask(mask), packed(mask), text(packed(mask))):
        decoded = decode_mask(segmentation, 40, 48)
        assert decoded.dtype == np.uint8
        assert (decoded == mask).all()
    polygons = [SQUARE, [35.0, 2.0, 45.0, 2.0, 40.0, 9.5]]
    expected = reference.decode(reference.merge(reference.frPyObjects(polygons, 40, 48)))
    assert (decode_mask(polygons, 40, 48) == expected).all()
    assert mask_extent(polygons, 40, 48) == (10, 2, 45, 30)


NOTHING_DRAWN = {
    "a line": [[10, 10, 20, 20, 30, 30]],
    "within a pixel": [[10.1, 10.1, 10.2, 10.1, 10.2, 10.2]],
    "a sliver at the right edge": [[47.7, 0, 48, 0, 48, 40, 47.7, 40]],
    "two that are too small": [[10.1, 10.1, 10.2, 10.1, 10.2, 10.2], [20.1, 20.1, 20.2, 20.1, 20.2, 20.2]],
    "large, but outside": [[-40, -30, -5, -30, -5, -5, -40, -5]],
    "large, and at a corner of the image, but outside": [[-30, 5, -30, -30, 5, -30]],
}


@pytest.mark.parametrize("polygons", NOTHING_DRAWN.values(), ids=NOTHING_DRAWN)
def test_polygons_that_draw_no_pixel_have_no_extent(polygons):
    assert not decode_mask(polygons, 40, 48).any()
    assert mask_extent(polygons, 40, 48) is None
    assert mask_extent([*polygons, SQUARE], 40, 48) is not None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=3, max_size=7),
    st.tuples(st.floats(-2, 34), st.floats(-2, 34)),
    st.tuples(st.sampled_from([0.3, 1, 3, 9]), st.sampled_from([0.3, 1, 3, 9])),
)
def test_polygons_have_an_extent_if_they_draw_a_pixel(corners, centre, size):
    polygon = [centre[axis] + size[axis] * corner[axis] for corner in corners for axis in (0, 1)]
    drawn = decode_mask([polygon], 32, 32).any()
    assert (mask_extent([polygon], 32, 32) is not None) == drawn


def test_large_polygons_are_not_drawn_to_be_checked(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core", None)
    assert mask_extent([SQUARE], 40, 48) == (10, 10, 30, 30)


MALFORMED = {
    "empty": [],
    "absent": None,
    "a number": 3,
    "text": "abc",
    "two points": [[1, 2, 3, 4]],
    "half a point": [[1, 2, 3, 4, 5, 6, 7]],
    "not finite": [[1, 2, 3, float("nan"), 5, 6]],
    "far away": [[1, 2, 1e12, 4, 5, 6]],
    "words": [["1", "2", "3", "4", "5", "6"]],
    "flat": [1, 2, 3, 4, 5, 6],
    "lengths too short": {"size": [40, 48], "counts": [3, 4]},
    "lengths negative": {"size": [40, 48], "counts": [-3, 1923]},
    "lengths absent": {"size": [40, 48]},
    "size of half a pixel": {"size": [40.5, 48], "counts": [1920]},
    "too large for a float": [[1, 2, 10**400, 4, 5, 6]],
    "truncated": {"size": [40, 48], "counts": packed(some_mask())["counts"][:3].decode()},
    "garbage": {"size": [40, 48], "counts": "~~~~PPPPPPPPPPPPPPPPPPPPPPPPP"},
}


@pytest.mark.parametrize("segmentation", MALFORMED.values(), ids=MALFORMED)
def test_malformed_masks(segmentation):
    for read in (decode_mask, mask_extent):
        with pytest.raises(MaskError):
            read(segmentation, 40, 48)


def test_a_mask_of_another_size():
    with pytest.raises(MaskSizeError, match=r"\(40, 48\), the image's \(48, 40\)"):
        decode_mask(encode_mask(some_mask()), 48, 40)


def test_without_the_library_run_lengths_can_be_read_and_polygons_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core", None)
    for segmentation in (encode_mask(some_mask()), packed(some_mask())):
        np.testing.assert_array_equal(decode_mask(segmentation, 40, 48), some_mask())
    with pytest.raises(DataError, match=re.escape(install_command("detection"))):
        decode_mask([SQUARE], 40, 48)


def test_targets_are_those_of_torchvision(tmp_path):
    mask = some_mask()
    objects = [
        annotation(1, category_id=90),
        annotation(2, category_id=3, box=(0.5, 1, 47, 20), segmentation=text(packed(mask)), area=123),
        annotation(3, category_id=7, segmentation=encode_mask(mask), iscrowd=1),
        annotation(4, image_id=3),
    ]
    file = write_coco(tmp_path, objects)
    annotations = read_annotations(file)
    assert annotations.class_names == ("car", "train", "kite")
    assert annotations.label_to_category == {1: 3, 2: 7, 3: 90}
    assert find_annotation_file(tmp_path, "train") == file
    folder = find_image_folder(tmp_path, annotations, "train")
    assert folder == tmp_path / "train2017"

    source = CocoSource(annotations, folder)
    assert len(source) == 3
    target = source.target(0)
    assert target["boxes"].tolist() == [[10, 10, 30, 30], [0.5, 1, 47.5, 21]]
    assert target["labels"].tolist() == [3, 1]
    assert target["area"].tolist() == [400, 123]
    assert target["iscrowd"].tolist() == [0, 0]
    assert target["image_id"].item() == 1
    assert (target["masks"][1].numpy() == mask).all()
    assert {name: value.dtype for name, value in target.items()} == {
        "boxes": torch.float32,
        "labels": torch.int64,
        "masks": torch.uint8,
        "image_id": torch.int64,
        "area": torch.float32,
        "iscrowd": torch.int64,
    }
    assert source.load(0).size == (48, 40)
    empty = source.target(1)
    assert {name: tuple(value.shape) for name, value in empty.items()} == {
        "boxes": (0, 4),
        "labels": (0,),
        "masks": (0, 40, 48),
        "image_id": (),
        "area": (0,),
        "iscrowd": (0,),
    }
    plain = CocoSource(annotations, folder, masks=False).target(0)
    assert plain["iscrowd"].tolist() == [0, 0], "crowds are left out"
    assert "masks" not in plain
    filled = CocoSource(annotations, folder, skip_empty=True)
    assert filled.image_ids.tolist() == [1, 3]
    assert filled.target(1)["boxes"].shape == (1, 4)


def test_a_torchvision_detector_takes_the_targets(tmp_path):
    from torchvision.models.detection import retinanet_resnet50_fpn

    annotations = read_annotations(write_coco(tmp_path, [annotation(1)]))
    source = CocoSource(annotations, tmp_path / "train2017")
    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=4, min_size=64, max_size=64)
    images = [torch.rand(3, 40, 48), torch.rand(3, 40, 48)]
    losses = model(images, [source.target(0), source.target(1)])
    assert all(torch.isfinite(loss) for loss in losses.values())


def test_a_picture_of_another_size_or_mask_that_is_broken_is_named(tmp_path):
    annotations = read_annotations(write_coco(tmp_path, [annotation(5, segmentation=[[1, 2]])]))
    source = CocoSource(annotations, tmp_path / "train2017")
    with pytest.raises(ImageError, match=r"1\.jpg: has a malformed mask \(object 5\)"):
        source.target(0)
    noise(1, (20, 20)).save(tmp_path / "train2017" / "1.jpg")
    with pytest.raises(ImageError, match="is 20×20 pixels, 48×40 in"):
        source.load(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON, or only the beginning of it"),
        ("[]", "must hold an object"),
        ('{"images": []}', "has no list 'categories'"),
        pytest.param("[" * 200_000, "is no JSON, or only the beginning of it", id="deep"),
    ],
)
def test_files_of_another_kind(tmp_path, content, message):
    file = tmp_path / "instances_train.json"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        read_annotations(file)


IMAGE = {"id": 1, "file_name": "1.jpg"}
MALFORMED_ENTRIES = [
    ("images", {"id": 1}, "has no 'file_name'"),
    ("images", IMAGE | {"file_name": None}, "file_name is None, no text"),
    ("images", IMAGE | {"id": 2**63}, "id 9223372036854775808 does not fit into 64 bits"),
    ("images", IMAGE | {"id": 1.5}, "id is 1.5, no whole number"),
    ("images", IMAGE | {"width": float("inf")}, "width is inf, no whole number"),
    ("categories", {"id": "x"}, "id is 'x', no whole number"),
    ("categories", {"name": "x"}, "has no 'id'"),
    ("annotations", None, "None instead of names with values"),
    ("annotations", 7, "7 instead of names with values"),
    ("annotations", annotation(None), "id is None, no whole number"),
    ("annotations", annotation(1, image_id="abc"), "image_id is 'abc', no whole number"),
    ("annotations", {"id": 1, "image_id": 1}, "has no 'category_id'"),
    ("annotations", annotation(1, iscrowd="yes"), "iscrowd is 'yes', no whole number"),
    ("annotations", annotation(1, iscrowd=float("nan")), "iscrowd is nan, no whole number"),
]


@pytest.mark.parametrize(("list_name", "entry", "fault"), MALFORMED_ENTRIES)
def test_malformed_entries_are_collected(tmp_path, list_name, entry, fault):
    content = {"images": [IMAGE], "categories": [{"id": 7}], "annotations": [annotation(1)]}
    content[list_name] = [entry, *content[list_name]]
    file = tmp_path / "instances_train.json"
    file.write_text(json.dumps(content))
    annotations = read_annotations(file)
    assert list(annotations.malformed) == [f"entry 0 of {list_name!r}: {fault}"]
    assert [len(kept) for kept in (annotations.images, annotations.categories, annotations.objects)] == [1, 1, 1]


def test_numbers_that_are_none_or_too_large_are_kept_as_such(tmp_path):
    objects = [
        annotation(1, box=(1, 2, 10**400, "4"), area=-(10**400)),
        annotation(2, box=(1, 2, 3, True), area="400"),
        annotation(3, area=None),
    ]
    large, text_, absent = read_annotations(write_coco(tmp_path, objects)).objects
    assert repr((large.box, large.area)) == "((1.0, 2.0, inf, nan), -inf)"
    assert repr((text_.box, text_.area)) == "((1.0, 2.0, 3.0, nan), nan)"
    assert absent.area is None


def test_without_an_area_targets_have_that_of_the_box(tmp_path):
    item = annotation(1, box=(10, 10, 20, 15))
    del item["area"]
    annotations = read_annotations(write_coco(tmp_path, [item]))
    assert "area" not in annotations.to_json()["annotations"][0]
    assert CocoSource(annotations, tmp_path / "train2017").target(0)["area"].tolist() == [300]


def test_numbers_written_in_other_ways(tmp_path):
    run_lengths = encode_mask(some_mask())
    objects = [
        annotation(1.0, segmentation={**run_lengths, "size": [40.0, 48.0]}, iscrowd="0"),
        annotation(2, iscrowd="1"),
        annotation(3, iscrowd=None),
    ]
    annotations = read_annotations(write_coco(tmp_path, objects))
    assert [item.is_crowd for item in annotations.objects] == [False, True, False]
    first = annotations.to_json()["annotations"][0]
    assert json.dumps(first["segmentation"]["size"]) == "[40, 48]", "evaluation takes whole numbers only"
    assert isinstance(first["id"], int)
    assert (decode_mask(first["segmentation"], 40, 48) == some_mask()).all()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"expected annotations/instances_train\.json"):
        find_annotation_file(tmp_path, "train")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_annotations(tmp_path / "absent.json")
    annotations = read_annotations(write_coco(tmp_path, []))
    with pytest.raises(DataError, match=r"such as '1\.jpg', is in any of"):
        find_image_folder(tmp_path / "elsewhere", annotations, "train")
    (tmp_path / "annotations" / "instances_train2014.json").write_text("{}")
    with pytest.raises(DataError, match=r"2 files for the split 'train': .*; keep one"):
        find_annotation_file(tmp_path, "train")


def annotations_of_pictures(root, names):
    file = write_coco(root, [], images=0)
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"images": images}))
    return read_annotations(file)


def touch(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def test_the_image_folder_is_the_one_that_holds_most(tmp_path):
    names = [f"{number}.jpg" for number in range(500)]
    annotations = annotations_of_pictures(tmp_path, names)
    touch(tmp_path / "train2017", names[:3])
    touch(tmp_path / "images" / "train", names)
    assert find_image_folder(tmp_path, annotations, "train") == tmp_path / "images" / "train"


@pytest.mark.parametrize("there", [slice(400, None), slice(499, None), slice(1)], ids=["late", "the last", "the first"])
def test_one_picture_is_enough_to_find_the_image_folder(tmp_path, there):
    names = [f"{number}.jpg" for number in range(500)]
    annotations = annotations_of_pictures(tmp_path, names)
    touch(tmp_path / "images" / "train", names[there])
    assert find_image_folder(tmp_path, annotations, "train") == tmp_path / "images" / "train"


@pytest.mark.parametrize("leading_out", ["{root}/elsewhere/0.jpg", "../../elsewhere/0.jpg"])
def test_names_that_lead_out_of_the_image_folder_say_nothing_about_it(tmp_path, leading_out):
    leading_out = leading_out.format(root=tmp_path)
    touch(tmp_path / "elsewhere", ["0.jpg"])
    others = [f"{number}.jpg" for number in range(250)]
    root = tmp_path / "data"
    touch(root, others[-1:])
    annotations = annotations_of_pictures(root, [leading_out] * 250 + others)
    assert find_image_folder(root, annotations, "train") == root

    alone = annotations_of_pictures(root, [leading_out])
    assert find_image_folder(root, alone, "train").is_dir(), "for a check to say what is wrong"
    folder = find_image_folder(root, alone, "train", allow_outside=True)
    assert folder.is_dir()
    assert (folder / leading_out).is_file()


@pytest.mark.parametrize(
    "name", ["z" * 300 + ".jpg", "\ud800.jpg", "\0.jpg", ""], ids=["long", "surrogate", "nul", "no"]
)
def test_names_that_no_file_can_have_are_not_found(tmp_path, name):
    touch(tmp_path / "train2017", ["1.jpg"])
    assert find_image_folder(tmp_path, annotations_of_pictures(tmp_path, [name, "1.jpg"]), "train").name == "train2017"
    if "\0" in name:  # a check says what is wrong
        assert find_image_folder(tmp_path, annotations_of_pictures(tmp_path, [name]), "train").is_dir()
        return
    with pytest.raises(DataError, match="none of the images"):
        find_image_folder(tmp_path, annotations_of_pictures(tmp_path, [name]), "train")


def test_a_split_to_train_and_to_validate_on_is_opened_for_each(tmp_path):
    objects = [annotation(n, image_id=n, category_id=c) for n, c in ((1, 3), (2, 7), (3, 90))]
    write_coco(tmp_path, objects, images=5)
    opened = open_and_check_coco(tmp_path, validation_split="train")
    assert (len(opened.train), len(opened.validation)) == (3, 5)
    write_coco(tmp_path, [*objects[:2], annotation(9, box=(0, 0, 0, 5))], images=5)
    problems = open_and_check_coco(tmp_path, validation_split="train").problems
    assert len(problems) == 2, "each is said once: a box without area, and a category without an object"


def test_of_categories_that_share_an_id_the_first_counts_before_and_after_a_repair(tmp_path):
    categories = [{"id": 7, "name": "train"}, {"id": 3, "name": "car"}, {"id": 7, "name": "bus"}]
    objects = [annotation(1), annotation(2, category_id=3)]
    for split in ("train", "val"):
        file = write_coco(tmp_path, objects, split=split, categories=categories)
    opened = open_and_check_coco(tmp_path, repair=True)
    assert opened.problems == []
    assert opened.train.class_names == read_annotations(file).class_names == ("car", "train")


def test_opening_both_splits_says_all_that_is_wrong(tmp_path):
    objects = [annotation(n, image_id=n, category_id=c) for n, c in ((1, 3), (2, 7), (3, 90))]
    write_coco(tmp_path, objects)
    write_coco(tmp_path, objects[:1], split="val")
    good = open_and_check_coco(tmp_path, num_classes=3)
    assert good.problems == []
    assert (len(good.train), len(good.validation)) == (3, 3)
    assert len(good.validation_annotations.objects) == 1

    write_coco(tmp_path, [*objects[:1], annotation(9, box=(0, 0, 0, 5))], split="val", categories=[{"id": 7}])
    (tmp_path / "train2017" / "2.jpg").unlink()
    problems = "\n".join(open_and_check_coco(tmp_path, num_classes=5).problems)
    assert "1 image whose file is missing (2.jpg (image 2))" in problems
    assert "1 box without area" in problems
    assert "3 categories differ between" in problems
    assert "has 3 categories, the model 5; leave --num-classes out" in problems
    repaired = open_and_check_coco(tmp_path, repair=True)
    assert len(repaired.problems) == 1, "what the two files mean by a category cannot be repaired"
    assert len(repaired.train) == 2
    (tmp_path / "empty").mkdir()
    (problem, other) = open_and_check_coco(tmp_path / "empty").problems
    assert "has no annotations of the split" in problem
    assert "has no annotations of the split" in other


def test_a_large_photograph(tmp_path):
    Image.new("RGB", (4000, 3000), "white").save(tmp_path / "photo.jpg")
    mask = np.zeros((3000, 4000), dtype=np.uint8)
    mask[100:2900, 50:3950] = 1
    file = write_coco(
        tmp_path,
        [annotation(1, box=(50, 100, 3900, 2800), segmentation=encode_mask(mask))],
        images=0,
    )
    content = json.loads(file.read_text())
    content["images"] = [{"id": 1, "file_name": "photo.jpg", "height": 3000, "width": 4000}]
    file.write_text(json.dumps(content))
    source = CocoSource(read_annotations(file), tmp_path)
    assert source.load(0).size == (4000, 3000)
    assert (source.target(0)["masks"][0].numpy() == mask).all()
