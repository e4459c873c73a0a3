import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from data.conftest import noise
from inline_attention.data.dense import (
    MULTI_SCALE,
    detection_evaluation_transform,
    detection_training_transform,
    fitted_size,
    segmentation_evaluation_transform,
    segmentation_training_transform,
)
from inline_attention.data.randomness import seed_global_generators


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((480, 640), (800, 1067)),
        ((640, 480), (1067, 800)),
        ((3000, 4000), (800, 1067)),
        ((400, 1000), (533, 1333)),
        ((1, 10000), (1, 1333)),
        ((1, 1), (800, 800)),
    ],
)
def test_shorter_side_800_longer_at_most_1333(size, expected):
    assert fitted_size(size, 800, 1333) == expected
    image, _ = detection_evaluation_transform()(Image.new("RGB", size[::-1]), target_of(size))
    assert image.shape == (3, *expected)


def target_of(size, box=None):
    height, width = size
    left, top, right, bottom = box or (0, 0, width, height)
    masks = torch.zeros(1, height, width, dtype=torch.uint8)
    masks[0, top:bottom, left:right] = 1
    return {
        "boxes": torch.tensor([[left, top, right, bottom]], dtype=torch.float32),
        "labels": torch.tensor([2]),
        "masks": masks,
        "image_id": torch.tensor(5),
        "area": masks.sum((1, 2)).float(),
        "iscrowd": torch.tensor([0]),
    }


def drawn(target):
    """An image that is white where the mask is."""
    return Image.fromarray(target["masks"][0].numpy() * 255).convert("RGB")


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_picture_box_and_mask_stay_together(flip):
    target = target_of((60, 80), box=(10, 20, 30, 50))
    image, moved = detection_training_transform((120,), 400, flip)(drawn(target), target)
    assert (image.shape, image.dtype) == ((3, 120, 160), torch.uint8)
    left = 100 if flip else 20
    assert moved["boxes"].tolist() == [[left, 40, left + 40, 100]]
    assert ((image[0] > 127) == moved["masks"][0].bool()).float().mean() > 0.99
    assert moved["masks"].shape == (1, 120, 160)
    assert moved["masks"][0, 40:100, left : left + 40].all()
    assert moved["masks"].sum() == 60 * 40
    assert all(type(value) is torch.Tensor for value in (image, *moved.values()))
    assert {name: moved[name].tolist() for name in ("labels", "image_id", "area", "iscrowd")} == {
        "labels": [2],
        "image_id": 5,
        "area": [600],
        "iscrowd": [0],
    }


def test_pictures_without_objects():
    target = {name: value[:0] if value.dim() else value for name, value in target_of((60, 80)).items()}
    image, moved = detection_training_transform((30,), 400, 1.0)(noise(0, (80, 60)), target)
    assert image.shape == (3, 30, 40)
    assert moved["boxes"].shape == (0, 4)
    assert moved["masks"].shape == (0, 30, 40)
    del target["masks"]
    assert "masks" not in detection_training_transform((30,), 400)(noise(0, (80, 60)), target)[1]


def test_multi_scale_is_480_to_800_and_depends_on_the_sample_alone():
    transform = pickle.loads(pickle.dumps(detection_training_transform(MULTI_SCALE)))
    image, target = noise(0, (64, 48)), target_of((48, 64))
    seen = {}
    for index in range(40):
        seed_global_generators("sample", 0, 3, index)
        seen[index] = transform(image, target)[0]
    assert {min(seen[index].shape[1:]) for index in seen} <= set(MULTI_SCALE)
    assert len({seen[index].shape for index in seen}) > 5
    seed_global_generators("sample", 0, 3, 7)
    assert torch.equal(transform(image, target)[0], seen[7])


def test_segmentation_crops_are_no_larger_than_asked_and_stay_together():
    transform = pickle.loads(pickle.dumps(segmentation_training_transform(32)))
    values = np.random.default_rng(0).integers(0, 2, (6, 8)).astype(np.uint8)
    labels = np.kron(values, np.ones((16, 16), dtype=np.uint8))
    image = Image.fromarray(labels * 255).convert("RGB")
    agreeing, sizes = [], set()
    for index in range(30):
        seed_global_generators("sample", 0, 0, index)
        pixels, target = transform(image, labels)
        assert (pixels.dtype, target.dtype) == (torch.uint8, torch.int64)
        assert pixels.shape == (3, *target.shape)
        sizes.add(tuple(target.shape))
        agreeing.append(((pixels[0] > 127).long() == target).float().mean().item())
        seed_global_generators("sample", 0, 0, index)
        again = transform(image, labels)
        assert torch.equal(pixels, again[0])
        assert torch.equal(target, again[1])
    assert np.mean(agreeing) > 0.93
    assert (32, 32) in sizes
    assert max(max(size) for size in sizes) == 32
    assert len(sizes) > 1, "some images are made smaller than a crop"


def test_no_class_fills_a_crop_where_it_can_be_avoided():
    labels = np.zeros((64, 256), dtype=np.uint8)
    labels[:, 128:] = 1
    image = Image.new("RGB", (256, 64))

    def shares(largest):
        transform = segmentation_training_transform(64, scale=(1.0, 1.0), largest_class_share=largest, flip=0)
        torch.manual_seed(0)
        return [torch.bincount(transform(image, labels)[1].flatten()).max().item() / 64**2 for _ in range(60)]

    assert np.mean(np.array(shares(0.75)) > 0.75) < 0.25 < 0.6 < np.mean(np.array(shares(1.0)) > 0.75)


def test_photometric_distortion_changes_colours_and_no_labels():
    labels = np.zeros((40, 40), dtype=np.uint8)
    transform = segmentation_training_transform(40, scale=(1.0, 1.0), flip=0, largest_class_share=1.0)
    image = noise(0, (40, 40))
    torch.manual_seed(0)
    results = [transform(image, labels) for _ in range(5)]
    assert all((target == 0).all() for _, target in results)
    assert len({pixels.float().mean().item() for pixels, _ in results}) > 2


def test_photometric_distortion_keeps_red_red():
    """Colors shift but channels stay in place: color is part of the signal."""
    labels = np.zeros((8, 8), dtype=np.uint8)
    transform = segmentation_training_transform(8, scale=(1.0, 1.0), flip=0, largest_class_share=1.0)
    torch.manual_seed(0)
    for _ in range(30):
        pixels, _ = transform(Image.new("RGB", (8, 8), (200, 60, 50)), labels)
        red, green, blue = pixels.float().mean((1, 2))
        assert red > max(green, blue) + 20


def test_evaluation_keeps_the_labels_of_the_original():
    labels = np.zeros((30, 90), dtype=np.uint8)
    image, target = segmentation_evaluation_transform(60)(noise(0, (90, 30)), labels)
    assert (image.shape, image.dtype) == ((3, 60, 180), torch.uint8)
    assert target.shape == (30, 90)
