"""Images in every mode and state that files come in."""

import pickle
import struct
import tempfile
import threading
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inline_attention.data.images import ImageError, find_images, load_image, load_image_bytes

RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def quarters():
    """Red and green above, blue and white below; 64×48."""
    image = Image.new("RGB", (64, 48))
    for colour, corner in ((RED, (0, 0)), (GREEN, (32, 0)), (BLUE, (0, 24)), (WHITE, (32, 24))):
        image.paste(colour, (*corner, corner[0] + 32, corner[1] + 24))
    return image


def corners(image):
    """The colors in the middle of the four quarters, row by row."""
    width, height = image.size
    return [image.getpixel((width * x // 4, height * y // 4)) for y in (1, 3) for x in (1, 3)]


def assert_close(colours, expected, tolerance=8):
    np.testing.assert_allclose(colours, expected, atol=tolerance)


def saved(image, path, **options):
    image.save(path, **options)
    return path


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".gif", ".bmp", ".tif", ".ppm"])
def test_formats(tmp_path, suffix):
    options = {"lossless": True} if suffix == ".webp" else {"quality": 95, "subsampling": 0} if suffix == ".jpg" else {}
    image = load_image(saved(quarters(), tmp_path / f"x{suffix}", **options))
    assert (image.mode, image.size) == ("RGB", (64, 48))
    assert_close(corners(image), [RED, GREEN, BLUE, WHITE])


def test_the_suffix_does_not_matter_and_a_path_may_be_text(tmp_path):
    saved(quarters(), tmp_path / "photo.unknown", format="PNG")
    assert load_image(str(tmp_path / "photo.unknown")).size == (64, 48)


@pytest.mark.parametrize("mode", ["CMYK", "P", "L", "1", "YCbCr"])
def test_modes_without_transparency(tmp_path, mode):
    suffix = ".jpg" if mode in ("CMYK", "YCbCr") else ".png"
    image = load_image(saved(quarters().convert(mode), tmp_path / f"x{suffix}"))
    assert image.mode == "RGB"
    if mode == "1":
        assert corners(image)[3] == WHITE
        assert {colour for _, colour in image.getcolors()} <= {WHITE, BLACK}
    elif mode == "L":
        assert_close(corners(image), [(76,) * 3, (149,) * 3, (29,) * 3, WHITE], tolerance=2)
    else:
        assert_close(corners(image), [RED, GREEN, BLUE, WHITE], tolerance=12)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGB with a transparent color", "P with a transparent color"])
def test_transparency_is_white(tmp_path, mode):
    path = tmp_path / "x.png"
    if mode == "RGB with a transparent color":
        saved(quarters(), path, transparency=RED)
        expected = [WHITE, GREEN, BLUE, WHITE]
    elif mode == "P with a transparent color":
        image = quarters().quantize(4)
        saved(image, path, transparency=image.getpixel((1, 1)))
        expected = [WHITE, GREEN, BLUE, WHITE]
    elif mode == "PA":
        image = Image.new("PA", (64, 48), (0, 0))
        image.putpalette([*RED, *GREEN])
        image.paste((1, 255), (0, 0, 32, 48))
        saved(image, tmp_path / "x.tif")
        path = tmp_path / "x.tif"
        expected = [GREEN, WHITE, GREEN, WHITE]
    else:
        image = Image.new(mode, (64, 48), 0)
        image.paste((*RED, 255) if mode == "RGBA" else (0, 255), (0, 0, 32, 48))
        image.paste((*RED, 128) if mode == "RGBA" else (0, 128), (0, 0, 32, 24))
        half = (255, 127, 127) if mode == "RGBA" else (127,) * 3
        saved(image, path)
        expected = [half, WHITE, RED if mode == "RGBA" else BLACK, WHITE]
    assert_close(corners(load_image(path)), expected, tolerance=2)


def test_16_bits_are_scaled_not_saturated(tmp_path):
    ramp = np.linspace(0, 65535, 64 * 48, dtype=np.uint16).reshape(48, 64)
    for name in ("x.png", "x.tif"):
        loaded = np.asarray(load_image(saved(Image.fromarray(ramp), tmp_path / name)))
        np.testing.assert_allclose(loaded[..., 0], ramp / 257, atol=0.51)
        assert (loaded[..., 0] == loaded[..., 2]).all()


def test_a_dark_16_bit_picture_stays_dark(tmp_path):
    path = saved(Image.fromarray(np.full((20, 20), 2570, dtype=np.uint16)), tmp_path / "x.png")
    assert load_image(path).getpixel((3, 3)) == (10, 10, 10)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_values_without_a_white_point_are_scaled_from_their_range(tmp_path, dtype):
    ramp = np.linspace(-70_000, 70_000, 400).reshape(20, 20).astype(dtype)
    loaded = np.asarray(load_image(saved(Image.fromarray(ramp), tmp_path / "x.tif")))[..., 0]
    assert (loaded.min(), loaded.max()) == (0, 255)
    assert (np.diff(loaded.flatten().astype(int)) >= 0).all()
    ramp[:] = 7
    assert load_image(saved(Image.fromarray(ramp), tmp_path / "flat.tif")).size == (20, 20)


@pytest.mark.parametrize(
    ("dtype", "low"), [(np.int32, 0), (np.int32, 1000), (np.int32, 2**30), (np.float32, 0), (np.float32, 1000)]
)
def test_values_without_a_white_point_may_lie_anywhere(tmp_path, dtype, low):
    """Also where they could be 16-bit values, and where float32 has gaps between whole numbers."""
    ramp = np.arange(low, low + 256, dtype=dtype).reshape(16, 16)
    loaded = np.asarray(load_image(saved(Image.fromarray(ramp), tmp_path / "x.tif")))[..., 0]
    np.testing.assert_array_equal(loaded, ramp - low)


@pytest.mark.parametrize("header", [b"P5\n16 16\n65535\n", b"P5\n16 16\n4095\n"])
def test_a_dark_16_bit_pgm_stays_dark(tmp_path, header):
    white = int(header.split()[-1])
    (tmp_path / "x.pgm").write_bytes(header + np.full((16, 16), white // 10, dtype=">u2").tobytes())
    assert load_image(tmp_path / "x.pgm").getpixel((3, 3)) == (25, 25, 25)


def test_nan_and_infinity_do_not_change_the_range(tmp_path):
    values = np.linspace(100, 200, 256, dtype=np.float32).reshape(16, 16)
    values[0, 1:4] = np.nan, np.inf, -np.inf
    loaded = np.asarray(load_image(saved(Image.fromarray(values), tmp_path / "x.tif")))[..., 0].ravel()
    assert loaded[:4].tolist() == [0, 0, 255, 0]
    np.testing.assert_array_equal(loaded[4:], np.arange(4, 256))
    values[:] = np.nan
    assert load_image(saved(Image.fromarray(values), tmp_path / "x.tif")).getpixel((0, 0)) == BLACK


def test_float_pictures_may_hold_nan(tmp_path):
    values = np.full((20, 20), 0.5, dtype=np.float32)
    values[0] = np.nan, *[np.inf] * 19
    values[1] = 1
    loaded = load_image(saved(Image.fromarray(values), tmp_path / "x.tif"))
    assert loaded.getpixel((0, 1)) == WHITE


# What the corners are when the camera was held so that the upright picture is `quarters()`.
ORIENTATIONS = {
    1: [RED, GREEN, BLUE, WHITE],
    2: [GREEN, RED, WHITE, BLUE],
    3: [WHITE, BLUE, GREEN, RED],
    4: [BLUE, WHITE, RED, GREEN],
    5: [RED, BLUE, GREEN, WHITE],
    6: [BLUE, RED, WHITE, GREEN],
    7: [WHITE, GREEN, BLUE, RED],
    8: [GREEN, WHITE, RED, BLUE],
}


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("orientation", list(ORIENTATIONS))
def test_exif_orientation_is_honoured(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(quarters(), tmp_path / f"x{suffix}", exif=exif, quality=95)
    assert_close(corners(Image.open(path).convert("RGB")), ORIENTATIONS[1], tolerance=30)
    image = load_image(path)
    assert image.size == ((64, 48) if orientation < 5 else (48, 64))
    assert_close(corners(image), ORIENTATIONS[orientation], tolerance=30)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_does_not_matter(tmp_path):
    path = saved(quarters(), tmp_path / "x.jpg", exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff\x12\x01")
    assert load_image(path).size == (64, 48)


@pytest.mark.parametrize(
    "entry",
    [
        struct.pack("<HHI", 0x8769, 2, 4) + b"abc\0",
        struct.pack("<HHI", 0x8825, 2, 4) + b"abc\0",
        struct.pack("<HHI", 0x0100, 2, 4) + b"abc\0",
        struct.pack("<HHIi", 0x0102, 9, 1, -1),
        struct.pack("<HHII", 0x011A, 5, 1, 0x7FFFFFFF),
    ],
    ids=["text for a pointer", "text for a place", "text for a width", "a negative depth", "a pointer to nowhere"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_exif_that_could_not_be_written_again_is_read(tmp_path, entry):
    orientation = struct.pack("<HHII", 0x0112, 3, 1, 6)
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 2) + orientation + entry + bytes(4)
    image = load_image(saved(quarters(), tmp_path / "x.jpg", exif=exif, quality=95))
    assert_close(corners(image), ORIENTATIONS[6], tolerance=30)


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp"])
def test_of_an_animation_the_first_frame(tmp_path, suffix):
    frames = [Image.new("RGB", (40, 30), colour) for colour in (RED, GREEN, BLUE)]
    frames[0].save(tmp_path / f"x{suffix}", save_all=True, append_images=frames[1:], lossless=True)
    assert_close(corners(load_image(tmp_path / f"x{suffix}")), [RED] * 4)


@pytest.mark.parametrize("size", [(1, 1), (1, 10_000), (10_000, 1)])
def test_extreme_shapes(tmp_path, size):
    assert load_image(saved(Image.new("RGB", size), tmp_path / "x.png")).size == size


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.7, 0.97])
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".gif", ".bmp", ".tif", ".ppm"])
def test_truncated(tmp_path, suffix, kept):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8))
    path = saved(noise, tmp_path / f"x{suffix}")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(ImageError, match="damaged") as caught:
        load_image(path)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"this is a letter, not an image\n" * 20, "damaged or no image"),
        (bytes(range(256)) * 20, "damaged or no image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "expected JPEG, PNG"),
    ],
    ids=["empty", "text", "bytes", "EPS, which would start a program"],
)
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".eps"])
def test_garbage(tmp_path, suffix, content, reason):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=reason):
        load_image(path)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".tif"])
def test_flipped_bytes_are_read_or_refused(tmp_path, suffix):
    path = saved(quarters(), tmp_path / f"x{suffix}")
    intact = path.read_bytes()
    for position in range(0, len(intact), max(1, len(intact) // 100)):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 0x55]) + intact[position + 1 :])
        with suppress(ImageError):  # any other error fails the test
            assert load_image(path, max_pixels=10**6).mode == "RGB"


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ImageError, match=r"absent\.png: cannot be opened: No such file"):
        load_image(tmp_path / "absent.png")
    with pytest.raises(ImageError, match="cannot be opened: it is a folder"):
        load_image(tmp_path)


@pytest.mark.parametrize("limit", [64 * 48 - 1, 64 * 48 // 2 - 1, 100])
def test_too_many_pixels_are_refused_with_path_and_limit(tmp_path, limit):
    path = saved(quarters(), tmp_path / "bomb.png")
    before = Image.MAX_IMAGE_PIXELS
    with pytest.raises(ImageError, match=rf"bomb\.png: .*the limit of {limit:,} pixels"):
        load_image(path, max_pixels=limit)
    assert load_image(path, max_pixels=64 * 48).size == (64, 48)
    assert before == Image.MAX_IMAGE_PIXELS


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path):
    """2.5 gigapixels in a few bytes: decoding it would take 7.5 GB."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    with pytest.raises(ImageError, match="limit of 200,000,000 pixels"):
        load_image(tmp_path / "bomb.png")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("suffix", [".png", ".tif", ".gif", ".webp"])
def test_pillows_own_lower_limit_does_not_count(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert load_image(saved(quarters(), tmp_path / f"x{suffix}")).size == (64, 48)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_threads(tmp_path):
    path, results = saved(quarters(), tmp_path / "x.png"), []
    threads = [threading.Thread(target=lambda: results.append(load_image(path).size)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(64, 48)] * 8


def test_content_in_memory_is_read_as_a_file_is_without_writing_one(tmp_path, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    content = saved(quarters(), tmp_path / "x.png", exif=exif).read_bytes()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert load_image_bytes(content, "archive/1.png") == load_image(tmp_path / "x.png")
    for bad, reason in (
        (b"", "is empty; expected JPEG"),
        (b"no image", "no image; expected"),
        (content[:99], "is "),
    ):
        with pytest.raises(ImageError, match=rf"archive/1\.png: .*{reason}") as caught:
            load_image_bytes(bad, "archive/1.png")
        assert caught.value.path == Path("archive/1.png")
    with pytest.raises(ImageError, match=r"archive/1\.png: .*limit of 100 pixels"):
        load_image_bytes(content, "archive/1.png", max_pixels=100)


def test_find_images(tmp_path):
    for name in ("b.png", "a.JPG", "notes.txt", "deep/er/c.webp", ".hidden.png", ".cache/d.png"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    inside = [tmp_path / name for name in ("a.JPG", "b.png", "deep/er/c.webp")]
    assert find_images([tmp_path]) == inside
    given = [tmp_path / "notes.txt", tmp_path / "absent.png"]
    assert find_images([given[0], str(tmp_path / "deep"), given[1]]) == [given[0], inside[2], given[1]]
    assert find_images([tmp_path / ".cache"]) == [tmp_path / ".cache" / "d.png"]


def test_image_errors_pickle(tmp_path):
    """As they must to come back from a data loader's worker."""
    error = pickle.loads(pickle.dumps(ImageError(tmp_path, "is odd")))
    assert (error.path, error.reason) == (tmp_path, "is odd")
