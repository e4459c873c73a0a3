"""What each block loses without softmax, against conversion itself and against explicit weights."""

import copy
import json

import pytest
import timm
import torch

from inline_attention import calibrate_attention, convert_attention, create_model
from inline_attention.analysis.linearize import (
    BlockResult,
    LinearizeSurvey,
    draw_linearize,
    measure_blocks,
    softmax_subject,
)
from inline_attention.analysis.probes import MixingRule, capture_attention
from inline_attention.analysis.subjects import as_probed_softmax
from inline_attention.models.checkpoints import save_weights
from inline_attention.tasks.classification.distillation import run_with_tokens


def small_vit(size=(8, 12)):
    torch.manual_seed(0)
    arguments = {"img_size": size, "patch_size": 2, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 3}
    model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    with torch.no_grad():  # blocks that lose more and more
        for number, block in enumerate(model.blocks):
            block.attn.qkv.weight.normal_(std=0.3 + 0.2 * number)
            block.attn.proj.weight.normal_(std=0.3 + 0.2 * number)
    return model


@pytest.fixture(scope="module")
def images():
    return torch.randn(2, 3, 3, 8, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def survey(images):
    model = small_vit()
    as_probed_softmax(model)
    labels = torch.tensor([0, 1, 2])
    return measure_blocks(model, lambda: ((pixels, labels) for pixels in images))


def lost(model, images):
    """Percent of the softmax model's token variance that another model loses."""
    with torch.no_grad():
        expected = torch.cat([run_with_tokens(small_vit(), pixels)[1] for pixels in images])
        found = torch.cat([run_with_tokens(model, pixels)[1] for pixels in images])
    spread = (expected - expected.mean((0, 1))).square().sum()
    return (100 * (found - expected).square().sum() / spread).item()


def converted(keep, images):
    model = small_vit()
    convert_attention(model, keep_softmax=keep, local_residual=False, softmax_prefix=True)
    calibrate_attention(model, images[0])  # the first batch
    return model


def test_images_are_prepared_as_the_file_of_weights_says(tmp_path):
    arguments = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    notes = {"model_arguments": json.dumps(arguments), "mean": "[0.1, 0.2, 0.3]", "std": "[0.4, 0.5, 0.6]"}
    model = create_model("softmax_deit_tiny", **arguments)
    save_weights(model, tmp_path / "a.safetensors", metadata={"model": "softmax_deit_tiny", **notes})
    config = softmax_subject(tmp_path / "a.safetensors", device="cpu").data_config
    assert (list(config["mean"]), list(config["std"])) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])


def test_losses_are_those_of_the_conversion(survey, images):
    blocks = range(3)
    by_order = [item.block for item in sorted(survey.blocks, key=lambda item: item.order)]
    for item in survey.blocks:
        others = [block for block in blocks if block != item.block]
        assert item.lost_alone == pytest.approx(lost(converted(others, images), images), rel=1e-3)
        later = by_order[item.order :]
        assert item.lost_together == pytest.approx(lost(converted(later, images), images), rel=1e-3)
    assert [item.lost_alone for item in survey.blocks] != sorted(
        [item.lost_alone for item in survey.blocks], reverse=True
    )
    assert survey.images == 6


def test_accuracy_is_that_of_the_conversion(survey, images):
    with torch.no_grad():
        answers = torch.stack([converted([1, 2], images)(pixels).argmax(1) for pixels in images])
    right = (answers == torch.tensor([0, 1, 2])).float().mean().item()
    assert survey.blocks[0].top1_alone == pytest.approx(100 * right)


def test_shares_of_softmax_are_those_of_explicit_weights(survey, images):
    model = small_vit()
    as_probed_softmax(model)
    sums = {"inline": torch.zeros(3, 2), "linear": torch.zeros(3, 2)}  # error and variance by block
    rules = {"inline": ("subtract", "identity"), "linear": ("divide", "relu")}
    gains = {}
    for pixels in images:
        for layer in capture_attention(model, pixels):
            q, k, v = (part.transpose(1, 2).double() for part in (layer.q, layer.k, layer.v))
            mean = v.mean(2, keepdim=True)
            softmax = (q @ k.mT * layer.rule.scale).softmax(-1) @ v
            for name, (normalization, feature_map) in rules.items():
                found = MixingRule(normalization, feature_map, layer.rule.scale).weights(q, k) @ v
                if name == "inline":  # by head, the best factor for the first batch
                    beyond, expected = (found - mean)[:, :, 1:], (softmax - mean)[:, :, 1:]
                    best = (beyond * expected).sum((0, 2, 3)) / beyond.square().sum((0, 2, 3))
                    found = mean + gains.setdefault(layer.index, best)[:, None, None] * (found - mean)
                sums[name][layer.index, 0] += (found - softmax).square().sum()
                sums[name][layer.index, 1] += (softmax - mean).square().sum()
    for item in survey.blocks:
        for name, parts in sums.items():
            error, variance = parts[item.block].tolist()
            assert getattr(item, f"{name}_r2") == pytest.approx(100 * (1 - error / variance), rel=1e-3, abs=0.05)


def test_softmax_that_can_be_observed_gives_the_same_outputs(images):
    model = small_vit()
    observable = copy.deepcopy(model)
    as_probed_softmax(observable)
    with torch.no_grad():
        torch.testing.assert_close(observable(images[0]), model(images[0]), rtol=1e-4, atol=1e-5)
    linear = converted([], images)
    with pytest.raises(ValueError, match=r"InLineAttention|already"):
        as_probed_softmax(linear)


def result(block, alone, order, together):
    return BlockResult(block, f"blocks.{block}.attn", 90.0, 50.0, alone, None, order, together, None)


def test_blocks_to_keep():
    blocks = (result(0, 1.0, 1, 1.0), result(1, 30.0, 3, 40.0), result(2, 4.0, 2, 6.0))
    found = LinearizeSurvey(blocks, None, 4)
    assert found.keep_softmax(10) == [1]
    assert found.keep_softmax(50) == []
    assert found.keep_softmax(0.5) == [0, 1, 2]
    assert found.lose_most(2) == [1, 2]


def test_pictures_without_labels_have_no_accuracy(tmp_path, images):
    pytest.importorskip("matplotlib")
    model = small_vit()
    as_probed_softmax(model)
    found = measure_blocks(model, lambda: ((pixels, None) for pixels in images[:1]))
    assert found.top1 is None
    assert found.blocks[0].top1_together is None
    files = draw_linearize({"small": found, "other": found}, "Untrained weights.", tmp_path)
    assert [file.name for file in files] == ["linearize.png", "linearize.svg"]
    with pytest.raises(ValueError, match="no picture"):
        measure_blocks(model, lambda: iter(()))
