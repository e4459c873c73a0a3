"""A converted vision transformer of timm streams like a model of this library."""

import numpy as np
import pytest
import timm
import torch

from inline_attention import LinearAttention, attention_weights, convert_attention, streamed
from inline_attention.analysis.probes import capture_attention

SMALL = {"num_classes": 5, "img_size": 64, "depth": 3, "embed_dim": 32, "num_heads": 2}
MODELS = {
    "class_token": ({}, {}),
    "native_size": ({}, {"local_residual": False}),
    "mean": ({"global_pool": "avg", "class_token": False}, {}),
    "registers": ({"reg_tokens": 4, "no_embed_class": True, "init_values": 0.1}, {}),
    "norms": ({"reg_tokens": 2, "qk_norm": True, "pre_norm": True, "scale_attn_norm": True}, {}),
    "no_positions": ({"pos_embed": "none", "global_pool": "avg"}, {}),
    "linear": ({}, {"attention": LinearAttention}),
    "one_softmax": ({}, {"keep_softmax": [1]}),
    "softmax_prefix": ({"reg_tokens": 2}, {"softmax_prefix": True}),
    "prefix_gain": ({}, {"softmax_prefix": True, "prefix_gain": True}),
    "normed_softmax_prefix": ({"qk_norm": True, "scale_attn_norm": True}, {"softmax_prefix": True}),
}


def converted(name="class_token"):
    arguments, options = MODELS[name]
    size = {"dynamic_img_size": True, "dynamic_img_pad": True}
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, **size, **arguments).eval()
    convert_attention(model, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_the_whole_model(name, tmp_path):
    model, memory = converted(name), "20MiB" if name == "one_softmax" else "500KiB"
    pixels = torch.randn(3, 64, 64) if name == "native_size" else torch.randn(3, 200, 330)
    with torch.inference_mode():
        expected = model(pixels[None])
        features = model.forward_intermediates(pixels[None], 2, norm=True, intermediates_only=True)
    run = streamed(model, memory)
    torch.testing.assert_close(run(pixels), expected, rtol=1e-5, atol=1e-5)
    for path, feature in zip(run.write_features(pixels, tmp_path, 2, norm=True), features, strict=True):
        found = torch.from_numpy(np.load(path)).permute(2, 0, 1)
        torch.testing.assert_close(found, feature[0], rtol=1e-5, atol=1e-5)


def test_a_model_of_one_image_size_takes_any():
    """Results are those of a model with dynamic_img_size and dynamic_img_pad."""
    dynamic, pixels = converted(), torch.randn(3, 130, 70)
    fixed = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    convert_attention(fixed)
    fixed.load_state_dict(dynamic.state_dict())
    with torch.inference_mode():
        expected = dynamic(pixels[None])
    torch.testing.assert_close(streamed(fixed)(pixels), expected, rtol=1e-5, atol=1e-5)


def test_attention_maps_are_the_weights():
    model, pixels = converted("registers"), torch.randn(3, 96, 80)
    found = streamed(model).attention_maps(pixels, 1, [(2, 3), None])
    (captured,) = capture_attention(model, pixels[None], layers=[1])
    weights = attention_weights(captured.q.double(), captured.k.double())[0] * captured.k.shape[1]
    expected = weights[:, [5 + 2 * 5 + 3, 0]].transpose(0, 1)
    torch.testing.assert_close(found.weights.double(), expected[..., 5:].unflatten(2, (6, 5)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.prefix_weights.double(), expected[..., :5], rtol=1e-4, atol=1e-4)


def test_attention_maps_of_a_class_token_that_keeps_softmax():
    model, pixels = converted("softmax_prefix"), torch.randn(3, 96, 80)
    found = streamed(model, "500KiB").attention_maps(pixels, 1, [None, (2, 3), None])
    (captured,) = capture_attention(model, pixels[None], layers=[1])
    q, k = captured.q.double(), captured.k.double()
    first = (captured.rule.scale * torch.einsum("hd,nhd->hn", q[0, 0], k[0])).softmax(-1) * k.shape[1]
    other = attention_weights(q, k)[0, :, 3 + 2 * 5 + 3] * k.shape[1]
    expected = torch.stack([first, other, first])
    torch.testing.assert_close(found.weights.double(), expected[..., 3:].unflatten(2, (6, 5)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.prefix_weights.double(), expected[..., :3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["class_token", "softmax_prefix", "prefix_gain"])
def test_evidence_of_a_class_token(name):
    model, pixels = converted(name), torch.randn(3, 96, 80)
    found = streamed(model).class_evidence(pixels, [1, 3])
    with torch.inference_mode():
        torch.testing.assert_close(found.logits, model(pixels[None])[0, [1, 3]], rtol=1e-5, atol=1e-5)
    assert found.values.shape == (2, 6, 5)
    assert found.values.std() > 0
    with pytest.raises(ValueError, match="normalizes the mean"):
        streamed(converted("mean")).class_evidence(pixels, [0])
    with pytest.raises(ValueError, match="does not normalize or gate"):
        streamed(converted("norms")).class_evidence(pixels, [0])


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("vit_tiny_patch16_224", {"global_pool": "map"}, "pooling is not the mean or the class token"),
        ("deit_tiny_distilled_patch16_224", {}, "VisionTransformerDistilled has its own"),
        ("vit_tiny_patch16_224", {"block_fn": timm.models.vision_transformer.ResPostBlock}, "block 0 is a ResPost"),
        ("resnet18", None, "it is a ResNet"),
    ],
)
def test_other_models_are_refused_with_a_reason(name, arguments, reason):
    arguments = {} if arguments is None else {**SMALL, **arguments}
    with pytest.raises(ValueError, match=f"cannot run this one: .*{reason}"):
        streamed(timm.create_model(name, **arguments).eval())
