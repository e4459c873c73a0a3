"""A small file cannot describe a model that takes gigabytes or minutes to run; an honest one is not in the way."""

import json

import pytest
import timm
import torch

from inline_attention.models.checkpoints import CheckpointError, open_checkpoint, save_weights
from inline_attention.models.described import read_description
from inline_attention.models.registry import list_models
from inline_attention.models.running_cost import check_running_cost
from inline_attention.tasks.detection.models import DetectionOptions
from inline_attention.tasks.detection.task import DetectionTask
from inline_attention.tasks.segmentation.models import SegmentationOptions
from inline_attention.tasks.segmentation.task import SegmentationTask
from inline_attention.tasks.task import DataSection, ModelSection

FOUR = {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2), "num_classes": 3}
PLAIN = {"embed_dim": 2, "num_heads": 1, "depth": 1, "num_classes": 3, "patch_size": 8}


def description(tmp_path, name, arguments, **notes):
    """What a file says that holds the weights of the model, for a small image."""
    size = {"img_size": arguments.get("patch_size", 32)}
    model = timm.create_model(name, **{**arguments, **size})
    path = tmp_path / "weights.safetensors"
    save_weights(model.state_dict(), path, metadata={"model": name, "model_arguments": json.dumps(arguments), **notes})
    return read_description(open_checkpoint(path))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("softmax_swin_tiny", FOUR | {"depths": (2, 1, 1, 1), "window_size": 64, "img_size": 1024}),  # shifted
        ("softmax_swin_tiny", FOUR | {"depths": (2, 1, 1, 1), "window_size": 32, "img_size": 8192}),
        ("softmax_swin_tiny", FOUR | {"window_size": 64, "img_size": 8192}),
        ("softmax_cswin_tiny", FOUR | {"stripe_widths": (256, 256, 256), "img_size": 8192}),
        ("inline_swin_tiny", FOUR | {"mlp_ratio": 64, "img_size": 8192}),
        ("inline_deit_tiny", PLAIN | {"attention_options": {"backend": "reference"}, "img_size": 1024}),
        ("inline_deit_tiny", PLAIN | {"depth": 512, "patch_size": 4, "img_size": 8192}),
        ("softmax_deit_tiny", PLAIN | {"embed_dim": 64, "depth": 16, "img_size": 2048}),
    ],
)
def test_small_files_cannot_ask_for_gigabytes_or_minutes(tmp_path, name, arguments):
    with pytest.raises(CheckpointError, match="too costly to run: it would take"):
        description(tmp_path, name, arguments)


@pytest.mark.parametrize(
    ("size", "crop_pct"), [(8192, 0.5), (1024, 0.05), ((64, 2**20), 1.0)], ids=["half", "small", "ribbon"]
)
def test_pictures_are_not_enlarged_beyond_memory_to_be_cropped(tmp_path, size, crop_pct):
    arguments = PLAIN | {"patch_size": 64, "img_size": size}
    with pytest.raises(CheckpointError, match="cut from pictures of"):
        description(tmp_path, "inline_deit_tiny", arguments, crop_pct=json.dumps(crop_pct))


@pytest.mark.parametrize(
    ("task", "classes"),
    [
        (lambda m: SegmentationTask(DataSection(), m, SegmentationOptions(width=8)), 5000),
        (lambda m: SegmentationTask(DataSection(), m, SegmentationOptions(width=8, crop=8192)), 20),
        (lambda m: DetectionTask(DataSection(), m, DetectionOptions("retinanet", 8)), 10_000),
        (lambda m: DetectionTask(DataSection(), m, DetectionOptions(width=8, shorter_side=64)), 10_000),
    ],
    ids=["scores of pixels", "large crop", "scores of anchors", "masks"],
)
def test_dense_models(tmp_path, task, classes):
    backbone = {key: value for key, value in FOUR.items() if key != "num_classes"}
    task, names = task(ModelSection("inline_swin_tiny", backbone)), [str(number) for number in range(classes)]
    path = tmp_path / "weights.safetensors"
    save_weights(task.build_model(names).state_dict(), path, metadata=task.metadata(names))
    with pytest.raises(CheckpointError, match="it would take"):
        type(task).of_checkpoint(open_checkpoint(path), DataSection())


@pytest.mark.parametrize("name", list_models())
def test_honest_models_pass_at_large_sizes(name):
    side = 1024 if name.startswith(("softmax_deit", "softmax_pvt")) else 2048
    if name.endswith("_micro"):  # made for 32×32 pictures
        side = 128
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    check_running_cost(lambda: model(torch.empty(1, 3, side, side)), model.state_dict())
