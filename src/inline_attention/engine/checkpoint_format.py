"""A training checkpoint: a folder of weights, state and a manifest with their checksums.

    model.safetensors      the weights, as `inline_attention.models.checkpoints` writes and reads them
    model_ema.safetensors  their moving average, where there is one
    state.pt               plain data: optimizer, schedule, random states, positions, counters
    manifest.json          which step this is, and size and SHA-256 of every file above

The manifest is written last and holds a checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import re
import stat
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inline_attention.models.checkpoints import CheckpointError, open_checkpoint, save_weights
from inline_attention.models.hub_layout import WEIGHTS
from inline_attention.models.reading import EMA_WEIGHTS, Checkpoint, UnsafeCheckpointError, check_pickle_file
from inline_attention.support.files import (
    follow_pointer,
    open_regular,
    read_bounded,
    replace_atomically,
    write_atomically,
)
from inline_attention.support.text import printable
from inline_attention.support.untrusted import parse_json

FORMAT = 1
STATE, MANIFEST = "state.pt", "manifest.json"
USE_ANOTHER = "use another checkpoint"
LARGEST_MANIFEST = 1 << 20  # bytes
LARGEST_NUMBER = 2**53  # of steps, epochs, bytes
LONGEST_MODEL_NAME = 200
# Plain data can be read back without running code.
SCALARS = (type(None), bool, int, float, str, bytes)
MAPPINGS = (dict, OrderedDict, Counter)  # Counter: torch's MultiStepLR keeps its milestones in one
SEQUENCES = (list, tuple, set)
DEEPEST = 100


@dataclass(frozen=True)
class LoadedCheckpoint(Checkpoint):
    """The file of weights, the averaged weights if there are any, and the state, on the CPU."""

    ema_weights: dict[str, Tensor] | None = None
    state: dict[str, Any] = field(default_factory=dict)


class StoredFile(NamedTuple):
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class TrainingCheckpoint:
    """What a checkpoint's manifest says. `verify` compares the files with it.

    `step` is the number of updates. The newest checkpoint has the highest `sequence`, whatever its step. `metric` may
    be NaN, and is None if it was not evaluated. `model` is the registered name, empty if there is none.
    """

    path: Path
    sequence: int
    step: int
    epoch: int
    metric: float | None
    model: str
    files: Mapping[str, StoredFile]

    def damage(self, *, contents: bool = True) -> str | None:
        """Return what is wrong with the first file whose size or, unless told otherwise, contents differ; or None."""
        for name, stored in self.files.items():
            path = self.path / name
            try:
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode):
                    return f"{path} is a link or not a regular file, expected a file; {USE_ANOTHER}"
                if found.st_size != stored.size:
                    return f"{path} is damaged: it has {found.st_size} bytes, expected {stored.size}; {USE_ANOTHER}"
                if contents and _checksum(path) != stored.sha256:
                    return f"{path} is damaged: its contents do not match its checksum; {USE_ANOTHER}"
            except OSError as error:
                return f"{path} cannot be read ({error.strerror}); {USE_ANOTHER}"
        return None

    def verify(self) -> None:
        """Raise `CheckpointError` if a file is damaged."""
        if (reason := self.damage()) is not None:
            raise CheckpointError(reason)

    def load(self) -> LoadedCheckpoint:
        """Verify and read all files. Nothing in them is run: code is an `UnsafeCheckpointError`."""
        self.verify()
        file = open_checkpoint(self.path / WEIGHTS)
        ema_weights = open_checkpoint(self.path / EMA_WEIGHTS).weights if EMA_WEIGHTS in self.files else None
        return LoadedCheckpoint(**vars(file), ema_weights=ema_weights, state=_read_state(self.path / STATE))


def evaluated_weights(checkpoint: Path) -> Path | None:
    """Return the file of weights that metrics are of: the averaged weights if the checkpoint has them; None if none."""
    folder = follow_pointer(checkpoint)
    return next((folder / name for name in (EMA_WEIGHTS, WEIGHTS) if (folder / name).is_file()), None)


def write_training_checkpoint(
    folder: Path,
    *,
    sequence: int,
    step: int,
    epoch: int,
    metric: float | None,
    weights: Mapping[str, Tensor],
    ema_weights: Mapping[str, Tensor] | None,
    state: Mapping[str, Any],
    metadata: Mapping[str, str],
) -> None:
    """Write a checkpoint to a new, empty folder and flush it to disk. `state` is plain data."""
    save_weights(weights, folder / WEIGHTS, metadata=metadata)
    if ema_weights is not None:
        save_weights(ema_weights, folder / EMA_WEIGHTS, metadata=metadata)
    # To an open file: torch's own writer would hide the errors of the file system.
    with replace_atomically(folder / STATE) as temporary, temporary.open("xb") as file:
        torch.save(state, file)
    content = {
        "format": FORMAT,
        "model": metadata.get("model", ""),
        "sequence": sequence,
        "step": step,
        "epoch": epoch,
        # JSON has no NaN and no infinities
        "metric": metric if metric is None or math.isfinite(metric) else str(metric),
        "files": {
            path.name: StoredFile(path.stat().st_size, _checksum(path))._asdict() for path in sorted(folder.iterdir())
        },
    }
    write_atomically(folder / MANIFEST, _render(content))


def open_training_checkpoint(path: str | os.PathLike[str]) -> TrainingCheckpoint:
    """Read and check the manifest of a checkpoint, a folder or a pointer such as `checkpoints/last`."""
    folder = follow_pointer(Path(path), links=True)
    try:
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a link to {os.readlink(folder)}; name the checkpoint's own folder")
        raw = read_bounded(folder / MANIFEST, LARGEST_MANIFEST)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"{folder} is no complete checkpoint: {MANIFEST} cannot be read ({reason})"
        raise CheckpointError(f"{message}; {USE_ANOTHER}") from error
    try:
        content = parse_json(raw)
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{folder} has the format {content['format']}, expected {FORMAT} or less; "
                "install the version of inline-attention that wrote it, or a later one"
            )
        # Rendered again and compared to the byte, so that no alteration passes, be it in white space.
        if _render({name: value for name, value in content.items() if name != "sha256"}) != raw:
            raise ValueError("its contents do not match its checksum")
        return _described(folder, content)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error}); {USE_ANOTHER}") from error


def _described(folder: Path, content: Mapping[str, Any]) -> TrainingCheckpoint:
    """Return what a manifest says. Its checksum is no proof: a stranger can compute one too."""
    sequence, step, epoch = (_whole_number(name, content[name]) for name in ("sequence", "step", "epoch"))
    files = {name: StoredFile(**described) for name, described in content["files"].items()}
    for name, stored in files.items():
        if name not in (WEIGHTS, EMA_WEIGHTS, STATE):
            raise ValueError(f"it names the file {printable(name)!r}")
        _whole_number(f"size of {name}", stored.size)
        if not isinstance(stored.sha256, str) or not re.fullmatch("[0-9a-f]{64}", stored.sha256):
            raise ValueError(f"the checksum of {name} is none")
    if not files.keys() >= {WEIGHTS, STATE}:
        raise ValueError(f"it must name {WEIGHTS} and {STATE}")
    metric, model = content["metric"], content["model"]
    if metric is not None:
        if type(metric) not in (int, float) and metric not in ("nan", "inf", "-inf"):
            raise ValueError(f"metric must be a number, got {printable(metric)[:40]!r}")
        metric = float(metric)
    if not isinstance(model, str) or len(model) > LONGEST_MODEL_NAME or printable(model) != model:
        raise ValueError("model must be a short name")
    return TrainingCheckpoint(folder, sequence, step, epoch, metric, model, files)


def _whole_number(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_NUMBER:
        raise ValueError(f"{name} must be a whole number from 0 to 2^53, got {printable(value)[:40]}")
    return value


def _render(content: Mapping[str, Any]) -> bytes:
    """Return JSON with a checksum of itself."""
    checksum = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": checksum}, indent=2) + "\n").encode()


def _checksum(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_state(path: Path) -> dict[str, Any]:
    try:
        check_pickle_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError:  # torch's own message advises to switch the protection off
        message = f"{path} asks for more than plain data, which this library never writes"
        raise UnsafeCheckpointError(f"{message}; nothing in it was run; {USE_ANOTHER}") from None
    except Exception as error:  # a damaged file can fail anywhere
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read as a training's state ({reason}); {USE_ANOTHER}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, expected a dict; {USE_ANOTHER}")
    for tensor in tensors_in(state):
        # A view can claim any size: with strides of zero, a copy of it would not fit into any memory.
        if tensor.layout is not torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path} holds a tensor that is larger than its data; {USE_ANOTHER}")
    return state


def plain_copy(value: Any, name: str, depth: int = 0) -> Any:
    """Copy containers and scalars, with tensors detached and on the CPU. CPU tensors share their memory.

    Anything else is a TypeError that says where it is, as in `name['optimizer']['lr']`. Types must match exactly: a
    NumPy number that is a `float` could not be read back.
    """
    kind = type(value)
    if depth > DEEPEST:
        raise TypeError(f"{name[:200]}… is nested more than {DEEPEST} deep; does it contain itself?")
    if kind in SCALARS:
        return value
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta:
        return value.detach().cpu()
    if kind in MAPPINGS:
        keys = [plain_copy(key, f"the key {key!r} of {name}", depth + 1) for key in value]
        items = [plain_copy(item, f"{name}[{key!r}]", depth + 1) for key, item in value.items()]
        return kind(dict(zip(keys, items, strict=True)))
    if kind in SEQUENCES:
        return kind([plain_copy(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value)])
    described = f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a ")
    if isinstance(value, Tensor):
        described += f" ({value.layout}, {value.device})"
    raise TypeError(
        f"{name} is {described}, expected None, a number, a string, a dense torch.Tensor, or a dict, list, tuple or "
        "set of these; convert it, as with .item(), .tolist(), torch.from_numpy() or .full_tensor(), or leave it out"
    )


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in plain data. Shared memory counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_in(value)}
    return sum(storages.values())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in plain data."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (*MAPPINGS, *SEQUENCES)):
        for item in value.values() if isinstance(value, MAPPINGS) else value:
            yield from tensors_in(item)
