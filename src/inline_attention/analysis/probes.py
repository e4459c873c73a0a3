"""Look into the attention layers of a running model with hooks, and replace what they compute.

All attention of this library is supported: over the whole map (softmax, linear, InLine), in shifted windows (Swin) and
in stripes (CSWin), also in models whose attention `convert_attention` has replaced. A hook before the layer computes
queries, keys and values from the layer's input once more; a hook before its output projection replaces the values.

Shapes: `B` batch, `b` some of its images, `N` tokens (prefix first, then an h×w grid row by row), `M` keys, `C`
channels, `H` heads, `D` head dim, `Q` chosen queries, `W` windows, `L` tokens of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from inline_attention.layers.adapted_attention import call_arguments
from inline_attention.layers.attention import SoftmaxAttention, TokenAttention
from inline_attention.layers.grids import Windows
from inline_attention.layers.window_attention import StripeAttention, WindowAttention, relative_position_index
from inline_attention.ops.call import Normalization
from inline_attention.ops.feature_maps import FeatureMap, apply_feature_map
from inline_attention.ops.reference import KIND_OF_NORMALIZATION, AttentionKind, weights_from_scores

AnyAttention: TypeAlias = TokenAttention | WindowAttention | StripeAttention
TAPS = 9  # of a 3×3 kernel, row by row; the fifth is the token itself
ROUNDING = 1e-13  # relative, of float64 rows
LARGEST_MATRIX = 1 << 29  # bytes of one matrix of weights; half a dozen of that size may be alive at once


class MatrixTooLargeError(ValueError):
    """Explicit weights would take too much memory."""


@dataclass(frozen=True)
class MixingRule:
    """How queries and keys become weights."""

    normalization: Normalization | None  # None for softmax
    feature_map: str | FeatureMap  # phi; the identity for softmax
    scale: float

    @property
    def kind(self) -> AttentionKind:
        """Name of the attention."""
        return "softmax" if self.normalization is None else KIND_OF_NORMALIZATION[self.normalization]

    @property
    def feature_map_name(self) -> str:
        """phi, for tables."""
        if self.normalization is None:
            return "none"
        return self.feature_map if isinstance(self.feature_map, str) else getattr(self.feature_map, "__name__", "phi")

    def features(self, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return phi of queries or keys `[..., D]`, in `dtype`."""
        if self.normalization is None:
            return x.to(dtype)
        if not isinstance(self.feature_map, str):
            x = x.float()  # a callable may have float32 parameters
        return apply_feature_map(self.feature_map, x, dtype)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        bias: Tensor | None = None,
        visible: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return weights `[..., N, M]` of queries `[..., N, D]` for keys `[..., M, D]`, computed in `dtype`.

        Softmax adds the bias to its scores. Keys that are not `visible` get no weight, see `weights_from_scores`.
        """
        assert bias is None or self.normalization is None, "only softmax has a bias"
        scores = self.scale * self.features(q, dtype) @ self.features(k, dtype).mT
        return weights_from_scores(scores if bias is None else scores + bias.to(dtype), self.normalization, visible)


@dataclass(frozen=True)
class LayerAttention:
    """Queries, keys, values and local kernels of one layer of any kind."""

    name: str  # path in its model, such as "blocks.3.attn"
    index: int  # among the model's attention layers
    rule: MixingRule
    q: Tensor  # [B, N, H, D]
    k: Tensor  # [B, N, H, D]
    v: Tensor  # [B, N, H, D]
    local_weight: Tensor | None  # 3×3 kernels [B, H, D, 3, 3] of the local term
    local_bias: Tensor | None  # [H, D], added to every grid token
    grid_size: tuple[int, int]
    num_prefix_tokens: int  # before the grid
    groups: Tensor | None = None  # [H, N]: tokens with equal numbers see each other; None when all see all
    position_bias: Callable[[int, Tensor], Tensor] | None = None  # of a head and queries [Q]: [Q, N], for softmax
    softmax_prefix: bool = False  # queries of prefix tokens attend by softmax, whatever the rule

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.q.shape[1]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.q.shape[2]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.q.shape[3]

    def token(self, row: int, column: int) -> int:
        """Return the number of the token at a place of the grid; raise `ValueError` if the place is outside."""
        height, width = self.grid_size
        if not (0 <= row < height and 0 <= column < width):
            raise ValueError(
                f"layer {self.index} ({self.name}) has {height}×{width} tokens, got row {row}, column {column}; "
                f"rows go from 0 to {height - 1}, columns from 0 to {width - 1}"
            )
        return self.num_prefix_tokens + row * width + column

    def group(self, head: int) -> Tensor:
        """Return a number for each token `[N]`; tokens with equal numbers see each other."""
        return self.q.new_zeros(self.num_tokens) if self.groups is None else self.groups[head]

    def reach(self, head: int, queries: Tensor | None = None) -> Tensor:
        """Return `[Q, N]` bool, True where a query, by default of all tokens, can see a key."""
        group = self.group(head)
        return (group if queries is None else group[queries])[:, None] == group[None, :]

    def rows(
        self,
        images: int | slice,
        head: int,
        queries: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return the weights `[Q, N]` of one head of one image, or `[b, Q, N]` of a slice, without the local term.

        `queries` are `[Q]` tokens, all by default; `hidden` `[Q, N]` is True where a key is hidden from a query.
        """
        queries = torch.arange(self.num_tokens, device=self.q.device) if queries is None else queries
        check_matrix_size(len(queries), self.num_tokens, dtype)
        visible = None if self.groups is None and hidden is None else self.reach(head, queries)
        if visible is not None and hidden is not None:
            visible &= ~hidden
        bias = None if self.position_bias is None else self.position_bias(head, queries)
        q, k = self.q[images, :, head], self.k[images, :, head]
        weights = self.rule.weights(q[..., queries, :], k, bias=bias, visible=visible, dtype=dtype)
        if not self.softmax_prefix or not (is_prefix := queries < self.num_prefix_tokens).any():
            return weights
        softmax = MixingRule(None, "identity", self.rule.scale)
        visible = None if visible is None else visible[is_prefix]
        weights[..., is_prefix, :] = softmax.weights(q[..., queries[is_prefix], :], k, visible=visible, dtype=dtype)
        return weights

    def neighbors(self, head: int) -> tuple[Tensor, Tensor]:
        """Return the 3×3 neighbors that the local term reads, see `neighbor_table`."""
        numbers, exists = neighbor_table(self.grid_size, self.num_prefix_tokens, self.q.device)
        group = self.group(head)
        return numbers, exists & (group[numbers] == group[:, None])

    def local_term(self, images: slice, head: int, hidden: Tensor | None = None) -> Tensor | None:
        """Return the output `[b, N, D]` of the local term in v's dtype; `hidden` `[N, N]` hides tokens from kernels."""
        if self.local_weight is None:
            return None
        numbers, exists = self.neighbors(head)
        if hidden is not None:
            exists = exists & ~hidden.gather(1, numbers)
        kernel = self.local_weight[images, head].flatten(-2).to(self.v.dtype)  # [b, D, 9]
        values = self.v[images, :, head]
        out = torch.zeros_like(values)
        for tap in range(TAPS):  # one at a time: nine gathered copies of the values might not fit
            out += values[:, numbers[:, tap]] * exists[:, tap, None] * kernel[:, None, :, tap]
        if self.local_bias is not None:
            out[:, self.num_prefix_tokens :] += self.local_bias[head]
        return out


def attention_layers(model: nn.Module) -> dict[str, AnyAttention]:
    """Return the attention layers of a model by their path in it, in order; raise `ValueError` if there are none."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, AnyAttention)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layer of this library; convert a timm model with "
            "inline_attention.layers.conversion.convert_attention first"
        )
    return layers


def choose_layers(model: nn.Module, wanted: Sequence[int] | None) -> list[int]:
    """Return valid layer numbers in order: negative ones count from the end, all if none are given."""
    count = len(attention_layers(model))
    for number in wanted or ():
        if not -count <= number < count:
            raise ValueError(f"the model has {count} attention layers, got layer {number}; give 0 to {count - 1}")
    return sorted({number % count for number in wanted or range(count)})


def choose_heads(layer: LayerAttention, wanted: Sequence[int] | None) -> list[int]:
    """Return valid head numbers in order; all if none are given."""
    for number in wanted or ():
        if not 0 <= number < layer.num_heads:
            raise ValueError(
                f"layer {layer.index} ({layer.name}) has {layer.num_heads} heads, got head {number}; "
                f"give 0 to {layer.num_heads - 1}"
            )
    return sorted(set(wanted or range(layer.num_heads)))


@torch.no_grad()
def capture_attention(model: nn.Module, images: Tensor, *, layers: Sequence[int] | None = None) -> list[LayerAttention]:
    """Return what the attention layers of these numbers, by default all, do with images.

    The model is in evaluation mode; images `[B, 3, H, W]` are normalized and of one size.
    """
    captured: list[LayerAttention] = []
    with observed(model, captured.append, layers=layers):
        model(images)
    return captured


@contextmanager
def observed(
    model: nn.Module, on_layer: Callable[[LayerAttention], Tensor | None], *, layers: Sequence[int] | None = None
) -> Iterator[None]:
    """Call `on_layer` with the attention layers of these numbers, by default all, that run inside the `with` block.

    It may return mixed values `[B, N, C]`, as `masking.mixed_values` does, to replace the layer's own.
    """
    chosen = choose_layers(model, layers)
    with ExitStack() as hooks:
        for index, (name, attention) in enumerate(attention_layers(model).items()):
            if index in chosen:
                for hook in _add_hooks(attention, name, index, on_layer):
                    hooks.enter_context(hook)
        yield


def _add_hooks(
    attention: AnyAttention, name: str, index: int, on_layer: Callable[[LayerAttention], Tensor | None]
) -> tuple[RemovableHandle, RemovableHandle]:
    replacement: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = call_arguments(attention, args, kwargs)
        if arguments.get("key_padding_mask") is not None or arguments.get("attn_mask") is not None:
            raise ValueError("images of unequal size cannot be analyzed in one batch; run them one by one")
        if isinstance(attention, TokenAttention):
            mixed = on_layer(_read_token_attention(attention, name, index, arguments))
            mixed = None if mixed is None else attention.finish(mixed.to(arguments["x"].dtype), arguments["x"])
        else:
            mixed = on_layer(_read_grid_attention(attention, name, index, arguments))
        replacement[:] = [] if mixed is None else [mixed]

    def before_projection(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        return (replacement.pop().to(args[0].dtype),) if replacement else None

    return (
        attention.register_forward_pre_hook(before, with_kwargs=True),
        attention.proj.register_forward_pre_hook(before_projection),
    )


def _read_token_attention(
    attention: TokenAttention, name: str, index: int, arguments: dict[str, Any]
) -> LayerAttention:
    x: Tensor = arguments["x"]
    normalization = None if isinstance(attention, SoftmaxAttention) else attention.normalization
    local_input = arguments.get("local_input")
    local_weight = attention.local_weight(x if local_input is None else local_input, None)
    grid_size = attention.resolve_grid(x.shape[1], arguments.get("grid_size"), attention.expected_grid(x))
    q, k, v = attention.project(x, None, local_weight, grid_size, arguments.get("rope"))[:3]
    # Kernels may be views of parameters; an analysis needs no gradients.
    kernels = None if local_weight is None else local_weight.detach()
    static = attention.static_local
    bias = None if static is None or static.bias is None else static.bias.detach().view(q.shape[2:])
    rule = MixingRule(normalization, attention.feature_map, attention.scale)
    prefix, by_softmax = attention.num_prefix_tokens, attention.softmax_prefix
    if by_softmax and attention.prefix_gain is not None:
        q = torch.cat([attention.prefix_queries(q), q[:, prefix:]], dim=1)
    return LayerAttention(name, index, rule, q, k, v, kernels, bias, grid_size, prefix, softmax_prefix=by_softmax)


def _read_grid_attention(
    attention: WindowAttention | StripeAttention, name: str, index: int, arguments: dict[str, Any]
) -> LayerAttention:
    x, grid_size = arguments["x"], arguments["grid_size"]
    q, k, v = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
    rule = MixingRule(None, "identity", q.shape[-1] ** -0.5)
    if isinstance(attention, WindowAttention):
        groups, position_bias = _windows(attention, grid_size, x.device)
        return LayerAttention(name, index, rule, q, k, v, None, None, grid_size, 0, groups, position_bias)
    convolutions = [cast(nn.Conv2d, convolution) for convolution in attention.static_local]
    kernels = torch.cat([convolution.weight.detach() for convolution in convolutions])
    kernels = kernels.view(1, *q.shape[2:], 3, 3).expand(len(x), -1, -1, -1, -1)
    biases = [convolution.bias.detach() for convolution in convolutions if convolution.bias is not None]
    bias = torch.cat(biases).view(q.shape[2:]) if biases else None
    groups = _stripes(attention, grid_size, x.device)
    return LayerAttention(name, index, rule, q, k, v, kernels, bias, grid_size, 0, groups)


def _windows(
    attention: WindowAttention, grid_size: tuple[int, int], device: torch.device
) -> tuple[Tensor, Callable[[int, Tensor], Tensor]]:
    """Return the groups `[H, N]` of tokens in one window, and the position bias."""
    side = attention.window_size
    windows = Windows.cover(grid_size, (side, side))
    shift = attention.shift_of(*grid_size)
    regions = windows.regions(shift, device)  # [W, side, side]
    window = torch.arange(len(regions), device=device)[:, None, None]
    groups = _per_token(windows, window * (1 + regions.max()) + regions, shift)
    places = torch.arange(side * side, device=device).view(1, side, side).expand_as(regions)
    places = _per_token(windows, places, shift)  # [N], in the token's window
    table = attention.relative_position_bias_table.detach()
    table = table[relative_position_index(device, side)].permute(2, 0, 1)  # [H, L, L]

    def position_bias(head: int, queries: Tensor) -> Tensor:
        return table[head][places[queries][:, None], places]  # without meaning for tokens of different windows

    return groups.expand(attention.num_heads, -1), position_bias


def _stripes(attention: StripeAttention, grid_size: tuple[int, int], device: torch.device) -> Tensor | None:
    """Return the groups `[H, N]` of tokens in one stripe; None where the stripe covers the map."""
    stripe = attention.stripe_width
    if stripe is None:
        return None
    branches: list[Tensor] = []
    for shape in ((None, stripe), (stripe, None)):
        windows = Windows.cover(grid_size, shape)
        window = torch.arange(windows.counts[0] * windows.counts[1], device=device)[:, None, None]
        branches.append(_per_token(windows, window.expand(-1, *windows.window), (0, 0)))
    return torch.stack(branches).repeat_interleave(attention.num_heads // 2, dim=0)


def _per_token(windows: Windows, numbers: Tensor, shift: tuple[int, int]) -> Tensor:
    """Return numbers at the places of windows, `[W, height, width]`, by token: `[N]`."""
    return windows.join(numbers[..., None], 1, shift).flatten()


def beyond_uniform(rows: Tensor, uniform: Tensor | float) -> Tensor:
    """Return float64 rows of weights `[..., M]` minus uniform attention; a row that is uniform up to rounding is zero.

    Rows are compared by this difference: with the uniform part, which all share, nearly uniform rows would look equal.
    """
    beyond = rows - uniform
    is_uniform = beyond.norm(dim=-1, keepdim=True) <= ROUNDING * rows.norm(dim=-1, keepdim=True)
    return beyond.masked_fill_(is_uniform, 0)


def check_matrix_size(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> None:
    """Raise `MatrixTooLargeError` for a matrix of weights that would fill the memory."""
    needed = rows * columns * dtype.itemsize
    if needed > LARGEST_MATRIX:
        raise MatrixTooLargeError(
            f"the weights of {rows:,} queries for {columns:,} keys take {needed / 2**30:.1f} GiB for one head of one "
            f"image, the limit is {LARGEST_MATRIX / 2**30:.1f} GiB; use smaller images (--size), or a layer with a "
            "coarser grid (--layer)"
        )


def neighbor_table(
    grid_size: tuple[int, int], num_prefix_tokens: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return the 3×3 neighbors of every token, itself in the middle: their numbers, and which exist, `[N, 9]` each.

    Beyond the border, and for prefix tokens, there are none, and the number has no meaning.
    """
    height, width = grid_size
    place = torch.arange(1.0, height * width + 1, dtype=torch.float64, device=device)
    around = F.unfold(place.view(1, 1, height, width), 3, padding=1)[0].T.long()  # 0 beyond the border
    around = F.pad(around, (0, 0, num_prefix_tokens, 0))
    return (around + num_prefix_tokens - 1).clamp(min=0), around > 0


def neighborhood_mask(
    grid_size: tuple[int, int], num_prefix_tokens: int, side: int, device: torch.device | None = None
) -> Tensor:
    """Return `[N, N]` bool, True where a key is in the side×side square around a query; prefix tokens never are."""
    if side < 1 or side % 2 == 0:
        raise ValueError(f"a neighborhood has its query in the middle, so its side must be odd, got {side}; try 3")
    height, width = grid_size
    place = torch.arange(height * width, device=device)
    row, column = place // width, place % width
    radius = side // 2
    near = ((row[:, None] - row).abs() <= radius) & ((column[:, None] - column).abs() <= radius)
    return F.pad(near, (num_prefix_tokens, 0, num_prefix_tokens, 0))
