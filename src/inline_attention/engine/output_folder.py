"""Check that a run's folder can take what the run will write, and keep other runs out of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from inline_attention.engine.config import ConfigError, Problem
from inline_attention.engine.durable_files import free_bytes, unfinished
from inline_attention.engine.processes import Processes
from inline_attention.engine.run_lock import FolderInUseError, run_lock

CHECKPOINTS = "checkpoints"


@contextmanager
def claimed(folder: Path, processes: Processes) -> Iterator[None]:
    """Create a run's folder and lock it. What is still empty at the end is removed again.

    Rank 0 does it for all ranks of a run; an error is raised in each.

    Raises:
        ConfigError: If another run uses the folder, or it cannot be written.
    """
    with ExitStack() as stack:
        trouble = ""
        if processes.is_main:
            try:
                _make(folder, stack)
                stack.enter_context(run_lock(folder))
                _check_writable(folder / CHECKPOINTS)
            except FolderInUseError as error:
                trouble = str(error)
            except OSError as error:
                reason = f"{error.filename or folder} cannot be written ({error.strerror or error})"
                trouble = f"{reason}; make room or make it writable, or choose another folder with --output"
        if trouble := next(filter(None, processes.gather(trouble)), ""):
            raise ConfigError([Problem("run.output", trouble)])
        yield


def _make(folder: Path, stack: ExitStack) -> None:
    """Create a folder and its parents; those that are new are removed in the end if they are still empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        stack.callback(_remove_empty, path)
    folder.mkdir(parents=True, exist_ok=True)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _check_writable(folder: Path) -> None:
    """Write and remove a file. Permissions alone do not tell, for root and on network disks."""
    if folder.is_symlink():
        raise OSError(0, f"it is a link to {os.readlink(folder)}, expected a folder", str(folder))
    if not folder.exists():
        return
    probe = unfinished(folder / "probe")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


def check_output(folder: Path, needed: int = 0) -> list[Problem]:
    """Return what is wrong with a folder to write to.

    Args:
        folder: Folder of the run, which need not exist yet.
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
