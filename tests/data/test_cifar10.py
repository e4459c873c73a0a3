"""The splits of CIFAR-10. What its files may hold is in `test_datasets`."""

import pytest

from data.conftest import write_pictures
from inline_attention.data.cifar10 import CLASS_NAMES, PIXELS
from inline_attention.data.datasets import open_dataset
from inline_attention.data.sources import SPLIT_FOLDERS, DataError

TRAINING_FILES = [f"data_batch_{number}.bin" for number in range(1, 6)]


@pytest.fixture
def root(tmp_path):
    """One image per file of the binary version."""
    for name in (*TRAINING_FILES, "test_batch.bin"):
        (tmp_path / name).write_bytes(bytes(1 + PIXELS))
    return tmp_path


@pytest.mark.parametrize("kind", SPLIT_FOLDERS)
def test_a_split_has_all_the_names_that_folders_know(root, kind):
    for name in SPLIT_FOLDERS[kind]:
        source = open_dataset("cifar10", root, name)
        assert len(source) == (5 if kind == "train" else 1)
        assert source.location == f"{root} ({'train' if kind == 'train' else 'test'})"


@pytest.mark.parametrize("names", [TRAINING_FILES, ["test_batch.bin"]])
def test_any_other_split_is_refused_and_those_there_are_named(root, names):
    for name in names:
        (root / name).unlink()
    with pytest.raises(DataError, match=r"has no split 'trainn'; .*train or training .*validation.* or test"):
        open_dataset("cifar10", root, "trainn")


def test_a_folder_of_pictures_may_call_its_splits_what_it_likes(tmp_path):
    write_pictures(tmp_path / "mine", classes=CLASS_NAMES, each=1)
    assert len(open_dataset("cifar10", tmp_path, "mine")) == 10
