"""What the input pipeline costs a training step when the data are in memory, at the size of CIFAR-10.

    python benchmarks/memory_loading.py [--output DIR] [--compile]

Steps of InLine-DeiT-T (32² pixels as 256 tokens, batches of 512, bfloat16, AdamW) are timed with one batch that never
changes and with batches from `MemoryLoader`, with the augmentation of the recipe `cifar10` and with a stronger one.
Pipelines take turns. 100 % means that the step never waits. Results: benchmarks/results/memory_loading.{json,md}.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from inline_attention import create_model
from inline_attention.analysis.benchmark.environment import describe_environment
from inline_attention.analysis.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.analysis.benchmark.timing import synchronize
from inline_attention.cli.bench import resolve_device
from inline_attention.data import Batch, MemoryImages, MemoryLoader, TrainingBatches, training_augmentation

RESULTS = Path(__file__).parent / "results"
CLASSES, SIDE = 10, 32
STATISTICS = {"mean": (0.491, 0.482, 0.447), "std": (0.247, 0.244, 0.262)}
PIPELINES: dict[str, dict[str, Any]] = {
    "padded crop, flip": {"crop_padding": 4, "hflip": 0.5},
    "padded crop, flip, RandAugment, erasing": {
        "crop_padding": 4,
        "hflip": 0.5,
        "auto_augment": "rand-m9-mstd0.5-inc1",
        "re_prob": 0.25,
    },
}


def endless(loader: MemoryLoader) -> Iterator[Batch]:
    """Epoch after epoch."""
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


def main(
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    device_name: Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")] = "auto",
    images: Annotated[int, typer.Option(help="In memory.")] = 50_000,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 512,
    steps: Annotated[int, typer.Option(help="In a round.")] = 40,
    rounds: Annotated[int, typer.Option(help="For each pipeline, in turns.")] = 7,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the model, with CUDA graphs.")] = False,
) -> None:
    device = resolve_device(device_name)
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, SIDE, SIDE), dtype=torch.uint8)
    data = MemoryImages(pixels, torch.randint(CLASSES, (images,)), torch.arange(images))
    sources: dict[str, Iterator[Batch]] = {}
    for name, options in PIPELINES.items():
        augmentation = training_augmentation((SIDE, SIDE), **STATISTICS, **options)
        batches = TrainingBatches(images, batch_size, seed=0)
        sources[name] = endless(MemoryLoader(data, batches, augmentation=augmentation, device=device))
    still = next(iter(next(iter(sources.values()))))
    sources = {"the same batch": iter(lambda: still, None), **sources}

    model = create_model("inline_deit_tiny", img_size=SIDE, patch_size=2, num_classes=CLASSES).to(device)
    runnable = torch.compile(model, mode="reduce-overhead") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step(batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits = runnable(batch.images)
        F.cross_entropy(logits.float(), batch.targets).backward()
        optimizer.step()

    def rate(source: Iterator[Batch]) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            step(next(source))
        synchronize(device)
        return steps * batch_size / (time.perf_counter() - start)

    for source in sources.values():
        rate(source)
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for number in range(rounds):
        for name, source in sources.items():
            rates[name].append(rate(source))
        print(
            f"round {number}: " + ", ".join(f"{name}: {values[-1]:,.0f}" for name, values in rates.items()), flush=True
        )
    first = rates["the same batch"]
    shares = {
        name: statistics.median(a / b for a, b in zip(values, first, strict=True)) for name, values in rates.items()
    }
    environment = describe_environment()
    about = (
        f"InLine-DeiT-T, {images:,} images of {SIDE}² pixels, batches of {batch_size}, compiled: {compiled}, {device}"
    )
    write_json(
        output / "memory_loading.json",
        {"environment": environment, "about": about, "images_per_second": rates, "share_of_step_rate": shares},
    )
    rows = [[name, f"{statistics.median(rates[name]):,.0f}", f"{share:.1%}"] for name, share in shares.items()]
    table = markdown_table(["batches", "images/s", "of the step's own rate"], rows)
    write_markdown(output / "memory_loading.md", "Data in memory", environment, f"{about}.\n\n{table}")
    print(table)


if __name__ == "__main__":
    typer.run(main)
