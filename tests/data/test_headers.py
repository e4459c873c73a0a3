"""Sizes from headers: those that the decoded image has."""

import struct
import threading
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from data.conftest import bomb, noise
from inline_attention.data.images import ImageError, image_size, load_image, read_in_threads


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def upright_size(path):
    """As the image itself has it, once it is decoded."""
    width, height = load_image(path).size
    return height, width


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
def test_orientation_counts_as_it_does_for_the_decoded_picture(tmp_path, suffix, orientation):
    path = tmp_path / f"x{suffix}"
    noise(0).save(path, exif=turned(orientation))
    assert image_size(path) == upright_size(path) == ((40, 48) if orientation < 5 else (48, 40))


def add_behind_pixels(path, *chunks):
    """Put chunks, (type, content) each, before the end of a PNG."""
    content = path.read_bytes()
    added = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    path.write_bytes(b"".join([content[:-12], *added, content[-12:]]))


DATE = (b"tEXt", b"date:create\x002020")


XMP = b'<rdf:Description tiff:Orientation="6"/>'
BEHIND_PIXELS = {
    "exif": (b"eXIf", turned(6).tobytes().removeprefix(b"Exif\0\0")),
    "exif as text": (b"tEXt", b"Raw profile type exif\0\nexif\n  1\n" + turned(6).tobytes().hex().encode()),
    "XMP": (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP),
}


@pytest.mark.parametrize("kind", BEHIND_PIXELS)
def test_orientation_behind_the_pixels_of_a_png_counts(tmp_path, kind):
    path = tmp_path / "x.png"
    noise(0).save(path)
    add_behind_pixels(path, DATE, BEHIND_PIXELS[kind])
    assert image_size(path) == upright_size(path) == (48, 40)


def test_pixels_of_a_png_are_not_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("decoded"))
    noise(0).save(tmp_path / "plain.png")
    add_behind_pixels(tmp_path / "plain.png", DATE)
    noise(0).save(tmp_path / "turned.png", exif=turned(6))
    assert image_size(tmp_path / "plain.png") == (40, 48)
    assert image_size(tmp_path / "turned.png") == (48, 40)
    (tmp_path / "cut.png").write_bytes((tmp_path / "plain.png").read_bytes()[:-20])
    assert image_size(tmp_path / "cut.png") == (40, 48)


def test_the_limit_is_that_of_load_image_and_not_pillows(tmp_path, monkeypatch):
    noise(0).save(tmp_path / "x.png")
    (tmp_path / "bomb.png").write_bytes(bomb())
    with pytest.raises(ImageError, match=r"bomb\.png: has 2,500,000,000 pixels.*limit of 200,000,000 pixels"):
        image_size(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert image_size(tmp_path / "x.png") == (40, 48)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_threads_open_files_at_the_same_time_and_leave_no_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    paths = [tmp_path / f"{number}.png" for number in range(8)]
    for path in paths:
        noise(0).save(path)
    together, pillows_open = threading.Barrier(4, timeout=20), Image.open

    def open_together(*arguments, **options):
        together.wait()
        return pillows_open(*arguments, **options)

    monkeypatch.setattr(Image, "open", open_together)
    filters = list(warnings.filters)
    assert list(read_in_threads(image_size, paths)) == [(40, 48)] * 8
    assert (Image.MAX_IMAGE_PIXELS, warnings.filters) == (100, filters)


def test_errors_come_among_the_sizes(tmp_path):
    noise(0).save(tmp_path / "x.png")
    (tmp_path / "empty.png").touch()
    Image.fromarray(np.zeros((4, 4), dtype=np.uint8)).save(tmp_path / "x.dds")
    paths = [tmp_path / name for name in ("empty.png", "absent.png", "x.dds", "x.png")]
    empty, absent, foreign, good = read_in_threads(image_size, paths)
    assert str(empty).startswith(f"{tmp_path}/empty.png: is empty; expected JPEG")
    assert str(absent) == f"{tmp_path}/absent.png: cannot be opened: No such file or directory"
    assert "is damaged or no image; expected JPEG" in str(foreign)
    assert good == (40, 48)
