"""InLine attention on a CPU by hand-written passes over blocks that stay in cache.

Composed operations stream every intermediate through memory and page in fresh buffers for each. Here a block of
two megabytes is centered, multiplied and written while it is in cache, into buffers allocated once, and the 3×3 term
is nine in-place multiply-adds on shifted views. The backward pass is written out in the same way; its formulas are in
docs/math.md. Derivatives of it are those of the composed operations.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
`b`, `n`: the samples and tokens of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from inline_attention.ops import composed
from inline_attention.ops.call import AttentionCall, Normalization

# Elements of one block. Smaller blocks starve the threads (PyTorch splits work in pieces of 32 Ki elements), larger
# ones leave the cache: 2 MiB of float32 was the best of 2^15 … 2^20 elements on two cores, N = 196 … 16384.
BLOCK_ELEMENTS = 1 << 19


class Settings(NamedTuple):
    """The arguments of a call that are not tensors."""

    scale: float
    normalization: Normalization
    grid_size: tuple[int, int] | None
    num_prefix_tokens: int


class State(NamedTuple):
    """The summary of keys and values that queries need and that backward keeps."""

    key_mean: torch.Tensor  # [B, 1, H, D]
    value_mean: torch.Tensor  # [B, 1, H, Dv]
    covariance: torch.Tensor  # [B, H, D, Dv], times scale


def attend(
    tensors: Sequence[torch.Tensor],
    key_padding_mask: torch.Tensor | None,
    local_weight: torch.Tensor | None,
    settings: Settings,
) -> torch.Tensor:
    """Output `[B, N, H, Dv]`, local term included.

    Args:
        tensors: Mapped q and k, and v, padded keys and values zero; or one packed qkv `[B, N, 3, H, D]`.
        key_padding_mask: `[B, M]` bool, True for a real key, or None.
        local_weight: `[B, H, Dv, 3, 3]` or None.
        settings: The rest.
    """
    inputs = tensors if local_weight is None else (*tensors, local_weight)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return _forward(*_separate(tensors), key_padding_mask, local_weight, settings)[0]
    return cast(torch.Tensor, _BlockedAttention.apply(settings, key_padding_mask, local_weight, *tensors))


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    local_weight: torch.Tensor | None,
    settings: Settings,
) -> tuple[torch.Tensor, State]:
    (B, N, H, D), Dv = q.shape, v.shape[3]
    out = q.new_empty(B, N, H, Dv)
    state = State(q.new_empty(B, 1, H, D), q.new_empty(B, 1, H, Dv), q.new_zeros(B, H, D, Dv))
    scratch = _Scratch(q)
    inverse_count = _inverse_count(k, key_padding_mask)
    for batch in _batches(B, max(N, k.shape[1]), H * max(D, Dv)):
        key_mean, value_mean, covariance = (tensor[batch] for tensor in state)
        torch.sum(k[batch], 1, keepdim=True, out=key_mean).mul_(inverse_count[batch])
        torch.sum(v[batch], 1, keepdim=True, out=value_mean).mul_(inverse_count[batch])
        for tokens in _token_blocks(batch, k.shape[1], H * max(D, Dv)):
            key = scratch.centered(0, k[batch, tokens], key_mean)
            if key_padding_mask is not None:
                key.mul_(key_padding_mask[batch, None, tokens, None])
            value = scratch.centered(1, v[batch, tokens], value_mean)
            _accumulate_product(covariance, key, value)
        covariance.mul_(inverse_count[batch] * settings.scale)

        for tokens in _token_blocks(batch, N, H * max(D, Dv)):
            query = scratch.copied(0, q[batch, tokens])
            deviation = scratch.product(1, query, covariance)
            if settings.normalization != "subtract":
                deviation.mul_(_amplification(query, key_mean, settings))
            torch.add(deviation, _heads_first(value_mean), out=_heads_first(out[batch, tokens]))
        if local_weight is not None:
            _add_local_term(_grid(out[batch], settings), _grid(v[batch], settings), local_weight[batch])
    return out, state


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    local_weight: torch.Tensor | None,
    settings: Settings,
    state: State,
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
) -> torch.Tensor | None:
    """Fill `grad_q`, `grad_k`, `grad_v` (any strides); return the gradient of `local_weight`.

    With G = grad_out, y = phi(q) C and A = (scale/M) sum_i phi(q_i)^T a_i G_i, the gradients are
    `k: (v - vbar) A^T`, `v: (k - kbar) A + sum_i G_i / M`, `q: a G C^T`, and, because a depends on z,
    `scale · dz · kbar` more for q and `scale · sum_i dz_i phi(q_i) / M` more for k, where `dz = a'(z) (G · y)`.
    """
    (B, N, H, D), Dv = q.shape, v.shape[3]
    divides = settings.normalization != "subtract"
    scratch = _Scratch(q)
    inverse_count = _inverse_count(k, key_padding_mask)
    grad_local = torch.empty_like(local_weight) if local_weight is not None else None
    for batch in _batches(B, max(N, k.shape[1]), H * max(D, Dv)):
        key_mean, value_mean, covariance = (tensor[batch] for tensor in state)
        grad_covariance = torch.zeros_like(covariance)
        grad_key_mean = torch.zeros_like(_heads_first(key_mean))
        for tokens in _token_blocks(batch, N, H * max(D, Dv)):
            query = scratch.copied(0, q[batch, tokens])
            grad = scratch.copied(1, grad_out[batch, tokens])
            grad_mean_score = None
            if divides:
                factor, slope = _amplification_and_slope(query, key_mean, settings)
                deviation = scratch.product(2, query, covariance)
                grad_mean_score = deviation.mul_(grad).sum(-1, keepdim=True).mul_(slope).mul_(settings.scale)
                grad.mul_(factor)
                grad_key_mean.add_((query * grad_mean_score).sum(2, keepdim=True))
            _accumulate_product(grad_covariance, query, grad)
            grad_query = scratch.product(2, grad, covariance.transpose(-1, -2))
            if grad_mean_score is not None:
                grad_query.addcmul_(grad_mean_score, _heads_first(key_mean))
            _heads_first(grad_q[batch, tokens]).copy_(grad_query)

        grad_covariance.mul_(inverse_count[batch] * settings.scale)
        grad_key_mean.mul_(inverse_count[batch])
        grad_value_mean = _heads_first(grad_out[batch].sum(1, keepdim=True)).mul(inverse_count[batch])
        for tokens in _token_blocks(batch, k.shape[1], H * max(D, Dv)):
            # Both means drop out of their own gradients: the centered keys and values that would carry it sum to zero.
            value = scratch.centered(1, v[batch, tokens], value_mean)
            grad_key = scratch.product(2, value, grad_covariance.transpose(-1, -2))
            torch.add(grad_key, grad_key_mean, out=_heads_first(grad_k[batch, tokens]))
            key = scratch.centered(0, k[batch, tokens], key_mean)
            grad_value = scratch.product(2, key, grad_covariance)
            torch.add(grad_value, grad_value_mean, out=_heads_first(grad_v[batch, tokens]))
        if local_weight is not None and grad_local is not None:
            grad_grid = _grid(grad_out[batch], settings)
            value_grid = _grid(v[batch], settings)
            _add_local_term(_grid(grad_v[batch], settings), grad_grid, local_weight[batch].flip(-1, -2))
            _correlate(grad_local[batch], grad_grid, value_grid, scratch)
    return grad_local


def _amplification(query: torch.Tensor, key_mean: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Factor a(z) `[b, H, n, 1]` for a block of queries `[b, H, n, D]`."""
    mean_score = torch.matmul(query, _heads_first(key_mean).transpose(-1, -2)).mul_(settings.scale)
    return composed.amplification(mean_score, settings.normalization)


def _amplification_and_slope(
    query: torch.Tensor, key_mean: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """a(z) and its derivative: both a = 1/z and a = 1 + 1/z have the slope -1/z²."""
    factor = _amplification(query, key_mean, settings)
    inverse = factor if settings.normalization == "divide" else factor - 1
    return factor, -inverse.square()


def _add_local_term(out: torch.Tensor, grid: torch.Tensor, local_weight: torch.Tensor) -> None:
    """Add to `out` `[b, h, w, H, Dv]` the 3×3 cross-correlation of `grid` with `local_weight` `[b, H, Dv, 3, 3]`."""
    # One tap's weights for all channels side by side: the innermost loop runs over channels, with vector loads.
    taps = local_weight.permute(3, 4, 0, 1, 2).contiguous()[:, :, :, None, None]
    for i, j, target, source in _taps(grid):
        out[target].addcmul_(grid[source], taps[i, j])


def _correlate(grad_local: torch.Tensor, grad_grid: torch.Tensor, grid: torch.Tensor, scratch: _Scratch) -> None:
    """Write into `grad_local` `[b, H, Dv, 3, 3]` the sums over the grid of gradient times shifted value."""
    grad_local.zero_()
    for i, j, target, source in _taps(grid):
        grad = grad_grid[target]
        product = torch.mul(grad, grid[source], out=scratch.empty(0, grad.shape))
        grad_local[..., i, j] += product.flatten(1, 2).sum(1)


class _Scratch:
    """Reusable buffers of one block each, heads first and contiguous, as batched matrix products need."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.buffers: dict[int, torch.Tensor] = {}

    def empty(self, slot: int, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        buffer = self.buffers.get(slot)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[slot] = self.like.new_empty(size)
        return buffer[:size].view(shape)

    def copied(self, slot: int, tokens: torch.Tensor) -> torch.Tensor:
        source = _heads_first(tokens)
        return self.empty(slot, source.shape).copy_(source)

    def centered(self, slot: int, tokens: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        source = _heads_first(tokens)
        return torch.sub(source, _heads_first(mean), out=self.empty(slot, source.shape))

    def product(self, slot: int, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        b, H, n, _ = left.shape
        out = self.empty(slot, (b, H, n, right.shape[3]))
        torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out=out.flatten(0, 1))
        return out


def _accumulate_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total `[b, H, D, Dv]` += leftᵀ right, over blocks `[b, H, n, D]` and `[b, H, n, Dv]`."""
    flat = total.flatten(0, 1)
    # Not baddbmm_: torch's flop counter overlooks that one.
    torch.baddbmm(flat, left.flatten(0, 1).transpose(1, 2), right.flatten(0, 1), out=flat)


def _heads_first(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.permute(0, 2, 1, 3)


def _grid(tokens: torch.Tensor, settings: Settings) -> torch.Tensor:
    assert settings.grid_size is not None
    return torch.unflatten(tokens[:, settings.num_prefix_tokens :], 1, settings.grid_size)


def _inverse_count(k: torch.Tensor, key_padding_mask: torch.Tensor | None) -> torch.Tensor:
    """1 / number of real keys, `[B, 1, 1, 1]`."""
    if key_padding_mask is None:
        return k.new_full((k.shape[0], 1, 1, 1), 1 / k.shape[1])
    return key_padding_mask.sum(1).clamp(min=1).to(k.dtype).reciprocal()[:, None, None, None]


def _batches(batch_size: int, tokens: int, width: int) -> Iterator[slice]:
    """Slices of as many samples as fill a block, at least one."""
    return _slices(batch_size, BLOCK_ELEMENTS // (tokens * width))


def _token_blocks(batch: slice, tokens: int, width: int) -> Iterator[slice]:
    """Slices of the tokens of a batch slice; several only where one sample overflows a block."""
    return _slices(tokens, BLOCK_ELEMENTS // (width * (batch.stop - batch.start)))


_Index: TypeAlias = tuple[slice, slice, slice]


def _taps(grid: torch.Tensor) -> Iterator[tuple[int, int, _Index, _Index]]:
    """For every block of rows and every tap (i, j): the positions that have that neighbor, and the neighbors."""
    b, height, width, H, D = grid.shape
    everything = slice(None)
    for rows in _slices(height, BLOCK_ELEMENTS // (b * width * H * D)):
        for i in range(3):
            target_rows, source_rows = _overlap(rows, i - 1, height)
            for j in range(3):
                target_columns, source_columns = _overlap(slice(0, width), j - 1, width)
                target = (everything, target_rows, target_columns)
                yield i, j, target, (everything, source_rows, source_columns)


def _slices(extent: int, step: int) -> Iterator[slice]:
    step = max(step, 1)
    return (slice(start, min(start + step, extent)) for start in range(0, extent, step))


def _overlap(target: slice, offset: int, extent: int) -> tuple[slice, slice]:
    """The part of `target` whose neighbor at `offset` lies in [0, extent), and that neighbor's slice."""
    start = max(target.start, -offset)
    stop = max(min(target.stop, extent - offset), start)
    return slice(start, stop), slice(start + offset, stop + offset)


class _BlockedAttention(torch.autograd.Function):
    """The blocked passes on (q, k, v), or on one packed tensor, whose gradient is then written packed."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, mask: Any, local_weight: Any, *tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = _separate(tensors)
        out, state = _forward(q, k, v, mask, local_weight, settings)
        ctx.save_for_backward(mask, local_weight, *state, *tensors)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        mask, local_weight, key_mean, value_mean, covariance, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *_differentiable_backward(grad_outputs[0], tensors, mask, local_weight, ctx.settings)
        grads = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        state = State(key_mean, value_mean, covariance)
        grad_local = _backward(
            grad_outputs[0], *_separate(tensors), mask, local_weight, ctx.settings, state, *_separate(grads)
        )
        return None, None, grad_local, *grads


def _differentiable_backward(
    grad_out: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    local_weight: torch.Tensor | None,
    settings: Settings,
) -> list[torch.Tensor | None]:
    """Gradients of local_weight and of `tensors` as differentiable functions, for `create_graph=True`."""

    def attend(inputs: Sequence[torch.Tensor | None]) -> torch.Tensor:
        local_weight, *tensors = inputs
        q, k, v = _separate(cast(Sequence[torch.Tensor], tensors))
        scale, normalization, grid_size, prefix = settings
        return composed.attend(
            AttentionCall(q, k, v, None, scale, "identity", normalization, mask, local_weight, grid_size, prefix)
        )

    return composed.differentiable_gradients(attend, [local_weight, *tensors], grad_out)


def _separate(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) from (q, k, v), or as views of one packed `[B, N, 3, H, D]`."""
    q, k, v = tensors[0].unbind(2) if len(tensors) == 1 else tensors
    return q, k, v
