"""Detectors: what they take, what they return, and that every weight learns."""

import copy

import pytest
import torch

from inline_attention.tasks.detection.models import DetectionOptions, build_detector
from inline_attention.tasks.detection.task import at_original_size, whole_mask, whole_masks
from inline_attention.tasks.pyramid import STRIDES, edges_extended, masked, pad_images
from tasks.small_backbones import SWIN

HEADS = ["mask_rcnn", "faster_rcnn", "retinanet"]


def detector(head, **options):
    return build_detector(DetectionOptions(head, smallest_anchor=8, width=16, **options), "inline_swin_tiny", SWIN, 4)


def batch():
    images = [torch.randn(3, 64, 96), torch.randn(3, 90, 50)]
    masks = [torch.zeros(1, *image.shape[1:], dtype=torch.uint8) for image in images]
    for mask in masks:
        mask[0, 8:40, 8:40] = 1
    targets = [
        {"boxes": torch.tensor([[8.0, 8, 40, 40]]), "labels": torch.tensor([4]), "masks": mask} for mask in masks
    ]
    targets[1] = {key: value[:0] for key, value in targets[1].items()}  # nothing to be seen
    return images, targets


@pytest.mark.parametrize("head", HEADS)
def test_every_weight_gets_a_gradient_even_from_an_image_without_objects(head):
    model = detector(head, sampled_boxes=16).train()
    losses = model(*batch())
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def finder(head):
    """A detector that finds something with random weights."""
    torch.manual_seed(0)
    model = detector(head).eval()
    if head == "retinanet":
        torch.nn.init.normal_(model.heads.head.classification_head.cls_logits.weight, std=0.3)
        model.heads.score_thresh = 0.0
    return model


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_what_is_found_in_an_image_depends_on_no_other(head):
    """Neither on those of its batch nor on the first that a process sees, here one of a few rows."""
    model = finder(head).double()
    sizes = [(40, 128), (96, 70), (40, 41), (64, 96), (130, 60)]
    images = [torch.randn(3, *size, dtype=torch.float64) for size in sizes]
    alone = [copy.deepcopy(model)([image])[0] for image in images]
    for wanted, found in zip(alone, model(images), strict=True):
        assert len(wanted["boxes"]) > 0
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [(64, 60), (31, 90), (9, 97)])
def test_thin_boxes_at_the_edge_are_pooled_the_same_in_a_batch(size):
    """Of a box thinner than a token torchvision takes a whole one, also where the image has ended."""
    height, width = size
    pool = detector("mask_rcnn").heads.roi_heads.box_roi_pool
    edges = [[10, height - 1, 50, height], [10, height - 3, 50, height], [width - 1, 1, width, height]]
    boxes = torch.tensor([*edges, [width - 0.5, height - 0.5, width, height], [0, 0, width, height]])
    pooled = []
    for others in ([], [(64, 60)], [(70, 101), (200, 300)]):
        images = pad_images([torch.zeros(3, *each) for each in (size, *others)])
        levels = {}
        for name, stride in enumerate(STRIDES):
            rows, columns = (-(-side // stride) for side in images.canvas.shape[-2:])
            ramp = 1 + torch.arange(rows)[:, None] + 0.1 * torch.arange(columns)
            features = masked(ramp.expand(len(images.sizes), 2, rows, columns), images, stride)
            levels[str(name)] = edges_extended(features, images, stride)
        no_others = [torch.zeros(0, 4) for _ in others]
        pooled.append(pool(levels, [boxes, *no_others], images.sizes))
    assert (pooled[0] >= 1).all()  # nothing of what lies beyond
    for found in pooled[1:]:
        torch.testing.assert_close(found, pooled[0])


@pytest.mark.parametrize("head", HEADS)
def test_gradients_reach_unequal_images_at_inference(head):
    """For whoever asks which pixels an object was found by."""
    images = [image.requires_grad_() for image in batch()[0]]
    found = finder(head)(images)
    for image, objects in zip(images, found, strict=True):
        (gradient,) = torch.autograd.grad(objects["scores"].sum(), image, retain_graph=True)
        assert gradient.isfinite().all()
        assert gradient.any()


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_anchors_lie_where_their_tokens_are(head):
    """A canvas of 96 pixels has two tokens of stride 64; half of it is not their distance."""
    model = finder(head)
    seen = []
    generator = (model.heads if head == "retinanet" else model.heads.rpn).anchor_generator
    generator.register_forward_hook(lambda module, inputs, output: seen.append((inputs[1], output[0])))
    with torch.autocast("cpu", torch.bfloat16):
        model([torch.randn(3, 96, 96)])
    ((features, anchors),) = seen
    assert anchors.dtype == torch.float32
    first = 0
    for feature, stride in zip(features, model.level_strides, strict=True):
        rows, columns = feature.shape[-2:]
        count = len(anchors) // sum(level.shape[-2] * level.shape[-1] for level in features) * rows * columns
        centres = (anchors[first : first + count, :2] + anchors[first : first + count, 2:]) / 2
        assert centres.amax(0).tolist() == [(columns - 1) * stride, (rows - 1) * stride]
        first += count


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_coordinates_are_no_coarser_in_half_precision(head):
    """In bfloat16 those beyond 256 pixels are even numbers."""
    model = finder(head)
    image = torch.randn(3, 64, 640)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = model([image])
    right = found["boxes"][:, 2]
    right = right[(right > 300) & (right < 639)]
    assert right.dtype == torch.float32
    assert len(right) > 0
    assert (right != right.bfloat16().float()).float().mean() > 0.9


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_objects_lie_in_their_images_and_are_of_known_classes(head):
    model = finder(head)
    images, _ = batch()
    for image, found in zip(images, model(images), strict=True):
        assert len(found["boxes"]) > 0
        assert (found["boxes"][:, 2:] <= torch.tensor([image.shape[2], image.shape[1]])).all()
        assert set(found["labels"].tolist()) <= {1, 2, 3, 4}
        assert ("masks" in found) == (head == "mask_rcnn")


def test_training_without_targets_says_what_is_missing():
    with pytest.raises(ValueError, match="training needs targets"):
        detector("retinanet").train()([torch.randn(3, 64, 64)])


def test_relative_position_biases_do_not_decay():
    spared = detector("mask_rcnn").no_weight_decay()
    assert spared
    assert all(name.startswith("backbone.body.model.") and name.endswith("bias_table") for name in spared)


def test_boxes_and_masks_come_back_to_the_original():
    found = {"boxes": torch.tensor([[10.0, 20, 30, 60]]), "masks": torch.ones(1, 1, 28, 28)}
    moved = at_original_size(found, (100, 50), (400, 150))
    assert moved["boxes"].tolist() == [[30, 80, 90, 240]]
    (whole,) = whole_masks(moved, (400, 150))
    assert (whole.shape, whole.dtype) == ((400, 150), torch.bool)
    rows, columns = torch.nonzero(whole.any(1)).flatten(), torch.nonzero(whole.any(0)).flatten()
    for found_edge, edge in zip((rows[0], rows[-1], columns[0], columns[-1]), (80, 240, 30, 90), strict=True):
        assert abs(int(found_edge) - edge) <= 4
    part = whole_mask(found["masks"][0], torch.tensor([0.0, 0, 20, 40]), (41, 21))
    assert part.float().mean() > 0.9
