"""Detectors and segmenters are shared by threads: `forward` writes to no module."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from inline_attention.tasks.detection.models import DetectionOptions, build_detector
from inline_attention.tasks.segmentation.models import SegmentationOptions, build_segmenter
from layers.test_threads import state_of
from tasks.small_backbones import SWIN

SIZES = ((64, 96), (96, 64), (50, 40))


def build(head):
    torch.manual_seed(0)
    if head in ("mask_rcnn", "faster_rcnn", "retinanet"):
        return build_detector(DetectionOptions(head=head, width=16), "inline_swin_tiny", SWIN, 3)
    return build_segmenter(SegmentationOptions(head=head, width=16), "inline_swin_tiny", SWIN, 3)


def flat(outputs):
    return [tensor for output in outputs for tensor in (output.values() if isinstance(output, dict) else [output])]


@pytest.mark.parametrize("head", ["mask_rcnn", "faster_rcnn", "retinanet", "semantic_fpn", "upernet"])
@torch.no_grad()
def test_forward_sets_no_attribute_and_threads_get_the_same_results(head, monkeypatch):
    model = build(head).eval()
    images = [torch.randn(3, *size) for size in SIZES]
    before, written = state_of(model), []
    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "__setattr__", lambda *arguments: written.append(arguments[1]))
        expected = [flat(model([image])) for image in images]
    assert written == []
    assert state_of(model) == before

    def work(index):
        with torch.no_grad():
            return index, flat(model([images[index]]))

    with ThreadPoolExecutor(4) as pool:
        for index, found in pool.map(work, [0, 1, 2] * 3):
            for ours, theirs in zip(found, expected[index], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
