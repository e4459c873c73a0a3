"""Time and peak memory of whole models and streamed models against the side of one square image.

    python benchmarks/gigapixel.py          # CPU: images from generated TIFFs, memory above the imports
    python benchmarks/gigapixel.py --gpu    # 1024 to 65536 pixels, with softmax beside it, bfloat16, after decoding

Each case runs in its own process. It compares the streamed model with the whole model on a small image first, and is
not timed if they differ. Results: benchmarks/results/{cpu,gpu}_gigapixel.{json,md}.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown

RESULTS = Path(__file__).parent / "results"

PROGRAM = """
import json, os, resource, subprocess, sys, time, torch
import inline_attention
from inline_attention import create_model, streamed
from inline_attention.data.slides import open_slide
name, size, way, memory, place, folder = sys.argv[1:]
size, gpu = int(size), place == "cuda"
torch.manual_seed(0)
if not gpu:
    import imagecodecs, tifffile
    torch.set_num_threads(2)
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

class Noise:
    # Rows of one random block: decoding and the network do not mix, and memory stays small.
    def __init__(self, size):
        self.size = size, size
        self.rows = torch.randn(3, 1024, size, dtype=torch.bfloat16).pin_memory()
    def read_rows(self, start, stop):
        return self.rows[:, torch.arange(start, stop) % 1024]

model = create_model(name).eval().to(place)
small = torch.randn(3, 300, 400, device=place)
with torch.inference_mode():
    expected, found = model(small[None]), streamed(model, "64MiB")(small)
assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), "the streamed model differs"
if gpu:
    model = model.bfloat16()
    source = Noise(size)
    def run():
        if way == "streamed":
            return streamed(model, memory)(source)
        return model(torch.cat([source.read_rows(0, 1024).cuda()] * max(1, size // 1024), 1)[None, :, :size])
    with torch.inference_mode():
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        assert run().isfinite().all()
        torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated()
else:
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


@dataclass(frozen=True)
class Case:
    """A model, the side of its image in pixels, whole or streamed, and the memory for streaming."""

    model: str
    size: int
    way: str
    memory: str = "512MiB"


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
GPU_CASES = [
    *(Case("inline_deit_tiny", size, "whole") for size in SIDES),
    *(Case("inline_deit_tiny", size, "streamed", "2560MiB") for size in SIDES),
    *(Case("softmax_deit_tiny", size, "whole") for size in SIDES[:5]),
    *(Case(f"inline_{family}_tiny", 16384, "streamed", "4GiB") for family in ("pvt", "swin", "cswin")),
]


def main() -> None:
    on_gpu = "--gpu" in sys.argv[1:]
    rows: list[dict[str, Any]] = []
    table = ""
    with tempfile.TemporaryDirectory() as folder:
        for case in track(GPU_CASES if on_gpu else CPU_CASES, description="images"):
            arguments = [case.model, str(case.size), case.way, case.memory, "cuda" if on_gpu else "cpu", folder]
            done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)
            if done.returncode == 0:
                rows.append({**asdict(case), **json.loads(done.stdout.splitlines()[-1])})
            else:  # such as out of memory
                rows.append({**asdict(case), "error": (done.stderr.strip().splitlines() or ["killed"])[-1][:200]})
            table = write(rows, on_gpu)  # after every case: the large ones take minutes
    Console().print(table)


def write(rows: list[dict[str, Any]], on_gpu: bool) -> str:
    """Write the results so far; return them as a table."""
    where, name = describe_environment(), "gpu_gigapixel" if on_gpu else "cpu_gigapixel"
    table = markdown_table(
        ["model", "image", "way", "memory setting", "time (s)", "peak memory (MiB)"],
        [
            [
                row["model"],
                f"{row['size']}²",
                row["way"],
                row["memory"] if row["way"] == "streamed" else "",
                f"{row['seconds']:.2f}" if "seconds" in row else row["error"],
                f"{row['peak_bytes'] / 2**20:,.0f}" if "seconds" in row else "",
            ]
            for row in rows
        ],
    )
    what = (
        "Memory of the GPU, weights included; bfloat16; pixels are decoded already."
        if on_gpu
        else "Resident memory above the imports; float32, 2 threads; JPEG tiles are decoded meanwhile."
    )
    write_json(RESULTS / f"{name}.json", {"environment": where, "cases": rows})
    write_markdown(RESULTS / f"{name}.md", "Images larger than memory", where, f"{what}\n\n{table}")
    return table


if __name__ == "__main__":
    main()
