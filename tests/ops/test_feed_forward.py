"""The fused half of a block: against float64 under Triton's interpreter here, and on a GPU inside whole models."""

import functools
import os

import pytest
import torch
import torch.nn.functional as F
from timm.layers import GluMlp, LayerScale
from torch import nn

from inline_attention import create_model
from inline_attention.layers.block import Block
from inline_attention.ops import feed_forward as feed_forward_op
from inline_attention.ops.feed_forward import FeedForwardParameters, fused_feed_forward, unsupported_reason

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off")
EPS = 1e-6


def tensors(rows: int, channels: int, hidden: int, dtype: torch.dtype, device: str = "cpu"):
    """Residual stream and attended tokens `[1, rows, C]`, and parameters, of the magnitudes that models have."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    parameters = FeedForwardParameters(
        draw(channels, channels, scale=channels**-0.5), draw(channels),
        draw(channels), draw(channels),
        draw(hidden, channels, scale=channels**-0.5), draw(hidden),
        draw(channels, hidden, scale=hidden**-0.5), draw(channels),
    )  # fmt: skip
    return draw(1, rows, channels), draw(1, rows, channels), parameters


def composed(x: torch.Tensor, attended: torch.Tensor, parameters: FeedForwardParameters) -> torch.Tensor:
    y = x + F.linear(attended, parameters.projection_weight, parameters.projection_bias)
    normed = F.layer_norm(y, y.shape[-1:], parameters.norm_weight, parameters.norm_bias, EPS)
    activation = F.gelu(F.linear(normed, parameters.hidden_weight, parameters.hidden_bias))
    return y + F.linear(activation, parameters.weight, parameters.bias)


def exact(x: torch.Tensor, attended: torch.Tensor, parameters: FeedForwardParameters) -> torch.Tensor:
    return composed(x.double(), attended.double(), FeedForwardParameters(*(tensor.double() for tensor in parameters)))


@interpreted
@pytest.mark.parametrize(
    ("rows", "channels", "hidden", "dtype", "tolerance"),
    [
        (131, 192, 128, torch.float16, 1e-3),
        (5, 64, 128, torch.float16, 1e-3),
        (70, 96, 64, torch.float32, 1e-5),
        (1, 256, 64, torch.float32, 1e-5),
    ],
)
def test_feed_forward_kernel(rows, channels, hidden, dtype, tolerance):
    from inline_attention.ops.backends.triton import feed_forward

    x, attended, parameters = tensors(rows, channels, hidden, dtype)
    expected = exact(x, attended, parameters)
    got = feed_forward.launch(x, attended, *parameters, EPS)
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@interpreted
def test_gelu_far_from_zero():
    from inline_attention.ops.backends.triton import feed_forward

    # A hidden channel takes each value in turn and is all that the output shows of it.
    values = torch.tensor([-40.0, -6.0, -3.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 3.0, 6.0, 40.0])
    zeros = torch.zeros(1, len(values), 16)
    for index, value in enumerate(values):
        bias = torch.zeros(64)
        bias[index] = value
        weight = torch.zeros(16, 64)
        weight[3, index] = 1.0
        before = (torch.zeros(16, 16), torch.zeros(16), torch.zeros(16), torch.zeros(16), torch.zeros(64, 16))
        got = feed_forward.launch(zeros, zeros, *before, bias, weight, torch.zeros(16), EPS)[0, 0, 3]
        torch.testing.assert_close(got, F.gelu(value), rtol=0, atol=3e-5)  # what the polynomial promises


def test_a_cpu_composes():
    x, _, parameters = tensors(3, 64, 64, torch.bfloat16)
    assert "CUDA device" in unsupported_reason(x, parameters)


class FusedError(Exception):
    """Raised by what stands in for a fused kernel."""


@pytest.fixture
def _fusing_is_noticed(monkeypatch):
    def noticed(*_):
        raise FusedError

    monkeypatch.setattr("inline_attention.layers.block.fused_feed_forward", noticed)
    monkeypatch.setattr("inline_attention.layers.block.unsupported_reason", lambda *_: None)


def make_block() -> Block:
    from inline_attention import InLineAttention

    return Block(64, InLineAttention(64, 2), mlp_ratio=2.0, norm_eps=EPS, drop=0.1).eval()


@pytest.mark.usefixtures("_fusing_is_noticed")
def test_a_block_fuses_only_modules_without_hooks():
    x = torch.randn(1, 4, 64)
    block = make_block()
    with pytest.raises(FusedError):
        block(x, (2, 2))
    seen = []
    for module in (block.attn, block.attn.proj, block.mlp, block.mlp.fc1, block.mlp.act, block.norm2):
        handle = module.register_forward_hook(lambda *_: seen.append(1))
        block(x, (2, 2))
        handle.remove()
    assert len(seen) == 6
    block.train()(x, (2, 2))  # dropout
    block.eval().backend = "eager"
    block(x, (2, 2))
    block.backend = "auto"
    block.mlp.fc1 = nn.Sequential(block.mlp.fc1)  # an adapter, as of LoRA, has taken its place
    block(x, (2, 2))


def put(path: str, module: nn.Module):
    """A change of a block: another module in the place of one of its own."""

    def change(block: Block) -> None:
        parent, _, name = path.rpartition(".")
        setattr(block.get_submodule(parent), name, module.eval())

    return change


def train_dropout(path: str):
    """A change of a block: dropout at inference, for Monte Carlo estimates."""
    return lambda block: block.get_submodule(path).train()


def put_forward(path: str):
    """A change of a block: a module's `forward` wrapped on the instance, as offloading libraries do."""

    def change(block: Block) -> None:
        module = block.get_submodule(path)
        module.forward = functools.partial(type(module).forward, module)

    return change


CHANGES = {
    "gated_mlp": put("mlp", GluMlp(64, 128)),
    "relu": put("mlp.act", nn.ReLU()),
    "tanh_gelu": put("mlp.act", nn.GELU(approximate="tanh")),
    "norm_in_mlp": put("mlp.norm", nn.LayerNorm(128)),
    "scale_after_attention": put("drop_path1", LayerScale(64)),
    "scale_after_mlp": put("drop_path2", LayerScale(64)),
    "scale_after_projection": put("attn.proj_drop", LayerScale(64)),
    "scale_in_mlp": put("mlp.drop1", LayerScale(128)),
    "scale_at_the_end": put("mlp.drop2", LayerScale(64)),
    "dropout_after_projection": train_dropout("attn.proj_drop"),
    "dropout_in_mlp": train_dropout("mlp.drop1"),
    "dropout_at_the_end": train_dropout("mlp.drop2"),
    "wrapped_attention": put_forward("attn"),
    "wrapped_hidden_map": put_forward("mlp.fc1"),
}


@pytest.mark.usefixtures("_fusing_is_noticed")
@pytest.mark.parametrize("change", CHANGES)
def test_a_block_fuses_only_its_own_modules(change):
    x = torch.randn(1, 4, 64)
    block = make_block()
    with pytest.raises(FusedError):
        block(x, (2, 2))
    CHANGES[change](block)
    assert block(x, (2, 2)).shape == x.shape


@pytest.mark.usefixtures("_fusing_is_noticed")
def test_a_block_does_not_fuse_under_global_or_backward_hooks():
    x = torch.randn(1, 4, 64)
    block = make_block()
    handles = [
        lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
        lambda: nn.modules.module.register_module_full_backward_hook(lambda *_: None),
        lambda: block.mlp.fc2.register_full_backward_hook(lambda *_: None),
        lambda: block.mlp.fc2.register_full_backward_pre_hook(lambda *_: None),
    ]
    for register in handles:
        handle = register()
        block(x, (2, 2))
        handle.remove()
        with pytest.raises(FusedError):
            block(x, (2, 2))


def test_the_kernel_is_not_given_maps_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(feed_forward_op, "_device_reason", lambda _: None)
    x, _, parameters = tensors(3, 64, 128, torch.bfloat16, "meta")
    on_gpu = MetaOnGpu(x)
    gated = parameters._replace(weight=parameters.weight[:, :64])
    assert "fit together" in unsupported_reason(on_gpu, gated)
    assert "fit together" in unsupported_reason(on_gpu, parameters._replace(norm_weight=parameters.norm_weight[:32]))
    assert "fit together" not in unsupported_reason(on_gpu, parameters)


class MetaOnGpu:
    """What looks like a tensor on a GPU to the questions that come before its values matter."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype, self.shape, self.device = tensor.dtype, tensor.shape, torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [1, 127, 50000])
def test_feed_forward_is_closer_to_exact_than_the_composition(rows, channels, dtype):
    if feed_forward_op._cached_device_reason(0) is not None:
        pytest.skip(feed_forward_op._cached_device_reason(0))
    x, attended, parameters = tensors(rows, channels, 4 * channels, dtype, "cuda")
    expected = exact(x, attended, parameters)
    assert unsupported_reason(x, parameters) is None
    got = fused_feed_forward(x, attended, parameters, EPS)
    error, usual = ((result - expected).norm() for result in (got, composed(x, attended, parameters)))
    assert error <= usual
    assert torch.equal(got, fused_feed_forward(x, attended, parameters, EPS))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_whole_models_agree_with_plain_pytorch(name, compiled):
    from inline_attention.benchmark.models import set_backend

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = create_model(name, depth=2) if "deit" in name else create_model(name)
    model = model.cuda().bfloat16().eval()
    images = torch.randn(2, 3, 224, 224, device="cuda").bfloat16()
    with torch.inference_mode():
        got = (torch.compile(model) if compiled else model)(images)
        expected = set_backend(model, "eager").float()(images.float())
    assert (got - expected).norm() <= 2e-2 * expected.norm()
