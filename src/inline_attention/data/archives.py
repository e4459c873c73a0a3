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
def open_tar(path: str | os.PathLike[str], gzip_limit: int | None = None) -> Iterator[Members]:
    """Open an archive; yields its regular files in order, each to be read before the next is asked for.

    Args:
        path: The archive.
        gzip_limit: Most bytes to decompress; None if the archive is not compressed.

    Raises:
        OSError: If it cannot be opened or read.
        tarfile.TarError: If it is damaged or too large, also in place of a `ValueError` in the body of the `with`.
    """
    with _errors_as_tar_errors(), open_regular(path) as file:
        content = file if gzip_limit is None else gzip.GzipFile(fileobj=file)
        limit = os.fstat(file.fileno()).st_size if gzip_limit is None else gzip_limit
        with tarfile.open(
            fileobj=content, mode="r:" if gzip_limit is None else "r|", tarinfo=_CheckedHeader
        ) as archive:
            yield _regular_files(archive, limit)


class _CheckedHeader(tarfile.TarInfo):
    """A header whose size tarfile can trust."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in EXTENSIONS and header.size > MAX_EXTENSION_BYTES):
            raise tarfile.ReadError(f"a header announces {header.size:,} bytes")
        return header


def _regular_files(archive: tarfile.TarFile, max_bytes: int) -> Members:
    for member in archive:
        has_content = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
        if member.size < 0 or (has_content and member.offset_data + member.size > max_bytes):
            raise tarfile.ReadError(f"a member announces {member.size:,} bytes")
        if member.isreg() and not member.issparse() and (file := archive.extractfile(member)):
            yield member, file


@contextmanager
def _errors_as_tar_errors() -> Iterator[None]:
    """Turn the errors that tarfile raises for malformed headers into its own kind."""
    try:
        yield
    except (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, ValueError) as error:
        raise tarfile.ReadError(f"it cannot be read: {error}") from error
