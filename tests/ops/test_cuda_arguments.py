"""What launches pack into the parameter structs of kernels.cu, field by field, without a GPU."""

import pytest
import torch

from inline_attention.ops.backends.cuda import compiler, launch, predictor
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.fused_op import empty_state

B, H, D = 2, 3, 32
STRUCTS = {
    "inline_accumulate": "AccumulateParams",
    "inline_accumulate_backward": "AccumulateParams",
    "inline_merge": "MergeParams",
    "inline_merge_backward": "MergeParams",
    "inline_merge_many": "MergeParams",
    "inline_merge_many_backward": "MergeParams",
    "inline_output": "OutputParams",
    "inline_output_local": "OutputParams",
    "inline_sample": "SampleParams",
    "inline_gradient": "GradientParams",
    "inline_gradient_local": "GradientParams",
    "inline_sum_tiles": "TileSumParams",
    "inline_sum_many_tiles": "TileSumParams",
    "inline_sum_tokens": "TokenSumParams",
    "inline_predict": "PredictParams",
}


class Recorder:
    """Kernels that note their arguments by field name."""

    def __init__(self):
        self.launches = []

    def kernels(self, *_):
        return {name: Launch(self, name) for name in compiler.signatures()}

    def of(self, name):
        (found,) = [fields for launched, fields in self.launches if launched == name]
        return found


class Launch:
    def __init__(self, recorder, name):
        self.recorder, self.name = recorder, name

    def launch(self, grid, shared_bytes, stream, *fields):
        assert grid[0] > 0
        assert shared_bytes >= 0
        assert stream == 7
        struct = STRUCTS[self.name]
        names = [name for name, _ in compiler.fields_of(struct)]
        packing = compiler.struct_of(struct)
        values = packing.unpack(packing.pack(*fields))
        self.recorder.launches.append((self.name, dict(zip(names, values, strict=True))))


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(launch, "load_kernels", recorder.kernels)
    monkeypatch.setattr(launch, "processors", lambda _: 132)
    monkeypatch.setattr(launch, "current_stream", lambda _: 7)
    for plan in (launch.plan_forward, launch.plan_backward):
        plan.cache_clear()
    yield recorder
    for plan in (launch.plan_forward, launch.plan_backward):
        plan.cache_clear()


def tensors(tokens):
    """q, k and v, each with strides of its own."""
    return [torch.randn(B, tokens + extra, H + extra, D).bfloat16()[:, :tokens, :H] for extra in (0, 1, 2)]


def call_for(q, k, v, weight, grid, prefix):
    grid = None if weight is None else grid
    return AttentionCall(q, k, v, None, 0.25, "identity", "subtract", None, weight, grid, prefix)


def assert_address(fields, name, tensor):
    found = [fields[f"{name}{suffix}"] for suffix in ("", "_batch", "_token")]
    assert found == [tensor.data_ptr(), tensor.stride(0), tensor.stride(1)], name


def assert_layout(fields, grid, prefix, tokens):
    expected = {
        "tokens": tokens,
        "channels": H * D,
        "batches": B,
        "prefix": prefix,
        "height": grid[0],
        "width": grid[1],
    }
    for name, value in expected.items():
        assert fields[f"layout.{name}"] == value, name
    for name in ("units", "tiles_across", "tiles", "roles"):
        assert fields[f"layout.{name}_inverse"] == launch.inverse(fields[f"layout.{name}"])


def sections(state):
    """Addresses of the covariance, the means of keys and the means of values in a state."""
    return launch._sections(state, torch.empty(B, 1, H, D))


def test_every_kernel_has_a_struct_and_every_struct_a_kernel():
    assert {name: signature.struct for name, signature in compiler.signatures().items()} == STRUCTS
    assert compiler._source().count("__global__") == len(STRUCTS)


def test_structs_are_read_as_they_are_written():
    assert compiler.fields_of("TileSumParams") == [
        ("parts", "Q"), ("total", "Q"), ("tiles", "i"), ("per_sample", "i"), ("size", "q"),
    ]  # fmt: skip
    names = [name for name, _ in compiler.fields_of("OutputParams")]
    assert names[:3] == ["layout.tokens", "layout.channels", "layout.units"]
    assert names[-4:] == ["local_weight", "covariance", "value_mean", "out"]
    with pytest.raises(LookupError, match="no struct NoSuchParams"):
        compiler.fields_of("NoSuchParams")


def test_a_sample_in_one_block(recorder):
    (q, k, v), weight = tensors(1 + 4 * 5), torch.randn(B, H, D, 3, 3).bfloat16()
    out, state = launch.forward(call_for(q, k, v, weight, (4, 5), 1), True)
    fields = recorder.of("inline_sample")
    inner = {name.removeprefix("accumulate."): value for name, value in fields.items() if name.startswith("acc")}
    assert_address(inner, "left", k)
    assert_address(inner, "right", v)
    assert (inner["product"], inner["left_mean"], inner["right_mean"]) == sections(state)
    assert inner["product_factor"] == pytest.approx(0.25 / 21)
    assert (inner["tokens"], inner["splits"], inner["channels"], inner["units"]) == (21, 1, H * D, 2)
    inner = {name.removeprefix("output."): value for name, value in fields.items() if name.startswith("out")}
    assert_layout(inner, (4, 5), 1, 21)
    assert_address(inner, "query", q)
    assert_address(inner, "value", v)
    assert (inner["local_weight"], inner["out"]) == (weight.data_ptr(), out.data_ptr())


@pytest.mark.parametrize("local", [False, True])
def test_forward_in_passes(recorder, local):
    tokens, grid = 40 * 60, (40, 60) if local else (0, 0)
    q, k, v = tensors(tokens)
    weight = torch.randn(B, H, D, 3, 3).bfloat16() if local else None
    out, state = launch.forward(call_for(q, k, v, weight, grid, 0), True)
    fields = recorder.of("inline_accumulate")
    assert_address(fields, "left", k)
    assert_address(fields, "right", v)
    splits = fields["splits"]
    assert splits > 1
    assert fields["tokens"] == tokens
    assert (splits - 1) * fields["tokens_per_split"] < tokens <= splits * fields["tokens_per_split"]
    assert fields["splits_inverse"] == launch.inverse(splits)
    assert fields["units_inverse"] == launch.inverse(fields["units"])
    assert fields["product_factor"] == 1.0
    merged = recorder.of("inline_merge_many" if splits > launch.MANY_SPLITS else "inline_merge")
    for name in ("product", "left_mean", "right_mean"):
        assert merged[name] == fields[name]
    assert (merged["merged_product"], merged["merged_left"], merged["merged_right"]) == sections(state)
    assert merged["product_factor"] == pytest.approx(0.25 / tokens)
    assert (merged["splits"], merged["tokens"]) == (splits, tokens)
    fields = recorder.of("inline_output_local" if local else "inline_output")
    assert_layout(fields, grid, 0, tokens)
    assert_address(fields, "query", q)
    assert_address(fields, "value", v)
    covariance, _, value_mean = sections(state)
    assert (fields["covariance"], fields["value_mean"], fields["out"]) == (covariance, value_mean, out.data_ptr())
    assert fields["local_weight"] == (weight.data_ptr() if local else 0)


@pytest.mark.parametrize("local", [False, True])
def test_backward(recorder, local):
    tokens, grid = 40 * 60, (40, 60) if local else (0, 0)
    q, k, v = tensors(tokens)
    grad_out = torch.randn(B, tokens, H, D).bfloat16()
    weight = torch.randn(B, H, D, 3, 3).bfloat16() if local else None
    state = empty_state(q, v)
    grads = tensors(tokens)
    grad_local = launch.backward(call_for(q, k, v, weight, grid, 0), grad_out, state, grads)
    fields = recorder.of("inline_accumulate_backward")
    assert_address(fields, "left", q)
    assert_address(fields, "right", grad_out)
    found = [fields[name] for name in ("grad_left", "grad_batch", "grad_token")]
    assert found == [grads[0].data_ptr(), grads[0].stride(0), grads[0].stride(1)]
    covariance, key_mean, value_mean = sections(state)
    assert fields["covariance"] == covariance
    suffix = "many_backward" if fields["splits"] > launch.MANY_SPLITS else "backward"
    merged = recorder.of(f"inline_merge_{suffix}")
    assert merged["right_factor"] == pytest.approx(1 / tokens)
    fields = recorder.of("inline_gradient_local" if local else "inline_gradient")
    assert_layout(fields, grid, 0, tokens)
    assert_address(fields, "grad_out", grad_out)
    assert_address(fields, "key", k)
    assert_address(fields, "value", v)
    assert_address(fields, "grad_key", grads[1])
    assert_address(fields, "grad_value", grads[2])
    assert (fields["grad_covariance"], fields["grad_mean"]) == (merged["merged_product"], merged["merged_right"])
    assert (fields["key_mean"], fields["value_mean"]) == (key_mean, value_mean)
    if not local:
        assert (fields["local_weight"], fields["grad_local"], fields["grad_local_parts"]) == (0, 0, 0)
        return
    assert (fields["local_weight"], fields["grad_local"]) == (weight.data_ptr(), grad_local.data_ptr())
    tiles = fields["layout.tiles"]
    sums = recorder.of("inline_sum_many_tiles" if tiles > launch.MANY_TILES else "inline_sum_tiles")
    assert sums["parts"] == fields["grad_local_parts"] != 0
    assert (sums["total"], sums["tiles"]) == (grad_local.data_ptr(), tiles)
    assert (sums["per_sample"], sums["size"]) == (H * D * 9, grad_local.numel())


@pytest.mark.parametrize("tokens", [50, 3000])
def test_predicted_weights(recorder, monkeypatch, tokens):
    monkeypatch.setattr(predictor.fused_op, "on_device", lambda _: torch.no_grad())
    x = torch.randn(B, tokens + 1, H * D).bfloat16()[:, :tokens]
    parameters = [
        torch.randn(*shape).bfloat16() for shape in ((H * D, D, 1), (H * D,), (9 * H * D, D, 1), (9 * H * D,))
    ]
    out = predictor._launch(x, *parameters, H)
    fields = recorder.of("inline_predict")
    assert [fields[name] for name in ("tokens", "batch_stride", "token_stride")] == [x.data_ptr(), *x.stride()[:2]]
    names = ("hidden_weight", "hidden_bias", "weight", "bias", "out")
    assert [fields[name] for name in names] == [tensor.data_ptr() for tensor in (*parameters, out)]
    assert (fields["count"], fields["channels"], fields["units"]) == (tokens, H * D, 2)
    if tokens == 50:
        assert (fields["sums"], fields["splits"]) == (0, 1)
        return
    sums = recorder.of("inline_sum_tokens")
    assert [sums[name] for name in ("tokens", "batch_stride", "token_stride")] == [x.data_ptr(), *x.stride()[:2]]
    assert sums["sums"] == fields["sums"] != 0
    assert (sums["count"], sums["channels"], sums["units"]) == (tokens, H * D, 2)
    assert sums["splits"] == fields["splits"] > 1
    assert (sums["splits"] - 1) * sums["count_each"] < tokens <= sums["splits"] * sums["count_each"]
