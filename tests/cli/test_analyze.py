"""`inline analyze` from the outside, on the models and pictures it takes when told nothing."""

import csv
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from inline_attention import create_model
from inline_attention.analysis import scaling
from inline_attention.analysis.injectivity import key_condition
from inline_attention.analysis.probes import MixingRule
from inline_attention.analysis.scaling import ScalingPoint
from inline_attention.cli.analyze_tables import condition_table
from inline_attention.cli.main import app
from inline_attention.models.checkpoints import save_weights
from inline_attention.support.text import install_command

ARGUMENTS = {"embed_dim": 16, "num_heads": 2, "depth": 2, "patch_size": 2, "img_size": 8, "num_classes": 10}


@pytest.fixture(autouse=True)
def coarse_pictures(monkeypatch):
    pytest.importorskip("matplotlib")
    from inline_attention.support import figures

    monkeypatch.setattr(figures, "DOTS_PER_INCH", 30)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints of an InLine model and its twins for digits, as `inline train` writes them."""
    folders = []
    for kind in ("inline", "linear", "softmax"):
        folder = tmp_path_factory.mktemp(kind)
        notes = {"model": f"{kind}_deit_tiny", "model_arguments": json.dumps(ARGUMENTS), "crop_pct": "1.0"}
        names = json.dumps([str(digit) for digit in range(10)])
        model = create_model(f"{kind}_deit_tiny", **ARGUMENTS)
        save_weights(model, folder / "model.safetensors", metadata={**notes, "class_names": names})
        folders.append(folder)
    return folders


@pytest.fixture
def invoke(tmp_path):
    def run(command, *arguments):
        options = ["analyze", command, "--device", "cpu", "--output", tmp_path / "out", *arguments]
        return CliRunner().invoke(app, [str(option) for option in options])

    return run


@pytest.fixture
def trained(invoke, checkpoints):
    options = [part for folder in checkpoints for part in ("--checkpoint", folder)]
    return lambda *arguments: invoke(*arguments, *options)


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def assert_files(result, folder, *names):
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith(f"Analysis written to {folder}: ")
    assert sorted(file.name for file in folder.iterdir()) == sorted(names)


def only_error(result):
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("untrained weights")]
    return line


def test_help_names_all_analyses(invoke):
    text = CliRunner().invoke(app, ["analyze", "--help"]).output
    for command in ("injectivity", "confusion", "locality", "masking", "attention-map", "scaling"):
        assert command in text
        assert CliRunner().invoke(app, ["analyze", command, "--help"]).exit_code == 0


def test_injectivity(trained, tmp_path):
    result = trained("injectivity", "-n", 1, "--queries", 2, "--layer", 1, "--head", 0)
    out = tmp_path / "out"
    assert_files(
        result, out, "injectivity.json", "injectivity.csv", "injectivity-keys.csv", "injectivity.png", "injectivity.svg"
    )
    assert "untrained" not in result.stderr
    table = rows(out / "injectivity.csv")
    assert {row["layer"] for row in table} == {"1"}
    assert all(row["colliding"] == "2" for row in table if row["attention"] == "linear")
    keys = rows(out / "injectivity-keys.csv")
    assert [(row["model"], row["layer"]) for row in keys][:3] == [
        ("inline_deit_tiny", "0"), ("inline_deit_tiny", "1"), ("linear_deit_tiny", "0"),
    ]  # fmt: skip
    content = json.loads((out / "injectivity.json").read_text())
    assert [subject["attention"] for subject in content["subjects"]] == ["inline", "linear", "softmax"]
    assert all(subject["weights"].endswith("model.safetensors") for subject in content["subjects"])
    assert len(content["tables"]["keys"][0]["singular_values"]) == 8


@pytest.mark.parametrize(
    ("verdicts", "shown"),
    [
        ((True, True), "2 of 2"),
        ((True, False), "1 of 2"),
        ((None, None), "unknown"),
        ((False, None), "0 of 2, 1 unknown"),
    ],
)
def test_an_unknown_rank_is_not_counted_as_one_to_one(verdicts, shown):
    known = key_condition(MixingRule("subtract", "identity", 1.0), torch.randn(9, 4))
    conditions = [replace(known, injective=verdict, reason=f"it is {verdict}") for verdict in verdicts]
    table = condition_table({"m": conditions})
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["one-to-one"] == [shown]
    assert cells["because"] == [f"it is {False if False in verdicts else verdicts[0]}"]


def test_confusion_on_a_folder_with_a_broken_picture(invoke, tmp_path, checkpoints):
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("a.png", "b.png", "c.jpg"):
        pixels = np.random.default_rng(len(name)).integers(0, 255, (30, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / name)
    (photos / "broken.jpg").write_bytes(b"no picture")
    result = invoke("confusion", "-c", checkpoints[1], "--data-dir", photos, "-n", 4, "-j", 0, "--tolerance", 1)
    out = tmp_path / "out"
    names = ["confusion.json", "confusion.csv", *(f"confusion{w}.{s}" for w in ("", "-worst") for s in ("png", "svg"))]
    assert_files(result, out, *names)
    assert f"skipped {photos / 'broken.jpg'}" in result.stderr
    table = rows(out / "confusion.csv")
    assert len(table) == 3 * 2 * 2
    assert {row["image"] for row in table} == {str(photos / name) for name in ("a.png", "b.png", "c.jpg")}
    assert list(json.loads((out / "confusion.json").read_text())["settings"]["skipped"]) == [str(photos / "broken.jpg")]


def test_untrained_models_for_digits_by_default(invoke, tmp_path):
    result = invoke("locality", "-n", 1, "--sides", "3", "--layer", 0)
    assert_files(result, tmp_path / "out", "locality.json", "locality.csv", "locality.png", "locality.svg")
    assert "untrained weights: inline_deit_tiny, softmax_deit_tiny, linear_deit_tiny" in result.stderr
    table = rows(tmp_path / "out" / "locality.csv")
    assert {row["local_term"] for row in table if row["attention"] == "inline"} == {"without", "with"}
    assert {row["side"] for row in table} == {"3"}


def test_masking(trained, tmp_path):
    result = trained("masking", "-n", 4, "--sides", "3,5")
    assert_files(result, tmp_path / "out", "masking.json", "masking.csv", "masking.png", "masking.svg")
    table = rows(tmp_path / "out" / "masking.csv")
    assert [row["where"] for row in table] == (
        ["nothing", *["neighborhood", "random"] * 2] + ["nothing", "neighborhood", "random"] * 2
    )
    assert {row["images"] for row in table} == {"4"}
    assert {row["side"] for row in table} == {"0", "3"}
    assert "inline_deit_tiny: 5×5 left out" in " ".join(result.stdout.split())


def test_masking_needs_the_classes_the_model_was_trained_for(invoke, tmp_path):
    path = tmp_path / "weights.safetensors"
    arguments = ARGUMENTS | {"num_classes": 7}
    notes = {"model_arguments": json.dumps(arguments)}
    save_weights(create_model("inline_deit_tiny", **arguments), path, metadata=notes)
    assert "has 7 classes without names, digits has 10" in only_error(invoke("masking", "-c", path))


def test_attention_map_of_a_photograph(trained, tmp_path):
    photo = tmp_path / "a photo.jpg"
    Image.new("RGB", (400, 300), "red").save(photo)
    result = trained("attention-map", photo, "--token", "1,2", "--size", "8x12", "--head", 1, "--layer", -1)
    names = [
        "attention-map.json",
        "attention-map.csv",
        "attention-map-kernels.csv",
        "attention-map.png",
        "attention-map.svg",
    ]
    assert_files(result, tmp_path / "out", *names)
    table = rows(tmp_path / "out" / "attention-map.csv")
    assert len(table) == 3 * 4 * 6
    assert {(row["token_row"], row["token_column"], row["layer"]) for row in table} == {("1", "2", "1")}
    assert len(rows(tmp_path / "out" / "attention-map-kernels.csv")) == 9


def test_scaling(invoke, tmp_path, monkeypatch):
    def measured(model, *, sizes, windows, batch, device, seconds, on_progress):
        assert (model, sizes, windows, batch, str(device)) == ("inline_swin_tiny", [32, 64], [7], 2, "cpu")
        point = ScalingPoint(model, "inline", "resolution", 32, None, 2, 1.5, 0.1, 1000, 10**6)
        on_progress(point)
        return [point]

    monkeypatch.setattr(scaling, "measure_scaling", measured)
    result = invoke("scaling", "--model", "inline_swin_tiny", "--sizes", "64,32", "--windows", "7", "-b", 2)
    assert_files(result, tmp_path / "out", "scaling.json", "scaling.csv", "scaling.png", "scaling.svg")
    assert rows(tmp_path / "out" / "scaling.csv")[0]["milliseconds"] == "1.5"


def test_tables_are_written_without_matplotlib(trained, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "inline_attention.support.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = trained("locality", "-n", 1, "--sides", "3", "--layer", 0)
    assert_files(result, tmp_path / "out", "locality.json", "locality.csv")
    assert install_command("plots") in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("confusion", "--layer", "9"), "the model has 2 attention layers, got layer 9"),
        (("locality", "--head", "5"), r"has 2 heads, got head 5"),
        (("attention-map", "--token", "7,0"), "has 4×4 tokens, got row 7, column 0"),
        (("confusion", "--data-dir", "absent"), "absent does not exist"),
        (("masking", "--data-dir", "absent"), "absent does not exist"),
        (
            ("locality", "--split", "trainn"),
            "digits has no split 'trainn'; it has two, one called train or training and",
        ),
        (("attention-map", "absent.jpg"), "absent.jpg: cannot be opened"),
        (("masking", "--device", "nonsense"), "device 'nonsense' cannot be used here"),
        (("locality", "--checkpoint", "absent.safetensors"), "absent.safetensors"),
        (("locality", "--model", "inline_deit_tiny"), "got 1 models and 3 checkpoints"),
    ],
)
def test_errors_are_one_line_that_names_the_value(trained, arguments, message):
    assert message in only_error(trained(*arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("locality", "--sides", "4"), "such as 3,5,7, got '4'"),
        (("masking", "--sides", "1,3"), "such as 3,5,7"),
        (("attention-map", "--token", "3"), "such as 3,5, got '3'"),
        (("confusion", "--size", "8x8x8"), "such as 192x320, got '8x8x8'"),
        (("scaling", "--sizes", "big"), "such as 224,448, got 'big'"),
    ],
)
def test_malformed_options_are_refused(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    text = " ".join(result.stderr.replace("│", " ").split())
    assert message in text


def test_unwritable_output_is_noticed_before_measuring(tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    result = CliRunner().invoke(app, ["analyze", "confusion", "--output", str(blocker / "out")])
    assert "choose another folder with --output" in only_error(result)


def test_results_from_before_are_not_replaced_without_a_word(trained, tmp_path):
    command = ("locality", "-n", 1, "--sides", "3", "--layer", 0)
    assert "replaced" not in trained(*command).stderr
    again = trained(*command)
    assert again.exit_code == 0
    assert f"{tmp_path / 'out' / 'locality.json'} and what belongs to it will be replaced" in again.stderr


@pytest.mark.parametrize("command", ["locality", "attention-map"])
def test_results_stay_without_a_warning_if_there_is_no_checkpoint(invoke, tmp_path, command):
    earlier = tmp_path / "out" / f"{command}.json"
    earlier.parent.mkdir()
    earlier.write_text("{}")
    assert "absent" in only_error(invoke(command, "-c", "absent.safetensors"))
    assert earlier.read_text() == "{}"


def test_attention_maps_of_a_slide(invoke, checkpoints, tmp_path):
    """A tiled file above the limit is streamed; softmax models are left out."""
    pytest.importorskip("tifffile")
    from inline_attention.data.marked_slides import Mark, write_slide

    write_slide(tmp_path / "slide.tif", 300, (Mark("ring", 40, 40), Mark("cross", 250, 200)), 24, 0)
    models = [option for folder in checkpoints for option in ("--checkpoint", folder / "model.safetensors")]
    limited = ("attention-map", tmp_path / "slide.tif", "--max-pixels", 1000, "--token", "20,21", *models)
    result = invoke(*limited)
    assert result.exit_code == 0, result.output
    assert result.output.count("slide.tif: streaming 300×300 pixels through") == 2
    with (tmp_path / "out" / "attention-map.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == {"inline_deit_tiny", "linear_deit_tiny"}
    assert len(rows) == 2 * 150 * 150
    total = sum(float(row["weight"]) for row in rows if row["model"] == "inline_deit_tiny")
    assert total == pytest.approx(1, abs=0.01), "the rest is the class token's"
    assert "outside the grid of 150×150 tokens" in invoke(*limited[:-6], "--token", "150,0", *models[:2]).output
    assert "choose a --level instead of a --size" in invoke(*limited, "--size", 64).output


def test_evidence_for_classes_of_a_slide(invoke, checkpoints, tmp_path):
    pytest.importorskip("tifffile")
    from inline_attention.data.marked_slides import Mark, write_slide

    write_slide(tmp_path / "slide.tif", 300, (Mark("ring", 40, 40), Mark("cross", 250, 200)), 24, 0)
    model = ("--checkpoint", checkpoints[0] / "model.safetensors")
    command = ("attention-map", tmp_path / "slide.tif", *model, "--evidence")
    result = invoke(*command, "3", "--evidence", "7", "--level", 0)
    assert result.exit_code == 0, result.output
    assert "for class evidence" in result.output
    with (tmp_path / "out" / "attention-map-evidence.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 150 * 150
    assert {row["class"] for row in rows} == {"3", "7"}
    assert "evidence for 3, logit" in (tmp_path / "out" / "slide" / "index.html").read_text()
    assert "expected a class of inline_deit_tiny, got 'ring'; it has" in invoke(*command, "ring", "--level", 0).output
    assert "give a tiled file, with --level 0" in invoke(*command, "3").output
