"""Average precision, held against pycocotools and against figures worked out by hand."""

import contextlib
import io
import math
import re
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inline_attention.data.coco.annotations import CocoAnnotations, CocoCategory, CocoImage, CocoObject
from inline_attention.data.coco.masks import encode_mask
from inline_attention.support.text import install_command
from inline_attention.tasks.detection.task import DetectionEvaluator

SIZE = (200, 260)


def rectangle(box):
    left, top, right, bottom = (round(value) for value in box)
    mask = np.zeros(SIZE, dtype=np.uint8)
    mask[max(0, top) : bottom, max(0, left) : right] = 1
    return mask


def thing(number, image_id, category_id, box, is_crowd=False, polygon=False):
    left, top, right, bottom = box
    mask = rectangle(box)
    segmentation = [[left, top, right, top, right, bottom, left, bottom]] if polygon else encode_mask(mask)
    width, height = right - left, bottom - top
    return CocoObject(
        number, image_id, category_id, (left, top, width, height), float(mask.sum()), segmentation, is_crowd
    )


def output(boxes, labels, scores, masks=None):
    masks = [rectangle(box) for box in boxes] if masks is None else masks
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "scores": torch.tensor(scores, dtype=torch.float32),
        "masks": torch.tensor(np.array(masks), dtype=torch.float32).reshape(-1, 1, *SIZE),
    }


def random_case(seed=0, images=30):
    """Objects of all sizes, crowds and empty images, and predictions that are near, wrong, doubled or missing."""
    random = np.random.default_rng(seed)
    categories = [CocoCategory(number, f"kind {number}") for number in (2, 5, 11, 40)]
    objects, outputs = [], []
    for image_id in range(1, images + 1):
        boxes, labels, scores = [], [], []
        for _ in range(random.integers(0, 7)):
            width, height = np.exp(random.uniform(np.log(6), np.log(180), 2)).round()
            left, top = (random.uniform(0, (SIZE[1] - width, SIZE[0] - height))).round()
            box = (left, top, left + width, top + height)
            label = int(random.integers(1, 4))  # of the fourth category there is nothing
            crowd = random.random() < 0.1
            objects.append(
                thing(len(objects), image_id, categories[label - 1].id, box, crowd, polygon=random.random() < 0.5)
            )
            for _ in range(random.integers(0, 4)):
                moved = np.array(box) + random.normal(0, 0.08, 4) * (width, height, width, height)
                boxes.append(np.clip(moved, 0, (SIZE[1], SIZE[0]) * 2).tolist())
                labels.append(label if random.random() < 0.85 else int(random.integers(1, 5)))
                scores.append(float(random.choice([0.3, 0.5, random.random()])))  # with ties
        outputs.append(output(boxes, labels, scores))
    annotations = CocoAnnotations(
        "case", tuple(CocoImage(n, f"{n}.jpg", *SIZE) for n in range(1, images + 1)), tuple(categories), tuple(objects)
    )
    return annotations, outputs


def pycocotools_figures(annotations, outputs, kind):
    """The twelve figures of the reference, from the same predictions."""
    coco = pytest.importorskip("pycocotools.coco")
    from pycocotools import mask as masks
    from pycocotools.cocoeval import COCOeval

    results = []
    for image, found in zip(annotations.images, outputs, strict=True):
        for place, (left, top, right, bottom) in enumerate(found["boxes"].double().tolist()):
            result = {
                "image_id": image.id,
                "category_id": annotations.label_to_category[found["labels"][place].item()],
                "score": found["scores"][place].double().item(),
            }
            if kind == "bbox":
                result["bbox"] = [left, top, right - left, bottom - top]
            else:
                result["segmentation"] = masks.encode(np.asfortranarray(found["masks"][place, 0].byte().numpy()))
            results.append(result)
    truth = coco.COCO()
    truth.dataset = {
        **annotations.to_json(),
        "info": {},
        "annotations": [{**item, "id": n + 1} for n, item in enumerate(annotations.to_json()["annotations"])],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_pycocotools(seed):
    annotations, outputs = random_case(seed)
    evaluator = DetectionEvaluator(annotations)
    for start in range(0, 30, 4):
        evaluator.add_detections(range(start + 1, min(start + 5, 31)), outputs[start : start + 4])
    metrics = evaluator.compute()
    assert metrics.count == 30
    for ours, kind in ((metrics.boxes, "bbox"), (metrics.masks, "segm")):
        theirs = pycocotools_figures(annotations, outputs, kind)
        figures = [ours.ap, ours.ap50, ours.ap75, ours.ap_small, ours.ap_medium, ours.ap_large, ours.recall]
        assert figures == pytest.approx([*theirs[:6], theirs[8]], abs=1e-6)
        assert min(figures) > 0, "there are objects of all sizes"
        assert 0.05 < ours.ap < 0.95
        present = [value for value in ours.by_category.values() if not math.isnan(value)]
        assert len(present) == 3
        assert np.mean(present) == pytest.approx(ours.ap, abs=1e-6)
        assert math.isnan(ours.by_category["kind 40"])


def one_image(objects):
    categories = (CocoCategory(7, "cat"), CocoCategory(9, "dog"))
    return CocoAnnotations("one", (CocoImage(1, "1.jpg", *SIZE),), categories, tuple(objects))


def test_worked_out_by_hand():
    """Two cats of 40×40 pixels, medium; found: one exactly, then a wrong place, then five eighths of the other.

    At overlaps up to 0.6 both are found: precision is 1 up to a recall of 0.5 and 2/3 beyond; at higher ones the second
    never is, and precision beyond a recall of 0.5 is 0. Of 101 recalls, 0 to 0.5 are 51.
    """
    annotations = one_image([thing(1, 1, 7, (0, 0, 40, 40)), thing(2, 1, 7, (60, 60, 100, 100))])
    found = output([[0, 0, 40, 40], [100, 0, 140, 40], [60, 60, 85, 100]], [1, 1, 1], [0.9, 0.8, 0.7])
    evaluator = DetectionEvaluator(annotations)
    evaluator.add_detections([1], [found])
    metrics = evaluator.compute()
    low, high = (51 + 50 * 2 / 3) / 101, 51 / 101
    for figures in (metrics.boxes, metrics.masks):
        assert figures.ap50 == pytest.approx(low, abs=1e-9)
        assert figures.ap75 == pytest.approx(high, abs=1e-9)
        assert figures.ap == pytest.approx((3 * low + 7 * high) / 10, abs=1e-9)
        assert figures.ap_medium == pytest.approx(figures.ap, abs=1e-9)
        assert math.isnan(figures.ap_small)
        assert math.isnan(figures.ap_large)
        assert figures.by_category == {"cat": figures.ap, "dog": pytest.approx(math.nan, nan_ok=True)}


def test_perfect_predictions_and_none_at_all():
    annotations = one_image([thing(0, 1, 7, (0, 0, 40, 40)), thing(1, 1, 9, (50, 50, 150, 110))])
    perfect = DetectionEvaluator(annotations)
    perfect.add_detections([1], [output([[0, 0, 40, 40], [50, 50, 150, 110]], [1, 2], [0.9, 0.8])])
    metrics = perfect.compute()
    assert metrics.boxes.ap == metrics.masks.ap == metrics.boxes.recall == pytest.approx(1)
    nothing = DetectionEvaluator(annotations)
    nothing.add_detections([1], [output([], [], [])])
    assert (nothing.compute().boxes.ap, nothing.compute().masks.ap50) == (0, 0)


def test_detections_in_a_crowd_are_not_errors():
    crowd = thing(2, 1, 7, (60, 0, 160, 100), is_crowd=True)
    annotations = one_image([thing(1, 1, 7, (0, 0, 40, 40)), crowd])
    evaluator = DetectionEvaluator(annotations, masks=False)
    evaluator.add_detections([1], [output([[70, 10, 90, 30], [0, 0, 40, 40]], [1, 1], [0.9, 0.8])])
    metrics = evaluator.compute()
    assert metrics.boxes.ap == pytest.approx(1)
    assert metrics.masks is None


def test_areas_of_masks_are_those_of_masks_not_of_boxes():
    """A frame whose box is large and whose mask is medium: found once rightly, once in a place where nothing is."""
    frame = rectangle((0, 0, 110, 110)) - rectangle((2, 2, 108, 108))
    elsewhere = np.roll(frame, 40, axis=1)
    item = replace(thing(1, 1, 7, (0, 0, 110, 110)), segmentation=encode_mask(frame), area=float(frame.sum()))
    found = output([[40, 0, 150, 110], [0, 0, 110, 110]], [1, 1], [0.9, 0.8], masks=[elsewhere, frame])
    evaluator = DetectionEvaluator(one_image([item]))
    evaluator.add_detections([1], [found])
    assert evaluator.compute().masks.ap_small == pytest.approx(0.5)


def test_processes_together_are_as_one_alone():
    annotations, outputs = random_case(5)
    alone = DetectionEvaluator(annotations)
    alone.add_detections(range(1, 31), outputs)
    shares = [DetectionEvaluator(annotations) for _ in range(3)]
    for rank, evaluator in enumerate(shares):
        ids = range(rank + 1, 31, 3)
        evaluator.add_detections(ids, [outputs[image_id - 1] for image_id in ids])
    held = []
    for evaluator in shares:
        evaluator.compute(SimpleNamespace(gather=lambda found: held.append(found) or [found]))
    together = [evaluator.compute(SimpleNamespace(gather=lambda _: held)) for evaluator in shares]
    assert together[0].boxes.ap == together[2].boxes.ap == alone.compute().boxes.ap
    assert together[0].masks.ap50 == alone.compute().masks.ap50
    assert together[0].count == 30
    assert shares[0].compute().boxes.ap != alone.compute().boxes.ap


def test_masks_that_come_one_at_a_time_are_not_kept():
    annotations, outputs = random_case(2, images=6)
    at_once, one_by_one = DetectionEvaluator(annotations), DetectionEvaluator(annotations)
    at_once.add_detections(range(1, 7), outputs)
    earlier = []

    def masks_of(found):
        for mask in found["masks"]:
            assert all(reference() is None for reference in earlier[:-1]), "none is held but the last"
            whole = mask[0] > 0.5
            earlier.append(weakref.ref(whole))
            yield whole

    without_masks = [{key: value for key, value in found.items() if key != "masks"} for found in outputs]
    one_by_one.add_detections(range(1, 7), without_masks, [masks_of(found) for found in outputs])
    assert len(earlier) > 5
    assert one_by_one.compute() == at_once.compute()


def test_images_that_were_not_seen_do_not_count():
    annotations, outputs = random_case(1, images=6)
    some = DetectionEvaluator(annotations, masks=False)
    some.add_detections([1, 2, 3], outputs[:3])
    ids = {1, 2, 3}
    smaller = replace(
        annotations,
        images=annotations.images[:3],
        objects=tuple(item for item in annotations.objects if item.image_id in ids),
    )
    expected = DetectionEvaluator(smaller, masks=False)
    expected.add_detections([1, 2, 3], outputs[:3])
    assert some.compute().boxes.ap == expected.compute().boxes.ap
    assert some.compute().count == 3


def test_errors(monkeypatch):
    annotations = one_image([thing(1, 1, 7, (0, 0, 40, 40))])
    evaluator = DetectionEvaluator(annotations)
    with pytest.raises(ValueError, match="no image to evaluate on"):
        evaluator.compute()
    with pytest.raises(ValueError, match="no image with the id 2"):
        evaluator.add_detections([2], [output([], [], [])])
    with pytest.raises(ValueError, match="labels must be 1 to 2, got 3"):
        evaluator.add_detections([1], [output([[0, 0, 4, 4]], [3], [0.5])])
    small = output([[0, 0, 4, 4]], [1], [0.5]) | {"masks": torch.ones(1, 1, 28, 28)}
    with pytest.raises(ValueError, match=r"size of the original image, \(200, 260\), got \(1, 28, 28\)"):
        evaluator.add_detections([1], [small])
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(ImportError, match=re.escape(install_command("detection"))):
        DetectionEvaluator(annotations)
