"""Random and hostile files of every kind we read: one sentence at most, and nothing done to the machine."""

import hashlib
import json

import numpy as np
import pytest
import timm
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import inline_attention  # noqa: F401 - registers the models
from inline_attention.cli.main import app
from inline_attention.engine.checkpoint_format import MANIFEST, open_training_checkpoint
from inline_attention.engine.config import ConfigError, TrainConfig, check_recipe_file
from inline_attention.engine.config.reading import from_yaml
from inline_attention.models.checkpoints import CheckpointError, save_weights
from security.audit import nothing_done_outside

FUZZ = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
SMALL = {"embed_dim": 16, "num_heads": 2, "depth": 1, "patch_size": 8, "img_size": 16, "num_classes": 3}
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["../../x", "/etc/passwd", "hf-hub:a/b", "file:///etc/passwd", "http://127.0.0.1:9/", "\x1b[2J", "\udcff",
         "inline_deit_tiny", "softmax_swin_tiny", "resnet18", "detection", "segmentation", "auto", ".", "",
         "__class__", "os.system"]
    ),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from([0, 1, -1, 2**31, 10**9, 10**30, -(10**30)]),
        st.integers(-3, 300),
        st.floats(),
        TEXTS,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
# What timm would obey; "pretrained" makes it look at the others.
OBEYED = {
    "pretrained": True,
    "pretrained_cfg": {"url": "http://127.0.0.1:9/weights.pth"},
    "pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/weights.pth"},
    "cache_dir": "/tmp/outside-of-the-folder",
    "checkpoint_path": "/etc/passwd",
    "features_only": True,
    "device": "cuda",
}
ARGUMENTS = st.dictionaries(st.sampled_from([*SMALL, "attention_options", "depths", "in_chans"]), VALUES, max_size=3)
DESCRIPTIONS = st.builds(
    lambda changes, obeyed: SMALL | changes | {key: OBEYED[key] for key in obeyed},
    ARGUMENTS,
    st.sets(st.sampled_from(list(OBEYED))).map(lambda keys: keys | {"pretrained"} if keys else keys),
)
OPTIONS = st.dictionaries(
    st.sampled_from(["backbone", "backbone_arguments", "head", "width", "crop", "scale"]), VALUES, max_size=5
)


def dict_of(pair):
    return {pair[0]: pair[1]}


NOTE = st.one_of(
    DESCRIPTIONS.map(lambda value: {"model_arguments": json.dumps(value)}),
    VALUES.map(lambda value: {"model_arguments": json.dumps(value)}),
    TEXTS.map(lambda value: {"model": value}),
    VALUES.map(lambda value: {"class_names": json.dumps(value)}),
    VALUES.map(lambda value: {"crop_pct": json.dumps(value)}),
    VALUES.map(lambda value: {"position_grids": json.dumps(value)}),
    st.tuples(TEXTS, OPTIONS).map(lambda pair: {"task": pair[0], "task_options": json.dumps(pair[1])}),
    st.tuples(st.sampled_from(["model_arguments", "class_names", "crop_pct", "task_options"]), TEXTS).map(dict_of),
)
NOTES = st.lists(NOTE, min_size=1, max_size=2).map(lambda notes: {k: v for note in notes for k, v in note.items()})


def _utf8(text):
    return text.encode("utf-8", "replace").decode()


def command_ends_with_a_sentence(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 1, 2), result.output
    assert "if this is a bug in inline-attention" not in result.output, result.output
    assert "\x1b" not in result.output
    return result


@pytest.fixture(scope="module")
def model():
    return timm.create_model("inline_deit_tiny", **SMALL)


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(np.full((20, 20, 3), 90, np.uint8)).save(path)
    return path


def hostile(*arguments):
    return {"model_arguments": json.dumps(SMALL | {key: OBEYED[key] for key in arguments})}


@FUZZ
@given(notes=NOTES)
@example(notes=hostile("pretrained", "pretrained_cfg_overlay", "cache_dir"))
@example(notes=hostile("pretrained", "pretrained_cfg", "cache_dir"))
@example(notes=hostile("checkpoint_path"))
@example(notes=hostile("features_only"))
def test_metadata_of_weights(notes, model, photo, tmp_path):
    path = tmp_path / "weights.safetensors"
    described = {"model": "inline_deit_tiny", "model_arguments": json.dumps(SMALL)}
    save_weights(model, path, metadata={key: _utf8(value) for key, value in (described | notes).items()})
    with nothing_done_outside(tmp_path):
        command_ends_with_a_sentence("predict", photo, "-c", path, "--device", "cpu")


@FUZZ
@given(changes=st.dictionaries(TEXTS | st.sampled_from(["epoch", "step", "files", "metric", "format"]), VALUES))
def test_manifests_with_a_valid_checksum(changes, tmp_path):
    content = {"format": 1, "model": "", "sequence": 1, "step": 1, "epoch": 0, "metric": None, "files": {}} | changes
    text = json.dumps(content)
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")
    with nothing_done_outside(tmp_path):
        try:
            checkpoint = open_training_checkpoint(tmp_path)
            checkpoint.verify()
        except CheckpointError as error:
            assert str(error)  # noqa: PT017 - a checkpoint may also be right


SECTIONS = st.sampled_from(list(TrainConfig.__dataclass_fields__))
SETTINGS = st.sampled_from(
    ["output", "resume", "name", "arguments", "dir", "dataset", "lr", "epochs", "wandb", "device"]
)


@FUZZ
@given(
    content=st.dictionaries(
        SECTIONS | TEXTS, st.dictionaries(SETTINGS | TEXTS, VALUES, max_size=4) | VALUES, max_size=4
    )
)
def test_recipes(content, tmp_path):
    try:
        text = yaml.safe_dump(content)
    except (yaml.YAMLError, UnicodeEncodeError):
        text = json.dumps(content)
    with nothing_done_outside(tmp_path):
        try:
            check_recipe_file(from_yaml(text), [], "recipe.yaml")
        except ConfigError as error:
            assert str(error)  # noqa: PT017 - a recipe may also be right


@FUZZ
@given(text=st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_recipes_of_any_text(text, tmp_path):
    with nothing_done_outside(tmp_path):
        try:
            from_yaml(text)
        except ConfigError as error:
            assert str(error)  # noqa: PT017


COCO = st.fixed_dictionaries(
    {
        "images": st.lists(
            st.fixed_dictionaries({"id": VALUES, "file_name": VALUES, "width": VALUES, "height": VALUES}) | VALUES,
            max_size=2,
        ),
        "annotations": st.lists(
            st.fixed_dictionaries(
                {"id": VALUES, "image_id": VALUES, "category_id": VALUES, "bbox": VALUES, "segmentation": VALUES,
                 "area": VALUES}
            )
            | VALUES,
            max_size=2,
        ),
        "categories": st.lists(st.fixed_dictionaries({"id": VALUES, "name": VALUES}) | VALUES, max_size=2),
    }
)  # fmt: skip


@FUZZ
@given(content=COCO | VALUES)
def test_coco_annotations(content, photo, tmp_path):
    (tmp_path / "annotations").mkdir(exist_ok=True)
    for split in ("train", "val"):
        folder = tmp_path / split
        folder.mkdir(exist_ok=True)
        (folder / "photo.png").write_bytes(photo.read_bytes())
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    with nothing_done_outside(tmp_path):
        command_ends_with_a_sentence("data", "check", tmp_path, "--task", "detection")
