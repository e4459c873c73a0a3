"""Parity with the published models, in two steps.

1. Golden logits: with the weights and images of fixtures/README.md, float64 logits equal the authors'. The
   fixtures lie beside the repository (shared/fixtures), not in it; without them these tests are skipped.
2. Recorded logits, in any clone: `parity.json` holds digests of parameter names and shapes, and logits that our
   reference path computed in float64 from drawn weights when step 1 passed. `python tests/models/test_parity.py`
   writes it anew.
"""

import hashlib
import json
import zlib
from pathlib import Path

import numpy
import pytest
import torch

from inline_attention import create_model, load_checkpoint

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
RECORDED = Path(__file__).with_name("parity.json")
RECORDED_LOGITS = 16  # of each image; the norm covers the others
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


def digest(entries: dict[str, list[int]]) -> str:
    """SHA-256 of names and shapes."""
    return hashlib.sha256(json.dumps(sorted(entries.items())).encode()).hexdigest()


def shapes(state: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state.items()}


def images(size: int) -> torch.Tensor:
    pixels = numpy.random.default_rng(0).standard_normal((2, 3, size, size)).astype(numpy.float32)
    return torch.from_numpy(pixels).double()


def record(name: str) -> dict[str, object]:
    """What `parity.json` holds for one of our models."""
    model = create_model(name, attention_options={"backend": "reference"}).double().eval()
    state = model.state_dict()
    model.load_state_dict(
        {key: draw(key, list(value.shape)) if value.is_floating_point() else value for key, value in state.items()}
    )
    with torch.no_grad():
        logits = model(images(model.pretrained_cfg["input_size"][-1]))
    return {
        "names_and_shapes": digest(shapes(state)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "logits": logits[:, :RECORDED_LOGITS].tolist(),
        "norms": logits.norm(dim=1).tolist(),
    }


@pytest.mark.parametrize("name", [name for name in NAMES.values() if name != "inline_swin_base"])
def test_recorded_logits_and_names(name):
    expected, found = json.loads(RECORDED.read_text())[name], record(name)
    assert found["names_and_shapes"] == expected["names_and_shapes"], "published weights would no longer load"
    assert found["parameters"] == expected["parameters"]
    for key in ("logits", "norms"):
        torch.testing.assert_close(
            torch.tensor(found[key], dtype=torch.float64),
            torch.tensor(expected[key], dtype=torch.float64),
            rtol=0,
            atol=1e-8,
        )


@pytest.mark.parametrize("name", NAMES.values())
def test_recorded_names_and_shapes(name):
    with torch.device("meta"):
        model = create_model(name)
    assert digest(shapes(model.state_dict())) == json.loads(RECORDED.read_text())[name]["names_and_shapes"]


@needs_fixtures
@pytest.mark.parametrize("fixture", NAMES)
def test_recorded_digest_of_the_authors_names(fixture):
    entries = json.loads((FIXTURES / f"{fixture}.json").read_text())["state_dict"]
    expected = json.loads(RECORDED.read_text())[NAMES[fixture]]["authors_names_and_shapes"]
    assert digest({key: shape for key, (shape, _) in entries.items()}) == expected


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
    with torch.no_grad():
        logits = model(images(description["image_size"]))
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


if __name__ == "__main__":
    recorded = {}
    for fixture, name in NAMES.items():
        entries = json.loads((FIXTURES / f"{fixture}.json").read_text())["state_dict"]
        authors = digest({key: shape for key, (shape, _) in entries.items()})
        recorded[name] = record(name) | {"authors_names_and_shapes": authors}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
