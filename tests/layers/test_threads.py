"""Models are shared by threads: `forward` writes to no module, and results do not depend on what else runs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch import nn

import inline_attention
from inline_attention import InLineAttention, convert_attention
from inline_attention.layers.cache import cache_by_shape

assert inline_attention.list_models()  # registers the models with timm

SMALL = {
    "deit": {"depth": 2, "embed_dim": 24, "num_heads": 2},
    "pvt": {"depths": (1, 1, 1, 1)},
    "swin": {"depths": (1, 1, 2, 2), "embed_dim": 8, "num_heads": (1, 2, 2, 4)},
    "cswin": {"depths": (1, 1, 2, 1), "embed_dim": 8, "num_heads": (2, 2, 4, 4)},
}
FAMILIES = [f"{kind}_{family}_tiny" for family in SMALL for kind in ("inline", "softmax", "linear")]
CONVERTED = ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"]
SIZES = ((64, 96), (96, 64), (70, 33))


def create(name):
    if name not in CONVERTED:
        return timm.create_model(name, num_classes=3, img_size=64, **SMALL[name.split("_")[1]]).eval()
    model = timm.create_model(name, depth=2, embed_dim=24, num_heads=2, num_classes=3, dynamic_img_size=True).eval()
    convert_attention(model)
    for module in model.modules():
        if isinstance(module, InLineAttention):
            nn.init.normal_(module.residual[2].weight)
    return model


def size_for(name, size):
    return (size[0] // 16 * 16, size[1] // 16 * 16) if name in CONVERTED else size


@pytest.mark.parametrize("name", [*FAMILIES, *CONVERTED])
def test_threads_get_the_same_results(name):
    model = create(name)
    pictures = [torch.randn(2, 3, *size_for(name, size)) for size in SIZES]
    with torch.no_grad():
        expected = [model(picture) for picture in pictures]
    barrier = threading.Barrier(6)

    def work(index):
        barrier.wait()
        with torch.no_grad():
            return index, [model(pictures[index]) for _ in range(2)]

    with ThreadPoolExecutor(6) as pool:
        for index, outputs in pool.map(work, [0, 1, 2] * 2):
            for output in outputs:
                torch.testing.assert_close(output, expected[index], rtol=1e-5, atol=1e-6)


def state_of(model):
    """The identity of everything that modules hold, and of what their containers hold."""
    state = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            state[name, attribute] = id(value)
            if isinstance(value, dict):
                state[name, attribute, "items"] = [(key, id(item)) for key, item in value.items()]
            elif isinstance(value, list | set):
                state[name, attribute, "items"] = [id(item) for item in value]
    return state


def entry_points(model, image):
    yield lambda: model(image)
    yield lambda: model.forward_features(image)
    yield lambda: model.forward_intermediates(image)


@pytest.mark.parametrize("name", [*FAMILIES, *CONVERTED])
def test_forward_sets_no_attribute(name, monkeypatch):
    model = create(name)
    before = state_of(model)
    written = []
    monkeypatch.setattr(nn.Module, "__setattr__", lambda *arguments: written.append(arguments))
    with torch.no_grad():
        for size in SIZES[:2]:
            for call in entry_points(model, torch.randn(2, 3, *size_for(name, size))):
                call()
    for checkpointing in (False, True):
        vars(model).update(grad_checkpointing=checkpointing)
        model(torch.randn(2, 3, *size_for(name, SIZES[0]))).sum().backward()
    vars(model).update(grad_checkpointing=False)
    assert written == []
    assert state_of(model) == before


def test_features_only_and_unequal_images_set_no_attribute(monkeypatch):
    model = timm.create_model("inline_swin_tiny", features_only=True, img_size=64, **SMALL["swin"])
    before = state_of(model)
    written = []
    monkeypatch.setattr(nn.Module, "__setattr__", lambda *arguments: written.append(arguments))
    model(torch.randn(2, 3, 64, 96))
    model.model(torch.randn(2, 3, 64, 96), image_sizes=[(64, 50), (40, 96)])
    assert written == []
    assert state_of(model) == before


def test_a_cache_shared_by_threads_counts_each_tensor_once(monkeypatch):
    from inline_attention.layers import cache

    monkeypatch.setattr(cache, "MAX_TOTAL_BYTES", 8 * 64)
    barrier = threading.Barrier(8)

    @cache_by_shape
    def numbers(device, count):
        return torch.arange(count, device=device)

    def work(_):
        barrier.wait()
        return [numbers(torch.device("cpu"), count) for count in (*range(1, 12), *range(11, 0, -1))]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(work, range(8)):
            assert [len(tensor) for tensor in found] == [*range(1, 12), *range(11, 0, -1)]
    # Still within its bound: an account that drifts would refuse to keep anything.
    kept = numbers(torch.device("cpu"), 3)
    assert numbers(torch.device("cpu"), 3) is kept
