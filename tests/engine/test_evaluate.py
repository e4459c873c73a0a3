"""`inline eval` finds what timm and torchvision find, to the last digit, whoever shares the work."""

import json
import shutil

import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.utils import accuracy
from typer.testing import CliRunner

from data.conftest import noise
from engine import pair
from engine.pair import in_pair
from inline_attention.cli.main import app
from inline_attention.data.scenes import ScenesPlan, write_scenes
from inline_attention.engine.config import with_overrides
from inline_attention.engine.evaluate import evaluate_checkpoint
from inline_attention.engine.train import train
from inline_attention.models.checkpoints import CheckpointError, open_checkpoint, save_weights
from inline_attention.recipes import get_recipe
from inline_attention.tasks.dense_prediction import ObjectFinder
from inline_attention.tasks.detection.models import DetectionOptions, Detector
from inline_attention.tasks.detection.task import DetectionTask
from inline_attention.tasks.task import DataSection, ModelSection
from tasks.small_backbones import SWIN

CLASSES = [f"class_{number}" for number in range(7)]
ARGUMENTS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 1, "depth": 1, "num_classes": len(CLASSES)}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """37 pictures of several shapes and formats: no batch size divides their number, and neither do two processes."""
    root = tmp_path_factory.mktemp("pictures")
    for number in range(37):
        folder = root / "val" / CLASSES[number % len(CLASSES)]
        folder.mkdir(parents=True, exist_ok=True)
        picture = noise(number, (30 + 5 * (number % 9), 70 - 4 * (number % 7)))
        picture.save(folder / f"{number}.{('jpg', 'png', 'webp')[number % 3]}")
    return root


@pytest.fixture(scope="module", params=["as_initialised", "all_logits_equal"])
def checkpoint(request, tmp_path_factory):
    torch.manual_seed(0)
    model = timm.create_model("inline_deit_tiny", **ARGUMENTS)
    torch.nn.init.normal_(model.head.weight)
    if request.param == "all_logits_equal":
        torch.nn.init.zeros_(model.head.weight)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    metadata = {
        "model": "inline_deit_tiny",
        "model_arguments": json.dumps(ARGUMENTS),
        "class_names": json.dumps(CLASSES),
    }
    save_weights(model.state_dict(), path, metadata=metadata)
    return path, model.eval()


@pytest.fixture(scope="module")
def expected(pictures, checkpoint):
    """By timm's transform and `accuracy`, and by torchvision's rule, over all pictures at once."""
    _, model = checkpoint
    described = resolve_data_config({"input_size": (3, 32, 32)}, model=model)
    transform = create_transform(**described)
    files = sorted((pictures / "val").rglob("*.*"))
    images = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
    targets = torch.tensor([CLASSES.index(file.parent.name) for file in files])
    with torch.no_grad():
        logits = model(images)
    by_timm = [value.item() for value in accuracy(logits, targets, topk=(1, 5))]
    hits = logits.topk(5).indices == targets[:, None]
    by_hand = [100 * hits[:, :count].any(1).sum().item() / len(files) for count in (1, 5)]
    assert by_timm == pytest.approx(by_hand, rel=1e-6)
    return by_hand


@pytest.mark.parametrize("name", ["inline_swin_tiny", "softmax_pvt_tiny", "resnet18"])
def test_a_model_of_another_family_than_the_file_s_is_refused_in_a_sentence(checkpoint, pictures, name):
    with pytest.raises(CheckpointError, match=f"is of inline_deit_tiny, not of {name}; leave --model out") as refused:
        evaluate_checkpoint(checkpoint[0], DataSection(dir=str(pictures), workers=0), model_name=name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("batch_size", [5, 16, 37, 64])
def test_a_ragged_last_batch_counts_as_it_should(checkpoint, pictures, expected, batch_size):
    metrics = evaluate_checkpoint(checkpoint[0], DataSection(dir=str(pictures), workers=0), batch_size=batch_size)
    assert (metrics.top1, metrics.top5, metrics.count) == (*expected, 37)


def test_two_processes_count_no_sample_twice(checkpoint, pictures, expected):
    data = DataSection(dir=str(pictures), workers=1)
    main, other = in_pair(pair.measure, checkpoint[0], data, 6)  # 19 pictures and 18, in four batches and three
    assert (main.error, other.error) == (None, None), main.message
    assert (main.value["top1"], main.value["top5"], main.value["count"]) == (*expected, 37)
    assert other.value is None  # one of them speaks


def test_the_command_writes_the_same_figures(checkpoint, pictures, expected, tmp_path):
    arguments = ["eval", "--checkpoint", checkpoint[0], "--data-dir", pictures, "-b", "6", "-j", "0"]
    done = CliRunner().invoke(app, [str(word) for word in (*arguments, "--results-file", tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "out.json").read_text())
    assert [figures["top1"], figures["top5"], figures["count"]] == [*expected, 37]
    assert f"top-1 {expected[0]:.3f} %, top-5 {expected[1]:.3f} %" in done.output


def test_an_unknown_precision_is_refused(checkpoint, pictures):
    with pytest.raises(ValueError, match="amp must be bf16, fp16, auto or off, got 'bfloat16'"):
        evaluate_checkpoint(checkpoint[0], DataSection(dir=str(pictures), workers=0), amp="bfloat16")


def test_results_are_not_written_onto_a_folder(checkpoint, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "inline_attention.engine.evaluate.evaluate_checkpoint", lambda *_, **__: pytest.fail("evaluated")
    )
    arguments = ["eval", "--checkpoint", checkpoint[0], "--data-dir", pictures, "--results-file", tmp_path]
    done = CliRunner().invoke(app, [str(word) for word in arguments])
    assert done.exit_code == 1
    assert "is a folder; name a file" in done.output


def test_results_that_cannot_be_written_are_a_sentence(checkpoint, pictures, monkeypatch):
    arguments = ["eval", "--checkpoint", checkpoint[0], "--data-dir", pictures, "-j", "0"]
    done = CliRunner().invoke(app, [str(word) for word in (*arguments, "--results-file", "/dev/full")])
    assert done.exit_code == 1
    assert "top-1" in done.output
    assert "cannot write /dev/full: No space left on device; name another file" in done.output


def test_too_little_memory_is_a_sentence(checkpoint, pictures, monkeypatch):
    def exhausted(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr("inline_attention.engine.evaluate.evaluate_checkpoint", exhausted)
    done = CliRunner().invoke(app, ["eval", "--checkpoint", str(checkpoint[0]), "--data-dir", str(pictures)])
    assert done.exit_code == 1
    assert "memory is too small for this; try" in done.output


def test_a_classifier_asks_for_data_of_either_kind(checkpoint):
    with pytest.raises(ValueError, match="in no run: name the data with --data-dir, or with --dataset digits"):
        evaluate_checkpoint(checkpoint[0], DataSection(workers=0))


@pytest.fixture
def detector(tmp_path):
    """Scenes, and the weights of a detector for them."""
    scenes = write_scenes(tmp_path / "scenes", ScenesPlan(8, 3, size=96, seed=3))
    options = DetectionOptions(head="retinanet", shorter_side=64, longest_side=80, width=16)
    data = DataSection("coco", str(scenes), repair=True)
    task = DetectionTask(data, ModelSection("inline_swin_tiny", SWIN), options)
    names, path = task.open().class_names, tmp_path / "model.safetensors"
    save_weights(task.build_model(names), path, metadata=task.metadata(names))
    return scenes, path


@pytest.mark.parametrize(
    ("amp", "of_backbone"), [("off", torch.float32), ("fp16", torch.float32), ("bf16", torch.bfloat16)]
)
def test_a_detector_is_measured_with_its_backbone_in_bfloat16(detector, monkeypatch, amp, of_backbone):
    scenes, path = detector
    forward, seen = Detector.forward, []

    def noted(self, images, *rest):
        seen.append((self.backbone.norms[0].weight.dtype, self.pyramid.levels.inner_blocks[0][0].weight.dtype))
        return forward(self, images, *rest)

    monkeypatch.setattr(Detector, "forward", noted)
    metrics = evaluate_checkpoint(path, DataSection(dir=str(scenes), workers=0, repair=True), amp=amp, device="cpu")
    assert set(seen) == {(of_backbone, torch.float32)}
    assert metrics is not None


def test_a_detector_looks_at_another_size_as_it_does_to_predict(detector, monkeypatch):
    scenes, path = detector
    forward, seen = Detector.forward, []

    def noted(self, images, *rest):
        seen.extend(tuple(image.shape[1:]) for image in images)
        return forward(self, images, *rest)

    monkeypatch.setattr(Detector, "forward", noted)
    evaluate_checkpoint(
        path, DataSection(dir=str(scenes), workers=0, repair=True), size=128, batch_size=1, device="cpu"
    )
    evaluated = seen.copy()
    seen.clear()
    pictures = sorted((scenes / "images" / "validation").iterdir())
    list(ObjectFinder(open_checkpoint(path), shorter_side=128).predict_files(pictures))
    assert evaluated == seen
    assert max(map(max, seen)) == 160  # twice the longest side, as the shorter one is doubled


def test_what_was_repaired_is_said_and_recorded(detector, tmp_path):
    scenes, path = detector
    annotations = scenes / "annotations" / "instances_val.json"
    content = json.loads(annotations.read_text())
    content["annotations"][0]["category_id"] = 99
    annotations.write_text(json.dumps(content))
    arguments = ["eval", "--checkpoint", path, "--data-dir", scenes, "-j", "0", "--device", "cpu"]
    refused = CliRunner().invoke(app, [str(word) for word in arguments])
    assert refused.exit_code == 1
    assert "1 object of an unknown category" in refused.output
    results = tmp_path / "out.json"
    done = CliRunner().invoke(app, [str(word) for word in (*arguments, "--repair", "--results-file", results)])
    assert done.exit_code == 0, done.output
    assert "1 object of an unknown category" in done.stderr
    assert "unknown category" not in done.stdout
    names = [category["name"] for category in content["categories"]]
    first_columns = [line.split()[0] for line in done.stdout.splitlines() if line]
    # A sentence, two tables with a header each, and where the file is.
    assert first_columns == ["boxes:", "AP", "boxes", "boxes", *names, "Metrics"]
    (note,) = json.loads(results.read_text())["repaired"]
    assert "1 object of an unknown category" in note


def test_folders_of_segmenters_are_refused_for_others(detector):
    scenes, path = detector
    with pytest.raises(ValueError, match="leave out --image-folder"):
        evaluate_checkpoint(path, DataSection(dir=str(scenes), map_folder="masks", workers=0), device="cpu")


def test_few_images_at_once_where_they_are_large(detector, monkeypatch):
    scenes, path = detector
    forward, seen = Detector.forward, []

    def noted(self, images, *rest):
        seen.append(len(images))
        return forward(self, images, *rest)

    monkeypatch.setattr(Detector, "forward", noted)
    monkeypatch.setattr("inline_attention.engine.evaluate.OTHERS_BATCH", 2)
    evaluate_checkpoint(path, DataSection(dir=str(scenes), workers=0, repair=True), device="cpu")
    assert seen == [2, 1]


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """A run of a tiny classifier on digits."""
    settings = ["training.epochs=1", "model.arguments={depth: 1, embed_dim: 16, num_heads: 1, patch_size: 4}"]
    output = [f"run.output={tmp_path_factory.mktemp('runs')}", "run.experiment=digits", "logging.tensorboard=false"]
    folder, metrics = train(with_overrides(get_recipe("digits").config, [*settings, *output]))
    return folder, str(metrics)


@pytest.mark.parametrize("place", [".", "checkpoints/best", "checkpoints/last/model.safetensors"])
def test_a_run_knows_its_data(digits_run, place):
    folder, metrics = digits_run
    done = CliRunner().invoke(app, ["eval", "-c", str(folder / place), "-j", "0", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [metrics]
    assert "data of the run: digits, split validation" in done.stderr
    kind = "last" if "last" in place else "best"
    assert f"weights: {folder}/checkpoints/{kind}/model.safetensors (epoch 1)" in done.stderr


def test_a_stranger_s_run_downloads_nothing(digits_run, tmp_path, pictures, monkeypatch):
    monkeypatch.setattr("inline_attention.engine.evaluate.open_dataset", lambda *_: pytest.fail("opened"))
    run = tmp_path / "run"
    shutil.copytree(digits_run[0], run)
    settings = (run / "args.yaml").read_text()
    assert "dataset: digits" in settings
    (run / "args.yaml").write_text(settings.replace("dataset: digits", "dataset: hfds/someone/data"))
    done = CliRunner().invoke(app, ["eval", "-c", str(run), "-j", "0"])
    assert done.exit_code == 1
    assert "would be downloaded; if you trust it, add --dataset hfds/someone/data" in done.output.replace("\n", " ")
    (run / "args.yaml").write_text("data: [")
    assert CliRunner().invoke(app, ["eval", "-c", str(run), "-j", "0"]).exit_code == 1


def test_options_win_over_the_run_s_data(digits_run, pictures):
    """Its ten digits are not the classes of the pictures."""
    done = CliRunner().invoke(app, ["eval", "-c", str(digits_run[0]), "--data-dir", str(pictures), "-j", "0"])
    assert done.exit_code == 1
    assert "class_0" in done.output
