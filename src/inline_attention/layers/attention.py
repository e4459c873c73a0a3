"""The attention layer, and its two baselines, on one skeleton. They take the same arguments.

Shapes: `B` batch, `N` tokens, `C` channels, `H` heads, `D` = C / H. Tokens are `num_prefix_tokens` class or register
tokens followed by an h×w grid in row-major order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.layers.hooks import has_private_output
from inline_attention.layers.local_weights import LocalWeightPredictor, token_sum
from inline_attention.layers.patch_grids import PatchGrid
from inline_attention.layers.row_shards import RowShards
from inline_attention.ops import local_residual, states, validation
from inline_attention.ops.api import attend
from inline_attention.ops.call import AttentionCall, Normalization
from inline_attention.ops.dispatch import BACKEND_NAMES
from inline_attention.ops.feature_maps import FeatureMap
from inline_attention.ops.tracing import are_plain_eager_tensors, as_autocast, is_exporting, plain_sizes, unrecorded


class Projected(NamedTuple):
    """Queries, keys and values of a call."""

    q: Tensor  # [B, N, H, D]
    k: Tensor  # [B, N, H, D]
    v: Tensor  # [B, N, H, D]
    qkv: Tensor | None = None  # [B, N, 3, H, D], if q, k and v are views of it
    owns_queries: bool = False  # nothing else uses the memory of q


class ProjectedAttention(nn.Module, ABC):
    """An attention that ends in a projection. A block may call `attend` and fuse the projection with its MLP."""

    proj: nn.Linear
    proj_drop: nn.Dropout

    @abstractmethod
    def attend(self, x: Tensor, grid_size: tuple[int, int], key_padding_mask: Tensor | None = None) -> Tensor:
        """`forward` without the output projection."""


class TokenAttention(ProjectedAttention):
    """Projections, local residual and bookkeeping around a mixing of tokens that subclasses supply."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        fused_qkv: bool = True,
        feature_map: str | FeatureMap = "identity",
        normalization: Normalization = "subtract",
        scale: float | None = None,
        local_residual: bool = True,
        static_local: bool = False,
        num_prefix_tokens: int = 0,
        softmax_prefix: bool = False,
        prefix_gain: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build the layer.

        Args:
            dim: Channels C.
            num_heads: Heads H; must divide `dim`.
            qkv_bias: True for a bias in the query, key and value projections.
            proj_bias: True for a bias in the output projection.
            fused_qkv: One `qkv` projection; False for a `q` and a `kv` projection (keys before values).
            feature_map: phi, as in `inline_attention`.
            normalization: "subtract" (InLine), "divide" or "magnitude".
            scale: Factor on the inner products; `D ** -0.5` by default.
            local_residual: Add the dynamic 3×3 term, predicted from the mean token.
            static_local: Add a learned depthwise 3×3 convolution of the values (with bias), the same for all samples.
            num_prefix_tokens: Class or register tokens before the grid.
            softmax_prefix: Let the queries of these tokens attend by softmax: they are few, so time stays linear.
            prefix_gain: Learn a factor per head on these queries. It undoes what `calibrate_attention` does to the
                projection that they share with the others.
            attn_drop: Dropout rate on the attention. Linear-time attention never forms its weights, so there the
                attention's output is dropped; `SoftmaxAttention` drops weights.
            proj_drop: Dropout rate on the projected output.
            backend: Backend of the op.
            device: Where to create the parameters.
            dtype: Their dtype.
        """
        super().__init__()
        validation.check_heads(dim, num_heads)
        validation.check_feature_map(feature_map)
        validation.check_normalization(normalization)
        validation.check_count("num_prefix_tokens", num_prefix_tokens, least=0)
        validation.check_rate("attn_drop", attn_drop)
        validation.check_rate("proj_drop", proj_drop)
        if backend not in BACKEND_NAMES:
            raise validation.unknown_name("backend", backend, BACKEND_NAMES)
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = validation.resolve_scale(scale, self.head_dim)
        self.feature_map = feature_map
        self.normalization: Normalization = normalization
        self.num_prefix_tokens = num_prefix_tokens
        self.softmax_prefix = softmax_prefix
        self.backend = backend
        self.default_grid_size: tuple[int, int] | None = None
        self.patch_grid: PatchGrid | None = None

        def linear(out_features: int, bias: bool) -> nn.Linear:
            return nn.Linear(dim, out_features, bias=bias, device=device, dtype=dtype)

        self.qkv = linear(3 * dim, qkv_bias) if fused_qkv else None
        self.q = None if fused_qkv else linear(dim, qkv_bias)
        self.kv = None if fused_qkv else linear(2 * dim, qkv_bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.norm: nn.Module | None = None  # of the mixed values, as in EVA-02
        self.gate: nn.Linear | None = None  # its sigmoid multiplies the mixed values
        self.rotate_half = False  # layout of rotary positions: halves of a head, or neighboring channels
        self.residual = LocalWeightPredictor(dim, num_heads, device=device, dtype=dtype) if local_residual else None
        # Never called as a convolution: its weights join the predicted ones, and both cost one pass.
        self.static_local = (
            nn.Conv2d(dim, dim, 3, padding=1, groups=dim, device=device, dtype=dtype) if static_local else None
        )
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = linear(dim, proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)
        self.is_calibrated = False  # by `calibrate_attention`, in this process
        self.prefix_gain: nn.Parameter | None = None
        if prefix_gain:
            self.add_prefix_gain()

    def add_prefix_gain(self) -> nn.Parameter:
        """Add the factor per head on the queries of prefix tokens, all ones."""
        self.prefix_gain = nn.Parameter(self.proj.weight.new_ones(self.num_heads))
        return self.prefix_gain

    @classmethod
    def from_softmax(
        cls,
        attention: nn.Module,
        *,
        num_prefix_tokens: int = 0,
        grid_size: tuple[int, int] | None = None,
        **options: Any,
    ) -> Self:
        """Build this attention around the projections of a softmax attention such as timm's `Attention`.

        The `qkv` and `proj` modules (and q/k norms) are the given ones, not copies. A local residual starts at zero:
        the first forward pass is pure InLine attention with the old projections.

        Args:
            attention: A module with `qkv`, `proj` and `num_heads`.
            num_prefix_tokens: Class or register tokens before the grid (1 for DeiT).
            grid_size: Grid assumed when `forward` is given none and it fits; a square otherwise.
            **options: Arguments of the constructor, such as `local_residual` or `feature_map`.

        Raises:
            ValueError: A module with learned parts that this layer has no place for.
        """
        from inline_attention.layers.conversion import from_softmax

        return from_softmax(cls, attention, num_prefix_tokens, grid_size, options)

    def forward(
        self,
        x: Tensor,
        grid_size: tuple[int, int] | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        local_input: Tensor | None = None,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        shards: RowShards | None = None,
    ) -> Tensor:
        """Mix the tokens.

        Args:
            x: `[B, N, C]`, normalized.
            grid_size: `(h, w)` with N = num_prefix_tokens + h·w; inferred when the grid is square.
            key_padding_mask: `[B, N]` bool, True for a real token.
            local_input: `[B, N, C]` tokens whose mean predicts the local weights; x by default. CSWin's blocks pass
                their un-normalized input.
            rope: Rotary positions of the last M tokens: sines and cosines, `[M, 2 D]`, `[H, M, 2 D]` or
                `[B, 1 or H, M, 2 D]`. Queries and keys are rotated before phi, as softmax attention does it.
            attn_mask: Argument of timm's blocks: None, or a key padding mask `[B, 1, 1, N]`. It is bool, or added to
                scores: 0 for a real token, -inf or the dtype's least number for padding.
            is_causal: Argument of timm's blocks; must be False.
            shards: Rows of the grid that this rank has, if ranks share them: x holds the prefix tokens and these rows.

        Returns:
            `[B, N, C]`.
        """
        key_padding_mask = _one_mask(self, x, grid_size, key_padding_mask, attn_mask, is_causal)
        mixed = self.attend(x, grid_size, key_padding_mask, local_input=local_input, rope=rope, shards=shards)
        return self.proj_drop(self.proj(mixed))

    def attend(
        self,
        x: Tensor,
        grid_size: tuple[int, int] | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        local_input: Tensor | None = None,
        rope: Tensor | None = None,
        shards: RowShards | None = None,
    ) -> Tensor:
        """`forward` without the output projection."""
        if shards is None:
            is_given = isinstance(grid_size, (tuple, list)) or not self.has_local_term
            expected = None if is_given else self.expected_grid(x)
            local_weight, grid_size = _local_term(self, x, grid_size, expected, key_padding_mask, local_input)
            out = mix(self, self._projected(x), key_padding_mask, local_weight, grid_size, rope)
        else:
            _check_inputs(self, x, grid_size, key_padding_mask, local_input)
            call = self.project(x, key_padding_mask, rope=rope)
            out = self._mix_rows(call, x if local_input is None else local_input, shards)
        out = out.flatten(2)
        if self.static_local is not None and self.static_local.bias is not None:
            prefix = self.num_prefix_tokens
            grid = out[:, prefix:] + self.static_local.bias
            out = grid if prefix == 0 else torch.cat([out[:, :prefix], grid], dim=1)
        return self.finish(out, x)

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Normalize and gate the mixed values `[B, N, C]` of a call with tokens `x`, if the layer does that."""
        if self.norm is not None:
            mixed = self.norm(mixed)
        return mixed if self.gate is None else mixed * self.gate(x).sigmoid()

    @property
    def has_local_term(self) -> bool:
        """True if the layer needs a grid: it has 3×3 weights, predicted or learned."""
        return self.residual is not None or self.static_local is not None

    def prefix_queries(self, q: Tensor) -> Tensor:
        """Return the prefix tokens' queries for softmax `[B, P, H, D]`, of all tokens' `[B, N, H, D]`."""
        q = q[:, : self.num_prefix_tokens]
        return q if self.prefix_gain is None else q * self.prefix_gain[:, None].to(q.dtype)

    def query_weights(self) -> list[Tensor]:
        """Return what the queries are linear in: parameters, or views of their rows for the queries, `[H * D, ...]`."""
        layer = self.qkv if self.q is None else self.q
        assert layer is not None
        return [part[: self.dim] for part in layer.parameters(recurse=False)]

    @abstractmethod
    def mix(self, call: AttentionCall) -> Tensor:
        """Mix the values of a call; return `[B, N, H, D]`, local term included."""

    @abstractmethod
    def mix_shards(self, call: AttentionCall, tokens: Tensor, shards: RowShards) -> tuple[Tensor, Tensor | None]:
        """Mix the values of all ranks for the queries of this rank, without the local term.

        Returns:
            `[B, N, H, D]`, and the mean of all ranks' `tokens` `[B, C]` if the layer predicts local weights.
        """

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"dim={self.dim}, num_heads={self.num_heads}, num_prefix_tokens={self.num_prefix_tokens}"

    def project(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        local_weight: Tensor | None = None,
        grid_size: tuple[int, int] | None = None,
        rope: Tensor | None = None,
    ) -> AttentionCall:
        """Project tokens `[B, N, C]` to queries, keys and values; normalize and rotate queries and keys."""
        return self.call_of(self._projected(x), key_padding_mask, local_weight, grid_size, rope)

    def call_of(
        self,
        projected: Projected,
        key_padding_mask: Tensor | None,
        local_weight: Tensor | None,
        grid_size: tuple[int, int] | None,
        rope: Tensor | None,
    ) -> AttentionCall:
        """Return the call of projected tokens; rotate queries and keys."""
        q, k, v, qkv, owns_queries = projected
        if rope is not None:
            q, k, qkv = rotate(q, rope, self.rotate_half), rotate(k, rope, self.rotate_half), None
        prefix = 0 if local_weight is None else self.num_prefix_tokens
        return AttentionCall(
            q, k, v, qkv, self.scale, self.feature_map, self.normalization,
            key_padding_mask, local_weight, grid_size, prefix, owns_queries,
        )  # fmt: skip

    def _projected(self, x: Tensor) -> Projected:
        """Project tokens; normalize queries and keys."""
        q, k, v, qkv, owns_queries = self._queries_keys_values(x)
        if self.q_norm is not None:
            q, qkv, owns_queries = self.q_norm(q).to(v.dtype), None, False
        if self.k_norm is not None:
            k, qkv = self.k_norm(k).to(v.dtype), None
        return Projected(q, k, v, qkv, owns_queries)

    def _queries_keys_values(self, x: Tensor) -> Projected:
        """Project tokens."""
        if self.qkv is not None:
            qkv = torch.unflatten(self.qkv(x), -1, (3, self.num_heads, self.head_dim))
            q, k, v = qkv.unbind(2)
            return Projected(q, k, v, qkv)
        assert self.q is not None
        assert self.kv is not None
        x = as_autocast(x)  # once, not for each of the two
        # A linear layer's output is fresh. Asked before the call, since a hook may remove itself.
        owns_queries = type(self.q) is nn.Linear and has_private_output(self.q)
        q = torch.unflatten(self.q(x), -1, (self.num_heads, self.head_dim))
        k, v = torch.unflatten(self.kv(x), -1, (2, self.num_heads, self.head_dim)).unbind(2)
        return Projected(q, k, v, None, owns_queries)

    def as_key_padding_mask(self, attn_mask: Tensor, x: Tensor, grid_size: tuple[int, int] | None) -> Tensor:
        """Turn a mask `[B, 1, 1, N]`, bool or added to scores (0 or -inf), into `[B, N]` bool."""
        validation.check_tokens("x", x, self.dim)
        validation.check_dense("attn_mask", attn_mask)
        batch, tokens, _ = x.shape
        if attn_mask.shape != (batch, 1, 1, tokens):
            raise ValueError(
                f"attn_mask must be a key padding mask [B, 1, 1, N] = {(batch, 1, 1, tokens)}, got "
                f"{tuple(attn_mask.shape)}: linear-time attention cannot mask single query-key pairs. timm's NaFlexViT "
                "passes such a mask if made with use_key_only_attn_mask=True"
            )
        mask = attn_mask[:, 0, 0]
        if not mask.is_floating_point():
            return mask
        with unrecorded():
            validation.check_added_mask(mask)
        has_grid = grid_size is not None or self.default_grid_size is not None or self.patch_grid is not None
        if self.has_local_term and not has_grid:  # only NaFlexViT adds masks to scores
            raise ValueError(
                "an attn_mask that is added to scores is for images of unequal shapes, whose tokens share no grid for "
                "the local residual; convert with local_residual=False, or pass grid_size=(h, w)"
            )
        return mask == 0

    def _mix_rows(self, call: AttentionCall, tokens: Tensor, shards: RowShards) -> Tensor:
        """Mix the values of all ranks for the queries of this rank, local term included."""
        out, mean = self.mix_shards(call, tokens, shards)
        weight = self.local_weight(tokens, call.key_padding_mask, mean)
        if weight is None:
            return out
        prefix, mask = self.num_prefix_tokens, call.key_padding_mask
        v = call.v[:, prefix:] if mask is None else call.v.masked_fill(~mask[:, :, None, None], 0)[:, prefix:]
        rows, width = shards.size
        v = shards.take_tokens(v, [(first - 1, end + 1) for first, end in shards.ranges])
        local = local_residual(v, weight, grid_size=(rows + 2, width))[:, width:-width]
        return torch.cat([out[:, :prefix], out[:, prefix:] + local], dim=1)

    def _counted_once(self, tokens: Tensor, shards: RowShards) -> Tensor:
        """Leave out the prefix tokens on all ranks but the first, in a sum over ranks."""
        return tokens if shards.group.rank == 0 else tokens[:, self.num_prefix_tokens :]

    def local_weight(
        self, tokens: Tensor, key_padding_mask: Tensor | None, mean: Tensor | None = None
    ) -> Tensor | None:
        """The 3×3 weights `[B, H, D, 3, 3]`: predicted, learned, both or none; `mean` is the mean token, if known."""
        weight = None
        if self.residual is not None:
            if mean is None:
                weight = self.residual.predict(tokens, key_padding_mask, fused=self.backend == "auto")
            else:
                weight = self.residual(mean)
        if self.static_local is not None:
            static = self.static_local.weight.view(1, self.num_heads, self.head_dim, 3, 3)
            if weight is None:
                return static.expand(tokens.shape[0], -1, -1, -1, -1).to(tokens.dtype)
            if static.requires_grad:
                # With one sample both summands would get one tensor as their gradient, and add to it twice.
                static.register_hook(torch.clone)  # pyright: ignore[reportUnknownMemberType]
            weight = weight + static.to(weight.dtype)
        return weight

    def expected_grid(self, x: Tensor) -> tuple[int, int] | None:
        """Return the grid of the image's patches, if known."""
        return self.default_grid_size if self.patch_grid is None else self.patch_grid.current(x)

    def resolve_grid(
        self, num_tokens: int, grid_size: tuple[int, int] | None, expected: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Return the grid of a call: the given one, the expected one if it fits, or a square."""
        if grid_size is not None:
            return grid_size
        (num_tokens,) = plain_sizes((num_tokens,))
        tokens = num_tokens - self.num_prefix_tokens
        if expected is not None and expected[0] * expected[1] == tokens:
            return expected
        side = round(max(tokens, 0) ** 0.5)
        # A model may pool its tokens. A square grid then stays square; other grids cannot be known.
        may_be_square = expected is None or expected[0] == expected[1]
        if side * side != tokens or not may_be_square:
            reason = "not a square grid" if expected is None else f"not the {expected[0]}×{expected[1]} of the image"
            raise ValueError(
                f"{num_tokens} tokens with num_prefix_tokens={self.num_prefix_tokens} leave {tokens}, {reason}; "
                "pass grid_size=(h, w), or set num_prefix_tokens if there are class or register tokens"
            )
        return side, side


# What depends on sizes and masks, which torch.fx does not know: it records each of these functions as one call.


@torch.fx.wrap
def _one_mask(
    layer: TokenAttention,
    x: Tensor,
    grid_size: tuple[int, int] | None,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """Return the key padding mask `[B, N]` of a call of `forward`."""
    if is_causal:
        raise ValueError("is_causal=True is not possible: InLine attention is for grids, which have no order")
    if attn_mask is None:
        return key_padding_mask
    if key_padding_mask is not None:
        raise ValueError("give key_padding_mask or attn_mask, not both: they say the same thing")
    return layer.as_key_padding_mask(attn_mask, x, grid_size)


@torch.fx.wrap
def _local_term(
    layer: TokenAttention,
    x: Tensor,
    grid_size: tuple[int, int] | None,
    expected: tuple[int, int] | None,
    key_padding_mask: Tensor | None,
    local_input: Tensor | None,
) -> tuple[Tensor | None, tuple[int, int] | None]:
    """Check the inputs of a call; return its 3×3 weights and its grid, or None for both."""
    grid_size = plain_sizes(grid_size)
    _check_inputs(layer, x, grid_size, key_padding_mask, local_input)
    weight = layer.local_weight(x if local_input is None else local_input, key_padding_mask)
    return weight, None if weight is None else layer.resolve_grid(x.shape[1], grid_size, expected)


@torch.fx.wrap
def mix(
    layer: TokenAttention,
    projected: Projected,
    key_padding_mask: Tensor | None,
    local_weight: Tensor | None,
    grid_size: tuple[int, int] | None,
    rope: Tensor | None,
) -> Tensor:
    """Rotate queries and keys, and mix the values: `[B, N, H, D]`."""
    return layer.mix(layer.call_of(projected, key_padding_mask, local_weight, grid_size, rope))


def _check_inputs(layer: TokenAttention, x: Any, grid_size: Any, key_padding_mask: Any, local_input: Any) -> None:
    with unrecorded():
        validation.check_tokens("x", x, layer.dim)
        if grid_size is not None:  # checked even where no local term uses it
            validation.check_grid(plain_sizes(grid_size), layer.num_prefix_tokens, x.shape[1])
        if key_padding_mask is not None:
            validation.check_mask_form(key_padding_mask, x)
        if local_input is not None:
            validation.check_tokens("local_input", local_input, layer.dim)
            if local_input.shape != x.shape:
                raise ValueError(
                    f"local_input must have the shape of x, got {tuple(local_input.shape)} and {tuple(x.shape)}"
                )


class KernelAttention(TokenAttention):
    """Attention whose weights are inner products of mapped queries and keys: everything the op computes."""

    def mix(self, call: AttentionCall) -> Tensor:
        """Mix the values of a call by the op."""
        if not self.has_softmax_prefix:
            return self.attn_drop(attend(call, self.backend))
        first = _softmax(call, self.prefix_queries(call.q))  # now: the op may write over the queries
        out = attend(call, self.backend)
        if torch.is_grad_enabled() or not are_plain_eager_tensors(out):
            out = torch.cat([first, out[:, self.num_prefix_tokens :]], dim=1)
        else:
            out[:, : self.num_prefix_tokens] = first
        return self.attn_drop(out)

    @property
    def has_softmax_prefix(self) -> bool:
        """True if the queries of class and register tokens attend by softmax."""
        return self.softmax_prefix and self.num_prefix_tokens > 0

    def mix_shards(self, call: AttentionCall, tokens: Tensor, shards: RowShards) -> tuple[Tensor, Tensor | None]:
        """Merge the states of all ranks' keys: they travel with the sums of tokens, in one message."""
        mask = None if call.key_padding_mask is None else self._counted_once(call.key_padding_mask, shards)
        k, v, tokens = (self._counted_once(part, shards) for part in (call.k, call.v, tokens))
        state = states.attention_state(k, v, feature_map=call.feature_map, key_padding_mask=mask)
        count = state.key_count[:, None].to(state.covariance.dtype)
        total = token_sum(tokens, mask).to(count.dtype)
        prefix: tuple[Tensor, ...] = ()
        if self.has_softmax_prefix:
            q = self.prefix_queries(call.q)
            prefix = states.softmax_state(q, k, v, scale=call.scale, key_padding_mask=mask)
        gathered = shards.group.gather(count, *state[1:], total, *prefix)
        merged = states.merge_states(
            *(states.AttentionState(part[0].squeeze(1).round().long(), *part[1:4]) for part in gathered)
        )
        mean = torch.stack([part[4] for part in gathered]).sum(0) / merged.key_count[:, None]
        out = states.attend(
            call.q, merged, scale=call.scale, feature_map=call.feature_map, normalization=call.normalization
        )
        if prefix:
            first = states.merge_softmax_states(*(states.SoftmaxState(*part[5:]) for part in gathered)).out
            out = torch.cat([first.to(out.dtype), out[:, self.num_prefix_tokens :]], dim=1)
        return out, mean.to(tokens.dtype)

    def attend_to(
        self,
        x: Tensor,
        state: states.AttentionState,
        mean_token: Tensor,
        grid_size: tuple[int, int] | None = None,
        prefix: states.SoftmaxState | None = None,
    ) -> Tensor:
        """Mix tokens `[B, N, C]` as `attend` does, but over the keys of a state instead of their own.

        Args:
            x: Some rows of the grid, normalized; or prefix tokens.
            state: State of the keys and values of all tokens.
            mean_token: `[B, C]` mean of all tokens, which predicts the local weights.
            grid_size: Rows and columns of x. The local term takes rows beyond its edge for zeros. None for prefix
                tokens, which have no local term.
            prefix: Softmax attention of x over all tokens, if x are prefix tokens with softmax.
        """
        if prefix is not None:
            return self.attn_drop(self.finish(prefix.out.to(x.dtype).flatten(2), x))
        call = self.project(x)
        local: dict[str, Any] = {}
        if grid_size is not None and self.has_local_term:
            local_weight = self.local_weight(mean_token[:, None], None)
            local = {"v": call.v, "local_weight": local_weight, "grid_size": grid_size}
        options: dict[str, Any] = {"feature_map": self.feature_map, "normalization": self.normalization}
        out = states.attend(call.q, state, scale=self.scale, **options, **local).flatten(2)
        if local and self.static_local is not None and self.static_local.bias is not None:
            out = out + self.static_local.bias
        return self.attn_drop(self.finish(out, x))


class InLineAttention(KernelAttention):
    """Injective linear attention with a local residual, in linear time. Arguments: see `TokenAttention`."""


class LinearAttention(KernelAttention):
    """Vanilla linear attention, the baseline: phi = ReLU, weights normalized by division, no local residual."""

    def __init__(self, dim: int, num_heads: int = 8, **options: Any) -> None:
        defaults: dict[str, Any] = {"feature_map": "relu", "normalization": "divide", "local_residual": False}
        super().__init__(dim, num_heads, **(defaults | options))


class SoftmaxAttention(TokenAttention):
    """Softmax attention through PyTorch's fused kernels, the baseline: quadratic in N, no local residual by default.

    `feature_map` and `normalization` exist for the common constructor and must keep their defaults.
    """

    def __init__(self, dim: int, num_heads: int = 8, *, local_residual: bool = False, **options: Any) -> None:
        super().__init__(dim, num_heads, local_residual=local_residual, **options)
        if self.feature_map != "identity" or self.normalization != "subtract":
            raise ValueError(
                f"softmax attention has no feature_map or normalization, got {self.feature_map!r} and "
                f"{self.normalization!r}; leave both out, or use InLineAttention or LinearAttention"
            )

    def mix(self, call: AttentionCall) -> Tensor:
        """Mix the values of a call by scaled dot-product attention."""
        mask = call.key_padding_mask
        if mask is not None:
            with unrecorded():
                validation.check_mask(mask, call.k)
        out = _softmax(call, call.q, dropout=self.attn_drop.p if self.training else 0.0)
        if call.local_weight is None or call.grid_size is None:
            return out
        prefix = call.num_prefix_tokens
        return out + local_residual(
            call.v, call.local_weight, grid_size=call.grid_size, num_prefix_tokens=prefix, key_padding_mask=mask
        )

    def mix_shards(self, call: AttentionCall, tokens: Tensor, shards: RowShards) -> tuple[Tensor, Tensor | None]:
        """Gather the keys and values of all ranks."""
        keys_values, whole = shards.gather_tokens(torch.stack([call.k, call.v], dim=2), self.num_prefix_tokens)
        k, v = keys_values.unbind(2)
        mask = whole.token_mask(self.num_prefix_tokens)
        out = self.mix(call._replace(k=k, v=v, qkv=None, key_padding_mask=mask))
        if self.residual is None:
            return out, None
        own = None if call.key_padding_mask is None else self._counted_once(call.key_padding_mask, shards)
        total = shards.group.sum(token_sum(self._counted_once(tokens, shards), own))
        count = k.shape[1] if mask is None else mask.sum(1, keepdim=True)
        return out, (total / count).to(tokens.dtype)


def _softmax(call: AttentionCall, queries: Tensor, dropout: float = 0.0) -> Tensor:
    """Mix values by softmax for queries `[B, N, H, D]`, without the local term."""
    mask = call.key_padding_mask
    out = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        call.k.transpose(1, 2),
        call.v.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None, None, :],
        dropout_p=dropout,
        scale=call.scale,
    )
    return heads_last(out)


def rotate(x: Tensor, rope: Tensor, half: bool) -> Tensor:
    """Rotate queries or keys `[B, N, H, D]` by their positions; the first tokens, which have none, stay.

    Args:
        x: Queries or keys.
        rope: Sines and cosines `[M, 2 D]`, `[H, M, 2 D]` or `[B, 1 or H, M, 2 D]` of the last M tokens.
        half: True if channel c turns with c + D / 2; False if it turns with its neighbor.
    """
    # [M, D] → [M, 1, D], [H, M, D] → [M, H, D]
    sine, cosine = (part.unsqueeze(-2) if part.dim() == 2 else part.transpose(-2, -3) for part in rope.chunk(2, -1))
    prefix = x.shape[1] - rope.shape[-2]
    grid = x[:, prefix:]
    if half:
        first, second = grid.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        turned = torch.stack([-grid[..., 1::2], grid[..., ::2]], -1).flatten(-2)
    rotated = (grid * cosine + turned * sine).to(x.dtype)
    return rotated if prefix == 0 else torch.cat([x[:, :prefix], rotated], 1)


def heads_last(x: Tensor) -> Tensor:
    """`[B, H, N, D]` → `[B, N, H, D]`."""
    x = x.transpose(1, 2)
    # The output of fused kernels is contiguous after this transpose. An exported graph may be lowered to their
    # decomposition, whose output is not, so that a recorded view would fail.
    return x.clone(memory_format=torch.contiguous_format) if is_exporting() else x
