"""Surveys see every image, layer and head once, and report all of their work."""

import pytest

from analysis.small_models import DEIT
from inline_attention.analysis.confusion import by_image, survey_confusion
from inline_attention.analysis.injectivity import survey_injectivity
from inline_attention.analysis.locality import survey_locality
from inline_attention.analysis.masking import survey_masking
from inline_attention.analysis.subjects import PictureSample, untrained_subject
from inline_attention.data.datasets import digits


@pytest.fixture(scope="module")
def subject():
    return untrained_subject("linear_deit_tiny", device="cpu", **(DEIT | {"depth": 4, "num_classes": 10}))


@pytest.fixture
def sample():
    return PictureSample(digits("validation"), images=5, batch_size=2)


@pytest.fixture
def progress():
    shares = []
    yield shares.append
    assert sum(shares) == pytest.approx(1)


def test_injectivity_searches_three_layers_and_checks_all(subject, progress):
    sample = PictureSample(digits("validation"), images=2, batch_size=2)
    rates, conditions = survey_injectivity(subject, sample, queries=1, heads=[1], on_progress=progress)
    assert sorted({rate.layer for rate in rates}) == [0, 2, 3]
    assert [condition.layer for condition in conditions] == [0, 1, 2, 3] * 2
    assert {item.head for item in (*rates, *conditions)} == {1}


def test_confusion_counts_each_head_of_each_image(subject, sample, progress):
    counts, worst = survey_confusion(subject, sample, layers=[0, 3], tolerance=1.0, worst=2, on_progress=progress)
    keys = [(count.image, count.layer, count.head) for count in counts]
    assert len(keys) == len(set(keys)) == 5 * 2 * 2
    totals = [image.confused_pairs for image in by_image(counts)]
    assert [image.pairs for image in worst] == sorted(totals, reverse=True)[:2]
    for image in worst:
        most = max((c for c in counts if c.image == image.name), key=lambda count: count.confused_pairs)
        assert (image.layer, image.head) == (most.layer, most.head)
        assert image.pixels.shape == (3, 20, 20)


def test_locality_is_averaged_over_images(subject, sample, progress):
    measured = survey_locality(subject, sample, layers=[1], sides=[3], on_progress=progress)
    assert [(item.layer, item.head) for item in measured] == [(1, 0), (1, 1)]
    alone = [
        survey_locality(subject, PictureSample(digits("validation"), images=5, batch_size=size), layers=[1], sides=[3])
        for size in (1, 5)
    ]
    for other in alone:
        assert [item.share for item in other] == pytest.approx([item.share for item in measured])


def test_masking_reads_the_sample_once_per_hiding(subject, sample, progress):
    results = survey_masking(subject, sample, sides=[3], on_progress=progress)
    assert [result.hiding.where for result in results] == ["nothing", "neighborhood", "random"]
    assert {result.images for result in results} == {5}
