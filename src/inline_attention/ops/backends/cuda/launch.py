"""How the work is divided into blocks, and the launches of the CUDA kernels.

Shapes: `B` batch, `N` tokens, `H` heads, `D` head dim; channels C = H · D.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.graph import increment_version

from inline_attention.ops.backends.cuda import arguments, compiler
from inline_attention.ops.fused_op import Problem, empty_state

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

_ACCUMULATE = arguments.struct_of("AccumulateParams")
_MERGE = arguments.struct_of("MergeParams")
_OUTPUT = arguments.struct_of("OutputParams")
_SAMPLE = arguments.struct_of("SampleParams")
_GRADIENT = arguments.struct_of("GradientParams")
_TILE_SUM = arguments.struct_of("TileSumParams")
TOKEN_SUM = arguments.struct_of("TokenSumParams")
PREDICT = arguments.struct_of("PredictParams")


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


class Tensors(NamedTuple):
    """Sizes of one call; its plan depends on these."""

    device: int
    dtype: torch.dtype
    query: tuple[int, ...]  # [B, N, H, D]
    keys: int
    has_local_term: bool


class Plan(NamedTuple):
    """Everything about a call that does not depend on its data."""

    kernels: dict[str, compiler.Kernel]
    units: int
    splits: Splits
    inverses: tuple[int, int]  # of splits and units
    blocks: int
    layout: Layout
    packed_layout: tuple[int, ...]
    one_block: bool
    shared_bytes: int


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    local_weight: torch.Tensor | None,
    problem: Problem,
    keep_state: bool,
    overwrite_q: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output `[B, N, H, D]` and the state. See `fused_op.Forward`."""
    del key_padding_mask  # None: refused by `unsupported_reason`
    if local_weight is not None:
        local_weight = aligned(local_weight)
    copies: list[torch.Tensor] = []
    query, key, value = _address(q, copies), _address(k, copies), _address(v, copies)
    B, N, H, D = q.shape
    M = k.shape[1]
    device = q.device.index
    plan = plan_forward(Tensors(device, q.dtype, (B, N, H, D), M, local_weight is not None), problem)
    stream = current_stream(device)
    weight = 0 if local_weight is None else local_weight.data_ptr()
    factor = problem.scale / M
    state = None
    if plan.one_block:
        out = _output(q, k, v, local_weight, overwrite_q)
        state = empty_state(q, v) if keep_state else None
        merged = (0, 0, 0) if state is None else _sections(state.data_ptr(), B * H, D)
        plan.kernels["inline_sample"].launch(
            (plan.blocks, 1), plan.shared_bytes, stream,
            _SAMPLE.pack(
                *key, *value, *merged, 0, 0, 0, 0, factor, 1.0, M, M, 1, H * D, plan.units, *plan.inverses,
                *plan.packed_layout, *query, *value, weight, 0, 0, out.data_ptr(),
            ),
        )  # fmt: skip
        return out, state
    state = _accumulate(q, v, key, value, M, problem, plan, stream)
    out = _output(q, k, v, local_weight, overwrite_q)  # not before: it may have the workspace's memory
    merged = _sections(state.data_ptr(), B * H, D)
    plan.kernels["inline_output" if local_weight is None else "inline_output_local"].launch(
        (plan.blocks, 1), plan.shared_bytes, stream,
        _OUTPUT.pack(*plan.packed_layout, *query, *value, weight, merged[0], merged[2], out.data_ptr()),
    )  # fmt: skip
    return out, state


def _output(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local_weight: torch.Tensor | None, overwrite_q: bool
) -> torch.Tensor:
    """Allocate the output, or reuse q if that is allowed and every query is read before its output is written.

    The latter holds if a warp multiplies whole heads: see `OutputParams` of kernels.cu.
    """
    if overwrite_q and q.shape[3] == SLAB and q.is_contiguous() and q.data_ptr() % 16 == 0 and not q.requires_grad:
        others = (k, v) if local_weight is None else (k, v, local_weight)
        memory = q.untyped_storage().data_ptr()
        if memory not in [tensor.untyped_storage().data_ptr() for tensor in others]:
            increment_version(q)  # as every in-place operation does, so that autograd notices a saved q
            return q.detach()
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _accumulate(
    q: torch.Tensor,
    v: torch.Tensor,
    key: tuple[int, int, int],
    value: tuple[int, int, int],
    M: int,
    problem: Problem,
    plan: Plan,
    stream: int,
) -> torch.Tensor:
    """The state of keys and values, given by address."""
    B, _, H, D = q.shape
    state, splits, factor = empty_state(q, v), plan.splits, problem.scale / M
    merged = _sections(state.data_ptr(), B * H, D)
    workspace = None if splits.number == 1 else _workspace(B * H * splits.number, D, q.device)
    partial = merged if workspace is None else _sections(workspace.data_ptr(), B * H * splits.number, D)
    plan.kernels["inline_accumulate"].launch(
        (B * plan.units * splits.number, 1), ACCUMULATE_SHARED_BYTES, stream,
        _ACCUMULATE.pack(
            *key, *value, *partial, 0, 0, 0, 0, factor if workspace is None else 1.0, 1.0,
            M, splits.tokens_each, splits.number, H * D, plan.units, *plan.inverses,
        ),
    )  # fmt: skip
    if workspace is not None:
        _merge(plan.kernels, "", partial, merged, (factor, 1.0), M, splits, B * H, D, stream)
    return state


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    local_weight: torch.Tensor | None,
    state: torch.Tensor | None,
    problem: Problem,
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
) -> torch.Tensor | None:
    """Fill the gradients; return that of `local_weight`. See `fused_op.Backward`."""
    del key_padding_mask
    copies: list[torch.Tensor] = []
    grad, query, key, value = (_address(tensor, copies) for tensor in (grad_out, q, k, v))
    if local_weight is not None:
        local_weight = local_weight.contiguous()
    B, N, H, D = q.shape
    M = k.shape[1]
    device = q.device.index
    tensors = Tensors(device, q.dtype, (B, N, H, D), M, local_weight is not None)
    plan = plan_backward(tensors, problem)
    stream = current_stream(device)
    if state is None:
        state = _accumulate(q, v, key, value, M, problem, plan_forward(tensors, problem), stream)
    covariance, key_mean, value_mean = _sections(state.data_ptr(), B * H, D)
    splits, layout = plan.splits, plan.layout
    sums = _workspace(B * H, D, q.device)
    merged = _sections(sums.data_ptr(), B * H, D)
    workspace = None if splits.number == 1 else _workspace(B * H * splits.number, D, q.device)
    partial = merged if workspace is None else _sections(workspace.data_ptr(), B * H * splits.number, D)
    factors = (problem.scale / M, 1 / M)
    plan.kernels["inline_accumulate_backward"].launch(
        (B * plan.units * splits.number, 1), ACCUMULATE_SHARED_BYTES + STAGING_BYTES, stream,
        _ACCUMULATE.pack(
            *query, *grad, *partial, covariance, *_address(grad_q, copies),
            *(factors if workspace is None else (1.0, 1.0)), N, splits.tokens_each, splits.number, H * D, plan.units,
            *plan.inverses,
        ),
    )  # fmt: skip
    if workspace is not None:
        _merge(plan.kernels, "_backward", partial, merged, factors, N, splits, B * H, D, stream)
    grad_covariance, _, grad_mean = merged
    grad_local = None if local_weight is None else torch.empty_like(local_weight)
    parts = None
    if local_weight is not None and layout.tiles > 1:
        parts = torch.empty((B, layout.tiles, H * D, 9), dtype=torch.float32, device=q.device)
    plan.kernels["inline_gradient" if local_weight is None else "inline_gradient_local"].launch(
        (plan.blocks, 1), plan.shared_bytes, stream,
        _GRADIENT.pack(
            *plan.packed_layout, *grad, *key, *value, _pointer(local_weight),
            grad_covariance, grad_mean, key_mean, value_mean,
            *_address(grad_k, copies), *_address(grad_v, copies), _pointer(grad_local), _pointer(parts),
        ),
    )  # fmt: skip
    if grad_local is not None and parts is not None:
        many = layout.tiles > MANY_TILES
        elements = MERGE_THREADS // (MANY_TILES_SHARES if many else 1)
        plan.kernels["inline_sum_many_tiles" if many else "inline_sum_tiles"].launch(
            (-(-grad_local.numel() // elements), 1), 0, stream,
            _TILE_SUM.pack(parts.data_ptr(), grad_local.data_ptr(), layout.tiles, H * D * 9, grad_local.numel()),
        )  # fmt: skip
    return grad_local


def _plan(
    kernels: dict[str, compiler.Kernel], units: int, splits: Splits, layout: Layout, one_block: bool, shared_bytes: int
) -> Plan:
    inverses = inverse(splits.number), inverse(units)
    return Plan(kernels, units, splits, inverses, layout.blocks, layout, layout.packed(), one_block, shared_bytes)


@lru_cache(4096)
def plan_forward(tensors: Tensors, problem: Problem) -> Plan:
    """Plan the forward pass of a call."""
    B, N, H, D = tensors.query
    units, multiprocessors = -(-H * D // UNIT), processors(tensors.device)
    kernels = load_kernels(tensors.device, tensors.dtype, D)
    if tensors.has_local_term and fits_one_block(B * units, tensors.keys, TILE_BLOCKS[D] * multiprocessors):
        layout = sample_layout(B, N, H * D, problem)
        shared_bytes = max(ACCUMULATE_SHARED_BYTES, strip_bytes(D))
        return _plan(kernels, units, Splits(1, tensors.keys), layout, True, shared_bytes)
    splits = choose_splits(B * units, tensors.keys, ACCUMULATE_BLOCKS[D] * multiprocessors)
    layout = choose_layout(B, N, H, D, problem, 1, multiprocessors)
    return _plan(kernels, units, splits, layout, False, strip_bytes(D))


@lru_cache(4096)
def plan_backward(tensors: Tensors, problem: Problem) -> Plan:
    """Plan the backward pass of a call."""
    B, N, H, D = tensors.query
    units, multiprocessors = -(-H * D // UNIT), processors(tensors.device)
    layout = choose_layout(B, tensors.keys, H, D, problem, 3 if tensors.has_local_term else 2, multiprocessors)
    splits = choose_splits(B * units, N, ACCUMULATE_BACKWARD_BLOCKS[D] * multiprocessors)
    kernels = load_kernels(tensors.device, tensors.dtype, D)
    return _plan(kernels, units, splits, layout, False, strip_bytes(D))


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


def choose_layout(
    batches: int, tokens: int, heads: int, head_dim: int, problem: Problem, roles: int, multiprocessors: int
) -> Layout:
    """Choose tiles high enough that their borders cost little, low enough that every multiprocessor has some."""
    channels = heads * head_dim
    units = -(-channels // UNIT)
    height, width = problem.grid_height, problem.grid_width
    slots = TILE_BLOCKS[head_dim] * multiprocessors
    if height == 0:
        run = max(64, min(512, -(-batches * units * tokens // slots) // 16 * 16))
        return Layout(tokens, channels, units, batches, 0, 0, 0, 0, 1, -(-tokens // run), run, roles)
    tiles_across = -(-width // (GROUPS * STRIP))
    tiles_down, tile_height, best_cost = 1, 2, math.inf
    for pieces in range(1, min(MOST_TILES_DOWN, -(-height // 2)) + 1):
        rows = -(-height // (2 * pieces)) * 2
        waves = -(-batches * units * tiles_across * -(-height // rows) * roles // slots)
        cost = (waves + 1) * (
            rows + TILE_START_ROWS[head_dim]
        )  # one more for blocks that start and end at different times
        if cost < best_cost:
            tiles_down, tile_height, best_cost = -(-height // rows), rows, cost
    return Layout(
        tokens, channels, units, batches, problem.num_prefix_tokens, height, width,
        tile_height, tiles_across, tiles_across * tiles_down, 0, roles,
    )  # fmt: skip


def fits_one_block(rows: int, tokens: int, slots: int) -> bool:
    """True if one block per unit of a sample should do both passes: few tokens, or more tokens and many blocks."""
    many_blocks = rows >= FEWEST_SAMPLE_WAVES * slots
    return tokens <= (MOST_SAMPLE_TOKENS if many_blocks else FEW_TOKENS)


def sample_layout(batches: int, tokens: int, channels: int, problem: Problem) -> Layout:
    """One tile for a whole sample."""
    return Layout(
        tokens, channels, -(-channels // UNIT), batches, problem.num_prefix_tokens,
        problem.grid_height, problem.grid_width, problem.grid_height, 1, 1, 0, 1,
    )  # fmt: skip


def strip_bytes(head_dim: int) -> int:
    """Shared memory of a block's strips."""
    neighbors, own = 2 * (STRIP + 2) * PITCH, head_dim // SLAB * 16 * PITCH
    return BLOCK_THREADS // 32 * 4 * (neighbors + own)


def _merge(
    kernels: dict[str, compiler.Kernel],
    suffix: str,
    partial: tuple[int, int, int],
    merged: tuple[int, int, int],
    factors: tuple[float, float],
    tokens: int,
    splits: Splits,
    heads: int,
    head_dim: int,
    stream: int,
) -> None:
    many = splits.number > MANY_SPLITS
    kernels[f"inline_merge{'_many' if many else ''}{suffix}"].launch(
        (heads, head_dim * head_dim // MERGE_THREADS * (MANY_SHARES if many else 1)), 0, stream,
        _MERGE.pack(*partial, *merged, *factors, splits.number, tokens, splits.tokens_each),
    )  # fmt: skip


def _workspace(heads: int, head_dim: int, device: torch.device) -> torch.Tensor:
    return torch.empty(heads * head_dim * (head_dim + 2), dtype=torch.float32, device=device)


def _sections(start: int, heads: int, head_dim: int) -> tuple[int, int, int]:
    """Addresses of the matrices, left means and right means in a state or a workspace that starts at `start`."""
    left = start + 4 * heads * head_dim * head_dim
    return start, left, left + 4 * heads * head_dim


def _address(tensor: torch.Tensor, copies: list[torch.Tensor]) -> tuple[int, int, int]:
    """Pointer and strides of samples and tokens, in elements.

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


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous and aligned to sixteen bytes; a parameter may be a slice of a larger tensor."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _pointer(tensor: torch.Tensor | None) -> int:
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
    return compiler.load(device_index, defines(dtype, head_dim), KERNELS)


def defines(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """Return the preprocessor constants of kernels.cu."""
    return {
        "HEAD_DIM": head_dim,
        "IS_BF16": int(dtype == torch.bfloat16),
        "TILE_BLOCKS": TILE_BLOCKS[head_dim],
        "SLAB": SLAB,
        "UNIT": UNIT,
        "CHUNK": CHUNK,
        "PITCH": PITCH,
        "BLOCK_THREADS": BLOCK_THREADS,
        "STAGES": STAGES,
        "STAGE_TOKENS": STAGE_TOKENS,
        "STRIP": STRIP,
        "GROUPS": GROUPS,
        "MERGE_THREADS": MERGE_THREADS,
        "PREDICT_THREADS": PREDICT_THREADS,
        "MANY_SHARES": MANY_SHARES,
        "MANY_TILES_SHARES": MANY_TILES_SHARES,
        "ACCUMULATE_BYTES": _ACCUMULATE.size,
        "MERGE_BYTES": _MERGE.size,
        "OUTPUT_BYTES": _OUTPUT.size,
        "SAMPLE_BYTES": _SAMPLE.size,
        "GRADIENT_BYTES": _GRADIENT.size,
        "TILE_SUM_BYTES": _TILE_SUM.size,
        "TOKEN_SUM_BYTES": TOKEN_SUM.size,
        "PREDICT_BYTES": PREDICT.size,
    }


KERNELS = {
    "inline_accumulate": BLOCK_THREADS,
    "inline_accumulate_backward": BLOCK_THREADS,
    "inline_merge": MERGE_THREADS,
    "inline_merge_backward": MERGE_THREADS,
    "inline_merge_many": MERGE_THREADS,
    "inline_merge_many_backward": MERGE_THREADS,
    "inline_output": BLOCK_THREADS,
    "inline_output_local": BLOCK_THREADS,
    "inline_sample": BLOCK_THREADS,
    "inline_gradient": BLOCK_THREADS,
    "inline_gradient_local": BLOCK_THREADS,
    "inline_sum_tiles": MERGE_THREADS,
    "inline_sum_many_tiles": MERGE_THREADS,
    "inline_sum_tokens": PREDICT_THREADS,
    "inline_predict": PREDICT_THREADS,
}
