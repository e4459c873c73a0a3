"""A stranger's `config.json` describes an architecture through the one door, and nothing else."""

import json

import pytest
import timm
import torch

import inline_attention
from inline_attention.models.checkpoints import CheckpointError, save_weights
from inline_attention.models.hub import save_pretrained
from inline_attention.tasks.classification.prediction import ImageClassifier
from security.audit import nothing_done_outside
from security.test_door import OBEYED_BY_TIMM, SMALL


@pytest.fixture
def folder(tmp_path):
    """A folder as timm writes it: all that describes the model is in `config.json`."""
    path = tmp_path / "model"
    timm.models.save_for_hf(
        inline_attention.create_model("inline_deit_tiny", **SMALL), str(path), safe_serialization=True
    )
    return path


def change(folder, **entries):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key, value in entries.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("argument", OBEYED_BY_TIMM)
def test_arguments_that_timm_would_obey(folder, argument):
    change(folder, model_args={argument: OBEYED_BY_TIMM[argument]})
    with nothing_done_outside(folder):
        with pytest.raises(CheckpointError, match=argument):
            inline_attention.create_model(f"local-dir:{folder}", pretrained=True)
        with pytest.raises(CheckpointError, match=argument):
            ImageClassifier.from_checkpoint(folder)


@pytest.mark.parametrize("argument", ["attention", "features_only", "depth", "model_cfg", "kwargs_filter"])
def test_timms_own_reader_is_checked_too(folder, argument):
    change(folder, model_args={argument: 10**6})
    with nothing_done_outside(folder), pytest.raises((ValueError, TypeError), match=argument):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_addresses_and_paths_are_not_followed(folder, tmp_path):
    secret = tmp_path / "secret.pth"
    torch.save({"head.weight": torch.ones(3, 16)}, secret)
    addresses = {"url": "http://127.0.0.1:9/x", "file": str(secret), "hf_hub_id": "a/b", "hf_hub_filename": "../x"}
    change(folder, pretrained_cfg={**addresses, "custom_load": True, "state_dict": {"x": 1}, "source": "hf-hub"})
    with nothing_done_outside(folder):
        for create in (inline_attention.create_model, timm.create_model):
            model = create(f"local-dir:{folder}", pretrained=True)
            assert not torch.equal(model.head.weight, torch.ones(3, 16))
        ImageClassifier.from_checkpoint(folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"architecture": "hf-hub:a/b"},
        {"architecture": "local-dir:/tmp"},
        {"architecture": "../x"},
        {"architecture": 3},
        {"architecture": None},
        {"model_args": [1]},
        {"model_args": {"depth": 10**9}},
        {"model_args": {"img_size": [10**6, 10**6]}},
        {"num_classes": 10**12, "model_args": {"num_classes": 10**12}},
        {"pretrained_cfg": "x"},
        {"pretrained_cfg": {"mean": "os.system"}},
        {"pretrained_cfg": {"mean": [1e300, 0, 0]}},
        {"pretrained_cfg": {"std": [0, 0, 0]}},
        {"pretrained_cfg": {"interpolation": "../../x"}},
        {"pretrained_cfg": {"crop_pct": 1e-9}},
        {"label_names": [["a"]]},
        {"label_names": 5},
    ],
    ids=str,
)
def test_hostile_entries_give_one_sentence(folder, entries):
    change(folder, **entries)
    with nothing_done_outside(folder), pytest.raises(CheckpointError) as caught:
        ImageClassifier.from_checkpoint(folder)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("create", [inline_attention.create_model, timm.create_model])
def test_a_head_that_does_not_fit_is_not_left_random(folder, create, tmp_path):
    change(folder, num_classes=7, model_args={"num_classes": 7})
    with pytest.raises((CheckpointError, RuntimeError), match=r"head\.weight"):
        create(f"local-dir:{folder}", pretrained=True)
    vit = timm.create_model("vit_tiny_patch16_224", embed_dim=16, depth=1, num_heads=2, num_classes=3, img_size=32)
    inline_attention.convert_attention(vit)
    save_pretrained(vit, tmp_path / "converted")
    weights = tmp_path / "converted" / "model.safetensors"
    save_weights(vit, weights, metadata={"model_arguments": json.dumps({**vit._model_args, "num_classes": 7})})
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        create(f"local-dir:{tmp_path / 'converted'}", pretrained=True)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", '{"architecture": ' + "9" * 5000 + "}", "\xff\xfe"])
def test_damaged_configurations(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        inline_attention.create_model(f"local-dir:{folder}")


def test_pickled_code_is_refused(folder):
    (folder / "model.safetensors").unlink()

    class Evil:
        def __reduce__(self):
            return print, ("run",)

    torch.save({"head.weight": Evil()}, folder / "pytorch_model.bin")
    for create in (inline_attention.create_model, timm.create_model):
        with pytest.raises(CheckpointError, match=r"builtins\.print"):
            create(f"local-dir:{folder}", pretrained=True)


@pytest.mark.parametrize("name", ["hf-hub:../x", "hf-hub:", "hf-hub:a/b/c", "hf-hub:http://127.0.0.1/x"])
def test_names_of_repositories(name):
    with pytest.raises(CheckpointError, match="such as hf-hub:USER/NAME"):
        inline_attention.create_model(name, pretrained=True)


def test_an_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match="folder without"):
        inline_attention.create_model(f"local-dir:{tmp_path}")
