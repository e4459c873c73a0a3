"""Metadata of detectors and segmenters come from strangers: every bad value is refused in a sentence."""

import json

import pytest
import torch

from inline_attention.models.checkpoints import CheckpointError
from inline_attention.models.reading import Checkpoint
from inline_attention.tasks.detection.models import DetectionOptions
from inline_attention.tasks.detection.task import DetectionTask
from inline_attention.tasks.segmentation.models import SegmentationOptions
from inline_attention.tasks.segmentation.task import SegmentationTask
from inline_attention.tasks.task import DataSection, ModelSection
from tasks.small_backbones import SWIN


def file_of(kind, tmp_path, **changes):
    """A file whose options have been changed; None removes one."""
    model = ModelSection("inline_swin_tiny", SWIN)
    if kind == "detection":
        task = DetectionTask(DataSection("coco"), model, DetectionOptions(width=16))
    else:
        task = SegmentationTask(DataSection("pairs"), model, SegmentationOptions(width=16))
    metadata = task.metadata(["a", "b"])
    options = json.loads(metadata["task_options"]) | changes
    metadata["task_options"] = json.dumps(options)
    return Checkpoint(tmp_path / "model.safetensors", {"x": torch.ones(3)}, "", metadata)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("detection", {"head": "other"}, "head: expected mask_rcnn, faster_rcnn or retinanet"),
        ("detection", {"width": "wide"}, "width: expected a whole number"),
        ("detection", {"width": 10**9}, "width: expected a whole number"),
        ("detection", {"width": 8192}, "far more than the file holds"),
        ("detection", {"sampled_boxes": True}, "sampled_boxes: expected a whole number"),
        ("detection", {"shorter_side": -1}, "shorter_side: expected a whole number"),
        ("detection", {"shorter_side": 65_536}, "shorter_side: expected"),
        ("detection", {"longest_side": 65_536}, "longest_side: expected"),
        ("segmentation", {"crop": 65_536}, "crop: expected"),
        ("detection", {"longest_side": None}, "longest_side: expected a whole number"),
        ("detection", {"multi_scale_from": [1]}, "multi_scale_from: expected"),
        ("detection", {"smallest_anchor": 10**30}, "smallest_anchor: expected"),
        ("detection", {"flip": "yes"}, "flip must be a number from 0 to 1"),
        ("detection", {"flip": float("nan")}, "flip must be a number from 0 to 1"),
        ("detection", {"unknown\x1b[31m": 1}, "another version"),
        ("detection", {"backbone": "hf-hub:someone/model"}, "registered model"),
        ("detection", {"backbone": "resnet18"}, "cannot keep the padding|refused|cannot be built"),
        ("detection", {"backbone_arguments": {"pretrained": True}}, "pretrained"),
        ("segmentation", {"scale": [1]}, "scale: expected"),
        ("segmentation", {"scale": [-1, 2]}, "scale: expected"),
        ("segmentation", {"crop": 0}, "crop: expected"),
        ("segmentation", {"inference": "eval"}, "inference: expected"),
        ("segmentation", {"window_step": 0}, "window_step: expected"),
        ("segmentation", {"reduce_zero_label": "true"}, "reduce_zero_label must be true or false"),
    ],
)
def test_a_bad_option_is_refused_in_a_sentence(tmp_path, kind, changes, message):
    task = DetectionTask if kind == "detection" else SegmentationTask
    with pytest.raises(CheckpointError, match=message) as refused:
        task.load(file_of(kind, tmp_path, **changes))
    assert "\n" not in str(refused.value)
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("text", ["[" * 10_000, "9" * 10_000, "[]", "null", "3"])
def test_options_that_are_no_mapping_are_refused_in_a_sentence(tmp_path, text):
    file = file_of("detection", tmp_path)
    file.metadata["task_options"] = text
    with pytest.raises(CheckpointError) as refused:
        DetectionTask.load(file)
    assert "\n" not in str(refused.value)
