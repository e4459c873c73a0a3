"""Data that several tests of the engine train on."""

import pytest

from engine import forks
from inline_attention.data.datasets import open_dataset

forks.start_server()


@pytest.fixture
def pictures(tmp_path):
    """64 digits to train on and 25 to evaluate on, as files."""
    for split, folder, count in (("train", "train", 64), ("validation", "val", 25)):
        source = open_dataset("digits", split=split)
        for index in range(count):
            path = tmp_path / "digits" / folder / str(source.targets[index]) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            source.load(index).save(path)
    return tmp_path / "digits"
