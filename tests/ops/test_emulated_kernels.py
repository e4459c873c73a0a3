"""kernels.cu without a GPU: small calls on an emulated one, held to the contract of every backend."""

import pytest
import torch

from inline_attention.ops.backends import cuda
from ops import emulated_gpu
from ops.contract import Option, Shape, check_call

pytestmark = pytest.mark.skipif(emulated_gpu.COMPILER is None, reason="needs a C++ compiler")

SHAPES = [
    Shape("grid", heads=3, grid=(5, 7), prefix=1),
    Shape("wide_grid", batch=1, heads=1, grid=(3, 19)),
    Shape("cross", batch=1, heads=2, queries=17, keys=70),
    Shape("split", batch=1, heads=2, grid=(18, 30)),
]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulated_gpu.install(monkeypatch)


# One process compiles the kernels of a type and size.
BUILDS = [
    pytest.param(head_dim, dtype, marks=pytest.mark.xdist_group(f"emulated_{head_dim}_{dtype}"))
    for head_dim in cuda.HEAD_DIMS
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize(("head_dim", "dtype"), BUILDS, ids=str)
def test_outputs_and_gradients(shape, dtype, head_dim):
    shape = Shape(**{**vars(shape), "head_dim": head_dim})
    check_call(shape, Option("inline"), dtype, backend="cuda", packed=False)
