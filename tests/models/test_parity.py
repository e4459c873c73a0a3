"""Golden outputs: with the weights and images of fixtures/README.md, float64 logits equal those of the authors' code.

The fixtures lie beside the repository (shared/fixtures), not in it; without them these tests are skipped. That the
weights arrive where they belong is tested in any case: by names and shapes kept here as a digest.
"""

import json
import zlib
from pathlib import Path

import numpy
import pytest
import torch

from inline_attention import create_model, load_checkpoint

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
NAMES = {
    "inline_deit_t": "inline_deit_tiny",
    "inline_pvt_t": "inline_pvt_tiny",
    "inline_swin_t": "inline_swin_tiny",
    "inline_swin_b": "inline_swin_base",
    "inline_cswin_t": "inline_cswin_tiny",
}
needs_fixtures = pytest.mark.skipif(not FIXTURES.is_dir(), reason="golden fixtures are not beside the repository")


def draw(key: str, shape: list[int]) -> torch.Tensor:
    values = numpy.random.default_rng(zlib.crc32(key.encode())).standard_normal(shape).astype(numpy.float32)
    if len(shape) == 1:
        values = 1 + 0.1 * values if key.endswith(".weight") else 0.1 * values
    elif "pos_embed" in key or key.endswith(("cls_token", "relative_position_bias_table")):
        values = 0.5 * values
    else:
        values = values / numpy.sqrt(numpy.prod(shape[1:]))
    return torch.from_numpy(numpy.asarray(values)).double()


def authors_state_dict(fixture: str) -> dict[str, torch.Tensor]:
    entries = json.loads((FIXTURES / f"{fixture}.json").read_text())["state_dict"]
    return {
        key: torch.zeros(shape) if "attn_mask" in key or "int" in dtype else draw(key, shape)
        for key, (shape, dtype) in entries.items()
    }


@needs_fixtures
@pytest.mark.parametrize("fixture", NAMES)
def test_golden_logits_through_a_checkpoint_in_the_authors_layout(fixture, tmp_path):
    description = json.loads((FIXTURES / f"{fixture}.json").read_text())
    model = create_model(NAMES[fixture]).double().eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == description["num_parameters"]
    state = authors_state_dict(fixture)
    torch.save({"model": {f"module.{key}": value for key, value in state.items()}, "epoch": 299}, tmp_path / "a.pth")
    load_checkpoint(model, tmp_path / "a.pth")
    golden = FIXTURES / f"{fixture}.npz"
    if not golden.exists():
        return  # names and shapes only
    size = description["image_size"]
    images = numpy.random.default_rng(0).standard_normal((2, 3, size, size)).astype(numpy.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(images).double())
    assert numpy.abs(logits.numpy() - numpy.load(golden)["logits"]).max() < 1e-8


@needs_fixtures
@pytest.mark.parametrize("fixture", ["inline_pvt_t", "inline_cswin_t"])
def test_plain_load_state_dict_takes_the_authors_names(fixture):
    model = create_model(NAMES[fixture])
    model.load_state_dict({key: value.float() for key, value in authors_state_dict(fixture).items()})
    model.load_state_dict(model.state_dict())  # and ours


def test_a_swin_checkpoint_of_another_window_is_resampled(tmp_path):
    small, large = create_model("softmax_swin_base"), create_model("softmax_swin_base_384")
    torch.save(small.state_dict(), tmp_path / "small.pth")
    load_checkpoint(large, tmp_path / "small.pth")
    key = "stages.0.0.attn.relative_position_bias_table"
    table, resampled = small.state_dict()[key], large.state_dict()[key]
    assert resampled.shape == (23 * 23, 4)
    torch.testing.assert_close(resampled[23 * 11 + 11], table[13 * 6 + 6])  # offset zero stays offset zero
    assert torch.equal(large.head.weight, small.head.weight)


def test_positions_of_another_size_are_resampled(tmp_path):
    for name in ("inline_deit_tiny", "inline_pvt_tiny"):
        small, large = create_model(name), create_model(name, img_size=256)
        torch.save(small.state_dict(), tmp_path / "small.pth")
        load_checkpoint(large, tmp_path / "small.pth")
        image = torch.randn(1, 3, 256, 256)
        torch.testing.assert_close(large.eval()(image), small.eval()(image))
