"""Detection and segmentation through the one engine: learning, resuming, signals, NaN, several processes, bad data."""

import csv
import json
import os
import shutil
import signal

import pytest
import torch
from PIL import Image, ImageChops
from safetensors.torch import load_file
from typer.testing import CliRunner

from engine import pair
from engine.dense import dense_config
from engine.pair import in_pair
from inline_attention.cli.main import app
from inline_attention.data.scenes import ScenesPlan, write_scenes
from inline_attention.engine import train, trainer
from inline_attention.engine.config import ConfigError, with_overrides
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.reporting import RunReport
from inline_attention.models.reading import open_checkpoint
from inline_attention.recipes import get_recipe
from inline_attention.tasks.dense import DenseTask
from inline_attention.tasks.detection.task import DetectionTask

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture(scope="module")
def _one_thread():
    """Small models gain nothing from more, and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("dense") / "scenes", ScenesPlan(8, 3, size=96, seed=3))


@pytest.fixture
def stop_after(monkeypatch):
    """Send this process a signal after so many updates, once."""

    def arrange(updates):
        report_update, sent = RunReport.update_done, []

        def update_done(self, update, *arguments):
            report_update(self, update, *arguments)
            if update == updates and not sent:
                sent.append(update)
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(RunReport, "update_done", update_done)

    return arrange


def rows_of(folder):
    return list(csv.DictReader((folder / "summary.csv").open()))


def weights_of(folder):
    return load_file(folder / "checkpoints" / "last" / "model.safetensors")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("head", ["mask_rcnn", "faster_rcnn", "retinanet", "semantic_fpn", "upernet"])
def test_training_reduces_the_loss(head, scenes, tmp_path):
    fixed = ["augmentation.hflip=0", *(["segmentation.scale=[1, 1]"] if head in ("semantic_fpn", "upernet") else [])]
    extra = ["training.epochs=6", "training.validation_interval=6", "optimizer.lr=4e-3", "run.experiment=run", *fixed]
    folder, metrics = train.train(dense_config(head, scenes, tmp_path, *extra))
    losses = [float(row["train_loss"]) for row in rows_of(folder)]
    assert losses[-1] < 0.9 * losses[0], losses
    assert set(metrics.figures) <= set(rows_of(folder)[-1])


PLAIN = ["model.arguments={embed_dim: 16, num_heads: 2, depth: 2, patch_size: 14}", "model.img_size=56"]
CONVERTED = ["model.name=vit_tiny_patch16_224", "model.attention=inline", "model.keep_softmax=[-1]"]


@pytest.mark.parametrize(
    ("head", "model"),
    [
        ("faster_rcnn", ["model.name=inline_deit_tiny"]),
        ("retinanet", CONVERTED),
        ("upernet", ["model.name=softmax_deit_tiny"]),
    ],
    ids=["inline_deit", "converted", "softmax_deit"],
)
def test_plain_backbones_are_trained_resumed_evaluated_and_used(head, model, scenes, tmp_path, capsys):
    extra = ["optimizer.lr=4e-3", "run.experiment=run", "augmentation.hflip=0", *PLAIN, *model]
    extra += ["segmentation.scale=[1, 1]"] if head in ("semantic_fpn", "upernet") else []
    train.train(dense_config(head, scenes, tmp_path, *extra, "training.epochs=1"))
    output = " ".join(capsys.readouterr().out.split())
    assert "the backbone has one stride; a simple feature pyramid makes strides" in output
    longer = ["training.epochs=6", "training.validation_interval=6", "run.resume=auto"]
    folder, metrics = train.train(dense_config(head, scenes, tmp_path, *extra, *longer))
    losses = [float(row["train_loss"]) for row in rows_of(folder)]
    assert losses[-1] < 0.95 * losses[0], losses
    weights = folder / "checkpoints" / "last" / "model.safetensors"
    arguments = ["--data-dir", scenes, "--repair", "--device", "cpu", "--batch-size", 4, "--workers", 0]
    done = invoke("eval", "-c", weights, *arguments)
    assert done.exit_code == 0, done.output
    assert str(metrics) in " ".join(done.output.split())
    photo = next((scenes / "images" / "validation").glob("*.jpg"))
    done = invoke("predict", photo, "-c", weights, "--json", "--device", "cpu")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("model", [["model.name=softmax_deit_tiny"], CONVERTED], ids=["ours", "timm"])
def test_the_backbone_of_a_converted_classifier_is_taken_with_its_attention(model, scenes, tmp_path):
    classifier = ["model.num_classes=10", *PLAIN, *model]
    if model != CONVERTED:
        classifier += ["model.attention=inline", "model.keep_softmax=[-1]"]
    digits = ["run.experiment=classifier", f"run.output={tmp_path}", "training.updates=1", "logging.tensorboard=false"]
    source, _ = train.train(with_overrides(get_recipe("digits").config, [*digits, *classifier]))
    backbone = [*PLAIN, model[0], f"model.initial_checkpoint={source / 'checkpoints' / 'last'}"]
    settings = dense_config("retinanet", scenes, tmp_path, *backbone, "training.updates=1", "run.experiment=detector")
    detector, _ = train.train(settings)
    file = open_checkpoint(detector / "checkpoints" / "last")
    assert json.loads(file.metadata["conversion"])["keep_softmax"] == [1]
    names = {name.removeprefix("backbone.body.model.") for name in file.weights}
    assert any(name.startswith("blocks.0.attn.residual") for name in names)
    assert DetectionTask.load(file)[1].attention_conversion["attention"] == "inline"


@pytest.mark.parametrize("head", ["retinanet", "semantic_fpn"])
@pytest.mark.parametrize("updates", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["mid_epoch", "end_of_epoch"])
def test_a_stopped_and_resumed_run_ends_in_the_same_bits(head, updates, scenes, tmp_path, stop_after):
    extra = ["data.workers=1"] if updates == 1 else ["ema.enabled=true"]
    whole, metrics = train.train(dense_config(head, scenes, tmp_path, "run.experiment=whole", *extra))
    stop_after(updates)
    with pytest.raises(InterruptedBySignalError) as stopped:
        train.train(dense_config(head, scenes, tmp_path, "run.experiment=parts", *extra))
    assert stopped.value.exit_code == 143
    arguments = ["run.experiment=parts", "run.resume=auto", *extra]
    parts, resumed_metrics = train.train(dense_config(head, scenes, tmp_path, *arguments))
    first, second = weights_of(whole), weights_of(parts)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert (whole / "summary.csv").read_text() == (parts / "summary.csv").read_text()
    assert str(metrics) == str(resumed_metrics)


@pytest.mark.slow
def test_mask_rcnn_draws_the_same_proposals_after_a_stop(scenes, tmp_path, stop_after):
    whole, _ = train.train(dense_config("mask_rcnn", scenes, tmp_path, "run.experiment=whole"))
    stop_after(1)
    with pytest.raises(InterruptedBySignalError):
        train.train(dense_config("mask_rcnn", scenes, tmp_path, "run.experiment=parts"))
    parts, _ = train.train(dense_config("mask_rcnn", scenes, tmp_path, "run.experiment=parts", "run.resume=auto"))
    first, second = weights_of(whole), weights_of(parts)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_run_is_as_long_as_its_updates_say(scenes, tmp_path):
    extra = ["training.updates=3", "schedule.name=poly", "schedule.decay_rate=1.0", "schedule.min_lr=0"]
    folder, metrics = train.train(dense_config("semantic_fpn", scenes, tmp_path, "run.experiment=run", *extra))
    assert [row["epoch"] for row in rows_of(folder)] == ["1", "2"]  # of two updates each: the second ends early
    assert float(rows_of(folder)[-1]["lr"]) == pytest.approx(1e-3 / 3)  # two thirds of the way down
    assert metrics is not None
    assert (folder / "checkpoints" / "last").resolve().name == "step-00000003"


def test_nan_losses_are_skipped_and_then_end_the_run(scenes, tmp_path, monkeypatch):
    loss, calls = DenseTask._loss, []

    def sometimes_nan(self, runnable, batch):
        calls.append(None)
        return loss(self, runnable, batch) * (torch.nan if len(calls) > 1 else 1.0)

    monkeypatch.setattr(DenseTask, "_loss", sometimes_nan)
    config = dense_config("retinanet", scenes, tmp_path, "run.experiment=run", "limits.nan_losses_in_a_row=2")
    with pytest.raises(trainer.DivergedError, match="3 losses or gradients in a row"):
        train.train(config)
    assert len(calls) == 4


@pytest.mark.parametrize(("head", "strategy"), [("mask_rcnn", "ddp"), ("mask_rcnn", "fsdp2"), ("upernet", "fsdp2")])
def test_two_processes_measure_what_one_does(head, strategy, scenes, tmp_path):
    # Evaluated one by one: which images share a batch differs, and a detector's heads see a little of its padding.
    sizes = ["training.batch_size=2", "training.total_batch_size=4", "training.validation_batch_size=1"]
    extra = [*sizes, "training.epochs=1", "run.experiment=two", f"distributed.strategy={strategy}"]
    outcomes = in_pair(pair.train_dense, head, str(scenes), str(tmp_path), extra)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes
    assert outcomes[0].value == outcomes[1].value
    checkpoint = tmp_path / "two" / "checkpoints" / "last"
    done = invoke("eval", "-c", checkpoint, "--data-dir", scenes, "-j", 0, "-b", 1, "--repair", "--device", "cpu")
    assert done.exit_code == 0, done.output
    sentence, *tables = done.stdout.strip().splitlines()
    assert sentence == outcomes[0].value
    header = ["AP", "AP50", "AP75", "small", "medium", "large"] if head == "mask_rcnn" else ["IoU", "accuracy"]
    assert tables[1].split() == header


def test_faults_of_the_data_are_reported_before_anything_is_written(scenes, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(scenes, broken)
    path = broken / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["bbox"][2] = 0
    content["annotations"][1]["category_id"] = 99
    path.write_text(json.dumps(content))
    (broken / "images" / "training" / content["images"][-1]["file_name"]).unlink()
    with pytest.raises(ConfigError) as error:
        train.train(dense_config("mask_rcnn", broken, tmp_path / "runs", "data.repair=false"))
    for expected in ("1 box without area", "1 object of an unknown category", "file is missing", "--repair"):
        assert expected in str(error.value)
    assert not any("--repair" in str(problem) for problem in error.value.problems)  # advice is no problem
    assert not (tmp_path / "runs").exists()
    folder, _ = train.train(dense_config("mask_rcnn", broken, tmp_path / "runs", "training.epochs=1"))
    assert rows_of(folder)


def test_what_a_run_starts_from_is_said(scenes, tmp_path, capsys):
    first, _ = train.train(dense_config("retinanet", scenes, tmp_path, "run.experiment=a", "training.epochs=1"))
    start = f"model.initial_checkpoint={first / 'checkpoints' / 'last'}"
    for head, taken in (("retinanet", "weights: all of "), ("faster_rcnn", "weights: the backbone of ")):
        capsys.readouterr()
        train.train(dense_config(head, scenes, tmp_path, f"run.experiment={head}", "training.epochs=1", start))
        assert taken in capsys.readouterr().out


def test_advice_to_repair_comes_with_what_can_be_repaired(scenes, tmp_path):
    with pytest.raises(ConfigError) as error:
        train.train(dense_config("mask_rcnn", tmp_path / "absent", tmp_path / "runs", "data.repair=false"))
    assert "--repair" not in str(error.value)


def test_a_run_is_not_resumed_with_labels_that_mean_something_else(scenes, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(scenes, copy)
    extra = ("run.experiment=one", "training.epochs=1")
    folder, _ = train.train(dense_config("retinanet", copy, tmp_path / "runs", *extra))
    for path in (copy / "annotations").glob("instances_*.json"):
        content = json.loads(path.read_text())
        names = [category["name"] for category in content["categories"]]
        for category, name in zip(content["categories"], reversed(names), strict=True):
            category["name"] = name
        path.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"run\.resume: .* was trained on the classes .*, the data has .*start another"
    ):
        train.train(dense_config("retinanet", copy, tmp_path / "runs", f"run.resume={folder}"))


@pytest.mark.parametrize(
    ("head", "override", "message"),
    [
        ("mask_rcnn", "model.name=resnet18", "no plain vision transformer"),
        ("mask_rcnn", "model.attention=inline", r"model\.attention: .*found no attention to convert"),
        ("mask_rcnn", "augmentation.mixup=0.5", r"augmentation\.mixup: has no effect on detection"),
        ("mask_rcnn", "segmentation.crop=96", r"segmentation\.crop: has no effect on detection"),
        ("mask_rcnn", "checkpoints.metric=top1", "expected a figure of detection"),
        ("retinanet", "checkpoints.metric=mask_ap", "retinanet finds no masks"),
        ("faster_rcnn", "checkpoints.metric=mask_ap", "faster_rcnn finds no masks"),
        ("retinanet", "detection.sampled_boxes=7", "has no effect on retinanet.*set it to 512"),
        ("mask_rcnn", "data.map_folder=masks", r"data\.map_folder: has no effect on detection"),
        ("mask_rcnn", "detection.multi_scale_from=480", "expected at most 64"),
        ("mask_rcnn", "data.dataset=folder", "expected coco"),
        ("mask_rcnn", "schedule.name=multistep", "such as \\[8, 11\\]"),
        ("upernet", "training.batch_size=1", "expected at least 2"),
        ("upernet", "segmentation.window_step=65", "would be missed"),
        ("semantic_fpn", "training.compile=true", r"training\.compile: has no effect on segmentation"),
    ],
)
def test_settings_that_do_not_fit_are_named(head, override, message, scenes, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train.train(dense_config(head, scenes, tmp_path, override))


@pytest.fixture(scope="module")
def photograph(tmp_path_factory):
    """4000×3000 pixels."""
    path = tmp_path_factory.mktemp("photograph") / "photo.jpg"
    Image.effect_noise((500, 375), 80).convert("RGB").resize((4000, 3000)).save(path, quality=80)
    return path


@pytest.mark.parametrize("head", ["mask_rcnn", "faster_rcnn", "semantic_fpn"])
def test_predictions_are_drawn_on_a_large_photograph(head, scenes, photograph, tmp_path):
    extra = ["run.experiment=run", "training.epochs=1"]
    folder, _ = train.train(dense_config(head, scenes, tmp_path, *extra))
    weights, target = folder / "checkpoints" / "last" / "model.safetensors", tmp_path / "out.jpg"
    done = invoke(
        "predict", photograph, "-c", weights, "--save", target, "--least-score", 0, "--json", "--device", "cpu"
    )
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)
    with Image.open(target) as drawn, Image.open(photograph) as original:
        assert drawn.width == 4000
        assert drawn.height >= 3000
        picture = drawn.convert("RGB").crop((0, 0, *original.size))
        assert ImageChops.difference(picture, original.convert("RGB")).getbbox() is not None
    if head != "semantic_fpn":
        assert found["objects"]
        assert all(0 <= item["box"][0] <= item["box"][2] <= 4000 for item in found["objects"])
    else:
        assert sum(found["shares"].values()) == pytest.approx(1)
    wrong = invoke("predict", photograph, "-c", weights, "--model", "inline_pvt_tiny")
    assert wrong.exit_code == 1
    assert "knows its model" in wrong.output


def test_help_names_all_three_tasks():
    for command, words in {"predict": ("detector", "segmenter"), "eval": ("AP", "mIoU")}.items():
        text = invoke(command, "--help").output
        assert all(word in text for word in words), text
