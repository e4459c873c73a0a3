import numpy as np

from data.conftest import noise, write_pictures
from inline_attention.data.datasets import check_labels, check_readable, open_and_check
from inline_attention.data.sources import ArraySource


def write_splits(root, train=("cat", "dog"), validation=("cat", "dog")):
    write_pictures(root / "train", classes=train, each=3)
    write_pictures(root / "val", classes=validation, each=2)


def test_good_data_has_no_problems(tmp_path):
    write_splits(tmp_path)
    data = open_and_check("folder", tmp_path, num_classes=2)
    assert data.problems == []
    assert (len(data.train), len(data.validation)) == (6, 4)
    assert open_and_check("digits", None, num_classes=10).problems == []


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    write_splits(tmp_path, train=("cat", "dog", "fox"), validation=("cat", "eel"))
    (tmp_path / "train" / "gnu").mkdir()
    for file in (tmp_path / "train").rglob("*.jpg"):
        file.write_bytes(b"")
    problems = "\n".join(open_and_check("folder", tmp_path, num_classes=5).problems)
    assert "train: 1 empty class ('gnu'); add images or remove the folder" in problems
    assert "has 3 classes, the model 5; leave --num-classes out" in problems
    assert "2 classes ('dog', 'fox') of" in problems
    assert "1 class ('eel') of" in problems
    assert "none of 9 images tried can be read" in problems
    assert "is empty; expected JPEG" in problems
    assert len(problems.splitlines()) == 5


def test_missing_folders(tmp_path):
    (problem,) = open_and_check("folder", tmp_path / "absent").problems
    assert "does not exist" in problem
    write_pictures(tmp_path / "train")
    data = open_and_check("folder", tmp_path)
    assert (len(data.train), data.validation) == (16, None)
    assert "none for the split 'validation'" in data.problems[0]


def test_the_same_pictures_twice(tmp_path):
    write_pictures(tmp_path / "x")
    (problem,) = open_and_check("folder", tmp_path / "x").problems
    assert "training and validation data are the same" in problem


def test_classes_out_of_range():
    images = np.zeros((3, 4, 4, 3), dtype=np.uint8)
    source = ArraySource("here", ["a", "b"], images, np.array([0, 2, -1]))
    (problem,) = check_labels(source, 2)
    assert problem == ("here: 2 samples have a class out of 0 to 1, such as here[1] with 2; correct or remove them")
    assert check_readable(source) == []
    assert check_readable(ArraySource("nowhere", ["a"], images[:0], np.array([], int))) == [
        "nowhere is empty; add images"
    ]


def test_a_few_broken_ones_are_no_problem(tmp_path):
    write_splits(tmp_path)
    (tmp_path / "val" / "cat" / "0.jpg").write_bytes(b"")
    noise(0).save(tmp_path / "val" / "cat" / "another.png")
    assert open_and_check("folder", tmp_path).problems == []
