"""Block sizes, warps and chunks by rule: no search at first use, and a safe answer for GPUs never seen.

One program works through one *chunk*, block by block. Chunks are short enough that float32 sums over one stay
accurate, and short enough that all chunks together fill the GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

# Tile width in channels up to which heads are put side by side: 128 bytes of bfloat16.
GROUP_CHANNELS = 64
# Sums over more tokens than this are split, for accuracy.
LARGEST_CHUNK = 2048
# Programs per multiprocessor that keep it busy while some of them wait for memory.
PROGRAMS_PER_MULTIPROCESSOR = 6
DEFAULT_MULTIPROCESSORS = 64
# Arguments of kernels that differ from image to image. Triton would compile a kernel again for sizes of 1 and for
# multiples of 16; strides, which tell it how wide it may read, it should know.
SIZES = (
    "tokens", "keys", "chunks", "chunk_tokens", "samples_heads", "height", "width", "prefix", "mask_stride_batch",
)  # fmt: skip
# Elements of the block that one program of the merge adds up at a time.
MERGE_ELEMENTS = 2048
# Tokens of a block and warps of a program, by pass, for products in float32 and in half precision. Chosen by the
# compiler's figures for compute capability 9.0 (head dim 32, bfloat16): the largest tiles whose registers leave room
# for two to four programs on a multiprocessor, without spilling.
BLOCKS = {
    "state": ((32, 8), (32, 4)),  # keys and values, forward or backward
    "output": ((32, 4), (32, 4)),
    "query_gradient": ((32, 8), (64, 4)),
    "local_gradient": ((64, 4), (64, 4)),
}


class HeadGroup(NamedTuple):
    """How heads share a tile."""

    size: int  # heads side by side
    groups: int  # how many such groups a sample has
    block_d: int  # head dim of queries and keys, padded to a power of two
    block_dv: int
    resident: bool  # True if a group's matrix stays in shared memory while a program works through its chunk

    @property
    def width(self) -> int:
        """Channels of the wider tile."""
        return self.size * max(self.block_d, self.block_dv)


class Plan(NamedTuple):
    """How one kernel cuts the tokens of a sample, and the resources of a program."""

    block_tokens: int
    chunk_tokens: int
    chunks: int
    options: dict[str, int | bool]  # of the compiler


def half_products(dtype: torch.dtype, feature_map: str) -> bool:
    """True if mapped values are exact in their half-precision dtype, so that tensor cores may multiply them."""
    return dtype != torch.float32 and feature_map in ("identity", "relu")


@functools.lru_cache(maxsize=256)
def head_group(heads: int, head_dim: int, value_dim: int) -> HeadGroup:
    """Put heads side by side until a tile is `GROUP_CHANNELS` wide."""
    block_d, block_dv = (max(16, 1 << (dim - 1).bit_length()) for dim in (head_dim, value_dim))
    widest = max(block_d, block_dv)
    size = min(max(GROUP_CHANNELS // widest, 1), 1 << (heads - 1).bit_length())
    return HeadGroup(size, -(-heads // size), block_d, block_dv, resident=size * widest <= GROUP_CHANNELS)


def state_floats(head_dim: int, value_dim: int) -> int:
    """Floats of one head's partial sums: a matrix, two vectors, a count; padded so that rows stay aligned."""
    return -(-(head_dim * value_dim + head_dim + value_dim + 1) // 4) * 4


def merge_block(chunks: int, heads: HeadGroup) -> tuple[int, int]:
    """Rows of the matrix and chunks that a program of the merge takes at a time."""
    chunk_block = min(16, 1 << (chunks - 1).bit_length())
    return max(1, min(heads.block_d, MERGE_ELEMENTS // (heads.block_dv * chunk_block))), chunk_block


def plan(pass_name: str, batch: int, tokens: int, heads: HeadGroup, half: bool, device: torch.device) -> Plan:
    """Plan a pass of `BLOCKS`; `half` if it multiplies in half precision."""
    (block_tokens, num_warps), num_stages = BLOCKS[pass_name][half], 2
    if heads.width > GROUP_CHANNELS:
        # Matrices of 128 × 128 in three parts leave no shared memory for loads in advance.
        block_tokens, num_warps, num_stages = 32, 8, 1
    block_tokens = min(block_tokens, max(16, 1 << (tokens - 1).bit_length()))
    multiprocessors = _multiprocessors(device.index) if device.type == "cuda" else DEFAULT_MULTIPROCESSORS
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // (batch * heads.groups)
    chunks = min(max(wanted, -(-tokens // LARGEST_CHUNK)), -(-tokens // block_tokens))
    chunk_tokens = -(-tokens // (chunks * block_tokens)) * block_tokens
    # Fused multiply-adds are asked for: Triton's default changes with 3.10.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return Plan(block_tokens, chunk_tokens, -(-tokens // chunk_tokens), options)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
