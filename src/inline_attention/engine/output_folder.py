"""Whether a run's folder can take what the run will write, as far as that can be known before it is made."""

from __future__ import annotations

import os
from pathlib import Path

from inline_attention.engine.config import Problem
from inline_attention.engine.durable_files import free_bytes


def check_output(folder: Path, needed: int) -> list[Problem]:
    """What is wrong with a folder to write to.

    Args:
        folder: Of the run; need not be there yet.
        needed: Bytes that its checkpoints will take.
    """
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return [Problem("run.output", f"expected a folder, but {nearest} is a file; choose another with --output")]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [Problem("run.output", f"may not write to {nearest}; choose another folder with --output")]
    free = free_bytes(nearest)
    if free is not None and free < needed:
        message = f"{nearest} has {free / 1e6:,.0f} MB free, the run's checkpoints will take {needed / 1e6:,.0f} MB"
        return [
            Problem("run.output", f"{message}; make room, set checkpoints.keep_last lower, or choose another folder")
        ]
    return []
