"""Runs on digits small enough for a test, and what they leave behind."""

import csv
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from inline_attention.engine.checkpoints import open_training_checkpoint
from inline_attention.engine.config import with_overrides
from inline_attention.recipes import get_recipe

TINY = [
    "model.arguments={patch_size: 2, embed_dim: 32, num_heads: 1, depth: 1}",
    "model.drop_path=0.1",
    "training.epochs=2",
    "training.batch_size=256",
    "training.total_batch_size=256",
    "schedule.warmup_epochs=0",
    "logging.tensorboard=false",
    "checkpoints.keep_last=2",
]


def config(tmp_path, *overrides):
    return with_overrides(get_recipe("digits").config, [*TINY, f"run.output={tmp_path}", *overrides])


def final_weights(folder: Path, name="model.safetensors"):
    return load_file(folder / "checkpoints" / "last" / name)


def assert_same_end(first: Path, second: Path):
    for name in ("model.safetensors", "model_ema.safetensors"):
        if not (first / "checkpoints" / "last" / name).exists():
            continue
        weights, others = final_weights(first, name), final_weights(second, name)
        assert weights.keys() == others.keys()
        for key in weights:
            assert torch.equal(weights[key], others[key]), key
    assert (first / "summary.csv").read_text() == (second / "summary.csv").read_text()
    best = [open_training_checkpoint(run / "checkpoints" / "best") for run in (first, second)]
    assert (best[0].step, best[0].metric) == (best[1].step, best[1].metric)


def command(tmp_path, *arguments):
    settings = [word for setting in TINY for word in ("--set", setting)]
    return [
        sys.executable, "-m", "inline_attention", "train", "digits", "--output", str(tmp_path), *settings, *arguments
    ]  # fmt: skip


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob("step-*")}


def rows(folder):
    with (folder / "summary.csv").open() as stream:
        return list(csv.DictReader(stream))


def last_checkpoint(folder):
    return open_training_checkpoint(folder / "checkpoints" / "last")


def from_files(tmp_path, pictures, name, *overrides):
    return config(
        tmp_path, f"run.experiment={name}", "data.dataset=folder", f"data.dir={pictures}", "data.in_memory=false",
        "augmentation.crop=resized", "data.workers=1", "training.batch_size=16", "training.total_batch_size=16",
        *overrides,
    )  # fmt: skip
