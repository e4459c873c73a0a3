import json
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from data.conftest import bomb, noise
from inline_attention.data.images import ImageError
from inline_attention.data.segmentation import (
    IGNORED,
    LabelRules,
    find_pair_folders,
    find_pairs,
    open_and_check_pairs,
    read_class_names,
    read_label_map,
)
from inline_attention.data.sources import DataError

NAMES = ("wall", "floor", "sky")


def labels(seed=0, size=(40, 48), count=3):
    blocks = np.random.default_rng(seed).integers(0, count, (5, 6)).astype(np.uint8)
    blocks.flat[:count] = range(count)
    return np.kron(blocks, np.ones((size[0] // 5, size[1] // 6), dtype=np.uint8))


def write_pairs(root, pairs=3, count=3, names=NAMES):
    for split in ("training", "validation"):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for number in range(pairs):
            noise(number).save(root / "images" / split / f"{number}.jpg")
            Image.fromarray(labels(number, count=count)).save(root / "annotations" / split / f"{number}.png")
    (root / "classes.txt").write_text("\n".join(names))
    return root


@pytest.fixture
def root(tmp_path):
    return write_pairs(tmp_path / "data")


def test_good_pairs(root):
    opened = open_and_check_pairs(root, num_classes=3)
    assert opened.problems == []
    assert [str(report) for report in opened.reports] == [
        f"{root} ({split}) (3 pairs): nothing wrong" for split in ("train", "validation")
    ]
    source = opened.train
    assert source.class_names == NAMES
    assert len(source) == 3
    image = source.load(1)
    assert image.size == (48, 40)
    target = source.target(1, (40, 48))
    assert target.dtype == np.uint8
    assert (target == labels(1)).all()


def test_zero_is_other_in_ade20k(tmp_path):
    root = write_pairs(tmp_path / "data", count=4)
    opened = open_and_check_pairs(root, reduce_zero_label=True)
    assert opened.problems == []
    values = labels(2, count=4).astype(int)
    assert (opened.train.target(2, (40, 48)) == np.where(values == 0, IGNORED, values - 1)).all()
    (problem, _) = open_and_check_pairs(root).problems
    assert "3 maps with labels outside of the list of classes" in problem
    assert "png: 3" in problem
    assert "set reduce_zero_label (--reduce-zero-label), if files count classes from 1" in problem


def test_255_is_ignored(root):
    values = labels(0)
    values[:10] = 255
    Image.fromarray(values).save(root / "annotations" / "training" / "0.png")
    for reduce_zero_label in (False, True):
        rules = LabelRules(3, reduce_zero_label=reduce_zero_label)
        assert (rules.labels(values)[:10] == IGNORED).all()
    assert open_and_check_pairs(root).problems == []


def faulty(root):
    """One fault of each kind among twelve pairs."""
    images, maps = root / "images" / "training", root / "annotations" / "training"
    for number in range(3, 12):
        noise(number).save(images / f"{number}.jpg")
        Image.fromarray(labels(number)).save(maps / f"{number}.png")
    (maps / "3.png").unlink()
    (images / "4.jpg").unlink()
    Image.fromarray(labels(5, (80, 96))).save(maps / "5.png")
    Image.fromarray(labels(6, (40, 96))).save(maps / "6.png")
    outside = labels(7)
    outside[:8], outside[8:16] = 200, 9
    Image.fromarray(outside).save(maps / "7.png")
    noise(8).save(maps / "8.png")
    (maps / "9.png").write_bytes((maps / "9.png").read_bytes()[:60])
    (images / "10.jpg").write_bytes(b"")
    noise(11).save(images / "11.png")


EXPECTED = {
    "images without a label map": ("3.jpg", "left out"),
    "label maps without an image": ("4.png", "left out"),
    "files that differ from another in their suffix alone": ("11.png", "left out"),
    "maps of another size than their image": ("5.png: 96×80 for an image of 48×40", "brought to the image's size"),
    "maps of another shape than their image": ("6.png: 96×40 for an image of 48×40", "left out"),
    "maps with labels outside of the list of classes": ("7.png: 9, 200", "those pixels ignored"),
    "maps of colors instead of labels": ("8.png: holds colors (RGB)", "left out"),
    "files that cannot be read": ("9.png: is damaged: ", "left out"),
}


def test_each_fault_is_counted_named_and_repaired(root):
    faulty(root)
    opened = open_and_check_pairs(root)
    assert opened.train is None
    assert opened.validation is not None
    report = opened.reports[0]
    assert {finding.fault: (finding.count, finding.repair) for finding in report} == {
        fault: (2 if fault == "files that cannot be read" else 1, repair) for fault, (_, repair) in EXPECTED.items()
    }
    for finding in report:
        assert EXPECTED[finding.fault][0] in finding.first[0]
    assert len(opened.problems) == len(EXPECTED)

    repaired = open_and_check_pairs(root, repair=True)
    assert repaired.problems == []
    assert len(repaired.reports[0]) == len(report) == 9
    source = repaired.train
    assert [source.name(index).rpartition("/")[2] for index in range(len(source))] == [
        "0.jpg", "1.jpg", "2.jpg", "5.jpg", "7.jpg", "11.jpg"
    ]  # fmt: skip
    assert (source.target(3, (40, 48)) == labels(5, (80, 96))[::2, ::2]).all()
    target = source.target(4, (40, 48))
    assert (target[:16] == IGNORED).all()
    assert (target[16:] == labels(7)[16:]).all()


def test_faults_met_in_spite_of_the_check_are_named(root):
    source = open_and_check_pairs(root).train
    with pytest.raises(ImageError, match=r"0\.png: is 48×40 pixels, its image 40×48"):
        source.target(0, (48, 40))
    Image.fromarray(np.full((40, 48), 7, np.uint8)).save(root / "annotations" / "training" / "0.png")
    with pytest.raises(ImageError, match="has the label 7, which is not in the list of classes"):
        source.target(0, (40, 48))


def test_truncated_files_are_found_by_decoding(root):
    path = root / "images" / "training" / "1.jpg"
    path.write_bytes(path.read_bytes()[:-20])
    assert open_and_check_pairs(root).problems == []
    (problem,) = open_and_check_pairs(root, decode=True).problems
    assert "1 file that cannot be read" in problem


def test_classes_that_do_not_occur(root):
    (root / "classes.txt").write_text("\n".join([*NAMES, "sea"]))
    opened = open_and_check_pairs(root)
    (problem,) = opened.problems  # none on the validation data
    assert "1 class without a pixel (sea (3))" in problem
    assert open_and_check_pairs(root, repair=True).problems == []
    assert (
        "has 4 classes, the model 3; leave --num-classes out" in open_and_check_pairs(root, num_classes=3).problems[0]
    )


@pytest.mark.parametrize("repair", [False, True])
def test_a_split_without_a_labelled_pixel_cannot_be_repaired(root, repair):
    for number in range(3):
        Image.new("L", (48, 40), 255).save(root / "annotations" / "validation" / f"{number}.png")
    opened = open_and_check_pairs(root, repair=repair)
    (problem,) = opened.problems
    assert "(validation): 3 maps without a labeled pixel, and there are no others (" in problem
    assert "; label them" in problem
    assert opened.validation is None


def test_kinds_of_maps(tmp_path):
    values = labels()
    palette = Image.fromarray(values)
    palette = palette.convert("P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    palette.putdata(values.ravel().tolist())
    palette.save(tmp_path / "palette.png")
    Image.fromarray(values).save(tmp_path / "gray.png")
    Image.fromarray(values.astype(np.uint16) * 100).save(tmp_path / "sixteen.png")
    Image.fromarray(values > 0).save(tmp_path / "two.png")
    assert (read_label_map(tmp_path / "palette.png") == values).all()
    assert (read_label_map(tmp_path / "gray.png") == values).all()
    assert (read_label_map(tmp_path / "sixteen.png") == values.astype(int) * 100).all()
    assert (read_label_map(tmp_path / "two.png") == (values > 0)).all()
    for mode in ("RGB", "RGBA", "LA"):
        Image.fromarray(values).convert(mode).save(tmp_path / "colors.png")
        with pytest.raises(ImageError, match=rf"holds colors \({mode}\).*convert it to a gray image"):
            read_label_map(tmp_path / "colors.png")
    Image.fromarray(values).save(tmp_path / "lossy.jpg")
    with pytest.raises(ImageError, match="no label map; expected PNG"):
        read_label_map(tmp_path / "lossy.jpg")
    with pytest.raises(ImageError, match="cannot be opened: No such file"):
        read_label_map(tmp_path / "absent.png")


@pytest.mark.parametrize("plain", [False, True], ids=["P5", "P2"])
def test_labels_in_a_pgm_are_never_scaled(tmp_path, plain):
    values = np.arange(150).reshape(10, 15)
    for maximum, dtype in ((255, ">u1"), (65535, ">u2"), (149, ">u1"), (1023, ">u2")):
        content = " ".join(map(str, values.ravel())).encode() if plain else values.astype(dtype).tobytes()
        header = f"{'P2' if plain else 'P5'}\n15 10\n{maximum}\n".encode()
        path = tmp_path / f"{maximum}.pgm"
        path.write_bytes(header + content)
        if maximum in (255, 65535):
            assert (read_label_map(path) == values).all()
            continue
        with pytest.raises(ImageError, match=rf"{maximum}\.pgm: is a PGM that announces values up to {maximum} .*255"):
            read_label_map(path)


def grey_png(size, bits, rows):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


def grey_tiff(size, bits, rows):
    content = rows.tobytes()
    # Width, height, bits, compression (none), black is zero, place, samples, rows in a strip, bytes.
    tags = {256: size[0], 257: size[1], 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: size[1], 279: len(content)}
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (
        struct.pack("<2sHI", b"II", 42, 8 + len(content))
        + content
        + struct.pack("<H", len(tags))
        + directory
        + bytes(4)
    )


@pytest.mark.parametrize("write", [grey_png, grey_tiff])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_labels_of_few_bits_are_never_scaled(tmp_path, bits, write):
    values = np.random.default_rng(0).integers(0, 2**bits, (10, 16), dtype=np.uint8)
    of_pixels = np.unpackbits(values[..., None], axis=-1)[..., -bits:]
    rows = np.packbits(of_pixels.reshape(10, -1), axis=1)
    (tmp_path / "map").write_bytes(write((16, 10), bits, rows))
    assert (read_label_map(tmp_path / "map") == values).all()


def test_pillows_own_limit_does_not_count(tmp_path, monkeypatch):
    Image.fromarray(labels()).save(tmp_path / "x.png")
    (tmp_path / "bomb.png").write_bytes(bomb())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert (read_label_map(tmp_path / "x.png") == labels()).all()
    with pytest.raises(ImageError, match="limit of 200,000,000 pixels"):
        read_label_map(tmp_path / "bomb.png")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "wall\nfloor\n\nsky\n"),
        ("a.json", json.dumps(NAMES)),
        ("a.json", json.dumps({"2": "floor", "1": "wall", "3": "sky"})),
        (
            "objectInfo150.txt",
            "Idx\tRatio\tTrain\tVal\tName\n1\t0.2\t1\t1\twall\n2\t0.1\t1\t1\tfloor\n3\t0.1\t1\t1\tsky\n",
        ),
    ],
)
def test_lists_of_classes(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_class_names(tmp_path / name) == NAMES


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n", "is empty"),
        ("a.txt", "sky\nsky\n", "has 'sky' more than once"),
        ("a.json", "[1, 2]", "expected a list of names"),
        ("a.json", "{", "is of no use"),
        ("a.json", '{"0": "wall", "2": "sky"}', "its numbers are 0, 2; number the classes from 0 or from 1 without"),
        ("a.json", '{"2": "wall", "3": "sky"}', "its numbers are 2, 3; number the classes from 0 or from 1 without"),
        ("a.json", "{}", "is empty"),
        ("a.txt", "Idx\tName\n1\twall\n\n13\n", "has no name in line 4; complete or remove it"),
        ("a.txt", "Idx\tName\tTrain\n1\t\t0.5\n", "has no name in line 2; complete or remove it"),
    ],
)
def test_bad_lists_of_classes(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_class_names(tmp_path / name)


@pytest.mark.parametrize("start", [0, 1])
def test_numbers_of_classes_count(tmp_path, start):
    root = write_pairs(tmp_path / "data", count=4)
    (root / "classes.txt").unlink()
    (root / "classes.json").write_text(json.dumps(dict(enumerate(("other", *NAMES)[start:], start=start))))
    opened = open_and_check_pairs(root, reduce_zero_label=True)
    assert opened.problems == []
    assert opened.train.class_names == NAMES


def test_folders_of_any_name(tmp_path):
    root = write_pairs(tmp_path / "data")
    (root / "images").rename(root / "pictures")
    (root / "annotations" / "training").rename(root / "train_ids")
    (root / "annotations" / "validation").rename(root / "val_ids")
    assert "another is named by image_folder, such as images_{split}" in open_and_check_pairs(root).problems[0]
    named = {"image_folder": "pictures/{split}", "map_folder": "{split}_ids"}
    opened = open_and_check_pairs(root, **named)
    assert opened.problems == []
    assert (len(opened.train), len(opened.validation)) == (3, 3)
    (problem,) = open_and_check_pairs(root, train_split="other", **named).problems
    assert "has no folder pictures/{split}, where images of the split 'other' are said to be" in problem
    assert problem.endswith("{split} being one of other; correct image_folder")


def test_one_folder_for_both_splits_is_refused(root):
    flat = {"image_folder": "images/training", "map_folder": "annotations/training"}
    (problem,) = open_and_check_pairs(root, **flat).problems
    assert "has the images of 'train' and of 'validation'" in problem
    opened = open_and_check_pairs(root, validation_split="train", **flat)  # asked for
    assert len(opened.train) == len(opened.validation) == 3


def test_a_split_that_is_trained_and_evaluated_on_needs_no_class_to_be_evaluated(root):
    (root / "classes.txt").write_text("\n".join([*NAMES, "unseen"]))
    opened = open_and_check_pairs(root, validation_split="train")
    assert [len(report) for report in opened.reports] == [1, 0]


def test_folders(tmp_path):
    for folder in ("val/images", "val/masks"):
        (tmp_path / folder).mkdir(parents=True)
    assert find_pair_folders(tmp_path, "validation") == (tmp_path / "val" / "images", tmp_path / "val" / "masks")
    with pytest.raises(DataError, match=r"no folder with images of the split 'train'; expected images/training"):
        find_pair_folders(tmp_path, "train")
    with pytest.raises(DataError, match=r"split 'val'; expected images/validation"):
        find_pair_folders(tmp_path / "val", "val")
    for find in (open_and_check_pairs, lambda root: find_pair_folders(root, "val")):
        with pytest.raises(DataError, match=r"the data folder .*absent does not exist; give one that holds images and"):
            find(tmp_path / "absent")
    with pytest.raises(DataError, match=r"no image in .* \(0 found\) has the name of a label map"):
        find_pairs(tmp_path / "val" / "images", tmp_path / "val" / "masks")
    (problem,) = open_and_check_pairs(tmp_path).problems
    assert "has no list of classes" in problem


def test_pairs_in_subfolders_and_hidden_files(tmp_path):
    for city in ("aachen", "bonn"):
        for kind in ("images", "maps"):
            (tmp_path / kind / city).mkdir(parents=True)
        noise(0).save(tmp_path / "images" / city / "1.v2.jpg")
        Image.fromarray(labels()).save(tmp_path / "maps" / city / "1.v2.png")
    (tmp_path / "images" / ".thumbnail.jpg").touch()
    pairs, faults = find_pairs(tmp_path / "images", tmp_path / "maps")
    assert [pair.image.parent.name for pair in pairs] == ["aachen", "bonn"]
    assert not any(faults.values())


def test_too_many_classes():
    with pytest.raises(DataError, match="1 to 255 classes, got 256"):
        LabelRules(256)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("classes.json", "[" * 100_000),
        ("classes.json", "[" * 60 + "]" * 60),
        ("classes.json", '{"0": ' + "9" * 10_000 + "}"),
        ("classes.json", '{"' + "9" * 10_000 + '": "x"}'),
        ("classes.json", "7"),
        ("classes.txt", "x\n" * 1_000_000),
        ("classes.txt", "\n".join(f"{number}\x1b[31m" for number in range(1000))),
        ("classes.txt", "\x1b[31m\n\x1b[31m\n"),
    ],
)
def test_hostile_lists_of_classes_give_a_sentence(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    problems = open_and_check_pairs(tmp_path).problems
    assert len(problems) == 1
    assert problems[0].isprintable()


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_a_list_of_classes_that_is_no_file(tmp_path, kind):
    path = tmp_path / "mine.txt"
    os.mkfifo(path) if kind == "FIFO" else path.symlink_to("/dev/zero")
    (problem,) = open_and_check_pairs(tmp_path, class_file=path).problems
    assert "is not a regular file" in problem
