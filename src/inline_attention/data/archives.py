"""Tar archives from strangers: read member by member, never unpacked, with sizes checked before anything is read."""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Self

from inline_attention.support.files import open_regular

MAX_EXTENSION_BYTES = 2**20  # of long names and pax headers, which tarfile reads into memory
EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
Members = Iterator[tuple[tarfile.TarInfo, IO[bytes]]]


@contextmanager
def open_tar(path: str | os.PathLike[str]) -> Iterator[Members]:
    """Open an uncompressed archive; yields its regular files in order, each with the open archive to read it from.

    Raises:
        OSError: If it cannot be opened or read.
        tarfile.TarError: If it is damaged, also in place of a `ValueError` in the body of the `with` statement.
    """
    with (
        _errors_as_tar_errors(),
        open_regular(path) as file,
        tarfile.open(fileobj=file, mode="r:", tarinfo=_CheckedHeader) as archive,
    ):
        yield ((member, file) for member in _regular_files(archive, os.fstat(file.fileno()).st_size))


@contextmanager
def open_tar_gz(path: str | os.PathLike[str], max_bytes: int) -> Iterator[Members]:
    """Open a gzipped archive; yields its regular files in order, each to be read before the next is asked for.

    Args:
        path: The archive.
        max_bytes: Most bytes to decompress.

    Raises:
        OSError: If it cannot be opened or read.
        tarfile.TarError: If it is damaged or too large.
    """
    with (
        _errors_as_tar_errors(),
        open_regular(path) as file,
        gzip.GzipFile(fileobj=file) as content,
        tarfile.open(fileobj=content, mode="r|", tarinfo=_CheckedHeader) as archive,
    ):
        yield (
            (member, opened) for member in _regular_files(archive, max_bytes) if (opened := archive.extractfile(member))
        )


class _CheckedHeader(tarfile.TarInfo):
    """A header whose size tarfile can trust."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in EXTENSIONS and header.size > MAX_EXTENSION_BYTES):
            raise tarfile.ReadError(f"a header announces {header.size:,} bytes")
        return header


def _regular_files(archive: tarfile.TarFile, max_bytes: int) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        has_content = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
        if member.size < 0 or (has_content and member.offset_data + member.size > max_bytes):
            raise tarfile.ReadError(f"a member announces {member.size:,} bytes")
        if member.isreg() and not member.issparse():
            yield member


@contextmanager
def _errors_as_tar_errors() -> Iterator[None]:
    """Turn the errors that tarfile raises for malformed headers into its own kind."""
    try:
        yield
    except (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, ValueError) as error:
        raise tarfile.ReadError(f"it cannot be read: {error}") from error
