"""Pyramids: an image has the same features alone and in any batch."""

import json

import pytest
import torch

from inline_attention.models import create_model
from inline_attention.models.checkpoints import CheckpointMismatchError, save_weights
from inline_attention.models.reading import open_checkpoint
from inline_attention.tasks.dense import initialize_from
from inline_attention.tasks.detection.models import DetectionOptions, build_detector
from inline_attention.tasks.pyramid import PyramidBackbone, pad_images
from inline_attention.tasks.segmentation.models import SegmentationOptions, build_segmenter
from tasks.small_backbones import BACKBONES, DEIT, PLAIN, PVT, SWIN, VIT

# Wide, tall, of exactly a multiple of 32, and thinner than the coarsest token.
SIZES = [(70, 100), (129, 65), (64, 96), (3, 90)]


def images():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *size, generator=generator) for size in SIZES]


def randomized(model):
    """Initial biases are zero, which would hide much of what leaks."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize(
    ("head", "name"),
    [
        *(("mask_rcnn", name) for name in (*BACKBONES, *PLAIN)),
        ("faster_rcnn", "inline_pvt_tiny"),
        ("retinanet", "inline_swin_tiny"),
        ("retinanet", "softmax_deit_tiny"),
    ],
)
@torch.no_grad()
def test_padding_does_not_reach_the_features_of_a_detector(head, name):
    arguments = (BACKBONES | PLAIN)[name]
    model = randomized(build_detector(DetectionOptions(head, width=16), name, arguments, 3))
    together = pad_images(images())
    stages, levels = model.backbone(together), model.features(together)
    for place, image in enumerate(images()):
        alone = pad_images([image])
        pairs = [*zip(model.backbone(alone), stages, strict=True), *zip(model.features(alone), levels, strict=True)]
        for expected, found in pairs:
            height, width = expected.shape[-2:]
            assert (found[place, :, :height, :width] - expected[0]).abs().max() < 1e-5
            assert not found[place, :, height:].any()
            assert not found[place, :, :, width:].any()
        assert all(expected.any() for expected, _ in pairs)


@pytest.mark.parametrize("name", BACKBONES | PLAIN)
@torch.no_grad()
def test_a_backbone_in_half_precision_leaves_nothing_to_autocast(name):
    arguments = (BACKBONES | PLAIN)[name]
    exact = randomized(PyramidBackbone(name, arguments))
    half = PyramidBackbone(name, arguments).eval()
    half.load_state_dict(exact.state_dict())
    half.to(torch.bfloat16)
    padded = pad_images(images())
    expected, plain = exact(padded), half(padded)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = half(padded)
    for reference, feature, without_autocast in zip(expected, found, plain, strict=True):
        assert feature.dtype == torch.bfloat16
        assert torch.equal(feature, without_autocast)
        assert (feature - reference).norm() < 0.03 * reference.norm()


@pytest.mark.parametrize("name", ["inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny", *PLAIN])
@pytest.mark.parametrize("head", ["semantic_fpn", "upernet"])
@torch.no_grad()
def test_padding_does_not_reach_the_scores_of_a_segmenter(name, head):
    model = randomized(build_segmenter(SegmentationOptions(head, width=16), name, (BACKBONES | PLAIN)[name], 5))
    for image, found in zip(images(), model(images()), strict=True):
        (expected,) = model([image])
        assert expected.shape == (5, *image.shape[1:])
        assert (found - expected).abs().max() < 1e-5
        assert expected.std() > 1e-3


@pytest.mark.parametrize("sizes", [[(70, 101)], [(70, 101), (70, 101)], [(3, 90), (20, 90)]])
def test_images_of_one_size_need_no_masks(sizes):
    padded = pad_images([torch.ones(3, *size) for size in sizes])
    assert all(padded.outside(stride) is None for stride in (4, 8, 16, 32, 64, 128))


def test_the_canvas_is_as_large_as_the_largest_sides_and_a_token_at_least():
    assert pad_images([torch.ones(3, 70, 40), torch.ones(3, 50, 101)]).canvas.shape[-2:] == (70, 101)
    assert pad_images([torch.ones(3, 5, 40)]).canvas.shape[-2:] == (32, 40)


def test_no_images_are_refused_with_advice():
    with pytest.raises(ValueError, match="no images; pass a list of at least one"):
        pad_images([])


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_models_with_neither_a_pyramid_nor_one_stride_are_refused_with_advice(name):
    with pytest.raises(ValueError, match=rf"{name} is no plain vision transformer.*inline models"):
        PyramidBackbone(name)


def test_large_patches_and_unknown_models_are_refused_with_advice():
    with pytest.raises(ValueError, match="at most 32 pixels, got 64"):
        PyramidBackbone("inline_deit_tiny", {**DEIT, "patch_size": 64})
    with pytest.raises(ValueError, match="did you mean inline_pvt_tiny"):
        PyramidBackbone("inline_pvt_tyni")


@pytest.mark.parametrize(
    ("name", "patch", "strides"),
    [
        ("inline_deit_tiny", 16, (4, 8, 16, 32)),
        ("inline_deit_tiny", 14, (3.5, 7, 14, 28)),
        ("inline_deit_tiny", 4, (1, 2, 4, 8)),
        ("vit_tiny_patch16_224", 14, (3.5, 7, 14, 28)),
    ],
)
@torch.no_grad()
def test_a_plain_model_gets_levels_whose_strides_scale_with_its_patches(name, patch, strides):
    backbone = PyramidBackbone(name, {**DEIT, "patch_size": patch}, width=8)
    assert backbone.strides == strides
    levels = backbone(pad_images([torch.randn(3, 70, 101)]))
    assert [tuple(level.shape[1:]) for level in levels] == [(8, -(-70 // s), -(-101 // s)) for s in strides]
    assert f"strides {', '.join(f'{stride:g}' for stride in strides)} " in backbone.note


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("inline_pvt_tiny", PVT),
        ("inline_swin_tiny", SWIN),
        ("inline_deit_tiny", DEIT),
        ("vit_tiny_patch16_224", VIT),
    ],
)
def test_a_backbone_takes_the_weights_of_a_classifier(tmp_path, name, arguments):
    classifier = create_model(name, num_classes=7, **arguments)
    save_weights(classifier, tmp_path / "classifier.safetensors")
    model = build_detector(DetectionOptions("retinanet", width=16), name, arguments, 3)
    initialize_from(model, open_checkpoint(tmp_path / "classifier.safetensors"), "detection")
    own, theirs = model.backbone.model.state_dict(), classifier.state_dict()
    assert own
    assert all(torch.equal(value, theirs[key]) for key, value in own.items())


def test_weights_of_another_model_are_refused(tmp_path):
    save_weights(create_model("inline_swin_tiny", **SWIN), tmp_path / "swin.safetensors")
    model = build_detector(DetectionOptions("retinanet", width=16), "inline_pvt_tiny", PVT, 3)
    with pytest.raises(CheckpointMismatchError):
        initialize_from(model, open_checkpoint(tmp_path / "swin.safetensors"), "detection")


def test_a_detector_takes_a_detector_of_other_classes_and_a_segmenter_its_backbone(tmp_path):
    source = build_detector(DetectionOptions("mask_rcnn", width=16), "inline_swin_tiny", SWIN, 7)
    metadata = {"task": "detection", "class_names": json.dumps([str(number) for number in range(7)])}
    save_weights(source, tmp_path / "detector.safetensors", metadata=metadata)
    file = open_checkpoint(tmp_path / "detector.safetensors")
    target = build_detector(DetectionOptions("mask_rcnn", width=16), "inline_swin_tiny", SWIN, 3)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    taken = initialize_from(target, file, "detection")
    assert taken == f"all of {file.path} but 6 tensors that go with its classes"
    after, theirs = target.state_dict(), source.state_dict()
    kept = {key for key in after if torch.equal(after[key], before[key]) and after[key].shape != theirs[key].shape}
    assert {key.split(".")[-2] for key in kept} == {"cls_score", "bbox_pred", "mask_fcn_logits"}
    assert all(torch.equal(after[key], theirs[key]) for key in after if key not in kept)
    segmenter = build_segmenter(SegmentationOptions("semantic_fpn", width=16), "inline_swin_tiny", SWIN, 5)
    initialize_from(segmenter, file, "segmentation")
    own = segmenter.backbone.model.state_dict()
    assert all(torch.equal(value, theirs[f"backbone.body.model.{key}"]) for key, value in own.items())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (DetectionOptions("mask_rcnn", width=16), DetectionOptions("retinanet", width=16)),
        (DetectionOptions("mask_rcnn", width=16), DetectionOptions("faster_rcnn", width=16)),
        (DetectionOptions("retinanet", width=16), DetectionOptions("retinanet", width=32)),
        (SegmentationOptions("semantic_fpn", width=16), SegmentationOptions("upernet", width=16)),
    ],
    ids=["another head", "a head without masks", "another width", "another head of segmenters"],
)
def test_a_model_with_other_heads_takes_the_backbone(theirs, ours, tmp_path):
    is_detector = isinstance(ours, DetectionOptions)
    build, task = (build_detector, "detection") if is_detector else (build_segmenter, "segmentation")
    source, target = (build(options, "inline_swin_tiny", SWIN, 3) for options in (theirs, ours))
    save_weights(source, tmp_path / "other.safetensors", metadata={"task": task})
    taken = initialize_from(target, open_checkpoint(tmp_path / "other.safetensors"), task)
    assert taken == f"the backbone of {tmp_path / 'other.safetensors'}; all else is random"
    own, expected = target.backbone.model.state_dict(), source.backbone.model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in own.items())
