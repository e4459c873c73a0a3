"""Tools of other packages on our models: LoRA, quantization, sharding, launchers. Each is skipped if not installed."""

import pytest
import timm
import torch
from timm.utils.attention_extract import AttentionExtract
from torchvision.models.feature_extraction import create_feature_extractor

import inline_attention
from inline_attention.models.base import blocks_of

SMALL = {
    "inline_deit_tiny": {"embed_dim": 16, "num_heads": 2, "depth": 2, "patch_size": 8, "img_size": 32},
    "inline_pvt_tiny": {"depths": (1, 1, 1, 1)},
    "inline_swin_tiny": {
        "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "global_blocks": (1, 1, 0, 0)
    },
    "inline_cswin_tiny": {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)},
}  # fmt: skip


def small(name):
    torch.manual_seed(0)
    return inline_attention.create_model(name, num_classes=5, **SMALL[name])


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", SMALL)
def test_lora_learns_and_merges(name, images):
    peft = pytest.importorskip("peft")
    targets = ["q", "kv", "proj"] if "pvt" in name else ["qkv", "proj"]  # also the patch embedding's `proj`
    model = peft.get_peft_model(small(name), peft.LoraConfig(r=2, target_modules=targets))
    frozen = {key: value.clone() for key, value in model.named_parameters() if not value.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # the first step moves only B, which starts at zero
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
    learned = [value for value in model.parameters() if value.requires_grad]
    assert learned
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in learned)
    assert all(torch.equal(value, dict(model.named_parameters())[key]) for key, value in frozen.items())
    model.eval()
    with torch.no_grad():
        adapted = model(images)
        assert not torch.allclose(adapted, small(name).eval()(images))
        torch.testing.assert_close(model.merge_and_unload()(images), adapted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_quantizes_linear_layers(name, kind, images):
    quantization = pytest.importorskip("torchao.quantization")
    model = small(name).eval()
    with torch.no_grad():
        expected = model(images)
        quantization.quantize_(model, getattr(quantization, kind)())
        got = model(images)
    assert type(model.head.weight.data) is not torch.Tensor, "the layer was quantized"
    assert 0 < (got - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", SMALL)
def test_accelerate(name, images):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = small(name)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.head.weight.detach().clone()
    accelerator.backward(model(images).square().sum())
    optimizer.step()
    assert not torch.equal(model.head.weight, before)


@pytest.mark.parametrize("name", SMALL)
def test_fully_sharded(name, images, tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    expected = small(name)(images)
    expected.square().sum().backward()
    init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = small(name)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        got = model(images)
        torch.testing.assert_close(got, expected)
        got.square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        destroy_process_group()


@pytest.mark.parametrize("name", SMALL)
def test_fx_cannot_trace_and_says_what_to_use(name, images):
    model = small(name).eval()
    for trace in (torch.fx.symbolic_trace, lambda model: create_feature_extractor(model, ["head"])):
        with pytest.raises(ValueError, match=r"features_only=True.*torch\.export"):
            trace(model)
    with pytest.raises(ValueError, match="hooks"):
        AttentionExtract(model, method="fx")
    found = AttentionExtract(model, names=["*attn"], method="hook")(images)
    assert len(found) == len(blocks_of(model))
    backbone = timm.create_model(name, features_only=True, **SMALL[name])
    assert backbone(images)
