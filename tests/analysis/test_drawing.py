"""Pictures of analyses: written in both formats, the same every time, and saying what was measured."""

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.image import imread

from analysis.small_models import DEIT
from inline_attention.analysis.attention_map import draw_attention_maps, measure_attention_maps
from inline_attention.analysis.confusion import ConfusedImage, ConfusionCount, draw_confusion, draw_worst_images
from inline_attention.analysis.injectivity import CollisionRate, draw_injectivity, key_condition
from inline_attention.analysis.locality import Locality, draw_locality
from inline_attention.analysis.masking import Hiding, MaskingResult, draw_masking
from inline_attention.analysis.probes import MixingRule
from inline_attention.analysis.scaling import ScalingPoint, draw_scaling
from inline_attention.analysis.subjects import untrained_subject, weights_note, with_distinct_labels
from inline_attention.support import figures


@pytest.fixture(scope="module")
def subjects():
    return [untrained_subject(f"{kind}_deit_tiny", device="cpu", **DEIT) for kind in ("inline", "linear", "softmax")]


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr(figures, "DOTS_PER_INCH", 40)


@pytest.fixture
def words(monkeypatch):
    """All words of the figures saved during a test."""
    found = []
    savefig = Figure.savefig

    def keep(figure, path, **options):
        savefig(figure, path, **options)
        if path.suffix == ".png":
            found.extend(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def styles(subjects):
    return figures.numbered_styles({subject.label: subject.kind for subject in subjects})


def assert_written(files, name):
    assert [file.name for file in files] == [f"{name}.png", f"{name}.svg"]
    assert imread(files[0]).std() > 0.02  # not blank
    assert files[1].read_text().startswith("<?xml")


def count_of(image, kind, confused):
    by_tolerance = (0, 0, 0, confused, confused, 2 * confused)
    return ConfusionCount(image, 0, 0, kind, 26, 325, confused, confused, by_tolerance)


def test_injectivity(subjects, words, tmp_path):
    rates = [
        CollisionRate(0, 0, "softmax", "none", False, 8, 0, 0, 0, 0.1, 1e-10),
        CollisionRate(0, 0, "inline", "identity", True, 8, 0, 0, 0, 0.1, 1e-10),
        CollisionRate(0, 0, "linear", "relu", False, 8, 8, 6, 8, 0.0, 1e-10),
    ]
    keys = [key_condition(MixingRule("subtract", "identity", 1.0), torch.randn(9, 4), layer) for layer in range(8)]
    labels = [subject.label for subject in subjects]
    files = draw_injectivity(dict.fromkeys(labels, rates), dict.fromkeys(labels, keys), "Note.", tmp_path)
    assert_written(files, "injectivity")
    assert words.count("none") == 2 * len(subjects)
    assert "one-to-one: 8 of 8 (heads × images); rank [K, 1] ≥ 5 of 5" in words
    assert not any("$" in word for word in words), "formulas are off"
    again = files[1].read_bytes()
    draw_injectivity(dict.fromkeys(labels, rates), dict.fromkeys(labels, keys), "Note.", tmp_path)
    assert files[1].read_bytes() == again


@pytest.mark.parametrize("confused", [0, 40])
def test_confusion(subjects, words, tmp_path, confused):
    counts = {
        subject.label: [count_of(str(i), subject.kind, confused if subject.kind == "linear" else 0) for i in range(3)]
        for subject in subjects
    }
    assert_written(draw_confusion(styles(subjects), counts, 0.01, weights_note(subjects), tmp_path), "confusion")
    assert any("Untrained weights. 3 images" in word.replace("\n", " ") for word in words)
    assert ("mean 12 %" in words) == (confused > 0)
    assert not any("$" in word for word in words), "formulas are off"


def test_worst_images(subjects, tmp_path):
    picture = torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8)
    groups = torch.tensor([[0, 1, 1], [2, 2, 9]])
    image = ConfusedImage("a/very/long/name/of/a/picture-that-does-not-end.png", picture, 7, 1, 0, groups)
    worst = {subject.label: [image] * 2 if subject.kind == "linear" else [] for subject in subjects}
    files = draw_worst_images(worst, 0.01, "Note.", tmp_path)
    assert_written(files, "confusion-worst")
    nothing = {subject.label: [] for subject in subjects}
    assert draw_worst_images(nothing, 0.01, "Note.", tmp_path) == []
    assert not any(file.exists() for file in files)


def test_locality(subjects, tmp_path):
    measured = {
        subject.label: [
            Locality(layer, 0, subject.kind, term, side, 0.1 * side, 0.1 * side, 0.05 * side)
            for layer in range(3)
            for side in (3, 5)
            for term in ("without", "with")
        ]
        for subject in subjects
    }
    assert_written(draw_locality(styles(subjects), measured, "Note.", tmp_path), "locality")


def test_masking(subjects, words, tmp_path):
    results = {
        subject.label: [
            MaskingResult(Hiding(where, side, term), top1, 95.0, 50)
            for where, side, term, top1 in (
                ("nothing", 0, "kept", 95.0), ("neighborhood", 3, "hidden", 3.25), ("random", 3, "hidden", 91.75),
            )
        ]
        for subject in subjects
    }  # fmt: skip
    assert_written(draw_masking(results, "Note.", tmp_path), "masking")
    assert {"3.2", "91.8", "3×3"} <= set(words)


def test_attention_maps_of_a_wide_picture(subjects, tmp_path):
    pixels = torch.randint(0, 256, (3, 20, 60), dtype=torch.uint8)
    maps = [measure_attention_maps(subject, pixels, tokens=[(0, 0), (4, 14)]) for subject in subjects]
    assert_written(draw_attention_maps(maps, "a picture", "Note.", tmp_path), "attention-map")


def test_scaling(tmp_path):
    points = [
        ScalingPoint(f"{kind}_swin_tiny", kind, axis, 224, window, 1, time, 0.1, 1000 * (window or 7), 10**9)
        for axis, window, time in (("resolution", None, 3.0), ("window", 7, 4.0), ("window", 14, None))
        for kind in ("inline", "softmax", "linear")
    ]
    assert_written(draw_scaling(points, "some machine", tmp_path), "scaling")


def test_models_of_one_attention_get_distinct_styles(subjects):
    same = with_distinct_labels([subjects[0], subjects[0], subjects[1]])
    first, second, other = styles(same).values()
    assert first.color == second.color != other.color
    assert first.dashes != second.dashes
