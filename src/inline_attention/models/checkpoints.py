"""Weights between files and models: check them against a model, load, save and convert them.

`inline_attention.models.reading` does the reading, and makes sure that nothing in a file is run.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from inline_attention.models.reading import (
    Checkpoint,
    CheckpointError,
    UnsafeCheckpointError,
    clean_weights,
    digest,
    open_checkpoint,
    read_checkpoint,
)
from inline_attention.support.files import replace_atomically
from inline_attention.support.text import some_of
from inline_attention.support.untrusted import parse_json

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointMismatchError",
    "LoadReport",
    "UnsafeCheckpointError",
    "convert_checkpoint",
    "load_checkpoint",
    "notes_on",
    "number_of_classes",
    "open_checkpoint",
    "position_grids_in",
    "read_checkpoint",
    "save_weights",
]

# The entry of metadata that holds the grids of position embeddings, as JSON.
GRIDS_NOTE = "position_grids"


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
        parts += [f"{len(names)} {what} ({some_of(names)})" for what, names in named.items() if names]
        return "; ".join(parts)


def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str] | Checkpoint,
    *,
    use_ema: bool | None = None,
    strict: bool = True,
    reinitialize_head: bool = False,
) -> LoadReport:
    """Load a file's weights into a model: all of them, or on any error none.

    A model may define `convert_state_dict(state_dict) -> state_dict`, which translates foreign names and shapes to its
    own. It should leave what it does not know alone: the check that follows lists it. One that also has
    `position_grids` (by parameter name, (height, width)) is given, as a second argument, those that the file notes.

    Args:
        model: The model; weights are cast to its dtypes.
        path: As for `read_checkpoint`, or what `open_checkpoint` returned.
        use_ema: As for `read_checkpoint`; what was opened before is taken as it is.
        strict: If False, names that only the model or only the file has are reported, not refused. Shapes always count.
        reinitialize_head: Leave the classifier as the model initialised it, whatever the file has.

    Raises:
        CheckpointMismatchError: If names or shapes differ.
        CheckpointError: As for `read_checkpoint`.
    """
    file = path if isinstance(path, Checkpoint) else open_checkpoint(path, use_ema=use_ema)
    weights, differences = _fit(model, file, strict, reinitialize_head)
    own: dict[str, Tensor] = model.state_dict()
    if any(own[name].is_meta for name in weights):
        raise CheckpointError(
            f"{file.path} cannot be loaded into a model on the meta device, which holds no values; "
            "use model.to_empty(device='cpu') first"
        )
    cast = tuple(name for name, value in weights.items() if value.dtype != own[name].dtype)
    weights = {name: value.to(own[name].dtype) for name, value in weights.items()}
    nonfinite = _warn_of_nonfinite(file.path, weights)
    model.load_state_dict(weights, strict=False)
    return LoadReport(file.path, file.origin, tuple(weights), cast=cast, nonfinite=nonfinite, **differences)


def save_weights(
    weights: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model's or a state dict's weights as safetensors: the whole file or, on any error, nothing.

    Names lose the prefixes of DDP and `torch.compile`; tensors that share memory are written one by one. A checksum
    goes along, so that `read_checkpoint` notices a damaged file, and so do the name of a model that has one and the
    grids of its position embeddings.

    Args:
        weights: What to write.
        path: A path that ends in `.safetensors`.
        metadata: Notes to write along, such as `source`, `model` or `class_names` (a JSON list).

    Raises:
        CheckpointError: If the file cannot be written. One that was there before is unchanged.
    """
    path = Path(path)
    if path.suffix.lower() != ".safetensors":
        raise CheckpointError(f"weights are saved as .safetensors, got {path}; try {path.with_suffix('.safetensors')}")
    tensors = clean_weights(path, weights.state_dict() if isinstance(weights, nn.Module) else weights)
    notes = {**notes_on(weights), **(metadata or {}), "format": "pt", "sha256": digest(tensors)}
    try:
        with replace_atomically(path) as temporary:
            save_file(tensors, temporary, metadata=notes)
            _sort_header(temporary)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); a file that was there before is unchanged; "
            "check that the folder exists, is writable and has space"
        ) from error


def _sort_header(path: Path) -> None:
    """Sort a safetensors file's header in place, so that equal weights and notes give equal bytes.

    The library writes metadata in the random order of a hash map.
    """
    with path.open("rb+") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        ordered = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        if len(ordered) <= length:  # the format allows spaces after the header
            file.seek(8)
            file.write(ordered.ljust(length))


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    use_ema: bool | None = None,
) -> LoadReport:
    """Write the weights of any readable file as safetensors, bit for bit, with the notes that the file has.

    Args:
        source: As for `read_checkpoint`.
        target: A path that ends in `.safetensors`.
        model: If given, the weights are checked against it and written in its names, and its own name goes along; it
            is not changed, and may be on the meta device.
        use_ema: As for `read_checkpoint`.

    Raises:
        CheckpointMismatchError: If names or shapes differ from the model's.
        CheckpointError: As for `read_checkpoint` and `save_weights`.
    """
    file = open_checkpoint(source, use_ema=use_ema)
    weights = file.weights
    if model is not None:
        weights, _ = _fit(model, file, strict=True, reinitialize_head=False)
    nonfinite = _warn_of_nonfinite(file.path, weights)
    save_weights(weights, target, metadata={**file.metadata, **notes_on(model), "source": file.path.name})
    return LoadReport(file.path, file.origin, tuple(weights), nonfinite=nonfinite)


def number_of_classes(weights: Mapping[str, Tensor], model: nn.Module) -> int | None:
    """Classes of the head in a set of weights, None without one; the model knows what its head is called."""
    names = (f"{head}{kind}" for head in _heads(model) for kind in ("weight", "bias"))
    return next((weights[name].shape[0] for name in names if name in weights and weights[name].dim() > 0), None)


def notes_on(model: object) -> dict[str, str]:
    """What `save_weights` notes on a model, for those who save its state dict: its name and its positions' grids."""
    name, grids = _config(model).get("architecture"), _position_grids(model)
    return ({"model": name} if name else {}) | ({GRIDS_NOTE: json.dumps(grids)} if grids else {})


def position_grids_in(metadata: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """The grids of position embeddings that `save_weights` noted, by parameter name; none where it did not."""
    try:
        noted = parse_json(metadata.get(GRIDS_NOTE, "{}"))
        return {str(name): (int(height), int(width)) for name, (height, width) in noted.items()}
    except (ValueError, TypeError, AttributeError, OverflowError):  # another program's note
        return {}


def _fit(
    model: nn.Module, file: Checkpoint, strict: bool, reinitialize_head: bool
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """The weights that go into the model, in its names, and the differences that were let pass."""
    weights = file.weights
    if convert := getattr(model, "convert_state_dict", None):
        noted = position_grids_in(file.metadata)
        try:
            weights = convert(weights, noted) if _position_grids(model) else convert(weights)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {error}") from error
        _warn_of_unknown_grids(model, file, weights, noted)
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    heads = _heads(model)
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

    of_model = f", of {file.metadata['model']}," if "model" in file.metadata else ""
    lines = [f"{file.path}{of_model} does not fit {type(model).__name__}, which was left as it was"]
    differing = [f"{name} (file {_describe(weights[name])}, model {_describe(own[name])})" for name in mismatched]
    listed = {"missing in the file": missing, "unknown to the model": unexpected, "of another shape or kind": differing}
    lines += [f"{len(names)} {what}: {some_of(names)}" for what, names in listed.items() if names]
    is_about_heads = all(name.startswith(heads) for name in (*missing, *unexpected, *mismatched))
    classes = number_of_classes(weights, model), number_of_classes(own, model)
    if is_about_heads or None not in classes:  # of another model's names, one cannot tell whether it has a head
        lines += _head_advice(*classes)
    if not is_about_heads:
        lines.append("create the model that the file was made for: its name, image size and options")
    shapes = [(name, tuple(weights[name].shape), tuple(own[name].shape)) for name in mismatched]
    raise CheckpointMismatchError("\n  ".join(lines), missing, unexpected, shapes)


def _head_advice(in_file: int | None, in_model: int | None) -> list[str]:
    if in_file == in_model:
        return []
    if in_file is None:
        heads = f"no head, the model one for {in_model} classes"
    else:
        heads = f"a head for {in_file} classes, the model {f'one for {in_model}' if in_model else 'none'}"
    return [
        f"the file has {heads}: "
        f"create the model with num_classes={in_file or 0} (--num-classes on the command line), "
        "or pass reinitialize_head=True"
    ]


def _config(model: object) -> Mapping[str, Any]:
    return getattr(model, "pretrained_cfg", None) or {}


def _heads(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the classifier's names."""
    classifier = _config(model).get("classifier") or "head"
    return tuple(f"{head}." for head in ([classifier] if isinstance(classifier, str) else classifier))


def _position_grids(model: object) -> Mapping[str, tuple[int, int]]:
    return getattr(model, "position_grids", None) or {}


def _warn_of_unknown_grids(
    model: nn.Module, file: Checkpoint, weights: Mapping[str, Tensor], noted: Mapping[str, tuple[int, int]]
) -> None:
    """Say which positions were taken as they are though they may be of a grid of another shape."""
    as_they_are = {id(value) for value in file.weights.values()}
    doubtful = [
        f"{name} ({height}×{width})"
        for name, (height, width) in _position_grids(model).items()
        if height != width and name not in noted and name in weights and id(weights[name]) in as_they_are
    ]
    if doubtful:
        warnings.warn(
            f"{file.path} does not say of which grids its positions are; they are taken for the model's: "
            f"{some_of(doubtful)}",
            stacklevel=4,
        )


def _warn_of_nonfinite(path: Path, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    names = tuple(name for name, value in weights.items() if not torch.isfinite(value).all())
    if names:
        warnings.warn(f"{path} gives NaN or infinite values in {some_of(names)}; they are kept", stacklevel=3)
    return names


def _describe(value: Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
