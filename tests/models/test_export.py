"""Compilation, torch.export and ONNX: one graph for every batch and image size, for one model of each family."""

from functools import cache

import numpy
import pytest
import torch

import inline_attention
from models.shallow_models import create

NAMES = ["inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"]
TWINS = ["softmax_cswin_tiny", "linear_deit_tiny"]
SIZES = [(2, 224, 256), (1, 97, 161), (3, 64, 40), (1, 33, 250), (1, 320, 288)]
# 33: exporters treat a dimension of one as a different case, and a 32-pixel image has a last grid of one.
DYNAMIC = ({0: torch.export.Dim("batch"), 2: torch.export.Dim("height", min=33), 3: torch.export.Dim("width", min=33)},)


@cache
def exported(name):
    model = create(name)
    program = torch.export.export(model, (torch.randn(2, 3, 224, 256),), dynamic_shapes=DYNAMIC)
    return model, program


def in_one_process(names, slow):
    """The tests of one exported model run in one process, which exports it once."""
    group = pytest.mark.xdist_group
    return [
        pytest.param(name, marks=[group(f"export_{name}"), *([pytest.mark.slow] if name == slow else [])])
        for name in names
    ]


# The operations of the softmax twin are those of inline_swin_tiny's last stage; ONNX gets those of PVT from the others.
EXPORTED = in_one_process([*NAMES, "inline_deit_micro", "softmax_swin_tiny"], slow="softmax_swin_tiny")
ONNX = in_one_process(NAMES, slow="inline_pvt_tiny")


def assert_same(got: torch.Tensor, expected: torch.Tensor):
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-4 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize(
    "name",
    [*NAMES, "softmax_swin_tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in TWINS)],
)
def test_compiled_without_graph_breaks(name):
    torch.compiler.reset()  # all models share one forward, and its cache has a limit
    model = create(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 97, 161)
    with torch.no_grad():
        assert_same(compiled(x), model(x))


@pytest.mark.parametrize(
    "name", [name if name == "inline_swin_tiny" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_padded_batches_of_changing_sizes_compiled_without_graph_breaks(name):
    torch.compiler.reset()
    model = create(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 97, 161)
    for step in range(10):  # more than a function may be compiled for
        sizes = [(97 - 3 * step, 100 + step), (64 + 2 * step, 161 - 7 * step)]
        with torch.no_grad():
            assert_same(compiled(x, image_sizes=sizes), model(x, image_sizes=sizes))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_for_several_sizes(name):
    torch.compiler.reset()
    model = create(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch, height, width in [(2, 64, 96), (3, 97, 161), (1, 224, 224)]:
        x = torch.randn(batch, 3, height, width)
        with torch.no_grad():
            assert_same(compiled(x), model(x))


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_with_dynamic_batch_height_and_width(name):
    model, program = exported(name)
    module = program.module()
    for batch, height, width in SIZES:
        x = torch.randn(batch, 3, height, width)
        with torch.no_grad():
            assert_same(module(x), model(x))


@pytest.mark.parametrize("name", ONNX)
def test_onnx_with_dynamic_batch_height_and_width(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, program = exported(name)
    # onnxscript's optimizer takes as long as all the rest, and onnxruntime has its own.
    optimize = name == "inline_deit_tiny"
    torch.onnx.export(program, (), dynamo=True, optimize=optimize, verbose=False).save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for batch, height, width in SIZES:
        x = torch.randn(batch, 3, height, width)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert got.dtype == numpy.float32
        with torch.no_grad():
            assert_same(torch.from_numpy(got), model(x))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", NAMES)
def test_recorded_by_jit_for_every_batch_of_one_image_size(name):
    model = create(name)
    with torch.no_grad():
        recorded = torch.jit.trace(model, torch.randn(2, 3, 64, 97), check_trace=False)
        x = torch.randn(3, 3, 64, 97)
        assert_same(recorded(x), model(x))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_onnx_by_way_of_jit(tmp_path):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = create("inline_deit_tiny")
    x = torch.randn(2, 3, 64, 97)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=False, opset_version=18)
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        assert_same(torch.from_numpy(got), model(x))


def test_transformers_timm_backbone_takes_the_pyramids():
    transformers = pytest.importorskip("transformers")
    config = transformers.TimmBackboneConfig(
        backbone="inline_pvt_tiny", use_pretrained_backbone=False, out_indices=(0, 1, 2, 3)
    )
    backbone = transformers.TimmBackbone(config)
    features = backbone(torch.randn(1, 3, 64, 96)).feature_maps
    assert [feature.shape[1:] for feature in features] == [(64, 16, 24), (128, 8, 12), (320, 4, 6), (512, 2, 3)]


@pytest.mark.parametrize("name", ["inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_segmentation_models_pytorch_takes_the_pyramids(name):
    smp = pytest.importorskip("segmentation_models_pytorch")
    assert name in inline_attention.list_models()
    model = smp.FPN(f"tu-{name}", encoder_weights=None, in_channels=4, classes=3).eval()
    assert model(torch.randn(1, 4, 64, 96)).shape == (1, 3, 64, 96)
