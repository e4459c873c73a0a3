# Triton's language is Python in name only: a type checker sees constants where the compiler sees tensors.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
"""Forward kernels: state of the keys and values, merge of its parts, output. Then the function that launches them.

    state:  for a chunk of keys: their number, the means of phi(k) and v, and Σ (phi(k) - kbar)ᵀ (v - vbar)
    merge:  the same of a sample, from its chunks (only if there are several)
    output: vbar + a(z) · phi(q) C, plus the 3×3 term

Keys, values and queries are read once, the output is written once; the 3×3 term reads values again, mostly from cache.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values,
`S` chunks. Programs: axis 0 sample × chunk, axis 1 group of heads.
"""

import torch
import triton
import triton.language as tl

from inline_attention.ops.backends.triton import tuning
from inline_attention.ops.backends.triton.primitives import (
    accumulate_outer,
    grid_neighbor,
    group_heads,
    inverse_mean_score,
    load_channels,
    load_mask,
    load_tokens,
    map_features,
    matrix_offsets,
    multiply,
    narrow_reference,
    spread_over_heads,
    store_tokens,
    transpose_taps,
)
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.fused_op import empty_state, split_state


@triton.jit
def _block_statistics(x, real, count, HALF_PRODUCTS: tl.constexpr):
    """Of mapped keys or values `[tokens, channels]`: mean, what may be multiplied without loss, and the mean of that.

    Half-precision values are shifted only by what leaves them exact; float32 values by their mean, so that the mean
    of the shifted ones is a rounding error and counts as zero.
    """
    mean = tl.sum(x, axis=0) / tl.maximum(count, 1.0)
    if HALF_PRODUCTS:
        lowest = tl.min(tl.where(real[:, None], x, float("inf")), axis=0)
        highest = tl.max(tl.where(real[:, None], x, float("-inf")), axis=0)
        reference = narrow_reference(lowest, highest)
    else:
        reference = mean
    shifted = tl.where(real[:, None], x - reference[None, :], 0.0)
    return mean, shifted, mean - reference


@triton.jit(do_not_specialize=tuning.SIZES)
def _forward_state_kernel(
    k, v, mask, local_weight, partial, key_mean_out, value_mean_out, covariance_out, taps,
    scale, keys, heads, chunks, chunk_tokens, partial_stride,
    k_stride_batch, k_stride_token, k_stride_head,
    v_stride_batch, v_stride_token, v_stride_head,
    mask_stride_batch, mask_stride_token,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, HALF_PRODUCTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_LOCAL: tl.constexpr, ONE_CHUNK: tl.constexpr
):  # fmt: skip
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    group = tl.program_id(1)
    head, dim = group_heads(group, GROUP, BLOCK_D)
    value_head, value_dim = group_heads(group, GROUP, BLOCK_DV)
    k += sample * k_stride_batch
    v += sample * v_stride_batch
    first = chunk * chunk_tokens
    last = tl.minimum(first + chunk_tokens, keys)

    if HAS_LOCAL:  # noqa: SIM102 (one condition for the compiler, one for the program)
        if chunk == 0:
            transpose_taps(local_weight, taps, sample, value_head, value_dim, heads, DV)
    count = 0.0
    key_mean = tl.zeros([GROUP * BLOCK_D], tl.float32)
    value_mean = tl.zeros([GROUP * BLOCK_DV], tl.float32)
    moment = tl.zeros([GROUP * BLOCK_D, GROUP * BLOCK_DV], tl.float32)
    for start in range(first, last, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        real = token < last
        if HAS_MASK:
            real = load_mask(mask + sample * mask_stride_batch, mask_stride_token, token, real)
            block_count = tl.sum(real.to(tl.float32), axis=0)
        else:
            block_count = tl.minimum(last - start, BLOCK_TOKENS).to(tl.float32)
        raw_key = load_tokens(k, k_stride_token, k_stride_head, token, real, head, dim, heads, D)
        raw_value = load_tokens(v, v_stride_token, v_stride_head, token, real, value_head, value_dim, heads, DV)
        key = tl.where(real[:, None], map_features(raw_key.to(tl.float32), FEATURE_MAP), 0.0)
        block_key_mean, key, key_rest = _block_statistics(key, real, block_count, HALF_PRODUCTS)
        block_value_mean, value, value_rest = _block_statistics(
            raw_value.to(tl.float32), real, block_count, HALF_PRODUCTS
        )
        if HALF_PRODUCTS:
            moment = accumulate_outer(key.to(raw_key.dtype), value.to(raw_value.dtype), moment)
            moment -= (block_count * key_rest)[:, None] * value_rest[None, :]
        else:
            moment = accumulate_outer(key, value, moment)
        # Parallel covariance rule: the block joins the blocks before it.
        weight = block_count / tl.maximum(count + block_count, 1.0)
        key_step = block_key_mean - key_mean
        value_step = block_value_mean - value_mean
        moment += (count * weight * key_step)[:, None] * value_step[None, :]
        key_mean += weight * key_step
        value_mean += weight * value_step
        count += block_count

    key_valid = (dim < D) & (head < heads)
    value_valid = (value_dim < DV) & (value_head < heads)
    if ONE_CHUNK:
        offset, valid = matrix_offsets(head, dim, value_head, value_dim, heads, D * DV, D, DV)
        tl.store(
            covariance_out + sample * heads * D * DV + offset, moment * (scale / tl.maximum(count, 1.0)), mask=valid
        )
        tl.store(key_mean_out + sample * heads * D + head * D + dim, key_mean, mask=key_valid)
        tl.store(value_mean_out + sample * heads * DV + value_head * DV + value_dim, value_mean, mask=value_valid)
    else:
        # Per head: moment, key mean, value mean, count.
        samples = tl.num_programs(0) // chunks
        partial += (chunk * samples + sample) * heads * partial_stride
        offset, valid = matrix_offsets(head, dim, value_head, value_dim, heads, partial_stride, D, DV)
        tl.store(partial + offset, moment, mask=valid)
        tl.store(partial + head * partial_stride + D * DV + dim, key_mean, mask=key_valid)
        tl.store(partial + value_head * partial_stride + D * DV + D + value_dim, value_mean, mask=value_valid)
        own_heads = (group * GROUP + tl.arange(0, GROUP)).to(tl.int64)
        tl.store(
            partial + own_heads * partial_stride + D * DV + D + DV,
            tl.zeros([GROUP], tl.float32) + count,
            mask=own_heads < heads,
        )


@triton.jit(do_not_specialize=tuning.SIZES)
def _merge_state_kernel(
    partial, key_mean_out, value_mean_out, covariance_out, scale, samples_heads, chunks, partial_stride,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr
):  # fmt: skip
    """Program: sample and head on axis 0, a few rows of the covariance on axis 1."""
    matrix = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DV)
    partial += matrix * partial_stride
    chunk_stride = tl.cast(samples_heads, tl.int64) * partial_stride

    total = tl.zeros([BLOCK_CHUNKS], tl.float32)
    key_sum = tl.zeros([BLOCK_CHUNKS, BLOCK_ROWS], tl.float32)
    value_sum = tl.zeros([BLOCK_CHUNKS, BLOCK_DV], tl.float32)
    for start in range(0, chunks, BLOCK_CHUNKS):
        chunk = start + tl.arange(0, BLOCK_CHUNKS)
        base = partial + chunk * chunk_stride
        present = chunk < chunks
        count = tl.load(base + D * DV + D + DV, mask=present, other=0.0)
        key_mean = tl.load(base[:, None] + D * DV + row[None, :], mask=present[:, None] & (row < D)[None, :], other=0.0)
        value_mean = tl.load(
            base[:, None] + D * DV + D + column[None, :], mask=present[:, None] & (column < DV)[None, :], other=0.0
        )
        total += count
        key_sum += count[:, None] * key_mean
        value_sum += count[:, None] * value_mean
    inverse_count = 1.0 / tl.maximum(tl.sum(total, axis=0), 1.0)
    key_mean_all = tl.sum(key_sum, axis=0) * inverse_count
    value_mean_all = tl.sum(value_sum, axis=0) * inverse_count

    moment = tl.zeros([BLOCK_CHUNKS, BLOCK_ROWS, BLOCK_DV], tl.float32)
    for start in range(0, chunks, BLOCK_CHUNKS):
        chunk = start + tl.arange(0, BLOCK_CHUNKS)
        base = partial + chunk * chunk_stride
        present = chunk < chunks
        count = tl.load(base + D * DV + D + DV, mask=present, other=0.0)
        key_present = present[:, None] & (row < D)[None, :]
        value_present = present[:, None] & (column < DV)[None, :]
        key_mean = tl.load(base[:, None] + D * DV + row[None, :], mask=key_present, other=0.0)
        value_mean = tl.load(base[:, None] + D * DV + D + column[None, :], mask=value_present, other=0.0)
        key_step = count[:, None] * (key_mean - key_mean_all[None, :])
        value_step = value_mean - value_mean_all[None, :]
        moment += key_step[:, :, None] * value_step[:, None, :]
        moment += tl.load(
            base[:, None, None] + row[None, :, None] * DV + column[None, None, :],
            mask=key_present[:, :, None] & (column < DV)[None, None, :],
            other=0.0,
        )
    covariance = tl.sum(moment, axis=0) * (scale * inverse_count)
    valid = (row < D)[:, None] & (column < DV)[None, :]
    tl.store(covariance_out + matrix * D * DV + row[:, None] * DV + column[None, :], covariance, mask=valid)
    tl.store(key_mean_out + matrix * D + row, key_mean_all, mask=row < D)
    if tl.program_id(1) == 0:
        tl.store(value_mean_out + matrix * DV + column, value_mean_all, mask=column < DV)


@triton.jit(do_not_specialize=tuning.SIZES)
def _forward_output_kernel(
    q, v, mask, taps, key_mean_in, value_mean_in, covariance_in, out,
    scale, tokens, heads, chunks, chunk_tokens, height, width, prefix,
    q_stride_batch, q_stride_token, q_stride_head,
    v_stride_batch, v_stride_token, v_stride_head,
    mask_stride_batch, mask_stride_token,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, NORMALIZATION: tl.constexpr, HALF_PRODUCTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_LOCAL: tl.constexpr, RESIDENT: tl.constexpr
):  # fmt: skip
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    group = tl.program_id(1)
    head, dim = group_heads(group, GROUP, BLOCK_D)
    value_head, value_dim = group_heads(group, GROUP, BLOCK_DV)
    q += sample * q_stride_batch
    v += sample * v_stride_batch
    out += sample * tokens * heads * DV
    first = chunk * chunk_tokens
    last = tl.minimum(first + chunk_tokens, tokens)

    if HAS_LOCAL:
        taps += sample * 9 * heads * DV
    covariance_in += sample * heads * D * DV
    offset, diagonal = matrix_offsets(head, dim, value_head, value_dim, heads, D * DV, D, DV)
    value_mean = load_channels(value_mean_in + sample * heads * DV, value_head, value_dim, heads, DV)
    if NORMALIZATION != "subtract":
        key_mean = load_channels(key_mean_in + sample * heads * D, head, dim, heads, D)
    if RESIDENT:
        covariance = tl.load(covariance_in + offset, mask=diagonal, other=0.0)
    for start in range(first, last, BLOCK_TOKENS):
        if not RESIDENT:
            covariance = tl.load(covariance_in + offset, mask=diagonal, other=0.0)
        token = start + tl.arange(0, BLOCK_TOKENS)
        real = token < last
        raw_query = load_tokens(q, q_stride_token, q_stride_head, token, real, head, dim, heads, D)
        query = map_features(raw_query.to(tl.float32), FEATURE_MAP)
        result = multiply(query.to(raw_query.dtype) if HALF_PRODUCTS else query, covariance)
        if NORMALIZATION != "subtract":
            factor = inverse_mean_score(query, key_mean, scale, GROUP, BLOCK_D)
            if NORMALIZATION == "magnitude":
                factor += 1.0
            result *= spread_over_heads(factor, GROUP, BLOCK_DV)
        result += value_mean[None, :]
        if HAS_LOCAL:
            # A loop over rows, unrolled over columns: nine tiles in flight at once would not fit the registers.
            # A sum of its own: its layout is that of loads, and is converted to that of products only once.
            local = tl.zeros([BLOCK_TOKENS, GROUP * BLOCK_DV], tl.float32)
            for tap_row in range(3):
                for tap_column in tl.static_range(3):
                    neighbor, inside = grid_neighbor(token, tap_row - 1, tap_column - 1, height, width, prefix)
                    inside = inside & real
                    if HAS_MASK:
                        inside = load_mask(mask + sample * mask_stride_batch, mask_stride_token, neighbor, inside)
                    value = load_tokens(
                        v, v_stride_token, v_stride_head, neighbor, inside, value_head, value_dim, heads, DV
                    )
                    weight = load_channels(
                        taps + (tap_row * 3 + tap_column) * heads * DV, value_head, value_dim, heads, DV
                    )
                    local += value.to(tl.float32) * weight.to(tl.float32)[None, :]
            result += local
        store_tokens(out, heads * DV, DV, token, real, value_head, value_dim, heads, result, DV)


def forward(call: AttentionCall, keep_state: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[B, N, H, Dv]` and state, as `fused_op.Forward` asks.

    Not in the memory of q: a warp may still read queries that another warp of its program would overwrite.
    """
    del keep_state  # the output kernel reads it from memory in any case
    q, v, local_weight = call.q, call.v, call.local_weight
    state = empty_state(q, v)
    taps = None
    if local_weight is not None:
        local_weight = local_weight.contiguous()
        taps = torch.empty((q.shape[0], 9, *v.shape[2:]), dtype=v.dtype, device=q.device)
    accumulate(call, split_state(state, q, v), local_weight, taps)
    return apply(call, split_state(state, q, v), taps), state


def accumulate(
    call: AttentionCall,
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    local_weight: torch.Tensor | None = None,
    taps: torch.Tensor | None = None,
) -> None:
    """Fill a state (see `split_state`) from the keys and values of a call; copy `local_weight` to `taps` if given."""
    k, v, key_padding_mask = call.k, call.v, call.key_padding_mask
    (B, M, H, D), DV = k.shape, v.shape[3]
    covariance, key_mean, value_mean = state
    device, scale = k.device, float(call.scale)
    heads = tuning.head_group(H, D, DV)
    half_products = tuning.half_products(k.dtype, call.feature_map)
    mask_strides = (0, 0) if key_padding_mask is None else key_padding_mask.stride()
    plan = tuning.plan("state", B, M, heads, half_products, device)
    partial_stride = tuning.state_floats(D, DV)
    partial = None
    if plan.chunks > 1:
        partial = torch.empty((plan.chunks, B, H, partial_stride), dtype=torch.float32, device=device)
    _forward_state_kernel[(B * plan.chunks, heads.groups)](
        k, v, key_padding_mask, local_weight, partial, key_mean, value_mean, covariance, taps,
        scale, M, H, plan.chunks, plan.chunk_tokens, partial_stride,
        *k.stride()[:3], *v.stride()[:3], *mask_strides,
        D, DV, heads.size, heads.block_d, heads.block_dv, plan.block_tokens, call.feature_map, half_products,
        key_padding_mask is not None, local_weight is not None, plan.chunks == 1,
        **plan.options,
    )  # fmt: skip
    if partial is not None:
        rows, chunks = tuning.merge_block(plan.chunks, heads)
        _merge_state_kernel[(B * H, triton.cdiv(D, rows))](
            partial, key_mean, value_mean, covariance, scale, B * H, plan.chunks, partial_stride,
            D, DV, heads.block_dv, rows, chunks, enable_fp_fusion=True,
        )  # fmt: skip


def apply(
    call: AttentionCall, state: tuple[torch.Tensor, torch.Tensor, torch.Tensor], taps: torch.Tensor | None
) -> torch.Tensor:
    """Output `[B, N, H, Dv]` of the queries of a call over a state; `taps` `[B, 9, H, Dv]` are its local weights."""
    q, v, key_padding_mask = call.q, call.v, call.key_padding_mask
    covariance, key_mean, value_mean = state
    (B, N, H, D), DV = q.shape, covariance.shape[3]
    heads = tuning.head_group(H, D, DV)
    half_products = tuning.half_products(q.dtype, call.feature_map)
    mask_strides = (0, 0) if key_padding_mask is None else key_padding_mask.stride()
    out = torch.empty((B, N, H, DV), dtype=v.dtype, device=q.device)
    plan = tuning.plan("output", B, N, heads, half_products, q.device)
    _forward_output_kernel[(B * plan.chunks, heads.groups)](
        q, v, key_padding_mask, taps, key_mean, value_mean, covariance, out,
        float(call.scale), N, H, plan.chunks, plan.chunk_tokens, *(call.grid_size or (0, 0)), call.num_prefix_tokens,
        *q.stride()[:3], *v.stride()[:3], *mask_strides,
        D, DV, heads.size, heads.block_d, heads.block_dv, plan.block_tokens,
        call.feature_map, call.normalization, half_products,
        key_padding_mask is not None, taps is not None, heads.resident,
        **plan.options,
    )  # fmt: skip
    return out
