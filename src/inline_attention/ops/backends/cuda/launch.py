"""How the work is divided into blocks, and the launches of the CUDA kernels.

Shapes: `B` batch, `N` tokens, `H` heads, `D` head dim; channels C = H · D.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from inline_attention.ops.backends.cuda import compiler
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.fused_op import empty_state

# Constants that kernels.cu shares: see `defines`.
SLAB, UNIT, CHUNK = 32, 64, 8  # channels of a warp, of a block, of sixteen bytes
PITCH = SLAB * 2 + 16  # bytes from token to token in shared memory: eight tokens' chunks lie in different banks
BLOCK_THREADS = 128  # of every block that multiplies
STAGES, STAGE_TOKENS = 3, 64
STRIP, GROUPS = 8, 2  # columns of a warp, strips of a block
MERGE_THREADS, PREDICT_THREADS = 256, 256
MANY_SHARES, MANY_TILES_SHARES = 4, 8  # threads that share the splits, or the tiles, of an element

ACCUMULATE_SHARED_BYTES = STAGES * STAGE_TOKENS * UNIT * 2 * 2
STAGING_BYTES = BLOCK_THREADS // 32 * 16 * PITCH
MANY_TILES, MANY_SPLITS = 8, 8
# Blocks that share a multiprocessor, by head dim; registers set the limit.
TILE_BLOCKS = {32: 3, 64: 2}
ACCUMULATE_BLOCKS = {32: 4, 64: 3}
ACCUMULATE_BACKWARD_BLOCKS = {32: 3, 64: 2}
MOST_TILES_DOWN = 256
# Rows of strip that starting a tile costs as much as: loading the matrices, and the rows above and below.
TILE_START_ROWS = {32: 8, 64: 16}
# Beyond these a sample is cut into pieces: a block would be busy for too long, or there are too few of them.
MOST_SAMPLE_TOKENS, FEWEST_SAMPLE_WAVES = 1024, 3
# So few that a second launch would cost more than it gains, however few the blocks.
FEW_TOKENS = 256
MOST_SPLITS = 64
# Tokens that merging the splits costs as much as: a launch, and the partial sums read again.
MERGE_TOKENS = 384

# Pointer and strides of samples and tokens, in elements.
Address: TypeAlias = tuple[int, int, int]
# Pointers to the matrices, left means and right means of a state.
Sections: TypeAlias = tuple[int, int, int]


class Layout(NamedTuple):
    """`Layout` of kernels.cu: how the tokens of a sample are cut into tiles."""

    tokens: int
    channels: int
    units: int
    batches: int
    prefix: int
    height: int
    width: int
    tile_height: int
    tiles_across: int
    tiles: int
    run: int
    roles: int

    @property
    def blocks(self) -> int:
        """Thread blocks of a launch."""
        return self.roles * self.units * self.tiles * self.batches

    def packed(self) -> tuple[int, ...]:
        """All fields, and the inverses of those that kernels divide by."""
        return *self, *map(inverse, (self.units, self.tiles_across, self.tiles, self.roles))


class Splits(NamedTuple):
    """How the tokens of a sample are shared between blocks that accumulate."""

    number: int
    tokens_each: int


def inverse(divisor: int) -> int:
    """Return the factor that `Division` of kernels.cu multiplies by."""
    return min(2**32 // divisor, 2**32 - 1)


class Sizes(NamedTuple):
    """Everything that the plan of a call depends on. The grid is 0 × 0 without a local term."""

    device: int
    dtype: torch.dtype
    batches: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    height: int
    width: int
    prefix: int

    @property
    def units(self) -> int:
        """Blocks beside each other that cover the channels of a token."""
        return -(-self.heads * self.head_dim // UNIT)


class Plan(NamedTuple):
    """Everything about a call that does not depend on its data."""

    kernels: dict[str, compiler.Kernel]
    splits: Splits
    packed_splits: tuple[int, ...]  # the end of `AccumulateParams` of kernels.cu, from `tokens_per_split` on
    layout: Layout
    packed_layout: tuple[int, ...]
    one_block: bool
    shared_bytes: int


def forward(call: AttentionCall, keep_state: bool) -> tuple[Tensor, Tensor | None]:
    """Output `[B, N, H, D]` and the state. See `fused_op.Forward`."""
    q, k, v = call.q, call.k, call.v
    local_weight = None if call.local_weight is None else aligned(call.local_weight)
    copies: list[Tensor] = []
    query, key, value = _address(q, copies), _address(k, copies), _address(v, copies)
    plan, stream = plan_forward(_sizes(call)), current_stream(q.device.index)
    M, factors = k.shape[1], (call.scale / k.shape[1], 1.0)
    if plan.one_block:
        out = _output(q, k, v, local_weight, call.overwrite_q)
        state = empty_state(q, v) if keep_state else None
        merged = (0, 0, 0) if state is None else _sections(state, q)
        plan.kernels["inline_sample"].launch(
            (plan.layout.blocks, 1), plan.shared_bytes, stream,
            *key, *value, *merged, 0, 0, 0, 0, *factors, M, *plan.packed_splits,
            *plan.packed_layout, *query, *value, _pointer(local_weight), 0, 0, out.data_ptr(),
        )  # fmt: skip
        return out, state
    state = empty_state(q, v)
    covariance, _, value_mean = merged = _sections(state, q)
    _accumulate(q, plan, stream, key, value, M, merged, factors)
    out = _output(q, k, v, local_weight, call.overwrite_q)  # not before: it may have the workspace's memory
    plan.kernels["inline_output" if local_weight is None else "inline_output_local"].launch(
        (plan.layout.blocks, 1), plan.shared_bytes, stream,
        *plan.packed_layout, *query, *value, _pointer(local_weight), covariance, value_mean, out.data_ptr(),
    )  # fmt: skip
    return out, state


def _output(q: Tensor, k: Tensor, v: Tensor, local_weight: Tensor | None, overwrite_q: bool) -> Tensor:
    """Allocate the output, or reuse q if that is allowed and every query is read before its output is written.

    The latter holds if a warp multiplies whole heads: see `OutputParams` of kernels.cu.
    """
    if overwrite_q and q.shape[3] == SLAB and q.is_contiguous() and q.data_ptr() % 16 == 0 and not q.requires_grad:
        others = (k, v) if local_weight is None else (k, v, local_weight)
        memory = q.untyped_storage().data_ptr()
        if memory not in [tensor.untyped_storage().data_ptr() for tensor in others]:
            increment_version(q)  # as in-place operations do, so that autograd notices a saved q
            return q.detach()
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def backward(
    call: AttentionCall, grad_out: Tensor, state: Tensor | None, grads: tuple[Tensor, Tensor, Tensor]
) -> Tensor | None:
    """Fill the gradients of q, k and v; return that of `local_weight`. See `fused_op.Backward`."""
    q, v = call.q, call.v
    local_weight = None if call.local_weight is None else call.local_weight.contiguous()
    copies: list[Tensor] = []
    grad, query, key, value = (_address(tensor, copies) for tensor in (grad_out, q, call.k, v))
    grad_query, grad_key, grad_value = (_address(tensor, copies) for tensor in grads)
    (B, N, H, D), M = q.shape, call.k.shape[1]
    sizes = _sizes(call)
    plan, stream = plan_backward(sizes), current_stream(sizes.device)
    if state is None:
        state = empty_state(q, v)
        _accumulate(q, plan_forward(sizes), stream, key, value, M, _sections(state, q), (call.scale / M, 1.0))
    covariance, key_mean, value_mean = _sections(state, q)
    sums = empty_state(q, v)
    grad_covariance, _, grad_mean = merged = _sections(sums, q)
    factors = (call.scale / M, 1 / M)
    _accumulate(q, plan, stream, query, grad, N, merged, factors, gradient=(covariance, *grad_query))
    tiles, grad_local, parts = plan.layout.tiles, None, None
    if local_weight is not None:
        grad_local = torch.empty_like(local_weight)
        if tiles > 1:
            parts = torch.empty((B, tiles, H * D, 9), dtype=torch.float32, device=q.device)
    plan.kernels["inline_gradient" if local_weight is None else "inline_gradient_local"].launch(
        (plan.layout.blocks, 1), plan.shared_bytes, stream,
        *plan.packed_layout, *grad, *key, *value, _pointer(local_weight),
        grad_covariance, grad_mean, key_mean, value_mean,
        *grad_key, *grad_value, _pointer(grad_local), _pointer(parts),
    )  # fmt: skip
    if grad_local is not None and parts is not None:
        many = tiles > MANY_TILES
        elements = MERGE_THREADS // (MANY_TILES_SHARES if many else 1)
        plan.kernels["inline_sum_many_tiles" if many else "inline_sum_tiles"].launch(
            (-(-grad_local.numel() // elements), 1), 0, stream,
            parts.data_ptr(), grad_local.data_ptr(), tiles, H * D * 9, grad_local.numel(),
        )  # fmt: skip
    return grad_local


def _accumulate(
    q: Tensor,
    plan: Plan,
    stream: int,
    left: Address,
    right: Address,
    tokens: int,
    merged: Sections,
    factors: tuple[float, float],
    gradient: tuple[int, int, int, int] | None = None,
) -> None:
    """Sum products of `left` and `right` over the tokens into `merged`, if need be by way of partial sums.

    The backward pass gives the covariance and where the gradient of `left` goes, as `gradient`.
    """
    B, _, H, D = q.shape
    splits = plan.splits
    partial, workspace = merged, None
    if splits.number > 1:
        workspace = torch.empty(B * H * splits.number * D * (D + 2), dtype=torch.float32, device=q.device)
        partial = _sections(workspace, q, splits.number)
    suffix, staging_bytes = ("", 0) if gradient is None else ("_backward", STAGING_BYTES)
    plan.kernels[f"inline_accumulate{suffix}"].launch(
        (B * plan.layout.units * splits.number, 1), ACCUMULATE_SHARED_BYTES + staging_bytes, stream,
        *left, *right, *partial, *(gradient or (0, 0, 0, 0)), *(factors if workspace is None else (1.0, 1.0)),
        tokens, *plan.packed_splits,
    )  # fmt: skip
    if workspace is None:
        return
    many = splits.number > MANY_SPLITS
    plan.kernels[f"inline_merge{'_many' if many else ''}{suffix}"].launch(
        (B * H, D * D // MERGE_THREADS * (MANY_SHARES if many else 1)), 0, stream,
        *partial, *merged, *factors, splits.number, tokens, splits.tokens_each,
    )  # fmt: skip


def _sizes(call: AttentionCall) -> Sizes:
    B, N, H, D = call.q.shape
    grid_size = call.grid_size or (0, 0)
    device = call.q.device.index
    return Sizes(device, call.q.dtype, B, N, call.k.shape[1], H, D, *grid_size, call.num_prefix_tokens)


@lru_cache(4096)
def plan_forward(sizes: Sizes) -> Plan:
    """Plan the forward pass of a call."""
    keys, D = sizes.keys, sizes.head_dim
    rows, multiprocessors = sizes.batches * sizes.units, processors(sizes.device)
    if sizes.height > 0 and fits_one_block(rows, keys, TILE_BLOCKS[D] * multiprocessors):
        layout = Layout(
            sizes.queries, sizes.heads * D, sizes.units, sizes.batches, sizes.prefix, sizes.height, sizes.width,
            tile_height=sizes.height, tiles_across=1, tiles=1, run=0, roles=1,
        )  # fmt: skip
        return _plan(sizes, Splits(1, keys), layout, True, max(ACCUMULATE_SHARED_BYTES, strip_bytes(D)))
    splits = choose_splits(rows, keys, ACCUMULATE_BLOCKS[D] * multiprocessors)
    return _plan(sizes, splits, choose_layout(sizes, sizes.queries, 1, multiprocessors), False, strip_bytes(D))


@lru_cache(4096)
def plan_backward(sizes: Sizes) -> Plan:
    """Plan the backward pass of a call."""
    D, multiprocessors = sizes.head_dim, processors(sizes.device)
    layout = choose_layout(sizes, sizes.keys, 3 if sizes.height > 0 else 2, multiprocessors)
    slots = ACCUMULATE_BACKWARD_BLOCKS[D] * multiprocessors
    splits = choose_splits(sizes.batches * sizes.units, sizes.queries, slots)
    return _plan(sizes, splits, layout, False, strip_bytes(D))


def _plan(sizes: Sizes, splits: Splits, layout: Layout, one_block: bool, shared_bytes: int) -> Plan:
    kernels = load_kernels(sizes.device, sizes.dtype, sizes.head_dim)
    number, each = splits
    packed_splits = each, number, layout.channels, layout.units, inverse(number), inverse(layout.units)
    return Plan(kernels, splits, packed_splits, layout, layout.packed(), one_block, shared_bytes)


def choose_splits(rows: int, tokens: int, slots: int) -> Splits:
    """Split `tokens` so that `rows` × splits blocks fill the GPU's `slots` in few, equal waves."""
    best, best_cost = Splits(1, tokens), math.inf
    for count in range(1, min(MOST_SPLITS, -(-tokens // (2 * STAGE_TOKENS))) + 1):
        each = -(-tokens // (count * STAGE_TOKENS)) * STAGE_TOKENS
        count = -(-tokens // each)
        # A block costs its tokens, and about as much as two stages of them to start and to finish.
        cost = -(-rows * count // slots) * (each + 2 * STAGE_TOKENS) + (MERGE_TOKENS if count > 1 else 0)
        if cost < best_cost:
            best, best_cost = Splits(count, each), cost
    return best


def choose_layout(sizes: Sizes, tokens: int, roles: int, multiprocessors: int) -> Layout:
    """Choose tiles high enough that their borders cost little, low enough that every multiprocessor has some."""
    batches, units, height, width = sizes.batches, sizes.units, sizes.height, sizes.width
    channels = sizes.heads * sizes.head_dim
    slots = TILE_BLOCKS[sizes.head_dim] * multiprocessors
    if height == 0:
        run = max(64, min(512, -(-batches * units * tokens // slots) // 16 * 16))
        return Layout(tokens, channels, units, batches, 0, 0, 0, 0, 1, -(-tokens // run), run, roles)
    tiles_across = -(-width // (GROUPS * STRIP))
    tiles_down, tile_height, best_cost = 1, 2, math.inf
    for pieces in range(1, min(MOST_TILES_DOWN, -(-height // 2)) + 1):
        rows = -(-height // (2 * pieces)) * 2
        waves = -(-batches * units * tiles_across * -(-height // rows) * roles // slots)
        # One wave more for blocks that start and end at different times.
        cost = (waves + 1) * (rows + TILE_START_ROWS[sizes.head_dim])
        if cost < best_cost:
            tiles_down, tile_height, best_cost = -(-height // rows), rows, cost
    return Layout(
        tokens, channels, units, batches, sizes.prefix, height, width,
        tile_height, tiles_across, tiles_across * tiles_down, 0, roles,
    )  # fmt: skip


def fits_one_block(rows: int, tokens: int, slots: int) -> bool:
    """True if one block per unit of a sample should do both passes: few tokens, or more tokens and many blocks."""
    many_blocks = rows >= FEWEST_SAMPLE_WAVES * slots
    return tokens <= (MOST_SAMPLE_TOKENS if many_blocks else FEW_TOKENS)


def strip_bytes(head_dim: int) -> int:
    """Shared memory of a block's strips."""
    neighbors, own = 2 * (STRIP + 2) * PITCH, head_dim // SLAB * 16 * PITCH
    return BLOCK_THREADS // 32 * 4 * (neighbors + own)


def _sections(state: Tensor, q: Tensor, splits: int = 1) -> Sections:
    """Split a state, or the partial states of all splits one section after the other."""
    B, _, H, D = q.shape
    heads, start = B * H * splits, state.data_ptr()
    left = start + 4 * heads * D * D
    return start, left, left + 4 * heads * D


def _address(tensor: Tensor, copies: list[Tensor]) -> Address:
    """Return where a tensor is.

    A tensor that cannot be read sixteen bytes at a time is copied, and the copy is kept in `copies` until its kernels
    are queued. (`unsupported_reason` refuses such q, k and v; gradients come as autograd makes them.)
    """
    batch, token, head, _ = tensor.stride()
    pointer = tensor.data_ptr()
    if head == tensor.shape[3] and not ((batch | token) % CHUNK or pointer % 16):
        return pointer, batch, token
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copies.append(copy)
    return copy.data_ptr(), copy.stride(0), copy.stride(1)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and aligned to sixteen bytes; a parameter may be a slice of a larger tensor."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def current_stream(device_index: int) -> int:
    """Return the stream that PyTorch queues work on."""
    return torch._C._cuda_getCurrentRawStream(device_index)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


@cache
def processors(device_index: int) -> int:
    """Return the number of multiprocessors of a device."""
    properties = cast(Any, torch.cuda.get_device_properties(device_index))  # pyright: ignore[reportUnknownMemberType]
    return properties.multi_processor_count


@cache
def load_kernels(device_index: int, dtype: torch.dtype, head_dim: int) -> dict[str, compiler.Kernel]:
    """Return the kernels by name; the first call builds them."""
    return compiler.load(device_index, defines(dtype, head_dim))


def defines(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """Return the preprocessor constants of kernels.cu."""
    names = (
        "SLAB", "UNIT", "CHUNK", "PITCH", "BLOCK_THREADS", "STAGES", "STAGE_TOKENS", "STRIP", "GROUPS",
        "MERGE_THREADS", "PREDICT_THREADS", "MANY_SHARES", "MANY_TILES_SHARES",
    )  # fmt: skip
    structs = {signature.struct for signature in compiler.signatures().values()}
    return {
        "HEAD_DIM": head_dim,
        "IS_BF16": int(dtype == torch.bfloat16),
        "TILE_BLOCKS": TILE_BLOCKS[head_dim],
        **{name: globals()[name] for name in names},
        **{f"{name}_BYTES": compiler.struct_of(name).size for name in structs},
    }
