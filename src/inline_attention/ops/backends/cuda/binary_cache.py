"""Compiled kernels on disk, in a folder that only the user can write.

A binary from the cache runs on the GPU with the user's rights, so it must be one that this user stored. The folder and
the file are opened once, checked by descriptor, and read through it, so they cannot be replaced after the check. If a
check fails, the cache is neither read nor written, and kernels are compiled once per process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex

VARIABLE = "INLINE_ATTENTION_CACHE"
MAX_BYTES = 2**26  # of one file
_DIGEST_BYTES = hashlib.sha256().digest_size
_HAS_OWNERS = hasattr(os, "geteuid") and os.open in os.supports_dir_fd
_FOLDER_FLAGS = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY)  # where it exists, a folder that may not be listed can be passed through


class UnsafeFolderError(OSError):
    """Another user could write to the cache folder."""


def read(key: str) -> bytes | None:
    """Return the binary stored under a key; None if it is missing or cannot be trusted."""
    name = _file_name(key)
    try:
        with _open_folder(create=False) as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
                if not _is_own_file(os.fstat(file.fileno())):
                    return None
                content = file.read(MAX_BYTES + 1)
    except OSError:
        return None
    digest, binary = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return binary if binary and digest == _digest(key, binary) else None


def write(key: str, binary: bytes) -> None:
    """Store a binary under a key, if the folder is safe and writable."""
    if len(binary) + _DIGEST_BYTES > MAX_BYTES:
        return
    try:
        with _open_folder(create=True) as folder:
            temporary = f".{_file_name(key)}-{token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(_digest(key, binary) + binary)
                os.replace(temporary, _file_name(key), src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
    except UnsafeFolderError as error:
        warnings.warn(f"compiled kernels are not kept: {error}", stacklevel=2)
    except OSError:
        pass  # without a writable folder there is no cache; that is no error


def location() -> Path | None:
    """The cache folder; None where no home folder is known."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # as the XDG standard says, relative paths are ignored
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
        if not base.is_absolute():
            return None
    return Path(base) / "inline_attention"


@contextmanager
def _open_folder(*, create: bool) -> Generator[int]:
    """Open the cache folder and yield its descriptor.

    Raises:
        UnsafeFolderError: If it is a link, belongs to another user, or other users can write to it or replace it.
        OSError: If it does not exist or cannot be opened.
    """
    path = location()
    if path is None or not _HAS_OWNERS:
        raise FileNotFoundError("there is no folder for a cache")
    if create:
        for folder in reversed([path, *path.parents]):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
    # Links above the folder are allowed, so the real path is resolved first. It is then opened component by component;
    # a component that has become a link meanwhile cannot be opened.
    *outer, name = Path(os.path.realpath(path.parent), path.name).parts
    with ExitStack() as opened:

        def descend(name: str, flags: int, folder: int | None = None) -> int:
            descriptor = os.open(name, flags | _FOLDER_FLAGS, dir_fd=folder)
            opened.callback(os.close, descriptor)
            return descriptor

        descriptor = descend(outer[0], _SEARCH)
        for part in outer[1:]:
            _check_outer(os.fstat(descriptor), path)
            descriptor = descend(part, _SEARCH, descriptor)
        _check_outer(os.fstat(descriptor), path)
        try:
            descriptor = descend(name, os.O_RDONLY, descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise UnsafeFolderError(f"{path} is no folder, or a link to one; set {VARIABLE} to a folder") from None
            raise
        _check_own(descriptor, path)
        yield descriptor


def _check_outer(status: os.stat_result, path: Path) -> None:
    """Check that no other user can rename or replace the contents of a folder around the cache."""
    if status.st_uid not in (0, os.geteuid()):
        raise UnsafeFolderError(f"a folder around {path} belongs to another user; set {VARIABLE} to a folder of yours")
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_shared and not status.st_mode & stat.S_ISVTX:
        raise UnsafeFolderError(f"other users can write to a folder around {path}; set {VARIABLE} to a private folder")


def _check_own(descriptor: int, path: Path) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise UnsafeFolderError(f"{path} belongs to another user; set {VARIABLE} to a folder of yours")
    if stat.S_IMODE(status.st_mode) == 0o700:
        return
    if os.environ.get(VARIABLE) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeFolderError(f"{path} must have mode 0700; type: chmod 700 {path}")
    os.fchmod(descriptor, 0o700)  # the default folder, as earlier versions made it: others could read


def _is_own_file(status: os.stat_result) -> bool:
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and status.st_nlink == 1
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _file_name(key: str) -> str:
    return f"{key}.cubin"


def _digest(key: str, binary: bytes) -> bytes:
    """Checksum of a whole file under its own name: it finds damage, not forgery."""
    return hashlib.sha256(key.encode() + b"\0" + binary).digest()
