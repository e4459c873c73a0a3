"""Speed by image size: cells that cannot be measured say why, and the others stay."""

import pytest
import timm
import torch

from inline_attention import convert_attention
from inline_attention.benchmark import linearized
from inline_attention.benchmark.linearized import SpeedCell, measure_speed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models():
    arguments = {"img_size": 28, "patch_size": 14, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    converted = timm.create_model("vit_tiny_patch16_224", **arguments)
    convert_attention(converted)
    return {"teacher": timm.create_model("vit_tiny_patch16_224", **arguments), "student": converted}


def test_both_models_at_all_sizes(models):
    cells = measure_speed(models, CPU, sizes=(30, 60), seconds=0)
    assert [(cell.model, cell.size) for cell in cells] == [
        (name, size) for name in ("teacher", "student") for size in (28, 56)  # whole patches of 14
    ]  # fmt: skip
    assert all(cell.images_per_second > 0 and not cell.note for cell in cells)
    assert models["student"].patch_embed.img_size == (28, 28)  # copies were resized


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("CPU: can't allocate memory")],
)
def test_no_memory_at_a_larger_size(models, monkeypatch, error):
    forward = type(models["teacher"]).forward

    def fails_at_56(self, images, **options):
        if images.shape[-1] == 56:
            raise error
        return forward(self, images, **options)

    monkeypatch.setattr(type(models["teacher"]), "forward", fails_at_56)
    cells = measure_speed(models, CPU, sizes=(28, 56), seconds=0)
    assert [cell.note for cell in cells] == ["", "does not fit"] * 2
    assert cells[1].batch == 1  # after a batch
    assert cells[0].images_per_second


def test_another_error_is_named(models, monkeypatch):
    def fails(self, images, **options):
        raise RuntimeError("odd size")

    monkeypatch.setattr(type(models["teacher"]), "forward", fails)
    (cell,) = measure_speed({"teacher": models["teacher"]}, CPU, sizes=(28,), seconds=0)
    assert cell.note == "not possible: RuntimeError: odd size"


def test_what_would_take_too_long_or_too_much_is_left_out(models, monkeypatch):
    softmax, linear = models["teacher"], models["student"]
    slow = SpeedCell("", 1024, 1, images_per_second=0.1, peak_bytes=2**30)
    assert linearized._too_costly(linear, slow, 2048, 1, CPU) == "left out: may take 40 s"  # in step with the pixels
    # Nearly with their square: 5,350 tokens then 21,399, 6 · 16 channels.
    assert linearized._too_costly(softmax, slow, 2048, 1, CPU) == "left out: may take 158 s"
    quick = SpeedCell("", 1024, 1, images_per_second=10.0, peak_bytes=2**30)
    monkeypatch.setattr(linearized, "available_memory", lambda: 2**31)
    assert linearized._too_costly(softmax, quick, 2048, 1, CPU) == "does not fit: needs about 4.0 GiB"
    monkeypatch.setattr(linearized, "available_memory", lambda: 2**34)
    assert linearized._too_costly(softmax, quick, 2048, 1, CPU) is None
