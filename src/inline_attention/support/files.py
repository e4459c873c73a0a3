"""Open and write files safely: whole or not at all, with pointers between folders, and locks.

Unfinished files and folders have names of their own, so that what a killed process leaves behind is recognized.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

AnyPath = str | os.PathLike[str]
UNFINISHED = ".unfinished-"
LOCK_FILE = ".lock"
LOCK_TIMEOUT = 120.0  # seconds; far longer than a save takes
LONGEST_NAME = 255  # bytes, on common file systems


class NotARegularFileError(OSError):
    """A path names a folder, a FIFO, a socket or a device."""


def open_regular(path: AnyPath) -> BufferedReader:
    """Open a regular file for reading, without waiting for a FIFO's writer or a device.

    Anything else, through a link or not, is a `NotARegularFileError`.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotARegularFileError(f"{os.fspath(path)} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: AnyPath, max_bytes: int) -> bytes:
    """Read a regular file; raise ValueError if it has more than `max_bytes`."""
    with open_regular(path) as file:
        # Not `read(max_bytes)`, which allocates as much before it reads.
        content = file.read() if os.fstat(file.fileno()).st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content


def unfinished(path: Path) -> Path:
    """Return a fresh temporary name beside `path`, with its suffix, which some writers ask for."""
    return path.with_name(f"{UNFINISHED}{path.name}-{secrets.token_hex(4)}{path.suffix}")


@contextmanager
def replace_atomically(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary path that takes the place of `path` at the end, or is removed on an error.

    The file is flushed to disk before the rename, so that a crash leaves either the old content or the new.
    """
    path = Path(path)
    temporary = unfinished(path)
    try:
        temporary.touch()
        permissions = stat.S_IMODE(temporary.stat().st_mode)
        temporary.unlink()  # writers may insist on a new file
        yield temporary
        temporary.chmod(permissions)  # safetensors makes a new file that only its owner can read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_atomically(path: AnyPath, content: bytes | str) -> None:
    """Write a whole file or, on any error, leave what was there."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder that takes the place of `folder` at the end, or is removed on an error."""
    target = folder.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    new, replaced = unfinished(target), unfinished(target)
    new.mkdir()
    try:
        yield new
        if target.exists():
            target.rename(replaced)
        new.rename(target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk; a file's own fsync covers only its content."""
    with suppress(OSError):  # Windows cannot open folders, and a few file systems cannot sync them
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
        write_atomically(pointer, f"{name}\n")
    else:
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
