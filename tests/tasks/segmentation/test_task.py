"""The segmentation task's own evaluation: of the right classes, at the size that was asked for."""

import shutil

import pytest
import torch

from inline_attention.data.broken import BrokenImages
from inline_attention.data.scenes import ScenesPlan, write_scenes
from inline_attention.data.sources import DataError
from inline_attention.models.checkpoints import CheckpointError, open_checkpoint, save_weights
from inline_attention.tasks.segmentation.models import SegmentationOptions
from inline_attention.tasks.segmentation.task import SegmentationTask
from inline_attention.tasks.task import DataSection, ModelSection, Reading
from tasks.small_backbones import SWIN

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("task") / "scenes", ScenesPlan(2, 2, size=96, seed=3))


def task_on(folder, **options):
    choice = DataSection("pairs", str(folder), reduce_zero_label=True, repair=True)
    return SegmentationTask(choice, ModelSection("inline_swin_tiny", SWIN), SegmentationOptions(width=16, **options))


def class_names(folder):
    return (folder / "classes.txt").read_text().split()


def test_data_with_other_classes_than_the_model_is_refused(scenes, tmp_path):
    names, other = class_names(scenes), tmp_path / "other"
    shutil.copytree(scenes, other)
    assert len(task_on(other).open_validation(names)[0]) == 2
    for wrong in (["cat", "dog", "hat"], names[::-1]):
        (other / "classes.txt").write_text("\n".join(wrong))
        with pytest.raises(DataError, match=rf"has the classes {wrong[0]}, .*the model knows {names[0]}, .* the same"):
            task_on(other).open_validation(names)
    (other / "classes.txt").unlink()  # the maps alone say nothing against it
    assert len(task_on(other).open_validation(names)[0]) == 2


def test_another_size_to_evaluate_at_leaves_windows_as_they_are(scenes):
    task = task_on(scenes, crop=96, inference="sliding", window_step=80)
    task.evaluation_side = 64
    source, notes = task.open_validation(class_names(scenes))
    assert notes == ()
    loader = task.validation_loader(source, task.build_model(source.class_names), Reading(2, CPU), BrokenImages(2))
    assert all(min(image.shape[1:]) == 64 for batch in loader.epoch() for image in batch.images)
    assert (task.options.windows.side, task.options.windows.step) == (96, 80)


def test_a_file_may_not_ask_for_millions_of_windows(tmp_path):
    path = tmp_path / "model.safetensors"
    for step, message in ((1, "asks for a window every 1 pixels"), (6, None)):
        task = task_on(tmp_path, crop=96, inference="sliding", window_step=step)
        save_weights(task.build_model(["a", "b"]), path, metadata=task.metadata(["a", "b"]))
        if message is None:
            assert (
                SegmentationTask.of_checkpoint(open_checkpoint(path), DataSection("pairs"))[0].options.window_step == 6
            )
        else:
            with pytest.raises(CheckpointError, match=message):
                SegmentationTask.of_checkpoint(open_checkpoint(path), DataSection("pairs"))
