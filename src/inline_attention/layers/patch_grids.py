"""The token grid of one call of a converted model.

timm's blocks pass tokens `[B, N, C]` and nothing else to their attention, so the grid travels in two other places.
While a call runs, a table of the running thread holds the grid that `patch_embed` returned. Each module on the way to
an attention also marks the memory of its tokens with the grid: gradient checkpointing keeps that memory and runs the
module again during the backward pass, in another thread or after other calls, where the table knows nothing about it.

Where neither place knows the grid and the images may have any size, an error says so; a guess could be wrong silently.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from inline_attention.ops.tracing import plain_sizes

GridSize: TypeAlias = tuple[int, int]

_MARK = "_inline_attention_grids"
_MODEL = 0  # place of the model itself; modules inside have places from 1
_NOT_ENTERED = -1
_NO_BACKWARD = -1  # torch's number for no backward pass
_numbers = itertools.count()


class _Entry(NamedTuple):
    """The grid of a running call; None before `patch_embed` has run.

    `place` is the module that removes the entry when it returns, or _NOT_ENTERED if `patch_embed` was called on its
    own. Such an entry stays until the last attention has run, or a module has failed. `outer` is restored at the end.
    """

    grid_size: GridSize | None
    place: int
    backward_pass: int
    outer: _Entry | None = None

    def is_of_same_call(self, inner: _Entry) -> bool:
        """True for the entry of a `patch_embed` called on its own, if `inner` is a module called after it."""
        return self.place == _NOT_ENTERED and self.backward_pass == inner.backward_pass


class _RunningCalls(threading.local):
    """The calls that run in a thread, by the number of their `PatchGrid`."""

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}


_running = _RunningCalls()


class PatchGrid:
    """Tells the attentions of a model on which grid the patches of the current call lie.

    Copies and pickles follow the model: a copied `PatchGrid` belongs to the copied `patch_embed` alone.
    """

    def __init__(self, patch_embed: nn.Module) -> None:
        self.patch_embed = patch_embed
        self.number = next(_numbers)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.number = next(_numbers)

    @property
    def is_fixed(self) -> bool:
        """True if `patch_embed` accepts one image size only, as timm's does unless `dynamic_img_size` is set."""
        return self.native is not None and bool(getattr(self.patch_embed, "strict_img_size", False))

    @property
    def native(self) -> GridSize | None:
        """The grid of the image size that is set."""
        return cast("GridSize | None", getattr(self.patch_embed, "grid_size", None))

    def install(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Register the hooks that follow a call of `model`, the owner of `patch_embed`.

        `modules` lead to its attentions, outermost first.
        """
        if self.is_fixed:
            return
        model.register_forward_pre_hook(self._enter_model)
        model.register_forward_hook(partial(self._leave, _MODEL), always_call=True)
        self.patch_embed.register_forward_hook(self._announce)
        modules = list(modules)
        for place, module in enumerate(modules, start=_MODEL + 1):
            is_last = any(inner is modules[-1] for inner in module.modules())
            module.register_forward_pre_hook(partial(self._enter, place), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, place, is_last=is_last), always_call=True)

    def current(self, tokens: Tensor | None = None) -> GridSize | None:
        """Return the grid of the running call, or the native one for a call that starts inside the model.

        `tokens` `[B, N, C]` are the input of an attention, if at hand. An error says that the grid is not known.
        """
        if self.is_fixed:
            return self.native
        entry = _running.entries.get(self.number)
        if torch.compiler.is_compiling():
            may_be_recomputed = torch.is_grad_enabled()  # a compiled module may itself be checkpointed
        else:
            backward_pass = _eager_backward_pass()
            if entry is None or entry.backward_pass != backward_pass:
                # `forward` of the attention may be called without its hooks.
                marked = _marked(tokens, self.number)
                entry = None if marked is None else _Entry(marked, _NOT_ENTERED, backward_pass)
            may_be_recomputed = backward_pass != _NO_BACKWARD
        if entry is not None and entry.grid_size is not None:
            return entry.grid_size
        if may_be_recomputed or isinstance(self.patch_embed, nn.Conv2d):  # a convolution takes images of any size
            raise ValueError(
                "the token grid of this call is not known: its patch_embed did not run before, or gradient "
                "checkpointing runs a part of the model again that is no module; checkpoint and compile whole modules "
                "of the model (model.set_grad_checkpointing(), torch.compile(model)), or convert with "
                "local_residual=False"
            )
        return self.native

    def _enter_model(self, *_: Any) -> None:
        """Start a call, whose grid is not known yet (forward pre-hook of the model)."""
        backward_pass = _NO_BACKWARD if torch.compiler.is_compiling() else _eager_backward_pass()
        _running.entries[self.number] = _Entry(None, _MODEL, backward_pass)

    def _announce(self, _module: nn.Module, _args: Any, patches: Tensor) -> None:
        """Note the grid of the call (forward hook of `patch_embed`)."""
        size = _grid_of(patches, 2 if isinstance(self.patch_embed, nn.Conv2d) else 1, self.native)
        entry = _running.entries.get(self.number)
        place = _MODEL if entry is not None and entry.place == _MODEL else _NOT_ENTERED
        backward_pass = _NO_BACKWARD if torch.compiler.is_compiling() else _eager_backward_pass()
        _running.entries[self.number] = _Entry(size, place, backward_pass)

    def _enter(self, place: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the grid of a module's tokens and mark them with it (forward pre-hook)."""
        if torch.compiler.is_compiling():
            return  # the graph holds the grid, and the compiler recomputes from the graph
        backward_pass = _eager_backward_pass()
        entry = outer = _running.entries.get(self.number)
        if entry is not None and entry.backward_pass != backward_pass:
            entry = None
        tokens = args[0] if args else kwargs.get("x", kwargs.get("hidden_states"))
        size = _marked(tokens, self.number) or (None if entry is None else entry.grid_size)
        if size is None:
            return
        _mark(tokens, self.number, size)
        is_known = entry is not None and (entry.grid_size is size or entry.grid_size == size)  # torch.fx needs `is`
        if entry is None or entry.place == _NOT_ENTERED or not is_known:
            _running.entries[self.number] = _Entry(size, place, backward_pass, outer)

    def _leave(self, place: int, _module: nn.Module, _args: Any, output: Any, is_last: bool = True) -> None:
        """Mark the output, and remove the entry that this module made (forward hook, called after errors too)."""
        entry = _running.entries.get(self.number)
        if entry is None:
            return
        if place != _MODEL and entry.grid_size is not None and not torch.compiler.is_compiling():
            _mark(output, self.number, entry.grid_size)
        if entry.place != place:
            return
        has_ended = is_last or output is None  # None after an error
        if entry.outer is None or (has_ended and entry.outer.is_of_same_call(entry)):
            del _running.entries[self.number]
        else:
            _running.entries[self.number] = entry.outer


@torch.fx.wrap  # a graph of torch.fx takes the grid of each call from its patches
def _grid_of(patches: Tensor, first: int, native: GridSize | None) -> GridSize | None:
    """Return the grid of patches, whose rows are dimension `first` if they are a map.

    They are `[B, h, w, C]` of images of any size, `[B, N, C]` of images of the native size; a convolution's are
    `[B, C, h, w]`.
    """
    return plain_sizes((patches.shape[first], patches.shape[first + 1])) if patches.dim() == 4 else native


def _eager_backward_pass() -> int:
    """Number of the backward pass that runs in this thread. Not for compiled code, which is never recomputed here."""
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def _marks(tokens: Any) -> dict[tuple[Any, ...], GridSize] | None:
    """The marks on a tensor's memory; None where memory cannot be reached, as inside `torch.func` transforms."""
    if type(tokens) not in (Tensor, nn.Parameter):
        return None
    try:
        storage: Any = tokens.untyped_storage()
    except RuntimeError:
        return None
    return storage.__dict__.setdefault(_MARK, {})


def _mark(tokens: Any, number: int, grid_size: GridSize) -> None:
    marks = _marks(tokens)
    if marks is not None:
        marks[number, tokens.storage_offset(), tokens.shape] = grid_size


def _marked(tokens: Any, number: int) -> GridSize | None:
    marks = _marks(tokens)
    return None if not marks else marks.get((number, tokens.storage_offset(), tokens.shape))
