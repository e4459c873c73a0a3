"""1,797 handwritten digits of 8×8 pixels, inside the package: real data that needs no download.

`digits.npz` is the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), from
the UCI Machine Learning Repository (CC BY 4.0), in the copy that scikit-learn (BSD-3-Clause) distributes. Grey values
0 to 16; order and values are those of scikit-learn's `load_digits`.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from inline_attention.data.sources import ArraySource
from inline_attention.data.splits import is_training_split

TRAINING_SAMPLES = 1437  # the first four fifths; the rest is for validation
LARGEST_VALUE = 16


def digits(split: str) -> ArraySource:
    """The digits as RGB pictures of 8×8 pixels, white on black.

    Args:
        split: "train" for the first 1,437, "validation" for the last 360, or another usual name of either.

    Raises:
        DataError: If there is no such split.
    """
    part = slice(None, TRAINING_SAMPLES) if is_training_split(split, "digits") else slice(TRAINING_SAMPLES, None)
    with (
        (files("inline_attention.data") / "digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as content,
    ):
        grey, targets = content["images"], content["targets"]
    scaled = np.round(grey[part] * (255 / LARGEST_VALUE)).astype(np.uint8)
    images = np.repeat(scaled[..., None], 3, axis=-1)
    return ArraySource("digits", [str(digit) for digit in range(10)], images, targets[part])
