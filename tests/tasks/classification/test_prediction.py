"""Classifying picture files: preparation, batches, names, and what cannot be classified."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from inline_attention import create_model
from inline_attention.models.checkpoints import CheckpointError, CheckpointMismatchError, save_weights
from inline_attention.tasks.classification import ImageClassifier

NAME = "inline_deit_tiny"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = create_model(NAME, num_classes=4).eval()
    torch.nn.init.normal_(model.head.weight, std=0.5)  # probabilities that differ
    return model


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_weights(model, path)
    return path


@pytest.fixture
def photos(tmp_path):
    """Smooth noise in several shapes."""
    generator = np.random.default_rng(0)
    paths = []
    for index, size in enumerate([(300, 200), (300, 200), (90, 120), (500, 40), (300, 200)]):
        pixels = generator.integers(0, 255, (7, 9, 3), dtype=np.uint8)
        paths.append(tmp_path / f"{index}.png")
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(paths[-1])
    return paths


def probabilities(result):
    return [p.probability for p in sorted(result.predictions, key=lambda p: p.index)]


def test_as_timm_would(model, checkpoint, photos):
    transform = create_transform(**resolve_data_config({}, model=model))
    classifier = ImageClassifier.from_checkpoint(checkpoint)
    results = list(classifier.classify_files(photos))
    assert [result.path for result in results] == photos
    for path, result in zip(photos, results, strict=True):
        with torch.inference_mode():
            expected = model(transform(Image.open(path))[None]).softmax(-1)[0]
        assert probabilities(result) == pytest.approx(expected.tolist(), abs=1e-5)
        values = [prediction.probability for prediction in result.predictions]
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("size", [None, 64, (48, 80)])
def test_batches_do_not_matter(checkpoint, photos, size):
    classifier = ImageClassifier.from_checkpoint(checkpoint, size=size)
    one_by_one = list(classifier.classify_files(photos, batch_size=1))
    for batch_size in (2, 3, 100):
        together = list(classifier.classify_files(photos, batch_size=batch_size))
        assert [result.path for result in together] == photos
        for first, second in zip(one_by_one, together, strict=True):
            assert probabilities(first) == pytest.approx(probabilities(second), abs=1e-5)


@pytest.mark.parametrize(
    ("size", "shapes"),
    [
        (None, [(224, 224)] * 5),
        (64, [(64, 96), (64, 96), (85, 64), (64, 800), (64, 96)]),
        ((48, 80), [(48, 80)] * 5),
    ],
)
def test_sizes(model, photos, size, shapes):
    classifier = ImageClassifier(model, list("abcd"), size=size, device="cpu")
    assert [tuple(classifier.prepare(path).shape[1:]) for path in photos] == shapes


@pytest.mark.parametrize("size", [None, (32, 64)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 10_000), (10_000, 1), (9, 9)])
def test_extreme_shapes(model, tmp_path, shape, size):
    Image.new("RGB", shape, "red").save(tmp_path / "x.png")
    classifier = ImageClassifier(model, list("abcd"), size=size)
    (result,) = classifier.classify_files([tmp_path / "x.png"])
    assert sum(probabilities(result)) == pytest.approx(1)


def test_far_ends_of_a_long_picture_do_not_count(model, tmp_path):
    """What the centre crop keeps is kept, though the rest is cut off before resizing."""
    pixels = np.zeros((20, 2000, 3), dtype=np.uint8)
    pixels[:, 990:1010, 0] = 255
    Image.fromarray(pixels).save(tmp_path / "long.png")
    Image.fromarray(pixels[:, 950:1050]).save(tmp_path / "middle.png")
    classifier = ImageClassifier(model, list("abcd"))
    long, middle = (classifier.prepare(tmp_path / f"{name}.png") for name in ("long", "middle"))
    torch.testing.assert_close(long, middle)


def test_a_picture_that_would_become_too_large(model, tmp_path):
    Image.new("RGB", (1, 10_000)).save(tmp_path / "thin.png")
    (result,) = ImageClassifier(model, list("abcd"), size=512).classify_files([tmp_path / "thin.png"])
    assert "too long and thin to be enlarged to 512×5120000" in result.error
    (result,) = ImageClassifier(model, list("abcd"), size=(20_000, 20_000)).classify_files([tmp_path / "thin.png"])
    assert "would become 20000×20000 pixels" in result.error


def test_broken_files_keep_their_place(checkpoint, photos, tmp_path):
    (tmp_path / "broken.png").write_bytes(photos[0].read_bytes()[:200])
    files = [tmp_path / "broken.png", photos[0], tmp_path / "absent.png", photos[1]]
    results = list(ImageClassifier.from_checkpoint(checkpoint).classify_files(files))
    assert [result.path for result in results] == files
    assert [bool(result.error) for result in results] == [True, False, True, False]
    assert [bool(result.predictions) for result in results] == [False, True, False, True]
    assert list(ImageClassifier.from_checkpoint(checkpoint).classify_files([])) == []


def test_exif_rotation_counts(checkpoint, photos, tmp_path):
    upright = Image.open(photos[0])
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it clockwise by 90° to see it upright
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    first, second = ImageClassifier.from_checkpoint(checkpoint).classify_files([photos[0], tmp_path / "turned.png"])
    assert probabilities(first) == pytest.approx(probabilities(second), abs=1e-6)


def test_class_names(model, checkpoint, tmp_path):
    assert ImageClassifier.from_checkpoint(checkpoint).class_names == [f"class {index}" for index in range(4)]
    names = ["Hund", "猫", "bird", "fish"]
    save_weights(model, tmp_path / "named.safetensors", metadata={"class_names": json.dumps(names)})
    assert ImageClassifier.from_checkpoint(tmp_path / "named.safetensors").class_names == names
    save_weights(create_model(NAME), tmp_path / "imagenet.safetensors")
    imagenet = ImageClassifier.from_checkpoint(tmp_path / "imagenet.safetensors").class_names
    assert len(imagenet) == 1000
    assert imagenet[281] == "tabby, tabby cat"
    for text in ("[", '["a", "b"]', '{"a": 1}'):
        save_weights(model, tmp_path / "wrong.safetensors", metadata={"class_names": text})
        with pytest.raises(CheckpointError, match="class_names"):
            ImageClassifier.from_checkpoint(tmp_path / "wrong.safetensors")


def test_the_model_is_named_by_the_file_or_the_caller(model, checkpoint, tmp_path):
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"weights\.pth does not say which model.*--model"):
        ImageClassifier.from_checkpoint(tmp_path / "weights.pth")
    assert len(ImageClassifier.from_checkpoint(tmp_path / "weights.pth", model_name=NAME).class_names) == 4
    with pytest.raises(CheckpointMismatchError, match="does not fit InLinePVT"):
        ImageClassifier.from_checkpoint(tmp_path / "weights.pth", model_name="inline_pvt_tiny")
    with pytest.raises(CheckpointError, match="is of inline_deit_tiny, not of inline_pvt_tiny"):
        ImageClassifier.from_checkpoint(checkpoint, model_name="inline_pvt_tiny")
    with pytest.raises(ValueError, match="did you mean inline_deit_tiny"):
        ImageClassifier.from_checkpoint(checkpoint, model_name="inline_diet_tiny")


def test_weights_without_a_head(tmp_path):
    save_weights(create_model(NAME, num_classes=0), tmp_path / "headless.safetensors")
    with pytest.raises(CheckpointError, match="no head to classify with"):
        ImageClassifier.from_checkpoint(tmp_path / "headless.safetensors")


@pytest.mark.parametrize("size", [8, 15, (8, 64), (64, 15)])
def test_a_size_below_one_patch(model, size):
    with pytest.raises(ValueError, match="at least 16 pixels"):
        ImageClassifier(model, list("abcd"), size=size)


@pytest.mark.parametrize("device", ["abacus", "cuda:99", ""])
def test_devices_that_are_not_there(model, device):
    with pytest.raises(ValueError, match=r"cannot be used here.*try 'cpu'"):
        ImageClassifier(model, list("abcd"), device=device)


@pytest.mark.filterwarnings("ignore:.*has NaN")
def test_weights_with_nan_are_reported(model, photos, tmp_path):
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    weights["head.bias"][0] = float("nan")
    save_weights(weights, tmp_path / "nan.safetensors", metadata={"model": NAME})
    (result,) = ImageClassifier.from_checkpoint(tmp_path / "nan.safetensors").classify_files(photos[:1])
    assert "NaN" in result.error


def test_pictures_are_prepared_as_the_run_evaluated_them(photos, tmp_path):
    arguments = {"img_size": 32, "patch_size": 4, "depth": 1, "num_classes": 4}
    model = create_model(NAME, **arguments).eval()
    path = tmp_path / "run.safetensors"
    save_weights(model, path, metadata={"model": NAME, "model_arguments": json.dumps(arguments), "crop_pct": "1.0"})
    prepared = ImageClassifier.from_checkpoint(path, device="cpu").prepare(photos[0])
    expected = create_transform(**resolve_data_config({"input_size": (3, 32, 32), "crop_pct": 1.0}, model=model))(
        Image.open(photos[0])
    )
    assert torch.equal(prepared, expected)
    # The notes are about the model that the file is of, not about another that is asked for.
    with pytest.raises(CheckpointMismatchError):
        ImageClassifier.from_checkpoint(path, model_name="inline_deit_small", device="cpu")


def test_a_crop_that_is_no_number_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    save_weights(create_model(NAME, num_classes=4), path, metadata={"model": NAME, "crop_pct": '"all"'})
    with pytest.raises(CheckpointError, match="crop_pct"):
        ImageClassifier.from_checkpoint(path, device="cpu")
