import random

import numpy as np
import pytest
import torch
from timm.data import auto_augment

from data.conftest import noise
from inline_attention.data.transforms import evaluation_transform, training_transform

STATISTICS = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def test_bytes_unless_there_is_erasing():
    assert training_transform((24, 20), **STATISTICS)(noise(0)).dtype == torch.uint8
    assert evaluation_transform((24, 20))(noise(0)).dtype == torch.uint8
    erased = training_transform((24, 20), re_prob=1.0, re_mode="pixel", **STATISTICS)(noise(0))
    assert (erased.dtype, erased.shape) == (torch.float32, (3, 24, 20))


@pytest.mark.parametrize(
    "policy", ["rand-m10-inc1", "rand-m9-mstd0.5-inc1", "original", "originalr", "v0", "augmix-m9"]
)
def test_every_operation_of_every_policy_works(policy):
    """Of RandAugment's, posterising to 0 bits does not, with Pillow 13 and without us."""
    random.seed(0)
    np.random.seed(0)
    transform = training_transform((16, 16), auto_augment=policy, **STATISTICS)
    for _ in range(300):
        assert transform(noise(0)).shape == (3, 16, 16)


def test_posterising_to_nothing_is_black_and_timm_itself_is_left_alone():
    transform = training_transform((16, 16), auto_augment="rand-m10-inc1", **STATISTICS)
    (operation,) = [op for op in transform.transforms[2].ops if "Posterize" in op.name]
    assert operation.aug_fn(noise(0), 0).getextrema() == ((0, 0),) * 3
    assert operation.aug_fn(noise(0), 3) == auto_augment.posterize(noise(0), 3)
    assert auto_augment.NAME_TO_OP["Posterize"] is auto_augment.posterize
