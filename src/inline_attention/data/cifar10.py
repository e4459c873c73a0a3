"""CIFAR-10 as its authors distribute it: the Python or the binary version, unpacked or not.

The Python version consists of pickles, and a pickle is a program. Here one is read by an unpickler that knows the
few names by which an array of bytes is described, and builds something of its own for each.
"""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from inline_attention.data.sources import ArraySource, DataError
from inline_attention.data.splits import is_training_split

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32


class _Version(NamedTuple):
    folder: str
    archive: str
    training_files: tuple[str, ...]
    test_file: str
    parse: Callable[[bytes, str], tuple[np.ndarray, np.ndarray]]  # (pixels [N, 3072] uint8, targets [N])

    def is_in(self, root: Path) -> bool:
        """Whether any file of it is there, packed or not."""
        names = (*self.training_files, self.test_file)
        places = [folder / name for folder in (root / self.folder, root) for name in names]
        return any(place.is_file() for place in (*places, root / self.archive))


def cifar10(root: str | os.PathLike[str], split: str) -> ArraySource | None:
    """The pictures of 32×32 pixels, or None if neither version is in the folder.

    Args:
        root: A folder that holds `cifar-10-batches-py`, `cifar-10-batches-bin`, `cifar-10-python.tar.gz` or
            `cifar-10-binary.tar.gz`, or is one of the first two.
        split: "train" for the 50,000, "validation" or "test" for the 10,000 of the test set, or another usual name of
            either.

    Raises:
        DataError: If there is no such split, or a file is missing, damaged, or asks for code. Nothing was run.
    """
    root = Path(root)
    for version in _VERSIONS:
        if not version.is_in(root):
            continue
        training = is_training_split(split, str(root))
        names = version.training_files if training else (version.test_file,)
        found = _read_files(root, version, names)
        if found is None:
            continue
        parts = [version.parse(content, f"{root}: {name}") for name, content in found.items()]
        pixels, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return ArraySource(f"{root} ({'train' if training else 'test'})", CLASS_NAMES, images, targets)
    return None


def _read_files(root: Path, version: _Version, names: tuple[str, ...]) -> dict[str, bytes] | None:
    """Contents by name, from a folder or from the archive, which is not unpacked."""
    for folder in (root / version.folder, root):
        if any((folder / name).is_file() for name in names):
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise DataError(f"{folder} lacks {', '.join(missing)}; unpack {version.archive} again")
            return {name: (folder / name).read_bytes() for name in names}
    archive_path = root / version.archive
    if not archive_path.is_file():
        return None
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive_path, "r:gz") as archive:
            for name in names:
                file = archive.extractfile(f"{version.folder}/{name}")
                contents[name] = file.read() if file else b""
    except (tarfile.TarError, OSError, EOFError, KeyError) as error:
        raise DataError(f"{archive_path} is damaged: {error}; fetch it again") from error
    return contents


def _parse_binary(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    if not content or len(content) % (1 + PIXELS):
        raise DataError(
            f"{where} is damaged: expected records of {1 + PIXELS} bytes, got {len(content)}; fetch it again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + PIXELS)
    return records[:, 1:], _checked_targets(records[:, 0], len(records), where)


def _parse_pickle(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        entries = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        pixels = entries["data"].as_numpy()
        targets = np.array(entries["labels"], dtype=np.int64)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except Exception as error:  # a damaged pickle can fail anywhere
        raise DataError(f"{where} is damaged: {str(error) or type(error).__name__}; fetch it again") from error
    if pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        raise DataError(f"{where} is damaged: expected [N, {PIXELS}] bytes, got {list(pixels.shape)}; fetch it again")
    return pixels, _checked_targets(targets, len(pixels), where)


def _checked_targets(targets: np.ndarray, length: int, where: str) -> np.ndarray:
    if targets.shape != (length,) or length == 0 or targets.min() < 0 or targets.max() >= len(CLASS_NAMES):
        raise DataError(f"{where} is damaged: expected {length} classes from 0 to 9, one per picture; fetch it again")
    return targets.astype(np.int64)


class _Dtype:
    """Stands in for `numpy.dtype`; bytes are the only type there is."""

    def __init__(self, code: object = None, *_options: object):
        if code not in ("u1", b"u1", "|u1", b"|u1"):
            raise DataError(f"has an array of type {code!r}, expected bytes ('u1'); fetch the file again")

    def __setstate__(self, _state: object) -> None:
        pass


class _Array:
    """Stands in for `numpy.ndarray`, and for the function that makes an empty one to be filled."""

    def __init__(self, *_arguments: object):
        self._state: Any = None

    def __setstate__(self, state: object) -> None:
        self._state = state

    def as_numpy(self) -> np.ndarray:
        _version, shape, dtype, is_fortran, content = self._state
        if not isinstance(dtype, _Dtype) or is_fortran or not isinstance(content, bytes):
            raise DataError("has no plain array of bytes; fetch the file again")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _encode(text: str, _encoding: str) -> bytes:
    """Stands in for `_codecs.encode`, by which Python 3 spells bytes in old pickles."""
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    _STAND_INS = {  # noqa: RUF012 (never written to)
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        stand_in = self._STAND_INS.get((module_name, global_name))
        if stand_in is None:
            raise DataError(
                f"asks for {module_name}.{global_name}, which CIFAR-10 does not need, and was not run; do not trust it"
            )
        return stand_in


_VERSIONS = (
    _Version(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        tuple(f"data_batch_{number}" for number in range(1, 6)),
        "test_batch",
        _parse_pickle,
    ),
    _Version(
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test_batch.bin",
        _parse_binary,
    ),
)
