# Triton's language is Python in name only: a type checker sees constants where the compiler sees tensors.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
"""Parts that the kernels share: addressing of head groups, feature maps, and products as exact as float32's.

A kernel works on a tile of tokens × channels. The channels are those of GROUP heads side by side, each padded to a
power of two, so that the rows of a tile are long enough for wide loads even when heads are narrow. A matrix per head
(`[D, Dv]`) then is one block-diagonal matrix per group, zero between heads.

Offsets are 64-bit throughout: tensors may have more than 2³¹ elements, and any strides.

Shapes: `GROUP` heads of a tile; `BLOCK_D`, `BLOCK_DV` padded head dims; C = GROUP · BLOCK_D, E = GROUP · BLOCK_DV.
"""

import triton
import triton.language as tl

from inline_attention.ops import feature_maps
from inline_attention.ops.call import SMALLEST_MEAN_SCORE as _SMALLEST_MEAN_SCORE

LEAKY_RELU_SLOPE = tl.constexpr(feature_maps.LEAKY_RELU_SLOPE)
EXP_RATE = tl.constexpr(feature_maps.EXP_RATE)
EXP_LARGEST_EXPONENT = tl.constexpr(feature_maps.EXP_LARGEST_EXPONENT)
SMALLEST_MEAN_SCORE = tl.constexpr(_SMALLEST_MEAN_SCORE)


@triton.jit
def group_heads(group, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The head of every channel of a group's tile `[GROUP · BLOCK]`, and its place in that head."""
    channel = tl.arange(0, GROUP * BLOCK)
    return (group * GROUP + channel // BLOCK).to(tl.int64), channel % BLOCK


@triton.jit
def load_tokens(base, stride_token, stride_head, token, real, head, dim, heads, DIM: tl.constexpr):
    """Tile `[tokens, channels]` of a sample that starts at `base`; zero where not `real` and in padded channels."""
    valid = real[:, None] & ((dim < DIM) & (head < heads))[None, :]
    offset = (token.to(tl.int64) * stride_token)[:, None] + (head * stride_head + dim)[None, :]
    return tl.load(base + offset, mask=valid, other=0.0)


@triton.jit
def store_tokens(base, stride_token, stride_head, token, real, head, dim, heads, tile, DIM: tl.constexpr):
    """The reverse of `load_tokens`; rounds to the dtype of the tensor."""
    valid = real[:, None] & ((dim < DIM) & (head < heads))[None, :]
    offset = (token.to(tl.int64) * stride_token)[:, None] + (head * stride_head + dim)[None, :]
    tl.store(base + offset, tile.to(base.dtype.element_ty), mask=valid)


@triton.jit
def load_mask(base, stride_token, token, considered):
    """Which of the considered tokens are real, by a sample's key padding mask."""
    return tl.load(base + token.to(tl.int64) * stride_token, mask=considered, other=0) != 0


@triton.jit
def load_channels(base, head, dim, heads, DIM: tl.constexpr):
    """Vector `[channels]` of a sample's contiguous `[H, DIM]`."""
    return tl.load(base + head * DIM + dim, mask=(dim < DIM) & (head < heads), other=0.0)


@triton.jit
def matrix_offsets(head, dim, value_head, value_dim, heads, stride_head, D: tl.constexpr, DV: tl.constexpr):
    """Offsets `[C, E]` into matrices `[D, DV]`, one every `stride_head`, and which lie on the block diagonal."""
    valid = ((dim < D) & (head < heads))[:, None] & (value_dim < DV)[None, :] & (head[:, None] == value_head[None, :])
    return (head * stride_head + dim * DV)[:, None] + value_dim[None, :], valid


@triton.jit
def map_features(x, FEATURE_MAP: tl.constexpr):
    """phi(x), in float32."""
    if FEATURE_MAP == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif FEATURE_MAP == "leaky_relu":
        x = tl.where(x > 0, x, LEAKY_RELU_SLOPE * x)
    elif FEATURE_MAP == "exp":
        x = tl.exp(tl.minimum(EXP_RATE * x, EXP_LARGEST_EXPONENT))
    elif FEATURE_MAP == "elu_plus_one":
        x = tl.exp(tl.minimum(x, 0.0)) + tl.maximum(x, 0.0)
    return x


@triton.jit
def map_derivative(x, gradient, FEATURE_MAP: tl.constexpr):
    """Gradient of x from the gradient of phi(x)."""
    if FEATURE_MAP == "relu":
        gradient = tl.where(x > 0, gradient, 0.0)
    elif FEATURE_MAP == "leaky_relu":
        gradient = tl.where(x > 0, gradient, LEAKY_RELU_SLOPE * gradient)
    elif FEATURE_MAP == "exp":
        exponent = EXP_RATE * x
        slope = EXP_RATE * tl.exp(tl.minimum(exponent, EXP_LARGEST_EXPONENT))
        gradient = tl.where(exponent > EXP_LARGEST_EXPONENT, 0.0, slope * gradient)
    elif FEATURE_MAP == "elu_plus_one":
        gradient = gradient * tl.exp(tl.minimum(x, 0.0))
    return gradient


@triton.jit
def sum_over_heads(tile, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """`[tokens, GROUP · BLOCK]` summed over the channels of each head: `[tokens, GROUP]`."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], GROUP, BLOCK]), axis=2)


@triton.jit
def spread_over_heads(per_head, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """`[tokens, GROUP]` repeated for the channels of each head: `[tokens, GROUP · BLOCK]`."""
    tokens: tl.constexpr = per_head.shape[0]
    return tl.reshape(tl.broadcast_to(per_head[:, :, None], [tokens, GROUP, BLOCK]), [tokens, GROUP * BLOCK])


@triton.jit
def inverse_mean_score(query, key_mean, scale, GROUP: tl.constexpr, BLOCK_D: tl.constexpr):
    """1/z `[tokens, GROUP]`, or zero where z is too small to divide by."""
    mean_score = scale * sum_over_heads(query * key_mean[None, :], GROUP, BLOCK_D)
    divisible = tl.abs(mean_score) > SMALLEST_MEAN_SCORE
    return tl.where(divisible, 1.0 / tl.where(divisible, mean_score, 1.0), 0.0)


@triton.jit
def narrow_reference(lowest, highest):
    """Per channel a number r such that x - r is exact in the dtype of x for all x in [lowest, highest].

    If all have one sign and lie within a factor of two, the difference of any two is exact (Sterbenz); else zero will
    do: the mean is not large against the spread then, and taking it out later costs little.
    """
    positive = (lowest > 0) & (highest <= 2 * lowest)
    negative = (highest < 0) & (lowest >= 2 * highest)
    return tl.where((positive | negative) & (lowest <= highest), lowest, 0.0)


@triton.jit
def column_scale(matrix):
    """Powers of two `[columns]` that bring the largest entry of every column near 2^15, and their inverses."""
    largest = tl.max(tl.abs(matrix), axis=0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    shift = tl.minimum(tl.maximum(14 - exponent, -100), 100)
    return ((127 + shift) << 23).to(tl.float32, bitcast=True), ((127 - shift) << 23).to(tl.float32, bitcast=True)


@triton.jit
def multiply(tile, matrix):
    """tile · matrix `[tokens, columns]`, for a float32 matrix, with float32's accuracy in every dtype of the tile.

    A half-precision tile goes through tensor cores: its values are exact there, and the matrix is written as a sum of
    parts of the tile's dtype that together carry its 24 bits: three for bfloat16, two for float16, whose columns
    are first moved into its narrow range.
    """
    if tile.dtype == tl.bfloat16:
        # Each part is multiplied before the next is made: only one of them need be in shared memory at a time.
        high = matrix.to(tl.bfloat16)
        product = tl.dot(tile, high)
        rest = matrix - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        product = tl.dot(tile, middle, product)
        product = tl.dot(tile, (rest - middle.to(tl.float32)).to(tl.bfloat16), product)
    elif tile.dtype == tl.float16:
        scale, inverse = column_scale(matrix)
        scaled = matrix * scale[None, :]
        high = scaled.to(tl.float16)
        product = tl.dot(tile, high)
        product = tl.dot(tile, (scaled - high.to(tl.float32)).to(tl.float16), product) * inverse[None, :]
    else:
        product = tl.dot(tile, matrix, input_precision="ieee")
    return product


@triton.jit
def multiply_mean(mean, matrix, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """mean · matrix `[columns]`, by the arithmetic that `multiply` puts tiles of ROWS tokens of DTYPE through.

    Where every token equals the mean, as with a single key, subtracting this leaves exactly zero.
    """
    rest = mean
    product = tl.zeros([matrix.shape[1]], tl.float32)
    for _ in tl.static_range(3):
        part = rest.to(DTYPE)
        rest -= part.to(tl.float32)
        tile = tl.broadcast_to(part[None, :], [ROWS, mean.shape[0]])
        product += tl.max(multiply(tile, matrix), axis=0)  # all rows are equal
    return product


@triton.jit
def accumulate_outer(left, right, total):
    """total + leftᵀ · right over the tokens of two tiles of one dtype, with float32 sums."""
    return tl.dot(tl.trans(left), right, total, input_precision="ieee")


@triton.jit
def fold_tokens(tile, ROWS: tl.constexpr):
    """Sum of a tile's tokens down to ROWS partial sums: adds within threads, where a full sum would join threads."""
    return tl.sum(tl.reshape(tile, [tile.shape[0] // ROWS, ROWS, tile.shape[1]]), axis=0)


@triton.jit
def grid_neighbor(token, tap_row, tap_column, height, width, prefix):
    """Return whether tokens have the neighbor (tap_row, tap_column), each in -1 … 1, on the grid, and its token."""
    position = token - prefix
    row = position // width + tap_row
    column = position % width + tap_column
    inside = (position >= 0) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return token + tap_row * width + tap_column, inside


@triton.jit
def transpose_taps(local_weight, taps, sample, value_head, value_dim, heads, DV: tl.constexpr):
    """Copy a group's 3×3 weights from `[B, H, Dv, 9]` to `[B, 9, H, Dv]`, where the channels of one tap lie together.

    The kernel that runs before the one that applies them also does this copy. Nine wide loads per block then replace
    nine narrow loads per channel.
    """
    tap = tl.arange(0, 16)[:, None]
    channel = value_head * DV + value_dim
    valid = (tap < 9) & ((value_dim < DV) & (value_head < heads))[None, :]
    weight = tl.load(local_weight + (sample * heads * DV + channel[None, :]) * 9 + tap, mask=valid, other=0.0)
    tl.store(taps + (sample * 9 + tap) * heads * DV + channel[None, :], weight, mask=valid)
