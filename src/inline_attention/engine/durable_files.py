"""Folders that exist in full or not at all, pointers between them, and locks.

Unfinished files and folders have names of their own, so that what a killed process leaves behind is recognized.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inline_attention.support.files import UNFINISHED, NotARegularFileError, unfinished

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = ".lock"
LONGEST_NAME = 255  # bytes, on common file systems
LOCK_TIMEOUT = 120.0  # seconds; far longer than a save takes


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left in a folder. Call it only inside `exclusive`."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder atomically: rename it first."""
    doomed = unfinished(folder)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and flush it to disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def point_to(pointer: Path, name: str | None) -> None:
    """Point to `name` beside `pointer`, by a link or, without links, a text file, atomically. None removes it."""
    if name is None:
        pointer.unlink(missing_ok=True)
        return
    with suppress(OSError):
        if pointer.readlink() == Path(name):
            return
    temporary = unfinished(pointer)
    try:
        temporary.symlink_to(name)
    except OSError:
        write_durably(temporary, f"{name}\n".encode())
    os.replace(temporary, pointer)


def follow_pointer(path: Path, *, links: bool = False) -> Path:
    """Return the folder beside it that a pointer, a text file or optionally a link, names; any other path as it is."""
    try:
        if links and path.is_symlink():
            name = os.readlink(path)
        elif path.is_file() and path.stat().st_size <= LONGEST_NAME:
            name = path.read_bytes().decode(errors="replace").strip()
        else:
            return path
    except OSError:
        return path
    return path.with_name(name) if re.fullmatch(r"[\w-]+", name) else path


def free_bytes(path: Path) -> int | None:
    """Return the free bytes on the disk of `path`, which need not exist; None if unknown."""
    for parent in (path, *path.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(parent).free
    return None


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Lock a folder against other threads and processes; wait for them first. Yields False where there are no locks.

    The lock is the operating system's, so it ends with the process. Waiting ends with a TimeoutError.
    """
    with os.fdopen(open_lock_file(folder / LOCK_FILE), "rb") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while (locked := try_lock(file.fileno())) is False:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has been writing there for {LOCK_TIMEOUT:.0f} seconds; stop it")
            time.sleep(0.02)
        try:
            yield bool(locked)
        finally:
            if locked:
                unlock(file.fileno())


def open_lock_file(path: Path) -> int:
    """Open a file for reading and writing, made if it is missing. No link is followed, no FIFO waited for."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotARegularFileError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def try_lock(descriptor: int) -> bool | None:
    """Return True if the lock was taken, False if another has it, None if there are no locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def unlock(descriptor: int) -> None:
    """Give a lock up. Closing the file would not do: a process forked meanwhile holds it open too."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
