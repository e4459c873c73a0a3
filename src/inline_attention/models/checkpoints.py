"""Weights in files: read them without running anything, check them against a model, load, save and convert them.

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
import secrets
import threading
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

EMA_KEYS = ("state_dict_ema", "model_ema")
RAW_KEYS = ("model", "state_dict")
FETCH_AGAIN = "fetch or copy it again, or ask its author for a .safetensors file"


class CheckpointError(RuntimeError):
    """A file of weights cannot be read, does not fit, or cannot be written."""


class UnsafeCheckpointError(CheckpointError):
    """A file asks for code other than what tensors need. None of it was run."""


class CheckpointMismatchError(CheckpointError):
    """The weights do not fit the model, which was left as it was.

    Attributes:
        missing: Names that the model has and the file has not.
        unexpected: Names that the file has and the model has not.
        mismatched: (name, shape in the file, shape in the model).
    """

    def __init__(
        self,
        message: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] = (),
    ):
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)


@dataclass(frozen=True)
class LoadReport:
    """What was taken from a file. `str()` of it is one line for a log.

    Attributes:
        path: The file.
        origin: The entry of the file that held the weights, such as "state_dict_ema"; empty if they were all it held.
        loaded: Names taken, in the model's spelling.
        missing: Names that the model has and the file has not (`strict=False`).
        unexpected: Names that the file has and the model has not (`strict=False`).
        reinitialized: Names of the head, left as the model initialised it (`reinitialize_head=True`).
        cast: Names whose dtype was changed to the model's.
        nonfinite: Names with a NaN or an infinity in them.
    """

    path: Path
    origin: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reinitialized: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.path}: {len(self.loaded)} tensors" + (f" from {self.origin!r}" if self.origin else "")]
        if self.cast:
            parts.append(f"{len(self.cast)} cast to the model's dtype")
        if self.reinitialized:
            parts.append(f"head left as initialised ({', '.join(self.reinitialized)})")
        named = {"missing": self.missing, "unexpected": self.unexpected, "not finite": self.nonfinite}
        parts += [f"{len(names)} {what} ({_some(names)})" for what, names in named.items() if names]
        return "; ".join(parts)


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
    return _read(Path(path), use_ema)[0]


def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    use_ema: bool | None = None,
    strict: bool = True,
    reinitialize_head: bool = False,
) -> LoadReport:
    """Load a file's weights into a model: all of them, or on any error none.

    A model may define `convert_state_dict(state_dict) -> state_dict`, which translates foreign names and shapes to its
    own. It should leave what it does not know alone: the check that follows lists it.

    Args:
        model: The model; weights are cast to its dtypes.
        path: As for `read_checkpoint`.
        use_ema: As for `read_checkpoint`.
        strict: If False, names that only the model or only the file has are reported, not refused. Shapes always count.
        reinitialize_head: Leave the classifier as the model initialised it, whatever the file has.

    Raises:
        CheckpointMismatchError: If names or shapes differ.
        CheckpointError: As for `read_checkpoint`.
    """
    path = Path(path)
    weights, origin = _read(path, use_ema)
    weights, differences = _fit(model, path, weights, strict, reinitialize_head)
    own: dict[str, Tensor] = model.state_dict()
    if any(own[name].is_meta for name in weights):
        raise CheckpointError(
            f"{path} cannot be loaded into a model on the meta device, which holds no values; "
            "use model.to_empty(device='cpu') first"
        )
    cast = tuple(name for name, value in weights.items() if value.dtype != own[name].dtype)
    weights = {name: value.to(own[name].dtype) for name, value in weights.items()}
    nonfinite = _warn_of_nonfinite(path, weights)
    model.load_state_dict(weights, strict=False)
    return LoadReport(path, origin, tuple(weights), cast=cast, nonfinite=nonfinite, **differences)


def save_weights(
    weights: nn.Module | Mapping[str, Tensor], path: str | os.PathLike[str], *, source: str | None = None
) -> None:
    """Write a model's or a state dict's weights as safetensors: the whole file or, on any error, nothing.

    Names lose the prefixes of DDP and `torch.compile`; tensors that share memory are written one by one. A checksum
    goes along, so that `read_checkpoint` notices a damaged file.

    Raises:
        CheckpointError: If the file cannot be written. One that was there before is unchanged.
    """
    path = Path(path)
    if path.suffix.lower() != ".safetensors":
        raise CheckpointError(f"weights are saved as .safetensors, got {path}; try {path.with_suffix('.safetensors')}")
    tensors = _clean(path, weights.state_dict() if isinstance(weights, nn.Module) else weights)
    metadata = {"format": "pt", "sha256": _digest(tensors)} | ({"source": source} if source else {})
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        save_file(tensors, temporary, metadata=metadata)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # else a crash soon after could leave the new name on an empty file
        os.replace(temporary, path)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); a file that was there before is unchanged; "
            "check that the folder exists, is writable and has space"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    use_ema: bool | None = None,
) -> LoadReport:
    """Write the weights of any readable file as safetensors, bit for bit.

    Args:
        source: As for `read_checkpoint`.
        target: A path that ends in `.safetensors`.
        model: If given, the weights are checked against it and written in its names; it is not changed, and may be on
            the meta device.
        use_ema: As for `read_checkpoint`.

    Raises:
        CheckpointMismatchError: If names or shapes differ from the model's.
        CheckpointError: As for `read_checkpoint` and `save_weights`.
    """
    source = Path(source)
    weights, origin = _read(source, use_ema)
    if model is not None:
        weights, _ = _fit(model, source, weights, strict=True, reinitialize_head=False)
    nonfinite = _warn_of_nonfinite(source, weights)
    save_weights(weights, target, source=source.name)
    return LoadReport(source, origin, tuple(weights), nonfinite=nonfinite)


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


def _read(path: Path, use_ema: bool | None) -> tuple[dict[str, Tensor], str]:
    """Cleaned weights, and the entry of the file that held them."""
    _check_is_file(path)
    content = _read_safetensors(path) if path.suffix.lower() == ".safetensors" else _read_pickle(path)
    origin, entries = _select(path, content, use_ema)
    return _clean(path, entries), origin


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, expected a file; name the .safetensors or .pth file in it")
    try:
        with path.open("rb") as file:
            head = file.read(64).lower()
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


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            checksum = (file.metadata() or {}).get("sha256")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)
    except Exception as error:  # a damaged file can fail anywhere
        raise _unreadable(path, error) from error
    if checksum is not None and checksum != _digest(tensors):
        raise CheckpointError(f"{path} is damaged: its contents do not match its checksum; {FETCH_AGAIN}")
    return tensors


def _read_pickle(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            is_archive = file.read(4) == b"PK\x03\x04"
        if is_archive:
            _check_archive(path)
        with _only_stand_ins_allowed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on unusual pickles; what matters of them is raised
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise _refusal(path, error) from None  # torch's own message advises to switch the protection off
    except Exception as error:  # a damaged file can fail anywhere
        raise _unreadable(path, error) from error


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
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for record in archive.namelist():
                    if record.endswith(".pkl"):
                        names.extend(_imported_names(io.BytesIO(archive.read(record))))
        else:
            with path.open("rb") as file:
                for _ in range(5):  # the pickles before the storages in the format of torch < 1.6
                    names.extend(_imported_names(file))
    foreign = re.compile(r"(?!torch\.|collections\.)[\w.]+")
    return [name for name in names if name not in _STAND_INS and foreign.fullmatch(name)]


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
            f"got the entries {_some(content) or 'of an empty dict'}; {FETCH_AGAIN}"
        )
    if not held and not use_ema:
        return "", content
    wanted = EMA_KEYS + RAW_KEYS if use_ema is None else EMA_KEYS if use_ema else RAW_KEYS
    for key in wanted:
        if key in held:
            return key, content[key]
    raise CheckpointError(
        f"{path} has no {'averaged (EMA)' if use_ema else 'raw'} weights, expected under {' or '.join(wanted)}: "
        f"it has {' and '.join(held) or 'one unnamed set'}; leave use_ema out to take that"
    )


def _has_tensors(entries: object) -> bool:
    return isinstance(entries, Mapping) and any(isinstance(value, Tensor) for value in entries.values())


def _clean(path: Path, entries: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Own copies of the tensors, contiguous and on the CPU, without prefixes; plain numbers are left out."""
    weights: dict[str, Tensor] = {}
    foreign: list[str] = []
    for name, value in entries.items():
        if isinstance(value, (int, float)):
            continue
        if not isinstance(name, str) or not isinstance(value, Tensor):
            foreign.append(f"{name} ({type(value).__name__})")
        elif value.layout is not torch.strided or value.is_meta or value.is_quantized:
            foreign.append(f"{name} ({value.layout}, {value.dtype}, {value.device})")
        else:
            clean_name = re.sub(r"^((module|_orig_mod)\.)+", "", name)
            if clean_name in weights:
                raise CheckpointError(f"{path} has two tensors for {clean_name!r}; rename or remove {name!r}")
            # A copy: a tensor read from a file is a window on it, and changes when somebody rewrites the file.
            weights[clean_name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if foreign or not weights:
        raise CheckpointError(
            f"{path}: expected named dense tensors, got {_some(foreign) or 'none'}; "
            "keep anything else outside the state dict"
        )
    return weights


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()


def _fit(
    model: nn.Module, path: Path, weights: dict[str, Tensor], strict: bool, reinitialize_head: bool
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """The weights that go into the model, in its names, and the differences that were let pass."""
    if convert := getattr(model, "convert_state_dict", None):
        weights = convert(weights)
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "head"
    heads = tuple(f"{head}." for head in ([classifier] if isinstance(classifier, str) else classifier))
    reinitialized: tuple[str, ...] = ()
    if reinitialize_head:
        reinitialized = tuple(name for name in own if name.startswith(heads))
        weights = {name: value for name, value in weights.items() if not name.startswith(heads)}
    missing = tuple(name for name in own if name not in weights and name not in reinitialized)
    unexpected = tuple(name for name in weights if name not in own)
    fitting = {name: value for name, value in weights.items() if name in own}
    mismatched = [
        name
        for name, value in fitting.items()
        if value.shape != own[name].shape or value.is_floating_point() != own[name].is_floating_point()
    ]
    if not mismatched and fitting and not (strict and (missing or unexpected)):
        return fitting, {"missing": missing, "unexpected": unexpected, "reinitialized": reinitialized}

    lines = [f"{path} does not fit {type(model).__name__}, which was left as it was"]
    differing = [f"{name} (file {_describe(weights[name])}, model {_describe(own[name])})" for name in mismatched]
    listed = {"missing in the file": missing, "unknown to the model": unexpected, "of another shape or kind": differing}
    lines += [f"{len(names)} {what}: {_some(names)}" for what, names in listed.items() if names]
    lines += _head_advice(_number_of_classes(weights, heads), _number_of_classes(own, heads))
    if not all(name.startswith(heads) for name in (*missing, *unexpected, *mismatched)):
        lines.append("create the model that the file was made for: its name, image size and options")
    shapes = [(name, tuple(weights[name].shape), tuple(own[name].shape)) for name in mismatched]
    raise CheckpointMismatchError("\n  ".join(lines), missing, unexpected, shapes)


def _head_advice(in_file: int | None, in_model: int | None) -> list[str]:
    if in_file == in_model:
        return []
    if in_file is None:
        return [f"the file has no head, the model one for {in_model} classes: pass reinitialize_head=True"]
    return [
        f"the file has a head for {in_file} classes, the model {f'one for {in_model}' if in_model else 'none'}: "
        f"create the model with num_classes={in_file} (--num-classes on the command line), "
        "or pass reinitialize_head=True"
    ]


def _number_of_classes(weights: Mapping[str, Tensor], heads: tuple[str, ...]) -> int | None:
    names = (f"{head}{kind}" for head in heads for kind in ("weight", "bias"))
    return next((weights[name].shape[0] for name in names if name in weights), None)


def _warn_of_nonfinite(path: Path, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    names = tuple(name for name, value in weights.items() if not torch.isfinite(value).all())
    if names:
        warnings.warn(f"{path} gives NaN or infinite values in {_some(names)}; they are kept", stacklevel=3)
    return names


def _describe(value: Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _some(names: Iterable[object], limit: int = 12) -> str:
    listed = [str(name) for name in names]
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
