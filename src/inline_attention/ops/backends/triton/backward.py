# Triton's language is Python in name only: a type checker sees constants where the compiler sees tensors.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
"""Backward kernels: a pass over queries, one over keys and values, one for the 3×3 weights. Then their launches.

    queries: dphi(q) = a G Cᵀ + σδ kbar, and over a chunk the sums A = Σ phi(q)ᵀ aG, Σ G, Σ σδ phi(q)
    keys:    dphi(k) = (v - vbar) Aᵀ + …, dv = (phi(k) - kbar) A + Σ G / M + the transposed 3×3 term
    weights: Σ G_i ⊙ v_{neighbor of i} over a chunk

The formulas are those of docs/math.md. Sums over chunks are added up by PyTorch, in a fixed order.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values,
`S` chunks. Programs: axis 0 sample × chunk, axis 1 group of heads.
"""

import torch
import triton
import triton.language as tl

from inline_attention.ops.backends.triton import tuning
from inline_attention.ops.backends.triton.primitives import (
    accumulate_outer,
    fold_tokens,
    grid_neighbor,
    group_heads,
    inverse_mean_score,
    load_channels,
    load_mask,
    load_tokens,
    map_derivative,
    map_features,
    matrix_offsets,
    multiply,
    multiply_mean,
    spread_over_heads,
    store_tokens,
    sum_over_heads,
    transpose_taps,
)
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.fused_op import split_state


@triton.jit(do_not_specialize=tuning.SIZES)
def _backward_query_kernel(
    grad_out, q, local_weight, key_mean_in, covariance_in, grad_q, partial, taps,
    scale, tokens, heads, chunks, chunk_tokens, partial_stride,
    g_stride_batch, g_stride_token, g_stride_head,
    q_stride_batch, q_stride_token, q_stride_head,
    grad_q_stride_batch, grad_q_stride_token, grad_q_stride_head,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, NORMALIZATION: tl.constexpr, HALF_PRODUCTS: tl.constexpr,
    HAS_LOCAL: tl.constexpr, RESIDENT: tl.constexpr
):  # fmt: skip
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    group = tl.program_id(1)
    head, dim = group_heads(group, GROUP, BLOCK_D)
    value_head, value_dim = group_heads(group, GROUP, BLOCK_DV)
    if HAS_LOCAL:  # noqa: SIM102 (one condition for the compiler, one for the program)
        if chunk == 0:
            transpose_taps(local_weight, taps, sample, value_head, value_dim, heads, DV)
    grad_out += sample * g_stride_batch
    q += sample * q_stride_batch
    grad_q += sample * grad_q_stride_batch
    first = chunk * chunk_tokens
    last = tl.minimum(first + chunk_tokens, tokens)

    covariance_in += sample * heads * D * DV
    offset, diagonal = matrix_offsets(head, dim, value_head, value_dim, heads, D * DV, D, DV)
    if RESIDENT:
        covariance = tl.load(covariance_in + offset, mask=diagonal, other=0.0)
    grad_covariance = tl.zeros([GROUP * BLOCK_D, GROUP * BLOCK_DV], tl.float32)
    grad_sum = tl.zeros([16, GROUP * BLOCK_DV], tl.float32)
    grad_key_mean = tl.zeros([16, GROUP * BLOCK_D], tl.float32)
    if NORMALIZATION != "subtract":
        key_mean = load_channels(key_mean_in + sample * heads * D, head, dim, heads, D)
    for start in range(first, last, BLOCK_TOKENS):
        if not RESIDENT:
            covariance = tl.load(covariance_in + offset, mask=diagonal, other=0.0)
        token = start + tl.arange(0, BLOCK_TOKENS)
        present = token < last
        raw_query = load_tokens(q, q_stride_token, q_stride_head, token, present, head, dim, heads, D)
        grad = load_tokens(grad_out, g_stride_token, g_stride_head, token, present, value_head, value_dim, heads, DV)
        raw = raw_query.to(tl.float32)
        query = map_features(raw, FEATURE_MAP)
        grad_sum += fold_tokens(grad.to(tl.float32), 16)
        if HALF_PRODUCTS:
            grad_query = multiply(grad, tl.trans(covariance))
            grad_covariance = accumulate_outer(query.to(raw_query.dtype), grad, grad_covariance)
        else:
            grad = grad.to(tl.float32)
            if NORMALIZATION == "subtract":
                grad_query = multiply(grad, tl.trans(covariance))
            else:
                inverse = inverse_mean_score(query, key_mean, scale, GROUP, BLOCK_D)
                # δ of docs/math.md, times scale: both 1/z and 1 + 1/z have the slope -1/z².
                deviation = multiply(query, covariance)
                grad_score = -scale * inverse * inverse * sum_over_heads(grad * deviation, GROUP, BLOCK_DV)
                factor = inverse
                if NORMALIZATION == "magnitude":
                    factor += 1.0
                grad *= spread_over_heads(factor, GROUP, BLOCK_DV)
                grad_score = spread_over_heads(grad_score, GROUP, BLOCK_D)
                grad_key_mean += fold_tokens(grad_score * query, 16)
                grad_query = multiply(grad, tl.trans(covariance)) + grad_score * key_mean[None, :]
            grad_covariance = accumulate_outer(query, grad, grad_covariance)
        grad_query = map_derivative(raw, grad_query, FEATURE_MAP)
        store_tokens(grad_q, grad_q_stride_token, grad_q_stride_head, token, present, head, dim, heads, grad_query, D)

    # Per head: A before its factor, Σ σδ phi(q), Σ G.
    samples = tl.num_programs(0) // chunks
    partial += (chunk * samples + sample) * heads * partial_stride
    offset, diagonal = matrix_offsets(head, dim, value_head, value_dim, heads, partial_stride, D, DV)
    tl.store(partial + offset, grad_covariance, mask=diagonal)
    tl.store(
        partial + head * partial_stride + D * DV + dim, tl.sum(grad_key_mean, axis=0), mask=(dim < D) & (head < heads)
    )
    tl.store(
        partial + value_head * partial_stride + D * DV + D + value_dim,
        tl.sum(grad_sum, axis=0),
        mask=(value_dim < DV) & (value_head < heads),
    )


@triton.jit(do_not_specialize=tuning.SIZES)
def _backward_key_value_kernel(
    grad_out, k, v, mask, counts, taps, key_mean_in, value_mean_in, sums, grad_k, grad_v,
    scale, keys, heads, chunks, chunk_tokens, sums_stride, height, width, prefix,
    g_stride_batch, g_stride_token, g_stride_head,
    k_stride_batch, k_stride_token, k_stride_head,
    v_stride_batch, v_stride_token, v_stride_head,
    mask_stride_batch, mask_stride_token,
    grad_k_stride_batch, grad_k_stride_token, grad_k_stride_head,
    grad_v_stride_batch, grad_v_stride_token, grad_v_stride_head,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, FEATURE_MAP: tl.constexpr, HALF_PRODUCTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_LOCAL: tl.constexpr, RESIDENT: tl.constexpr,
    FOR_KEYS: tl.constexpr, FOR_VALUES: tl.constexpr
):  # fmt: skip
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    group = tl.program_id(1)
    head, dim = group_heads(group, GROUP, BLOCK_D)
    value_head, value_dim = group_heads(group, GROUP, BLOCK_DV)
    key_valid = (dim < D) & (head < heads)
    value_valid = (value_dim < DV) & (value_head < heads)
    grad_out += sample * g_stride_batch
    k += sample * k_stride_batch
    v += sample * v_stride_batch
    grad_k += sample * grad_k_stride_batch
    grad_v += sample * grad_v_stride_batch
    first = chunk * chunk_tokens
    last = tl.minimum(first + chunk_tokens, keys)

    if HAS_MASK:
        inverse_count = 1.0 / tl.maximum(tl.load(counts + sample), 1).to(tl.float32)
    else:
        inverse_count = 1.0 / tl.cast(keys, tl.float32)
    sums += sample * heads * sums_stride
    offset, diagonal = matrix_offsets(head, dim, value_head, value_dim, heads, sums_stride, D, DV)
    key_mean = load_channels(key_mean_in + sample * heads * D, head, dim, heads, D)
    value_mean = load_channels(value_mean_in + sample * heads * DV, value_head, value_dim, heads, DV)
    grad_key_base = inverse_count * tl.load(sums + head * sums_stride + D * DV + dim, mask=key_valid, other=0.0)
    grad_value_base = inverse_count * tl.load(
        sums + value_head * sums_stride + D * DV + D + value_dim, mask=value_valid, other=0.0
    )
    matrix = tl.load(sums + offset, mask=diagonal, other=0.0) * (scale * inverse_count)
    if HALF_PRODUCTS:
        # Values and keys enter the products as they are, and what their means contribute leaves again.
        if FOR_KEYS:
            mean_grad_key = multiply_mean(value_mean, tl.trans(matrix), v.dtype.element_ty, BLOCK_TOKENS)
        if FOR_VALUES:
            mean_grad_value = multiply_mean(key_mean, matrix, k.dtype.element_ty, BLOCK_TOKENS)
    if HAS_LOCAL:
        taps += sample * 9 * heads * DV
    for start in range(first, last, BLOCK_TOKENS):
        if not RESIDENT:
            matrix = tl.load(sums + offset, mask=diagonal, other=0.0) * (scale * inverse_count)
        token = start + tl.arange(0, BLOCK_TOKENS)
        present = token < last
        real = present
        if HAS_MASK:
            real = load_mask(mask + sample * mask_stride_batch, mask_stride_token, token, present)
        raw_key = load_tokens(k, k_stride_token, k_stride_head, token, real, head, dim, heads, D)
        raw_value = load_tokens(v, v_stride_token, v_stride_head, token, real, value_head, value_dim, heads, DV)
        raw = raw_key.to(tl.float32)
        key = map_features(raw, FEATURE_MAP)
        if FOR_KEYS:
            if HALF_PRODUCTS:
                grad_key = multiply(raw_value, tl.trans(matrix)) - mean_grad_key[None, :]
            else:
                grad_key = multiply(raw_value.to(tl.float32) - value_mean[None, :], tl.trans(matrix))
            grad_key = map_derivative(raw, grad_key + grad_key_base[None, :], FEATURE_MAP)
            grad_key = tl.where(real[:, None], grad_key, 0.0)
            store_tokens(grad_k, grad_k_stride_token, grad_k_stride_head, token, present, head, dim, heads, grad_key, D)
        if FOR_VALUES:
            if HALF_PRODUCTS:
                grad_value = multiply(key.to(raw_key.dtype), matrix) - mean_grad_value[None, :]
            else:
                grad_value = multiply(key - key_mean[None, :], matrix)
            grad_value += grad_value_base[None, :]
            if HAS_LOCAL:
                # A loop over rows, unrolled over columns: nine tiles in flight at once would not fit the registers.
                # A sum of its own: its layout is that of loads, and is converted to that of products only once.
                local = tl.zeros([BLOCK_TOKENS, GROUP * BLOCK_DV], tl.float32)
                for tap_row in range(3):
                    for tap_column in tl.static_range(3):
                        # This token is the tap's neighbor of the token on the other side.
                        source, inside = grid_neighbor(token, 1 - tap_row, 1 - tap_column, height, width, prefix)
                        grad = load_tokens(
                            grad_out, g_stride_token, g_stride_head, source, inside & real,
                            value_head, value_dim, heads, DV,
                        )  # fmt: skip
                        weight = load_channels(
                            taps + (tap_row * 3 + tap_column) * heads * DV, value_head, value_dim, heads, DV
                        )
                        local += grad.to(tl.float32) * weight.to(tl.float32)[None, :]
                grad_value += local
            grad_value = tl.where(real[:, None], grad_value, 0.0)
            store_tokens(
                grad_v, grad_v_stride_token, grad_v_stride_head, token, present,
                value_head, value_dim, heads, grad_value, DV,
            )  # fmt: skip


@triton.jit(do_not_specialize=tuning.SIZES)
def _backward_local_weight_kernel(
    grad_out, v, mask, grad_local,
    tokens, heads, chunks, chunk_tokens, height, width, prefix,
    g_stride_batch, g_stride_token, g_stride_head,
    v_stride_batch, v_stride_token, v_stride_head,
    mask_stride_batch, mask_stride_token,
    DV: tl.constexpr, GROUP: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_TOKENS: tl.constexpr, HAS_MASK: tl.constexpr
):  # fmt: skip
    """Program: also one of the three rows of taps, on axis 2: sums for all nine would not fit the registers."""
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    tap_row = tl.program_id(2)
    head, dim = group_heads(tl.program_id(1), GROUP, BLOCK_DV)
    valid = (dim < DV) & (head < heads)
    grad_out += sample * g_stride_batch
    v += sample * v_stride_batch
    first = chunk * chunk_tokens
    last = tl.minimum(first + chunk_tokens, tokens)

    left = tl.zeros([16, GROUP * BLOCK_DV], tl.float32)
    center = tl.zeros([16, GROUP * BLOCK_DV], tl.float32)
    right = tl.zeros([16, GROUP * BLOCK_DV], tl.float32)
    for start in range(first, last, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        present = token < last
        grad = load_tokens(grad_out, g_stride_token, g_stride_head, token, present, head, dim, heads, DV)
        for tap_column in tl.static_range(3):
            neighbor, inside = grid_neighbor(token, tap_row - 1, tap_column - 1, height, width, prefix)
            inside = inside & present
            if HAS_MASK:
                inside = load_mask(mask + sample * mask_stride_batch, mask_stride_token, neighbor, inside)
            value = load_tokens(v, v_stride_token, v_stride_head, neighbor, inside, head, dim, heads, DV)
            total = fold_tokens(grad.to(tl.float32) * value.to(tl.float32), 16)
            if tap_column == 0:
                left += total
            elif tap_column == 1:
                center += total
            else:
                right += total

    samples = tl.num_programs(0) // chunks
    grad_local += ((chunk * samples + sample) * heads * DV + head * DV + dim) * 9 + tap_row * 3
    tl.store(grad_local, tl.sum(left, axis=0).to(grad_local.dtype.element_ty), mask=valid)
    tl.store(grad_local + 1, tl.sum(center, axis=0).to(grad_local.dtype.element_ty), mask=valid)
    tl.store(grad_local + 2, tl.sum(right, axis=0).to(grad_local.dtype.element_ty), mask=valid)


def backward(
    call: AttentionCall,
    grad_out: torch.Tensor,
    state: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor | None:
    """Fill the gradients of q, k and v and return that of `local_weight`, as `fused_op.Backward` asks."""
    q, k, v, key_padding_mask, local_weight = call.q, call.k, call.v, call.key_padding_mask, call.local_weight
    grad_q, grad_k, grad_v = grads
    covariance, key_mean, value_mean = split_state(state, q, v)
    (B, N, H, D), M, DV = q.shape, k.shape[1], v.shape[3]
    device = q.device
    heads = tuning.head_group(H, D, DV)
    half_products = tuning.half_products(q.dtype, call.feature_map)
    grid = *(call.grid_size or (0, 0)), call.num_prefix_tokens
    sums_stride = tuning.state_floats(D, DV)

    # a(z) makes aG a float32 quantity.
    half_query_products = half_products and call.normalization == "subtract"
    taps = None
    if local_weight is not None:
        local_weight = local_weight.contiguous()
        taps = torch.empty((B, 9, H, DV), dtype=local_weight.dtype, device=device)
    plan = tuning.plan("query_gradient", B, N, heads, half_query_products, device)
    partial = torch.empty((plan.chunks, B, H, sums_stride), dtype=torch.float32, device=device)
    _backward_query_kernel[(B * plan.chunks, heads.groups)](
        grad_out, q, local_weight, key_mean, covariance, grad_q, partial, taps,
        call.scale, N, H, plan.chunks, plan.chunk_tokens, sums_stride,
        *grad_out.stride()[:3], *q.stride()[:3], *grad_q.stride()[:3],
        D, DV, heads.size, heads.block_d, heads.block_dv, plan.block_tokens,
        call.feature_map, call.normalization, half_query_products, local_weight is not None, heads.resident,
        **plan.options,
    )  # fmt: skip
    sums = partial[0] if plan.chunks == 1 else partial.sum(0)

    counts, mask_strides = None, (0, 0)
    if key_padding_mask is not None:
        counts, mask_strides = key_padding_mask.sum(1, dtype=torch.int32), key_padding_mask.stride()
    plan = tuning.plan("state", B, M, heads, half_products, device)
    # The parts of a wide matrix and those of its transpose do not fit shared memory together.
    for for_keys, for_values in [(True, True)] if heads.resident else [(True, False), (False, True)]:
        _backward_key_value_kernel[(B * plan.chunks, heads.groups)](
            grad_out, k, v, key_padding_mask, counts, taps, key_mean, value_mean, sums, grad_k, grad_v,
            call.scale, M, H, plan.chunks, plan.chunk_tokens, sums_stride, *grid,
            *grad_out.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides,
            *grad_k.stride()[:3], *grad_v.stride()[:3],
            D, DV, heads.size, heads.block_d, heads.block_dv, plan.block_tokens,
            call.feature_map, half_products,
            key_padding_mask is not None, local_weight is not None, heads.resident, for_keys, for_values,
            **plan.options,
        )  # fmt: skip
    if local_weight is None:
        return None
    # Three programs per group of heads, one for each row of taps.
    plan = tuning.plan("local_gradient", 3 * B, M, heads, half_products, device)
    dtype = local_weight.dtype if plan.chunks == 1 else torch.float32
    grad_local = torch.empty((plan.chunks, *local_weight.shape), dtype=dtype, device=device)
    _backward_local_weight_kernel[(B * plan.chunks, heads.groups, 3)](
        grad_out, v, key_padding_mask, grad_local,
        M, H, plan.chunks, plan.chunk_tokens, *grid,
        *grad_out.stride()[:3], *v.stride()[:3], *mask_strides,
        DV, heads.size, heads.block_dv, plan.block_tokens, key_padding_mask is not None,
        **plan.options,
    )  # fmt: skip
    return grad_local[0] if plan.chunks == 1 else grad_local.sum(0).to(local_weight.dtype)
