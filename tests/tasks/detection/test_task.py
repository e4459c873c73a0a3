"""The detection task's own evaluation: what is found at another size is measured at the original's."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from inline_attention.data.broken import BrokenImages
from inline_attention.data.scenes import ScenesPlan, write_scenes
from inline_attention.engine.processes import Processes
from inline_attention.models.checkpoints import CheckpointError
from inline_attention.models.reading import open_checkpoint
from inline_attention.tasks.dense import OPTIONS
from inline_attention.tasks.detection.models import DetectionOptions
from inline_attention.tasks.detection.task import DetectionTask
from inline_attention.tasks.task import DataSection, ModelSection, Reading
from tasks.largest_result import LargestResult
from tasks.small_backbones import SWIN

CPU = torch.device("cpu")


class Oracle(nn.Module):
    """Finds every object of the images it is given, in order, and nothing else."""

    def __init__(self, source):
        super().__init__()
        self._targets = iter([(source.target(index), source.sizes[index]) for index in range(len(source))])

    def forward(self, images):
        found = []
        for image in images:
            target, (height, width) = next(self._targets)
            scale = torch.tensor([image.shape[2] / int(width), image.shape[1] / int(height)]).repeat(2)
            boxes = target["boxes"] * scale
            # The part of each mask that lies in its box, as coarse as a detector's.
            masks = [
                nn.functional.interpolate(
                    mask[None, None, int(top) : int(bottom), int(left) : int(right)].float(), (28, 28), mode="area"
                )[0]
                for mask, (left, top, right, bottom) in zip(target["masks"], target["boxes"].tolist(), strict=True)
            ]
            masks = torch.stack(masks) if masks else torch.zeros(0, 1, 28, 28)
            found.append({"boxes": boxes, "labels": target["labels"], "scores": torch.ones(len(boxes)), "masks": masks})
        return found


def test_perfect_predictions_have_an_average_precision_of_one(tmp_path):
    scenes = write_scenes(tmp_path / "scenes", ScenesPlan(6, 4, size=128, seed=3))
    options = DetectionOptions(shorter_side=64, longest_side=90, width=16)
    task = DetectionTask(DataSection("coco", str(scenes), repair=True), ModelSection("inline_swin_tiny", SWIN), options)
    data = task.open()
    model = task.build_model(data.class_names)
    loader = task.validation_loader(data.validation, model, Reading(3, CPU), BrokenImages(len(data.validation)))
    evaluator, oracle = task.evaluator(data.validation, CPU), Oracle(data.validation.source)
    most_objects = 0
    for batch in loader.epoch():
        assert all(min(image.shape[1:]) <= 64 for image in batch.images)
        most_objects = max(most_objects, *(len(target["boxes"]) for target in batch.targets))
        with LargestResult() as largest:
            evaluator.add(oracle, batch)
        assert largest.elements <= 128 * 128, "one mask is as large as its image, and there is one at a time"
    assert most_objects > 1
    metrics = evaluator.compute(Processes(0, 1, CPU))
    assert metrics.boxes.ap == pytest.approx(1)
    assert metrics.masks is not None
    assert metrics.masks.ap50 > 0.9  # masks of 28×28 cells lose outlines, not objects
    assert metrics.figures["box_ap"] == pytest.approx(100)
    assert next(iter(task.metrics)) == "box_ap"


def test_sizes_to_train_on_end_at_the_one_to_evaluate_on():
    assert DetectionOptions(shorter_side=800, multi_scale_from=480).shorter_sides == tuple(range(480, 801, 32))
    assert DetectionOptions(shorter_side=96, multi_scale_from=50).shorter_sides == (64, 96)
    options = DetectionOptions(shorter_side=96, longest_side=160)
    assert (options.evaluation_sides(), options.evaluation_sides(48)) == ((96, 160), (48, 80))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda options: options | {"of_tomorrow": 1}, "another version of inline-attention: of_tomorrow"),
        (lambda options: {name: value for name, value in options.items() if name != "width"}, "version .*: width"),
        (lambda options: list(options), "damaged task_options"),
    ],
)
def test_a_file_of_another_version_is_refused(tmp_path, change, message):
    task = DetectionTask(DataSection("coco"), ModelSection("inline_swin_tiny", SWIN))
    metadata = task.metadata(["disc"])
    metadata[OPTIONS] = json.dumps(change(json.loads(metadata[OPTIONS])))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors", metadata)
    with pytest.raises(CheckpointError, match=message):
        DetectionTask.of_checkpoint(open_checkpoint(tmp_path / "model.safetensors"), DataSection("coco"))
