"""Folders of small images, whole and broken."""

import io
import struct
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image


def noise(seed, size=(48, 40)):
    """An image that no other seed gives; `size` is (width, height)."""
    values = np.random.default_rng(seed).integers(0, 255, (size[1] // 8 + 1, size[0] // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(values).resize(size, Image.Resampling.BICUBIC)


def bomb():
    """2.5 gigapixels in a few bytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def write_pictures(root, classes=("cat", "dog"), each=8):
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for picture in range(each):
            noise(100 * number + picture).save(root / name / f"{picture}.jpg", quality=90)
    return root


def jpeg(seed):
    content = io.BytesIO()
    noise(seed).save(content, "JPEG")
    return content.getvalue()


def add_to_tar(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def folder(tmp_path):
    """Eight images each of two classes."""
    return write_pictures(tmp_path / "pictures")
