"""Large images in rows: all layouts of TIFF give the same pixels, and a fault is one sentence."""

import csv
import multiprocessing
import os
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

tifffile = pytest.importorskip("tifffile")

from inline_attention.data.images import ImageError, load_image  # noqa: E402
from inline_attention.data.marked_slides import SlidesPlan, place_marks, write_slide, write_slides  # noqa: E402
from inline_attention.data.slides import needs_streaming, open_slide  # noqa: E402
from inline_attention.data.sources import DataError  # noqa: E402

HEIGHT, WIDTH = 150, 201
PIXELS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
TILED = {"tile": (64, 48), "photometric": "rgb"}
LAYOUTS = {
    "tiles": (PIXELS, TILED),
    "bigtiff": (PIXELS, TILED | {"bigtiff": True, "compression": "zlib"}),
    "lzw": (PIXELS, TILED | {"compression": "lzw", "predictor": 2}),
    "big endian": (PIXELS, TILED | {"byteorder": ">"}),
    "planes": (PIXELS.transpose(2, 0, 1), TILED | {"planarconfig": "separate"}),
    "strips": (PIXELS, {"rowsperstrip": 33, "photometric": "rgb"}),
    "infrared": (np.dstack([PIXELS, PIXELS[..., 0]]), TILED | {"extrasamples": ["unspecified"]}),
    "16 bits": (PIXELS.astype(np.uint16) << 8, TILED),
}


def in_rows(slide, step):
    height = slide.size[0]
    return torch.cat([slide.read_rows(top, min(top + step, height)) for top in range(0, height, step)], 1)


@pytest.fixture
def write(tmp_path):
    def write_file(pixels=PIXELS, name="slide.tif", **options):
        tifffile.imwrite(tmp_path / name, pixels, **(options or TILED))
        return tmp_path / name

    return write_file


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [37, 64, HEIGHT])
def test_rows_are_the_pixels(write, layout, step):
    pixels, options = LAYOUTS[layout]
    with open_slide(write(pixels, **options)) as slide:
        assert slide.size == (HEIGHT, WIDTH)
        assert np.array_equal(in_rows(slide, step).permute(1, 2, 0).numpy(), PIXELS)


def test_gray_and_inverted(write):
    with open_slide(write(PIXELS[..., 0], tile=(64, 64))) as slide:
        assert np.array_equal(in_rows(slide, 50).numpy(), np.stack([PIXELS[..., 0]] * 3))
    with open_slide(write(PIXELS[..., 0], tile=(64, 64), photometric="miniswhite")) as slide:
        assert np.array_equal(in_rows(slide, 50).numpy(), 255 - np.stack([PIXELS[..., 0]] * 3))


@pytest.mark.parametrize("kind", ["assocalpha", "unassalpha"])
@pytest.mark.parametrize("separate", [False, True])
def test_alpha_is_composited_on_white(write, tmp_path, kind, separate):
    """As in images that are decoded whole: transparent places of an orthophoto are not black."""
    alpha = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH, 1) % 256
    colors = PIXELS * alpha // 255 if kind == "assocalpha" else PIXELS
    pixels = np.dstack([colors, alpha]).astype(np.uint8)
    whole = load_image(write(pixels, **TILED, extrasamples=[kind]))
    if separate:
        write(pixels.transpose(2, 0, 1), **TILED, extrasamples=[kind], planarconfig="separate")
    with open_slide(tmp_path / "slide.tif") as slide:
        found = in_rows(slide, 37).permute(1, 2, 0).numpy()
    assert np.abs(found.astype(int) - np.asarray(whole)).max() <= 1


@pytest.mark.parametrize("compression", ["zlib", "Aperio"])
def test_ycbcr_becomes_rgb(write, compression):
    """Without JPEG, and in Aperio's JPEG 2000, which says nothing about it."""
    imagecodecs = pytest.importorskip("imagecodecs")
    tile = np.asarray(Image.fromarray(PIXELS[:64, :48]).convert("YCbCr"))
    options = {"tile": (64, 48), "photometric": "ycbcr", "compression": "zlib"}
    if compression == "Aperio":
        tile_bytes = imagecodecs.jpeg2k_encode(tile, codecformat="j2k", colorspace="RGB", mct=False, level=0)
        options |= {"photometric": "rgb", "compression": 33003, "shape": tile.shape, "dtype": np.uint8}
    with open_slide(write(iter([tile_bytes]) if compression == "Aperio" else tile, **options)) as slide:
        found = in_rows(slide, 64).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(found - PIXELS[:64, :48]).max() <= 4


def test_threads_share_a_slide(write):
    pixels = np.random.default_rng(1).integers(0, 256, (640, 960, 3), dtype=np.uint8)
    with open_slide(write(pixels, **TILED, compression="zlib")) as slide, ThreadPoolExecutor(4) as threads:
        starts = np.random.default_rng(2).integers(0, 600, 100).tolist()
        for start, rows in zip(starts, threads.map(lambda top: slide.read_rows(top, top + 40), starts), strict=True):
            assert np.array_equal(rows.permute(1, 2, 0).numpy(), pixels[start : start + 40])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_shares_a_slide(write):
    """As the workers of a dataloader do whose dataset has opened it."""
    with open_slide(write()) as slide:
        slide.read_rows(0, HEIGHT)
        process = multiprocessing.get_context("fork").Process(target=slide.read_rows, args=(0, 10))
        process.start()
        process.join(30)
        if process.exitcode is None:
            process.kill()
    assert process.exitcode == 0


def test_rows_that_do_not_exist(write):
    with open_slide(write()) as slide:
        assert slide.read_rows(HEIGHT, HEIGHT).shape == (3, 0, WIDTH), "a rank without rows"
        for start, stop in ((-5, 3), (10, 5), (140, HEIGHT + 1)):
            with pytest.raises(ValueError, match="expected rows between 0 and 150"):
                slide.read_rows(start, stop)


def test_planes_of_a_stack_are_no_levels(write):
    with open_slide(write(np.stack([PIXELS, 255 - PIXELS]), **TILED)) as slide:
        assert slide.level_sizes == [(HEIGHT, WIDTH)]


def test_a_pyramid(tmp_path):
    marks = place_marks(SlidesPlan(size=700, mark_size=40), "train", 0, "same")
    write_slide(tmp_path / "slide.tif", 700, marks, 40, 3)
    levels = []
    for level in (0, 1):
        with open_slide(tmp_path / "slide.tif", level) as slide:
            assert slide.level_sizes == [(700, 700), (88, 88)]
            levels.append(in_rows(slide, 97).float())
            assert slide.thumbnail(50).size == (50 if level == 0 else 44,) * 2
    reduced = torch.nn.functional.avg_pool2d(levels[0], 8, ceil_mode=True)
    assert (reduced - levels[1]).abs().mean() < 3  # JPEG
    with pytest.raises(ImageError, match=r"has 2 levels \(700×700, 88×88\), expected 0 to 1, got level 2"):
        open_slide(tmp_path / "slide.tif", 2)


def test_reduced_copies_in_sub_images(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(PIXELS, subifds=1, **TILED)
        file.write(PIXELS[::2, ::2], subfiletype=1, **TILED)
        file.write(PIXELS[:50], **TILED)  # of another shape: a label, not a level
    with open_slide(tmp_path / "a.tif", 1) as slide:
        assert slide.level_sizes == [(HEIGHT, WIDTH), (75, 101)]
        assert np.array_equal(in_rows(slide, 75).permute(1, 2, 0).numpy(), PIXELS[::2, ::2])


def replace_tag(path, code, values):
    """Overwrite the values of a tag of the first image."""
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages[0].tags[code].overwrite(values)


def faults(write, tmp_path):
    whole = write().read_bytes()
    content = {
        "truncated": (whole[: len(whole) // 2], "is truncated: .* of 15 tiles .* copy it again"),
        "header only": (whole[:8], "is damaged"),
        "empty": (b"", "is empty; expected a TIFF"),
        "no TIFF": (b"II*" + b"x" * 100, "is damaged or cut off .*; copy or export it again"),
        "text": (b"hello", "is damaged"),
    }
    for name, (bytes_, message) in content.items():
        path = tmp_path / f"{name}.tif"
        path.write_bytes(bytes_)
        yield path, message
    path = write(name="missing.tif")
    with tifffile.TiffFile(path) as file:
        counts = list(file.pages[0].databytecounts)
    replace_tag(path, "TileByteCounts", [0, *counts[1:]])
    yield path, "has no data for 1 of 15 tiles at level 0"
    path = write(name="claims.tif", tile=(256, 256), photometric="rgb")
    replace_tag(path, "TileByteCounts", 2**31)
    yield path, "is damaged: a tile of 196,608 bytes is said to take 2,147,483,648"
    path = write(name="zero.tif")
    replace_tag(path, "ImageLength", 0)
    yield path, "is empty at level 0|is damaged"
    path = write(name="vast.tif")
    replace_tag(path, "ImageLength", 65535)
    replace_tag(path, "ImageWidth", 65535)
    yield path, "lists 15 of 1,398,784 tiles"
    yield write(PIXELS.astype(np.float32), name="float.tif", tile=(64, 48), photometric="rgb"), "expected RGB or gray"
    yield write(PIXELS.astype(np.uint16), name="12.tif", **TILED, bitspersample=12), "of 12 bits .* 8 or 16 bits"
    path = write(name="long.tif")
    with tifffile.TiffFile(path) as file:
        place = file.pages[0].tags["ImageWidth"].offset
    content = bytearray(path.read_bytes())
    content[place + 4 : place + 8] = struct.pack("<I", 500)  # values of a tag that has one
    path.write_bytes(content)
    yield path, "^.{,300}$"
    yield tmp_path, "not a file"
    yield tmp_path / "none.tif", "cannot be opened: No such file"


def test_faults_are_one_sentence(write, tmp_path):
    for path, message in faults(write, tmp_path):
        with pytest.raises(ImageError, match=message) as caught:
            open_slide(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compression", ["jpeg", "zlib"])
def test_a_damaged_tile(write, compression):
    path = write(**TILED, compression=compression)
    with tifffile.TiffFile(path) as file:
        offset, size = file.pages[0].dataoffsets[2], file.pages[0].databytecounts[2]
    content = bytearray(path.read_bytes())
    content[offset : offset + size] = os.urandom(size)
    path.write_bytes(content)
    with open_slide(path) as slide, pytest.raises(ImageError, match="tile 2 of row 0 cannot be decoded"):
        slide.read_rows(0, 10)


def test_a_jpeg_tile_larger_than_it_should_be(write):
    """A small tile must not unfold to the size that its own header claims."""
    path = write(np.zeros((64, 48, 3), np.uint8), **TILED, compression="jpeg")
    content = path.read_bytes()
    start = content.index(b"\xff\xc0") + 5  # height and width in the frame's header
    path.write_bytes(content[:start] + struct.pack(">HH", 5000, 5000) + content[start + 4 :])
    with open_slide(path) as slide, pytest.raises(ImageError, match="5000×5000 pixels of its own"):
        slide.read_rows(0, 10)


def test_which_files_need_streaming(write, tmp_path):
    path = write()
    assert not needs_streaming(path)
    assert needs_streaming(path, HEIGHT * WIDTH - 1)
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    assert not needs_streaming(tmp_path / "a.png", 10)
    assert needs_streaming(tmp_path / "none.tif"), "open_slide says what is wrong"
    path.write_bytes(path.read_bytes()[:5000])
    assert needs_streaming(path, HEIGHT * WIDTH - 1)
    assert needs_streaming(write(**TILED, compression="jpeg2000")), "Pillow does not decode it"


def test_a_dataset_of_slides(tmp_path):
    plan = SlidesPlan(images=4, validation_images=2, size=300, mark_size=16, seed=1)
    seen = []
    write_slides(tmp_path / "new", plan, on_progress=lambda: seen.append(1))
    assert len(seen) == 6
    with (tmp_path / "new" / "slides.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert (row["class"] == "same") == (row["first"] == row["second"])
        first, second = ((int(row[f"{mark}_x"]), int(row[f"{mark}_y"])) for mark in ("first", "second"))
        assert np.hypot(*np.subtract(first, second)) >= 150
        with open_slide(tmp_path / "new" / row["file"]) as slide:
            for (x, y), kind in ((first, row["first"]), (second, row["second"])):
                center = slide.read_rows(y, y + 1)[1, 0, x].item()
                assert (center < 110) == (kind == "cross"), "a cross is dark in its middle, a ring is not"
    kept = (tmp_path / "new" / rows[0]["file"]).stat().st_mtime_ns
    (tmp_path / "new" / rows[1]["file"]).unlink()
    write_slides(tmp_path / "new", plan)  # resumes
    assert (tmp_path / "new" / rows[0]["file"]).stat().st_mtime_ns == kept
    assert (tmp_path / "new" / rows[1]["file"]).exists()
    with pytest.raises(DataError, match="slides of other settings"):
        write_slides(tmp_path / "new", SlidesPlan(size=300, mark_size=16))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_slides_do_not_wait_for_the_writer_of_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "slides.json")
    with pytest.raises(DataError, match="holds something else"):
        write_slides(tmp_path, SlidesPlan(size=300, mark_size=16))


def test_one_mark_says_nothing_about_the_class():
    plan = SlidesPlan(size=4096)
    drawn = {label: [place_marks(plan, "train", i, label) for i in range(400)] for label in ("same", "different")}
    for marks in drawn.values():
        for number in (0, 1):
            assert 160 < sum(pair[number].kind == "ring" for pair in marks) < 240


def test_a_slide_whose_writing_fails_leaves_nothing(tmp_path, monkeypatch):
    from inline_attention.data import marked_slides

    def failing(tile):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(marked_slides, "_averaged", failing)
    with pytest.raises(OSError, match="No space left"):
        write_slide(tmp_path / "slide.tif", 300, (), 16, 0)
    assert list(tmp_path.iterdir()) == []


def test_training_says_what_to_do_with_a_slide_that_it_cannot_decode(write):
    path = write(PIXELS, tile=(64, 64), photometric="rgb")
    with pytest.raises(ImageError, match="training decodes images whole: save a coarser level of it"):
        load_image(path, max_pixels=50 * 60)
