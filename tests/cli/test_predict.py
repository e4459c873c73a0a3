"""`inline predict` from the outside."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from inline_attention import create_model
from inline_attention.cli.main import app
from inline_attention.models.checkpoints import save_weights
from inline_attention.tasks.classification import ImageClassifier


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    model = create_model("inline_deit_tiny", num_classes=3)
    save_weights(model, folder / "weights.safetensors", metadata={"class_names": '["cat", "[red]dog", "bird"]'})
    torch.save(model.state_dict(), folder / "weights.pth")
    return folder / "weights.safetensors"


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "b.jpg")
    Image.fromarray(pixels[:200]).save(folder / "more" / "b.jpg")
    Image.fromarray(pixels[:100, :100]).save(folder / "a [1].png")
    return folder


@pytest.fixture
def broken(photos):
    (photos / "broken.jpg").write_bytes((photos / "b.jpg").read_bytes()[:5000])
    return photos / "broken.jpg"


@pytest.fixture
def invoke(checkpoint):
    def run(*arguments, file=checkpoint):
        options = ["predict", *arguments, "--checkpoint", file]
        return CliRunner().invoke(app, [str(option) for option in options])

    return run


def only_line(result):
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_a_folder(invoke, photos):
    result = invoke(photos)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[::4] == [str(photos / name) for name in ("a [1].png", "b.jpg", "more/b.jpg")]
    for start in (0, 4, 8):
        shares, names = zip(*(line.split() for line in lines[start + 1 : start + 4]), strict=True)
        assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=0.2)
        assert set(names) == {"cat", "[red]dog", "bird"}
    assert len(invoke(photos, "--top", "1").stdout.splitlines()) == 6


def test_json_and_sizes(invoke, photos, checkpoint):
    for size, parsed in (("64", 64), ("48x80", (48, 80)), (None, None)):
        result = invoke(photos, "--json", *(["--size", size] if size else []))
        rows = json.loads(result.stdout)
        classifier = ImageClassifier.from_checkpoint(checkpoint, size=parsed)
        expected = list(classifier.classify_files([row["path"] for row in rows]))
        for row, outcome in zip(rows, expected, strict=True):
            first = outcome.predictions[0]
            assert row["predictions"][0]["name"] == first.name
            assert row["predictions"][0]["index"] == first.index
            assert row["predictions"][0]["probability"] == pytest.approx(first.probability, abs=1e-5)


def test_a_broken_file_is_named_and_skipped(invoke, photos, broken):
    assert invoke(photos).exit_code == 0
    result = invoke(photos, photos / "absent.png")
    assert result.exit_code == 1, "one of those that were named"
    skipped, absent, count = result.stderr.splitlines()
    assert skipped.startswith(f"skipped {broken}: is damaged: image file is truncated")
    assert absent == f"skipped {photos / 'absent.png'}: cannot be opened: No such file or directory"
    assert count == "2 of 5 files skipped"
    assert len(result.stdout.splitlines()) == 12
    rows = json.loads(invoke(photos, "--json").stdout)
    assert ["error" in row for row in rows] == [False, False, True, False]


def test_all_broken_fails(invoke, broken):
    result = invoke(broken)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "error: no picture could be used, of 1 tried"


def test_save_one_picture(invoke, photos, tmp_path):
    target = tmp_path / "made" / "annotated.png"
    result = invoke(photos / "b.jpg", "--save", target)
    assert result.stdout.splitlines()[-1] == f"Annotated pictures written to {target}"
    assert Image.open(target).size == (400, 300)
    assert json.loads(invoke(photos / "b.jpg", "--save", target, "--json").stdout)


def test_save_several_into_a_folder_under_different_names(invoke, photos, broken, tmp_path):
    assert invoke(photos, "--save", tmp_path / "out").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a [1].png", "b-2.jpg", "b.jpg"]
    assert Image.open(tmp_path / "out" / "b-2.jpg").size == (400, 200)


def test_originals_are_never_overwritten(invoke, photos):
    before = (photos / "b.jpg").read_bytes()
    assert "would overwrite" in only_line(invoke(photos, "--save", photos))
    assert "would overwrite" in only_line(invoke(photos / "b.jpg", "--save", photos / "more" / ".." / "b.jpg"))
    assert (photos / "b.jpg").read_bytes() == before


def test_weights_that_do_not_name_their_model(invoke, photos, checkpoint):
    file = checkpoint.with_suffix(".pth")
    assert "--model" in only_line(invoke(photos, file=file))
    assert invoke(photos, "--model", "inline_deit_tiny", file=file).exit_code == 0


def test_errors_are_one_line(invoke, photos, checkpoint, tmp_path):
    (tmp_path / "void").mkdir()
    assert "there is no picture in" in only_line(invoke(tmp_path / "void"))
    assert "No such file" in only_line(invoke(photos, file=tmp_path / "absent.safetensors"))
    assert "at least 16 pixels" in only_line(invoke(photos, "--size", "8"))
    assert "is of inline_deit_tiny, not of softmax_swin_tiny" in only_line(
        invoke(photos, "--model", "softmax_swin_tiny")
    )
    nameless = checkpoint.with_suffix(".pth")
    assert "did you mean" in only_line(invoke(photos, "--model", "inline_diet_tiny", file=nameless))
    assert "try 'cpu'" in only_line(invoke(photos, "--device", "abacus"))
    assert ".png" in only_line(invoke(photos / "b.jpg", "--save", tmp_path / "x.xyz"))
    (tmp_path / "file").touch()
    assert "choose another place" in only_line(invoke(photos, "--save", tmp_path / "file" / "out"))


def test_a_model_that_fails_is_one_line(invoke, photos, monkeypatch):
    def run_out_of_memory(*_):
        raise RuntimeError("CUDA out of memory.\nTried to allocate 9 GiB")

    monkeypatch.setattr(ImageClassifier, "_drain", run_out_of_memory)
    line = only_line(invoke(photos))
    assert "CUDA out of memory" in line
    assert "--batch-size" in line


@pytest.mark.parametrize("size", ["", "x", "64x", "0", "-64", "64x64x64", "large", "6.5", "0x64"])
def test_sizes_that_make_no_sense(invoke, photos, size):
    result = invoke(photos, "--size", size)
    assert result.exit_code == 2
    assert "--size" in result.stderr


def test_a_photograph_of_twelve_megapixels(invoke, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((4000, 3000)).save(tmp_path / "photo.jpg")
    result = invoke(tmp_path / "photo.jpg", "--save", tmp_path / "annotated.jpg")
    assert result.exit_code == 0, result.output
    assert Image.open(tmp_path / "annotated.jpg").size == (4000, 3000)


def test_a_tiled_file_that_is_too_large_is_streamed(invoke, checkpoint, tmp_path):
    from inline_attention import streamed
    from inline_attention.data.marked_slides import write_slide
    from inline_attention.data.slides import open_slide

    slide = tmp_path / "slide.tif"
    write_slide(slide, 300, (), 16, 0)
    few = ("--max-pixels", 50_000, "--json", "--top", 3)
    result = invoke(slide, *few, "--memory", "8MiB", "--save", tmp_path / "new" / "a.png")
    assert result.exit_code == 0, result.output
    assert "slide.tif: streaming 300×300 pixels, level 0 of 2" in result.stderr
    found = {item["index"]: item["probability"] for item in json.loads(result.stdout)[0]["predictions"]}
    classifier = ImageClassifier.from_checkpoint(checkpoint, device="cpu")
    with open_slide(slide) as opened:
        expected = streamed(classifier.model)(opened).softmax(-1)[0].tolist()
    assert found == pytest.approx(dict(enumerate(expected)), abs=1e-5)
    assert Image.open(tmp_path / "new" / "a.png").width >= 300

    assert "streaming 38×38 pixels, level 1 of 2" in invoke(slide, "--level", 1).stderr
    assert "expected 0 to 1, got level 5" in invoke(slide, "--level", 5).stderr
    assert "choose a level instead of a size" in invoke(slide, *few, "--size", 64).stderr
    assert "memory must be at least" in invoke(slide, *few, "--memory", "10KiB").stderr
    write_slide(tmp_path / "thin.tif", 8, (), 1, 0)
    assert "at least 16 pixels high and wide, got 8×8" in invoke(tmp_path / "thin.tif", "--level", 0).stderr
    (tmp_path / "cut.tif").write_bytes(slide.read_bytes()[:9000])
    assert "is truncated" in invoke(tmp_path / "cut.tif", "--level", 0).stderr
    assert "is truncated" in invoke(tmp_path / "cut.tif", *few).stderr
    (tmp_path / "folder").mkdir()
    slide.rename(tmp_path / "folder" / "slide.svs")
    assert "slide.svs: streaming" in invoke(tmp_path / "folder", *few).stderr
    Image.fromarray(np.zeros((300, 300, 3), np.uint8)).save(tmp_path / "a.png")
    assert "decompression bomb" in invoke(tmp_path / "a.png", *few).stderr, "the guard stays for other formats"
