"""Read weights from files without running code from them.

A `.pth` file is a pickle, and a pickle is a program. torch's restricted unpickler builds only tensors and plain
containers. Stand-ins replace harmless objects of training checkpoints. Any other class or function is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import threading
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch._C import PyTorchFileReader
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from inline_attention.models.hub_layout import (
    CONFIG,
    PREPROCESSOR,
    WEIGHTS,
    CheckpointError,
    read_config,
    read_notes,
    weights_in,
)
from inline_attention.models.pickle_bounds import PickleBoundsError, check_pickle
from inline_attention.models.transformers_layout import translate
from inline_attention.support.files import NotARegularFileError, follow_pointer, open_regular
from inline_attention.support.text import printable, some_of

EMA_WEIGHTS = "model_ema.safetensors"  # averaged weights, beside the others in a checkpoint of `inline train`
EMA_KEYS = ("state_dict_ema", "model_ema")
RAW_KEYS = ("model", "state_dict")
LEGACY_PICKLES = 5  # number of pickles before the storages, in the format of torch < 1.6
MAX_EXPANSION = 16  # limit of (bytes of all copies) / (bytes of shared or repeated memory)
FETCH_AGAIN = "fetch or copy it again, or ask its author for a .safetensors file"


class UnsafeCheckpointError(CheckpointError):
    """A file refers to code that tensors do not need. None of it was run."""


@dataclass(frozen=True)
class Checkpoint:
    """Content of a file of weights."""

    path: Path
    weights: dict[str, Tensor]  # contiguous and on the CPU; names without the prefixes of DDP and `torch.compile`
    origin: str  # entry of the file that contains the weights, such as "state_dict_ema"; empty for a bare state dict
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file, such as the name of its `model`


def find_weights(path: Path, *, averaged: bool = False) -> Path:
    """Return the weights of a path: a file, a checkpoint, a run (its best checkpoint), or a shipped model's name.

    A run that was never evaluated has no best checkpoint; then the last one counts. A folder in the hub's layout is
    returned as it is: `open_checkpoint` reads it.
    """
    if not path.exists():
        import timm

        from inline_attention.models.registry import shipped_models

        path = shipped_models().get(str(path), path)
        if timm.is_model(str(path)):
            shipped = some_of(shipped_models())
            message = f"{path} is the name of a model, without weights; expected a weights file or a run of it"
            raise CheckpointError(f"{message}, or a model that comes with the package: {shipped or 'none does'}")
    if not path.is_dir() or (not averaged and (path / CONFIG).is_file() and weights_in(path) is not None):
        return path
    name = EMA_WEIGHTS if averaged else WEIGHTS
    places = ["checkpoints/best", "checkpoints/last", "best", "last", "."]
    for place in places:
        folder = follow_pointer(path / place)  # without symbolic links, `best` is a file with a name
        if (folder / name).is_file():
            return folder / name
        if (folder / WEIGHTS).is_file():
            break  # never the last checkpoint's average in place of the best one's
    wanted = "averaged weights" if averaged else "weights"
    expected = ", ".join(str(Path(place, name)) for place in places)
    raise CheckpointError(
        f"{path} is a folder without {wanted}, expected one of {expected} in it; "
        "name a run of `inline train`, a checkpoint of it, or a file"
    )


def open_checkpoint(path: str | os.PathLike[str], *, use_ema: bool | None = None) -> Checkpoint:
    """Read the weights of a file, with their origin and the file's metadata.

    Args:
        path: A `.safetensors` file, or a file of `torch.save`: a bare state dict, or a training checkpoint with weights
            under `model`, `state_dict`, `model_ema` or `state_dict_ema`. Or a folder in the layout of timm's models on
            the Hugging Face Hub, whose `config.json` stands for metadata that the weights do not have; or one that
            transformers has saved, see `transformers_layout`.
        use_ema: True for averaged weights, False for raw weights, None for averaged weights if the file has them.

    Raises:
        UnsafeCheckpointError: If the file refers to code. Nothing was run.
        CheckpointError: If the file is missing, damaged, not a checkpoint, or has no weights of the requested kind.
    """
    path = Path(path)
    folder = path if path.is_dir() else None
    path = path if folder is None else weights_in(folder) or path
    _check_is_file(path)
    is_safe = path.suffix.lower() == ".safetensors"
    content, metadata = _read_safetensors(path) if is_safe else (_read_pickle(path), {})
    origin, entries = _select(path, content, use_ema)
    _check_expansion(path, [value for value in entries.values() if isinstance(value, Tensor)])
    weights = clean_weights(path, entries)
    if folder is not None and "model" not in metadata:
        config = read_config(folder / CONFIG)
        if "model_type" in config and "architecture" not in config:  # of transformers
            preprocessor = folder / PREPROCESSOR
            preparation = read_config(preprocessor) if preprocessor.is_file() else {}
            notes, weights = translate(folder, config, preparation, weights)
        else:
            notes = read_notes(folder)
        metadata = notes | metadata
    return Checkpoint(path, weights, origin, metadata)


def read_checkpoint(path: str | os.PathLike[str], *, use_ema: bool | None = None) -> dict[str, Tensor]:
    """Return the weights of a file, without their origin and metadata. Arguments and errors: see `open_checkpoint`."""
    return open_checkpoint(path, use_ema=use_ema).weights


def clean_weights(path: Path, entries: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return contiguous copies of the tensors on the CPU, without name prefixes and without plain numbers."""
    weights: dict[str, Tensor] = {}
    foreign: list[str] = []
    for name, value in entries.items():
        if isinstance(value, (int, float)):
            continue
        if not isinstance(name, str) or not isinstance(value, Tensor):
            foreign.append(f"{printable(name)[:80]} ({type(value).__name__})")
        elif value.layout is not torch.strided or value.is_meta or value.is_quantized:
            foreign.append(f"{printable(name)[:80]} ({value.layout}, {value.dtype}, {value.device})")
        else:
            clean_name = re.sub(r"^((module|_orig_mod)\.)+", "", name)
            if clean_name in weights:
                raise CheckpointError(f"{path} has two tensors for {clean_name!r}; rename or remove {name!r}")
            # Copy: a memory-mapped tensor would change when another program rewrites the file.
            weights[clean_name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if foreign or not weights:
        raise CheckpointError(
            f"{path}: expected named dense tensors, got {some_of(foreign) or 'none'}; "
            "keep anything else outside the state dict"
        )
    return weights


def _check_expansion(path: Path, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that repeat a little memory very often: strides of zero turn four bytes into a terabyte.

    Memory counts as far as the file can hold it: a pickle can also ask for a new tensor of any size.
    """
    dense = [value for value in tensors if value.layout is torch.strided and not value.is_meta]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in dense}
    held = min(sum(storages.values()), path.stat().st_size)
    needed = sum(value.nbytes for value in dense)
    if needed > MAX_EXPANSION * held + 2**26:
        raise CheckpointError(
            f"{path} has tensors that repeat their memory: it holds {held:,} bytes of them, "
            f"and copies would take {needed:,}; save them with .contiguous()"
        )


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes."""
    state = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        state.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        state.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return state.hexdigest()


class _StandIn:
    """Replacement of a harmless object in a checkpoint. It accepts the object's content and discards it."""

    def __init__(self, *_parts: object):
        pass

    def __setstate__(self, _state: object) -> None:
        pass


_HARMLESS = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "torch.torch_version.TorchVersion",
    *(f"pathlib{part}.{kind}Path" for part in ("", "._local") for kind in ("Posix", "PurePosix", "Windows")),
    *("numpy.dtype", "numpy.ndarray"),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
)
_STAND_INS: dict[str, type] = {name: type(name, (_StandIn,), {}) for name in _HARMLESS}
# CfgNode is a dict with attributes. The unpickler fills only one subclass of dict: OrderedDict.
_STAND_INS["yacs.config.CfgNode"] = OrderedDict
_safe_globals_lock = threading.Lock()


@contextmanager
def _only_stand_ins_allowed() -> Iterator[None]:
    # torch has one list of safe globals per process. Remove other entries for now: they could run code, or clash with
    # the stand-ins of the same names.
    with _safe_globals_lock:
        others = get_safe_globals()
        clear_safe_globals()
        add_safe_globals([(stand_in, name) for name, stand_in in _STAND_INS.items()])
        try:
            yield
        finally:
            clear_safe_globals()
            add_safe_globals(others)


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder without model.safetensors, expected weights; name the .safetensors or .pth file in it"
        )
    try:
        with open_regular(path) as file:
            head = file.read(64).lower()
    except NotARegularFileError as error:
        raise CheckpointError(f"{path} is not a regular file; name the .safetensors or .pth file itself") from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened: {error.strerror}; check the path and its permissions"
        ) from error
    if not head:
        raise CheckpointError(f"{path} is empty, probably an interrupted download; {FETCH_AGAIN}")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` to fetch them")
    if head.lstrip().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(f"{path} is a web page, not the weights; follow the page's own download link")


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is not a dict)
    except Exception as error:  # a damaged file can raise any exception
        raise _unreadable(path, error) from error
    if "sha256" in metadata and metadata["sha256"] != digest(tensors):
        raise CheckpointError(f"{path} is damaged: its contents do not match its checksum; {FETCH_AGAIN}")
    return tensors, metadata


def _read_pickle(path: Path) -> Any:
    names: list[str] = []
    try:
        is_archive, names = check_pickle_file(path)
        with _only_stand_ins_allowed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about unusual pickles; real problems raise
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise _refusal(path, error, names) from None  # torch's own message tells users to turn the protection off
    except Exception as error:  # a damaged file can raise any exception
        raise _unreadable(path, error) from error


def check_pickle_file(path: Path) -> tuple[bool, list[str]]:
    """Refuse a file of `torch.save` that is damaged, or too deep or large to build.

    Returns True for an archive (the format of torch since 1.6), and the names that the file would import. torch reports
    other problems when it reads the file.
    """
    names: list[str] = []
    with open_regular(path) as file:
        is_archive = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        if is_archive:
            _check_archive(path)
        try:
            # Read by torch: Python's zipfile may see other names, such as of two records that differ in case only.
            stream = io.BytesIO(PyTorchFileReader(file).get_record("data.pkl")) if is_archive else file
            for _ in range(1 if is_archive else LEGACY_PICKLES):
                names += check_pickle(stream)
        except PickleBoundsError as error:
            raise _unreadable(path, error) from error
        except Exception:
            pass  # torch says what is wrong
    return is_archive, names


def _check_archive(path: Path) -> None:
    """Verify the checksums in the archive. torch writes them but does not verify them."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise CheckpointError(f"{path} is a compressed archive, which torch.save never writes; unpack it first")
        has_sums = any(record.CRC for record in records)  # torch can be set to omit them: then all are 0
        if has_sums and (damaged := archive.testzip()):
            raise CheckpointError(f"{path} is damaged: {damaged!r} in it does not match its checksum; {FETCH_AGAIN}")


def _refusal(path: Path, error: pickle.UnpicklingError, imported: list[str]) -> CheckpointError:
    """Return the error for a file that torch refused. `imported` are the names in its opcodes."""
    foreign = re.compile(r"(?!torch\.|collections\.)[\w.]+")
    names = re.findall(r"GLOBAL ([\w.]+) (?:was|whose)", str(error))
    names += [name for name in imported if name not in _STAND_INS and foreign.fullmatch(name)]
    if not names:
        return _unreadable(path, "its pickle is not of the plain kind (protocol 2) that torch.save writes by default")
    module, _, name = names[0].rpartition(".")
    module = IMPORT_MAPPING.get(module, module) or "builtins"  # torch.save writes the module names of Python 2
    return UnsafeCheckpointError(
        f"{path} asks for {module}.{name}, which weights do not need: it is hostile, or contains Python objects. "
        "It was refused and nothing in it was run; ask its author for a .safetensors file, "
        "or for torch.save(model.state_dict(), ...)"
    )


def _unreadable(path: Path, reason: object) -> CheckpointError:
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    return CheckpointError(
        f"{path} cannot be read as weights: it is truncated, damaged or not a checkpoint ({lines[0]}); {FETCH_AGAIN}"
    )


def _select(path: Path, content: Any, use_ema: bool | None) -> tuple[str, Mapping[Any, Any]]:
    """Return the entry with the requested weights (empty for a bare state dict), and the weights."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} contains a {type(content).__name__}, expected a dict of tensors; {FETCH_AGAIN}")
    held = [key for key in EMA_KEYS + RAW_KEYS if _has_tensors(content.get(key))]
    if not held and not _has_tensors(content):
        raise CheckpointError(
            f"{path} contains no weights: expected tensors, or a dict of them under {', '.join(EMA_KEYS + RAW_KEYS)}, "
            f"got the entries {some_of(content) or 'of an empty dict'}; {FETCH_AGAIN}"
        )
    if not held and not use_ema:
        return "", content
    wanted = EMA_KEYS + RAW_KEYS if use_ema is None else EMA_KEYS if use_ema else RAW_KEYS
    for key in wanted:
        if key in held:
            return key, content[key]
    raise CheckpointError(
        f"{path} has no {'averaged (EMA)' if use_ema else 'raw'} weights, expected under {' or '.join(wanted)}: "
        f"it has {' and '.join(held) or 'one unnamed set'}; omit use_ema (--use-ema, --no-ema) to load that"
    )


def _has_tensors(entries: object) -> bool:
    return isinstance(entries, Mapping) and any(isinstance(value, Tensor) for value in entries.values())
