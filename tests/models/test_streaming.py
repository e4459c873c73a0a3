"""A streamed model gives what the whole model gives, whatever the size of the image and of its bands."""

import copy
import errno
import os
import re

import numpy as np
import pytest
import torch

from inline_attention import attention_weights, streamed
from inline_attention.analysis.probes import capture_attention
from inline_attention.layers.grids import resample_positions
from inline_attention.models import streaming
from models.shallow_models import create, family_of

FAMILIES = ("deit", "pvt", "swin", "cswin")
NAMES = [f"{kind}_{family}_tiny" for kind in ("inline", "linear", "softmax") for family in FAMILIES]
# The least memory of a band is that of one row, window or stripe: the second size gives bands of one of them.
SIZES = [(230, 301), (417, 100), (64, 33)]
LITTLE = {"deit": "1200KiB", "pvt": "3MiB", "swin": "6MiB", "cswin": "6MiB"}


def image(height, width, channels=3):
    return torch.randn(channels, height, width, generator=torch.Generator().manual_seed(height))


def band_starts(monkeypatch):
    """A list that gets the first row of every band."""
    starts, finish = [], streaming._Run._finish_band

    def noting(self, *arguments):
        starts.append(arguments[1])
        finish(self, *arguments)

    monkeypatch.setattr(streaming._Run, "_finish_band", noting)
    return starts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_logits_are_those_of_the_whole_model(name, size, monkeypatch):
    if name in ("softmax_deit_tiny", "softmax_pvt_tiny"):
        memory = "1GiB"  # softmax over the whole map is run whole
    else:
        memory = LITTLE[family_of(name)]
        starts = band_starts(monkeypatch)
    model, pixels = create(name), image(*size)
    with torch.inference_mode():
        expected = model(pixels[None])
    shares = []
    found = streamed(model, memory, on_progress=shares.append)(pixels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert sum(shares) == pytest.approx(1)
    if memory != "1GiB" and size != SIZES[-1]:
        assert any(starts), "it must run in several bands"


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_differs_by_two_roundings(family):
    model, pixels = create(f"inline_{family}_tiny").bfloat16(), image(161, 150)
    with torch.inference_mode():
        exact = create_double(model)(pixels[None].bfloat16().double())
        whole = model(pixels[None].bfloat16()).double()
    found = streamed(model, LITTLE[family])(pixels).double()
    # The whole model differs from the exact result by its own roundings; streaming may add as much again.
    largest = exact.abs().max() * 2**-8
    assert (found - whole).abs().max() <= 2 * max((whole - exact).abs().max(), largest)


def create_double(model):
    return copy.deepcopy(model).double()


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention_options": {"feature_map": "exp"}},
        {"global_pool": "avg"},
        {"patch_size": 4, "embed_dim": 12, "num_heads": 2, "stem": ((4, 1), (8, 2), (8, 1)), "img_size": 64},
    ],
    ids=["exp", "avg", "stem"],
)
def test_other_settings_of_a_vision_transformer(arguments):
    model, pixels = create("inline_deit_tiny", **arguments), image(150, 161)
    with torch.inference_mode():
        torch.testing.assert_close(streamed(model, "600KiB")(pixels), model(pixels[None]), rtol=1e-5, atol=1e-5)


def test_tokens_in_a_file(tmp_path, monkeypatch):
    """Tokens that take more than their share of the memory are in a file, which does not stay."""
    files, in_file = [], streaming._in_file
    monkeypatch.setattr(streaming, "_in_file", lambda *a: files.append(a[1]) or in_file(*a))
    model, pixels = create("inline_pvt_tiny"), image(340, 257)
    found = streamed(model, "2MiB", folder=tmp_path)(pixels)
    assert files[0] == 85 * 65 * 64 * 4
    assert list(tmp_path.iterdir()) == []
    with torch.inference_mode():
        torch.testing.assert_close(found, model(pixels[None]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["inline_deit_tiny", *(f"{kind}_{f}_tiny" for kind in ("inline", "softmax") for f in FAMILIES[1:])]
)
@pytest.mark.parametrize("size", [(64, 1600), (900, 48), (300, 300)], ids=str)
def test_the_memory_that_an_error_names_is_enough(name, size):
    """Even if tokens would fit into it, but leave no room for a band."""
    model, pixels = create(name), image(*size)
    with pytest.raises(ValueError, match="memory must be at least") as error:
        streamed(model, 1)(pixels)
    (least,) = re.findall(r"at least ([\d,]+) KiB", str(error.value))
    with torch.inference_mode():
        expected = model(pixels[None])
    found = streamed(model, f"{least.replace(',', '')}KiB")(pixels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_states_of_many_bands_are_merged_in_between(monkeypatch):
    monkeypatch.setattr(streaming, "STATES_AT_ONCE", 3)
    merged, merge = [], streaming.states.merge_states
    monkeypatch.setattr(streaming.states, "merge_states", lambda *states: merged.append(len(states)) or merge(*states))
    model, pixels = create("inline_deit_tiny"), image(230, 301)
    with torch.inference_mode():
        expected = model(pixels[None])
    torch.testing.assert_close(streamed(model, "700KiB")(pixels), expected, rtol=1e-5, atol=1e-5)
    assert max(merged) == 3
    assert len(merged) > 4


def test_bytes_are_normalized():
    model = create("inline_deit_tiny")
    pixels = torch.randint(0, 256, (3, 48, 70), dtype=torch.uint8)
    mean, std = (torch.tensor(model.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    found, expected = streamed(model)(pixels), streamed(model)((pixels / 255 - mean) / std)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", [False, True])
def test_features_are_those_of_forward_intermediates(family, norm, tmp_path):
    model, pixels = create(f"inline_{family}_tiny"), image(100, 70)
    paths = streamed(model, LITTLE[family]).write_features(pixels, tmp_path / "new", None, norm=norm)
    assert sorted(os.listdir(tmp_path / "new")) == [path.name for path in paths]
    with torch.inference_mode():
        expected = model.forward_intermediates(
            pixels[None], None, norm=norm, output_fmt="NHWC", intermediates_only=True
        )
    assert len(paths) == len(expected)
    for path, feature in zip(paths, expected, strict=True):
        found = np.load(path, mmap_mode="r")
        torch.testing.assert_close(torch.from_numpy(found.copy()), feature[0], rtol=1e-5, atol=1e-5)


def test_a_disk_that_fills_leaves_no_file(tmp_path, monkeypatch):
    model, pixels = create("inline_deit_tiny"), image(100, 70)
    writer = streaming._array_writer
    (tmp_path / "level1.npy").write_text("the one from before")

    def filling(*arguments):
        write = writer(*arguments)

        def failing(tokens):
            write(tokens)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return failing

    monkeypatch.setattr(streaming, "_array_writer", filling)
    with pytest.raises(OSError, match="No space left"):
        streamed(model, "600KiB").write_features(pixels, tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["level1.npy"]
    assert (tmp_path / "level1.npy").read_text() == "the one from before"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is full")
def test_the_error_of_a_full_disk_names_the_folder(tmp_path):
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError, match="none are kept") as error:
        streaming._array_writer(file, tmp_path, (1, 1, 4), torch.float32, torch.nn.Identity())(torch.zeros(1, 1, 4))
    assert error.value.filename == str(tmp_path)


def test_too_small_a_disk_is_known_before(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "free_bytes", lambda _: 1000)
    with pytest.raises(OSError, match="are free"):
        streamed(create("inline_deit_tiny")).write_features(image(100, 70), tmp_path)
    with pytest.raises(OSError, match="are free"):
        streamed(create("inline_pvt_tiny"), "2MiB")(image(340, 257))


@pytest.mark.parametrize("indices", [[7], 5, 0, [-5], []], ids=str)
def test_levels_that_do_not_exist_are_refused(indices, tmp_path):
    run = streamed(create("inline_pvt_tiny"))
    with pytest.raises(ValueError, match=r"has 4 levels, 0 to 3, got indices=.*; give a list of levels"):
        run.write_features(image(100, 70), tmp_path / "new", indices)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "layer"),
    [("inline_deit_tiny", 1), ("linear_deit_tiny", 0), ("inline_pvt_tiny", 1), ("inline_swin_tiny", 0)],
)
def test_attention_maps_are_the_weights(name, layer):
    model, pixels = create(name), image(110, 140)
    places = [(2, 3), (0, 0)] + ([None] if "deit" in name else [])
    found = streamed(model, "2MiB").attention_maps(pixels, layer, places, most_cells=4)
    (captured,) = capture_attention(model, pixels[None], layers=[layer])
    height, width = captured.grid_size
    prefix = captured.num_prefix_tokens
    rule = {"kind": "linear", "feature_map": "relu"} if "linear" in name else {"kind": "inline"}
    weights = attention_weights(captured.q.double(), captured.k.double(), **rule)[0] * captured.k.shape[1]
    rows = [0 if place is None else prefix + place[0] * width + place[1] for place in places]
    weights = weights[:, rows].transpose(0, 1)  # [tokens, H, M]
    cell = -(-max(height, width) // 4)
    grid = weights[..., prefix:].unflatten(2, (height, width))
    expected = torch.nn.functional.avg_pool2d(grid, cell, ceil_mode=True)
    assert (found.grid_size, found.cell) == ((height, width), cell)
    torch.testing.assert_close(found.weights.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.prefix_weights.double(), weights[..., :prefix], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [f"inline_{family}_tiny" for family in FAMILIES])
def test_evidence_of_mean_pooling_is_the_heads_output_and_its_mean_the_logit(name):
    model, pixels = create(name, global_pool="avg"), image(110, 140)
    with torch.no_grad():
        features = model.forward_features(pixels[None])
        logits = model(pixels[None])[0, [2, 0]]
        tokens = model.head(features)[..., [2, 0]]
    if "deit" in name:
        tokens = tokens[:, 1:].unflatten(1, (7, 9))
    tokens = tokens[0].permute(2, 0, 1)
    found = streamed(model, LITTLE[family_of(name)]).class_evidence(pixels, [2, 0], most_cells=4)
    cell = -(-max(tokens.shape[1:]) // 4)
    expected = torch.nn.functional.avg_pool2d(tokens, cell, ceil_mode=True)
    torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tokens.mean((1, 2)), logits, rtol=1e-4, atol=1e-5)
    assert found.cell_pixels == cell * model.feature_info[-1]["reduction"]


@pytest.mark.parametrize("name", ["inline_deit_tiny", "linear_deit_tiny"])
def test_evidence_of_a_class_token_is_value_times_derivative(name):
    model, pixels = create(name), image(110, 140)
    values = []

    def record(_layer, _arguments, output):  # of queries, keys and values
        q, k, v = output.chunk(3, -1)
        values.append(v.detach().requires_grad_())
        return torch.cat([q, k, values[0]], dim=-1)

    handle = model.blocks[-1].attn.qkv.register_forward_hook(record)
    logits = model(pixels[None])[0]
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[1], values[0])
    expected = (gradient * values[0]).sum(-1)[0].detach() * values[0].shape[1]
    found = streamed(model, "2MiB").class_evidence(pixels, [1])
    torch.testing.assert_close(found.values[0], expected[1:].unflatten(0, (7, 9)), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.logits[0], logits[1].detach(), rtol=1e-4, atol=1e-5)
    assert expected.std() > 1e-4


def test_evidence_that_is_not_defined_is_refused():
    pixels = image(64, 64)
    with pytest.raises(ValueError, match="linear-time attention in the last block, which has softmax"):
        streamed(create("softmax_deit_tiny")).class_evidence(pixels, [0])
    with pytest.raises(ValueError, match="needs a classifier with pooling"):
        streamed(create("inline_deit_tiny", num_classes=0)).class_evidence(pixels, [0])
    with pytest.raises(ValueError, match="expected classes from 0 to"):
        streamed(create("inline_deit_tiny")).class_evidence(pixels, [-1])


@pytest.mark.parametrize("new", [(7, 5), (23, 9), (3, 40), (8, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_of_positions_are_those_of_all(new, dtype):
    positions = torch.randn(1, 64, 6, dtype=dtype)
    whole = resample_positions(positions, (8, 8), new).unflatten(1, new)
    for start in range(new[0]):
        for stop in range(start + 1, new[0] + 1):
            found = resample_positions(positions, (8, 8), new, rows=(start, stop))
            torch.testing.assert_close(found, whole[:, start:stop].flatten(1, 2))


class ArraySource:
    size = (32, 32)

    def read_rows(self, start, stop):
        return np.zeros((3, stop - start, 32), np.uint8)


@pytest.mark.parametrize(
    ("arguments", "pixels", "message"),
    [
        ({}, torch.zeros(3, 8, 90), "at least 16 pixels high and wide, got 8×90"),
        ({}, torch.zeros(1, 32, 32), r"rows of shape \(3, 32, 32\), got \(1, 32, 32\)"),
        ({}, torch.zeros(32, 32), r"must be \[channels, H, W\]"),
        ({}, np.zeros((3, 32, 32)), "with size and read_rows, got ndarray; open files with"),
        ({}, torch.zeros(3, 32, 32, dtype=torch.int64), "uint8 or normalized floating-point numbers, got torch.int64"),
        ({}, ArraySource(), "uint8 or normalized floating-point numbers, got ndarray"),
        ({"memory": "9KiB"}, torch.zeros(3, 32, 64), "memory must be at least"),
        ({"memory": "much"}, torch.zeros(3, 32, 64), "such as 4GiB"),
        ({"memory": 0}, torch.zeros(3, 32, 64), "such as 4GiB"),
    ],
)
def test_errors_say_what_to_do(arguments, pixels, message):
    with pytest.raises(ValueError, match=message):
        streamed(create("inline_deit_tiny"), **arguments)(pixels)


def test_bytes_of_channels_without_statistics():
    model = create("inline_deit_tiny", in_chans=4)
    with pytest.raises(ValueError, match="4 input channels and pretrained_cfg has mean and std of 3"):
        streamed(model)(torch.zeros(4, 32, 32, dtype=torch.uint8))
    assert streamed(model)(torch.zeros(4, 32, 32)).isfinite().all()


def test_a_compiled_model_is_run_eagerly():
    model, pixels = create("inline_deit_tiny"), image(64, 48)
    torch.testing.assert_close(streamed(torch.compile(model))(pixels), streamed(model)(pixels))


def test_a_folder_for_tokens_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*missing for tokens"):
        streamed(create("inline_pvt_tiny"), "2MiB", folder=tmp_path / "missing")(image(340, 257))


def test_only_our_models_in_evaluation_mode():
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        streamed(create("inline_deit_tiny").train())
    with pytest.raises(ValueError, match="takes models of inline_attention"):
        streamed(torch.nn.Identity())


def test_softmax_over_too_many_tokens_is_refused():
    with pytest.raises(ValueError, match="softmax attention over 64 tokens takes about"):
        streamed(create("softmax_deit_tiny"), "300KiB")(image(128, 128))
    with pytest.raises(ValueError, match=r"layer 0 has softmax attention, .*; use an InLine model"):
        streamed(create("softmax_deit_tiny")).attention_maps(image(64, 64), 0, [(0, 0)])
    with pytest.raises(ValueError, match="choose one of the layers 0, 1, 2"):
        streamed(create("inline_swin_tiny")).attention_maps(image(64, 64), -1, [(0, 0)])
    with pytest.raises(ValueError, match="has 2 layers, 0 to 1, got 2"):
        streamed(create("inline_deit_tiny")).attention_maps(image(64, 64), 2, [(0, 0)])
    with pytest.raises(ValueError, match="outside the grid of 4×4 tokens"):
        streamed(create("inline_deit_tiny")).attention_maps(image(64, 64), 0, [(0, 4)])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
@pytest.mark.parametrize("memory", ["24MiB", "1GiB"])
def test_on_a_gpu(name, memory):
    """Tokens in pinned host memory, and on the device."""
    model, pixels = create(name).cuda(), image(1030, 515)
    with torch.inference_mode():
        expected = model(pixels[None].cuda())
    torch.testing.assert_close(streamed(model, memory)(pixels), expected, rtol=1e-4, atol=1e-4)
