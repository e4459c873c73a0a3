"""The splits of the digits."""

import pytest

from inline_attention.data.datasets import digits, open_dataset
from inline_attention.data.sources import SPLIT_FOLDERS, DataError


@pytest.mark.parametrize("kind", SPLIT_FOLDERS)
def test_a_split_has_all_the_names_that_folders_know(kind):
    for name in SPLIT_FOLDERS[kind]:
        assert len(digits(name)) == (1437 if kind == "train" else 360)


@pytest.mark.parametrize("split", ["trainn", "Train", "", "all"])
def test_any_other_split_is_refused_and_those_there_are_named(split):
    """`train_split=trainn` would otherwise train on the images held out."""
    with pytest.raises(DataError, match=rf"digits has no split '{split}'; .*train or training .*validation.* or test"):
        open_dataset("digits", split=split)
