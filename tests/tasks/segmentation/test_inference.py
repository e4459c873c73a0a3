"""Whole images, sliding windows, labels at the original's size."""

import pytest
import torch
import torch.nn.functional as F

from inline_attention.data.segmentation import IGNORED
from inline_attention.tasks.segmentation.models import (
    SegmentationOptions,
    SlidingWindows,
    build_segmenter,
    labels_at,
    scores_of,
)
from tasks.small_backbones import SWIN


@pytest.mark.parametrize("size", [(10, 10), (64, 64), (100, 37), (33, 200)])
def test_windows_cover_every_pixel_and_average(size):
    calls = []

    def brightness(images):
        calls.append(len(images))
        return [torch.stack([image.mean(0), -image.mean(0)]) for image in images]

    image = torch.randn(3, *size)
    windows = SlidingWindows(32, 20, batch_size=3)
    (scores,) = scores_of(brightness, [image], windows)
    assert (scores[0] - image.mean(0)).abs().max() < 1e-5
    assert max(calls) <= 3
    expected = len(windows.starts(size[0])) * len(windows.starts(size[1]))
    assert sum(calls) == expected


def test_steps_that_leave_gaps_are_refused():
    with pytest.raises(ValueError, match="from 1 to their side 32, got 40"):
        SlidingWindows(32, 40)


@pytest.mark.parametrize("classes", [1, 7, 8, 19])
def test_labels_are_the_best_of_the_enlarged_scores(classes):
    scores = torch.randn(classes, 9, 13)
    expected = F.interpolate(scores[None], size=(50, 31), mode="bilinear", align_corners=False)[0].argmax(0)
    assert torch.equal(labels_at(scores, (50, 31)), expected)


@pytest.mark.parametrize("head", ["semantic_fpn", "upernet"])
def test_every_weight_gets_a_gradient_and_unlabelled_images_no_nan(head):
    model = build_segmenter(SegmentationOptions(head, width=16), "inline_swin_tiny", SWIN, 5).train()
    images = [torch.randn(3, 64, 64), torch.randn(3, 40, 64)]
    losses = model(images, [torch.randint(0, 5, image.shape[1:]) for image in images])
    sum(losses.values()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    nothing = model(images, [torch.full(image.shape[1:], IGNORED) for image in images])
    assert all(loss.item() == 0 for loss in nothing.values())
