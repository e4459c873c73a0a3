"""Figures of segmentation, held against torchmetrics and against figures worked out by hand."""

import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from inline_attention.data.segmentation import IGNORED
from inline_attention.support.text import install_command
from inline_attention.tasks.segmentation.task import SegmentationEvaluator
from tasks.largest_result import LargestResult

NAMES = ("wall", "floor", "sky", "sea")


def test_worked_out_by_hand():
    """Walls: 3 pixels, 2 found. Floor: 2 pixels, 2 found, and taken for it 1 of the wall. Sky: 1 pixel, not found."""
    evaluator = SegmentationEvaluator(NAMES)
    target = torch.tensor([[[0, 0, 0, 1], [1, 2, IGNORED, IGNORED]]])
    evaluator.count(torch.tensor([[[0, 0, 1, 1], [1, 0, 0, 2]]]), target)
    metrics = evaluator.compute()
    assert metrics.iou == {
        "wall": pytest.approx(2 / 4),
        "floor": pytest.approx(2 / 3),
        "sky": 0,
        "sea": pytest.approx(math.nan, nan_ok=True),
    }
    assert metrics.accuracy["wall"] == pytest.approx(2 / 3)
    assert (metrics.accuracy["floor"], metrics.accuracy["sky"]) == (1, 0)
    assert metrics.mean_iou == pytest.approx((2 / 4 + 2 / 3 + 0) / 3)
    assert metrics.mean_accuracy == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert metrics.pixel_accuracy == pytest.approx(4 / 6)
    assert metrics.count == 6


def test_a_class_that_is_only_predicted_counts_as_wrong():
    evaluator = SegmentationEvaluator(NAMES)
    evaluator.count(torch.tensor([[[0, 3]]]), torch.tensor([[[0, 0]]]))
    metrics = evaluator.compute()
    assert metrics.iou["sea"] == 0
    assert math.isnan(metrics.accuracy["sea"])
    assert metrics.mean_iou == pytest.approx(0.25)
    assert metrics.mean_accuracy == pytest.approx(0.5)


def batches(seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(5):
        target = torch.randint(4, (2, 12, 9), generator=generator)
        wrong = torch.rand(target.shape, generator=generator) < 0.3
        predicted = torch.where(wrong, torch.randint(4, target.shape, generator=generator), target)
        ignored = torch.rand(target.shape, generator=generator) < 0.1
        yield predicted, torch.where(ignored, IGNORED, target).to(torch.uint8)


def test_equal_to_torchmetrics():
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

    evaluator = SegmentationEvaluator(NAMES)
    theirs = {
        "iou": MulticlassJaccardIndex(4, average=None, ignore_index=IGNORED),
        "accuracy": MulticlassAccuracy(4, average=None, ignore_index=IGNORED),
        "pixels": MulticlassAccuracy(4, average="micro", ignore_index=IGNORED),
    }
    for predicted, target in batches():
        evaluator.count(predicted, target)
        for metric in theirs.values():
            metric.update(predicted, target.long())
    metrics = evaluator.compute()
    assert list(metrics.iou.values()) == pytest.approx(theirs["iou"].compute().tolist(), abs=1e-6)
    assert list(metrics.accuracy.values()) == pytest.approx(theirs["accuracy"].compute().tolist(), abs=1e-6)
    assert metrics.pixel_accuracy == pytest.approx(theirs["pixels"].compute().item(), abs=1e-6)
    assert metrics.mean_iou == pytest.approx(theirs["iou"].compute().mean().item(), abs=1e-6)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_count_the_same_and_need_no_memory_for_it(deterministic):
    evaluator, usual = SegmentationEvaluator(NAMES), SegmentationEvaluator(NAMES)
    with LargestResult() as largest:
        for predicted, target in batches():
            evaluator.count(predicted, target)
    assert largest.elements == 2 * 12 * 9, "pixels of a batch, not times the pairs of classes"
    torch.use_deterministic_algorithms(False)
    for predicted, target in batches():
        usual.count(predicted, target)
    assert evaluator.compute() == usual.compute()


def test_processes_together_are_as_one_alone():
    alone, one, other = (SegmentationEvaluator(NAMES) for _ in range(3))
    for number, (predicted, target) in enumerate(batches(1)):
        alone.count(predicted, target)
        (one if number % 2 else other).count(predicted, target)
    counted = []
    other.compute(SimpleNamespace(sum=lambda matrix: counted.append(matrix) or matrix))
    together = one.compute(SimpleNamespace(sum=lambda matrix: matrix + counted[0]))
    assert together == alone.compute()
    assert one.compute() != together, "asking does not change what was counted"


def test_errors(monkeypatch):
    evaluator = SegmentationEvaluator(NAMES)
    with pytest.raises(ValueError, match="no labeled pixel"):
        evaluator.compute()
    with pytest.raises(ValueError, match=r"of one shape, got torch.int64 \(1, 4, 4\) and torch.int64 \(1, 8, 8\)"):
        evaluator.count(torch.zeros(1, 4, 4, dtype=torch.long), torch.zeros(1, 8, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="must be whole numbers"):
        evaluator.count(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long))
    monkeypatch.setitem(sys.modules, "torchmetrics.classification", None)
    with pytest.raises(ImportError, match=re.escape(install_command("segmentation"))):
        SegmentationEvaluator(NAMES)
