"""A converted model is a model: its files say what was converted, and all that reads them builds it again."""

import json

import pytest
import timm
import torch

from inline_attention import InLineAttention, LinearAttention, convert_attention, load_checkpoint
from inline_attention.analysis.subjects import trained_subject
from inline_attention.models.checkpoints import CheckpointError, model_metadata, open_checkpoint, save_weights
from inline_attention.models.described import (
    Conversion,
    ModelDescriptionError,
    create_described_model,
    parse_conversion,
    read_description,
)
from inline_attention.tasks.classification.prediction import ImageClassifier

NAME = "vit_tiny_patch16_224"
SMALL = {"embed_dim": 24, "num_heads": 2, "depth": 3, "patch_size": 8, "img_size": 32, "num_classes": 3}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def converted_model(**arguments):
    torch.manual_seed(0)
    model = timm.create_model(NAME, **SMALL)
    convert_attention(model, **arguments)
    with torch.no_grad():  # a local term that matters
        for name, parameter in model.named_parameters():
            if "residual" in name:
                parameter.normal_(std=0.1)
    return model.eval()


def save(model, folder, **notes):
    path = folder / "model.safetensors"
    save_weights(model, path, metadata={"model": NAME, "model_arguments": json.dumps(SMALL), **notes})
    return path


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ({}, [InLineAttention] * 3),
        ({"keep_softmax": [-1]}, [InLineAttention, InLineAttention, timm.layers.Attention]),
        ({"attention": LinearAttention, "keep_softmax": (0,)}, [timm.layers.Attention, *[LinearAttention] * 2]),
        ({"local_residual": False, "num_prefix_tokens": 1}, [InLineAttention] * 3),
        ({"feature_map": "exp", "normalization": "divide"}, [InLineAttention] * 3),
    ],
)
def test_a_file_is_built_again_as_it_was(tmp_path, arguments, kinds):
    model = converted_model(**arguments)
    path = save(model, tmp_path)
    for built in (ImageClassifier.from_checkpoint(path).model, trained_subject(path).model):
        assert [type(block.attn) for block in built.blocks] == kinds
        assert torch.equal(built(IMAGES), model(IMAGES))
        assert model_metadata(built) == model_metadata(model)  # and can be saved again


def test_another_name_of_the_model_keeps_the_conversion(tmp_path):
    path = save(converted_model(keep_softmax=[1]), tmp_path)
    assert read_description(open_checkpoint(path), "vit_small_patch16_224").conversion == Conversion("inline", (1,))


def test_features_only_is_converted_too():
    described = create_described_model(NAME, SMALL, Conversion(keep_softmax=(0,)), features_only=True)
    assert [type(block.attn).__name__ for block in described.model.blocks] == ["Attention", *["InLineAttention"] * 2]
    assert [tuple(level.shape) for level in described(IMAGES)] == [(2, 24, 4, 4)] * 3


def test_numbers_count_from_the_start_in_files():
    model = timm.create_model(NAME, **SMALL)
    assert convert_attention(model, keep_softmax={-1, 2, 0}) == ["blocks.1.attn"]
    assert json.loads(model_metadata(model)["conversion"]) == {
        "attention": "inline", "keep_softmax": [0, 2], "options": {}
    }  # fmt: skip


def test_converting_the_rest_later_is_one_conversion():
    model = timm.create_model(NAME, **SMALL)
    convert_attention(model, keep_softmax=[0, 2])
    convert_attention(model, keep_softmax=[-1])
    assert json.loads(model_metadata(model)["conversion"])["keep_softmax"] == [2]
    convert_attention(model, attention=LinearAttention)
    with pytest.raises(ModelDescriptionError, match="inline and linear"):
        parse_conversion(json.loads(model_metadata(model)["conversion"]))


@pytest.mark.parametrize("numbers", [[3], [-4], [True], ["0"], [0.0], [None]])
def test_unknown_numbers_are_refused_and_the_model_unchanged(numbers):
    model = timm.create_model(NAME, **SMALL)
    with pytest.raises(ValueError, match="from -3 to 2, since 3 attentions can be replaced"):
        convert_attention(model, keep_softmax=numbers)
    assert all(isinstance(block.attn, timm.layers.Attention) for block in model.blocks)


def test_keeping_all_is_refused():
    with pytest.raises(ValueError, match="names all 3 attentions"):
        convert_attention(timm.create_model(NAME, **SMALL), keep_softmax=range(3))


def test_tied_modules_count_once():
    model = timm.create_model(NAME, **SMALL)
    model.blocks[1].attn = model.blocks[0].attn
    assert convert_attention(model, keep_softmax=[0]) == ["blocks.2.attn"]


@pytest.mark.parametrize(
    "note",
    [
        "{", "[1]", '"inline"', "[" * 10_000, '{"attention": "os.system"}', '{"attention": ["inline"]}',
        '{"attention": "InLineAttention"}', '{"keep_softmax": 1}',
        '{"keep_softmax": [true]}', '{"keep_softmax": ["0"]}',
        '{"keep_softmax": [0.5]}', '{"keep_softmax": [7]}', '{"keep_softmax": [0, 1, 2]}', '{"keep_softmax": [100000]}',
        json.dumps({"keep_softmax": [0] * 10_000}), '{"options": [1]}', '{"options": {"device": "cuda"}}',
        '{"options": {"feature_map": "os.system"}}', '{"options": {"scale": NaN}}', '{"options": {"dtype": "float16"}}',
        '{"options": {"num_prefix_tokens": -1}}',
        '{"options": {"qkv_bias": true}}', '{"path": "x"}', '{"attention": "inline", "\\u001b[31m": 1}',
    ],
)  # fmt: skip
def test_hostile_notes_give_one_sentence(tmp_path, note):
    path = save(converted_model(), tmp_path, conversion=note)
    with pytest.raises(CheckpointError) as caught:
        ImageClassifier.from_checkpoint(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500


def test_a_model_without_softmax_attention_cannot_be_described_as_converted(tmp_path):
    model = timm.create_model("inline_deit_tiny", embed_dim=24, num_heads=2, depth=1, img_size=32, num_classes=3)
    path = tmp_path / "model.safetensors"
    arguments = json.dumps({"embed_dim": 24, "num_heads": 2, "depth": 1, "img_size": 32})
    save_weights(model, path, metadata={"model_arguments": arguments, "conversion": "{}"})
    with pytest.raises(CheckpointError, match=r"cannot be converted: .*converted already, or was never softmax"):
        ImageClassifier.from_checkpoint(path)


def test_a_feature_map_that_is_code_is_never_read_back(tmp_path):
    path = save(converted_model(feature_map=torch.sigmoid), tmp_path)
    with pytest.raises(CheckpointError, match="feature_map"):
        ImageClassifier.from_checkpoint(path)


def test_loading_into_a_softmax_model_says_that_the_file_is_converted(tmp_path):
    softmax = timm.create_model(NAME, **SMALL)
    with pytest.raises(CheckpointError, match="the file is of a model after convert_attention"):
        load_checkpoint(softmax, save(converted_model(), tmp_path))
    save_weights(converted_model().state_dict(), tmp_path / "bare.safetensors")  # as timm's save_for_hf does
    with pytest.raises(CheckpointError, match="call convert_attention before loading"):
        load_checkpoint(softmax, tmp_path / "bare.safetensors")
    with pytest.warns(UserWarning, match="converted attention"):
        load_checkpoint(softmax, save(converted_model(local_residual=False), tmp_path))


@pytest.mark.parametrize(
    ("name", "is_convertible"), [(NAME, True), ("inline_pvt_tiny", False), ("softmax_deit_tiny", False)]
)
def test_only_models_of_timm_are_said_to_need_a_conversion(tmp_path, name, is_convertible):
    torch.save(converted_model().state_dict(), tmp_path / "weights.pth")
    model = timm.create_model(name, **(SMALL if is_convertible else {"num_classes": 3}))
    with pytest.raises(CheckpointError, match="does not fit") as error:
        load_checkpoint(model, tmp_path / "weights.pth")
    assert ("seems to be of a model after convert_attention" in str(error.value)) is is_convertible
