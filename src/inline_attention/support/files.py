"""Open and write files safely."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

UNFINISHED = ".unfinished-"


class NotARegularFileError(OSError):
    """A path names a folder, a FIFO, a socket or a device."""


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
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


def read_bounded(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a regular file; raise ValueError if it has more than `max_bytes`."""
    with open_regular(path) as file:
        # Not `read(max_bytes)`, which allocates as much before it reads.
        content = file.read() if os.fstat(file.fileno()).st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content


def unfinished(path: Path) -> Path:
    """Return a fresh temporary name beside `path`."""
    return path.with_name(f"{UNFINISHED}{path.name}-{secrets.token_hex(4)}")


@contextmanager
def replace_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that takes the place of `path` at the end, or is removed on an error.

    The file is flushed to disk before the rename, so that a crash leaves either the old content or the new.
    """
    path = Path(path)
    temporary = unfinished(path)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a whole file or, on any error, leave what was there."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk; a file's own fsync covers only its content."""
    if sys.platform == "win32":
        return  # folders cannot be opened there
    with suppress(OSError):  # a few file systems cannot sync folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
