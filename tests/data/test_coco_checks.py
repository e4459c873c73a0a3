import json
import os

import pytest
from PIL import Image

from data.coco_files import SQUARE, annotation, some_mask, write_coco
from data.conftest import noise
from inline_attention.data.coco.annotations import read_annotations
from inline_attention.data.coco.checks import check_annotations, open_and_check_coco
from inline_attention.data.coco.masks import decode_mask, encode_mask
from inline_attention.data.coco.source import CocoSource
from inline_attention.data.images import ImageError
from inline_attention.data.sources import DataError
from inline_attention.support.text import counted

pytest.importorskip("faster_coco_eval")  # some masks are decoded when the tests are collected

GOOD = [annotation(1, image_id=1, category_id=3), annotation(2, image_id=2, category_id=90), annotation(3)]


def check(root, objects=(), *, repair=False, masks=True, good=GOOD, **others):
    file = write_coco(root, [*good, *objects], **others)
    return check_annotations(read_annotations(file), root / "train2017", masks=masks, repair=repair)


def test_nothing_wrong(tmp_path):
    checked = check(tmp_path)
    assert not checked.report
    assert checked.report.problems == []
    assert str(checked.report).endswith("(3 images, 3 objects): nothing wrong")


FAULTS = {
    "boxes without area": (annotation(9, box=(5, 5, 0, 8)), "box taken from the mask", (10, 10, 20, 20)),
    "objects without a box of four finite numbers": (
        annotation(9, box=(1, 2, 3)),
        "box taken from the mask",
        (10, 10, 20, 20),
    ),
    "boxes wholly outside of their image": (
        annotation(9, box=(100, 100, 9, 9)),
        "box taken from the mask",
        (10, 10, 20, 20),
    ),
    "boxes that leave their image": (
        annotation(9, box=(-9, 10, 39, 20), segmentation=[[0, 10, 30, 10, 30, 30, 0, 30]]),
        "clipped",
        (0, 10, 30, 20),
    ),
    "boxes that disagree with their mask": (
        annotation(9, box=(10, 10, 20, 25)),
        "box taken from the mask",
        (10, 10, 20, 20),
    ),
    "objects of an unknown image": (annotation(9, image_id=99), "left out", None),
    "objects of an unknown category": (annotation(9, category_id=4), "left out", None),
    "objects without a mask": (annotation(9, segmentation=[]), "left out", None),
    "malformed masks": (annotation(9, segmentation=[[1, 2]]), "left out", None),
    "masks of another size than their image": (
        annotation(9, segmentation=encode_mask(some_mask(size=(48, 40)))),
        "left out",
        None,
    ),
    "masks that cover nothing of their image": (
        annotation(9, segmentation=encode_mask(some_mask() * 0)),
        "left out",
        None,
    ),
    "masks with malformed polygons": (
        annotation(9, segmentation=[SQUARE, [1, 2]]),
        "those polygons left out",
        (10, 10, 20, 20),
    ),
    "objects with an id that another has": (annotation(2), "given new ids", (10, 10, 20, 20)),
    "objects without a positive finite area": (
        annotation(9, area=0),
        "area taken from the mask, or else from the box",
        (10, 10, 20, 20),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_counted_named_and_repaired(tmp_path, fault):
    item, repair, box = FAULTS[fault]
    found = check(tmp_path, [item])
    assert [(finding.fault, finding.count, finding.repair) for finding in found.report] == [(fault, 1, repair)]
    (problem,) = found.report.problems
    assert f"{counted(1, fault)} (object {item['id']}" in problem
    assert len(found.annotations.objects) == 4, "without repair, nothing is changed"

    repaired = check(tmp_path, [item], repair=True)
    assert repaired.report.problems == []
    assert counted(1, fault) in str(repaired.report)
    kept = [kept for kept in repaired.annotations.objects if kept.id not in (1, 2, 3)]
    assert [kept.box for kept in kept] == ([] if box is None else [box])
    again = check_annotations(repaired.annotations, tmp_path / "train2017")
    assert not again.report, "what was repaired is right"
    source = CocoSource(repaired.annotations, tmp_path / "train2017")
    for index in range(len(source)):
        source.target(index)


def test_truncated_files_are_found_by_decoding(tmp_path):
    file = write_coco(tmp_path, GOOD)
    path = next((tmp_path / "train2017").iterdir())
    path.write_bytes(path.read_bytes()[:-20])
    content, folder = read_annotations(file), tmp_path / "train2017"
    assert check_annotations(content, folder).report.problems == []
    problem, *_ = check_annotations(content, folder, decode=True).report.problems
    assert f"1 image whose file cannot be read ({path.name} (image" in problem


def test_without_masks_boxes_alone_count(tmp_path):
    objects = [annotation(9, segmentation=[]), annotation(10, box=(5, 5, 0, 8))]
    report = check(tmp_path, objects, masks=False).report
    assert [(finding.fault, finding.repair) for finding in report] == [("boxes without area", "left out")]


@pytest.mark.parametrize("repair", [False, True])
def test_no_mask_at_all_is_one_fault_that_cannot_be_repaired(tmp_path, repair):
    boxes = [item | {"segmentation": none} for item, none in zip(GOOD, ([], None, []), strict=True)]
    checked = check(tmp_path, [annotation(9, box=(5, 5, 0, 8), segmentation=[])], good=boxes, repair=repair)
    assert [(finding.fault, finding.count) for finding in checked.report] == [
        ("annotation files without a single mask", 1),
        ("boxes without area", 1),
    ]
    assert (
        "boxes only: fit for faster_rcnn and retinanet); train with --set detection.head=faster_rcnn"
        in checked.report.problems[0]
    )
    either = check(tmp_path, good=boxes, masks=None)
    assert not either.report
    assert str(either.report).endswith(
        "(3 images, 3 objects; boxes only: fit for faster_rcnn and retinanet): nothing wrong"
    )


def test_masks_are_used_if_there_are_any(tmp_path):
    for split in ("train", "val"):
        write_coco(tmp_path, GOOD, split=split)
    assert "masks" in open_and_check_coco(tmp_path, masks=None).train.target(0)
    assert check(tmp_path, [annotation(9, segmentation=[])], masks=None).report.count("objects without a mask") == 1


def test_no_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"the data folder .*absent does not exist; give one that holds annotations"):
        open_and_check_coco(tmp_path / "absent")


@pytest.mark.parametrize(
    "polygon", [[10, 10, 20, 20, 30, 30], [10.1, 10.1, 10.2, 10.1, 10.2, 10.2], [47.7, 0, 48, 0, 48, 40, 47.7, 40]]
)
def test_polygons_between_pixels_cover_nothing_as_run_lengths_do(tmp_path, polygon):
    x, y = polygon[0::2], polygon[1::2]
    box = (min(x), min(y), max(x) - min(x), max(y) - min(y))
    for segmentation in ([polygon], encode_mask(decode_mask([polygon], 40, 48))):
        checked = check(tmp_path, [annotation(9, box=box, segmentation=segmentation)], repair=True)
        (finding,) = checked.report
        assert (finding.fault, finding.repair) == ("masks that cover nothing of their image", "left out")
        assert [item.id for item in checked.annotations.objects] == [1, 2, 3]


TRIANGLE = [10.0, 10.0, 30.0, 10.0, 10.0, 30.0]
TRIANGLE_AREA = int(decode_mask([TRIANGLE], 40, 48).sum())
BAD_AREAS = {
    "negative": (-4, "-4"),
    "zero": (0, "0"),
    "infinite": (float("inf"), "inf"),
    "not a number": (float("nan"), "no number"),
    "text": ("400", "no number"),
    "too large for a float": (10**400, "inf"),
}


@pytest.mark.parametrize(("area", "said"), BAD_AREAS.values(), ids=BAD_AREAS)
def test_bad_areas_are_taken_from_the_mask_or_else_from_the_box(tmp_path, area, said):
    with_mask = annotation(9, area=area, segmentation=[TRIANGLE])
    with_run_lengths = annotation(10, area=area, segmentation=encode_mask(decode_mask([TRIANGLE], 40, 48)))
    for masks in (True, False):
        checked = check(tmp_path, [with_mask, with_run_lengths], masks=masks, repair=True)
        (finding,) = checked.report
        assert (finding.fault, finding.count) == ("objects without a positive finite area", 2)
        assert finding.first[0] == f"object 9 in 1.jpg: {said}"
        assert [item.area for item in checked.annotations.objects] == [400, 400, 400, TRIANGLE_AREA, TRIANGLE_AREA]
    for segmentation in (None, [], [[1, 2]], [[10, 10, 20, 20, 30, 30]]):
        item = annotation(9, area=area) | {"segmentation": segmentation}
        checked = check(tmp_path, [item], masks=False, repair=True)
        assert checked.annotations.objects[-1].area == 400


def without_area(item):
    return {key: value for key, value in item.items() if key != "area"}


def test_an_area_that_is_not_given_is_no_fault_and_derived(tmp_path):
    objects = [
        without_area(annotation(9, segmentation=[TRIANGLE])),
        annotation(10, area=None, segmentation=[TRIANGLE]),
        without_area(annotation(11, segmentation=[])),
    ]
    checked = check(tmp_path, objects, masks=False)
    assert not checked.report
    assert [item.area for item in checked.annotations.objects[3:]] == [TRIANGLE_AREA, TRIANGLE_AREA, 400]
    assert [item.area for item in check(tmp_path, objects[:2]).annotations.objects[3:]] == [TRIANGLE_AREA] * 2


def test_areas_are_derived_from_repaired_boxes(tmp_path):
    leaving = without_area(annotation(9, box=(-9, 10, 39, 20), segmentation=[]))
    (*_, clipped) = check(tmp_path, [leaving], masks=False, repair=True).annotations.objects
    assert (clipped.box, clipped.area) == ((0, 10, 30, 20), 600)
    neither = without_area(annotation(9, box=()))
    checked = check(tmp_path, [neither], repair=True)
    assert [finding.fault for finding in checked.report] == ["objects without a box of four finite numbers"]
    assert (checked.annotations.objects[-1].box, checked.annotations.objects[-1].area) == ((10, 10, 20, 20), 400)


def test_malformed_entries_are_counted_named_and_left_out_like_any_other_fault(tmp_path):
    objects = [
        None,
        annotation(9, image_id="abc"),
        annotation(10, iscrowd="yes"),
        annotation(11, image_id=4),  # of an image that is malformed: one fault, not two
        annotation(12, box=(5, 5, 0, 8)),
    ]
    file = write_coco(tmp_path, [*GOOD, *objects])
    content = json.loads(file.read_text())
    content["images"] += [{"id": 4}, {"file_name": "1.jpg"}]
    content["categories"].append({"name": "kite"})
    file.write_text(json.dumps(content))
    annotations = read_annotations(file)
    found = check_annotations(annotations, tmp_path / "train2017")
    assert [(finding.fault, finding.count) for finding in found.report] == [
        ("malformed entries", 6),
        ("boxes without area", 1),
    ]
    assert found.report.problems[0].endswith(
        "6 malformed entries (entry 3 of 'images': has no 'file_name', entry 4 of 'images': has no 'id', "
        "entry 3 of 'categories': has no 'id', entry 3 of 'annotations': None instead of names with values, "
        "entry 4 of 'annotations': image_id is 'abc', no whole number and 1 more); "
        "repairing: left out, images with their objects"
    )
    repaired = check_annotations(annotations, tmp_path / "train2017", repair=True).annotations
    assert [item.id for item in repaired.objects] == [1, 2, 3, 12]
    assert not check_annotations(repaired, tmp_path / "train2017").report, "what was repaired is right"


@pytest.mark.parametrize(
    ("file_name", "said"), [("z" * 300, "z" * 300), ("z\ud800", "z\\ud800"), ("z\n\x1b[2J", "z\\n\\x1b[2J")]
)
def test_names_that_no_file_or_terminal_takes_are_reported(tmp_path, file_name, said):
    file = write_coco(tmp_path, GOOD)
    content = json.loads(file.read_text())
    content["images"].append({"id": 4, "file_name": file_name, "height": 40, "width": 48})
    file.write_text(json.dumps(content))
    checked = check_annotations(read_annotations(file), tmp_path / "train2017")
    expected = f"1 image whose file is missing ({said} (image 4))"
    (problem,) = checked.report.problems
    assert expected in problem
    assert str(checked.report).encode().decode().splitlines()[1].startswith(f"  {expected}")


def test_tolerances(tmp_path):
    rounded = [
        annotation(9, box=(9.3, 9.1, 21, 21.5)),
        annotation(10, box=(0, 0, 48.6, 40.4), segmentation=[[0, 0, 48, 0, 48, 40, 0, 40]]),
    ]
    assert not check(tmp_path, rounded).report


def test_images(tmp_path):
    file = write_coco(tmp_path, GOOD, images=7)
    folder = tmp_path / "train2017"
    (folder / "4.jpg").unlink()
    (folder / "5.jpg").write_bytes(b"no image")
    noise(6, (40, 48)).save(folder / "6.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6
    noise(7, (40, 48)).save(folder / "7.jpg", exif=turned)  # upright it is 48×40, as annotated
    annotations = read_annotations(file)
    checked = check_annotations(annotations, folder, repair=True)
    assert {finding.fault: finding.first[0].split(":")[0] for finding in checked.report} == {
        "images whose file is missing": "4.jpg (image 4)",
        "images whose file cannot be read": "5.jpg (image 5)",
        "images of another size than the annotations say": "6.jpg (image 6)",
    }
    assert [image.id for image in checked.annotations.images] == [1, 2, 3, 7]
    assert CocoSource(checked.annotations, folder).load(3).size == (48, 40)


def test_objects_of_images_that_are_left_out_go_with_them_as_one_fault(tmp_path):
    file = write_coco(tmp_path, [*GOOD, annotation(4, image_id=3), annotation(5, image_id=3)])
    (tmp_path / "train2017" / "3.jpg").unlink()
    checked = check_annotations(read_annotations(file), tmp_path / "train2017", repair=True)
    assert len(checked.report) == 1
    assert [item.id for item in checked.annotations.objects] == [1, 2, 3]


def test_duplicate_images_and_categories_sizes_that_are_not_given_and_empty_categories(tmp_path):
    images = [
        {"id": 1, "file_name": "1.jpg", "height": 40, "width": 48},
        {"id": 1, "file_name": "1.jpg", "height": 40, "width": 48},
        {"id": 3, "file_name": "3.jpg"},
    ]
    categories = [
        {"id": 7, "name": "train"},
        {"id": 7, "name": "bus"},
        {"id": 8, "name": "kite"},
        {"id": 9, "name": "kite"},
    ]
    file = write_coco(tmp_path, [annotation(1)], categories=categories)
    content = json.loads(file.read_text()) | {"images": images}
    file.write_text(json.dumps(content))
    annotations = read_annotations(file)
    checked = check_annotations(annotations, tmp_path / "train2017", repair=True)
    assert {finding.fault: finding.first for finding in checked.report} == {
        "images that are listed more than once": ["1.jpg (image 1)"],
        "images without a size": ["3.jpg (image 3)"],
        "categories with an id that another has": ["bus (7)"],
        "categories with a name that another has": ["kite (8 and 9)"],
        "categories without an object": ["kite (8)", "kite (9)"],
    }
    assert checked.annotations.class_names == ("train", "kite", "kite")
    assert [(image.id, image.height, image.width) for image in checked.annotations.images] == [(1, 40, 48), (3, 40, 48)]
    validation = check_annotations(annotations, tmp_path / "train2017", every_category=False)
    assert validation.report.count("categories without an object") == 0


@pytest.mark.parametrize("other", [{"file_name": "2.jpg"}, {"file_name": "absent.jpg"}, {"width": 47}])
def test_pictures_that_share_an_id_go_with_all_objects(tmp_path, other):
    file = write_coco(tmp_path, [*GOOD, annotation(4, image_id=3), annotation(5, image_id=3)])
    content = json.loads(file.read_text())
    content["images"].append(content["images"][2] | other)
    file.write_text(json.dumps(content))
    checked = check_annotations(read_annotations(file), tmp_path / "train2017", repair=True)
    assert [(finding.fault, finding.count) for finding in checked.report] == [("different images with the same id", 2)]
    assert [image.id for image in checked.annotations.images] == [1, 2]
    assert [item.id for item in checked.annotations.objects] == [1, 2, 3]


@pytest.mark.parametrize("box", [(30, 10, 1e-7, 10), (0, 10, 1e-7, 10), (10, 10, 10, 1e-12), (48 - 1e-7, 10, 9, 9)])
def test_boxes_that_vanish_in_float32(tmp_path, box):
    left, top, width, height = box
    right, bottom = left + width, top + height
    thin = annotation(9, box=box, segmentation=[[left, top, right, top, right, bottom, left, bottom]])
    (fault,) = check(tmp_path, [thin], masks=False).report
    assert fault.fault == "boxes without area"
    (fault,) = check(tmp_path, [thin]).report
    assert fault.fault == "masks that cover nothing of their image"
    (fault,) = check(tmp_path, [annotation(9, box=box)]).report
    assert (fault.fault, fault.repair) == ("boxes without area", "box taken from the mask")


def test_only_the_first_offenders_are_named(tmp_path):
    objects = [annotation(10 + n, box=(1, 1, 0, 0), segmentation=[]) for n in range(12)]
    report = check(tmp_path, objects, masks=False).report
    (problem,) = report.problems
    assert "12 boxes without area (object 10 in 1.jpg: 0×0, " in problem
    assert "object 14 in 1.jpg: 0×0 and 7 more); repairing: left out" in problem
    assert "object 15" not in problem


NAN_POLYGON = [float("nan")] * 6
HOSTILE_MASKS = {
    "packed, longer than the image": {"size": [40, 48], "counts": "0" + "o" * 7 + "0"},
    "packed, a number without end": {"size": [40, 48], "counts": "o" * 100_000},
    "packed, other characters": {"size": [40, 48], "counts": "\ud800\0é"},
    "packed, empty": {"size": [40, 48], "counts": ""},
    "packed, negative": {"size": [40, 48], "counts": "0@"},
    "counts, huge": {"size": [40, 48], "counts": [2**62, 2**62]},
    "counts, negative": {"size": [40, 48], "counts": [-1, 40 * 48 + 1]},
    "counts, nested": {"size": [40, 48], "counts": [[[1920]]]},
    "size, huge": {"size": [2**40, 2**40], "counts": [2**80]},
    "size, text": {"size": "no", "counts": []},
    "polygon, not finite": [NAN_POLYGON],
    "polygon, whole numbers of 4,000 digits": [[10**4000] * 6],
    "polygon, an outline without end": [[0, 0, 48, 40] * 2_000_000],
    "nested": [[[[[[1, 2, 3]]]]]],
    "text": "1,2,3,4,5,6",
    "number": 7,
}


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("kind", HOSTILE_MASKS)
def test_hostile_masks_are_faults_and_are_not_kept(tmp_path, kind, masks):
    item = annotation(9, segmentation=HOSTILE_MASKS[kind])
    found = check(tmp_path, [item], masks=masks, repair=True)
    assert bool(found.report) == masks
    source = CocoSource(found.annotations, tmp_path / "train2017", masks=masks)
    assert sum(len(source.target(index)["labels"]) for index in range(3)) == 3 + (not masks)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "is no JSON"),
        (b'{"images": ' + b"[" * 900 + b"]" * 900 + b"}", "."),
        (b'{"images": [' + b"9" * 10_000 + b"]}", "is no JSON"),
        (b'{"images":[],"categories":[{"id":1,"name":' + b"[" * 500 + b"]" * 500 + b'}],"annotations":[]}', None),
        (b'\xff\xfe{"images": []}', "is no JSON"),
        (b'{"images": {}, "categories": 1, "annotations": null}', "has no list 'images'"),
        (b"", "is no JSON"),
        (b'"images"', "must hold an object"),
        (b'{"images":[{"id":NaN,"file_name":"\\u001b[m","height":-Infinity}],"categories":[],"annotations":[]}', None),
    ],
    ids=["deep", "deep entry", "digits", "deep name", "UTF-16", "no lists", "empty", "text", "no numbers"],
)  # fmt: skip
def test_hostile_annotation_files_give_a_sentence(tmp_path, content, message):
    for split in ("train", "val"):
        (tmp_path / f"instances_{split}.json").write_bytes(content)
    opened = open_and_check_coco(tmp_path)
    assert opened.problems
    assert all(problem.isprintable() and len(problem) < 1500 for problem in opened.problems)
    if message is not None:
        with pytest.raises(DataError, match=message):
            read_annotations(tmp_path / "instances_train.json")


def test_names_without_end_are_malformed_entries(tmp_path):
    categories = [{"id": 7, "name": "y" * 100_000}, {"id": 8, "name": {"a": 1}}]
    found = check(tmp_path, categories=categories)
    assert found.report.count("malformed entries") == 2
    assert all(len(problem) < 4000 for problem in found.report.problems)


def test_an_annotation_file_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "instances_train.json")
    (tmp_path / "instances_val.json").symlink_to("/dev/zero")
    problems = open_and_check_coco(tmp_path).problems
    assert len(problems) == 2
    assert all("is not a regular file" in problem for problem in problems)


def test_masks_that_fill_the_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("inline_attention.data.coco.source.MOST_MASK_PIXELS", 3000)
    source = CocoSource(check(tmp_path, [annotation(9)]).annotations, tmp_path / "train2017")
    with pytest.raises(ImageError, match=r"has 3 masks of 48×40 pixels, too many"):
        source.target(0)
