"""Augmentation of whole batches: each image as timm, Pillow or torchvision would change it alone."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP, rand_augment_transform
from timm.data.random_erasing import RandomErasing as TimmErasing
from torch.nn import functional as F
from torchvision.transforms import functional as TF

from data.conftest import noise
from inline_attention.data.on_device import (
    DULLER,
    RECOLORING,
    ColorJitter,
    PaddedCropAndFlip,
    RandAugment,
    RandomErasing,
    blend,
    training_augmentation,
    unsupported_policy,
)

STRONG = "rand-m9-mstd0.5-inc1"
OPERATIONS = [*rand_augment_transform("rand-inc1").ops, *rand_augment_transform("rand-inc0").ops]
SIZE = (40, 48)
GREY = (0.5, 0.5, 0.5)


def as_tensor(pictures):
    return torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures])


@pytest.fixture(scope="module")
def pictures():
    """Of all colors, of few, of one, and of a narrow range."""
    dull = noise(3).point(lambda value: 100 + value // 8)
    return [*(noise(seed) for seed in range(8)), Image.new("RGB", SIZE[::-1], (7, 200, 90)), dull]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", sorted({operation.name for operation in OPERATIONS}))
@pytest.mark.parametrize("magnitude", [0, 3, 9, 10])
def test_each_operation_of_randaugment_does_what_timm_does(name, magnitude, pictures, monkeypatch):
    step = RandAugment(f"rand-m{magnitude}-n1-p1-inc{int('Increasing' in name)}", mean=GREY)
    monkeypatch.setattr(step, "_names", [name])
    plan = step.draw(len(pictures), generator())
    got = step(as_tensor(pictures), plan)
    assert got.dtype == torch.uint8
    for picture, image in zip(pictures, got, strict=True):
        differences = []
        for negated in (0.0, 1.0):  # timm draws the sign from Python's numbers
            monkeypatch.setattr("timm.data.auto_augment.random.random", lambda negated=negated: negated)
            arguments = LEVEL_TO_ARG[name](magnitude, {}) if LEVEL_TO_ARG[name] else ()
            if name.startswith("Posterize") and arguments[0] < 1:
                expected = Image.new("RGB", picture.size)  # Pillow 13 refuses to
            else:
                options = {"resample": Image.Resampling.BILINEAR, "fillcolor": (128, 128, 128)}
                expected = NAME_TO_OP[name](picture, *arguments, **options)
            difference = (as_tensor([expected])[0].int() - image.int()).abs()
            # Where the edge of a warped image falls on a pixel's centre, either side may have it.
            differences.append((difference > 1).float().mean().item())
        assert min(differences) < 0.002


def test_layers_follow_one_another_and_both_signs_occur(pictures):
    once = RandAugment("rand-m9-n1-p1-inc1", mean=GREY)
    twice = RandAugment("rand-m9-n2-p1-inc1", mean=GREY)
    images = as_tensor(pictures)
    plan = twice.draw(len(images), generator())
    first, second = plan.chunk(2, dim=1)
    assert torch.equal(twice(images, plan), once(once(images, first), second))
    plans = RandAugment("rand-m9-n1-p1-inc1", mean=GREY).draw(2000, generator())
    level, signed = plans[:, 1], plans[:, 2]
    assert torch.equal(signed.abs(), level)
    assert signed.min() < 0 < signed.max()


def test_half_of_the_layers_do_nothing_and_leave_every_byte(pictures):
    step = RandAugment("rand-m9-n1-inc1", mean=GREY)
    plan = step.draw(4000, generator())
    idle = plan[:, 0] == 0
    assert 0.45 < idle.float().mean() < 0.55
    images = as_tensor(pictures)
    assert torch.equal(step(images, plan[idle][: len(images)]), images)


@pytest.mark.parametrize(
    ("description", "lowest", "mean", "highest"),
    [("rand-m9-mstd0", 9, 9, 9), ("rand-m10-mstd101", 0, 5, 10), ("rand-m4-mstd2", 0, 4, 10)],
)
def test_magnitudes(description, lowest, mean, highest):
    magnitudes = RandAugment(description, mean=GREY)._draw_magnitudes(10_000, generator())
    assert lowest <= magnitudes.min() <= lowest + 0.1
    assert highest - 0.1 <= magnitudes.max() <= highest
    assert magnitudes.mean().item() == pytest.approx(mean, abs=0.1)


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ("original", "is not RandAugment"),
        ("augmix-m5-w4-d2", "is not RandAugment"),
        ("rand-m9-x3", "no description that timm can read"),
        ("rand-tweights", "a set of its own"),
        ("rand-t3a", "a set of its own"),
        ("rand-n0", "does nothing"),
    ],
)
def test_policies_that_batches_cannot_take_are_refused_with_a_reason(description, reason):
    assert reason in unsupported_policy(description)
    with pytest.raises(ValueError, match=reason):
        RandAugment(description, mean=GREY)


def test_timm_forgets_a_description_after_reading_it():
    RandAugment("rand-mstd3", mean=GREY)
    assert RandAugment("rand-mstd0.5", mean=GREY)._spread == 0.5
    assert RandAugment("rand-m9", mean=GREY)._spread == 0


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("Brightness", TF.adjust_brightness),
        ("Contrast", TF.adjust_contrast),
        ("Color", TF.adjust_saturation),
        ("Sharpness", TF.adjust_sharpness),
    ],
)
def test_blends_are_torchvision_s(name, function, pictures):
    images = as_tensor(pictures)
    factors = torch.linspace(0, 2, len(images))
    got = blend(images, DULLER[name](images), factors[:, None, None, None])
    for image, factor, result in zip(images, factors.tolist(), got, strict=True):
        difference = function(image, factor).int() - result.int()
        assert difference.abs().max() <= 2  # its grey is not rounded before it is used


@pytest.mark.parametrize(
    ("name", "level", "function"),
    [
        ("Posterize", 0.75, lambda image: TF.posterize(image, 3)),
        ("Solarize", 77 / 256, lambda image: TF.solarize(image, 77)),
        ("Solarize", 0, TF.invert),
        ("Invert", 0, TF.invert),
        ("AutoContrast", 0, TF.autocontrast),
        ("Equalize", 0, TF.equalize),
    ],
)
def test_changes_of_values_are_torchvision_s(name, level, function, pictures):
    images = as_tensor(pictures)
    levels = torch.full((len(images), 1, 1, 1), float(level))
    for image, result in zip(images, RECOLORING[name](images, levels), strict=True):
        assert (function(image).int() - result.int()).abs().max() <= 1


def test_images_of_a_pixel_can_be_changed():
    images = torch.randint(0, 256, (64, 3, 1, 1), dtype=torch.uint8)
    step = RandAugment("rand-m9-n2-p1-inc1", mean=GREY)
    assert step(images, step.draw(64, generator())).shape == images.shape


def test_colour_jitter_draws_order_and_factors_per_image(pictures):
    step = ColorJitter(0.4)
    plan = step.draw(3000, generator())
    assert len({tuple(row) for row in plan[:, :3].int().tolist()}) == 6
    assert 0.6 <= plan[:, 3:].min() < 0.61
    assert 1.39 < plan[:, 3:].max() <= 1.4
    functions = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation]
    images = as_tensor(pictures)
    for image, row, result in zip(images, plan.tolist(), step(images, plan[: len(images)]), strict=False):
        for kind, factor in zip(row[:3], row[3:], strict=True):
            image = functions[int(kind)](image, factor)
        assert (image.int() - result.int()).abs().max() <= 4  # of three roundings


def test_strong_jitter_goes_no_further_than_black():
    assert ColorJitter(2.0).draw(1000, generator())[:, 3:].min() >= 0


def test_crop_and_flip_against_one_by_one():
    images = torch.randint(0, 255, (20, 3, 8, 6), dtype=torch.uint8)
    corners, flips = torch.randint(0, 5, (20, 2)), torch.rand(20, 2) < 0.5
    result = PaddedCropAndFlip(2)(images, torch.cat([corners, flips], dim=1).float())
    for image, (top, left), (mirrored, upside_down), got in zip(images, corners.tolist(), flips, result, strict=True):
        expected = F.pad(image, (2, 2, 2, 2))[:, top : top + 8, left : left + 6]
        expected = expected.flip(-1) if mirrored else expected
        assert torch.equal(got, expected.flip(-2) if upside_down else expected)


def test_flips_happen_as_often_as_asked():
    plan = PaddedCropAndFlip(2, hflip=0.3, vflip=0.1).draw(20_000, generator())
    assert plan[:, :2].unique().tolist() == [0, 1, 2, 3, 4]
    assert plan[:, 2:].mean(0).tolist() == pytest.approx([0.3, 0.1], abs=0.01)


class TestErasing:
    def erased(self, mode="const", count=1, probability=1.0, number=3000, size=(32, 24)):
        step = RandomErasing(probability, size=size, mode=mode, largest_count=count)
        return step(torch.full((number, 3, *size), 9.0), step.draw(number, generator()))

    def test_a_rectangle_is_filled_as_often_as_asked(self):
        holes = self.erased(probability=0.25)[:, 0] == 0
        assert holes.flatten(1).any(1).float().mean().item() == pytest.approx(0.25, abs=0.03)
        for hole in holes[holes.flatten(1).any(1)]:
            assert torch.equal(hole, hole.any(1)[:, None] & hole.any(0))  # a rectangle is the product of its sides

    @pytest.mark.parametrize("count", [1, 3])
    def test_areas_and_places_are_spread_as_timm_s(self, count):
        random.seed(0)
        ours = (self.erased(count=count)[:, 0] == 0).float()
        theirs = TimmErasing(1.0, mode="const", max_count=count, device="cpu")(torch.full((3000, 1, 32, 24), 9.0))
        theirs = (theirs[:, 0] == 0).float()
        torch.testing.assert_close(ours.mean(), theirs.mean(), rtol=0.05, atol=0)
        torch.testing.assert_close(ours.mean((1, 2)).std(), theirs.mean((1, 2)).std(), rtol=0.1, atol=0)
        for side in (1, 2):
            torch.testing.assert_close(ours.mean((0, side)), theirs.mean((0, side)), atol=0.03, rtol=0)

    def test_noise_colour_and_mean(self):
        holes = self.erased("pixel")
        noisy = holes[holes != 9]
        assert noisy.mean().item() == pytest.approx(0, abs=0.01)
        assert noisy.std().item() == pytest.approx(1, abs=0.01)
        coloured = self.erased("rand")[0]
        (row, column), *_ = (coloured[0] != 9).nonzero().tolist()
        colours = coloured[:, row, column]
        assert len(set(colours.tolist())) == 3
        assert all((image[image != 9] == colour).all() for image, colour in zip(coloured, colours, strict=True))

    def test_a_picture_of_a_pixel_survives(self):
        assert self.erased(size=(1, 1), number=10).shape == (10, 3, 1, 1)


def test_noise_depends_on_its_place_alone_and_is_normal():
    step = RandomErasing(1.0, size=(16, 16), mode="pixel", largest_count=1)
    places = torch.arange(200) * 83_000
    values = step.noise_from(places, (3, 16, 16))
    assert torch.equal(step.noise_from(places[7:8], (3, 16, 16))[0], values[7])
    assert values.isfinite().all()
    assert values.mean().item() == pytest.approx(0, abs=0.01)
    assert values.var().item() == pytest.approx(1, abs=0.01)
    assert (values.abs() > 1.96).float().mean().item() == pytest.approx(0.05, abs=0.002)
    correlations = torch.corrcoef(values.flatten(1))
    assert (correlations - torch.eye(200)).abs().max() < 0.25


def test_a_step_more_leaves_the_others_as_they_were():
    options = {"size": SIZE, "mean": GREY, "std": GREY, "crop_padding": 2, "hflip": 0.5}
    plain = training_augmentation(**options).draw(50, 1, 2)
    strong = training_augmentation(**options, auto_augment=STRONG, re_prob=0.25).draw(50, 1, 2)
    assert (len(plain), len(strong)) == (1, 3)
    assert torch.equal(plain[0], strong[0])


def test_as_in_timm_colour_jitter_makes_way_for_a_policy():
    options = {"size": SIZE, "mean": GREY, "std": GREY, "color_jitter": 0.4}
    assert [plan.shape[1] for plan in training_augmentation(**options).draw(5, 0, 0)] == [6]
    assert [plan.shape[1] for plan in training_augmentation(**options, auto_augment=STRONG).draw(5, 0, 0)] == [6]


@pytest.mark.gpu
def test_a_gpu_draws_and_does_the_same(pictures):
    images = as_tensor(pictures).repeat(20, 1, 1, 1)
    augmentation = training_augmentation(
        SIZE, mean=GREY, std=GREY, crop_padding=2, hflip=0.5, vflip=0.1, auto_augment=STRONG, re_prob=0.25, re_count=2
    )
    here = augmentation(images, augmentation.draw(len(images), 1, 2))
    augmentation, device = augmentation.cuda(), torch.device("cuda")
    with torch.cuda.device(device):
        plans = [plan.to(device) for plan in augmentation.draw(len(images), 1, 2)]
        images = images.to(device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            there = augmentation(images, plans)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert ((here - there.cpu()).abs() > 0.02).float().mean() < 0.01
