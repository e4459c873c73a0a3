"""Which blocks of work the CUDA kernels get, and their launches.

Shapes: `B` batch, `N` tokens, `H` heads, `D` head dim; channels C = H · D.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import NamedTuple

import torch

from inline_attention.ops.backends.cuda import compiler
from inline_attention.ops.fused_op import Problem

# The constants of kernels.cu.
SLAB, UNIT, CHUNK = 32, 64, 8
ACCUMULATE_THREADS, STAGE_TOKENS, STAGES = 128, 64, 3
PITCH = SLAB * 2 + 16
ACCUMULATE_SHARED_BYTES = STAGES * STAGE_TOKENS * UNIT * 2 * 2
STAGING_BYTES = ACCUMULATE_THREADS // 32 * 16 * PITCH
MERGE_THREADS = 256

STRIP, GROUPS = 8, 2
TILE_THREADS = 2 * GROUPS * 32
TILE_SUM_ELEMENTS = 32
MANY_SPLITS, MANY_SHARES = 8, 4
MOST_TILES_DOWN = 256
# Rows of strip that starting a tile costs as much as: loading the matrices, and the rows above and below.
TILE_START_ROWS = 8
# Beyond these a sample is cut into pieces: a block would be busy for too long, or there are too few of them.
MOST_SAMPLE_TOKENS, FEWEST_SAMPLE_WAVES = 1024, 3
MOST_SPLITS = 64

_ACCUMULATE = struct.Struct("QqqQqqQQQQQqqffiiiii0q")
_MERGE = struct.Struct("QQQQQQffiii0q")
_LAYOUT = "12i"
_OUTPUT = struct.Struct(f"{_LAYOUT}QqqQqqQQQQ")
_SAMPLE = struct.Struct(f"{_ACCUMULATE.format}{_OUTPUT.format}")
_GRADIENT = struct.Struct(f"{_LAYOUT}QqqQqqQqqQQQQQQqqQqqQQ")
_TILE_SUM = struct.Struct("QQiiq")


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


class Splits(NamedTuple):
    """How the tokens of a sample are shared between blocks that accumulate."""

    count: int
    tokens_each: int


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    local_weight: torch.Tensor | None,
    problem: Problem,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output `[B, N, H, D]` and the state: key mean, value mean, covariance. See `fused_op.Forward`."""
    del key_padding_mask  # None: refused by `unsupported_reason`
    q, k, v = _readable(q), _readable(k), _readable(v)
    B, N, H, D = q.shape
    M = k.shape[1]
    device = q.device.index
    kernels, stream, processors = load_kernels(device, q.dtype, D), _stream(device), _processors(device)
    out = torch.empty((B, N, H, D), dtype=q.dtype, device=q.device)
    key_mean = torch.empty((B, H, D), dtype=torch.float32, device=q.device)
    value_mean = torch.empty((B, H, D), dtype=torch.float32, device=q.device)
    covariance = torch.empty((B, H, D, D), dtype=torch.float32, device=q.device)
    units = -(-H * D // UNIT)
    merged = (covariance, key_mean, value_mean)
    local_weight = None if local_weight is None else local_weight.contiguous()
    if local_weight is not None and fits_one_block(B * units, M, processors):
        layout = sample_layout(B, N, H * D, problem)
        kernels["inline_sample"].launch(
            (layout.blocks, 1), max(ACCUMULATE_SHARED_BYTES, strip_bytes(D)), stream,
            _SAMPLE.pack(
                *_address(k), *_address(v), *(tensor.data_ptr() for tensor in merged), 0, 0, 0, 0,
                problem.scale / M, 1.0, M, M, 1, H * D, units,
                *layout, *_address(q), *_address(v), local_weight.data_ptr(), 0, 0, out.data_ptr(),
            ),
        )  # fmt: skip
        return out, key_mean, value_mean, covariance
    splits = choose_splits(B * units, M, processors)
    partial = merged if splits.count == 1 else _partial_sums(B * H * splits.count, D, q.device)
    factor = problem.scale / M
    kernels["inline_accumulate"].launch(
        (B * units * splits.count, 1), ACCUMULATE_SHARED_BYTES, stream,
        _ACCUMULATE.pack(
            *_address(k), *_address(v), *(tensor.data_ptr() for tensor in partial), 0, 0, 0, 0,
            factor if splits.count == 1 else 1.0, 1.0, M, splits.tokens_each, splits.count, H * D, units,
        ),
    )  # fmt: skip
    if splits.count > 1:
        many = splits.count > MANY_SPLITS
        kernels["inline_merge_many" if many else "inline_merge"].launch(
            (B * H, D * D // MERGE_THREADS * (MANY_SHARES if many else 1)), 0, stream,
            _MERGE.pack(
                *(tensor.data_ptr() for tensor in (*partial, *merged)),
                factor, 1.0, splits.count, M, splits.tokens_each,
            ),
        )  # fmt: skip
    layout = choose_layout(B, N, H * D, problem, 1, processors)
    kernels["inline_output" if local_weight is None else "inline_output_local"].launch(
        (layout.blocks, 1), strip_bytes(D), stream,
        _OUTPUT.pack(
            *layout, *_address(q), *_address(v), _pointer(local_weight),
            covariance.data_ptr(), value_mean.data_ptr(), out.data_ptr(),
        ),
    )  # fmt: skip
    return out, key_mean, value_mean, covariance


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    local_weight: torch.Tensor | None,
    key_mean: torch.Tensor,
    value_mean: torch.Tensor,
    covariance: torch.Tensor,
    problem: Problem,
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
) -> torch.Tensor | None:
    """Fill the gradients; return that of `local_weight`. See `fused_op.Backward`."""
    del key_padding_mask
    grad_out, q, k, v = _readable(grad_out), _readable(q), _readable(k), _readable(v)
    B, N, H, D = q.shape
    M = k.shape[1]
    device = q.device.index
    kernels, stream, processors = load_kernels(device, q.dtype, D), _stream(device), _processors(device)
    units = -(-H * D // UNIT)
    splits = choose_splits(B * units, N, processors)
    merged = _partial_sums(B * H, D, q.device)
    partial = merged if splits.count == 1 else _partial_sums(B * H * splits.count, D, q.device)
    factors = (problem.scale / M, 1 / M)
    kernels["inline_accumulate_backward"].launch(
        (B * units * splits.count, 1), ACCUMULATE_SHARED_BYTES + STAGING_BYTES, stream,
        _ACCUMULATE.pack(
            *_address(q), *_address(grad_out), *(tensor.data_ptr() for tensor in partial), covariance.data_ptr(),
            *_address(grad_q), *(factors if splits.count == 1 else (1.0, 1.0)),
            N, splits.tokens_each, splits.count, H * D, units,
        ),
    )  # fmt: skip
    if splits.count > 1:
        many = splits.count > MANY_SPLITS
        kernels["inline_merge_many_backward" if many else "inline_merge_backward"].launch(
            (B * H, D * D // MERGE_THREADS * (MANY_SHARES if many else 1)), 0, stream,
            _MERGE.pack(
                *(tensor.data_ptr() for tensor in (*partial, *merged)), *factors, splits.count, N, splits.tokens_each
            ),
        )  # fmt: skip
    grad_covariance, _, grad_mean = merged
    local_weight = None if local_weight is None else local_weight.contiguous()
    layout = choose_layout(B, M, H * D, problem, 2 if local_weight is None else 3, processors)
    grad_local = parts = None
    if local_weight is not None:
        grad_local = torch.empty_like(local_weight)
        if layout.tiles > 1:
            parts = torch.empty((B, layout.tiles, H * D, 9), dtype=torch.float32, device=q.device)
    kernels["inline_gradient" if local_weight is None else "inline_gradient_local"].launch(
        (layout.blocks, 1), strip_bytes(D), stream,
        _GRADIENT.pack(
            *layout, *_address(grad_out), *_address(k), *_address(v), _pointer(local_weight),
            grad_covariance.data_ptr(), grad_mean.data_ptr(), key_mean.data_ptr(), value_mean.data_ptr(),
            *_address(grad_k), *_address(grad_v), _pointer(grad_local), _pointer(parts),
        ),
    )  # fmt: skip
    if grad_local is None or parts is None:
        return grad_local
    kernels["inline_sum_tiles"].launch(
        (-(-grad_local.numel() // TILE_SUM_ELEMENTS), 1), 0, stream,
        _TILE_SUM.pack(parts.data_ptr(), grad_local.data_ptr(), layout.tiles, H * D * 9, grad_local.numel()),
    )  # fmt: skip
    return grad_local


@cache
def choose_splits(rows: int, tokens: int, processors: int) -> Splits:
    """Cut `tokens` so that `rows` × splits blocks fill the processors in few, equal waves."""
    slots = 4 * processors
    best, best_cost = Splits(1, tokens), math.inf
    for count in range(1, min(MOST_SPLITS, -(-tokens // (2 * STAGE_TOKENS))) + 1):
        each = -(-tokens // (count * STAGE_TOKENS)) * STAGE_TOKENS
        count = -(-tokens // each)
        # A block costs its tokens, and about as much as two stages of them to start and to finish.
        cost = -(-rows * count // slots) * (each + 2 * STAGE_TOKENS) + (2 * STAGE_TOKENS if count > 1 else 0)
        if cost < best_cost:
            best, best_cost = Splits(count, each), cost
    return best


@cache
def choose_layout(batches: int, tokens: int, channels: int, problem: Problem, roles: int, processors: int) -> Layout:
    """Tiles high enough that their borders cost little, low enough that every processor has some."""
    units = -(-channels // UNIT)
    height, width = problem.grid_height, problem.grid_width
    slots = 3 * processors
    if height == 0:
        run = max(64, min(512, -(-batches * units * tokens // slots) // 16 * 16))
        return Layout(tokens, channels, units, batches, 0, 0, 0, 0, 1, -(-tokens // run), run, roles)
    tiles_across = -(-width // (GROUPS * STRIP))
    tiles_down, tile_height, best_cost = 1, 2, math.inf
    for pieces in range(1, min(MOST_TILES_DOWN, -(-height // 2)) + 1):
        rows = -(-height // (2 * pieces)) * 2
        waves = -(-batches * units * tiles_across * -(-height // rows) * roles // slots)
        cost = (waves + 1) * (rows + TILE_START_ROWS)  # one more for blocks that start and end at different times
        if cost < best_cost:
            tiles_down, tile_height, best_cost = -(-height // rows), rows, cost
    return Layout(
        tokens, channels, units, batches, problem.num_prefix_tokens, height, width,
        tile_height, tiles_across, tiles_across * tiles_down, 0, roles,
    )  # fmt: skip


def fits_one_block(rows: int, tokens: int, processors: int) -> bool:
    """Whether one block per unit of a sample does both passes well: few tokens, and many blocks."""
    return tokens <= MOST_SAMPLE_TOKENS and rows >= FEWEST_SAMPLE_WAVES * 3 * processors


def sample_layout(batches: int, tokens: int, channels: int, problem: Problem) -> Layout:
    """One tile for a whole sample."""
    return Layout(
        tokens, channels, -(-channels // UNIT), batches, problem.num_prefix_tokens,
        problem.grid_height, problem.grid_width, problem.grid_height, 1, 1, 0, 1,
    )  # fmt: skip


def strip_bytes(head_dim: int) -> int:
    """Shared memory of a block's strips."""
    neighbours, own = 2 * (STRIP + 2) * PITCH, head_dim // SLAB * 16 * PITCH
    return TILE_THREADS // 32 * 4 * (neighbours + own)


def _partial_sums(heads: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    product, left, right = torch.empty(heads * head_dim * (head_dim + 2), device=device).split(
        [heads * head_dim * head_dim, heads * head_dim, heads * head_dim]
    )
    return product, left, right


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where sixteen bytes at a time cannot be read where they lie."""
    batch, token, head, _ = tensor.stride()
    if head == tensor.shape[3] and not (token % CHUNK or batch % CHUNK or tensor.data_ptr() % 16):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _address(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _stream(device_index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device_index)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


@cache
def _processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@cache
def load_kernels(device_index: int, dtype: torch.dtype, head_dim: int) -> dict[str, compiler.Kernel]:
    """The kernels by name, built at the first call."""
    return compiler.load(device_index, defines(dtype, head_dim), KERNELS)


def defines(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """The preprocessor constants of kernels.cu."""
    return {
        "HEAD_DIM": head_dim,
        "IS_BF16": int(dtype == torch.bfloat16),
        "TILE_BLOCKS": 3 if head_dim == 32 else 2,
        "ACCUMULATE_BYTES": _ACCUMULATE.size,
        "MERGE_BYTES": _MERGE.size,
        "OUTPUT_BYTES": _OUTPUT.size,
        "SAMPLE_BYTES": _SAMPLE.size,
        "GRADIENT_BYTES": _GRADIENT.size,
        "TILE_SUM_BYTES": _TILE_SUM.size,
    }


KERNELS = {
    "inline_accumulate": ACCUMULATE_THREADS,
    "inline_accumulate_backward": ACCUMULATE_THREADS,
    "inline_merge": MERGE_THREADS,
    "inline_merge_backward": MERGE_THREADS,
    "inline_merge_many": MERGE_THREADS,
    "inline_merge_many_backward": MERGE_THREADS,
    "inline_output": TILE_THREADS,
    "inline_output_local": TILE_THREADS,
    "inline_sample": TILE_THREADS,
    "inline_gradient": TILE_THREADS,
    "inline_gradient_local": TILE_THREADS,
    "inline_sum_tiles": MERGE_THREADS,
}
