"""The contract suite: path × dtype × awkward shape × option, outputs and gradients, against the float64 reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inline_attention.ops.backends import eager
from inline_attention.ops.backends.eager import blocked
from ops.contract import OPTIONS, SHAPES, Option, Shape, check_call

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PATHS = ["blocked", "tiny_blocks", "composed"]


@pytest.fixture
def path(request, monkeypatch):
    """The eager backend's two implementations, and the blocked one with blocks that split everything."""
    if request.param == "composed":
        monkeypatch.setattr(eager, "_can_block", lambda call: False)
    elif request.param == "tiny_blocks":
        monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 24)
    return request.param


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_shape(path, dtype, option):
    for shape in SHAPES:
        packed = shape.value_dim is None and shape.tokens[0] == shape.tokens[1]
        try:
            check_call(shape, option, dtype, backend="eager", packed=packed)
        except AssertionError as error:
            raise AssertionError(f"shape {shape.name}: {error}") from error


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.grid], ids=lambda shape: shape.name)
def test_separate_tensors_with_local_term(path, shape):
    check_call(shape, Option("masked", masked=True), torch.float32, backend="eager", packed=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_in_other_dtypes(dtype):
    for shape in SHAPES:
        check_call(shape, OPTIONS[1], dtype, backend="reference", packed=False)


shapes = st.builds(
    Shape,
    name=st.just("random"),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 9),
    grid=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    prefix=st.integers(0, 3),
)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, option=st.sampled_from(OPTIONS), seed=st.integers(0, 2**31), packed=st.booleans())
def test_random_shapes_and_masks(shape, option, seed, packed):
    check_call(shape, option, torch.float32, backend="auto", packed=packed, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_shape_on_a_gpu(dtype, option):
    for shape in SHAPES:
        check_call(shape, option, dtype, backend="auto", packed=False, device="cuda")
