"""Cost of the input pipeline and of attention in a training step on CIFAR-10, with the data in memory.

    python benchmarks/memory_loading.py [--output DIR] [--compile]

Steps of InLine-DeiT-T and its softmax and linear twins (32² pixels as 256 tokens, batches of 512, bfloat16, AdamW) are
timed in turns: with one fixed batch, and with batches from `MemoryLoader` with the augmentation of the recipe `cifar10`
and with a stronger one. 100 % means that a step never waits. Results: benchmarks/results/memory_loading.{json,md}.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from inline_attention import create_model
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.benchmark.timing import synchronize
from inline_attention.cli.bench import resolve_device
from inline_attention.data.batch import Batch
from inline_attention.data.on_device import MemoryImages, MemoryLoader, training_augmentation
from inline_attention.data.sampling import TrainingBatches

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
STILL = "the same batch"
PIPELINES_OF = {
    "inline": (STILL, *PIPELINES),
    "softmax": (STILL, next(iter(PIPELINES))),
    "linear": (STILL, next(iter(PIPELINES))),
}


def endless(loader: MemoryLoader) -> Iterator[Batch]:
    """Yield the batches of all epochs, without end."""
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


def training_step(attention: str, device: torch.device, compiled: bool) -> Callable[[Batch], None]:
    """Return the training step of one model: forward, backward and update."""
    model = create_model(f"{attention}_deit_tiny", img_size=SIDE, patch_size=2, num_classes=CLASSES).to(device)
    runnable = torch.compile(model, mode="reduce-overhead") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step(batch: Batch) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, torch.bfloat16):
            logits = runnable(batch.images)
        F.cross_entropy(logits.float(), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main(
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    device_name: Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")] = "auto",
    images: Annotated[int, typer.Option(help="Number of images in memory.")] = 50_000,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 512,
    steps: Annotated[int, typer.Option(help="Steps per round.")] = 40,
    rounds: Annotated[int, typer.Option(help="Rounds per model and pipeline, in turns.")] = 5,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the models, with CUDA graphs.")] = False,
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
    still = next(next(iter(sources.values())))
    sources[STILL] = iter(lambda: still, None)

    training = {attention: training_step(attention, device, compiled) for attention in PIPELINES_OF}

    def rate(attention: str, pipeline: str) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            training[attention](next(sources[pipeline]))
        synchronize(device)
        return steps * batch_size / (time.perf_counter() - start)

    contestants = [(attention, pipeline) for attention, names in PIPELINES_OF.items() for pipeline in names]
    for contestant in contestants:
        rate(*contestant)
    rates: dict[tuple[str, str], list[float]] = {contestant: [] for contestant in contestants}
    for number in range(rounds):
        for contestant, values in rates.items():
            values.append(rate(*contestant))
        shown = (f"{attention}, {pipeline}: {values[-1]:,.0f}" for (attention, pipeline), values in rates.items())
        print(f"round {number}: {'; '.join(shown)}", flush=True)

    def ratio(values: Sequence[float], others: Sequence[float]) -> float:
        return statistics.median(a / b for a, b in zip(values, others, strict=True))

    rows = [
        {
            "attention": attention,
            "batches": pipeline,
            "images_per_second": statistics.median(values),
            "share_of_step_rate": ratio(values, rates[attention, STILL]),
            "times_softmax": ratio(values, rates["softmax", pipeline]) if ("softmax", pipeline) in rates else None,
        }
        for (attention, pipeline), values in rates.items()
    ]
    environment = describe_environment()
    about = f"DeiT-T, {images:,} images of {SIDE}² pixels, batches of {batch_size}, compiled: {compiled}, {device}"
    write_json(output / "memory_loading.json", {"environment": environment, "about": about, "results": rows})
    table = markdown_table(
        ["attention", "batches", "images/s", "of the step's own rate", "against softmax"],
        [
            [
                row["attention"], row["batches"],
                f"{row['images_per_second']:,.0f}", f"{row['share_of_step_rate']:.1%}",
                "–" if row["times_softmax"] is None else f"{row['times_softmax']:.2f}×",
            ]
            for row in rows
        ],
    )  # fmt: skip
    write_markdown(output / "memory_loading.md", "Data in memory", environment, f"{about}.\n\n{table}")
    print(table)


if __name__ == "__main__":
    typer.run(main)
