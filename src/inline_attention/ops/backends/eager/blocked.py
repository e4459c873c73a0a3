"""InLine attention on a CPU by hand-written passes over blocks that stay in cache.

A block of two megabytes is centered, multiplied and written while it is in cache, into buffers allocated once, and the
3×3 term is nine in-place multiply-adds on shifted views. The backward pass is written out too (docs/math.md).

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
`b`, `n`: the samples and tokens of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from inline_attention.ops import composed
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.fused_op import empty_state, split_state

# Elements of one block. Smaller blocks starve the threads (PyTorch splits work in pieces of 32 Ki elements), larger
# ones leave the cache: 2 MiB of float32 was the best of 2^15 … 2^20 elements on two cores, N = 196 … 16384.
BLOCK_ELEMENTS = 1 << 19


def forward(call: AttentionCall, keep_state: bool) -> tuple[Tensor, Tensor]:
    """Output and state, see `fused_op.Forward`. The feature map is applied already; padded keys and values are zero."""
    del keep_state
    q, k, v, key_padding_mask, local_weight = call.q, call.k, call.v, call.key_padding_mask, call.local_weight
    (B, N, H, D), Dv = q.shape, v.shape[3]
    width = H * max(D, Dv)
    out = q.new_empty(B, N, H, Dv)
    state = empty_state(q, v, q.dtype).zero_()
    scratch = _Scratch(q)
    inverse_count = _inverse_count(k, key_padding_mask)
    for batch in _slices(B, BLOCK_ELEMENTS // (max(N, k.shape[1]) * width)):
        covariance, key_mean, value_mean = _parts(state, q, v, batch)
        torch.sum(k[batch], 1, keepdim=True, out=key_mean).mul_(inverse_count[batch])
        torch.sum(v[batch], 1, keepdim=True, out=value_mean).mul_(inverse_count[batch])
        for tokens in _token_blocks(batch, k.shape[1], width):
            key = scratch.centered(0, k[batch, tokens], key_mean)
            if key_padding_mask is not None:
                key.mul_(key_padding_mask[batch, None, tokens, None])
            value = scratch.centered(1, v[batch, tokens], value_mean)
            _accumulate_product(covariance, key, value)
        covariance.mul_(inverse_count[batch] * call.scale)

        for tokens in _token_blocks(batch, N, width):
            query = scratch.copied(0, q[batch, tokens])
            deviation = scratch.product(1, query, covariance)
            if call.normalization != "subtract":
                deviation.mul_(_amplification(query, key_mean, call))
            torch.add(deviation, _heads_first(value_mean), out=_heads_first(out[batch, tokens]))
        if local_weight is not None:
            _add_local_term(_grid(out[batch], call), _grid(v[batch], call), local_weight[batch])
    return out, state


def backward(
    call: AttentionCall, grad_out: Tensor, state: Tensor | None, grads: tuple[Tensor, Tensor, Tensor]
) -> Tensor | None:
    """Fill the gradients of q, k and v; return that of `local_weight`. See `fused_op.Backward`.

    With G = grad_out, y = phi(q) C and A = (scale/M) sum_i phi(q_i)^T a_i G_i, the gradients are
    `k: (v - vbar) A^T`, `v: (k - kbar) A + sum_i G_i / M`, `q: a G C^T`, and, because a depends on z,
    `scale · dz · kbar` more for q and `scale · sum_i dz_i phi(q_i) / M` more for k, where `dz = a'(z) (G · y)`.
    """
    assert state is not None
    q, k, v, local_weight = call.q, call.k, call.v, call.local_weight
    grad_q, grad_k, grad_v = grads
    (B, N, H, D), Dv = q.shape, v.shape[3]
    width = H * max(D, Dv)
    divides = call.normalization != "subtract"
    scratch = _Scratch(q)
    inverse_count = _inverse_count(k, call.key_padding_mask)
    grad_local = torch.empty_like(local_weight) if local_weight is not None else None
    for batch in _slices(B, BLOCK_ELEMENTS // (max(N, k.shape[1]) * width)):
        covariance, key_mean, value_mean = _parts(state, q, v, batch)
        grad_covariance = torch.zeros_like(covariance)
        grad_key_mean = torch.zeros_like(_heads_first(key_mean))
        for tokens in _token_blocks(batch, N, width):
            query = scratch.copied(0, q[batch, tokens])
            grad = scratch.copied(1, grad_out[batch, tokens])
            grad_mean_score = None
            if divides:
                factor = _amplification(query, key_mean, call)
                inverse = factor if call.normalization == "divide" else factor - 1
                slope = -inverse.square()  # both a = 1/z and a = 1 + 1/z have the slope -1/z²
                deviation = scratch.product(2, query, covariance)
                grad_mean_score = deviation.mul_(grad).sum(-1, keepdim=True).mul_(slope).mul_(call.scale)
                grad.mul_(factor)
                grad_key_mean.add_((query * grad_mean_score).sum(2, keepdim=True))
            _accumulate_product(grad_covariance, query, grad)
            grad_query = scratch.product(2, grad, covariance.transpose(-1, -2))
            if grad_mean_score is not None:
                grad_query.addcmul_(grad_mean_score, _heads_first(key_mean))
            _heads_first(grad_q[batch, tokens]).copy_(grad_query)

        grad_covariance.mul_(inverse_count[batch] * call.scale)
        grad_key_mean.mul_(inverse_count[batch])
        grad_value_mean = _heads_first(grad_out[batch].sum(1, keepdim=True)).mul(inverse_count[batch])
        for tokens in _token_blocks(batch, k.shape[1], width):
            # Both means drop out of their own gradients: the centered keys and values that would carry it sum to zero.
            value = scratch.centered(1, v[batch, tokens], value_mean)
            grad_key = scratch.product(2, value, grad_covariance.transpose(-1, -2))
            torch.add(grad_key, grad_key_mean, out=_heads_first(grad_k[batch, tokens]))
            key = scratch.centered(0, k[batch, tokens], key_mean)
            grad_value = scratch.product(2, key, grad_covariance)
            torch.add(grad_value, grad_value_mean, out=_heads_first(grad_v[batch, tokens]))
        if local_weight is not None and grad_local is not None:
            grad_grid = _grid(grad_out[batch], call)
            _add_local_term(_grid(grad_v[batch], call), grad_grid, local_weight[batch].flip(-1, -2))
            _correlate(grad_local[batch], grad_grid, _grid(v[batch], call), scratch)
    return grad_local


def _parts(state: Tensor, q: Tensor, v: Tensor, batch: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Covariance `[b, H, D, Dv]`, key mean `[b, 1, H, D]` and value mean `[b, 1, H, Dv]` of some samples."""
    covariance, key_mean, value_mean = split_state(state, q, v)
    return covariance[batch], key_mean[batch, None], value_mean[batch, None]


def _amplification(query: Tensor, key_mean: Tensor, call: AttentionCall) -> Tensor:
    """Factor a(z) `[b, H, n, 1]` for a block of queries `[b, H, n, D]`."""
    mean_score = torch.matmul(query, _heads_first(key_mean).transpose(-1, -2)).mul_(call.scale)
    return composed.amplification(mean_score, call.normalization)


def _add_local_term(out: Tensor, grid: Tensor, local_weight: Tensor) -> None:
    """Add to `out` `[b, h, w, H, Dv]` the 3×3 cross-correlation of `grid` with `local_weight` `[b, H, Dv, 3, 3]`."""
    # One tap's weights for all channels side by side: the innermost loop runs over channels, with vector loads.
    taps = local_weight.permute(3, 4, 0, 1, 2).contiguous()[:, :, :, None, None]
    for i, j, target, source in _taps(grid):
        out[target].addcmul_(grid[source], taps[i, j])


def _correlate(grad_local: Tensor, grad_grid: Tensor, grid: Tensor, scratch: _Scratch) -> None:
    """Write into `grad_local` `[b, H, Dv, 3, 3]` the sums over the grid of gradient times shifted value."""
    grad_local.zero_()
    for i, j, target, source in _taps(grid):
        grad = grad_grid[target]
        product = torch.mul(grad, grid[source], out=scratch.empty(0, grad.shape))
        grad_local[..., i, j] += product.flatten(1, 2).sum(1)


class _Scratch:
    """Reusable buffers of one block each, heads first and contiguous, as batched matrix products need."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.buffers: dict[int, Tensor] = {}

    def empty(self, slot: int, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        buffer = self.buffers.get(slot)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[slot] = self.like.new_empty(size)
        return buffer[:size].view(shape)

    def copied(self, slot: int, tokens: Tensor) -> Tensor:
        source = _heads_first(tokens)
        return self.empty(slot, source.shape).copy_(source)

    def centered(self, slot: int, tokens: Tensor, mean: Tensor) -> Tensor:
        source = _heads_first(tokens)
        return torch.sub(source, _heads_first(mean), out=self.empty(slot, source.shape))

    def product(self, slot: int, left: Tensor, right: Tensor) -> Tensor:
        b, H, n, _ = left.shape
        out = self.empty(slot, (b, H, n, right.shape[3]))
        torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out=out.flatten(0, 1))
        return out


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total `[b, H, D, Dv]` += leftᵀ right, over blocks `[b, H, n, D]` and `[b, H, n, Dv]`."""
    flat = total.flatten(0, 1)
    # Not baddbmm_: torch's flop counter overlooks that one.
    torch.baddbmm(flat, left.flatten(0, 1).transpose(1, 2), right.flatten(0, 1), out=flat)


def _heads_first(tokens: Tensor) -> Tensor:
    return tokens.permute(0, 2, 1, 3)


def _grid(tokens: Tensor, call: AttentionCall) -> Tensor:
    assert call.grid_size is not None
    return torch.unflatten(tokens[:, call.num_prefix_tokens :], 1, call.grid_size)


def _inverse_count(k: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """1 / number of real keys, `[B, 1, 1, 1]`."""
    if key_padding_mask is None:
        return k.new_full((k.shape[0], 1, 1, 1), 1 / k.shape[1])
    return key_padding_mask.sum(1).clamp(min=1).to(k.dtype).reciprocal()[:, None, None, None]


def _token_blocks(batch: slice, tokens: int, width: int) -> Iterator[slice]:
    """Slices of the tokens of a batch slice; several only where one sample overflows a block."""
    return _slices(tokens, BLOCK_ELEMENTS // (width * (batch.stop - batch.start)))


_Index: TypeAlias = tuple[slice, slice, slice]


def _taps(grid: Tensor) -> Iterator[tuple[int, int, _Index, _Index]]:
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
    """Slices of `step` each, of one at least."""
    step = max(step, 1)
    return (slice(start, min(start + step, extent)) for start in range(0, extent, step))


def _overlap(target: slice, offset: int, extent: int) -> tuple[slice, slice]:
    """The part of `target` whose neighbor at `offset` lies in [0, extent), and that neighbor's slice."""
    start = max(target.start, -offset)
    stop = max(min(target.stop, extent - offset), start)
    return slice(start, stop), slice(start + offset, stop + offset)
