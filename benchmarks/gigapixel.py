"""Time and peak memory of whole models and streamed models against the side of one square image.

    python benchmarks/gigapixel.py          # CPU: images from generated TIFFs, memory above the imports
    python benchmarks/gigapixel.py --gpu    # 1024 to 65536 pixels, with softmax beside it, bfloat16, after decoding

On a CPU each case runs in its own process, on a GPU each series of sizes. A process compares the streamed model with
the whole model on a small image first, and times nothing if they differ. On a GPU, "whole" starts from a normalized
image on the device, "streamed" from bytes in ordinary host memory. "Training" is forward pass, backward pass and update
of AdamW, under autocast and with checkpointed blocks. A series ends where an image does not fit or would take longer
than 60 s. Results: benchmarks/results/{cpu,gpu}_gigapixel.{json,md} and, from a GPU, docs/images/gigapixel.png.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.support.figures import Axes, Chart, LegendEntry, Panel, Style, draw_line, log_axes

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parent.parent / "docs" / "images"

CPU_PROGRAM = """
import json, os, resource, subprocess, sys, time, torch
import inline_attention
from inline_attention import create_model, streamed
from inline_attention.data.slides import open_slide
name, size, way, memory, folder = sys.argv[1:]
size = int(size)
torch.manual_seed(0)
import imagecodecs, tifffile
torch.set_num_threads(2)
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
model = create_model(name).eval()
small = torch.randn(3, 300, 400)
with torch.inference_mode():
    expected, found = model(small[None]), streamed(model, "64MiB")(small)
assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), "the streamed model differs"
path = f"{folder}/{size}.tif"
if not os.path.exists(path):  # in a process of its own, whose memory does not count
    code = ("from inline_attention.data.marked_slides import *; import sys; size = int(sys.argv[1]);"
            "plan = SlidesPlan(size=size, mark_size=max(8, size // 32));"
            "write_slide(sys.argv[2], size, place_marks(plan, 'train', 0, 'same'), plan.mark_size, 0)")
    subprocess.run([sys.executable, "-c", code, str(size), path], check=True)
started = time.perf_counter()
with open_slide(path) as slide:
    if way == "streamed":
        out = streamed(model, memory)(slide)
    else:
        with torch.inference_mode():
            out = model(slide.read_rows(0, size)[None].float().div_(255))
assert out.isfinite().all()
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before
print(json.dumps({"seconds": seconds, "peak_bytes": peak}))
"""
GPU_PROGRAM = """
import json, sys, time, torch
from inline_attention import create_model, streamed
name, way, memory, longest, *sides = sys.argv[1:]
torch.manual_seed(0)
model = create_model(name).eval().cuda()
small = torch.randn(3, 300, 400, device="cuda")
if way == "streamed":
    with torch.inference_mode():
        expected, found = model(small[None]), streamed(model, "64MiB")(small)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3), "the streamed model differs"
if way == "training":
    model.train().set_grad_checkpointing(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
else:
    model = model.bfloat16()

def prepare(size):
    if way != "streamed":
        return torch.randn(1, 3, size, size, device="cuda", dtype=torch.bfloat16)
    rows = torch.randint(256, (3, 1024, size), dtype=torch.uint8)
    return torch.cat([rows] * (size // 1024), 1)  # bytes in ordinary host memory, as a decoder leaves them

def run(image):
    if way == "training":
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(image).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    with torch.inference_mode():
        return streamed(model, memory)(image) if way == "streamed" else model(image)

previous = 0.0
for size in map(int, sides):
    if previous * 4 > float(longest):
        print(json.dumps({"size": size, "error": f"would take more than {longest} s"}), flush=True)
        break
    try:
        image = prepare(size)
        for _ in range(3 if previous < 0.1 else 1 if previous * 4 < 10 else 0):
            run(image)  # a softmax model of a large image is timed once: its kernels are warm
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        assert run(image).isfinite().all()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        print(json.dumps({"size": size, "error": "does not fit"}), flush=True)
        break
    previous, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated()
    print(json.dumps({"size": size, "seconds": previous, "peak_bytes": peak}), flush=True)
    del image
"""


@dataclass(frozen=True)
class Case:
    """A model, the side of its image in pixels, whole or streamed, and the memory for streaming."""

    model: str
    size: int
    way: str
    memory: str = "512MiB"


@dataclass(frozen=True)
class Series:
    """A model, how it runs, the memory for streaming, and the sides of its images in pixels."""

    model: str
    way: str
    sizes: tuple[int, ...]
    memory: str = ""


CPU_CASES = [
    Case("inline_deit_tiny", 1024, "streamed"),
    Case("inline_deit_tiny", 2048, "streamed"),
    Case("inline_deit_tiny", 4096, "streamed"),
    Case("inline_deit_tiny", 8192, "streamed"),
    Case("inline_deit_tiny", 1024, "whole"),
    Case("inline_deit_tiny", 2048, "whole"),
    Case("inline_deit_tiny", 4096, "whole"),
    Case("inline_swin_tiny", 2048, "streamed"),
]
SIDES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
GPU_SERIES = [
    Series("inline_deit_tiny", "whole", SIDES),
    Series("inline_deit_tiny", "streamed", SIDES, "2560MiB"),
    Series("inline_deit_tiny", "training", SIDES),
    Series("softmax_deit_tiny", "whole", SIDES),
    Series("softmax_deit_tiny", "training", SIDES),
    *(Series(f"inline_{family}_tiny", "streamed", (4096, 16384), "4GiB") for family in ("pvt", "swin", "cswin")),
]
LONGEST = 60  # seconds
CPU_NOTE = "Resident memory above the imports; float32, 2 threads; JPEG tiles are decoded meanwhile."
GPU_NOTE = (
    "Memory of the GPU, weights included; pixels are decoded already. Whole: bfloat16 weights and image on the device. "
    "Streamed: bfloat16 weights, bytes in ordinary host memory. Training: forward, backward, update; autocast, "
    "checkpointed blocks. The softmax model has InLine-DeiT-T's heads of 32 channels; heads of 64 are faster."
)


def main(gpu: Annotated[bool, typer.Option("--gpu", help="Measure on the GPU.")] = False) -> None:
    if gpu:
        measure_on_gpu()
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in track(CPU_CASES, description="images"):
            done = run_program(CPU_PROGRAM, [case.model, str(case.size), case.way, case.memory, folder])
            rows.append(asdict(case) | (json.loads(done.stdout.splitlines()[-1]) if done.stdout else failure(done)))
            write(rows, "cpu_gigapixel", CPU_NOTE)
    Console().print((RESULTS / "cpu_gigapixel.md").read_text(encoding="utf-8"))


def measure_on_gpu() -> None:
    """Run all series on the GPU; results are written after each."""
    rows: list[dict[str, Any]] = []
    for series in GPU_SERIES:
        options = [series.model, series.way, series.memory, str(LONGEST), *map(str, series.sizes)]
        done = run_program(GPU_PROGRAM, options)
        about = {"model": series.model, "way": series.way, "memory": series.memory}
        rows += [about | json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode:
            rows.append(about | {"size": 0} | failure(done))
        write(rows, "gpu_gigapixel", GPU_NOTE)
    draw(rows, IMAGES)
    print((RESULTS / "gpu_gigapixel.md").read_text(encoding="utf-8"))


def run_program(program: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


def failure(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return why a process failed, such as lack of memory."""
    return {"error": (done.stderr.strip().splitlines() or ["killed"])[-1][:200]}


def write(rows: list[dict[str, Any]], name: str, what: str) -> None:
    """Write the results so far."""
    where = describe_environment()
    table = markdown_table(
        ["model", "image", "way", "memory setting", "time (s)", "peak memory (MiB)"],
        [
            [
                row["model"],
                f"{row['size']}²",
                row["way"],
                row["memory"] if row["way"] == "streamed" else "",
                f"{row['seconds']:.3f}" if "seconds" in row else row["error"],
                f"{row['peak_bytes'] / 2**20:,.0f}" if "seconds" in row else "",
            ]
            for row in rows
        ],
    )
    write_json(RESULTS / f"{name}.json", {"environment": where, "cases": rows})
    write_markdown(RESULTS / f"{name}.md", "Images larger than memory", where, f"{what}\n\n{table}")


LINES = {
    "softmax": ("softmax_deit_tiny", "whole", Style("softmax")),
    "InLine": ("inline_deit_tiny", "whole", Style("inline")),
    "InLine, streamed in 2.5 GiB": ("inline_deit_tiny", "streamed", Style("inline", 1)),
}


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw time and memory against the side of the image, up to where each series ends."""

    def panel(axes: Axes, value: str, unit: float, label: str) -> None:
        for model, way, style in LINES.values():
            points = [
                (row["size"], row[value] / unit)
                for row in rows
                if (row["model"], row["way"]) == (model, way) and value in row
            ]
            if points:
                draw_line(axes, style, points)
        log_axes(axes, SIDES)
        axes.set_xticklabels([f"{side}²" if side < 16384 else f"{side // 1024}k²" for side in SIDES])
        axes.set(xlabel="image, pixels", ylabel=label)

    panels = [
        Panel("Time of one forward pass", partial(panel, value="seconds", unit=1.0, label="s"), "Time.", 3.4),
        Panel("Peak GPU memory", partial(panel, value="peak_bytes", unit=2.0**30, label="GiB"), "Memory.", 3.4),
    ]
    legend = [LegendEntry(name, style) for name, (_, _, style) in LINES.items()]
    Chart(panels, legend).save(
        folder,
        "gigapixel",
        title="One image, every token attends to every other",
        small_print="DeiT-T, bfloat16, one NVIDIA H200. Softmax ends where one pass would take longer than a minute. "
        "Times at 1024² include one-off preparation.",
        width=5.0,
        formats=("png",),
    )


if __name__ == "__main__":
    typer.run(main)
