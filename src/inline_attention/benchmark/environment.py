"""Describe where a benchmark ran: machine, versions, commit and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

import inline_attention

# For copies of the source without git history, such as those sent to a machine with a GPU.
COMMIT_VARIABLE = "INLINE_BENCH_COMMIT"
UNKNOWN = "unknown"


def describe_machine() -> str:
    """Return CPU, number of threads and torch version."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        models = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        name = next(models, f":{name}").partition(":")[2].strip()
    threads = torch.get_num_threads()
    return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}, torch {torch.__version__}"


def describe_environment() -> dict[str, str]:
    """Return machine, GPU and driver, versions, commit and date."""
    gpu = driver = cudnn = "none"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        cudnn = str(torch.backends.cudnn.version() or "none")
    return {
        "machine": describe_machine(),
        "gpu": gpu,
        "driver": driver,
        "torch": torch.__version__,
        "triton": _installed_version("triton"),
        "cudnn": cudnn,
        "timm": _installed_version("timm"),
        "inline_attention": inline_attention.__version__,
        "commit": os.environ.get(COMMIT_VARIABLE) or _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def combined_environment(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the latest of several environments, with every GPU, torch version and commit."""
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
    # An installed package may be inside the working tree of another project.
    if _git("ls-files", "--error-unmatch", str(Path(inline_attention.__file__).resolve())) == UNKNOWN:
        return UNKNOWN
    dirty = "-dirty" if _git("status", "--porcelain", "--untracked-files=no") else ""
    return _git("rev-parse", "--short=12", "HEAD") + dirty


def _git(*arguments: str) -> str:
    return _first_line(["git", "-C", str(Path(__file__).parent), *arguments])


def _first_line(command: Sequence[str]) -> str:
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return output.strip().partition("\n")[0]
