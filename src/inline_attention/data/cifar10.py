"""CIFAR-10 as its authors distribute it: the Python or the binary version, unpacked or not.

The Python version consists of pickles, and a pickle is a program. It is not run here: the reader looks through its
operations for the pixels and the labels.
"""

from __future__ import annotations

import os
import pickletools
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from inline_attention.data.shards import open_tar
from inline_attention.data.sources import ArraySource, DataError, is_training_split
from inline_attention.support.files import read_bounded

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32
MAX_FILE_BYTES = 2**26  # of 10,000 images, which take 31 MB, or 47 MB as text in a pickle
MAX_ARCHIVE_BYTES = 2**29  # decompressed; the authors' take 178 MB
MAX_OPERATIONS = 1_000_000  # of a pickle; the authors' have about 60,000
# Names that a pickled array of bytes needs.
KNOWN_NAMES = (
    "numpy ndarray",
    "numpy dtype",
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
    "_codecs encode",
)


class _Version(NamedTuple):
    folder: str
    archive: str
    suffix: str
    parse: Callable[[bytes, str], tuple[np.ndarray, np.ndarray]]  # (pixels [N, 3072] uint8, targets [N])

    def names(self, *, training: bool) -> list[str]:
        names = [f"data_batch_{number}" for number in range(1, 6)] if training else ["test_batch"]
        return [f"{name}{self.suffix}" for name in names]

    def is_in(self, root: Path) -> bool:
        """True if any of its files is there, packed or not."""
        names = self.names(training=True) + self.names(training=False)
        places = [folder / name for folder in (root / self.folder, root) for name in names]
        return any(place.is_file() for place in (*places, root / self.archive))


def cifar10(root: str | os.PathLike[str], split: str) -> ArraySource | None:
    """Return the images of a split from either version below `root`, or None if neither is there.

    Raises:
        DataError: If there is no such split, or a file is missing, damaged, or asks for code. Nothing was run.
    """
    root = Path(root)
    for version in _VERSIONS:
        if not version.is_in(root):
            continue
        training = is_training_split(split, str(root))
        names = version.names(training=training)
        found = _read_folder(root, version, names) or _read_archive(root, version, names)
        if found is None:
            continue
        parts = [version.parse(content, f"{root}: {name}") for name, content in found.items()]
        pixels, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return ArraySource(f"{root} ({'train' if training else 'test'})", CLASS_NAMES, images, targets)
    return None


def _read_folder(root: Path, version: _Version, names: list[str]) -> dict[str, bytes] | None:
    for folder in (root / version.folder, root):
        missing = [name for name in names if not (folder / name).is_file()]
        if len(missing) == len(names):
            continue
        if missing:
            raise DataError(f"{folder} lacks {', '.join(missing)}; unpack {version.archive} again")
        try:
            return {name: read_bounded(folder / name, MAX_FILE_BYTES) for name in names}
        except (OSError, ValueError) as error:
            raise DataError(f"a file of CIFAR-10 in {folder} cannot be read: {error}") from error
    return None


def _read_archive(root: Path, version: _Version, names: list[str]) -> dict[str, bytes] | None:
    """Contents by name, from the archive, which is not unpacked."""
    path = root / version.archive
    if not path.is_file():
        return None
    contents: dict[str, bytes] = {}
    try:
        with open_tar(path, MAX_ARCHIVE_BYTES) as members:
            for member, file in members:
                folder, _, name = member.name.rpartition("/")
                if folder == version.folder and name in names:
                    if member.size > MAX_FILE_BYTES:
                        raise tarfile.ReadError(f"{member.name} has {member.size:,} bytes")
                    contents[name] = file.read()
                if len(contents) == len(names):
                    return {name: contents[name] for name in names}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}; fetch it again") from error
    missing = ", ".join(name for name in names if name not in contents)
    raise DataError(f"{path} is damaged: it lacks {missing}; fetch it again")


def _parse_binary(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    if not content or len(content) % (1 + PIXELS):
        raise DataError(
            f"{where} is damaged: expected records of {1 + PIXELS} bytes, got {len(content)}; fetch it again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + PIXELS)
    return records[:, 1:], _checked_targets(records[:, 0], len(records), where)


def _parse_pickle(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    entries: dict[str, list[Any]] = {"data": [], "labels": []}
    current: list[Any] = []  # the values of an entry follow its key
    try:
        for value in _values(content):
            key = value.decode("latin1") if isinstance(value, bytes) and len(value) < 20 else None
            if key in ("data", "labels", "filenames", "batch_label"):
                current = entries.setdefault(key, [])
            else:
                current.append(value)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except Exception as error:  # a damaged pickle can fail anywhere
        raise DataError(f"{where} is damaged: {str(error) or type(error).__name__}; fetch it again") from error
    data = entries["data"]
    places = [place for place, value in enumerate(data) if isinstance(value, bytes) and len(value) >= PIXELS]
    column_major = any(data[place - 1] is True for place in places)  # a flag before the array's content
    if b"u1" not in data or len(places) != 1 or len(data[places[0]]) % PIXELS or column_major:
        raise DataError(f"{where} is damaged: expected an array [N, {PIXELS}] of bytes (u1) as 'data'; fetch it again")
    pixels = np.frombuffer(data[places[0]], dtype=np.uint8).reshape(-1, PIXELS)
    targets = [value if isinstance(value, int) and 0 <= value < len(CLASS_NAMES) else -1 for value in entries["labels"]]
    return pixels, _checked_targets(np.array(targets, dtype=np.int64), len(pixels), where)


def _values(content: bytes) -> Iterator[bytes | int | bool]:
    """Yield the texts and numbers of a pickle in order, which is not run; texts as bytes."""
    texts: list[str] = []  # the last few
    memo: dict[int, str] = {}
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        name = operation.name
        if count >= MAX_OPERATIONS:
            raise DataError(f"has more than {MAX_OPERATIONS:,} operations, CIFAR-10 has fewer; do not trust it")
        if name in ("GLOBAL", "STACK_GLOBAL", "INST"):
            asked = argument if isinstance(argument, str) else " ".join(texts)
            if asked not in KNOWN_NAMES:
                shown = asked.replace(" ", ".")
                raise DataError(f"asks for {shown}, which CIFAR-10 does not need, and was not run; do not trust it")
        elif name.endswith("GET"):
            texts = [*texts[-1:], memo.get(int(argument or 0), "")]
        elif name.endswith("PUT") or name == "MEMOIZE":
            memo[len(memo) if argument is None else int(argument)] = texts[-1] if texts else ""
        elif isinstance(argument, (str, bytes)):
            texts = [*texts[-1:], argument if isinstance(argument, str) else argument.decode("latin1")]
            yield texts[-1].encode("latin1")
        elif name in ("NEWTRUE", "NEWFALSE"):
            yield name == "NEWTRUE"
        elif isinstance(argument, int) and name not in ("PROTO", "FRAME"):
            yield argument


def _checked_targets(targets: np.ndarray, length: int, where: str) -> np.ndarray:
    if targets.shape != (length,) or length == 0 or targets.min() < 0 or targets.max() >= len(CLASS_NAMES):
        raise DataError(f"{where} is damaged: expected {length} classes from 0 to 9, one per image; fetch it again")
    return targets.astype(np.int64)


_VERSIONS = (
    _Version("cifar-10-batches-py", "cifar-10-python.tar.gz", "", _parse_pickle),
    _Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _parse_binary),
)
