"""Distillation: what is matched, and that a student equal to its teacher has nothing to learn."""

import copy
import json
import math
from dataclasses import replace

import pytest
import timm
import torch
from torch.nn import functional as F

from inline_attention import InLineAttention, convert_attention
from inline_attention.data.batch import Batch
from inline_attention.layers.attention import SoftmaxAttention
from inline_attention.models.checkpoints import save_weights
from inline_attention.support.settings import ConfigError
from inline_attention.tasks.classification.distillation import (
    AttentionObjective,
    DistillationObjective,
    DistillationSection,
    DistillationTask,
    FeatureEvaluator,
    Variance,
    converted_attentions,
    resized_tokens,
    soft_cross_entropy,
    token_layer,
    unexplained_share,
)
from inline_attention.tasks.classification.task import AugmentationSection, Objective
from inline_attention.tasks.task import DataSection, ModelSection

SMALL = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def small_vit(**arguments):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SMALL | arguments).eval()
    with torch.no_grad():  # large enough for attention to matter
        for block in model.blocks:
            block.attn.qkv.weight.normal_(std=0.7)
            block.attn.proj.weight.normal_(std=0.5)
    return model


def student_of(teacher, **options):
    student = copy.deepcopy(teacher)
    convert_attention(student, **options)
    return student.train()


def batch(size=8, count=4):
    images = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))
    return Batch(0, 0, images, torch.arange(count) % 3, torch.arange(count))


class Alone:
    """Collectives of one process."""

    def gather(self, value):
        return [value]


@pytest.mark.parametrize("match", ["logits", "features"])
def test_a_student_with_softmax_has_nothing_to_learn_from_its_teacher(match):
    teacher = small_vit()
    student = student_of(teacher, attention=SoftmaxAttention)
    settings = DistillationSection(match=match, labels_weight=0.0)
    labels = Objective() if match == "logits" else None
    objective = DistillationObjective(teacher, student, settings, None, labels)
    assert objective(student, batch()).item() == pytest.approx(0, abs=1e-6)
    student = student_of(teacher, attention=InLineAttention)
    objective = DistillationObjective(teacher, student, settings, None, labels)
    loss = objective(student, batch())
    loss.backward()
    assert loss > 1e-3
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_the_loss_is_the_sum_of_its_parts():
    teacher, some = small_vit(), batch()
    student = student_of(teacher)
    settings = DistillationSection(
        match="logits", temperature=3.0, logits_weight=0.5, labels_weight=0.25, features_weight=2
    )
    found = DistillationObjective(teacher, student, settings, None, Objective())(student, some)
    student.eval()
    with torch.no_grad():
        logits, expected = student(some.images), teacher(some.images)
        tokens, expected_tokens = student.forward_features(some.images), teacher.forward_features(some.images)
        shares, own = (expected / 3).softmax(-1), (logits / 3).log_softmax(-1)
        kl = 9 * (shares * ((expected / 3).log_softmax(-1) - own)).sum(1).mean()
        error = (tokens - expected_tokens).square().sum()
        spread = (expected_tokens - expected_tokens.mean((0, 1))).square().sum()
    labels = F.cross_entropy(logits, some.targets)
    torch.testing.assert_close(found.detach(), 0.5 * kl + 0.25 * labels + 2 * error / spread)


@pytest.mark.parametrize("match", ["logits", "features"])
def test_a_compiled_teacher_gives_the_same_loss(match):
    teacher, settings = small_vit(), DistillationSection(match=match)
    labels = Objective() if match == "logits" else None
    first, second = student_of(teacher), student_of(teacher)
    eager = DistillationObjective(teacher, first, settings, None, labels)
    expected = [eager(first, batch()).item() for _ in range(2)]
    calls = []

    def counting(graph, inputs):
        calls.append(len(inputs))
        return graph

    teacher = small_vit()
    compiled = torch.compile(teacher, backend=counting, fullgraph=True)
    objective = DistillationObjective(teacher, second, settings, None, labels, run_teacher=compiled)
    second_runnable = torch.compile(second, backend=counting)
    assert [objective(second_runnable, batch()).item() for _ in range(2)] == pytest.approx(expected)
    assert len(calls) == 2  # each model once, although evaluation and training come in turns
    evaluator = FeatureEvaluator(teacher, None)
    evaluator.add(second.eval(), batch())
    second.train()
    assert objective(second_runnable, batch()).item() == pytest.approx(expected[0])
    assert len(calls) == 2


def test_attention_is_matched_on_the_teachers_inputs():
    teacher, some = small_vit(), batch()
    student = student_of(teacher, local_residual=False)
    with torch.no_grad():
        student.blocks[0].mlp.fc1.weight.zero_()  # must not matter: the second block sees the teacher's tokens
    objective = AttentionObjective(teacher, student)
    shares = []
    with torch.no_grad():
        tokens = teacher.patch_embed(some.images)
        tokens = teacher.norm_pre(teacher.patch_drop(teacher._pos_embed(tokens)))
        for block, own in zip(teacher.blocks, student.blocks, strict=True):
            given = block.norm1(tokens)
            shares.append(unexplained_share(copy.deepcopy(own.attn).eval()(given), block.attn(given)))
            tokens = block(tokens)
    loss = objective(student, some)
    torch.testing.assert_close(loss.detach(), torch.stack(shares).mean())
    loss.backward()
    assert converted_attentions(student) == ["blocks.0.attn", "blocks.1.attn"]
    assert student.blocks[1].attn.qkv.weight.grad is not None
    assert student.blocks[0].mlp.fc2.weight.grad is None
    # In evaluation the student sees its own tokens again.
    student.eval()
    assert not torch.allclose(student(some.images), teacher(some.images))


def test_the_teacher_sees_the_same_view_at_its_own_size():
    teacher = small_vit()
    student = student_of(teacher)
    student.set_input_size(img_size=16)
    settings = DistillationSection(match="features")
    objective = DistillationObjective(teacher, student, settings, (8, 8), None)
    assert objective(student, batch(16)).isfinite()
    evaluator = FeatureEvaluator(teacher, (8, 8))
    evaluator.add(student.eval(), batch(16))
    assert evaluator.compute(Alone()).count == 4


@pytest.mark.parametrize(
    ("prefix", "pixels", "new_pixels"),
    [(1, (16, 16), (8, 8)), (0, (8, 16), (4, 8)), (1, (16, 24), (8, 8)), (0, (4, 16), (8, 8))],
)
def test_tokens_of_another_grid_are_averaged(prefix, pixels, new_pixels):
    grid, new_grid = ([side // 2 for side in size] for size in (pixels, new_pixels))
    rows = torch.linspace(0, 1, grid[0]).repeat_interleave(grid[1])
    tokens = torch.cat([torch.full((prefix,), 7.0), rows]).view(1, -1, 1).expand(2, -1, 5)
    count = prefix + math.prod(new_grid)
    resized = resized_tokens(tokens, pixels, count, new_pixels, prefix)
    assert resized.shape == (2, count, 5)
    assert torch.equal(resized[:, :prefix], tokens[:, :prefix])
    maps = resized[:, prefix:].unflatten(1, new_grid)
    torch.testing.assert_close(maps, maps[:, :, :1].expand_as(maps))  # columns are alike, as they were
    assert (maps.diff(dim=1) > 0).all()
    assert resized_tokens(tokens, pixels, tokens.shape[1], pixels, prefix) is tokens


def test_tokens_that_are_no_grid_are_refused():
    with pytest.raises(ValueError, match="no grid"):
        resized_tokens(torch.zeros(1, 15, 2), (16, 16), 4, (8, 8), 0)


def test_soft_cross_entropy_is_torch_s_divergence():
    logits, expected = torch.randn(2, 5, 7)
    found = soft_cross_entropy(logits, expected, 2.0)
    reference = F.kl_div((logits / 2).log_softmax(-1), (expected / 2).softmax(-1), reduction="batchmean") * 4
    torch.testing.assert_close(found, reference)
    assert soft_cross_entropy(expected, expected, 2.0).abs() < 1e-6


def test_variance_over_batches_is_that_of_all():
    found, expected = torch.randn(2, 6, 4, 3, dtype=torch.float64)
    parts = [Variance(), Variance()]
    for part, rows in zip(parts, (slice(0, 2), slice(2, 6)), strict=True):
        part.add(found[rows], expected[rows])
    share = 1 - (found - expected).square().sum() / (expected - expected.mean((0, 1))).square().sum()
    assert Variance.total(iter(parts)).explained == pytest.approx(share.item())
    assert 1 - unexplained_share(found, expected).item() == pytest.approx(share.item(), rel=1e-5)


def test_one_image_of_one_vector_gives_a_finite_loss():
    assert unexplained_share(torch.zeros(1, 4), torch.ones(1, 4)).isfinite()


def test_a_model_without_attention_has_no_tokens():
    with pytest.raises(ValueError, match="no tokens"):
        token_layer(timm.create_model("resnet10t"))


def test_a_student_starts_calibrated_once(tmp_path):
    teacher, name = small_vit(num_classes=10), "vit_tiny_patch16_224"
    arguments = {key: value for key, value in SMALL.items() if key not in ("num_classes", "img_size")}
    notes = {"model": name, "model_arguments": json.dumps(SMALL | {"num_classes": 10})}
    save_weights(teacher, tmp_path / "teacher.safetensors", metadata=notes)

    def student(start="teacher.safetensors", **distillation):
        model = ModelSection(
            name, arguments=arguments, img_size=8, initial_checkpoint=str(tmp_path / start), attention="inline",
            conversion_options={"softmax_prefix": True},
        )  # fmt: skip
        distillation = DistillationSection(
            match="logits", teacher=str(tmp_path / "teacher.safetensors"), **distillation
        )
        task = DistillationTask(DataSection("digits", in_memory=True), model, None, distillation)
        torch.manual_seed(0)  # of new weights
        built = task.build_model([str(number) for number in range(10)])
        task.prepare(built)
        return built, task

    first, task = student()
    assert "calibration on 16 pictures" in task.notes[0]
    assert first.attention_conversion["options"] == {"softmax_prefix": True, "prefix_gain": True}
    weights = {key: value for key, value in teacher.state_dict().items() if "qkv" not in key}
    for key, value in weights.items():
        assert torch.equal(first.state_dict()[key], value)
    for before, after in zip(teacher.blocks, first.blocks, strict=True):
        factor = after.attn.qkv.weight[:8] / before.attn.qkv.weight[:8]  # of the first head
        torch.testing.assert_close(factor, (1 / after.attn.prefix_gain[0]).expand_as(factor))
        assert torch.equal(after.attn.qkv.weight[16:], before.attn.qkv.weight[16:])
    again, _ = student()
    assert all(torch.equal(again.state_dict()[key], value) for key, value in first.state_dict().items())

    save_weights(first, tmp_path / "student.safetensors", metadata=notes)
    trained, task = student("student.safetensors")
    assert not task.notes
    assert all(torch.equal(trained.state_dict()[key], value) for key, value in first.state_dict().items())

    plain, task = student(calibration_images=0)
    assert not task.notes
    assert torch.equal(plain.blocks[0].attn.qkv.weight, teacher.blocks[0].attn.qkv.weight)


def learner(tmp_path, teacher, arguments, **distillation):
    """A task of a ViT from scratch whose teacher is a file of resnet10t; the model, and its objective."""
    notes = {"model": "resnet10t", "model_arguments": json.dumps(arguments)}
    save_weights(teacher, tmp_path / "teacher.safetensors", metadata=notes)
    small = {key: value for key, value in SMALL.items() if key not in ("num_classes", "img_size")}
    model = ModelSection("vit_tiny_patch16_224", arguments=small, img_size=8)
    options = {"match": "logits", "features_weight": 0.0, "teacher": str(tmp_path / "teacher.safetensors")}
    section = DistillationSection(**options | distillation)
    task = DistillationTask(
        DataSection("digits", in_memory=True), model, AugmentationSection(mixup=0, cutmix=0), section
    )
    task.open()
    names = [str(number) for number in range(10)]
    student = task.build_model(names).eval()
    return task, student, task.objective(names, 0)


def test_a_classifier_of_another_kind_teaches_at_its_own_size_and_normalization(tmp_path):
    torch.manual_seed(0)
    teacher = timm.create_model("resnet10t", num_classes=10).eval()  # ImageNet's mean and std; the ViT has 0.5
    arguments = {"num_classes": 10, "img_size": 64}
    task, student, objective = learner(tmp_path, teacher, arguments, labels_weight=0.0, temperature=3.0)
    assert task.start is None  # the student has random weights
    pixels = batch().images.clamp(0, 1)
    images = (pixels - 0.5) / 0.5
    mean, std = (torch.tensor(teacher.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    seen = F.interpolate((pixels - mean) / std, size=(64, 64), mode="bicubic", antialias=True)
    with torch.no_grad():
        expected = soft_cross_entropy(student(images), teacher(seen), 3.0)
        found = objective(student, Batch(0, 0, images, torch.arange(4), torch.arange(4)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    unscaled = soft_cross_entropy(student(images), teacher(F.interpolate(images, size=(64, 64))), 3.0)
    assert abs(found - unscaled) > 1e-3  # a teacher that sees the student's normalization says something else


@pytest.mark.parametrize(
    ("settings", "path"),
    [({"features_weight": 1.0}, "distillation.features_weight"), ({"match": "features"}, "distillation.match")],
)
def test_only_logits_are_matched_with_another_model(tmp_path, settings, path):
    teacher = timm.create_model("resnet10t", num_classes=10)
    with pytest.raises(ConfigError, match="resnet10t") as caught:
        learner(tmp_path, teacher, {"num_classes": 10}, **settings)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_another_model_of_other_classes_is_refused(tmp_path):
    teacher = timm.create_model("resnet10t", num_classes=7)
    with pytest.raises(ConfigError, match="7 classes, the data 10"):
        learner(tmp_path, teacher, {"num_classes": 7})


def test_a_model_of_other_arguments_is_another_model(tmp_path):
    larger = SMALL | {"num_classes": 10, "embed_dim": 32, "img_size": 16}
    notes = {"model": "vit_tiny_patch16_224", "model_arguments": json.dumps(larger)}
    save_weights(timm.create_model("vit_tiny_patch16_224", **larger), tmp_path / "teacher.safetensors", metadata=notes)
    small = {key: value for key, value in SMALL.items() if key not in ("num_classes", "img_size")}
    section = DistillationSection("logits", str(tmp_path / "teacher.safetensors"), features_weight=0.0)
    model = ModelSection("vit_tiny_patch16_224", arguments=small, img_size=8)
    task = DistillationTask(DataSection("digits", in_memory=True), model, None, section)
    names = task.open().class_names
    assert task.build_model(names).embed_dim == 16
    assert (task.teacher.embed_dim, task.teacher.patch_embed.img_size) == (32, (16, 16))
    same = DistillationTask(DataSection("digits", in_memory=True), replace(model, arguments=small | {"embed_dim": 32}),
                            None, section)  # fmt: skip
    assert same.other_teacher is None
    assert task.other_teacher is not None


def test_a_native_student_is_not_calibrated(tmp_path):
    save_weights(
        timm.create_model("resnet10t", num_classes=10),
        tmp_path / "teacher.safetensors",
        metadata={"model": "resnet10t", "model_arguments": '{"num_classes": 10, "img_size": 32}'},
    )
    section = DistillationSection("logits", str(tmp_path / "teacher.safetensors"), features_weight=0.0)
    arguments = {"patch_size": 2, "embed_dim": 16, "num_heads": 2, "depth": 1}
    model = ModelSection("inline_deit_tiny", arguments=arguments, img_size=8)
    task = DistillationTask(DataSection("digits", in_memory=True), model, None, section)
    student = task.build_model(task.open().class_names)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    task.prepare(student)
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


def test_weights_that_name_no_model_get_advice(tmp_path):
    save_weights(timm.create_model("resnet10t", num_classes=10).state_dict(), tmp_path / "bare.safetensors")
    section = DistillationSection("logits", str(tmp_path / "bare.safetensors"), features_weight=0.0)
    model = ModelSection("inline_deit_tiny", img_size=8)
    with pytest.raises(ConfigError, match="names no model; `inline convert FILE --model NAME"):
        DistillationTask(DataSection("digits", in_memory=True), model, None, section).open()
