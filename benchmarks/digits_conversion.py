"""Accuracy before and after `convert_attention`, and after fine-tuning, on handwritten digits and a CPU.

    python benchmarks/digits_conversion.py [--seeds 3]

A small softmax ViT of timm is trained, converted with its weights, and fine-tuned. The control fine-tunes the softmax
ViT for as many epochs. It takes two minutes. Results: benchmarks/results/digits_conversion.{json,md}.
"""

from __future__ import annotations

import copy
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import timm
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from inline_attention import convert_attention
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.data.datasets import digits

RESULTS = Path(__file__).parent / "results"
EPOCHS, FINE_TUNING_EPOCHS, BATCH = 40, 5, 64
STAGES = ("softmax", "converted", "converted + 5 epochs", "softmax + 5 epochs")


def load(split: str) -> tuple[Tensor, Tensor]:
    """Return images `[N, 3, 8, 8]` from -1 to 1, and labels."""
    source = digits(split)
    images = torch.stack([torch.tensor(list(source.load(i).tobytes())).view(8, 8, 3) for i in range(len(source))])
    return images.permute(0, 3, 1, 2) / 127.5 - 1, torch.from_numpy(source.targets)


def fit(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, lr: float) -> None:
    """Train with AdamW and a cosine schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(BATCH)[: len(images) // BATCH]:
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return top-1 in percent."""
    return (model.eval()(images).argmax(-1) == labels).float().mean().item() * 100


def run(seed: int) -> dict[str, float]:
    """Return the accuracy at each stage."""
    torch.manual_seed(seed)
    train, test = load("train"), load("validation")
    softmax = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, embed_dim=64, depth=3, num_heads=2, num_classes=10
    )
    fit(softmax, *train, epochs=EPOCHS, lr=1e-3)
    converted = copy.deepcopy(softmax)
    convert_attention(converted)
    scores = [accuracy(softmax, *test), accuracy(converted, *test)]
    for model in (converted, softmax):
        fit(model, *train, epochs=FINE_TUNING_EPOCHS, lr=5e-4)
        scores.append(accuracy(model, *test))
    return dict(zip(STAGES, scores, strict=True))


def main(seeds: Annotated[int, typer.Option(min=1, help="Number of runs.")] = 3) -> None:
    """Run, write and print."""
    runs = [run(seed) for seed in range(seeds)]
    rows = [
        [stage, f"{mean(scores):.1f} ± {stdev(scores):.1f}" if seeds > 1 else f"{scores[0]:.1f}"]
        for stage in STAGES
        for scores in [[run[stage] for run in runs]]
    ]
    table = markdown_table(["model", f"top-1 %, {seeds} seeds"], rows)
    environment = describe_environment()
    write_json(RESULTS / "digits_conversion.json", {"environment": environment, "runs": runs})
    write_markdown(RESULTS / "digits_conversion.md", "Converting a softmax ViT on digits", environment, table)
    print(table)


if __name__ == "__main__":
    typer.run(main)
