"""Weights between files and models: loading, models they do not fit, saving and converting."""

import json
import pathlib
import pickle

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

from inline_attention import convert_attention, create_model
from inline_attention.models import checkpoints
from inline_attention.models.checkpoints import (
    CheckpointError,
    CheckpointMismatchError,
    convert_checkpoint,
    load_checkpoint,
    number_of_classes,
    open_checkpoint,
    save_weights,
)
from inline_attention.models.reading import read_checkpoint
from models.small_model import Classifier, assert_same, snapshot


class Translating(Classifier):
    """Knows the names of another implementation, as the model families do."""

    def convert_state_dict(self, state_dict):
        renamed = {name.replace("patch_embed.", "embed."): value for name, value in state_dict.items()}
        return {name: value for name, value in renamed.items() if not name.endswith("attn_mask")}


# Loading


def test_load_gives_the_model_the_file(weights_file, state):
    model = Classifier()
    report = load_checkpoint(model, weights_file)
    assert_same(model.state_dict(), state)
    assert set(report.loaded) == set(state)
    assert (report.missing, report.unexpected, report.reinitialized, report.cast, report.nonfinite) == ((),) * 5
    assert str(report) == f"{weights_file}: 7 tensors"


def test_mismatch_lists_everything_and_loads_nothing(tmp_path, state):
    del state["norm.weight"]
    state["extra"] = torch.ones(1)
    state["embed.weight"] = torch.ones(4, 5)
    state["norm.bias"] = torch.ones(4, dtype=torch.int8)
    torch.save(state, tmp_path / "other.pth")
    model = Classifier()
    untouched = snapshot(model)
    with pytest.raises(CheckpointMismatchError) as caught:
        load_checkpoint(model, tmp_path / "other.pth")
    error = caught.value
    assert error.missing == ("norm.weight",)
    assert error.unexpected == ("extra",)
    assert error.mismatched == (("embed.weight", (4, 5), (4, 3)), ("norm.bias", (4,), (4,)))
    for part in (
        "other.pth does not fit Classifier",
        "1 missing in the file: norm.weight",
        "1 unknown to the model: extra",
        "embed.weight (file (4, 5) float32, model (4, 3) float32)",
        "norm.bias (file (4,) int8, model (4,) float32)",
        "create the model that the file was made for",
    ):
        assert part in str(error)
    assert "head" not in str(error)
    assert_same(snapshot(model), untouched)
    assert isinstance(pickle.loads(pickle.dumps(error)), CheckpointMismatchError)


def test_long_lists_are_cut(tmp_path, state):
    torch.save({**state, **{f"extra.{i}": torch.ones(1) for i in range(30)}}, tmp_path / "long.pth")
    with pytest.raises(CheckpointMismatchError, match=r"30 unknown .*extra\.11 and 18 more") as caught:
        load_checkpoint(Classifier(), tmp_path / "long.pth")
    assert len(caught.value.unexpected) == 30


def test_loose_loading_reports_what_differs_but_shapes_count(tmp_path, state):
    path = tmp_path / "part.pth"
    del state["norm.weight"]
    state["extra"] = torch.ones(1)
    torch.save(state, path)
    model = Classifier()
    gain = model.norm.weight.clone()
    report = load_checkpoint(model, path, strict=False)
    assert (report.missing, report.unexpected) == (("norm.weight",), ("extra",))
    assert "1 missing (norm.weight); 1 unexpected (extra)" in str(report)
    assert torch.equal(model.norm.weight, gain)
    assert torch.equal(model.embed.weight, state["embed.weight"])
    with pytest.raises(CheckpointMismatchError, match="of another shape"):
        load_checkpoint(Classifier(dim=5), path, strict=False)
    torch.save({"nothing.in.common": torch.ones(1)}, path)
    with pytest.raises(CheckpointMismatchError):
        load_checkpoint(model, path, strict=False)


def test_head_of_another_size(tmp_path):
    path = tmp_path / "imagenet.pth"
    torch.save(Classifier(1000).state_dict(), path)
    model = Classifier(10)
    untouched = snapshot(model)
    expected = (
        "the file has a head for 1000 classes, the model one for 10: create the model with num_classes=1000"
        ", or pass reinitialize_head=True"
    )
    for strict in (True, False):
        with pytest.raises(CheckpointMismatchError, match=expected) as caught:
            load_checkpoint(model, path, strict=strict)
    assert "create the model that" not in str(caught.value)
    assert caught.value.mismatched == (("head.weight", (1000, 4), (10, 4)), ("head.bias", (1000,), (10,)))
    assert_same(snapshot(model), untouched)

    report = load_checkpoint(model, path, reinitialize_head=True)
    assert report.reinitialized == ("head.weight", "head.bias")
    assert "head left as initialized (head.weight, head.bias)" in str(report)
    assert torch.equal(model.head.weight, untouched["head.weight"])
    assert not torch.equal(model.embed.weight, untouched["embed.weight"])


def test_head_missing_on_either_side(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(Classifier(1000).state_dict(), path)
    with pytest.raises(
        CheckpointMismatchError, match="1000 classes, the model none: create the model with num_classes"
    ):
        load_checkpoint(Classifier(0), path)
    assert load_checkpoint(Classifier(0), path, reinitialize_head=True).reinitialized == ()
    torch.save(Classifier(0).state_dict(), path)
    with pytest.raises(CheckpointMismatchError, match=r"no head, the model one for 10 classes: .*num_classes=0"):
        load_checkpoint(Classifier(10), path)
    assert load_checkpoint(Classifier(10), path, reinitialize_head=True).missing == ()


def test_reinitialized_head_is_kept_even_if_it_would_fit(weights_file):
    model = Classifier()
    weight = model.head.weight.clone()
    load_checkpoint(model, weights_file, reinitialize_head=True)
    assert torch.equal(model.head.weight, weight)


@pytest.mark.parametrize("classifier", ["fc.out", ("fc.out", "fc.distilled")])
def test_name_of_the_head_comes_from_the_model(tmp_path, classifier):
    def create(num_classes):
        model = Classifier(0)
        model.fc = nn.ModuleDict({"out": nn.Linear(4, num_classes), "distilled": nn.Linear(4, num_classes)})
        model.pretrained_cfg = {"classifier": classifier}
        return model

    torch.save(create(1000).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointMismatchError, match="a head for 1000 classes, the model one for 10:"):
        load_checkpoint(create(10), tmp_path / "weights.pth")
    if isinstance(classifier, tuple):
        assert len(load_checkpoint(create(10), tmp_path / "weights.pth", reinitialize_head=True).reinitialized) == 4


def test_the_model_translates_names(tmp_path, state):
    foreign = {name.replace("embed.", "patch_embed."): value for name, value in state.items()}
    torch.save({"model": {**foreign, "layers.0.attn_mask": torch.ones(2)}}, tmp_path / "authors.pth")
    model = Translating()
    load_checkpoint(model, tmp_path / "authors.pth")
    assert_same(model.state_dict(), state)
    with pytest.raises(CheckpointMismatchError, match=r"patch_embed\.weight"):
        load_checkpoint(Classifier(), tmp_path / "authors.pth")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_cast_and_reported(tmp_path, state, dtype):
    weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    torch.save(weights, tmp_path / "half.pth")
    model = Classifier()
    report = load_checkpoint(model, tmp_path / "half.pth")
    assert set(report.cast) == set(state) - {"steps"}
    assert "6 cast to the model's dtype" in str(report)
    assert model.embed.weight.dtype == torch.float32
    assert torch.equal(model.embed.weight, weights["embed.weight"].float())


def test_warnings_hold_no_escape_sequences(tmp_path, state):
    state["norm.bias"][0] = float("nan")
    path = tmp_path / "\x1b[31m.pth"
    torch.save(state, path)
    with pytest.warns(UserWarning, match="NaN") as caught:
        load_checkpoint(Classifier(), path)
    assert str(caught[0].message).isprintable()


def test_values_that_are_not_finite_are_named_and_kept(tmp_path, state):
    state["norm.bias"][0] = float("nan")
    state["embed.weight"][0, 0] = 1e30
    torch.save(state, tmp_path / "weights.pth")
    model = Classifier()
    with pytest.warns(UserWarning, match=r"weights\.pth has NaN or infinite values in norm\.bias; they"):
        report = load_checkpoint(model, tmp_path / "weights.pth")
    assert report.nonfinite == ("norm.bias",)
    assert model.norm.bias[0].isnan()
    with pytest.warns(UserWarning, match=r"in embed\.weight, norm\.bias"):  # 1e30 overflows in half precision
        load_checkpoint(Classifier().half(), tmp_path / "weights.pth")
    with pytest.warns(UserWarning, match=r"in norm\.bias"):
        convert_checkpoint(tmp_path / "weights.pth", tmp_path / "weights.safetensors")


def test_a_model_without_values_is_refused(weights_file):
    with torch.device("meta"):
        model = Classifier()
    with pytest.raises(CheckpointError, match=r"meta device.*to_empty"):
        load_checkpoint(model, weights_file)


# Position embeddings and biases


def small(family, **arguments):
    depths = {"deit": {"depth": 1}, "pvt": {"depths": (1, 1, 1, 1)}}
    windows = {"depths": (1, 1, 1, 1), "global_blocks": (0, 0, 0, 0)}
    return create_model(f"inline_{family}_tiny", num_classes=3, **depths.get(family, windows), **arguments)


POSITIONS = {
    "deit": "pos_embed",
    "pvt": "embeddings.0.positions",
    "swin": "stages.0.0.attn.relative_position_bias_table",
}


@pytest.mark.parametrize("family", POSITIONS)
@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(()),
        torch.zeros(5),
        torch.zeros(0, 3),
        torch.zeros(7, 3),
        torch.zeros(16, 3),
        torch.zeros(25, 3, dtype=torch.complex64),
        torch.zeros(1, 0, 192),
        torch.zeros(1, 1, 192),
        torch.zeros(1, 7, 64),
        torch.zeros(1, 4, 0),
        torch.zeros(1, 5, 192, dtype=torch.int64),
        torch.zeros(1, 9, 64, 2),
    ],
    ids=lambda value: f"{tuple(value.shape)}-{value.dtype}",
)
def test_positions_that_cannot_be_resampled_are_named(tmp_path, family, value):
    model = small(family)
    torch.save({**model.state_dict(), POSITIONS[family]: value}, tmp_path / "weights.pth")
    with pytest.raises(CheckpointMismatchError) as caught:
        load_checkpoint(model, tmp_path / "weights.pth")
    assert [name for name, *_ in caught.value.mismatched] == [POSITIONS[family]]


def test_a_head_without_dimensions_is_named(tmp_path):
    model = small("deit")
    torch.save({**model.state_dict(), "head.weight": torch.tensor(1.0)}, tmp_path / "weights.pth")
    with pytest.raises(CheckpointMismatchError, match=r"head\.weight"):
        load_checkpoint(model, tmp_path / "weights.pth")


def test_one_weight_under_two_names_is_refused(tmp_path):
    model = small("pvt")
    both = {**model.state_dict(), "pos_embed1": torch.zeros_like(model.embeddings[0].positions)}
    torch.save(both, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"weights\.pth.*embeddings\.0\.positions twice.*'pos_embed1'"):
        load_checkpoint(model, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="twice"):
        model.load_state_dict(both)


@pytest.mark.parametrize("family", ["deit", "pvt"])
@pytest.mark.parametrize(("saved", "wanted"), [((64, 144), (96, 96)), ((64, 96), (96, 64)), ((64, 96), (128, 128))])
def test_the_grid_of_positions_travels_with_our_files(tmp_path, family, saved, wanted):
    source, target = small(family, img_size=saved), small(family, img_size=wanted)
    save_weights(source, tmp_path / "weights.safetensors")
    load_checkpoint(target, tmp_path / "weights.safetensors")
    overlay = {"file": str(tmp_path / "weights.safetensors")}
    depths = {"depth": 1} if family == "deit" else {"depths": (1, 1, 1, 1)}
    created = create_model(
        f"inline_{family}_tiny", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3, img_size=wanted,
        **depths,
    )  # fmt: skip
    convert_checkpoint(tmp_path / "weights.safetensors", tmp_path / "copy.safetensors")
    again = small(family, img_size=wanted)
    load_checkpoint(again, tmp_path / "copy.safetensors")
    source.set_input_size(wanted)
    for model in (target, created, again):
        assert_same(model.state_dict(), source.state_dict())


def test_positions_converted_for_a_model_are_of_its_grid(tmp_path):
    save_weights(small("deit", img_size=(64, 144)), tmp_path / "weights.safetensors")
    target = small("deit", img_size=(96, 64))
    convert_checkpoint(tmp_path / "weights.safetensors", tmp_path / "copy.safetensors", model=target)
    assert json.loads(open_checkpoint(tmp_path / "copy.safetensors").metadata["position_grids"]) == {
        "pos_embed": [6, 4]
    }


@pytest.mark.parametrize(
    "note",
    [
        "no json",
        "[1]",
        '{"pos_embed": 3}',
        '{"pos_embed": null}',
        '{"pos_embed": [5, 5]}',
        '{"pos_embed": [-6, -6]}',
        '{"pos_embed": [Infinity, 1]}',
    ],
)
def test_a_note_of_grids_that_makes_no_sense_is_passed_over(tmp_path, note):
    source, target = small("deit", img_size=96), small("deit", img_size=64)
    save_weights(source.state_dict(), tmp_path / "weights.safetensors", metadata={"position_grids": note})
    load_checkpoint(target, tmp_path / "weights.safetensors")
    source.set_input_size(64)
    assert_same(target.state_dict(), source.state_dict())


def test_positions_of_an_unknown_grid_are_warned_of_where_the_model_has_no_square(tmp_path, recwarn):
    torch.save(small("deit", img_size=(64, 96)).state_dict(), tmp_path / "weights.pth")
    with pytest.warns(UserWarning, match=r"does not say which grids .*: pos_embed \(6×4\)"):
        load_checkpoint(small("deit", img_size=(96, 64)), tmp_path / "weights.pth")
    recwarn.clear()
    torch.save(small("deit", img_size=96).state_dict(), tmp_path / "weights.pth")
    for size in (96, 64, (96, 64)):  # squares, and one that is resampled from a square
        load_checkpoint(small("deit", img_size=size), tmp_path / "weights.pth")
    assert not recwarn


# Saving and converting


def awkward_tensors():
    shared = torch.randn(4, 6)
    return {
        "float": torch.randn(3, 5),
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "half": torch.randn(3, 5).half(),
        "double": torch.randn(3).double(),
        "special": torch.tensor([0.0, -0.0, 1e-45, 3e38]),
        "integers": torch.arange(12).reshape(3, 4),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.randn(8, 8)[::2, 1::3],
        "expanded": torch.randn(4, 1).expand(4, 3),
        "shared": shared,
        "shared_part": shared[1:3],
        "shared_again": shared,
        "parameter": nn.Parameter(torch.randn(2)),
    }


@pytest.mark.parametrize("source", ["weights.pth", "weights.safetensors"])
def test_round_trip_is_exact_to_the_bit(tmp_path, source):
    tensors = awkward_tensors()
    if source.endswith(".pth"):
        torch.save({"model": tensors}, tmp_path / source)
    else:
        save_weights(tensors, tmp_path / source)
    report = convert_checkpoint(tmp_path / source, tmp_path / "converted.safetensors")
    assert set(report.loaded) == set(tensors)
    read = read_checkpoint(tmp_path / "converted.safetensors")
    assert_same(read, tensors)
    assert all(value.is_contiguous() for value in read.values())
    assert_same(load_file(tmp_path / "converted.safetensors"), tensors)
    convert_checkpoint(tmp_path / "converted.safetensors", tmp_path / "converted.safetensors")  # onto itself
    assert_same(read_checkpoint(tmp_path / "converted.safetensors"), tensors)


def test_metadata_say_format_source_and_checksum(tmp_path, state):
    torch.save(state, tmp_path / "weights.pth")
    convert_checkpoint(tmp_path / "weights.pth", tmp_path / "weights.safetensors")
    content = (tmp_path / "weights.safetensors").read_bytes()
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert open_checkpoint(tmp_path / "weights.safetensors").metadata == metadata
    assert metadata.pop("sha256")
    assert metadata == {"format": "pt", "source": "weights.pth"}


def test_metadata_name_the_model_and_survive_conversion(tmp_path):
    model = Classifier()
    model.pretrained_cfg = {"architecture": "classifier_tiny"}
    save_weights(model, tmp_path / "first.safetensors", metadata={"class_names": '["a", "b"]'})
    convert_checkpoint(tmp_path / "first.safetensors", tmp_path / "second.safetensors")
    metadata = open_checkpoint(tmp_path / "second.safetensors").metadata
    assert metadata["class_names"] == '["a", "b"]'
    assert (metadata["model"], metadata["source"]) == ("classifier_tiny", "first.safetensors")
    model.pretrained_cfg = {"architecture": "classifier_large"}
    convert_checkpoint(tmp_path / "first.safetensors", tmp_path / "second.safetensors", model=model)
    assert open_checkpoint(tmp_path / "second.safetensors").metadata["model"] == "classifier_large"


def test_what_was_opened_can_be_looked_at_and_loaded(tmp_path, state):
    torch.save({"model_ema": state, "epoch": 3}, tmp_path / "weights.pth")
    file = open_checkpoint(tmp_path / "weights.pth")
    assert (file.path, file.origin, file.metadata) == (tmp_path / "weights.pth", "model_ema", {})
    model = Classifier(number_of_classes(file.weights, Classifier(0)))
    assert load_checkpoint(model, file).origin == "model_ema"
    assert_same(model.state_dict(), state)
    assert number_of_classes(Classifier(0).state_dict(), model) is None


def test_save_a_model_compiled_or_not(tmp_path):
    model = Classifier()
    for module in (model, torch.compile(model)):
        save_weights(module, tmp_path / "model.safetensors")
        assert_same(read_checkpoint(tmp_path / "model.safetensors"), model.state_dict())


def test_convert_in_the_names_of_a_model(tmp_path, state):
    half = {name.replace("embed.", "patch_embed."): value.half() for name, value in state.items() if name != "steps"}
    torch.save({"model": {**half, "steps": state["steps"]}}, tmp_path / "authors.pth")
    with torch.device("meta"):
        model = Translating()
    convert_checkpoint(tmp_path / "authors.pth", tmp_path / "ours.safetensors", model=model)
    converted = read_checkpoint(tmp_path / "ours.safetensors")
    assert set(converted) == set(state)
    assert converted["embed.weight"].dtype == torch.float16, "conversion keeps the precision of the file"
    with pytest.raises(CheckpointMismatchError, match="create the model with num_classes=10"):
        convert_checkpoint(tmp_path / "authors.pth", tmp_path / "wrong.safetensors", model=Translating(5))
    assert not (tmp_path / "wrong.safetensors").exists()


def test_weights_are_saved_as_safetensors_only(tmp_path, state):
    with pytest.raises(CheckpointError, match=r"saved as \.safetensors, got .*x\.pth; try .*x\.safetensors"):
        save_weights(state, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"expected named dense tensors, got note \(str\)"):
        save_weights({**state, "note": "text"}, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_disk_full_leaves_the_old_file(tmp_path, weights_file, state):
    """A limit on the size of files stands for a disk without space: the write fails half-way, for real."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"weights\.safetensors could not be written .*unchanged.*has space"):
            save_weights({"large": torch.ones(1_000_000)}, weights_file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(read_checkpoint(weights_file), state)
    assert list(tmp_path.iterdir()) == [weights_file]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_failure_late_in_saving_leaves_the_old_file(tmp_path, monkeypatch, weights_file, state, function):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.os, function, fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_weights({"other": torch.ones(3)}, weights_file)
    assert_same(read_checkpoint(weights_file), state)
    assert list(tmp_path.iterdir()) == [weights_file]


def test_places_that_cannot_be_written(tmp_path, weights_file, state):
    (tmp_path / "folder.safetensors").mkdir()
    for path in (
        tmp_path / "absent" / "x.safetensors",
        weights_file / "x.safetensors",
        tmp_path / "folder.safetensors",
        pathlib.Path("/proc/x.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=r"could not be written.*folder exists"):
            save_weights(state, path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_224"]
)
@pytest.mark.parametrize("converted", [False, True])
def test_positions_of_timms_models_are_resampled(tmp_path, name, converted):
    arguments = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    small, large = (timm.create_model(name, img_size=size, **arguments) for size in (16, (24, 32)))
    if converted:
        convert_attention(small)
        convert_attention(large)
    save_weights(small, tmp_path / "small.safetensors")
    load_checkpoint(large, tmp_path / "small.safetensors")
    small.set_input_size(img_size=(24, 32))
    torch.testing.assert_close(large.pos_embed, small.pos_embed)
    save_weights(large, tmp_path / "large.safetensors")
    with pytest.raises(CheckpointMismatchError, match="pos_embed"):  # 6×8 is no square
        load_checkpoint(timm.create_model(name, img_size=16, **arguments), tmp_path / "large.safetensors")
