"""Where a benchmark ran: a figure means nothing without its machine, versions, commit and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

import inline_attention
from inline_attention.benchmark.cost import describe_machine

# For copies of the source without its git history, such as those that are sent to a machine with a GPU.
COMMIT_VARIABLE = "INLINE_BENCH_COMMIT"
UNKNOWN = "unknown"


def describe_environment() -> dict[str, str]:
    """Machine, GPU and driver, versions, commit and date."""
    has_gpu = torch.cuda.is_available()
    return {
        "machine": describe_machine(),
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
        "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        if has_gpu
        else "none",
        "torch": torch.__version__,
        "triton": _installed_version("triton"),
        "cudnn": str(torch.backends.cudnn.version() or "none") if has_gpu else "none",
        "timm": _installed_version("timm"),
        "inline_attention": inline_attention.__version__,
        "commit": os.environ.get(COMMIT_VARIABLE) or _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def combined_environment(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Of several runs the last one's; all are named where they differ in device, versions or commit."""
    in_order = sorted(environments, key=lambda environment: environment["date"])
    latest = dict(in_order[-1])
    for key in ("gpu", "torch", "commit"):
        latest[key] = ", then ".join(dict.fromkeys(environment[key] for environment in in_order))
    return latest


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    # An installed package may lie inside the working tree of a project that merely uses it.
    if _git("ls-files", "--error-unmatch", str(Path(inline_attention.__file__).resolve())) == UNKNOWN:
        return UNKNOWN
    dirty = "-dirty" if _git("status", "--porcelain", "--untracked-files=no") else ""
    return _git("rev-parse", "--short=12", "HEAD") + dirty


def _git(*arguments: str) -> str:
    return _first_line(["git", "-C", str(Path(__file__).parent), *arguments])


def _first_line(command: Sequence[str]) -> str:
    """The first line a command prints; `UNKNOWN` where it is missing or fails."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return output.strip().partition("\n")[0]
