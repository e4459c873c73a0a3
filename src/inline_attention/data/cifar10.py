"""CIFAR-10 as its authors distribute it: the binary version, unpacked or not."""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path

import numpy as np

from inline_attention.data.shards import open_tar
from inline_attention.data.sources import ArraySource, DataError, is_training_split
from inline_attention.support.files import AnyPath, read_bounded

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
DOWNLOAD = f"{ARCHIVE} (from https://www.cs.toronto.edu/~kriz/cifar.html)"
TRAINING_FILES = [f"data_batch_{number}.bin" for number in range(1, 6)]
TEST_FILES = ["test_batch.bin"]
# The Python version is pickles, and a pickle is a program: it is not read.
PYTHON_VERSION = (
    "cifar-10-python.tar.gz",
    *(f"{folder}{name}" for folder in ("cifar-10-batches-py/", "") for name in ("data_batch_1", "test_batch")),
)
PIXELS = 3 * 32 * 32
MAX_FILE_BYTES = 2**26  # of 10,000 images, which take 31 MB
MAX_ARCHIVE_BYTES = 2**29  # decompressed; the authors' take 178 MB


def cifar10(root: AnyPath, split: str) -> ArraySource | None:
    """Return the images of a split from the binary version in `root`, or None if it is not there.

    Raises `DataError` if there is no such split, a file is missing or damaged, or only the Python version is there.
    """
    root = Path(root)
    places = [folder / name for folder in (root / FOLDER, root) for name in TRAINING_FILES + TEST_FILES]
    if not any(place.is_file() for place in (*places, root / ARCHIVE)):
        if found := [name for name in PYTHON_VERSION if (root / name).is_file()]:
            raise DataError(f"{root / found[0]} is CIFAR-10's Python version; download the binary version, {DOWNLOAD}")
        return None
    names, kind = (TRAINING_FILES, "train") if is_training_split(split, str(root)) else (TEST_FILES, "test")
    contents = _read_folder(root, names) or _read_archive(root / ARCHIVE, names)
    if contents is None:
        return None
    records = np.concatenate([_parse(content, f"{root}: {name}") for name, content in contents.items()])
    images = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return ArraySource(f"{root} ({kind})", CLASS_NAMES, images, records[:, 0])


def _read_folder(root: Path, names: list[str]) -> dict[str, bytes] | None:
    for folder in (root / FOLDER, root):
        missing = [name for name in names if not (folder / name).is_file()]
        if len(missing) == len(names):
            continue
        if missing:
            raise DataError(f"{folder} lacks {', '.join(missing)}; unpack {ARCHIVE} again")
        try:
            return {name: read_bounded(folder / name, MAX_FILE_BYTES) for name in names}
        except (OSError, ValueError) as error:
            raise DataError(f"a file of CIFAR-10 in {folder} cannot be read: {error}") from error
    return None


def _read_archive(path: Path, names: list[str]) -> dict[str, bytes] | None:
    """Contents by name, from the archive, which is not unpacked."""
    if not path.is_file():
        return None
    contents: dict[str, bytes] = {}
    try:
        with open_tar(path, MAX_ARCHIVE_BYTES) as members:
            for member, file in members:
                folder, _, name = member.name.rpartition("/")
                if folder == FOLDER and name in names:
                    if member.size > MAX_FILE_BYTES:
                        raise tarfile.ReadError(f"{member.name} has {member.size:,} bytes")
                    contents[name] = file.read()
                if len(contents) == len(names):
                    return {name: contents[name] for name in names}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}; fetch it again") from error
    missing = ", ".join(name for name in names if name not in contents)
    raise DataError(f"{path} is damaged: it lacks {missing}; fetch it again")


def _parse(content: bytes, where: str) -> np.ndarray:
    """Return records `[N, 1 + 3072]` of uint8: the class, then the pixels as three planes."""
    expected = f"records of {1 + PIXELS} bytes, got {len(content)}"
    if content and len(content) % (1 + PIXELS) == 0:
        records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + PIXELS)
        if records[:, 0].max() < len(CLASS_NAMES):
            return records
        expected = f"{len(records)} classes from 0 to 9, one per image"
    raise DataError(f"{where} is damaged: expected {expected}; fetch it again")
