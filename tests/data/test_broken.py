import csv

import pytest

from inline_attention.data.broken import BrokenImage, BrokenImageLimit, BrokenImages, BrokenImagesError, write_report


@pytest.mark.parametrize(
    ("limit", "total", "allowed"),
    [
        (BrokenImageLimit(), 1_281_167, 1000),
        (BrokenImageLimit(), 16, 8),
        (BrokenImageLimit(share=1), 5, 4),
        (BrokenImageLimit(), 1, 0),
        (BrokenImageLimit(), 0, 0),
        (BrokenImageLimit(count=0), 100, 0),
        (BrokenImageLimit(share=0.01), 1000, 10),
    ],
)
def test_allowed(limit, total, allowed):
    assert limit.allowed(total) == allowed


@pytest.mark.parametrize("wrong", [{"count": -1}, {"share": 1.5}, {"share": -0.1}])
def test_wrong_limits(wrong):
    with pytest.raises(ValueError, match="a share from 0 to 1, got count="):
        BrokenImageLimit(**wrong)


def test_each_counts_once_and_new_ones_are_returned():
    images = BrokenImages(10, BrokenImageLimit(count=2))
    first, second = BrokenImage("a.jpg", "is empty"), BrokenImage("b.jpg", "is damaged")
    assert images.add([first]) == [first]
    assert images.add([first, second]) == [second]
    assert (len(images), list(images)) == (2, [first, second])


def test_too_many_name_the_first_and_the_count():
    images = BrokenImages(1000, BrokenImageLimit(count=6))
    with pytest.raises(BrokenImagesError, match=r"at least 8 of 1,000 .* at most 6 .*\n  0\.jpg: is empty\n") as caught:
        images.add(BrokenImage(f"{number}.jpg", "is empty") for number in range(8))
    assert "and 3 more" in str(caught.value)
    assert "raise limits.broken_image_share and limits.broken_image_count with --set:" in str(caught.value)
    assert len(caught.value.broken) == len(images) == 8


def test_report(tmp_path):
    images = [BrokenImage("a,b\udcff.jpg", 'is "odd"'), BrokenImage("c.jpg", "is empty")]
    assert write_report(tmp_path, images) == tmp_path / "broken_images.csv"
    with (tmp_path / "broken_images.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["path", "reason"], [r"a,b\udcff.jpg", 'is "odd"'], ["c.jpg", "is empty"]]
    assert [path.name for path in tmp_path.iterdir()] == ["broken_images.csv"]
