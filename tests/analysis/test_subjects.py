"""Models to analyse and pictures for them: found, prepared as trained, or refused with a reason."""

import dataclasses
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from inline_attention import convert_attention, create_model
from inline_attention.analysis.locality import survey_locality
from inline_attention.analysis.masking import survey_masking
from inline_attention.analysis.predictions import answer_batches
from inline_attention.analysis.probes import capture_attention
from inline_attention.analysis.subjects import (
    PictureSample,
    SampledBatches,
    open_pictures,
    trained_subject,
    untrained_subject,
    with_distinct_labels,
)
from inline_attention.data.datasets import open_dataset
from inline_attention.data.sources import DataError
from inline_attention.models.checkpoints import CheckpointError, save_weights
from inline_attention.models.reading import find_weights

ARGUMENTS = {"embed_dim": 16, "num_heads": 2, "depth": 1, "patch_size": 2, "img_size": 8, "num_classes": 3}


@pytest.fixture
def run(tmp_path):
    """A run of `inline train`, as far as analyses look into it."""
    folder = tmp_path / "runs" / "first"
    weights = folder / "checkpoints" / "best" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    model = create_model("linear_deit_tiny", **ARGUMENTS)
    notes = {"model_arguments": json.dumps(ARGUMENTS), "crop_pct": "1.0", "class_names": '["a", "b", "c"]'}
    save_weights(model, weights, metadata={"model": "linear_deit_tiny", **notes})
    return folder


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "deeper").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    for name in ("a.jpg", "deeper/b.png", "c.png"):
        Image.fromarray(pixels).save(folder / name)
    (folder / "broken.jpg").write_bytes(b"no picture")
    return folder


def test_a_run_its_checkpoint_and_its_file_are_the_same_model(run):
    expected = run / "checkpoints" / "best" / "model.safetensors"
    for path in (run, run / "checkpoints", run / "checkpoints" / "best", expected):
        assert find_weights(path) == expected
    subject = trained_subject(run, device="cpu")
    assert (subject.label, subject.kind, subject.image_size) == ("linear_deit_tiny", "linear", (8, 8))
    assert subject.class_names == ("a", "b", "c")
    assert not subject.model.training
    assert subject.data_config["crop_pct"] == 1.0
    assert str(expected) in subject.note
    with pytest.raises(CheckpointError, match="is a folder without weights"):
        find_weights(run.parent)


def test_classes_that_a_file_does_not_name_are_not_made_up(tmp_path):
    path = tmp_path / "weights.safetensors"
    arguments = {"depth": 1, "embed_dim": 12, "num_heads": 2}
    save_weights(create_model("inline_deit_tiny", **arguments), path)
    with pytest.raises(CheckpointError):  # the file does not say how the model was built
        trained_subject(path, device="cpu")
    notes = {"model_arguments": json.dumps(arguments)}
    save_weights(create_model("inline_deit_tiny", **arguments), path, metadata=notes)
    subject = trained_subject(path, device="cpu")
    assert subject.class_names is None
    assert subject.image_size == (224, 224)
    assert subject.described()["layers"] == ["blocks.0.attn"]


def vit(folder, *, classes=3, conversion=None):
    """A file of a small vision transformer of timm, with a head or without, converted or not."""
    arguments = {**ARGUMENTS, "num_classes": classes}
    model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    if conversion is not None:
        convert_attention(model, **conversion)
    notes = {"model": "vit_tiny_patch16_224", "model_arguments": json.dumps(arguments)}
    save_weights(model, folder / "vit.safetensors", metadata=notes)
    return model, folder / "vit.safetensors"


@pytest.mark.parametrize("conversion", [None, {}], ids=["softmax", "inline"])
def test_models_without_a_head_are_analyzed_as_far_as_they_need_none(tmp_path, conversion):
    model, path = vit(tmp_path, classes=0, conversion=conversion)
    subject = trained_subject(path, device="cpu")
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(subject.model(images), model(images), rtol=1e-4, atol=1e-5)
    sample = PictureSample(open_dataset("digits", None, "validation"), images=2)
    assert survey_locality(subject, sample)
    for needs_head in (lambda: survey_masking(subject, sample), lambda: next(answer_batches(subject, sample))):
        with pytest.raises(ValueError, match="vit_tiny_patch16_224 has no head to classify with; train one"):
            needs_head()


def test_softmax_of_timm_is_analyzed(tmp_path):
    model, path = vit(tmp_path)
    subject = trained_subject(path, device="cpu", size=(8, 12))
    assert (subject.kind, subject.image_size) == ("softmax", (8, 12))
    images = torch.randn(1, 3, 8, 12)
    (layer,) = capture_attention(subject.model, images)
    assert (layer.grid_size, layer.num_prefix_tokens) == ((4, 6), 1)
    model.set_input_size(img_size=(8, 12))
    with torch.no_grad():
        torch.testing.assert_close(subject.model(images), model(images), rtol=1e-4, atol=1e-5)


def test_models_without_attention_are_refused(tmp_path):
    model = timm.create_model("resnet10t", num_classes=3)
    notes = {"model": "resnet10t", "model_arguments": '{"num_classes": 3}'}
    save_weights(model, tmp_path / "resnet.safetensors", metadata=notes)
    with pytest.raises(ValueError, match="found no attention to convert in ResNet"):
        trained_subject(tmp_path / "resnet.safetensors", device="cpu")


def test_names_for_other_classes_than_the_head_s_are_refused(tmp_path):
    model = create_model("inline_deit_tiny", **ARGUMENTS)
    notes = {"model_arguments": json.dumps(ARGUMENTS), "class_names": '["a", "b"]'}
    save_weights(model, tmp_path / "a.safetensors", metadata=notes)
    with pytest.raises(CheckpointError, match="names 2 classes, its head has 3"):
        trained_subject(tmp_path / "a.safetensors", device="cpu")


def test_untrained_models_say_so_and_depend_on_the_seed():
    first, second, same = (untrained_subject("inline_deit_tiny", seed=s, device="cpu", **ARGUMENTS) for s in (0, 1, 0))
    assert first.note == "untrained weights"
    assert first.kind == "inline"
    weights = [subject.model.get_parameter("pos_embed") for subject in (first, second, same)]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])
    with pytest.raises(ValueError, match="at least 2×2 pixels, got 1×1"):
        untrained_subject("inline_deit_tiny", size=(1, 1), device="cpu", **ARGUMENTS)


def test_kinds_follow_the_first_layer():
    options = {"attention_options": {"normalization": "magnitude", "feature_map": "exp"}}
    assert untrained_subject("inline_deit_tiny", device="cpu", **ARGUMENTS, **options).kind == "magnitude"
    assert untrained_subject("softmax_deit_tiny", device="cpu", **ARGUMENTS).kind == "softmax"


def test_models_of_one_name_get_distinct_labels(run):
    trained = trained_subject(run, device="cpu")
    untrained = untrained_subject("linear_deit_tiny", device="cpu", **ARGUMENTS)
    other = untrained_subject("inline_deit_tiny", device="cpu", **ARGUMENTS)
    labels = [subject.label for subject in with_distinct_labels([trained, untrained, other, trained])]
    assert labels == [
        "linear_deit_tiny (first)", "linear_deit_tiny (#2)", "inline_deit_tiny", "linear_deit_tiny (#4)",
    ]  # fmt: skip


def test_a_folder_need_not_be_sorted_by_class(photos):
    source = open_pictures("folder", photos, "validation")
    assert [source.name(index) for index in range(len(source))] == [
        str(photos / name) for name in ("a.jpg", "broken.jpg", "c.png", "deeper/b.png")
    ]
    with pytest.raises(DataError, match="does not exist"):
        open_pictures("folder", photos / "absent", "validation")
    (photos / "empty").mkdir()
    with pytest.raises(DataError, match="holds no picture"):
        open_pictures("folder", photos / "empty", "validation")


def test_pictures_are_prepared_as_the_model_wants_and_broken_ones_left_out(photos):
    subject = untrained_subject("inline_deit_tiny", size=(8, 12), device="cpu", **ARGUMENTS)
    sample = PictureSample(open_pictures("folder", photos, "validation"), batch_size=2)
    pixels = torch.cat([batch.images for batch in sample.batches(subject)])
    assert (pixels.shape, pixels.dtype) == ((3, 3, 8, 12), torch.uint8)
    assert len(sample) == 4
    assert list(sample.skipped) == [str(photos / "broken.jpg")]
    with pytest.raises(DataError, match="has 3 classes without names"):
        next(sample.batches(subject, normalized=True))


def test_labelled_pictures_are_numbered_as_the_model_does(run):
    names = [str(digit) for digit in range(10)]
    subject = dataclasses.replace(trained_subject(run, device="cpu"), class_names=tuple(reversed(names)))
    sample = PictureSample(open_dataset("digits", None, "validation"), images=5, batch_size=5)
    (pixels,), (inputs,) = sample.batches(subject), sample.batches(subject, normalized=True)
    assert inputs.targets.tolist() == [9 - target for target in pixels.targets.tolist()]
    torch.testing.assert_close(inputs.images, subject.normalize(pixels.images))


def test_a_sample_is_random_ordered_and_without_repetition():
    def indices(*arguments):
        return torch.cat([key.indices for key in SampledBatches(*arguments).keys(0)]).tolist()

    assert indices(5, None, 2, 0) == indices(5, 9, 2, 0) == [0, 1, 2, 3, 4]
    sample = indices(1000, 30, 7, 1)
    assert sample == sorted(set(sample))
    assert len(sample) == 30
    assert sample != indices(1000, 30, 7, 2)
    assert len(SampledBatches(1000, 30, 7, 1)) == 5
