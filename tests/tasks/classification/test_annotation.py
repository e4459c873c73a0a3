"""Classes drawn on pictures of every size."""

import numpy as np
import pytest
from PIL import Image

from inline_attention.tasks.classification import Prediction
from inline_attention.tasks.drawing import annotate

PREDICTIONS = [
    Prediction(0, "tabby, tabby cat", 0.813),
    Prediction(7, "a name " * 20, 0.1),
    Prediction(9, "猫\n", 0.01),
]
GREY = 200


def changed(image, annotated):
    """Where the picture was drawn on: height and width of the bounding box."""
    differs = (np.asarray(annotated.crop((0, 0, *image.size))) != np.asarray(image)).any(-1)
    rows, columns = (np.flatnonzero(differs.any(axis)) for axis in (1, 0))
    return (int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1) if differs.any() else (0, 0)


@pytest.mark.parametrize("scale", [1, 4])
def test_the_box_scales_with_the_picture(scale):
    image = Image.new("RGB", (800 * scale, 600 * scale), (GREY,) * 3)
    annotated = annotate(image, PREDICTIONS)
    assert annotated.size == image.size
    height, width = changed(image, annotated)
    assert 0.08 < height / image.height < 0.3
    assert 0.2 < width / image.width < 0.7
    pixels = np.asarray(annotated)
    assert pixels.max() > 250, "white letters"
    assert pixels.min() < 80, "on a dark box"
    assert set(np.asarray(image).flatten()) == {GREY}, "the original is left alone"


@pytest.mark.parametrize("size", [(1, 1), (32, 32), (1, 3000), (3000, 1), (150, 400)])
def test_a_picture_too_small_for_the_box_stays_visible_above_it(size):
    image = Image.new("RGB", size, (GREY,) * 3)
    annotated = annotate(image, PREDICTIONS)
    assert annotated.width >= image.width
    assert annotated.height > image.height + 30
    above = np.asarray(annotated.crop((0, 0, annotated.width, image.height)))
    assert (above == GREY).all(-1).sum() == size[0] * size[1]
