"""Predictions over a dataset: counted right, the hardest kept, drawn with what is wrong marked."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from inline_attention.analysis.predictions import Predictions, draw_predictions, predict_dataset
from inline_attention.analysis.subjects import Subject
from inline_attention.data.sources import ArraySource, DataError

CLASSES = ("dark", "grey", "bright")
GREY = {"dark": 30, "grey": 128, "bright": 220}


class NearestGrey(nn.Module):
    """Takes a picture for the class whose grey it is nearest to."""

    def __init__(self):
        super().__init__()
        self.greys = nn.Parameter(torch.tensor([GREY[name] / 255 for name in CLASSES]))

    def forward(self, images):
        return -20 * (images.mean((1, 2, 3))[:, None] - self.greys).abs()


@pytest.fixture
def subject():
    config = {"input_size": (3, 8, 8), "mean": (0, 0, 0), "std": (1, 1, 1), "interpolation": "bicubic", "crop_pct": 1}
    return Subject("greys", "greys", "inline", NearestGrey().eval(), None, CLASSES, (8, 8), config)


def pictures(greys, names, class_names=CLASSES):
    images = np.broadcast_to(np.array(greys, np.uint8)[:, None, None, None], (len(greys), 8, 8, 3))
    return ArraySource("greys", class_names, images, np.array([class_names.index(name) for name in names]))


GREYS = [30, 60, 100, 128, 150, 220, 200, 170, 20]
NAMES = [
    "dark",
    "dark",
    "dark",
    "grey",
    "grey",
    "bright",
    "bright",
    "bright",
    "bright",
]  # the third and last look wrong


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_counts_all_and_keeps_the_hardest_for_any_batch_size(subject, batch_size):
    found = predict_dataset(subject, pictures(GREYS, NAMES), keep=3, batch_size=batch_size)
    assert (found.images, found.right, found.broken) == (9, 6, 0)
    assert [picture.name for picture in found.hardest] == ["greys[8]", "greys[2]", "greys[7]"]
    worst = found.hardest[0]
    assert (worst.truth, worst.guess, worst.is_right) == ("bright", "dark", False)
    assert worst.probability > 0.9 > 0.01 > worst.truth_probability
    assert worst.pixels.shape == (3, 8, 8)
    assert worst.pixels.unique().tolist() == [20]


def test_fewer_pictures_than_asked_for_are_all_kept(subject):
    assert len(predict_dataset(subject, pictures(GREYS, NAMES), keep=100).hardest) == 9


def test_classes_go_by_name_not_by_number(subject):
    reordered = pictures(GREYS, NAMES, class_names=("bright", "dark", "grey"))
    assert predict_dataset(subject, reordered, keep=1).right == 6


def test_unknown_classes_are_refused(subject):
    with pytest.raises(DataError, match="'pink'"):
        predict_dataset(subject, pictures([1], ["pink"], class_names=("pink",)), keep=1)


def test_nan_is_named_and_not_sorted(subject):
    nn.init.constant_(subject.model.greys, torch.nan)
    with pytest.raises(ValueError, match="NaN in the weights"):
        predict_dataset(subject, pictures(GREYS, NAMES), keep=1)


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws predictions and returns the figure, laid out."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def draw(predictions: Predictions):
        saved = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.append(figure))
        draw_predictions(predictions, "greys", "grey pictures", tmp_path)
        FigureCanvasAgg(saved[0]).draw()
        return saved[0]

    return draw


def test_the_page_marks_what_is_wrong(subject, drawn):
    figure = drawn(predict_dataset(subject, pictures(GREYS, NAMES), keep=100))
    cells = [axes for axes in figure.axes if axes.images]
    assert len(cells) == 9
    framed = [axes for axes in cells if axes.spines["left"].get_visible()]
    assert framed == cells[:3]
    guess, probability, truth = cells[0].get_title(loc="left").splitlines()
    assert (guess, truth) == ("dark", "is bright")
    assert probability.endswith(" %")
    assert "66.7 % right" in figure.get_suptitle()
    assert "3 of the 3 wrong ones are here" in " ".join(figure.get_supxlabel().split())


def test_unreadable_pictures_are_mentioned(subject, drawn):
    found = predict_dataset(subject, pictures(GREYS, NAMES), keep=1)
    figure = drawn(Predictions(found.images, found.right, 7, found.hardest))
    assert "7 pictures could not be read" in " ".join(figure.get_supxlabel().split())


def test_long_names_stay_in_their_cells(drawn, subject):
    long = ("a class of cattle egrets", "another class of things", "a third, long as well")
    named = Subject(**{**vars(subject), "class_names": long})
    figure = drawn(predict_dataset(named, pictures(GREYS[:8], [long[0]] * 8, class_names=long), keep=8))
    boxes = [axes._left_title.get_window_extent() for axes in figure.axes if axes.images]
    assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))
    assert boxes[-1].x1 <= figure.bbox.x1
