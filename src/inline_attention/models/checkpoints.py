"""Load weights into a model, save them and convert them. `reading` reads the files."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor, nn

from inline_attention.layers.attention import KernelAttention
from inline_attention.layers.conversion import RECORD
from inline_attention.models.reading import Checkpoint, CheckpointError, clean_weights, digest, open_checkpoint
from inline_attention.support.files import replace_atomically
from inline_attention.support.text import printable, some_of
from inline_attention.support.untrusted import parse_json

# Metadata keys, of JSON: the grids of position embeddings, and what `convert_attention` did, which `described` checks.
POSITION_GRIDS, CONVERSION = "position_grids", "conversion"


class CheckpointMismatchError(CheckpointError):
    """The weights do not fit the model. The model is unchanged.

    Attributes:
        missing: Names that only the model has.
        unexpected: Names that only the file has.
        mismatched: Tuples (name, shape in the file, shape in the model).
    """

    def __init__(
        self,
        message: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] = (),
    ):
        super().__init__(message)
        self.missing, self.unexpected, self.mismatched = tuple(missing), tuple(unexpected), tuple(mismatched)


@dataclass(frozen=True)
class LoadReport:
    """Result of loading a file. `str(report)` is one line for a log. Names are spelled as in the model."""

    path: Path
    origin: str  # entry of the file that contains the weights, such as "state_dict_ema"; empty for a bare state dict
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()  # only the model has them (`strict=False`)
    unexpected: tuple[str, ...] = ()  # only the file has them (`strict=False`)
    reinitialized: tuple[str, ...] = ()  # of the head, which keeps its initial values (`reinitialize_head=True`)
    cast: tuple[str, ...] = ()  # their dtype was changed to the model's
    nonfinite: tuple[str, ...] = ()  # they have NaN or infinite values

    def __str__(self) -> str:
        parts = [f"{self.path}: {len(self.loaded)} tensors" + (f" from {self.origin!r}" if self.origin else "")]
        if self.cast:
            parts.append(f"{len(self.cast)} cast to the model's dtype")
        if self.reinitialized:
            parts.append(f"head left as initialized ({', '.join(self.reinitialized)})")
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
    """Load the weights of a file into a model. On any error the model is unchanged.

    A model can define `convert_state_dict(state_dict) -> state_dict` to translate other names and shapes to its own. It
    should keep unknown entries: the check that follows reports them. A model that also has `position_grids` ((height,
    width) by parameter name) gets the grids in the file's metadata as a second argument.

    Args:
        model: Model. Weights are cast to its dtypes.
        path: A `.safetensors` file, a file of `torch.save`, or the result of `open_checkpoint`.
        use_ema: True for averaged weights, False for raw weights, None for averaged weights if the file has them.
            Ignored for the result of `open_checkpoint`.
        strict: Refuse names that only the model or only the file has. If False, report them. Shapes must always agree.
        reinitialize_head: Keep the initial values of the model's classifier and ignore the file's.

    Returns:
        A report of the weights that were loaded.

    Raises:
        CheckpointMismatchError: If names or shapes differ.
        CheckpointError: If the file cannot be read (`read_checkpoint`).
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
    if CONVERSION in file.metadata and not _is_converted(model):
        warnings.warn(
            f"{printable(file.path)} is of a model with converted attention, and this one has softmax; "
            "call convert_attention first",
            stacklevel=2,
        )
    model.load_state_dict(weights, strict=False)
    return LoadReport(file.path, file.origin, tuple(weights), cast=cast, nonfinite=nonfinite, **differences)


def save_weights(
    weights: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write weights to a safetensors file. On any error an existing file is unchanged.

    Names lose the prefixes of DDP and `torch.compile`. Tensors that share memory are written separately. The metadata
    gets a checksum, which `read_checkpoint` checks, and for a model its name, the grids of its position embeddings, and
    what `convert_attention` did to it.
    Equal weights and metadata give equal bytes.

    Args:
        weights: Model or state dict.
        path: Path that ends in `.safetensors`.
        metadata: Additional metadata, such as `source`, `model` or `class_names` (a JSON list).

    Raises:
        CheckpointError: If the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".safetensors":
        raise CheckpointError(f"weights are saved as .safetensors, got {path}; try {path.with_suffix('.safetensors')}")
    tensors = clean_weights(path, weights.state_dict() if isinstance(weights, nn.Module) else weights)
    notes = {**model_metadata(weights), **(metadata or {}), "format": "pt", "sha256": digest(tensors)}
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
    """Sort the header of a safetensors file in place: the library writes metadata in the random order of a hash map."""
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
    """Convert a file of weights to safetensors. Values stay bit for bit; metadata is kept.

    Args:
        source: A `.safetensors` file, or a file of `torch.save`.
        target: Path that ends in `.safetensors`.
        model: Model that the weights must fit, unchanged, maybe on the meta device. The new file has its names.
        use_ema: True for averaged weights, False for raw weights, None for averaged weights if the file has them.

    Returns:
        A report of the weights that were written.

    Raises:
        CheckpointError: If the source cannot be read, does not fit the model, or the target cannot be written.
    """
    file = open_checkpoint(source, use_ema=use_ema)
    weights = file.weights if model is None else _fit(model, file, strict=True, reinitialize_head=None)[0]
    nonfinite = _warn_of_nonfinite(file.path, weights)
    save_weights(weights, target, metadata={**file.metadata, **model_metadata(model), "source": file.path.name})
    return LoadReport(file.path, file.origin, tuple(weights), nonfinite=nonfinite)


def number_of_classes(weights: Mapping[str, Tensor], model: nn.Module) -> int | None:
    """Return the number of classes of the head in `weights`, None without a head. The model gives the head's name."""
    names = (f"{head}{kind}" for head in _heads(model) for kind in ("weight", "bias"))
    return next((weights[name].shape[0] for name in names if name in weights and weights[name].dim() > 0), None)


def model_metadata(model: object) -> dict[str, str]:
    """Return the metadata that `save_weights` adds for a model: its name, grids of positions, and conversion."""
    name, grids, conversion = _config(model).get("architecture"), _position_grids(model), getattr(model, RECORD, None)
    notes = {"model": name} if name else {}
    if grids:
        notes[POSITION_GRIDS] = json.dumps(grids)
    if conversion is not None:  # a callable, such as a feature map, becomes a text that reading refuses
        notes[CONVERSION] = json.dumps(conversion, default=repr)
    return notes


def read_position_grids(metadata: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return the grids of position embeddings in the metadata, by parameter name; empty if there are none."""
    try:
        noted = parse_json(metadata.get(POSITION_GRIDS, "{}"))
        return {str(name): (int(height), int(width)) for name, (height, width) in noted.items()}
    except (ValueError, TypeError, AttributeError, OverflowError):  # written by another program
        return {}


def _fit(
    model: nn.Module, file: Checkpoint, strict: bool, reinitialize_head: bool | None
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Return the weights to load, by the model's names, and the differences that `strict=False` accepts.

    `reinitialize_head` is None if the caller does not offer it.
    """
    weights = file.weights
    if convert := getattr(model, "convert_state_dict", None):
        noted = read_position_grids(file.metadata)
        try:
            weights = convert(weights, noted) if _position_grids(model) else convert(weights)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {error}") from error
        _warn_of_unknown_grids(model, file, weights, noted)
    else:
        weights = _with_resampled_positions(model, weights)
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

    of_model = f" ({file.metadata['model']})" if "model" in file.metadata else ""
    lines = [f"{file.path}{of_model} does not fit {type(model).__name__}; the model is unchanged"]
    differing = [f"{name} (file {_describe(weights[name])}, model {_describe(own[name])})" for name in mismatched]
    listed = {"missing in the file": missing, "unknown to the model": unexpected, "of another shape or kind": differing}
    lines += [f"{len(names)} {what}: {some_of(names)}" for what, names in listed.items() if names]
    is_about_heads = all(name.startswith(heads) for name in (*missing, *unexpected, *mismatched))
    classes = number_of_classes(weights, model), number_of_classes(own, model)
    if is_about_heads or None not in classes:  # with other names, a head cannot be recognized
        lines += _head_advice(*classes, can_reinitialize=reinitialize_head is not None)
    if CONVERSION in file.metadata:
        lines.append(f"the file is of a model after convert_attention: {printable(file.metadata[CONVERSION])[:200]}")
    elif not convert and not _is_converted(model) and any(".residual." in name for name in unexpected):  # 3×3 term
        lines.append(
            "the file seems to be of a model after convert_attention, without a note of it: call convert_attention "
            "before loading, and save with inline_attention.models.hub.save_pretrained"
        )
    if not is_about_heads:
        lines.append("create the model that the file was made for, with its name, image size and options")
    shapes = [(name, tuple(weights[name].shape), tuple(own[name].shape)) for name in mismatched]
    raise CheckpointMismatchError("\n  ".join(lines), missing, unexpected, shapes)


def _with_resampled_positions(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the position embeddings of a square grid on the grid of a vision transformer of timm."""
    found, square = weights.get("pos_embed"), _square_of_positions(model, weights)
    vit: Any = model
    if found is None or square is None or found.shape[1:] == vit.pos_embed.shape[1:]:
        return weights
    side, prefix = square
    resampled = resample_abs_pos_embed(found, list(vit.patch_embed.grid_size), [side, side], num_prefix_tokens=prefix)
    return {**weights, "pos_embed": resampled.contiguous()}


def _square_of_positions(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Return the side of the square grid of positions in the weights, and the number of positions that are in no grid.

    None if the model is no vision transformer of timm, or the grid is not square.
    """
    own, found = getattr(model, "pos_embed", None), weights.get("pos_embed")
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if not isinstance(own, Tensor) or found is None or grid is None or found.dim() != 3 or own.dim() != 3:
        return None
    prefix = own.shape[1] - grid[0] * grid[1]  # class and register tokens that have positions
    side = math.isqrt(max(found.shape[1] - prefix, 0))
    is_square = prefix >= 0 < side and side**2 == found.shape[1] - prefix
    return (side, prefix) if is_square and found.is_floating_point() else None


def image_side_of(weights: Mapping[str, Tensor], model: nn.Module) -> int | None:
    """Return the side of the square images that weights were trained on, by their patches and positions.

    None if the model is no vision transformer of timm with such positions.
    """
    square, patches = _square_of_positions(model, weights), weights.get("patch_embed.proj.weight")
    return None if square is None or patches is None or patches.dim() != 4 else square[0] * patches.shape[-1]


def _is_converted(model: nn.Module) -> bool:
    return any(isinstance(module, KernelAttention) for module in model.modules())


def _head_advice(in_file: int | None, in_model: int | None, *, can_reinitialize: bool) -> list[str]:
    if in_file == in_model:
        return []
    heads = f"a head for {in_file} classes, the model {f'one for {in_model}' if in_model else 'none'}"
    if in_file is None:
        heads, in_file = f"no head, the model one for {in_model} classes", 0
    flag = f" (--num-classes {in_file} on the command line)"
    other = ", or pass reinitialize_head=True" if can_reinitialize else flag
    return [f"the file has {heads}: create the model with num_classes={in_file}{other}"]


def _config(model: object) -> Mapping[str, Any]:
    return getattr(model, "pretrained_cfg", None) or {}


def _heads(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the classifier's parameter names."""
    classifier = _config(model).get("classifier") or "head"
    return tuple(f"{head}." for head in ([classifier] if isinstance(classifier, str) else classifier))


def _position_grids(model: object) -> Mapping[str, tuple[int, int]]:
    return getattr(model, "position_grids", None) or {}


def _warn_of_unknown_grids(
    model: nn.Module, file: Checkpoint, weights: Mapping[str, Tensor], noted: Mapping[str, tuple[int, int]]
) -> None:
    """Warn about positions that were loaded unchanged although their grid may have another shape."""
    as_they_are = {id(value) for value in file.weights.values()}
    doubtful = [
        f"{name} ({height}×{width})"
        for name, (height, width) in _position_grids(model).items()
        if height != width and name not in noted and name in weights and id(weights[name]) in as_they_are
    ]
    if doubtful:
        warnings.warn(
            f"{printable(file.path)} does not say which grids its positions have; the model's are assumed: "
            f"{some_of(doubtful)}",
            stacklevel=4,
        )


def _warn_of_nonfinite(path: Path, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    names = tuple(name for name, value in weights.items() if not torch.isfinite(value).all())
    if names:
        message = f"{path} has NaN or infinite values in {some_of(names)}; they are kept"
        warnings.warn(printable(message), stacklevel=3)
    return names


def _describe(value: Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
