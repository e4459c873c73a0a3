"""Peak memory of models on a CPU: building the largest, and running InLine-DeiT-T on high-resolution images.

    python benchmarks/cpu_memory.py

Each case runs in its own process. The figures are peaks of resident memory: after the imports, added by building the
model, and of the whole process. Results: benchmarks/results/cpu_memory.{json,md}.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown

RESULTS = Path(__file__).parent / "results"

PROGRAM = """
import json, resource, sys, torch, inline_attention
model_name, size = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
unit = 1 if sys.platform == "darwin" else 1024
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
before = peak()
model = inline_attention.create_model(model_name).eval()
built = peak()
if size:
    with torch.inference_mode():
        finite = bool(model(torch.randn(1, 3, size, size)).isfinite().all())
    assert finite
print(json.dumps({"imported": before, "build": built - before, "total": peak()}))
"""


@dataclass(frozen=True)
class Case:
    """A model, and the side in pixels of one square image to run it on; 0 for building only."""

    model: str
    size: int


CASES = [
    Case("inline_swin_base_384", 0),
    Case("inline_deit_tiny", 512),
    Case("inline_deit_tiny", 1024),
    Case("inline_deit_tiny", 2048),
    Case("softmax_deit_tiny", 2048),
    Case("inline_pvt_tiny", 2048),
]


def main() -> None:
    rows = []
    for case in track(CASES, description="peak memory"):
        command = [sys.executable, "-c", PROGRAM, case.model, str(case.size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({**asdict(case), **json.loads(done.stdout.splitlines()[-1])})
    where = describe_environment()
    table = markdown_table(
        ["model", "image", "building (MiB)", "whole process (MiB)", "of which imports (MiB)"],
        [
            [
                row["model"],
                f"{row['size']}²" if row["size"] else "–",
                *(f"{row[key] / 2**20:.0f}" for key in ("build", "total", "imported")),
            ]
            for row in rows
        ],
    )
    write_json(RESULTS / "cpu_memory.json", {"environment": where, "cases": rows})
    write_markdown(RESULTS / "cpu_memory.md", "Peak memory of models on a CPU", where, table)
    console = Console()
    console.print(table)
    console.print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
