"""Tools of other packages on our models: LoRA, quantization, sharding, launchers, torch.fx.

Each is skipped if not installed.
"""

import pickle

import pytest
import timm
import torch
from timm.utils.attention_extract import AttentionExtract
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

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


def small(name, kind="inline", **arguments):
    torch.manual_seed(0)
    return inline_attention.create_model(name.replace("inline", kind), num_classes=5, **SMALL[name], **arguments)


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


@pytest.mark.parametrize("kind", ["inline", "softmax", "linear"])
@pytest.mark.parametrize("name", SMALL)
def test_fx_traces_once_for_every_size(name, kind, images):
    model = small(name, kind).eval()
    traced = torch.fx.symbolic_trace(model)
    for size in ((2, 3, 64, 64), (3, 3, 96, 45)):
        x = torch.randn(size)
        torch.testing.assert_close(traced(x), model(x))
    sizes = [(64, 40), (33, 64)]
    torch.testing.assert_close(traced(images, image_sizes=sizes), model(images, image_sizes=sizes))
    with pytest.raises(ValueError, match=r"images must be \[B, 3, H, W\]"):
        traced(images[0])


@pytest.mark.parametrize("name", SMALL)
def test_fx_graphs_train_and_can_be_pickled_and_compiled(name, images):
    model = small(name, drop_path_rate=0.5)
    gradients = []
    for run in (model, torch.fx.symbolic_trace(model)):
        torch.manual_seed(1)
        model.zero_grad()
        run(images).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    traced = torch.fx.symbolic_trace(model.eval())
    expected = traced(images)
    assert torch.equal(pickle.loads(pickle.dumps(traced))(images), expected)
    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_feature_extractor_returns_what_hooks_see(name, training, images):
    model = small(name).train(training)
    first, last = ("blocks.0", "blocks.1") if "deit" in name else ("stages.0.0", "stages.3.0")
    parts = ("norm1", "attn.q" if "pvt" in name else "attn.qkv", "attn", "mlp.fc1")
    names = [first, last, *(f"{first}.{part}" for part in parts)]
    known = get_graph_node_names(model)[0 if training else 1]
    assert all(any(f"{node}.".startswith(f"{part}.") for node in known) for part in names)
    seen = {}
    hooks = [
        model.get_submodule(part).register_forward_hook(lambda *call, part=part: seen.update({part: call[2]}))
        for part in names
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    extractor = create_feature_extractor(model, names).train(training)
    found = extractor(images)
    assert found.keys() == seen.keys()
    for part, value in seen.items():
        torch.testing.assert_close(found[part], value)
    found[last].square().sum().backward()
    assert model.get_submodule(first).attn.proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", SMALL)
def test_timm_extracts_by_fx(name, images):
    model = small(name).eval()
    by_hook = AttentionExtract(model, names=["*attn"], method="hook")(images)
    by_fx = AttentionExtract(model, names=["*attn.proj_drop"], method="fx")(images)
    assert list(by_fx) == [f"{layer}.proj_drop" for layer in by_hook]
    torch.testing.assert_close(list(by_fx.values()), list(by_hook.values()))
    arguments = {"features_only": True, "out_indices": (0, 1), **SMALL[name]}
    backbone = timm.create_model(name, **arguments).eval()
    traced = torch.fx.symbolic_trace(backbone)
    graph = timm.create_model(name, feature_cls="fx", **arguments).eval()
    graph.load_state_dict({f"graph_module.{k}": v for k, v in backbone.model.state_dict().items()}, strict=False)
    for maps, same, tokens in zip(backbone(images), traced(images), graph(images), strict=True):
        torch.testing.assert_close(same, maps)
        torch.testing.assert_close(tokens[:, -maps[0, 0].numel() :], maps.flatten(2).transpose(1, 2))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_fx_traces_converted_models(name):
    small = {"img_size": (32, 48), "embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
    model = timm.create_model(name, num_classes=3, **small).eval()
    inline_attention.convert_attention(model)
    images = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(images), model(images))
    found = AttentionExtract(model, names=["*attn.mix"], method="fx")(images)
    assert list(found) == ["blocks.0.attn.mix", "blocks.1.attn.mix"]


def test_fx_graphs_of_converted_models_follow_the_patches():
    model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, depth=2, num_classes=3).eval()
    inline_attention.convert_attention(model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # the local term starts at zero
    # timm's tracer: plain symbolic_trace cannot follow how timm resamples positions
    extract = AttentionExtract(model, names=["head"], method="fx")
    for height, width in ((128, 288), (288, 128)):  # the same number of tokens
        images = torch.randn(1, 3, height, width)
        torch.testing.assert_close(extract(images)["head"], model(images))


def test_fx_refuses_models_whose_rows_ranks_share():
    model = small("inline_pvt_tiny")
    model.context_group = object()
    with pytest.raises(ValueError, match="trace before parallelizing"):
        torch.fx.symbolic_trace(model)
