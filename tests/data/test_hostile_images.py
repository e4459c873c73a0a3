"""Images that are no files, or that ask for more than they are worth."""

import os
import socket
import struct
import subprocess
import sys
import threading
import zlib

import pytest

from data.conftest import noise, write_pictures
from inline_attention.data import images
from inline_attention.data.broken import BrokenImages
from inline_attention.data.images import ImageError, find_images, image_size, load_image, load_image_bytes
from inline_attention.data.loading import ImageLoader
from inline_attention.data.sampling import EvaluationBatches
from inline_attention.data.segmentation import read_label_map
from inline_attention.data.sources import FolderSource
from inline_attention.data.transforms import evaluation_transform


def make(path, kind):
    """Put something at a path that is not a regular file."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "link to a FIFO":
        os.mkfifo(path.with_suffix(".pipe"))
        path.symlink_to(path.with_suffix(".pipe"))
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    else:
        path.mkdir()


KINDS = ["FIFO", "link to a FIFO", "socket", "device", "link to itself", "folder"]


def within(seconds, function):
    """Call a function that must not block."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "it blocks"
    return results[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "x.png", kind)

    def reason(function):
        try:
            function(tmp_path / "x.png")
        except ImageError as error:
            return error.reason
        return "nothing wrong"

    for function in (load_image, image_size, read_label_map):
        assert "cannot be opened" in within(10, lambda function=function: reason(function))


def test_a_folder_with_things_that_are_no_files_is_read(tmp_path, monkeypatch):
    root = write_pictures(tmp_path / "x", each=3)
    monkeypatch.chdir(root / "cat")
    for number, kind in enumerate(KINDS):
        make(root / "cat" / f"{number}.png", kind)
    source = FolderSource(root)
    broken = BrokenImages(len(source))
    loader = ImageLoader(
        source, evaluation_transform((8, 8)), EvaluationBatches(len(source), 4), broken=broken, replace_broken=False
    )
    assert within(30, lambda: sum(len(batch) for batch in loader.epoch())) == 6
    assert {image.name.rsplit("/", 1)[1] for image in broken} == {"0.png", "1.png", "2.png", "3.png", "4.png"}
    assert len(find_images([root])) == 6 + 5


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(*chunks, size=4):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(bytes(52)))


def tiff(*entries, content=b""):
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4) + content


def hostile():
    bomb = zlib.compress(bytes(2**28), 9)
    size = [(256, 4, 1, 1), (257, 4, 1, 3_000_000), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    offsets = 8 + 2 + 8 * 12 + 4
    strips = [(273, 4, 3_000_000, offsets), (278, 4, 1, 1), (279, 4, 3_000_000, offsets)]
    gif = b"GIF89a" + struct.pack("<HH", 2, 2) + b"\x80\0\0" + bytes(6)
    return {
        "icc": png(chunk(b"iCCP", b"x\0\0" + bomb)),
        "text": png(chunk(b"zTXt", b"Raw profile type exif\0\0" + bomb)),
        "international text": png(chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + bomb)),
        "many texts": png(*(chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**20 - 1), 9)) for _ in range(200))),
        "animation without end": png(chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))),
        "strips": tiff(*size, *strips, content=struct.pack("<I", 8) * 3_000_000),
        "strips announced": tiff((256, 4, 1, 4), (257, 4, 1, 4), (273, 4, 2**32 - 1, 8)),
        "big TIFF": b"II+\0\x08\0\0\0" + struct.pack("<QQHHQQ", 16, 1, 324, 16, 2**40, 8) + bytes(8),
        "directory in a circle": tiff((256, 4, 1, 4), (257, 4, 1, 4)) [:-4] + struct.pack("<I", 8),
        "large frame": gif + b"\x2c" + struct.pack("<HHHH", 0, 0, 65535, 65535) + b"\0\x02\x02\x44\x01\0;",
        "large screen": b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0" + bytes(6),
        "negative size": b"BM" + struct.pack("<IHHI", 100, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, -(2**31), -(2**31), 1, 24, 0, 0, 0, 0, 0, 0),
        "digits": b"P6\n" + b"9" * 5000 + b" 4\n255\n",
        "svg": b'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>',
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(%pipe%touch ran) (r) file\n",
        "psd": b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 10, 10, 8, 3) + bytes(100),
        "fits": b"SIMPLE  =                    T".ljust(2880),
        "icon": b"\0\0\1\0\1\0" + bytes(16),
        "photo CD": bytes(2048) + b"PCD_" + bytes(2000),
    }  # fmt: skip


PROGRAM = """
import resource, sys
from pathlib import Path
from PIL import Image
from inline_attention.data.images import image_size
from inline_attention.data.images import ImageError, load_image, load_image_bytes
Image.init()
for file in sorted(Path(sys.argv[1]).iterdir()):
    try: load_image(file); break
    except ImageError: pass
def watch(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or event.split(".")[0] in ("subprocess", "socket", "ctypes") or event in ("os.system", "os.exec"):
        print("!", event, arguments, flush=True)
sys.addaudithook(watch)
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
for file in sorted(Path(sys.argv[1]).iterdir()):
    for function in (image_size, load_image, lambda path: load_image_bytes(path.read_bytes(), path.name)):
        try: function(file)
        except ImageError as error:
            assert str(error).isprintable() and len(str(error)) < 400, str(error)
print("done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_hostile_images_start_nothing_write_nothing_and_take_little_memory(tmp_path):
    for name, content in hostile().items():
        (tmp_path / name).write_bytes(content)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stdout + result.stderr


@pytest.mark.parametrize("start", [b"\xff\xd8\xff" + b"\xff" * 2000, b"P6\n#" + b"c" * 2000])
def test_a_header_without_end_is_given_up(monkeypatch, start):
    monkeypatch.setattr(images, "MAX_READS", 1000)
    with pytest.raises(ImageError, match="its header has no end"):
        load_image_bytes(start, "x")


def test_a_file_of_too_many_bytes_is_not_read(tmp_path):
    noise(0).save(tmp_path / "x.png")
    os.truncate(tmp_path / "x.png", 2**40)  # sparse: it takes no space on the disk
    with pytest.raises(ImageError, match="has 1,099,511,627,776 bytes, too many for the limit of 200,000,000 pixels"):
        load_image(tmp_path / "x.png")


def test_names_are_shown_as_text(tmp_path):
    path = os.fsencode(tmp_path) + b"/\x1b]0;owned\x07\xff\n.png"
    with pytest.raises(ImageError) as caught:
        load_image(os.fsdecode(path))
    assert str(caught.value).isprintable()
    assert str(caught.value).encode()
    assert r"\x1b]0;owned\x07\udcff\n.png: cannot be opened" in str(caught.value)
