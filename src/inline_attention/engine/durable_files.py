"""Files and folders that are there in full or not at all, whenever the process or the machine stops.

Everything unfinished carries a name of its own until a rename, which the file system does in one step, gives it the
real one. What a killed process leaves behind is therefore known by its name.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

UNFINISHED = ".unfinished-"
LOCK_FILE = ".lock"
LONGEST_NAME = 255  # bytes, on common file systems
LOCK_TIMEOUT = 120.0  # seconds; far longer than a save takes


def unfinished(path: Path) -> Path:
    """A fresh name beside `path` for what is to become it, or was it and is to go."""
    return path.with_name(f"{UNFINISHED}{path.name}-{secrets.token_hex(4)}")


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left in a folder. Call it only while `exclusive` holds: others may be at work."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder such that nobody ever sees half of it under its name."""
    doomed = unfinished(folder)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder: a file's own fsync covers only what is in it."""
    if sys.platform == "win32":
        return  # folders cannot be opened there
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point_to(pointer: Path, name: str | None) -> None:
    """Make `pointer` a symbolic link to `name` beside it, or, where there are no links, a text file with that name.

    It is replaced in one step; None removes it.
    """
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


def follow_pointer(path: Path) -> Path:
    """Return what a pointer, a link or a text file with the name of a folder beside it, points to; else the path."""
    try:
        if path.is_symlink():
            name = os.readlink(path)
        elif path.is_file() and path.stat().st_size <= LONGEST_NAME:
            name = path.read_bytes().decode(errors="replace").strip()
        else:
            return path
    except OSError:
        return path
    return path.with_name(name) if re.fullmatch(r"[\w-]+", name) else path


def free_bytes(path: Path) -> int | None:
    """Free space where `path` is or would be, in bytes; None where the system does not tell."""
    for parent in (path, *path.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(parent).free
    return None


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Wait until no other thread or process is at work in a folder, and keep the others waiting meanwhile.

    The lock is the operating system's, so it ends with the process, however that ends.

    Yields:
        Whether there is a lock: a few file systems have none.

    Raises:
        TimeoutError: If another has been at work for `LOCK_TIMEOUT` seconds.
    """
    with (folder / LOCK_FILE).open("ab") as file:
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
