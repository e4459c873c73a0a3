"""`inline linearize` and `inline analyze linearize` from the outside."""

import csv
import json
import shutil

import pytest
import timm
import torch
from typer.testing import CliRunner

from inline_attention.benchmark.linearized import SpeedCell
from inline_attention.cli import linearize as command
from inline_attention.cli.main import app
from inline_attention.cli.train import _settings_of_start as settings_of_start
from inline_attention.data.datasets import digits
from inline_attention.models.checkpoints import save_weights
from inline_attention.models.reading import CheckpointError, find_weights, open_checkpoint

NAME = "vit_tiny_patch16_224"
ARGUMENTS = {"patch_size": 2, "embed_dim": 16, "num_heads": 2, "depth": 2}
DIGITS = [
    "--dataset", "digits", "--epochs", "1", "-b", "256", "--amp", "off", "--hflip", "0", "--set", "data.in_memory=true",
    "--set", "augmentation.crop=padded", "--scale", "0.08", "1", "--color-jitter", "0", "--set",
    "logging.tensorboard=false", "--set", "data.crop_pct=1.0", "--device", "cpu",
]  # fmt: skip


def write_teacher(path, **metadata):
    torch.manual_seed(0)
    model = timm.create_model(NAME, **ARGUMENTS, img_size=8, num_classes=10)
    arguments = {**ARGUMENTS, "img_size": 8, "num_classes": 10}
    notes = {"model": NAME, "model_arguments": json.dumps(arguments), "class_names": json.dumps(list("0123456789"))}
    save_weights(model, path, metadata={**notes, **metadata})
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


@pytest.fixture
def pictures(tmp_path):
    """Twenty digits in two folders that are no classes."""
    source = digits("train")
    for index in range(20):
        path = tmp_path / "pictures" / ("new" if index % 3 else "old") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        source.load(index).save(path)
    return tmp_path / "pictures"


@pytest.fixture
def invoke(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(app, ["linearize", *map(str, arguments), "--output", str(tmp_path / "out")])

    return run


def test_one_table_and_a_file_that_is_a_model(invoke, teacher, tmp_path, monkeypatch):
    from inline_attention.benchmark import linearized

    monkeypatch.setattr(linearized, "SIZES", (8, 16))
    monkeypatch.setattr(linearized.measure_speed, "__kwdefaults__", {
        **linearized.measure_speed.__kwdefaults__, "sizes": (8, 16), "seconds": 0.0
    })  # fmt: skip
    result = invoke(teacher, *DIGITS, "--experiment", "first", "--keep-softmax", "0,")
    assert result.exit_code == 0, result.output
    for part in ("softmax teacher", "linearized", "top-1 %", "parameters", "images/s at 8²", "memory at 16², MiB"):
        assert part in result.output
    written = json.loads((tmp_path / "out" / "first" / "linearize.json").read_text())
    assert set(written["figures"]) == {"teacher", "converted", "linearized"}
    assert len(written["speed"]) == 4
    assert written["environment"]["torch"]
    file = open_checkpoint(written["weights"])
    assert json.loads(file.metadata["conversion"])["keep_softmax"] == [0]
    again = invoke(teacher, *DIGITS, "--experiment", "first", "--no-speed")
    assert again.exit_code == 1
    assert "holds checkpoints already" in again.output


@pytest.mark.parametrize(
    ("name", "arguments", "size"),
    [
        ("softmax_deit_tiny", {"embed_dim": 16, "num_heads": 2, "depth": 2, "patch_size": 2}, 8),
        pytest.param("softmax_pvt_tiny", {"depths": [1, 1, 1, 1]}, 32, marks=pytest.mark.slow),
        pytest.param(
            *("softmax_swin_tiny", {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2]}, 32),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["deit", "pvt", "swin"],
)
def test_a_softmax_run_of_this_library_is_a_teacher(invoke, name, arguments, size, tmp_path):
    runner = CliRunner()
    model = ["--model", name, "--img-size", size, "--set", f"model.arguments={json.dumps(arguments)}"]
    place = ["--output", tmp_path, "--experiment", "softmax", "--set", "logging.tensorboard=false", "--device", "cpu"]
    trained = runner.invoke(app, [str(item) for item in ("train", "digits", *model, "--updates", 2, *place)])
    assert trained.exit_code == 0, trained.output
    options = [*DIGITS, "--no-speed", "--experiment", "inline", "--updates", "2", "--keep-softmax", "1,"]
    if "swin" in name:
        assert "drop_position_bias=True" in invoke(tmp_path / "softmax", *options).output
        options += ["--set", "model.conversion_options.drop_position_bias=true"]
    result = invoke(tmp_path / "softmax", *options)
    assert result.exit_code == 0, result.output
    weights = json.loads((tmp_path / "out" / "inline" / "linearize.json").read_text())["weights"]
    assert "distillation: 2 updates" in result.output
    last = result.output.splitlines()[-1]
    assert last == f"Weights written to {weights}: `inline predict PICTURES -c {weights}` uses them"
    notes = open_checkpoint(weights).metadata
    assert (notes["model"], json.loads(notes["conversion"])["keep_softmax"]) == (name, [1])
    picture = tmp_path / "digit.png"
    digits("train").load(0).save(picture)
    survey = tmp_path / "survey"
    surveyed = ["-c", tmp_path / "softmax", "--dataset", "digits", "-j", 0, "-n", 8, "-o", survey]
    uses = [
        ("eval", "-c", weights, "--dataset", "digits", "--device", "cpu"),
        ("predict", picture, "-c", weights, "--device", "cpu"),
        ("train", "digits", *model, "--initial-checkpoint", weights, "--updates", 1, *place[:2], *place[4:]),
        ("analyze", "linearize", *surveyed, "--device", "cpu"),
    ]
    for use in uses[: 3 if "swin" in name else 4]:
        done = runner.invoke(app, [str(item) for item in use])
        assert done.exit_code == 0, done.output
    if "swin" not in name:
        rows = (survey / "linearize.csv").read_text().splitlines()
        assert len(rows) == 1 + len(arguments.get("depths", "12"))
        assert "; at most 10 % is lost without training" in done.stderr


def test_pictures_without_classes(invoke, teacher, pictures, tmp_path):
    options = [
        "--features",
        "--data-dir",
        pictures,
        "--epochs",
        "1",
        "-b",
        "9",
        "--amp",
        "off",
        "--no-speed",
        "-j",
        "0",
    ]
    result = invoke(teacher, *options, "--device", "cpu", "--experiment", "features", "--keep-softmax", "1")
    assert result.exit_code == 0, result.output
    assert "blocks that keep softmax:" in result.output
    assert "tokens, R² %" in result.output
    assert "classes (taken from the data)" not in " ".join(result.output.split())
    written = json.loads((tmp_path / "out" / "features" / "linearize.json").read_text())
    assert set(written["figures"]) == {"converted", "linearized"}
    assert len(json.loads(open_checkpoint(written["weights"]).metadata["conversion"])["keep_softmax"]) == 1


def test_a_resumed_run_keeps_the_blocks_it_has_chosen(invoke, teacher, monkeypatch):
    options = [*DIGITS, "--no-speed", "--experiment", "kept", "--keep-softmax", "1"]
    assert invoke(teacher, *options, "--updates", "1").exit_code == 0
    monkeypatch.setattr("inline_attention.analysis.linearize.blocks_that_lose_most", None)  # not asked again
    result = invoke(teacher, *options, "--updates", "2", "--resume", "auto")
    assert result.exit_code == 0, result.output
    assert "measuring which blocks" not in result.output


def test_classes_are_checked_before_blocks_are_measured(invoke, teacher, pictures, monkeypatch):
    monkeypatch.setattr("inline_attention.analysis.linearize.blocks_that_lose_most", None)
    for split in ("train", "val"):
        shutil.copytree(pictures, pictures.parent / "two" / split)
    result = invoke(teacher, "--data-dir", pictures.parent / "two", "--keep-softmax", "1", "--device", "cpu")
    assert "has 10 classes, the data 2 classes" in " ".join(result.output.replace("│", " ").split())


def test_a_loss_of_accuracy_is_said(invoke, teacher):
    result = invoke(teacher, *DIGITS, "--no-speed", "--lr", "10", "--opt", "sgd", "--updates", "2")
    assert result.exit_code == 0, result.output
    assert "is lower than without training" in " ".join(result.output.split())


def test_a_backbone_gets_a_head_by_finetune(invoke, pictures, tmp_path):
    path = tmp_path / "backbone.safetensors"
    model = timm.create_model(NAME, **ARGUMENTS, img_size=8, num_classes=0)
    notes = {"model": NAME, "model_arguments": json.dumps({**ARGUMENTS, "img_size": 8, "num_classes": 0})}
    save_weights(model, path, metadata=notes)
    result = invoke(path, "--features", "--data-dir", pictures, "--updates", "1", "-b", "9", "--no-speed", "-j", "0")
    assert result.exit_code == 0, result.output
    assert "`inline train finetune --initial-checkpoint" in " ".join(result.output.split())


def test_dense_recipes_take_the_arguments_of_the_model_that_is_named(teacher):
    start = f"model.initial_checkpoint={teacher}"
    assert settings_of_start("scenes_segmentation", [start]) == []
    named = settings_of_start("scenes_segmentation", [f"model.name={NAME}", start])
    assert [json.loads(text.removeprefix("model.arguments=")) for text in named] == [ARGUMENTS]
    assert settings_of_start("scenes_segmentation", [f"model.name={NAME}", "model.arguments={}", start]) == []
    assert settings_of_start("scenes_segmentation", ["model.name=vit_small_patch16_224", start]) == []


def test_a_run_knows_its_data(invoke, tmp_path):
    model = ["--model", NAME, "--set", "model.arguments={patch_size: 2, embed_dim: 16, num_heads: 1, depth: 1}"]
    where = ["--output", str(tmp_path), "--experiment", "run", "--device", "cpu"]
    words = ["train", "digits", *model, "--set", "model.drop_path=null", "--epochs", "1", *where]
    assert CliRunner().invoke(app, words).exit_code == 0
    result = invoke(tmp_path / "run", "--updates", "1", "--no-speed", "--device", "cpu", "-j", "0")
    assert result.exit_code == 0, result.output
    assert "top-1 %" in result.output


@pytest.mark.parametrize(("text", "kept"), [("2", 2), ("0", 0), ("4,8", [4, 8]), ("8, 4", [4, 8]), ("4,", [4])])
def test_one_number_counts_blocks_and_a_list_names_them(text, kept):
    assert command.parse_kept(text) == kept


def test_slow_models_have_a_speed():
    cell = SpeedCell("teacher", 2048, 1, images_per_second=0.0341, peak_bytes=2**21)
    assert [command._cell(cell, kind) for kind in ("speed", "memory")] == ["0.034", "2"]


def test_broken_pictures_are_named(invoke, teacher, pictures):
    for path in pictures.rglob("*.png"):
        path.write_bytes(b"no picture")
    result = invoke(teacher, "--features", "--data-dir", pictures, "--no-speed", "--device", "cpu", "-b", "4")
    assert result.exit_code == 1
    assert "can be read" in result.output
    assert "is damaged or no image" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["vit_tiny_patch16_22", "--data-dir", "x"], "did you mean vit_tiny_patch16_224"),
        (["TEACHER", "--keep-softmax", "two"], "expected how many blocks"),
        (["TEACHER", "--keep-softmax", ","], "expected how many blocks"),
        (["TEACHER", "--keep-softmax", "7", *DIGITS], "there are 2; give less, or name blocks from 0 to 1, such as"),
        (["TEACHER", "--keep-softmax", "7,", *DIGITS], "keep_softmax must have whole numbers"),
        (["TEACHER", "--size", "big"], "expected pixels"),
        (["TEACHER"], "expected the folder of the data"),
        (["TEACHER", "--epoch", "1"], "did you mean --epochs"),
    ],
)
def test_bad_input_is_named(invoke, teacher, arguments, text):
    result = invoke(*(teacher if argument == "TEACHER" else argument for argument in arguments))
    assert result.exit_code != 0
    assert text in " ".join(result.output.replace("│", " ").split()), result.output


def test_weights_without_a_name_need_one(invoke, tmp_path):
    path = tmp_path / "plain.pth"
    torch.save(timm.create_model("resnet10t", num_classes=10).state_dict(), path)
    result = invoke(path, *DIGITS)
    assert "does not say which model it is of; give its name with --model" in result.output
    result = invoke(path, *DIGITS, "--model", "resnet10t")
    assert result.exit_code == 1
    assert "found no attention to convert in ResNet" in result.output


def test_bare_weights_are_of_the_model_that_the_settings_describe(invoke, teacher, pictures, tmp_path):
    path = tmp_path / "plain.pth"
    torch.save(dict(open_checkpoint(teacher).weights), path)
    model = ["--model", NAME, "--img-size", 8, "--set", f"model.arguments={json.dumps(ARGUMENTS)}"]
    options = ["--data-dir", pictures, "--updates", 1, "-b", 9, "--amp", "off", "--no-speed", "-j", 0]
    size = ["--set", "distillation.teacher_size=8"]  # bare weights do not say
    result = invoke(path, "--features", *model, *size, *options, "--device", "cpu", "--keep-softmax", 1)
    assert result.exit_code == 0, result.output
    assert "blocks that keep softmax:" in result.output


def test_too_many_blocks_to_keep_are_refused_before_pictures_are_read(invoke, teacher, monkeypatch):
    from inline_attention.analysis import linearize as survey

    monkeypatch.setattr(survey, "survey_linearize", lambda *_: pytest.fail("pictures were read"))
    result = invoke(teacher, *DIGITS, "--keep-softmax", 2)
    assert (result.exit_code, "there are 2; give less" in " ".join(result.output.split())) == (1, True)


def test_pretrained_weights_are_asked_of_timm(tmp_path, monkeypatch):
    from inline_attention.engine import linearize as engine

    def fetch(name, path):
        path.parent.mkdir(parents=True)
        write_teacher(path, model=name)

    monkeypatch.setattr(engine, "fetch_teacher", fetch)
    config = command.read_linearize_settings(f"{NAME}.augreg_in21k", [f"run.output={tmp_path}"], features=False)
    assert config.model.name == f"{NAME}.augreg_in21k"
    assert config.model.initial_checkpoint == str(tmp_path / f"{NAME}.augreg_in21k" / "teacher.safetensors")
    assert dict(config.model.arguments) == ARGUMENTS
    given = ["model.initial_checkpoint=x", f"run.output={tmp_path}"]
    with pytest.raises(CheckpointError, match="x cannot be opened"):
        command.read_linearize_settings(NAME, given, features=False)


def test_a_folder_of_transformers_is_a_teacher(invoke, pictures, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, image_size=28, patch_size=14))
    model.save_pretrained(tmp_path / "dinov2")
    preprocessor = {"image_mean": [0.2, 0.3, 0.4], "image_std": [0.5, 0.5, 0.5]}
    (tmp_path / "dinov2" / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    options = ["--features", "--data-dir", pictures, "--epochs", 1, "-b", 9, "--amp", "off", "--no-speed", "-j", 0]
    result = invoke(tmp_path / "dinov2", *options, "--device", "cpu", "--size", 42)
    assert result.exit_code == 0, result.output
    assert "other classes" not in " ".join(result.output.split())
    notes = open_checkpoint(find_weights(tmp_path / "out" / "dinov2")).metadata
    assert json.loads(notes["mean"]) == [0.2, 0.3, 0.4]
    assert json.loads(notes["conversion"])["options"] == {"softmax_prefix": True, "prefix_gain": True}
    assert json.loads(notes["model_arguments"])["img_size"] == [42, 42]


def test_blocks_are_analyzed(teacher, tmp_path):
    pytest.importorskip("matplotlib")
    options = ["analyze", "linearize", "-c", str(teacher), "--device", "cpu", "-n", "6", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "What each block loses" in result.output
    with (tmp_path / "linearize.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["block"] for row in rows] == ["0", "1"]
    assert all(float(row["top1_alone"]) >= 0 for row in rows)
    assert (tmp_path / "linearize.png").exists()
    written = json.loads((tmp_path / "linearize.json").read_text())
    assert list(written["settings"]["keep_softmax"]) == [NAME]


def test_the_figure_shows_the_loss_that_counts_as_free(teacher, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from inline_attention.support.figures import Chart

    small_print = []
    monkeypatch.setattr(Chart, "save", lambda *_, **words: small_print.append(words["small_print"]) or [])
    options = ["-c", str(teacher), "--device", "cpu", "-n", "2", "-o", str(tmp_path), "--free", "40"]
    result = CliRunner().invoke(app, ["analyze", "linearize", *options])
    assert result.exit_code == 0, result.output
    assert "dashed: 40 %." in small_print[0]


def test_an_untrained_model_is_analyzed_on_digits(tmp_path):
    result = CliRunner().invoke(app, ["analyze", "linearize", "--device", "cpu", "-n", "2", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "untrained weights" in result.output
