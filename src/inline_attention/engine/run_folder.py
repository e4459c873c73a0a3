"""The folder of a run: check that it can be written, and lock it for the life of the run.

The lock is the operating system's, which ends with the process. A note in the lock file says who holds it. Where the
file system has no locks, or does not share them between machines, the note decides: a live holder touches the file
every few seconds.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from inline_attention.engine.config import ConfigError, Problem
from inline_attention.engine.processes import Processes
from inline_attention.support.files import LOCK_FILE as FOLDER_LOCK_FILE
from inline_attention.support.files import free_bytes, open_lock_file, try_lock, unfinished, unlock
from inline_attention.support.text import printable
from inline_attention.support.untrusted import UntrustedDataError, build_dataclass, parse_json

CHECKPOINTS, CURVES = "checkpoints", "tensorboard"
SETTINGS_FILE = "args.yaml"
WANDB = "wandb"  # written by Weights & Biases
LOCK_FILE = ".run-lock"
LONGEST_NOTE = 4096  # bytes
HEARTBEAT = 5.0  # seconds between two touches of the lock file
PATIENCE = 4 * HEARTBEAT  # seconds without a touch after which a holder counts as gone
GRACE = 5.0  # seconds that a lock may outlive its process
logger = logging.getLogger(__name__)
_held: set[int] = set()  # descriptors, which children must not keep open: a lock ends when all copies are closed


class FolderInUseError(RuntimeError):
    """Another run writes to the folder."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, and the local time at which it took it."""

    host: str
    pid: int
    started: str
    process: str = ""  # boot and start time, which tell it from a later process with the same id
    token: str = ""  # random text, different for every lock

    def __str__(self) -> str:
        return printable(f"process {self.pid} on {self.host}, started {self.started}")


def find_run(path: Path) -> Path | None:
    """Return the run that a checkpoint, or anything inside a run, belongs to; None if there is none."""
    return next((folder for folder in (path, *path.absolute().parents) if (folder / CHECKPOINTS).is_dir()), None)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, which must exist. `FolderInUseError` names the host and process that have it."""
    path = folder / LOCK_FILE
    descriptor = _acquire(path)
    _held.add(descriptor)
    is_over = threading.Event()
    touched = descriptor if os.utime in os.supports_fd else path
    heart = threading.Thread(target=_beat, args=(touched, is_over), name="run lock", daemon=True)
    heart.start()
    try:
        yield
    finally:
        is_over.set()
        heart.join()
        _held.discard(descriptor)
        with suppress(OSError):
            if _is_same_file(descriptor, path):
                path.unlink()  # while it is still locked: a later run's file must stay
        with suppress(OSError):
            unlock(descriptor)
        os.close(descriptor)


def _beat(lock_file: int | Path, is_over: threading.Event) -> None:
    while not is_over.wait(HEARTBEAT):
        with suppress(OSError):
            os.utime(lock_file)


def _acquire(path: Path) -> int:
    """Return the descriptor of the locked file, with our note in it."""
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    own = Holder(socket.gethostname(), os.getpid(), started, _process_identity(os.getpid()), secrets.token_hex(8))
    deadline = time.monotonic() + GRACE
    while True:
        with ExitStack() as stack:
            descriptor = open_lock_file(path)
            stack.callback(os.close, descriptor)
            if _is_acquired(descriptor, path, own, is_last=time.monotonic() > deadline):
                stack.pop_all()
                return descriptor
        time.sleep(0.1)


def _is_acquired(descriptor: int, path: Path, own: Holder, *, is_last: bool) -> bool:
    """True if the lock is ours now; False to try again. Raises `FolderInUseError` if it is another's."""
    is_locked, holder = try_lock(descriptor), _read(descriptor)
    if is_locked is False:
        # A run that has just started has written no note yet. Processes that a killed run has forked may keep its lock
        # for a moment.
        if not is_last and (holder is None or _is_running(holder, own) is False):
            return False
        raise _refusal(path, holder)
    if not _is_same_file(descriptor, path):  # removed by a run that has ended meanwhile
        return False
    if holder is not None and _is_alive(holder, own, path, is_locked=bool(is_locked)):
        raise _refusal(path, holder)
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, json.dumps(asdict(own)).encode())
    os.fsync(descriptor)
    if not is_locked:
        time.sleep(0.2)  # two runs may get here at once: the last note wins
        if (winner := _read(descriptor)) != own:
            raise _refusal(path, winner)
    return True


def _is_alive(holder: Holder, own: Holder, path: Path, *, is_locked: bool) -> bool:
    """True if the holder of a note still runs, though its lock, if there is one, did not stop us."""
    if holder.host == own.host:
        if is_locked:
            return False
        if (running := _is_running(holder, own)) is not None:
            return running
    locked = printable(f"{path.parent} is locked by {holder}")
    logger.warning("%s; waiting up to %.0f s for a sign of life", locked, PATIENCE)
    # Clocks of machines may differ: a touch counts, not the age of the last one.
    before, deadline = _touched_at(path), time.monotonic() + PATIENCE
    while (now := _touched_at(path)) == before and time.monotonic() < deadline:
        time.sleep(min(0.5, PATIENCE))
    return now not in (before, None)


def _touched_at(path: Path) -> int | None:
    try:
        with path.open("rb") as file:  # NFS asks the server only when a file is opened
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _is_running(holder: Holder, own: Holder) -> bool | None:
    """True if the holder's process exists on this machine; None if that cannot be known."""
    if holder.host != own.host or sys.platform == "win32":
        return None
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        pass
    return not holder.process or _process_identity(holder.pid) in ("", holder.process)


def _process_identity(pid: int) -> str:
    """Boot and start time of a process, on Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name of the program, in brackets, may contain blanks.
        return f"{boot} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return ""


def _read(descriptor: int) -> Holder | None:
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = build_dataclass(Holder, parse_json(os.read(descriptor, LONGEST_NOTE)))
    except (OSError, UntrustedDataError):
        return None  # empty, or not ours
    return holder if 0 < holder.pid < 2**31 else None


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except OSError:
        return False


def _refusal(path: Path, holder: Holder | None) -> FolderInUseError:
    return FolderInUseError(
        f"{path.parent} is in use by {holder or 'another process'}; stop that run, or choose another --output or "
        "--experiment"
    )


def _close_in_child() -> None:
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def claimed(folder: Path, processes: Processes) -> Iterator[None]:
    """Create a run's folder and lock it. What is still empty at the end is removed again.

    Rank 0 does it for all ranks. Each raises `ConfigError` if another run uses the folder, or it cannot be written.
    """
    with ExitStack() as stack:
        trouble = ""
        if processes.is_main:
            try:
                for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
                    stack.callback(_remove_empty, path)
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(run_lock(folder))
                for name in (CHECKPOINTS, CURVES, WANDB):
                    _check_writable(folder / name)
            except FolderInUseError as error:
                trouble = str(error)
            except OSError as error:
                reason = f"{error.filename or folder} cannot be written ({error.strerror or error})"
                trouble = f"{reason}; make room or make it writable, or choose another folder with --output"
        if trouble := next(filter(None, processes.gather(trouble)), ""):
            raise ConfigError([Problem("run.output", trouble)])
        yield


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
    if os.path.lexists(folder / FOLDER_LOCK_FILE):
        os.close(open_lock_file(folder / FOLDER_LOCK_FILE))
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


def check_output(folder: Path, needed: int = 0) -> list[Problem]:
    """Return what is wrong with a run's folder, which need not exist, for checkpoints of `needed` bytes."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free, problem = free_bytes(nearest), ""
    if not nearest.is_dir():
        problem = f"expected a folder, but {nearest} is a file; choose another with --output"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"may not write to {nearest}; choose another folder with --output"
    elif free is not None and free < needed:
        message = f"{nearest} has {free / 1e6:,.0f} MB free, the run's checkpoints will take {needed / 1e6:,.0f} MB"
        problem = f"{message}; make room, set checkpoints.keep_last lower, or choose another folder"
    return [Problem("run.output", problem)] if problem else []
