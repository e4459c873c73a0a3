"""The checkpoints of a run: written atomically, verified, the newest and the best kept."""

from __future__ import annotations

import errno
import logging
import math
import operator
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from inline_attention.engine.checkpoint_format import (
    TrainingCheckpoint,
    open_training_checkpoint,
    plain_copy,
    tensor_bytes,
    write_training_checkpoint,
)
from inline_attention.models.checkpoints import CheckpointError
from inline_attention.support.files import (
    exclusive,
    free_bytes,
    point_to,
    remove_folder,
    remove_unfinished,
    sync_folder,
    unfinished,
)
from inline_attention.support.text import printable

LAST, BEST = "last", "best"
HEADROOM = 1 << 20  # bytes beside those of the tensors: names, numbers, the manifest
logger = logging.getLogger(__name__)


class CheckpointWriteError(CheckpointError):
    """A checkpoint of about `needed` bytes could not be written. Earlier ones are unchanged."""

    def __init__(self, message: str, needed: int = 0, free: int | None = None):
        super().__init__(message)
        self.needed, self.free = needed, free


class CheckpointStore:
    """A folder of checkpoints, `step-00001234` and so on, with the pointers `last` and `best` to two of them.

    A process killed during a save leaves the earlier checkpoints, or these and a complete new one. The pointers are
    for users, and links if the file system has them; the manifests decide. Several ranks may read, one writes.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep_last: int = 2, keep_best: int = 1, higher_is_better: bool = True
    ):
        """Set up for a folder such as `RUN/checkpoints`, which the first save creates."""
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last must be at least 1 and keep_best at least 0, got {keep_last=}, {keep_best=}")
        self.folder = Path(folder)
        self.keep_last, self.keep_best, self.higher_is_better = keep_last, keep_best, higher_is_better

    def save(
        self,
        *,
        step: int,
        epoch: int,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Any],
        ema_weights: Mapping[str, Tensor] | None = None,
        metric: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> TrainingCheckpoint:
        """Write a checkpoint, then remove those that need not be kept.

        A checkpoint of the same step is replaced. Other processes that save to this folder wait. Weights are state
        dicts, and lose the name prefixes of DDP and `torch.compile`. `state` is plain data. A metric that is not finite
        never counts as best.

        Raises:
            CheckpointWriteError: If the disk is full, read-only or broken.
            TypeError: If the state contains anything but plain data. The message says where.
        """
        contents = {
            "step": operator.index(step),  # these three may come as NumPy numbers or tensors
            "epoch": operator.index(epoch),
            "metric": None if metric is None else float(metric),
            "weights": weights,
            "ema_weights": ema_weights,
            "state": plain_copy(dict(state), "state"),
            "metadata": metadata or {},
        }
        tensors = [*weights.values(), *(ema_weights or {}).values()]  # each is written, even if memory is shared
        needed = HEADROOM + tensor_bytes(contents["state"])
        needed += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        outer = sys.exception()  # an error that is being handled during this save is not its own
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with exclusive(self.folder) as alone:
                if alone:
                    remove_unfinished(self.folder)
                free = free_bytes(self.folder)
                if free is not None and free < needed:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                earlier = self._readable()
                saved = self._write(1 + max((checkpoint.sequence for checkpoint in earlier), default=0), contents)
                self._tidy(saved, earlier)
        except Exception as error:
            reason = _disk_trouble(error, outer)
            if reason is None:
                raise
            free = free_bytes(self.folder)
            raise CheckpointWriteError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {reason}. "
                f"It needs {_megabytes(needed)}, {_megabytes(free)} are free. Checkpoints from before are as they "
                "were. Free some space, keep fewer checkpoints, or check that the folder is writable",
                needed,
                free,
            ) from error
        return saved

    def latest_valid(self) -> TrainingCheckpoint | None:
        """Return the newest intact checkpoint, or None. Damaged ones are named in the log."""
        return _first_valid(_newest_first(self._readable(report=True)))

    def best(self) -> TrainingCheckpoint | None:
        """Return the intact checkpoint with the best finite metric, or None. Damaged ones are named in the log."""
        return _first_valid(self._best_first(self._readable(report=True)))

    def names(self) -> list[str]:
        """Return the names of all checkpoints, intact or not."""
        return [path.name for path in self._folders()]

    def _write(self, sequence: int, contents: Mapping[str, Any]) -> TrainingCheckpoint:
        final = self.folder / f"step-{contents['step']:08d}"
        temporary = unfinished(final)
        temporary.mkdir()
        try:
            write_training_checkpoint(temporary, sequence=sequence, **contents)
            path = _rename_to_free_name(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(self.folder)
        return open_training_checkpoint(path)

    def _tidy(self, saved: TrainingCheckpoint, earlier: Iterable[TrainingCheckpoint]) -> None:
        """Update the pointers and remove old checkpoints. A failure does not stop training.

        Damaged checkpoints stay until their step is saved again, as parts of them may be rescued.
        """
        with _only_warning(saved):
            same_step = re.compile(rf"step-0*{saved.step}(-.*)?")
            replaced = {path for path in self._folders() if same_step.fullmatch(path.name) and not path.is_symlink()}
            replaced -= {saved.path}
            complete = [checkpoint for checkpoint in (*earlier, saved) if checkpoint.damage(contents=False) is None]
            current = [checkpoint for checkpoint in complete if checkpoint.path not in replaced]
            best = self._best_first(current)[: self.keep_best]
            kept = {checkpoint.path for checkpoint in (*_newest_first(current)[: self.keep_last], *best)}
            for pointer, checkpoints in ((LAST, [saved]), (BEST, best)):
                with _only_warning(saved):
                    point_to(self.folder / pointer, checkpoints[0].path.name if checkpoints else None)
            for path in replaced | {checkpoint.path for checkpoint in complete} - kept:
                with _only_warning(saved):
                    remove_folder(path)

    def _folders(self) -> list[Path]:
        """Checkpoints, and links in their place, which `open_training_checkpoint` refuses."""
        try:
            with os.scandir(self.folder) as entries:
                return [
                    self.folder / entry.name
                    for entry in entries
                    if entry.name.startswith("step-") and (entry.is_symlink() or entry.is_dir())
                ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read ({error.strerror})") from error

    def _readable(self, report: bool = False) -> list[TrainingCheckpoint]:
        """Return all checkpoints with an intact manifest; optionally log the others."""
        checkpoints: list[TrainingCheckpoint] = []
        for path in self._folders():
            try:
                if path.is_symlink():  # the pointers `last` and `best` have other names
                    raise CheckpointError(f"{path} is a link to {os.readlink(path)}, expected a folder")
                checkpoints.append(open_training_checkpoint(path))
            except CheckpointError as error:
                if report:
                    logger.warning("skipped a checkpoint: %s", printable(error))
        return checkpoints

    def _best_first(self, checkpoints: Iterable[TrainingCheckpoint]) -> list[TrainingCheckpoint]:
        """Return those with a finite metric; of equals, the earlier first."""
        sign = -1 if self.higher_is_better else 1
        measured = [(checkpoint.metric, checkpoint) for checkpoint in _newest_first(checkpoints)[::-1]]
        finite = [(sign * metric, each) for metric, each in measured if metric is not None and math.isfinite(metric)]
        return [checkpoint for _, checkpoint in sorted(finite, key=operator.itemgetter(0))]


def _newest_first(checkpoints: Iterable[TrainingCheckpoint]) -> list[TrainingCheckpoint]:
    # Not by step: a run that was resumed from an older checkpoint continues from there after a stop, too.
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.sequence, reverse=True)


def _first_valid(checkpoints: Iterable[TrainingCheckpoint]) -> TrainingCheckpoint | None:
    for checkpoint in checkpoints:
        if (reason := checkpoint.damage()) is None:
            return checkpoint
        logger.warning("skipped a checkpoint: %s", printable(reason))
    return None


def _rename_to_free_name(source: Path, target: Path) -> Path:
    """Rename a folder to `target`, or to `target-2` and so on if that exists."""
    for number in count(1):
        free = target if number == 1 else target.with_name(f"{target.name}-{number}")
        try:
            if not os.path.lexists(free):
                return source.rename(free)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    raise AssertionError("count never ends")


@contextmanager
def _only_warning(saved: TrainingCheckpoint) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointError) as error:
        message = f"{saved.path} was saved, but what is beside it could not be tidied up: {error}"
        logger.warning("%s", printable(message))


def _disk_trouble(error: BaseException, outer: BaseException | None) -> str | None:
    """Return the file system's message behind an error of torch or safetensors; None if there is none.

    The search through its causes ends at `outer`, an error that was being handled before.
    """
    link: BaseException | None = error
    while link is not None and link is not outer:
        if isinstance(link, OSError):
            return link.strerror or str(link)
        if isinstance(link, SafetensorError):
            return str(link)
        link = link.__cause__ or link.__context__
    return None


def _megabytes(size: int | None) -> str:
    return "an unknown number of MB" if size is None else f"{size / 1e6:,.1f} MB"
