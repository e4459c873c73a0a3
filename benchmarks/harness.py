"""What every benchmark shares: where it ran, how it times, how it writes its results."""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import inline_attention
from inline_attention.analysis.cost import describe_machine

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, str]:
    """Machine, versions, commit and date: a figure means nothing without them."""
    return {
        "machine": describe_machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "inline_attention": inline_attention.__version__,
        "commit": _git("rev-parse", "--short=12", "HEAD") + ("-dirty" if _git("status", "--porcelain") else ""),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def interleaved_medians(
    contestants: Mapping[str, Callable[[], object]], *, seconds: float, at_least: int = 3
) -> dict[str, float]:
    """Median milliseconds of each contestant. They take turns, so that a disturbance hits all alike."""
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < at_least or time.perf_counter() < deadline:
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """‖actual - exact‖ / ‖exact‖ in float64."""
    exact = exact.double()
    return ((actual.double() - exact).norm() / exact.norm()).item()


def write_json(name: str, content: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def write_markdown(name: str, title: str, environment: Mapping[str, str], body: str) -> Path:
    facts = "\n".join(f"- {key}: {value}" for key, value in environment.items())
    path = RESULTS / f"{name}.md"
    path.write_text(f"# {title}\n\n{facts}\n\n{body}\n")
    return path


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
