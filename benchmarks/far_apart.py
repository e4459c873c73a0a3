"""Two small marks far apart: the whole image at once, against tiles with pooled features and softmax on smaller images.

    python benchmarks/far_apart.py [--at-once 3] [--time-limit 300]    # every method and seed, then the table
    python benchmarks/far_apart.py --only inline:0                     # one run, in this process

Slides are those of `inline data slides`: two marks, each a ring or a cross, at least half a side apart. The class says
whether both marks are of one kind. All methods also learn which kinds are there (two more outputs, not evaluated): the
class alone gives no gradient at first. Every method starts at 256×256 pixels and doubles the side up to 4096. Methods
that see reduced slides do so from the second stage on. A step has at most the pixels of 64 slides of 512×512.

Results: benchmarks/results/gpu_far_apart.{json,md}. Finished runs that are there, or in FOLDER/runs, are not repeated.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor, nn

from inline_attention import create_model
from inline_attention.benchmark.environment import combined_environment, describe_environment
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.benchmark.side_by_side import Command, run_side_by_side
from inline_attention.data.marked_slides import CLASSES, KINDS, SlidesPlan, draw_slide, place_marks

RESULTS = Path(__file__).parent / "results"
SIDES = (256, 512, 1024, 2048, 4096)
TRAINING_SLIDES = {256: 4096, 512: 2048, 1024: 768, 2048: 256, 4096: 96}
VALIDATION_SLIDES = 96
STEPS = {256: 1000, 512: 400, 1024: 400, 2048: 300, 4096: 300}
PIXELS_PER_STEP, MOST_SLIDES = 64 * 512**2, 64
EARLY_STOP = 0.995  # of the validation slides right: the next stage begins
EVALUATE_EVERY = 50
OUTPUTS = len(CLASSES) + len(KINDS)
MARK, DEPTH, LR = 32, 6, 2e-3  # pixels of a mark, blocks, learning rate of the first stage
MEAN, SPREAD = (195.0, 150.0, 182.0), 40.0


@dataclass(frozen=True)
class Method:
    """What a model sees of a slide.

    Attributes:
        title: Name in the table.
        model: Model of the library; depth and width are the same for all.
        reduction: Factor by which slides are made smaller before the model sees them.
        tile: Side of tiles that the model sees one at a time; None: it sees all at once.
        hidden: Width of the hidden layer between pooled features of tiles and classes; 0: none.
    """

    title: str
    model: str = "inline_deit_tiny"
    reduction: int = 1
    tile: int | None = None
    hidden: int = 0


METHODS = {
    "inline": Method("InLine, whole slide"),
    "tiles": Method("InLine, tiles of 512², mean of their features", tile=512),
    "tiles_mlp": Method("InLine, tiles of 512², MLP on the mean of their features", tile=512, hidden=384),
    "softmax_2": Method("softmax, slide reduced to 2048²", model="softmax_deit_tiny", reduction=2),
    "softmax_4": Method("softmax, slide reduced to 1024²", model="softmax_deit_tiny", reduction=4),
}


class SlideClassifier(nn.Module):
    """A model over whole slides, or over tiles whose features are averaged."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method
        self.network: Any = create_model(
            method.model, num_classes=OUTPUTS, img_size=SIDES[0], depth=DEPTH, global_pool="avg"
        )
        width = self.network.num_features
        self.head = nn.Linear(width, OUTPUTS)
        if method.hidden:
            self.head = nn.Sequential(nn.Linear(width, method.hidden), nn.GELU(), nn.Linear(method.hidden, OUTPUTS))

    def forward(self, images: Tensor) -> Tensor:
        """Classify slides `[B, 3, H, W]`; after the classes come the kinds of marks."""
        if self.method.tile is None:
            return self.network(images)
        tile = min(self.method.tile, images.shape[2])
        tiles = images.unfold(2, tile, tile).unfold(3, tile, tile)  # [B, 3, rows, columns, tile, tile]
        tiles = tiles.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        network = self.network
        features = network.forward_head(network.forward_features(tiles), pre_logits=True)
        return self.head(features.unflatten(0, (len(images), -1)).mean(1))


def prepare(images: Tensor, reduction: int) -> Tensor:
    """Return normalized slides from bytes `[B, H, W, 3]`."""
    mean = torch.tensor(MEAN, device=images.device)
    images = ((images.float() - mean) / SPREAD).permute(0, 3, 1, 2)
    return F.avg_pool2d(images, reduction) if reduction > 1 else images.contiguous()


def slides_of(folder: Path, side: int, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return all slides `[N, H, W, 3]` of a size, their classes `[N]`, and which kinds of marks they have `[N, 2]`.

    Pixels are drawn once, by all processors, and kept in a file.
    """
    count = TRAINING_SLIDES[side] if split == "train" else VALIDATION_SLIDES
    path = folder / f"{split}-{side}.npy"
    plan = SlidesPlan(images=count, validation_images=count, size=side, mark_size=MARK)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.npy")
        array = np.lib.format.open_memmap(unfinished, "w+", dtype=np.uint8, shape=(count, side, side, 3))
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            for index, (pixels, _) in enumerate(pool.map(partial(draw_slide, plan, split), range(count), chunksize=4)):
                array[index] = pixels
        array.flush()
        unfinished.rename(path)
    labels = torch.arange(count) % len(CLASSES)
    marks = [{mark.kind for mark in place_marks(plan, split, i, CLASSES[i % len(CLASSES)])} for i in range(count)]
    kinds = torch.tensor([[float(kind in found) for kind in KINDS] for found in marks])
    return torch.from_numpy(np.load(path)), labels, kinds


def turned(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip and transpose a batch of bytes `[B, H, W, 3]` at random: eight views of every slide."""
    down, across, swap = (torch.rand(3, generator=generator) < 0.5).tolist()
    images = images.flip(1) if down else images
    images = images.flip(2) if across else images
    return images.transpose(1, 2) if swap else images


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, batch: int, reduction: int) -> float:
    """Return the share of slides whose class is right."""
    model.eval()
    right = 0
    for some, classes in zip(images.split(batch), labels.split(batch), strict=True):
        with torch.autocast(some.device.type, torch.bfloat16):
            right += (model(prepare(some, reduction))[:, : len(CLASSES)].argmax(1) == classes).sum().item()
    model.train()
    return right / len(images)


def train(method: Method, seed: int, folder: Path, device: torch.device) -> Iterator[dict[str, Any]]:
    """Train through all sizes; yield side, accuracy, steps and seconds of each stage."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = SlideClassifier(method).to(device)
    sides = [side for side in SIDES if side in SIDES[:1] or side // method.reduction >= SIDES[0]]
    for number, side in enumerate(sides):
        images, labels, kinds = (part.to(device) for part in slides_of(folder, side, "train"))
        held_out, held_out_labels, _ = (part.to(device) for part in slides_of(folder, side, "validation"))
        reduction = method.reduction if number else 1
        batch = min(MOST_SLIDES, max(2, PIXELS_PER_STEP // (side // reduction) ** 2))
        steps, rate = STEPS[side], LR if number == 0 else LR / 2
        optimizer = create_optimizer_v2(model, opt="adamw", lr=rate, weight_decay=0.02)
        started, evaluating, right, done, step_seconds = time.perf_counter(), 0.0, 0.0, 0, []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
            chosen = torch.randint(len(images), (batch,), generator=generator).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(prepare(turned(images[chosen], generator), reduction))
            named, seen = logits.float().split([len(CLASSES), len(KINDS)], dim=1)
            loss = F.cross_entropy(named, labels[chosen])
            loss = loss + F.binary_cross_entropy_with_logits(seen, kinds[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done = step + 1
            if done % EVALUATE_EVERY == 0 or done == steps:
                value = loss.item()  # waits for the device
                paused = time.perf_counter()
                step_seconds.append((paused - started - evaluating) / done)
                right = accuracy(model, held_out, held_out_labels, batch, reduction)
                evaluating += time.perf_counter() - paused
                print(f"{method.title}, {side}²: step {done}, loss {value:.3f}, accuracy {right:.3f}", flush=True)
                if right >= EARLY_STOP:
                    break
        seconds = time.perf_counter() - started - evaluating
        del images, held_out
        yield {
            "side": side,
            "accuracy": right,
            "steps": done,
            "batch": batch,
            "seconds": seconds,
            "seconds_per_image": min(step_seconds) / batch,
        }


def write_results(found: Sequence[dict[str, Any]]) -> str:
    """Write JSON and Markdown of all finished runs; return the table."""
    environment = combined_environment(run["environment"] for run in found)
    rows = []
    for name, method in METHODS.items():
        runs = [run["stages"] for run in found if run["method"] == name]
        if not runs:
            continue
        by_side = {side: [stage for stages in runs for stage in stages if stage["side"] == side] for side in SIDES}
        last = by_side[SIDES[-1]]
        cells = ["; ".join(f"{100 * stage['accuracy']:.1f}" for stage in last) or "stopped before"]
        cells += [
            f"{100 * fmean(stage['accuracy'] for stage in by_side[side]):.1f}" if by_side[side] else ""
            for side in SIDES[:-1]
        ]
        whole = [stages for stages in runs if stages[-1]["side"] == SIDES[-1]]
        cells += [
            f"{1000 * min(stage['seconds_per_image'] for stage in last):.1f}" if last else "",
            f"{fmean(sum(stage['seconds'] for stage in stages) for stages in whole):.0f}" if whole else "",
        ]
        rows.append([method.title, *cells])
    header = ["method", f"{SIDES[-1]}², % per seed", *(f"{side}², %" for side in SIDES[:-1])]
    table = markdown_table([*header, "ms per slide, training", "training, s"], rows)
    later = ", ".join(str(STEPS[side]) for side in SIDES[1:])
    text = (
        f"Slides with two marks of {MARK} pixels, each a ring or a cross: are both of one kind? Accuracy "
        f"on {VALIDATION_SLIDES} slides of each size, half of each class; chance: 50 %. Models: {DEPTH} "
        "blocks, 192 channels and patches of 16 pixels; bfloat16 autocast, eager. Each method starts at 256×256 pixels "
        f"(at most {STEPS[256]:,} steps) and doubles the side ({later} steps). It also learns which kinds of marks "
        f"are there. A stage ends at {100 * EARLY_STOP:.1f} %. Several runs shared the GPU: seconds are only a rough "
        "comparison."
    )
    write_json(
        RESULTS / "gpu_far_apart.json",
        {"environment": environment, "settings": {"mark": MARK, "depth": DEPTH, "lr": LR}, "runs": list(found)},
    )
    write_markdown(RESULTS / "gpu_far_apart.md", "Two marks far apart", environment, f"{text}\n\n{table}")
    return table


def run_method(name: str, seed: int, slides: Path, runs: Path) -> None:
    """Train one method with one seed. A run that is stopped keeps its finished stages."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs.mkdir(parents=True, exist_ok=True)
    settings = {"method": name, **asdict(METHODS[name]), "seed": seed}
    content: dict[str, Any] = {**settings, "environment": describe_environment(), "stages": []}
    for stage in train(METHODS[name], seed, slides, device):
        content["stages"].append(stage)
        (runs / f"{name}-{seed}.json").write_text(json.dumps(content), encoding="utf-8")


def is_finished(path: Path) -> bool:
    """True if a run has ended with the largest slides."""
    stages = json.loads(path.read_text(encoding="utf-8"))["stages"] if path.exists() else []
    return bool(stages) and stages[-1]["side"] == SIDES[-1]


def restore_runs(runs: Path) -> None:
    """Write the runs of the committed results to the folder of runs, unless they are there."""
    results = RESULTS / "gpu_far_apart.json"
    for run in json.loads(results.read_text(encoding="utf-8"))["runs"] if results.exists() else ():
        path = runs / f"{run['method']}-{run['seed']}.json"
        if not path.exists():
            write_json(path, run)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per method.")] = 2,
    at_once: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 3,
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which runs are stopped.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder for slides and runs.")] = Path("out/far_apart"),
    only: Annotated[str | None, typer.Option(help="METHOD:SEED, one run in this process, without a table.")] = None,
) -> None:
    slides, runs = folder / "slides", folder / "runs"
    if only is not None:
        name, _, seed = only.partition(":")
        if name not in METHODS or not seed.isdigit():
            raise typer.BadParameter(f"expected one of {', '.join(METHODS)}, then :SEED, got {only!r}")
        run_method(name, int(seed), slides, runs)
        return
    restore_runs(runs)
    for side in SIDES:  # once, before processes share the processors
        for split in ("train", "validation"):
            slides_of(slides, side, split)
    commands = [
        Command(
            f"{method}, seed {seed}",
            (sys.executable, __file__, f"--only={method}:{seed}", f"--folder={folder}"),
            runs / f"{method}-{seed}.log",
        )
        for seed in range(seeds)
        for method in METHODS
        if not is_finished(runs / f"{method}-{seed}.json")
    ]
    for ended in run_side_by_side(commands, at_once=at_once, time_limit=time_limit):
        print(f"{ended.command.name}: {ended.outcome}, {ended.seconds:.0f} s", flush=True)
        print(ended.command.last_lines(4), flush=True)
    print(write_results([json.loads(path.read_text(encoding="utf-8")) for path in sorted(runs.glob("*.json"))]))


if __name__ == "__main__":
    typer.run(main)
