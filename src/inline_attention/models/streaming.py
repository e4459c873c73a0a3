"""Run a model over an image that does not fit into memory, one band of rows at a time. The result is that of the model.

Tokens are stored on the device if they fit, else in host memory, else in a temporary file. An InLine layer needs one
pass over them: keys and values reach a query only through their state (`ops/states.py`), which the pass before has
accumulated, and the 3×3 term needs one more row above and below a band. Bands are aligned to windows and stripes.

Shapes: `h`×`w` token grid, `N` = h·w, `C` channels, `P` prefix tokens, `H` heads, `n` tokens of a band.
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from inline_attention.layers.attention import KernelAttention
from inline_attention.layers.block import Block
from inline_attention.layers.grids import Grid, GridRows, ceil_divide
from inline_attention.layers.window_attention import StripeAttention, WindowAttention
from inline_attention.models.base import Level, VisionModel
from inline_attention.models.timm_vit import StreamedViT, unsupported_reason
from inline_attention.ops import states
from inline_attention.support.files import free_bytes, replace_atomically
from inline_attention.support.memory import available_memory

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SHARE_FOR_TOKENS = 3 / 4  # of the memory, at most; the rest is for a band
SHARE_OF_HOST = 1 / 2  # of the available host memory, for tokens of a GPU
ASSUMED_HOST = 2**33  # bytes, where the system does not say what is available
STATES_AT_ONCE = 64  # states of bands to merge in one go
LARGEST_BAND_ON_CPU = 2**27  # bytes
ZEROS = bytes(2**24)

Sink = Callable[[Tensor], None]  # takes tokens `[1, n, C]`: prefix tokens first if there are any, then bands in order


class PixelSource(Protocol):
    """An image that is read in rows."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        ...

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Return rows `[channels, stop - start, width]`: uint8, or normalized floating-point numbers."""
        ...


class TokenMaps(NamedTuple):
    """The weights of tokens for all tokens of the grid, averaged over squares of cells."""

    grid_size: tuple[int, int]
    cell: int  # tokens along a side of a square
    cell_pixels: int  # pixels of the image along a side of a square
    weights: Tensor  # [tokens, H, ceil(h / cell), ceil(w / cell)], times N + P: 1 is the uniform weight
    prefix_weights: Tensor  # [tokens, H, P], times N + P


class ClassEvidence(NamedTuple):
    """What the tokens of the grid say about classes, averaged over squares of cells."""

    cell_pixels: int  # pixels of the image along a side of a square
    values: Tensor  # [classes, ceil(h / cell), ceil(w / cell)]
    logits: Tensor  # [classes]


def streamed(
    model: nn.Module,
    memory: str | int = "4GiB",
    *,
    folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> StreamedModel:
    """Wrap a model for images that do not fit into memory: `streamed(model)(source)` gives `model(image)`.

    Args:
        model: A model of this library, or a VisionTransformer of timm (with converted attention, see
            `convert_attention`; softmax runs over all tokens at once), in evaluation mode, on the device that computes.
        memory: Memory to plan for tokens and bands on the device, besides the weights: bytes, or text such as "512MiB".
        folder: Folder for a temporary file of tokens that fit into no memory; the system's by default.
        on_progress: Called with the share of the work just done; shares sum to one.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose graph takes whole images
    if isinstance(model, VisionModel):
        view = model
    elif (reason := unsupported_reason(model)) is None:
        view = cast(VisionModel, StreamedViT(cast(Any, model)))
    else:
        raise ValueError(
            f"streamed takes models of inline_attention and timm's VisionTransformer, and cannot run this one: {reason}"
        )
    if model.training:
        raise ValueError("streamed takes a model in evaluation mode; call model.eval() first")
    return StreamedModel(view, parse_bytes(memory), folder, on_progress or (lambda _share: None))


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes, which may be text such as "4GiB", "512MB" or "2G" (all powers of 1024)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    number = 0 if match is None else int(float(match[1]) * UNITS[match[2].upper()])
    if number < 1:
        raise ValueError(f"expected an amount of memory such as 4GiB or 512MiB, got {text!r}")
    return number


@dataclass(frozen=True, eq=False)
class StreamedModel:
    """A model that takes images in rows. Made by `streamed`."""

    model: VisionModel
    memory: int  # bytes
    folder: str | os.PathLike[str] | None
    on_progress: Callable[[float], None]

    @property
    def blocks(self) -> list[Block]:
        """Blocks of the model, in order."""
        return [block for level in self.model.network() for block in level.blocks]

    def __call__(self, source: PixelSource | Tensor) -> Tensor:
        """Classify an image: a source, or a tensor `[channels, H, W]`. Returns logits `[1, num_classes]`."""
        model = self.model
        if model.global_pool == "":
            raise ValueError("the model has global_pool='' and no logits; write its features with write_features")
        reads_class_token = model.global_pool == "token"
        run = _Run(self, source, len(model.feature_info) - 1, prefix_only=reads_class_token)
        pooled = _Mean(model.norm)
        with torch.inference_mode():
            run.execute({} if reads_class_token else {run.last: [pooled.add]})
            features = [] if run.prefix is None else [model.norm(run.prefix)]
            if pooled.mean is not None:
                features.append(pooled.mean[:, None].to(run.dtype))
            return model.forward_head(torch.cat(features, dim=1))

    def write_features(
        self,
        source: PixelSource | Tensor,
        folder: str | os.PathLike[str],
        indices: int | list[int] | None = 1,
        *,
        norm: bool = False,
    ) -> list[Path]:
        """Write the features of levels as `level{index}.npy`, `[h, w, C]`; bfloat16 becomes float32.

        They are those of the model's `forward_intermediates`, without prefix tokens. Read them with
        `numpy.load(path, mmap_mode="r")`. Files appear when all are complete.

        Args:
            source: Image, see `__call__`.
            folder: Output folder; created if missing.
            indices: Levels, as in `forward_intermediates`: a list, the last n, or None for all.
            norm: Apply the final norm to levels with its number of channels.
        """
        information, count = self.model.feature_info, len(self.model.feature_info)
        try:
            take, last = feature_take_indices(count, indices)
        except (AssertionError, ValueError) as error:  # a level out of range, or an empty list
            raise ValueError(
                f"the model has {count} levels, 0 to {count - 1}, got indices={indices!r}; give a list of levels, "
                f"the number of last levels from 1 to {count}, or None for all"
            ) from error
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        run = _Run(self, source, last)
        paths = {level: folder / f"level{level}.npy" for level in take}
        shapes = {level: (*run.grids[level], information[level]["num_chs"]) for level in take}
        dtype = torch.float32 if run.dtype == torch.bfloat16 else run.dtype
        _check_space(folder, sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize)
        with ExitStack() as stack, torch.inference_mode():
            sinks: dict[int, list[Sink]] = {}
            for level, path in paths.items():
                file = stack.enter_context(stack.enter_context(replace_atomically(path)).open("wb"))
                final = self.model.norm if norm and shapes[level][2] == self.model.num_features else nn.Identity()
                sinks[level] = [_array_writer(file, folder, shapes[level], dtype, final)]
            run.execute(sinks)
        return list(paths.values())

    def grid_size(self, source: PixelSource | Tensor, layer: int) -> tuple[int, int]:
        """Return rows and columns of the tokens of an image in a block."""
        return _Run(self, source, self._find_block(layer)[1]).grids[-1]

    def attention_maps(
        self, source: PixelSource | Tensor, layer: int, tokens: Sequence[tuple[int, int] | None], most_cells: int = 512
    ) -> TokenMaps:
        """Return the weights of some tokens for all others, averaged to at most `most_cells` cells along a side.

        Args:
            source: Image, see `__call__`.
            layer: Number of the block, from 0; negative from the last. Its attention must be InLine's or linear.
            tokens: Row and column of each query token; None for the class token.
            most_cells: Largest side of the maps.
        """
        block, level = self._find_block(layer)
        run = _Run(self, source, level)
        with torch.inference_mode():
            run.execute({}, until=block)
            return run.token_maps(tokens, most_cells)

    def class_evidence(
        self, source: PixelSource | Tensor, classes: Sequence[int], most_cells: int = 512
    ) -> ClassEvidence:
        """Return the evidence of each token for some classes, averaged to at most `most_cells` cells along a side.

        With mean pooling, the evidence of a token is the head's output for its normalized features: its mean over all
        tokens is the logit. With a class token, it is the derivative of the logit by the value of the token in the last
        attention, times that value, times the number of tokens: its mean is the first-order effect of that attention.

        Args:
            source: Image, see `__call__`.
            classes: Numbers of the classes.
            most_cells: Largest side of the maps.
        """
        model, head = self.model, self.model.get_classifier()
        if not isinstance(head, nn.Linear) or model.global_pool == "":
            raise ValueError("class evidence needs a classifier with pooling; create the model with num_classes")
        if getattr(model, "norms_mean", False):
            raise ValueError("class evidence needs a linear head after the mean, and this model normalizes the mean")
        if unknown := [number for number in classes if not 0 <= number < model.num_classes]:
            raise ValueError(f"expected classes from 0 to {model.num_classes - 1}, got {unknown[0]}")
        weight, bias = head.weight[list(classes)], None if head.bias is None else head.bias[list(classes)]

        def classify(tokens: Tensor) -> Tensor:  # [1, n, C] → [classes, n]
            return F.linear(model.norm(tokens), weight, bias)[0].mT

        last, run = self.blocks[-1], _Run(self, source, len(model.feature_info) - 1)
        with torch.no_grad():
            if model.global_pool == "avg":
                pooled = _Mean(lambda tokens: classify(tokens).mT[None])
                run.execute({run.last: [pooled.add]})
                assert pooled.mean is not None
                values, pixels = run.cells(classify, last, 8 * len(classes), most_cells)
                return ClassEvidence(pixels, values, pooled.mean[0].cpu())
            if not isinstance(last.attn, KernelAttention):
                raise ValueError(
                    "class evidence of a class token needs linear-time attention in the last block, which has softmax; "
                    "convert it too, or train a model with global_pool=avg"
                )
            if last.attn.norm is not None or last.attn.gate is not None:
                raise ValueError("class evidence needs an attention that does not normalize or gate its output")
            run.execute({}, until=last)
            evidence, logits = run.value_path(classify)
            values, pixels = run.cells(evidence, last, 8 * len(classes) * last.attn.num_heads, most_cells)
            return ClassEvidence(pixels, values, logits.cpu())

    def _find_block(self, layer: int) -> tuple[Block, int]:
        """Return the block of a layer, which must have linear-time attention, and its level."""
        found = [(block, number) for number, level in enumerate(self.model.network()) for block in level.blocks]
        if not -len(found) <= layer < len(found):
            raise ValueError(f"the model has {len(found)} layers, 0 to {len(found) - 1}, got {layer}")
        linear = [str(index) for index, (block, _) in enumerate(found) if isinstance(block.attn, KernelAttention)]
        if str(layer % len(found)) not in linear:
            raise ValueError(
                f"layer {layer} has softmax attention, whose weights need quadratic memory; "
                + (f"choose one of the layers {', '.join(linear)}" if linear else "use an InLine model")
            )
        return found[layer]


class _Mean:
    """The mean of tokens over bands, in float32 at least."""

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        self.transform, self.count = transform, 0
        self.mean: Tensor | None = None  # [1, C]

    def add(self, x: Tensor) -> None:
        """Add tokens `[1, n, C]`."""
        tokens = self.transform(x)
        mean = tokens.mean(1, dtype=torch.promote_types(tokens.dtype, torch.float32))
        self.count += tokens.shape[1]
        self.mean = mean if self.mean is None else torch.lerp(self.mean, mean, tokens.shape[1] / self.count)


class _Summary:
    """What a block with linear attention needs to know about all of its input: the keys' state, and the mean token.

    `prefix` returns the input's prefix tokens. Their queries may attend by softmax, which is merged over bands, too.
    """

    def __init__(self, block: Block, prefix: Callable[[], Tensor | None]) -> None:
        assert isinstance(block.attn, KernelAttention)
        self.block, self.attention = block, block.attn
        self._prefix = prefix
        self._states: list[states.AttentionState] = []  # of bands
        self._softmax: list[states.SoftmaxState] = []  # of bands
        self.local_input = _Mean(nn.Identity())

    @cached_property
    def prefix_queries(self) -> Tensor | None:
        """Queries `[1, P, H, D]` that attend by softmax, if any."""
        prefix = self._prefix() if self.attention.has_softmax_prefix else None
        if prefix is None:
            return None
        return self.attention.prefix_queries(self.attention.project(self.block.norm1(prefix)).q)

    def add(self, x: Tensor) -> None:
        """Add input tokens `[1, n, C]` of the block."""
        normed = self.block.norm1(x)
        if self.attention.residual is not None:
            self.local_input.add(x if self.block.local_from_input else normed)
        call = self.attention.project(normed)
        self._states.append(states.attention_state(call.k, call.v, feature_map=self.attention.feature_map))
        if self.prefix_queries is not None:
            self._softmax.append(states.softmax_state(self.prefix_queries, call.k, call.v, scale=self.attention.scale))
        if len(self._states) == STATES_AT_ONCE:
            self._states, self._softmax = [self.state], [*filter(None, [self.softmax])]

    @property
    def state(self) -> states.AttentionState:
        """The state of all tokens that were added."""
        if len(self._states) > 1:
            self._states = [states.merge_states(*self._states)]
        return self._states[0]

    @property
    def softmax(self) -> states.SoftmaxState | None:
        """Softmax attention of the prefix tokens over all tokens that were added; None if they attend as others do."""
        if len(self._softmax) > 1:
            self._softmax = [states.merge_softmax_states(*self._softmax)]
        return self._softmax[0] if self._softmax else None

    def attend(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        """Mix tokens `[1, n, C]` of rows of the grid, or without `grid_size` the prefix tokens."""
        mean_token = x[:, 0] if self.local_input.mean is None else self.local_input.mean.to(x.dtype)
        prefix = self.softmax if grid_size is None else None
        return self.attention.attend_to(self.block.norm1(x), self.state, mean_token, grid_size, prefix)

    def weights(self, q: Tensor, x: Tensor, are_prefix: Sequence[bool]) -> Tensor:
        """Return the weights `[H, N, n]` of queries `[1, N, H, D]` for tokens `[1, n, C]`, times the number of keys.

        `are_prefix` says which queries are the class token's.
        """
        attention, state = self.attention, self.state
        k = attention.project(self.block.norm1(x)).k
        options: dict[str, Any] = {"feature_map": attention.feature_map, "normalization": attention.normalization}
        found = states.state_weights(q, k, state, scale=attention.scale, **options)[0]
        if self.softmax is not None and any(are_prefix):
            assert self.prefix_queries is not None
            first = self.softmax.weights(self.prefix_queries, k, attention.scale)[0, :, :1].to(found.dtype)
            found = torch.where(torch.tensor(are_prefix, device=found.device)[:, None], first, found)
        return found * state.key_count.to(found.dtype)


class _Tokens(NamedTuple):
    """Stored tokens of a grid."""

    data: Tensor  # [h, w, C], on the device, in host memory or in a file
    device: torch.device
    device_bytes: int  # memory that they take on the device

    def read(self, start: int, stop: int) -> Tensor:
        """Return rows as tokens `[1, n, C]` on the device; perhaps a view."""
        return self.data[start:stop].to(self.device, non_blocking=True).flatten(0, 1)[None]

    def write(self, start: int, tokens: Tensor) -> None:
        """Store tokens `[1, n, C]` of whole rows."""
        rows = torch.unflatten(tokens[0], 0, (-1, self.data.shape[1]))
        self.data[start : start + len(rows)].copy_(rows, non_blocking=True)


class _Step(NamedTuple):
    """An embedding or a block, in the order of the network."""

    level: int
    module: Level | Block
    ends_level: bool
    work: float  # multiply-adds per token, roughly


class _Run:
    """One run of a network over one image, up to level `last`. With `prefix_only`, it ends with the prefix tokens."""

    def __init__(
        self, owner: StreamedModel, source: PixelSource | Tensor, last: int, *, prefix_only: bool = False
    ) -> None:
        model = self.model = owner.model
        self.memory, self.folder, self.on_progress = owner.memory, owner.folder, owner.on_progress
        self.last, self.prefix_only = last, prefix_only
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        if not isinstance(source, Tensor) and not hasattr(source, "read_rows"):
            raise ValueError(
                f"expected a tensor [channels, H, W] or a source with size and read_rows, got {type(source).__name__}; "
                "open files with inline_attention.data.slides.open_slide, and use torch.as_tensor for arrays"
            )
        self.source: PixelSource = _TensorSource(source) if isinstance(source, Tensor) else source
        self.size = self.source.size
        config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
        self.statistics = [  # mean and standard deviation of pixels
            torch.tensor(config.get(name, default), device=self.device).view(1, -1, 1, 1)
            for name, default in (("mean", IMAGENET_DEFAULT_MEAN), ("std", IMAGENET_DEFAULT_STD))
        ]
        if min(self.size) < model.largest_stride:
            raise ValueError(
                f"images must be at least {model.largest_stride} pixels high and wide, got {self.size[0]}×"
                f"{self.size[1]}; enlarge the image, or choose a finer level of it"
            )
        self.grids: list[tuple[int, int]] = []
        self.steps: list[_Step] = []
        grid = Grid(*self.size)
        for number, level in enumerate(model.network()[: last + 1]):
            if level.embed is not None:
                grid = grid.coarser(level.stride)
                self.steps.append(_Step(number, level, False, level.stride**2 * _channels(level.blocks[0])))
            self.grids.append(grid.size)
            for block in level.blocks:
                work = 4 * _channels(block) ** 2 + 2 * _channels(block) * _hidden(block)
                self.steps.append(_Step(number, block, block is level.blocks[-1], work))
        self.least_bands = [0] * len(self.grids)  # of each level, with the embedding of the next one
        for step in self.steps:
            for level in {step.level, max(step.level - 1, 0)} if isinstance(step.module, Level) else {step.level}:
                self.least_bands[level] = max(self.least_bands[level], self._least_band(step))
        self.least_memory = max(self.least_bands)
        self.total_work = sum(step.work * math.prod(self.grids[step.level]) for step in self.steps)
        self.tokens: _Tokens | None = None  # after the steps so far
        self.prefix: Tensor | None = None  # [1, P, C]
        self.summary: _Summary | None = None  # of the input of the next step
        self.held = 0  # bytes of stored tokens on the device

    def execute(self, sinks: dict[int, list[Sink]], until: Block | None = None) -> None:
        """Run all steps, or those before a block, and hand the grid tokens of levels to sinks, in order."""
        if self.model.num_prefix_tokens:
            self.prefix = self.model.prefix_tokens()
        for index, step in enumerate(self.steps):
            if step.module is until:
                return
            following = None if index + 1 == len(self.steps) else self.steps[index + 1].module
            is_linear = isinstance(getattr(following, "attn", None), KernelAttention)
            summary = _Summary(cast(Block, following), lambda: self.prefix) if is_linear else None
            outputs = [*(sinks.get(step.level, ()) if step.ends_level else ()), *([summary.add] if summary else ())]
            if isinstance(step.module, Level):
                self._run_embedding(step.module, step.level, step.work, outputs)
            else:
                skip_grid = following is None and self.prefix_only
                self._run_block(step.module, step.level, step.work, outputs, skip_grid=skip_grid)
            if summary and self.prefix is not None:
                summary.add(self.prefix)
            self.summary = summary

    def token_maps(self, places: Sequence[tuple[int, int] | None], most_cells: int) -> TokenMaps:
        """Return the weights of tokens in the next block, see `StreamedModel.attention_maps`."""
        tokens, summary, prefix = self.tokens, self.summary, self.prefix
        assert tokens is not None
        assert summary is not None
        height, width, _ = tokens.data.shape
        attention = summary.attention

        def query(place: tuple[int, int] | None) -> Tensor:
            if place is None:
                if prefix is None:
                    raise ValueError("the model has no class token; give row and column of a token")
                return prefix[:, :1]
            row, column = place
            if not (0 <= row < height and 0 <= column < width):
                raise ValueError(f"token {row},{column} is outside the grid of {height}×{width} tokens")
            return tokens.read(row, row + 1)[:, column : column + 1]

        q = attention.project(summary.block.norm1(torch.cat([query(place) for place in places], dim=1))).q
        are_prefix = [place is None for place in places]

        def weights(x: Tensor) -> Tensor:  # [tokens, H, n]
            return summary.weights(q, x, are_prefix).transpose(0, 1)

        values, pixels = self.cells(weights, summary.block, 8 * len(places) * attention.num_heads, most_cells)
        prefix_weights = q.new_empty(len(places), attention.num_heads, 0) if prefix is None else weights(prefix)
        cell = ceil_divide(max(height, width), most_cells)
        return TokenMaps((height, width), cell, pixels, values, prefix_weights.cpu())

    def cells(
        self, values: Callable[[Tensor], Tensor], block: Block, extra: int, most_cells: int
    ) -> tuple[Tensor, int]:
        """Return means over squares of tokens `[..., rows, columns]`, and pixels along the side of a square.

        `values` maps tokens `[1, n, C]` to `[..., n]`, in the memory of a block and `extra` bytes for each token.
        """
        assert self.tokens is not None
        height, width, _ = self.tokens.data.shape
        cell = ceil_divide(max(height, width), most_cells)
        cells = [
            F.avg_pool2d(torch.unflatten(values(x), -1, (-1, width)), cell, ceil_mode=True)
            for _, _, _, x in self._rows(self.tokens, 0, self._block_bytes(block) + extra, align=cell)
        ]
        return torch.cat(cells, dim=-2).cpu(), cell * self.model.feature_info[self.last]["reduction"]

    def value_path(self, classify: Callable[[Tensor], Tensor]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Return the evidence of tokens through the class token's attention in the last block, and the logits.

        `classify` maps the block's output `[1, P, C]` to `[classes, P]`. See `StreamedModel.class_evidence`.
        """
        summary, prefix = self.summary, self.prefix
        assert summary is not None
        assert prefix is not None
        attention, norm = summary.attention, summary.block.norm1
        attended = summary.attend(prefix)
        with torch.enable_grad():
            logits = classify(summary.block.after_attention(prefix, attended.requires_grad_()))[:, 0]
            gradients = [torch.autograd.grad(logit, attended, retain_graph=True)[0][0, 0] for logit in logits]
        slopes = torch.stack(gradients).unflatten(1, (attention.num_heads, -1))  # [classes, H, D]
        q = attention.project(norm(prefix[:, :1])).q

        def evidence(x: Tensor) -> Tensor:  # [classes, n]
            weights, v = summary.weights(q, x, [True])[:, 0], attention.project(norm(x)).v
            return torch.einsum("hn,nhd,khd->kn", weights, v[0].to(weights.dtype), slopes.to(weights.dtype))

        return evidence, logits.detach()

    def _run_embedding(self, level: Level, number: int, work: float, sinks: Sequence[Sink]) -> None:
        assert level.embed is not None
        (height, width), stride, channels = self.grids[number], level.stride, _channels(level.blocks[0])
        finer = self.tokens
        in_height, in_width = self.size if finer is None else finer.data.shape[:2]
        needed = self._embedding_bytes(level, self.model.in_chans if finer is None else finer.data.shape[2])
        tokens = self._allocate(height, width, channels, number)
        for start, stop in self._bands(height, width, needed, halo=level.halo):
            low, high = max(0, start - level.halo), min(height, stop + level.halo)
            first, last = low * stride, min(high * stride, in_height)
            x = self._pixels(first, last) if finer is None else finer.read(first, last).transpose(1, 2)
            x = x if finer is None else torch.unflatten(x, 2, (-1, in_width))
            out, _ = level.embed(x, GridRows(Grid(in_height, in_width), first, last - first))
            self._finish_band(tokens, start, out[:, (start - low) * width : (stop - low) * width], work, sinks)
        self.held -= 0 if finer is None else finer.device_bytes
        self.tokens = tokens

    def _run_block(self, block: Block, level: int, work: float, sinks: Sequence[Sink], *, skip_grid: bool) -> None:
        tokens, attention, summary = self.tokens, block.attn, self.summary
        assert tokens is not None
        height, width, channels = tokens.data.shape
        needed, halo, align, offset = self._block_bytes(block), 0, 1, 0
        if summary is not None:
            if self.prefix is not None:
                self.prefix = block.after_attention(self.prefix, summary.attend(self.prefix))
            if skip_grid:
                self.on_progress(work * height * width / self.total_work)
                return
            halo = int(summary.attention.has_local_term)

            def attend(x: Tensor, start: int, size: tuple[int, int]) -> Tensor:
                del start
                return summary.attend(x, size)

        elif isinstance(attention, WindowAttention):
            align, shift = attention.window_size, attention.shift_of(height, width)
            # Bands end between windows. Only the first band has windows that the shift cuts at the upper edge.
            offset = shift[0]

            def attend(x: Tensor, start: int, size: tuple[int, int]) -> Tensor:
                return attention.attend(block.norm1(x), size, shift=(0 if start else shift[0], shift[1]))

        elif isinstance(attention, StripeAttention) and attention.stripe_width is not None:
            align, vertical, half = attention.stripe_width, self._vertical_stripes(block, level, tokens), channels // 2

            def attend(x: Tensor, start: int, size: tuple[int, int]) -> Tensor:
                # A band holds horizontal stripes only; what it computes for vertical ones is dropped.
                horizontal = attention.attend(block.norm1(x), size)[..., half:]
                return torch.cat([vertical.read(start, start + size[0]).to(horizontal.dtype), horizontal], dim=-1)

        else:
            self._run_whole(block, tokens, work, sinks)
            return
        for start, stop, low, x in self._rows(tokens, halo, needed, align=align, offset=offset):
            inner = slice((start - low) * width, (stop - low) * width)
            attended = attend(x, start, (x.shape[1] // width, width))[:, inner]
            self._finish_band(tokens, start, block.after_attention(x[:, inner], attended), work, sinks)
        self.held = tokens.device_bytes  # vertical stripes are no longer needed

    def _run_whole(self, block: Block, tokens: _Tokens, work: float, sinks: Sequence[Sink]) -> None:
        """Run a block with softmax attention over the whole map: all tokens at once."""
        height, width, _ = tokens.data.shape
        needed = height * width * self._block_bytes(block)
        if needed > self.memory - self.held:
            raise ValueError(
                f"softmax attention over {height * width:,} tokens takes about {needed / 2**30:.1f} GiB; allow more "
                "memory, take a coarser level of the image, or an InLine model"
            )
        x, prefix = tokens.read(0, height), self.model.num_prefix_tokens
        out = block(x if self.prefix is None else torch.cat([self.prefix, x], dim=1), (height, width))
        self.prefix = out[:, :prefix] if prefix else None
        self._finish_band(tokens, 0, out[:, prefix:], work, sinks)

    def _vertical_stripes(self, block: Block, level: int, tokens: _Tokens) -> _Tokens:
        """Return the first half of the channels of CSWin's attention, which runs down columns."""
        attention = cast(StripeAttention, block.attn)
        stripe, (height, width, channels) = cast(int, attention.stripe_width), tokens.data.shape
        out = self._allocate(height, width, channels // 2, level)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the host gathers columns, which copies may be writing still
        for start, stop in self._bands(width, height, self._block_bytes(block), align=stripe):
            columns = tokens.data[:, start:stop].to(self.device).flatten(0, 1)[None]
            attended = attention.attend(block.norm1(columns), (height, stop - start))[0, :, : channels // 2]
            out.data[:, start:stop].copy_(torch.unflatten(attended, 0, (height, -1)))
        return out

    def _finish_band(self, tokens: _Tokens, start: int, out: Tensor, work: float, sinks: Sequence[Sink]) -> None:
        tokens.write(start, out)
        for sink in sinks:
            sink(out)
        self.on_progress(work * out.shape[1] / self.total_work)

    def _rows(
        self, tokens: _Tokens, halo: int, bytes_per_token: int, *, align: int = 1, offset: int = 0
    ) -> Iterator[tuple[int, int, int, Tensor]]:
        """Yield first and last row of each band, the first row with its halo, and the tokens with halo.

        Bands may be overwritten meanwhile: the rows above are those from before.
        """
        height, width, _ = tokens.data.shape
        above: Tensor | None = None
        for start, stop in self._bands(height, width, bytes_per_token, halo=halo, align=align, offset=offset):
            x, low = tokens.read(start, min(stop + halo, height)), start
            if above is not None:
                x, low = torch.cat([above, x], dim=1), start - halo
            if halo:
                above = x[:, (stop - halo - low) * width : (stop - low) * width].clone()
            yield start, stop, low, x

    def _bands(
        self, height: int, width: int, bytes_per_token: int, *, halo: int = 0, align: int = 1, offset: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Yield first and last row of bands that fit into memory. They end at `offset` and multiples of `align`."""
        free = self.memory - self.held
        rows = free // (bytes_per_token * width) - 2 * halo
        if rows < align and rows < height:
            least = (min(align, height) + 2 * halo) * bytes_per_token * width
            if least > self.least_memory:  # not one of the steps, for which tokens leave enough
                least += 0 if self.tokens is None else self.tokens.data.nbytes
            least = max(least, self.least_memory)
            raise ValueError(
                f"memory must be at least {ceil_divide(least, 2**10):,} KiB for this model and image, "
                f"got {self.memory // 2**10:,} KiB"
            )
        if self.device.type == "cpu":  # larger bands are no faster there, and the allocator keeps more of them
            rows = min(rows, LARGEST_BAND_ON_CPU // (bytes_per_token * width))
        step, start = max(rows // align, 1) * align, 0
        if offset and step > align:
            step -= align  # the first band is longer by the offset
        while start < height:
            stop = min(start + step + (offset if start == 0 else 0), height)
            yield start, stop
            start = stop

    def _block_bytes(self, block: Block) -> int:
        """Return the most bytes that running a block takes for a token, roughly."""
        channels, item, layer = _channels(block), self.dtype.itemsize, block.attn
        weights = 3 * layer.num_heads * layer.window_size**2 * item if isinstance(layer, WindowAttention) else 0
        attention = channels * (7 * item + 6 * 4)  # sums are in float32
        return max(attention, item * (6 * channels + 2 * _hidden(block))) + weights

    def _embedding_bytes(self, level: Level, in_channels: int) -> int:
        """Return the most bytes that an embedding takes for a token, roughly."""
        embedding = in_channels * level.stride**2 * (9 + self.dtype.itemsize) + 24 * _channels(level.blocks[0])
        return max(embedding, self._block_bytes(level.blocks[0]))  # the sinks compute its keys and values

    def _least_band(self, step: _Step) -> int:
        """Return the bytes of the smallest band of a step."""
        (height, width), module = self.grids[step.level], step.module
        if isinstance(module, Level):
            finer = self.model.network()[step.level - 1].blocks[-1] if step.level else None
            channels = self.model.in_chans if finer is None else _channels(finer)
            return (1 + 2 * module.halo) * width * self._embedding_bytes(module, channels)
        needed, attention = self._block_bytes(module), module.attn
        if isinstance(attention, KernelAttention):
            return (1 + 2 * int(attention.has_local_term)) * width * needed
        if isinstance(attention, WindowAttention):
            return min(attention.window_size, height) * width * needed
        if isinstance(attention, StripeAttention) and attention.stripe_width is not None:
            stripe = attention.stripe_width
            return max(min(stripe, height) * width, min(stripe, width) * height) * needed
        return height * width * needed

    def _allocate(self, height: int, width: int, channels: int, level: int) -> _Tokens:
        """Allocate tokens of a level on the device if they leave enough for its bands, else elsewhere."""
        shape, size = (height, width, channels), height * width * channels * self.dtype.itemsize
        band = max((1 - SHARE_FOR_TOKENS) * self.memory, self.least_bands[level])
        if size + self.held + band <= self.memory:
            self.held += size
            return _Tokens(torch.empty(shape, device=self.device, dtype=self.dtype), self.device, size)
        available = available_memory()
        host = SHARE_OF_HOST * (ASSUMED_HOST if available is None else available)
        if self.device.type != "cpu" and size <= host:
            return _Tokens(torch.empty(shape, dtype=self.dtype, pin_memory=True), self.device, 0)
        return _Tokens(_in_file(self.folder, size, self.dtype).view(shape), self.device, 0)

    def _pixels(self, start: int, stop: int) -> Tensor:
        """Return normalized rows `[1, channels, rows, width]`."""
        rows = self.source.read_rows(start, stop)
        if not isinstance(rows, Tensor) or not (rows.is_floating_point() or rows.dtype == torch.uint8):  # pyright: ignore[reportUnnecessaryIsInstance]
            got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"rows must be a tensor of uint8 or normalized floating-point numbers, got {got}")
        expected = (self.model.in_chans, stop - start, self.size[1])
        if rows.shape != expected:
            raise ValueError(f"the source must return rows of shape {expected}, got {tuple(rows.shape)}")
        if rows.device != self.device:
            on_host = rows
            rows = torch.empty(expected, dtype=on_host.dtype, device=self.device)
            for plane, from_host in zip(rows, on_host, strict=True):  # each is contiguous, so it is copied directly
                # Other sources may reuse their memory.
                plane.copy_(from_host, non_blocking=isinstance(self.source, _TensorSource))
        rows = rows[None]
        if rows.is_floating_point():
            return rows.to(self.dtype)
        mean, std = self.statistics
        if not mean.shape[1] == std.shape[1] == self.model.in_chans:
            raise ValueError(
                f"the model has {self.model.in_chans} input channels and pretrained_cfg has mean and std of "
                f"{mean.shape[1]}, so bytes cannot be normalized; give normalized floating-point numbers"
            )
        return rows.float().div_(255).sub_(mean).div_(std).to(self.dtype)


class _TensorSource:
    """An image in memory, `[channels, H, W]`."""

    def __init__(self, image: Tensor) -> None:
        if image.dim() != 3:
            raise ValueError(f"an image must be [channels, H, W], got shape {tuple(image.shape)}")
        self.image, self.size = image, (image.shape[1], image.shape[2])

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Return rows `[channels, stop - start, W]`."""
        return self.image[:, start:stop]


def _channels(block: Block) -> int:
    return block.norm1.normalized_shape[0]


def _hidden(block: Block) -> int:
    return cast(int, block.mlp.fc1.out_features)


def _array_writer(
    file: BinaryIO, folder: Path, shape: tuple[int, ...], dtype: torch.dtype, transform: nn.Module
) -> Sink:
    """Write the header of an .npy file in a folder, and return a sink that appends tokens.

    Written, not mapped: a full disk is then an error, not a signal that ends the process.
    """
    descr = np.lib.format.dtype_to_descr(torch.empty(0, dtype=dtype).numpy().dtype)
    header = io.BytesIO()
    np.lib.format.write_array_header_2_0(header, {"descr": descr, "fortran_order": False, "shape": shape})

    def put(content: memoryview) -> None:
        try:
            file.write(content)
        except OSError as error:
            reason = f"{error.strerror} while features were written; none are kept"
            raise OSError(error.errno, reason, os.fspath(folder)) from error

    def write(tokens: Tensor) -> None:
        put(transform(tokens).to("cpu", dtype).contiguous().numpy().data)

    put(header.getbuffer())
    return write


def _check_space(folder: Path, needed: int) -> None:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} for tokens that fit into no memory; create it, or pass another")
    free = free_bytes(folder)
    if free is not None and needed > free:
        reason = f"needs {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: the run {reason}", str(folder))


def _in_file(folder: str | os.PathLike[str] | None, size: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor in a temporary file, which disappears with it."""
    _check_space(Path(folder or tempfile.gettempdir()), size)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="inline-tokens-") as file:
        # Reserved now: a write to a mapped file on a full disk would end the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            for start in range(0, size, len(ZEROS)):
                file.write(ZEROS[: size - start])
            file.flush()
        return torch.from_file(file.name, shared=True, size=size // dtype.itemsize, dtype=dtype)
