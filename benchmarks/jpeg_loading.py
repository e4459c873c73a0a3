"""Images per second and CPU core from a folder of JPEG files: our loader beside torchvision's ImageFolder.

    python benchmarks/jpeg_loading.py [--output DIR] [--images 640] [--rounds 7]

Both decode the same files with one worker process, take a random crop of 224² and a flip (RandomResizedCrop with its
defaults, bilinear), normalize, and return batches of 64. Rounds take turns. Ours also checks every file, applies EXIF
orientation, and draws random numbers from (seed, epoch, index). Results: benchmarks/results/jpeg_loading.{json,md}.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.data.batch import Normalize
from inline_attention.data.broken import BrokenImages
from inline_attention.data.loading import ImageLoader
from inline_attention.data.sampling import TrainingBatches
from inline_attention.data.scenes import render_scene
from inline_attention.data.sources import FolderSource
from inline_attention.data.transforms import training_transform

RESULTS = Path(__file__).parent / "results"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, LONGER_SIDE, QUALITY = 224, 500, 90  # ImageNet's pictures are 500 × 375 in the median
BATCH, CLASSES = 64, 8


def write_pictures(folder: Path, count: int) -> int:
    """Write JPEG files in class folders; return their bytes."""
    total = 0
    for index in range(count):
        path = folder / f"class_{index % CLASSES}" / f"{index}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(render_scene(0, "train", index, LONGER_SIDE).image).save(path, quality=QUALITY)
        total += path.stat().st_size
    return total


def our_epochs(folder: Path) -> Iterator[int]:
    """Yield the number of images of each epoch when it ends."""
    source = FolderSource(folder)
    loader = ImageLoader(
        source,
        training_transform((SIZE, SIZE), mean=MEAN, std=STD, interpolation="bilinear", color_jitter=0.0),
        TrainingBatches(len(source), BATCH, seed=0),
        normalize=Normalize(MEAN, STD),
        broken=BrokenImages(len(source)),
        replace_broken=True,
        workers=1,
    )
    epoch = 0
    while True:
        yield sum(len(batch) for batch in loader.epoch(epoch))
        epoch += 1


def torchvision_epochs(folder: Path) -> Iterator[int]:
    """Yield the number of images of each epoch when it ends."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    loader: DataLoader[Any] = DataLoader(
        ImageFolder(str(folder), transform), BATCH, shuffle=True, num_workers=1, drop_last=True, persistent_workers=True
    )
    while True:
        yield sum(len(images) for images, _ in loader)


def measure(
    contestants: dict[str, Callable[[Path], Iterator[int]]], folder: Path, rounds: int
) -> dict[str, list[float]]:
    """Return images per second of each round. The first round, which starts workers and reads the disk, is dropped."""
    epochs = {name: start(folder) for name, start in contestants.items()}
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in epochs.items():
            start = time.perf_counter()
            images = next(run)
            if number > 0:
                rates[name].append(images / (time.perf_counter() - start))
        print(
            f"round {number}: " + ", ".join(f"{name} {rate[-1]:.0f}" for name, rate in rates.items() if rate),
            flush=True,
        )
    return rates


def main(
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    images: Annotated[int, typer.Option(min=BATCH, help="Number of JPEG files.")] = 640,
    rounds: Annotated[int, typer.Option(min=1, help="Timed epochs per loader.")] = 7,
) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        size = write_pictures(Path(folder), images)
        rates = measure({"ours": our_epochs, "torchvision": torchvision_epochs}, Path(folder), rounds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    advantage = statistics.median(
        ours / theirs for ours, theirs in zip(rates["ours"], rates["torchvision"], strict=True)
    )
    environment = describe_environment()
    about = f"{images} files of {size / images / 1024:.0f} KiB, longer side {LONGER_SIDE}, one worker process each"
    write_json(
        output / "jpeg_loading.json",
        {"environment": environment, "about": about, "images_per_second": rates, "times_faster": advantage},
    )
    rows = [[name, f"{median:.0f}"] for name, median in medians.items()]
    body = f"{about}. Median ratio of neighboring rounds: **{advantage:.2f}×**.\n\n"
    write_markdown(
        output / "jpeg_loading.md",
        "JPEG files to batches",
        environment,
        body + markdown_table(["loader", "images/s and core, median"], rows),
    )
    print(f"{medians}, ours is {advantage:.2f} times as fast")


if __name__ == "__main__":
    typer.run(main)
