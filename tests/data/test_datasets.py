"""Datasets by the names that users of timm write."""

import os
import pickle
import re
import sys
import tarfile
import tempfile
import types

import numpy as np
import pytest
from PIL import Image

from data.conftest import add_to_tar, jpeg, noise, write_pictures
from inline_attention.data.broken import BrokenImages
from inline_attention.data.cifar10 import CLASS_NAMES
from inline_attention.data.datasets import open_and_check, open_dataset
from inline_attention.data.images import ImageError
from inline_attention.data.loading import ImageLoader
from inline_attention.data.sampling import EvaluationBatches
from inline_attention.data.sources import DataError
from inline_attention.data.transforms import evaluation_transform
from inline_attention.support.text import install_command


def test_digits_need_no_files():
    train, validation = open_dataset("digits"), open_dataset("digits", split="validation")
    assert (len(train), len(validation)) == (1437, 360)
    assert train.class_names == tuple("0123456789")
    assert np.bincount(train.targets).min() > 130
    assert np.bincount(validation.targets).min() > 30
    picture = train.load(0)  # a zero: white strokes around a black hole
    assert (picture.mode, picture.size, train.targets[0]) == ("RGB", (8, 8), 0)
    assert np.asarray(picture)[..., 0].tolist()[0] == [0, 0, 80, 207, 143, 16, 0, 0]
    assert train.images.max() == 255


def test_digits_refuse_a_folder_that_they_would_not_look_at(tmp_path):
    with pytest.raises(DataError, match=r"needs no folder, got .*; leave --data-dir out"):
        open_dataset("digits", tmp_path)
    assert len(open_and_check("digits", tmp_path).problems) == 1


@pytest.mark.parametrize("names", [("train", "val"), ("training", "validation"), ("train", "test"), ("train", "eval")])
def test_folders_of_splits(tmp_path, names):
    for name, each in zip(names, (3, 2), strict=True):
        write_pictures(tmp_path / name, each=each)
    train, validation = open_dataset("folder", tmp_path), open_dataset("", str(tmp_path), "validation")
    assert (len(train), len(validation)) == (6, 4)
    assert train.class_names == validation.class_names == ("cat", "dog")
    assert train.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert validation.name(3) == str(tmp_path / names[1] / "dog" / "1.jpg")
    assert validation.load(3).size == (48, 40)


def test_a_folder_that_is_not_split_and_one_that_lacks_a_split(tmp_path):
    write_pictures(tmp_path / "single")
    assert len(open_dataset("folder", tmp_path / "single", "validation")) == 16
    write_pictures(tmp_path / "half" / "train")
    with pytest.raises(DataError, match=r"a folder 'train', but none for the split 'validation'; expected one of val,"):
        open_dataset("folder", tmp_path / "half", "validation")


def test_a_folder_takes_all_formats_and_no_hidden_files(tmp_path):
    root = write_pictures(tmp_path / "x", classes=("a", "nested/b"), each=1)
    noise(0).save(root / "a" / "x.webp")
    noise(0).save(root / "a" / "y.BMP")
    (root / "a" / "notes.txt").touch()
    (root / "a" / "._0.jpg").touch()
    (root / ".cache").mkdir()
    noise(0).save(root / ".cache" / "z.png")
    (root / "nobody").mkdir()
    source = open_dataset("folder", root)
    assert [source.name(i).removeprefix(f"{root}/") for i in range(4)] == [
        "a/0.jpg",
        "a/x.webp",
        "a/y.BMP",
        "nested/b/0.jpg",
    ]
    assert source.class_names == ("a", "b")
    assert source.empty_classes == ("nobody",)


@pytest.mark.parametrize(
    ("link", "target"),
    [("x/cat/all", ".."), ("x/cat/self", "."), ("elsewhere/fox/back", "../../x")],
    ids=["to the parent", "to itself", "through another link"],
)
def test_links_are_followed_but_not_in_circles(tmp_path, link, target):
    root = write_pictures(tmp_path / "x", each=1)
    write_pictures(tmp_path / "elsewhere", classes=("fox",), each=2)
    (root / "fox").symlink_to(tmp_path / "elsewhere" / "fox", target_is_directory=True)
    (root / "hound").symlink_to("dog", target_is_directory=True)  # one folder by two names
    (root / "gone").symlink_to("nowhere", target_is_directory=True)
    (tmp_path / link).symlink_to(target, target_is_directory=True)
    source = open_dataset("folder", root)
    assert [source.name(i).removeprefix(f"{root}/") for i in range(len(source))] == [
        "cat/0.jpg",
        "dog/0.jpg",
        "fox/0.jpg",
        "fox/1.jpg",
        "hound/0.jpg",
    ]
    assert source.empty_classes == ()


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match=r"absent does not exist; give one that holds a folder of images per class"):
        open_dataset("folder", tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file is not a folder"):
        open_dataset("folder", tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no image; expected ROOT/CLASS/NAME"):
        open_dataset("folder", tmp_path / "empty")
    noise(0).save(tmp_path / "empty" / "stray.png")
    with pytest.raises(DataError, match=r"1 images outside of class folders, such as stray\.png; move them"):
        open_dataset("folder", tmp_path / "empty")
    with pytest.raises(DataError, match="needs a folder; give one with --data-dir"):
        open_dataset("folder")
    with pytest.raises(
        DataError, match="unknown dataset 'imagenet'; expected folder, pictures, digits, cifar10, hfds/NAME or wds"
    ):
        open_dataset("imagenet", tmp_path)


def test_classes_can_be_numbered_as_the_model_has_them(tmp_path):
    source = open_dataset("folder", write_pictures(tmp_path / "x", each=1))
    renumbered = source.with_classes(["dog", "fox", "cat"])
    assert (renumbered.targets.tolist(), renumbered.class_names) == ([2, 0], ("dog", "fox", "cat"))
    assert source.targets.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"1 classes that are not among the 2 known ones, such as 'dog'"):
        source.with_classes(["cat", "fox"])


CIFAR_PIXELS = np.random.default_rng(0).integers(0, 255, (6, 3, 4, 3072), dtype=np.uint8)[:, 0]  # [file, N, 3072]
CIFAR_LABELS = [[(file + sample) % 10 for sample in range(4)] for file in range(6)]
CIFAR_FILES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def cifar_contents():
    contents = {}
    for name, pixels, labels in zip(CIFAR_FILES, CIFAR_PIXELS, CIFAR_LABELS, strict=True):
        records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1)
        contents[f"cifar-10-batches-bin/{name}.bin"] = records.tobytes()
    return contents


def unpack(root, contents):
    for name, content in contents.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)


@pytest.mark.parametrize("packed", ["archive", "folder", "the folder itself"])
def test_cifar10(tmp_path, packed):
    contents, root = cifar_contents(), tmp_path
    if packed == "archive":
        with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
            for file, content in contents.items():
                add_to_tar(archive, file, content)
    else:
        unpack(tmp_path, contents)
        root = tmp_path / "cifar-10-batches-bin" if packed == "the folder itself" else tmp_path
    assert open_and_check("cifar10", root).problems == []
    train, test = open_dataset("cifar10", root), open_dataset("cifar10", root, "validation")
    assert (len(train), len(test)) == (20, 4)
    assert train.class_names == CLASS_NAMES
    assert train.targets.tolist() == [label for labels in CIFAR_LABELS[:5] for label in labels]
    expected = CIFAR_PIXELS[5, 2].reshape(3, 32, 32).transpose(1, 2, 0)
    np.testing.assert_array_equal(np.asarray(test.load(2)), expected)


def test_cifar10_as_a_folder_of_pictures(tmp_path):
    write_pictures(tmp_path / "train", classes=CLASS_NAMES, each=1)
    assert open_dataset("cifar10", tmp_path).class_names == CLASS_NAMES
    with pytest.raises(DataError, match=r"or put cifar-10-binary\.tar\.gz \(from https://www\.cs\.toronto\.edu"):
        open_dataset("cifar10", tmp_path / "absent")


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    "name",
    ["cifar-10-python.tar.gz", "cifar-10-batches-py/data_batch_1", "cifar-10-batches-py/test_batch", "test_batch"],
)
def test_cifar10_in_pickles_is_refused_with_the_version_to_download(tmp_path, monkeypatch, name, split):
    monkeypatch.setattr(pickle, "Unpickler", None)
    unpack(tmp_path, {name: b"a pickle"})
    message = rf"{name} is CIFAR-10's Python version; download the binary version, cifar-10-binary\.tar\.gz \(from"
    with pytest.raises(DataError, match=message):
        open_dataset("cifar10", tmp_path, split)
    unpack(tmp_path, cifar_contents())
    assert len(open_dataset("cifar10", tmp_path, split)) in (4, 20)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(3073) + bytes([10]) + bytes(3072), "expected 2 classes from 0 to 9"),
        (b"", "expected records of 3073 bytes, got 0"),
        (bytes(3072), "expected records of 3073 bytes, got 3072"),
    ],
    ids=["class 10", "empty", "truncated"],
)
def test_cifar10_files_of_strangers(tmp_path, content, message):
    unpack(tmp_path, {"cifar-10-batches-bin/test_batch.bin": content})
    with pytest.raises(DataError, match=message):
        open_dataset("cifar10", tmp_path, "validation")


def test_cifar10_incomplete(tmp_path):
    contents = cifar_contents()
    del contents["cifar-10-batches-bin/data_batch_3.bin"]
    unpack(tmp_path, contents)
    with pytest.raises(DataError, match=r"lacks data_batch_3\.bin; unpack cifar-10-binary\.tar\.gz again"):
        open_dataset("cifar10", tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"1234")
    with pytest.raises(DataError, match="expected records of 3073 bytes, got 4"):
        open_dataset("cifar10", tmp_path, "validation")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cifar-10-binary.tar.gz").write_bytes(b"half a download")
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is damaged: .*; fetch it again"):
        open_dataset("cifar10", tmp_path / "other")


def write_shards(root, name, targets, folder=""):
    for number, target in enumerate(targets):
        with tarfile.open(root / f"{name}-{number:03d}.tar", "w") as archive:
            for sample in range(2):
                add_to_tar(archive, f"{folder}{sample}.cls", str(target).encode())
                add_to_tar(archive, f"{folder}{sample}.jpg", jpeg(10 * number + sample))
                add_to_tar(archive, f"{folder}{sample}.json", b"{}")


def test_shards_of_webdataset(tmp_path):
    write_shards(tmp_path, "train", [0, 2, 1])
    write_shards(tmp_path, "validation", [1])
    train = open_dataset("wds/{split}-{000..002}.tar", tmp_path)
    assert (len(train), train.class_names, train.targets.tolist()) == (6, ("0", "1", "2"), [0, 0, 2, 2, 1, 1])
    assert train.name(3) == f"{tmp_path}/train-001.tar/1.jpg"
    assert np.abs(np.asarray(train.load(3)).astype(int) - np.asarray(noise(11))).mean() < 20
    assert len(open_dataset("wds/{split}-*.tar", tmp_path, "validation")) == 2
    assert len(open_dataset("wds/mine", tmp_path, "train-{001..002}.tar")) == 4
    with pytest.raises(DataError, match=r"train-003\.tar does not exist; expected tar archives"):
        open_dataset("wds/train-{000..003}.tar", tmp_path)
    with pytest.raises(DataError, match="no file fits"):
        open_dataset("wds/test-*.tar", tmp_path)


def test_shards_in_a_folder_whose_name_looks_like_a_pattern(tmp_path):
    folder = tmp_path / "set [v1]*"
    folder.mkdir()
    write_shards(folder, "train", [0, 1])
    assert len(open_dataset("wds/train-*.tar", folder)) == len(open_dataset("wds/train-{000..001}.tar", folder)) == 4


def test_pictures_of_shards_need_no_temporary_files(tmp_path, monkeypatch):
    write_shards(tmp_path, "train", [0])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert open_dataset("wds/train-*.tar", tmp_path).load(0).size == (48, 40)


def test_shards_cannot_write_outside_and_name_what_is_broken(tmp_path):
    (tmp_path / "in").mkdir()
    write_shards(tmp_path / "in", "train", [0], folder="../../")
    with tarfile.open(tmp_path / "in" / "train-000.tar", "a") as archive:
        add_to_tar(archive, "x.cls", b"0")
        add_to_tar(archive, "x.jpg", jpeg(0)[:300])
        link = tarfile.TarInfo("y.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    source = open_dataset("wds/train-*.tar", tmp_path / "in")
    assert len(source) == 3
    assert source.load(0).size == (48, 40)
    with pytest.raises(ImageError, match=r"in/train-000\.tar/x\.jpg: is damaged"):
        source.load(2)
    broken = BrokenImages(3)
    batches = EvaluationBatches(3, 2)
    loader = ImageLoader(source, evaluation_transform((8, 8)), batches, broken=broken, replace_broken=False, workers=1)
    assert [len(batch) for batch in loader.epoch()] == [2]
    loader.close()
    assert [image.name for image in broken] == [source.name(2)]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"0.jpg": b"x"}, r"1 images without a class, such as 0\.jpg; expected a number ≥ 0 in a \.cls"),
        ({"0.jpg": b"x", "0.cls": b"-1"}, "images without a class"),
        ({"0.jpg": b"x", "0.cls": b"cat"}, "invalid literal"),
        (
            {"0.jpg": b"x", "0.cls": b"20230101"},
            r"train\.tar has the class 20230101 for 0\.jpg; expected .* below 1,000,000, in its \.cls file",
        ),
        ({"0.jpg": b"x", "0.cls": b"9" * 60}, "has the class 9{60} for"),
        ({"0.txt": b"x"}, "no image in 1 archives"),
    ],
)
def test_shards_that_cannot_be_used(tmp_path, files, message):
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for name, content in files.items():
            add_to_tar(archive, name, content)
    with pytest.raises(DataError, match=message):
        open_dataset("wds/train.tar", tmp_path)
    (tmp_path / "train.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(DataError, match="cannot be read as an uncompressed tar archive"):
        open_dataset("wds/train.tar", tmp_path)


def test_the_hub_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = rf"hfds/mnist is read by .* which is missing; {re.escape(install_command('hub'))}"
    with pytest.raises(DataError, match=message):
        open_dataset("hfds/mnist")


def test_a_dataset_of_the_hub(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": jpeg(0), "path": None}, {"bytes": b"", "path": None}], "label": [1, 0]}
    table = pytest.importorskip("pyarrow").Table.from_pydict(rows, schema=features.arrow_schema)
    (tmp_path / "set").mkdir()
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "set" / "train.parquet")
    source = open_dataset(f"hfds/{tmp_path / 'set'}", tmp_path / "cache", "train")
    assert (source.class_names, source.targets.tolist()) == (("cat", "dog"), [1, 0])
    assert source.load(0).size == (48, 40)
    with pytest.raises(ImageError, match=r"\(train\)\[1\]"):
        source.load(1)
    with pytest.raises(DataError, match="split 'absent', cannot be opened"):
        open_dataset(f"hfds/{tmp_path / 'set'}", tmp_path / "cache", "absent")


def test_rows_of_the_hub_name_no_files_outside_of_the_cache(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    for folder in (tmp_path, cache):
        noise(0).save(folder / "x.png")
    (cache / "link.png").symlink_to(tmp_path / "x.png")
    os.mkfifo(cache / "pipe.png")
    images = [
        {"bytes": jpeg(0), "path": "/etc/passwd"},
        {"bytes": None, "path": str(cache / "x.png")},
        {"bytes": None, "path": str(tmp_path / "x.png")},
        {"bytes": None, "path": str(cache / ".." / "x.png")},
        {"bytes": None, "path": str(cache / "link.png")},
        {"bytes": None, "path": "https://example.com/x.png"},
        {"bytes": None, "path": "zip://x.png::https://example.com/a.zip"},
        {"bytes": b"", "path": "x\0.png"},
        {"bytes": None, "path": str(cache / "pipe.png")},
        {"bytes": None, "path": None},
        None,
    ]

    class Rows(list):
        def __getitem__(self, key):
            return [0] * len(self) if key == "label" else {"image": super().__getitem__(key)}

    reader = types.SimpleNamespace(dataset=Rows(images), image_key="image", label_key="label", class_to_idx={"cat": 0})
    asked = {}
    monkeypatch.setattr(
        "timm.data.dataset_factory.create_dataset",
        lambda name, **options: asked.update(options) or types.SimpleNamespace(reader=reader),
    )
    config = types.ModuleType("datasets.config")
    config.HF_DATASETS_CACHE = cache
    package = types.ModuleType("datasets")
    package.config = config
    monkeypatch.setitem(sys.modules, "datasets", package)
    monkeypatch.setitem(sys.modules, "datasets.config", config)
    for root in (None, cache):
        source = open_dataset("hfds/someone/something", root, "train")
        assert asked["trust_remote_code"] is False
        assert source.load(0).size == source.load(1).size == (48, 40)
        for index in range(2, len(images)):
            with pytest.raises(ImageError, match="cannot be opened") as caught:
                source.load(index)
            assert str(caught.value).isprintable()


def test_names_of_files_and_classes_are_shown_as_text(tmp_path):
    name = os.fsdecode(b"cat\x1b[31m\xff\n")
    write_pictures(tmp_path / "train", classes=(name, "dog"), each=1)
    write_pictures(tmp_path / "val", classes=("dog", "fox"), each=1)
    problems = open_and_check("folder", tmp_path).problems
    assert len(problems) == 2
    assert all(problem.isprintable() for problem in problems)
    with pytest.raises(DataError) as caught:
        open_dataset("folder", tmp_path / name.strip())
    assert str(caught.value).isprintable()
    assert str(caught.value).encode()


def test_pictures_without_classes_are_split_or_held_out(tmp_path):
    for number in range(20):
        path = tmp_path / "some" / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    parts = {split: open_dataset("pictures", tmp_path, split) for split in ("train", "validation")}
    names = {split: {source.name(index) for index in range(len(source))} for split, source in parts.items()}
    assert {split: len(found) for split, found in names.items()} == {"train": 18, "validation": 2}
    assert not names["train"] & names["validation"]
    assert parts["train"].load(0).size == (4, 4)
    (tmp_path / "some").rename(tmp_path / "train")
    assert len(open_dataset("pictures", tmp_path, "train")) == 20
    with pytest.raises(DataError, match="none for the split 'validation'"):
        open_dataset("pictures", tmp_path, "validation")
    with pytest.raises(DataError, match="does not exist"):
        open_dataset("pictures", tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no picture"):
        open_dataset("pictures", tmp_path / "empty")
