"""Names of files and classes, and metadata, are data: nothing in them controls the terminal or breaks the output."""

import ast
import json
import os
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from cli.processes import on_a_terminal, run_command
from inline_attention import create_model
from inline_attention.cli import printing
from inline_attention.cli.main import app
from inline_attention.models.checkpoints import save_weights

NAMES = {
    "escape": b"red \x1b[31m.png",
    "C1 control": "window \x9b2J.png".encode(),
    "not UTF-8": b"caf\xe9 \xff.png",
    "markup": b"[red]a[link=file:etc].png",
    "right to left": "abc\u202egnp.png".encode(),
    "line break": b"two\nlines.png",
    "blanks and quotes": b" 'a' \"b\" #2 ~.png",
}
CLASSES = ["\x1b]0;owned\x07cat", "[red]dog[/]", "b\u009b31mird\n99.9%  forged"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    arguments = {"depth": 1, "embed_dim": 16, "num_heads": 2, "img_size": 32}
    notes = {"model_arguments": json.dumps(arguments), "class_names": json.dumps(CLASSES)}
    save_weights(create_model("inline_deit_tiny", num_classes=3, **arguments), path, metadata=notes)
    return path


@pytest.fixture(params=NAMES.values(), ids=NAMES)
def photo(request, tmp_path):
    path = tmp_path / os.fsdecode(request.param)
    with open(path, "wb") as file:
        Image.new("RGB", (40, 40), "red").save(file, "PNG")
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_harmless(text):
    assert all(character.isprintable() or character == "\n" for character in text), ascii(text)


def test_predict(photo, checkpoint, tmp_path):
    result = invoke("predict", photo, tmp_path / "absent \x1b[2J.png", "-c", checkpoint, "--top", 3)
    assert result.exit_code == 1
    assert_harmless(result.stdout_bytes.decode() + result.stderr)
    assert "absent \\x1b[2J.png" in result.stderr
    assert "[red]dog[/]" in result.stdout
    assert "\\x1b]0;owned\\x07cat" in result.stdout
    assert len(result.stdout.splitlines()) == 1 + len(CLASSES), "a name must not start a line of its own"


def test_predict_as_json(photo, checkpoint):
    result = invoke("predict", photo, "-c", checkpoint, "--top", 3, "--json")
    assert result.exit_code == 0, result.output
    text = result.stdout_bytes.decode()  # valid UTF-8
    assert_harmless(text)
    (row,) = json.loads(text)
    assert os.fsencode(row["path"]) == os.fsencode(photo), "programs get the name itself"
    assert {prediction["name"] for prediction in row["predictions"]} == set(CLASSES)


def test_a_pipe_and_a_missing_file_do_not_stop_the_others(checkpoint, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    Image.new("RGB", (40, 40)).save(tmp_path / "z.png")
    too_long = tmp_path / ("x" * 300 + ".png")
    photos = [tmp_path / "absent.png", tmp_path / "pipe.png", too_long, tmp_path / "z.png"]
    done = run_command("predict", *photos, "-c", checkpoint, "--json")
    assert done.returncode == 1
    rows = json.loads(done.stdout)
    assert ["error" in row for row in rows] == [True, True, True, False]
    assert "pipe.png: " in done.stderr
    assert "3 of 4 files skipped" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("report", "{name}"),
        ("report", ".", "--ablation", "{name}"),
        ("train", "{name}.yaml"),
        ("train", "digits", "--model", "{name}"),
        ("train", "digits", "--{name}"),
        ("train", "digits", "--set", "{name}=1"),
        ("ablate", "{name}", "--axis", "heads"),
        ("eval", "-c", "{name}"),
        ("convert", "{name}", "--model", "inline_deit_tiny", "-o", "{name}.safetensors"),
        ("models", "{name}"),
        ("recipes", "show", "{name}"),
        ("data", "check", "{name}", "--task", "detection"),
        ("data", "check", "{name}", "--task", "segmentation"),
        ("analyze", "locality", "-c", "{name}"),
        ("analyze", "attention-map", "{name}"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["caf\udce9\x1b[31m", "[red]bold[/]"], ids=["bytes", "markup"])
def test_errors_of_every_command(command, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*(word.format(name=name) for word in command))
    assert result.exit_code in (1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert_harmless(result.output_bytes.decode())


def test_experiments_are_names_of_folders(tmp_path, monkeypatch):
    """Whatever a name is made of, a run either starts in its folder or is refused in a sentence."""
    monkeypatch.chdir(tmp_path)
    for name in ("caf\udce9", "a #2", "'quoted'", "~", "two\nlines", " blank ", "[red]", "\x1b[31m"):
        small = ["--epochs", 1, "--set", "training.updates=1", "--set", "logging.tensorboard=false", "--output", "runs"]
        result = invoke("train", "digits", "--experiment", name, *small)
        assert result.exit_code in (0, 1), result.output
        assert isinstance(result.exception, SystemExit | None)
        assert_harmless(result.output_bytes.decode())
        if result.exit_code == 0:
            assert (tmp_path / "runs" / name / "summary.csv").exists(), name


@pytest.mark.parametrize(
    "arguments",
    [
        ("models", "nonsense"),
        ("nonsense",),
        ("predict",),
        ("train", "digits", "--amp", "x"),
        ("recipes", "show", "x"),
    ],
    ids=" ".join,
)
def test_no_color_holds_for_errors(arguments):
    code, output = on_a_terminal(*arguments, NO_COLOR="1")
    assert code != 0
    colors = re.findall(rb"\x1b\[[0-9;]*(?:3[0-9]|4[0-9]|9[0-9]|10[0-7])[0-9;]*m", output)
    assert not colors, output


def test_errors_have_color_on_a_terminal():
    assert b"\x1b[31merror: there is no recipe" in on_a_terminal("recipes", "show", "x")[1]


def test_only_one_module_prints():
    """What is printed elsewhere would not be escaped."""
    folder = Path(printing.__file__).parent
    for file in folder.glob("*.py"):
        if file.name == "printing.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                forbidden = ("print", "typer.echo", "typer.secho", "Console", "sys.stdout.write", "sys.stderr.write")
                assert called not in forbidden, f"{file.name}:{node.lineno} calls {called}"
