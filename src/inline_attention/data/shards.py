"""Images in tar archives laid out for WebDataset: `NAME.jpg` beside `NAME.cls`, which holds the class number.

timm and the webdataset package read such archives as streams, whose order depends on the number of workers and which
cannot be taken up in the middle. Here the archives are indexed once, after which any image can be read. Nothing is
unpacked to the disk, whatever the names inside say, and sizes are checked before anything is read.
"""

from __future__ import annotations

import glob
import gzip
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

import numpy as np
from PIL import Image

from inline_attention.data.images import DEFAULT_MAX_PIXELS, SUFFIXES, ImageError, load_image_bytes, most_bytes
from inline_attention.data.sources import DataError, ImageSource
from inline_attention.support.files import AnyPath, open_regular

MOST_SHARDS = 1_000_000
MOST_CLASSES = 1_000_000  # more than datasets have; a larger number is a date, an identifier or a mistake
MAX_EXTENSION_BYTES = 2**20  # of long names and pax headers, which tarfile reads into memory
PAX_HEADERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
EXTENSIONS = (*PAX_HEADERS, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
Members = Iterator[tuple[tarfile.TarInfo, IO[bytes]]]


class ShardSource(ImageSource):
    """The images of some archives. Classes have numbers only."""

    def __init__(self, shards: list[Path], location: str):
        """Index uncompressed tar files, which were found by `location`."""
        found = [(number, *image) for number, shard in enumerate(shards) for image in _index(shard)]
        if not found:
            raise DataError(f"{location}: no image in {len(shards)} archives; expected NAME.jpg beside NAME.cls")
        numbers, names, offsets, sizes, targets = zip(*found, strict=True)
        super().__init__(location, [str(number) for number in range(max(targets) + 1)], np.array(targets))
        self._shards = [str(shard) for shard in shards]
        self._positions = np.array([numbers, offsets, sizes], dtype=np.int64).T  # [N, 3]
        self._names = np.array([os.fsencode(name) for name in names])

    def load(self, index: int) -> Image.Image:
        """Read the image's bytes out of its archive."""
        shard, offset, size = self._positions[index].tolist()
        name = self.name(index)
        if size > most_bytes(DEFAULT_MAX_PIXELS):
            raise ImageError(name, f"has {size:,} bytes, too many for an image")
        try:
            with open_regular(self._shards[shard]) as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise ImageError(name, f"cannot be opened: {error.strerror or error}") from error
        return load_image_bytes(content, name)

    def name(self, index: int) -> str:
        """Return the archive and the name in it."""
        return f"{self._shards[self._positions[index, 0]]}/{os.fsdecode(self._names[index])}"


def find_shards(root: AnyPath, pattern: str) -> list[Path]:
    """Return the archives that a pattern names, such as `train-{0000..0099}.tar` or `train-*.tar`, in order.

    Raises `DataError` if one that is named is missing, or none fits.
    """
    shards: list[Path] = []
    for name in _expand_ranges(pattern):
        if glob.has_magic(name):
            shards += map(Path, sorted(glob.glob(os.path.join(glob.escape(os.fspath(root)), name))))
        else:
            shards.append(Path(root, name))
    missing = [shard for shard in shards if not shard.is_file()]
    if missing or not shards:
        what = f"{missing[0]} does not exist" if missing else f"no file fits {pattern!r} in {root}"
        raise DataError(f"{what}; expected tar archives, as in wds/train-{{0000..0099}}.tar")
    return shards


def _expand_ranges(pattern: str) -> list[str]:
    """Write `{000..012}` out, with as many digits as its ends have."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    rests = _expand_ranges(pattern[match.end() :])
    if len(first + last) > 18 or (int(last) - int(first) + 1) * len(rests) > MOST_SHARDS:
        raise DataError(f"the pattern {pattern!r} names more than {MOST_SHARDS:,} archives; correct its range")
    numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [f"{pattern[: match.start()]}{number}{rest}" for number in numbers for rest in rests]


def _index(shard: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, first byte, number of bytes, class) of each image in an archive."""
    images: dict[str, tarfile.TarInfo] = {}
    targets: dict[str, int] = {}
    try:
        with open_tar(shard) as members:
            for member, file in members:
                folder, _, file_name = member.name.rpartition("/")
                stem, _, suffix = file_name.partition(".")
                key = f"{folder}/{stem}"
                if f".{suffix.lower()}" in SUFFIXES:
                    images[key] = member
                elif suffix == "cls":
                    targets[key] = int(file.read(64))
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise DataError(f"{shard} cannot be read as an uncompressed tar archive with classes: {error}") from error
    if unlabeled := [member.name for key, member in images.items() if targets.get(key, -1) < 0]:
        found = f"{shard} has {len(unlabeled)} images without a class, such as {unlabeled[0]}"
        raise DataError(f"{found}; expected a number ≥ 0 in a .cls file of the same name")
    for key, member in images.items():
        if targets[key] >= MOST_CLASSES:
            found = f"{shard} has the class {targets[key]} for {member.name}"
            raise DataError(f"{found}; expected the number of a class, below {MOST_CLASSES:,}, in its .cls file")
        yield member.name, member.offset_data, member.size, targets[key]


@contextmanager
def open_tar(path: AnyPath, gzip_limit: int | None = None) -> Iterator[Members]:
    """Open an archive; yields its regular files in order, each to be read before the next is asked for.

    A gzipped archive is decompressed up to `gzip_limit` bytes. Damage is a `tarfile.TarError`, also in place of a
    `ValueError` in the body of the `with` statement.
    """
    try:
        with open_regular(path) as file:
            if gzip_limit is None:
                content, mode, limit = file, "r:", os.fstat(file.fileno()).st_size
            else:
                content, mode, limit = gzip.GzipFile(fileobj=file), "r|", gzip_limit
            with tarfile.open(fileobj=content, mode=mode, tarinfo=_CheckedHeader) as archive:
                yield _regular_files(archive, limit)
    except (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, ValueError) as error:
        # What tarfile raises for malformed headers.
        raise tarfile.ReadError(f"it cannot be read: {error}") from error


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
        # tarfile keeps all headers, and a small gzip can hold a million.
        archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
        has_content = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
        if member.size < 0 or (has_content and member.offset_data + member.size > max_bytes):
            raise tarfile.ReadError(f"a member announces {member.size:,} bytes")
        if member.isreg() and not member.issparse() and (file := archive.extractfile(member)):
            yield member, file
