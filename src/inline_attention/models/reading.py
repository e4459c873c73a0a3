"""Reading weights from files without running anything that is in them.

A `.pth` file is a pickle, and a pickle is a program. It is read by torch's restricted unpickler, which builds tensors
and plain containers only. What else stands beside the weights in an honest training checkpoint (a yacs configuration,
`argparse` options, NumPy numbers) is met by stand-ins that forget it; any other name is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
import re
import threading
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from inline_attention.models.pickle_bounds import PickleBoundsError, check_pickle
from inline_attention.support.files import NotARegularFileError, open_regular
from inline_attention.support.text import printable, some_of

EMA_KEYS = ("state_dict_ema", "model_ema")
RAW_KEYS = ("model", "state_dict")
LEGACY_PICKLES = 5  # before the storages, in the format of torch < 1.6
MAX_EXPANSION = 16  # of memory that tensors share or repeat, when each gets its own
FETCH_AGAIN = "fetch or copy it again, or ask its author for a .safetensors file"


class CheckpointError(RuntimeError):
    """A file of weights cannot be read, does not fit, or cannot be written."""


class UnsafeCheckpointError(CheckpointError):
    """A file asks for code other than what tensors need. None of it was run."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a file of weights.

    Attributes:
        path: The file.
        weights: Tensors by name, contiguous and on the CPU, without the prefixes that DDP and `torch.compile` add.
        origin: The entry of the file that held them, such as "state_dict_ema"; empty if they were all it held.
        metadata: What a safetensors file says of itself, such as the name of its `model`; empty for other files.
    """

    path: Path
    weights: dict[str, Tensor]
    origin: str
    metadata: dict[str, str] = field(default_factory=dict)


def open_checkpoint(path: str | os.PathLike[str], *, use_ema: bool | None = None) -> Checkpoint:
    """Read a file of weights, and where in it and with which notes they stood. Arguments: see `read_checkpoint`."""
    path = Path(path)
    _check_is_file(path)
    if path.suffix.lower() == ".safetensors":
        content, metadata = _read_safetensors(path)
    else:
        content, metadata = _read_pickle(path), {}
    origin, entries = _select(path, content, use_ema)
    return Checkpoint(path, clean_weights(path, entries), origin, metadata)


def read_checkpoint(path: str | os.PathLike[str], *, use_ema: bool | None = None) -> dict[str, Tensor]:
    """The weights in a file, on the CPU, without the prefixes that DDP and `torch.compile` add to names.

    Args:
        path: A `.safetensors` file, or anything else `torch.save` wrote: a bare state dict, or a training checkpoint
            with weights under `model`, `state_dict`, `model_ema` or `state_dict_ema`.
        use_ema: True demands the averaged weights, False the raw ones; None prefers averaged ones.

    Raises:
        UnsafeCheckpointError: If the file asks for code. Nothing was run.
        CheckpointError: If it is missing, damaged, not a checkpoint, or has not the weights asked for.
    """
    return open_checkpoint(path, use_ema=use_ema).weights


def clean_weights(path: Path, entries: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Own copies of the tensors, contiguous and on the CPU, without prefixes; plain numbers are left out."""
    weights: dict[str, Tensor] = {}
    foreign: list[str] = []
    _check_expansion(path, [value for value in entries.values() if isinstance(value, Tensor)])
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
            # A copy: a tensor read from a file is a window on it, and changes when somebody rewrites the file.
            weights[clean_name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if foreign or not weights:
        raise CheckpointError(
            f"{path}: expected named dense tensors, got {some_of(foreign) or 'none'}; "
            "keep anything else outside the state dict"
        )
    return weights


def _check_expansion(path: Path, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that repeat little memory very often: strides of zero make a terabyte of four bytes."""
    dense = [value for value in tensors if value.layout is torch.strided and not value.is_meta]
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in dense}
    needed, most = sum(value.nbytes for value in dense), MAX_EXPANSION * sum(held.values()) + 2**26
    if needed > most:
        raise CheckpointError(
            f"{path} has tensors that repeat their memory: it holds {sum(held.values()):,} bytes of them, "
            f"and copies would take {needed:,}; save them with .contiguous()"
        )


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes."""
    state = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        state.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        state.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return state.hexdigest()


def where_they_differ(first: Sequence[str], second: Sequence[str]) -> tuple[str, str]:
    """Two lists of names, in words, each from the first name on that is not the same in both."""
    shorter = min(len(first), len(second))
    start = next((place for place in range(shorter) if first[place] != second[place]), shorter)
    before, end = ("…, " if start else ""), f"nothing after {start}"
    shown, other = (before + some_of(names[start:], 5) if names[start:] else end for names in (first, second))
    return shown, other


class _StandIn:
    """Takes the place of a harmless object beside the weights: accepts its parts and forgets them."""

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
# A dict with attributes; of the subclasses of dict, the unpickler fills OrderedDict alone.
_STAND_INS["yacs.config.CfgNode"] = OrderedDict
_safe_globals_lock = threading.Lock()


@contextmanager
def _only_stand_ins_allowed() -> Iterator[None]:
    # torch's list is one for the process. What others put on it is set aside: it could run code, and the real
    # classes of the same names would meet ours.
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
        raise CheckpointError(f"{path} is a folder, expected a file; name the .safetensors or .pth file in it")
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
        raise CheckpointError(f"{path} is empty, as an interrupted download leaves it; {FETCH_AGAIN}")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` to fetch them")
    if head.lstrip().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(f"{path} is a web page, not the weights; follow the page's own download link")


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)
    except Exception as error:  # a damaged file can fail anywhere
        raise _unreadable(path, error) from error
    if "sha256" in metadata and metadata["sha256"] != digest(tensors):
        raise CheckpointError(f"{path} is damaged: its contents do not match its checksum; {FETCH_AGAIN}")
    return tensors, metadata


def _read_pickle(path: Path) -> Any:
    try:
        is_archive = check_pickle_file(path)
        with _only_stand_ins_allowed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on unusual pickles; what matters of them is raised
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise _refusal(path, error) from None  # torch's own message advises to switch the protection off
    except Exception as error:  # a damaged file can fail anywhere
        raise _unreadable(path, error) from error


def check_pickle_file(path: Path) -> bool:
    """Refuse a file of `torch.save` that is damaged, or whose structures are too deep or too large to build.

    Returns:
        True if it is an archive, as torch writes since 1.6.

    Raises:
        CheckpointError: If it is refused.
        OSError: If it cannot be read.
    """
    with open_regular(path) as file:
        is_archive = file.read(4) == b"PK\x03\x04"
    if is_archive:
        _check_archive(path)
    _check_pickles(path, is_archive)
    return is_archive


def _check_pickles(path: Path, is_archive: bool) -> None:
    """Refuse structures too deep or too large to build. Whether the rest can be read, torch says."""
    try:
        for stream in _pickles(path, is_archive):
            check_pickle(stream)
    except PickleBoundsError as error:
        raise _unreadable(path, error) from error
    except Exception:
        return


def _check_archive(path: Path) -> None:
    """Check the sums that torch writes into a file and does not check when it reads one."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise CheckpointError(f"{path} is a compressed archive, which torch.save never writes; unpack it first")
        has_sums = any(record.CRC for record in records)  # torch can be told to leave them out: then all are 0
        if has_sums and (damaged := archive.testzip()):
            raise CheckpointError(f"{path} is damaged: {damaged!r} in it does not match its checksum; {FETCH_AGAIN}")


def _refusal(path: Path, error: pickle.UnpicklingError) -> CheckpointError:
    names = re.findall(r"GLOBAL ([\w.]+) (?:was|whose)", str(error)) or _foreign_globals(path)
    if not names:
        return _unreadable(path, "its pickle is not of the plain kind (protocol 2) that torch.save writes by default")
    module, _, name = names[0].rpartition(".")
    module = IMPORT_MAPPING.get(module, module) or "builtins"  # Python 2's spelling, which torch.save writes
    return UnsafeCheckpointError(
        f"{path} asks for {module}.{name}, which weights do not need: it is hostile, or holds whole Python objects. "
        "It was refused and nothing in it was run; ask its author for a .safetensors file, "
        "or for torch.save(model.state_dict(), ...)"
    )


def _foreign_globals(path: Path) -> list[str]:
    """What a pickle would import besides torch, read off its opcodes without executing them."""
    names: list[str] = []
    with suppress(Exception):  # the file is refused either way; this only says more about it
        for stream in _pickles(path, zipfile.is_zipfile(path)):
            names.extend(_imported_names(stream))
    foreign = re.compile(r"(?!torch\.|collections\.)[\w.]+")
    return [name for name in names if name not in _STAND_INS and foreign.fullmatch(name)]


def _pickles(path: Path, is_archive: bool) -> Iterator[BinaryIO]:
    """Streams, each at the beginning of a pickle of a file that `torch.save` wrote."""
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            for record in archive.namelist():
                if record.endswith(".pkl"):
                    yield io.BytesIO(archive.read(record))
    else:
        with open_regular(path) as file:
            for _ in range(LEGACY_PICKLES):
                yield file


def _imported_names(stream: BinaryIO) -> Iterator[str]:
    pushed: list[str] = []
    memo: list[str] = []
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL":  # module and name were pushed before, afresh or from the memo
            yield ".".join(pushed[-2:])
        elif opcode.name == "MEMOIZE":
            memo.append(pushed[-1])
            continue
        pushed.append(memo[argument or 0] if opcode.name in ("BINGET", "LONG_BINGET") else str(argument))


def _unreadable(path: Path, reason: object) -> CheckpointError:
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    return CheckpointError(
        f"{path} cannot be read as weights: it is truncated, damaged or no checkpoint ({lines[0]}); {FETCH_AGAIN}"
    )


def _select(path: Path, content: Any, use_ema: bool | None) -> tuple[str, Mapping[Any, Any]]:
    """The set of weights asked for, and the entry it was found under (empty for a bare state dict)."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a dict of tensors; {FETCH_AGAIN}")
    held = [key for key in EMA_KEYS + RAW_KEYS if _has_tensors(content.get(key))]
    if not held and not _has_tensors(content):
        raise CheckpointError(
            f"{path} holds no weights: expected tensors, or a dict of them under {', '.join(EMA_KEYS + RAW_KEYS)}, "
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
        f"it has {' and '.join(held) or 'one unnamed set'}; leave use_ema (--use-ema, --no-ema) out to take that"
    )


def _has_tensors(entries: object) -> bool:
    return isinstance(entries, Mapping) and any(isinstance(value, Tensor) for value in entries.values())
