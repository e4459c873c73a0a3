"""Linearization through the engine: measured, distilled, resumed, refused."""

import json
import signal

import pytest
import timm
import torch
from safetensors.torch import load_file

from engine import pair
from engine.pair import in_pair
from engine.runs import TINY, assert_same_end, config
from inline_attention.engine import evaluate
from inline_attention.engine import linearize as linearizing
from inline_attention.engine.config import ConfigError
from inline_attention.engine.config.checks import check
from inline_attention.engine.evaluate import evaluate_checkpoint
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.linearize import describe_teacher, fetch_teacher, linearize
from inline_attention.engine.train import train
from inline_attention.models.checkpoints import save_weights
from inline_attention.models.hub import save_pretrained
from inline_attention.models.reading import CheckpointError, open_checkpoint
from inline_attention.tasks.classification.distillation import converted_attentions
from inline_attention.tasks.task import DataSection

NAME = "vit_tiny_patch16_224"
ARGUMENTS = {"patch_size": 2, "embed_dim": 16, "num_heads": 2, "depth": 2}
CLASSES = [str(number) for number in range(10)]
STUDENT = [
    "model.attention=inline",
    "model.drop_path=null",
    "optimizer.name=muon",
    "optimizer.lr=2e-3",
    "checkpoints.interval_epochs=1",
]


def write_teacher(path, classes=10, names=CLASSES, **arguments):
    torch.manual_seed(0)
    model = timm.create_model(NAME, **ARGUMENTS, **{"img_size": 8, "num_classes": classes} | arguments)
    with torch.no_grad():  # large enough for attention to matter
        for block in model.blocks:
            block.attn.qkv.weight.normal_(std=0.4)
            block.attn.proj.weight.normal_(std=0.4)
    arguments = {**ARGUMENTS, "img_size": 8, "num_classes": classes}
    notes = {"model": NAME, "model_arguments": json.dumps(arguments), "crop_pct": "1.0"}
    if names is not None:
        notes["class_names"] = json.dumps(names)
    save_weights(model, path, metadata=notes)
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


def settings(tmp_path, teacher, *overrides, match="logits"):
    return [*STUDENT, *describe_teacher(teacher), f"distillation.match={match}", f"run.output={tmp_path}", *overrides]


def student(tmp_path, teacher, *overrides, match="logits"):
    return config(tmp_path, *settings(tmp_path, teacher, "run.experiment=run", *overrides, match=match))


def test_features_come_closer_without_labels_and_the_head_stays(tmp_path, teacher):
    result = linearize(student(tmp_path, teacher, "training.epochs=4", match="features"))
    assert set(result.figures) == {"converted", "linearized"}
    before, after = (result.figures[stage] for stage in ("converted", "linearized"))
    assert before["token_r2"] < after["token_r2"] <= 100
    file = open_checkpoint(result.weights)
    assert json.loads(file.metadata["class_names"]) == CLASSES
    assert json.loads(file.metadata["conversion"])["attention"] == "inline"
    assert result.parameters["linearized"] > result.parameters["teacher"]
    assert evaluate_checkpoint(result.weights, DataSection("digits"), device="cpu").count == 360


def test_a_first_phase_trains_attention_only(tmp_path, teacher):
    result = linearize(student(tmp_path, teacher, "training.epochs=1"), attention_epochs=2)
    assert set(result.figures) == {"teacher", "converted", "linearized"}
    start = load_file(teacher)
    first = load_file(tmp_path / "run" / "attention" / "checkpoints" / "last" / "model.safetensors")
    changed = {name for name, value in start.items() if not torch.equal(value, first[name])}
    assert changed
    assert all(".attn." in name for name in changed)
    second = load_file(result.weights)
    assert not torch.equal(second["blocks.0.mlp.fc1.weight"], start["blocks.0.mlp.fc1.weight"])


def test_a_killed_run_resumes_in_the_same_bits_and_measures_nothing_twice(tmp_path, teacher, monkeypatch):
    whole = linearize(student(tmp_path, teacher, "run.experiment=whole"))

    def stop_after_the_first_epoch(*arguments, **options):
        return train(*arguments, on_epoch=lambda _: signal.raise_signal(signal.SIGTERM), **options)

    with monkeypatch.context() as patch:
        patch.setattr(linearizing, "train", stop_after_the_first_epoch)
        with pytest.raises(InterruptedBySignalError):
            linearize(student(tmp_path, teacher, "run.experiment=parts"))
    with pytest.raises(ConfigError, match="holds checkpoints already"):
        linearize(student(tmp_path, teacher, "run.experiment=parts"))
    measured = []
    count = evaluate.evaluate_task
    monkeypatch.setattr(linearizing, "evaluate_task", lambda *given: measured.append(given[0]) or count(*given))
    parts = linearize(student(tmp_path, teacher, "run.experiment=parts", "run.resume=auto"))
    assert len(measured) == 1  # the result
    assert parts.figures == whole.figures
    assert_same_end(whole.folder, parts.folder)


def test_the_teacher_is_compiled_as_the_student_is(tmp_path, teacher, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, *, mode: compiled.append((model, mode)) or model)
    train(student(tmp_path, teacher, "training.updates=1", "training.compile=true"), on_epoch=lambda _: None)
    assert [mode for _, mode in compiled] == ["default", "default"]
    assert [bool(converted_attentions(model)) for model, _ in compiled] == [True, False]
    assert not compiled[1][0].training


def test_a_damaged_result_file_is_measured_again(tmp_path, teacher):
    first = linearize(student(tmp_path, teacher))
    (first.folder / "linearize.json").write_text('{"figures": {"teacher": 3}}')
    again = linearize(student(tmp_path, teacher, "run.resume=auto"))
    assert again.figures == first.figures


def test_a_student_of_another_size_is_rebuilt_from_its_file(tmp_path, teacher):
    larger = ("model.img_size=16", "data.in_memory=false", "augmentation.crop=resized", "training.updates=2")
    result = linearize(student(tmp_path, teacher, *larger), attention_epochs=1)
    first = open_checkpoint(tmp_path / "run" / "attention" / "checkpoints" / "last" / "model.safetensors")
    assert first.weights["pos_embed"].shape == (1, 17, 16)
    assert json.loads(open_checkpoint(result.weights).metadata["model_arguments"])["img_size"] == 16
    assert load_file(result.weights)["pos_embed"].shape == (1, 65, 16)
    found = evaluate_checkpoint(result.weights, DataSection("digits"), device="cpu")
    assert found.top1 == pytest.approx(result.figures["linearized"]["top1"])


def test_a_student_of_another_shape_learns_from_square_images(tmp_path, teacher):
    wide = ("model.img_size=[8, 12]", "data.in_memory=false", "augmentation.crop=resized", "training.updates=1")
    assert linearize(student(tmp_path, teacher, *wide)).figures["linearized"]["top1"] > 0


def test_other_classes_are_refused(tmp_path):
    fewer = write_teacher(tmp_path / "fewer.safetensors", classes=3, names=None)
    with pytest.raises(ConfigError, match="has 3 classes, the data 10 classes; fine-tune the teacher"):
        linearize(student(tmp_path, fewer))
    renamed = write_teacher(tmp_path / "renamed.safetensors", names=[*CLASSES[1:], CLASSES[0]])
    with pytest.raises(ConfigError, match="knows the classes"):
        linearize(student(tmp_path, renamed))
    headless = write_teacher(tmp_path / "headless.safetensors", classes=0, names=None)
    with pytest.raises(ConfigError, match="has no classifier"):
        linearize(student(tmp_path, headless))
    assert not (tmp_path / "run" / "checkpoints").exists()
    # Features need no classes.
    assert linearize(student(tmp_path, headless, "training.updates=1", match="features")).figures["linearized"]


def test_a_converted_model_is_no_teacher(tmp_path, teacher):
    folder, _ = train(student(tmp_path, teacher, "training.updates=1"), on_epoch=lambda _: None)
    with pytest.raises(ValueError, match="converted attention already"):
        describe_teacher(folder)


def test_a_model_without_attention_is_refused(tmp_path, teacher):
    other = ("model.name=resnet10t", "model.arguments={}", "model.img_size=null", "distillation.teacher_size=null")
    found = check(student(tmp_path, teacher, *other))
    assert any(problem.path == "model.attention" and "no attention to convert" in problem.message for problem in found)


@pytest.mark.parametrize(
    ("overrides", "path", "text"),
    [
        (["model.attention=null"], "model.attention", "the student's attention"),
        (["model.initial_checkpoint=null"], "distillation.teacher", "the teacher's weights"),
        (["distillation.logits_weight=0", "distillation.labels_weight=0"], "distillation.logits_weight", "above 0"),
        (["data.dataset=pictures", "data.dir=x"], "data.dataset", "has no classes"),
        (["distillation.match=features", "augmentation.mixup=0.8"], "augmentation.mixup", "no labels to mix"),
        (["distillation.match=attention", "model.img_size=16"], "distillation.teacher_size", "the student's size"),
        (["distillation.match=attention", "distributed.strategy=fsdp2"], "distributed.strategy", "expected ddp"),
        (["distillation.match=off"], "distillation.teacher_size", "has no effect"),
        (["distillation.match=features", "checkpoints.metric=top1"], "checkpoints.metric", "token_r2"),
    ],
)
def test_settings_that_do_not_fit_are_named(tmp_path, teacher, overrides, path, text):
    found = {problem.path: problem.message for problem in check(student(tmp_path, teacher, *overrides))}
    assert text in found[path], found


def test_missing_weights_are_refused_before_training(tmp_path, teacher):
    with pytest.raises(CheckpointError, match=r"gone.safetensors"):
        linearize(student(tmp_path, teacher, f"model.initial_checkpoint={tmp_path / 'gone.safetensors'}"))


def test_pretrained_weights_are_kept_in_a_file(tmp_path, monkeypatch):
    loaded = []

    def create_model(name, arguments, pretrained):
        assert arguments == {}
        loaded.append((name, pretrained))
        return timm.create_model(name, **ARGUMENTS, img_size=8, num_classes=5)

    monkeypatch.setattr(linearizing, "create_described_model", create_model)
    path = tmp_path / "run" / "teacher.safetensors"
    for _ in range(2):  # the second finds the file
        fetch_teacher(NAME, path)
    assert loaded == [(NAME, True)]
    assert json.loads(open_checkpoint(path).metadata["model_arguments"]) == {"num_classes": 5}
    monkeypatch.setattr(linearizing, "create_described_model", lambda *_, **__: timm.create_model("no such model"))
    with pytest.raises(ValueError, match=r"cannot be loaded .* --initial-checkpoint FILE"):
        fetch_teacher(NAME, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="found no attention to convert in ResNet"):  # and nothing is downloaded
        fetch_teacher("resnet18", tmp_path / "other.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_give_what_one_gives(tmp_path, teacher, strategy):
    """All phases; the first one, which freezes weights, with ddp only."""
    common = ["training.epochs=1", "training.batch_size=64", "training.total_batch_size=128"]
    first_phase = int(strategy == "ddp")
    alone = config(tmp_path, *settings(tmp_path, teacher, *common, "run.experiment=alone"))
    one = linearize(alone, attention_epochs=first_phase).figures
    overrides = settings(tmp_path, teacher, *common, "run.experiment=two", f"distributed.strategy={strategy}")
    outcomes = in_pair(pair.linearize, [*TINY, *overrides], first_phase)
    for outcome in outcomes:
        assert outcome.error is None, outcome.message
        assert outcome.value["converted"] == pytest.approx(one["converted"], rel=1e-4)
        assert outcome.value["linearized"] == pytest.approx(one["linearized"], rel=2e-2)


def test_a_folder_in_the_hubs_layout_is_a_teacher(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", patch_size=2, embed_dim=24, depth=1, img_size=8, num_classes=10)
    save_pretrained(model, tmp_path)
    settings = dict(text.split("=", 1) for text in describe_teacher(tmp_path))
    assert settings["model.name"] == '"vit_tiny_patch16_224"'
    expected = {"patch_size": 2, "embed_dim": 24, "depth": 1, "global_pool": "token"}
    assert json.loads(settings["model.arguments"]) == expected
    assert json.loads(settings["distillation.teacher_size"]) in (8, [8, 8])


def test_weights_without_notes_are_a_teacher_at_their_own_size(tmp_path):
    model = timm.create_model(NAME, **ARGUMENTS, img_size=12, num_classes=10)
    path = tmp_path / "plain.pth"
    torch.save(model.state_dict(), path)
    found = dict(text.split("=", 1) for text in describe_teacher(path, NAME))
    assert found["distillation.teacher_size"] == found["model.img_size"] == "12"  # 6×6 positions, patches of 2
    torch.save(timm.create_model(NAME, depth=1, num_classes=10).state_dict(), path)
    found = dict(text.split("=", 1) for text in describe_teacher(path, NAME))
    assert found["distillation.teacher_size"] == "[224, 224]"
    assert "model.img_size" not in found


def test_a_backbone_without_head_has_no_accuracy(tmp_path):
    path = write_teacher(tmp_path / "backbone.safetensors", classes=0, names=None)
    with pytest.raises(CheckpointError, match="no head to classify with"):
        evaluate_checkpoint(path, DataSection("digits"), device="cpu")


def test_a_converted_file_of_another_model_is_named(tmp_path, teacher):
    folder = linearize(config(tmp_path, *settings(tmp_path, teacher), "training.updates=1")).folder
    changed = [
        "model.name=inline_swin_tiny",
        f"model.initial_checkpoint={folder}",
        "model.arguments={}",
        "model.img_size=32",
    ]
    with pytest.raises(ConfigError, match="is of vit_tiny_patch16_224, not of inline_swin_tiny; add --model"):
        train(config(tmp_path / "other", *changed))


def test_weights_under_another_name_of_the_same_shapes_are_a_teacher(tmp_path, teacher):
    named = student(tmp_path, teacher, "model.name=vit_tiny_patch16_384", "training.updates=1")
    result = linearize(named, attention_epochs=1)  # the second phase starts from other weights than the teacher's
    assert set(result.figures) == {"teacher", "converted", "linearized"}


def test_a_convolutional_network_trains_at_a_size_and_teaches_a_transformer(tmp_path):
    plain = ("model.drop_path=null", "training.epochs=2", "optimizer.lr=2e-3", "optimizer.lr_base_size=null")
    network = ("model.name=resnet10t", "model.arguments={}", "model.img_size=32", "run.experiment=network")
    folder, _ = train(config(tmp_path, *plain, *network, f"run.output={tmp_path}"), on_epoch=lambda _: None)
    file = open_checkpoint(folder / "checkpoints" / "last" / "model.safetensors")
    assert json.loads(file.metadata["model_arguments"])["img_size"] == 32
    measured = evaluate_checkpoint(file.path, DataSection("digits"), device="cpu")
    row = (folder / "summary.csv").read_text().splitlines()[-1].split(",")
    assert f"{measured.top1:.6g}" in [f"{float(value):.6g}" for value in row if value]

    learner = (
        f"model.name={NAME}", f"model.arguments={json.dumps(ARGUMENTS)}", "model.img_size=8", "run.experiment=learner",
        "distillation.match=logits", f"distillation.teacher={folder}", "distillation.features_weight=0",
    )  # fmt: skip
    losses = []
    folder, metrics = train(
        config(tmp_path, *plain, *learner, f"run.output={tmp_path}"),
        on_epoch=lambda row: losses.append(row["train_loss"]),
    )
    assert losses[1] < losses[0]
    assert metrics is not None
    file = open_checkpoint(folder / "checkpoints" / "last" / "model.safetensors")
    assert (file.metadata["model"], "conversion" in file.metadata) == (NAME, False)

    compared = student(tmp_path, write_teacher(tmp_path / "vit.safetensors"), *learner[-2:])
    with pytest.raises(ConfigError, match=f"expected {NAME}, which is compared with its conversion, got resnet10t"):
        linearize(compared)
