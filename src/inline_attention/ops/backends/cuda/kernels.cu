// InLine attention for NVIDIA tensor cores, in four passes: accumulate, merge, output; and back.
//
// Compiled at run time by NVRTC for one head dim and one half type (HEAD_DIM, IS_BF16); no headers, no dependencies.
// launch.py defines these and all other constants that both sides need. docs/kernels.md has the algorithm, what is read
// and written, and what was measured. Each kernel has one parameter, a struct passed by value; compiler.py reads the
// structs from this file and packs their fields.
//
// Three ideas carry everything here:
//
// 1. The 3×3 term is a product with nine diagonal matrices, so it runs on the tensor cores, into the accumulators of
//    the matrix product: no conversion of the values, no other register layout. Products of half numbers are exact.
// 2. A float32 matrix times a half tensor is done in parts: the matrix is split into three bfloat16 (or two scaled
//    float16) matrices that add up to it to the last bit that matters.
// 3. What a step reads was sent for several steps before, straight into shared memory: registers hold the constant
//    matrices, not loads in flight.
//
// Words: a *slab* is the 32 channels one warp works on; a *unit* the 64 channels (128 bytes of a row) of one block;
// a *chunk* eight channels, sixteen bytes. g and c are a lane's row and column in a fragment: lane = 4 g + c.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int HEADS_PER_UNIT = UNIT / HEAD_DIM;
constexpr int HALVES = HEAD_DIM / SLAB;            // slabs of one head
constexpr int INNER = HEAD_DIM / 16;               // matrix instructions along a head
constexpr int PARTS = IS_BF16 ? 3 : 2;             // half matrices that make up a float32 one
constexpr u32 ONE = IS_BF16 ? 0x3f80u : 0x3c00u;
constexpr u32 ONES = ONE << 16 | ONE;

#define UNROLL _Pragma("unroll")
#define PACKED_OTHERWISE "compiler.py packs another struct"
static_assert(HEAD_DIM == 32 || HEAD_DIM == 64, "fragments are laid out for head dims 32 and 64");

#ifndef EMULATED  // tests/ops/emulated_gpu.h has these instructions for a CPU
#if IS_BF16
#define HALF "bf16"
#else
#define HALF "f16"
#endif

__device__ __forceinline__ void mma16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." HALF "." HALF ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma8(float (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32." HALF "." HALF ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b0));
}

__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, u32 first, u32 second) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" :: "r"(address), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address) : "memory");
  return r;
}

__device__ __forceinline__ void store_global(u16* address, const uint4& value) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

// Sixteen bytes from global to shared memory, or sixteen zero bytes; then nothing is read.
__device__ __forceinline__ void copy_async(u32 target, const u16* source, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(target), "l"(source), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ float low_half(u32 pair) {
#if IS_BF16
  return __uint_as_float(pair << 16);
#else
  float r;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(r) : "r"(pair));
  return r;
#endif
}
__device__ __forceinline__ float high_half(u32 pair) {
#if IS_BF16
  return __uint_as_float(pair & 0xffff0000u);
#else
  float r;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(pair));
  return r;
#endif
}

// pair - reference, as a fused multiply-add: a plain bfloat16 subtraction needs sm_90.
__device__ __forceinline__ u32 plus(u32 pair, u32 negative_reference) {
  u32 r;
  asm("fma.rn." HALF "x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(ONES), "r"(negative_reference));
  return r;
}

#endif  // EMULATED

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void unpack(float (&values)[8], const uint4& chunk, bool inside) {
  const u32 pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  UNROLL for (int i = 0; i < 4; ++i) {
    values[2 * i] = inside ? low_half(pairs[i]) : 0.0f;
    values[2 * i + 1] = inside ? high_half(pairs[i]) : 0.0f;
  }
}

// number / divisor for numbers below 2^31, and what remains; `inverse` is 2^32 / divisor, rounded down. A division proper
// takes a hundred cycles, and before it is known which tokens are a block's own, nothing else can be done.
struct Division {
  int quotient, rest;
  __device__ __forceinline__ Division(int number, int divisor, u32 inverse) {
    quotient = __umulhi(number, inverse);
    rest = number - quotient * divisor;
    if (rest >= divisor) {
      quotient += 1;
      rest -= divisor;
    }
  }
};

// For copies of eight tokens' chunks a lane takes chunk c of token `row`, not g: tokens four apart lie in different banks.
struct Lane {
  int id, g, c, row;
  __device__ __forceinline__ Lane() : id(threadIdx.x & 31), g(id >> 2), c(id & 3), row((g >> 1) + 4 * (g & 1)) {}
};

constexpr int MATRIX_PITCH = HEAD_DIM * 2 + 16;    // bytes from row to row: eight rows' chunks in different banks
constexpr int PART_BYTES = HEADS_PER_UNIT * HEAD_DIM * MATRIX_PITCH;

// The float32 matrices of a unit's heads, in parts, in shared memory: each element is split by one thread, once.
struct Matrices {
  u32 parts;
  float* unscale;  // float16 only: of each head, the power of two taken out before splitting

  __device__ __forceinline__ Matrices() {
    __shared__ __align__(16) unsigned char memory[PARTS * PART_BYTES];
    __shared__ float scales[HEADS_PER_UNIT];
    parts = shared_address(memory);
    unscale = scales;
  }
};

// The same on their way there. Fetching and sharing are apart: copies that are sent for in between come after what is
// fetched, and while it is split.
struct FetchedMatrices {
  static constexpr int VECTORS = UNIT * HEAD_DIM / 4 / BLOCK_THREADS;
  float4 values[VECTORS];

  // From matrices [heads, HEAD_DIM, HEAD_DIM].
  __device__ __forceinline__ FetchedMatrices(const float* matrices, int heads) {
    UNROLL for (int i = 0; i < VECTORS; ++i)
      values[i] = head_of(i) < heads ? *(const float4*)(matrices + 4 * (i * BLOCK_THREADS + threadIdx.x)) : float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
  static __device__ __forceinline__ constexpr int head_of(int i) { return i * HEADS_PER_UNIT / VECTORS; }

  // All threads of the block take part.
  __device__ __forceinline__ void share(const Matrices& matrices) {
    float scale[HEADS_PER_UNIT];
    if (!IS_BF16) find_scales(scale, matrices);
    UNROLL for (int i = 0; i < VECTORS; ++i) {
      const int element = 4 * (i * BLOCK_THREADS + threadIdx.x), row = element / HEAD_DIM, column = element % HEAD_DIM;
      float rest[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
      if (!IS_BF16)
        UNROLL for (int e = 0; e < 4; ++e) rest[e] *= scale[head_of(i)];
      UNROLL for (int part = 0; part < PARTS; ++part) {
        const u32 first = pack(rest[0], rest[1]), second = pack(rest[2], rest[3]);
        store_shared(matrices.parts + part * PART_BYTES + row * MATRIX_PITCH + column * 2, first, second);
        rest[0] -= low_half(first);
        rest[1] -= high_half(first);
        rest[2] -= low_half(second);
        rest[3] -= high_half(second);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void find_scales(float (&scale)[HEADS_PER_UNIT], const Matrices& matrices) const {
    __shared__ float maxima[HEADS_PER_UNIT][BLOCK_THREADS / 32];
    UNROLL for (int h = 0; h < HEADS_PER_UNIT; ++h) {
      float largest = 0.0f;
      UNROLL for (int i = 0; i < VECTORS; ++i)
        if (head_of(i) == h) largest = fmaxf(fmaxf(largest, fmaxf(fabsf(values[i].x), fabsf(values[i].y))), fmaxf(fabsf(values[i].z), fabsf(values[i].w)));
      UNROLL for (int step = 16; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      maxima[h][threadIdx.x >> 5] = largest;
    }
    __syncthreads();
    UNROLL for (int h = 0; h < HEADS_PER_UNIT; ++h) {
      const float largest = fmaxf(fmaxf(maxima[h][0], maxima[h][1]), fmaxf(maxima[h][2], maxima[h][3]));
      u32 exponent = __float_as_uint(largest) & 0x7f800000u;
      exponent = min(max(exponent, 0x00800000u), 0x7e000000u);
      scale[h] = __uint_as_float(0x7f000000u - exponent);
      matrices.unscale[h] = __uint_as_float(exponent);
    }
  }
};

// A float32 matrix [HEAD_DIM, 32] as right operand, in parts.
struct RightOperand {
  u32 fragments[PARTS][INNER][4][2];  // part, step of the inner dimension, column tile, register
  float unscale;

  // Of a head's matrix 32 columns; of its TRANSPOSED, 32 rows.
  template <bool TRANSPOSED> __device__ __forceinline__ void load(const Matrices& matrices, int head, int first, const Lane& lane) {
    const int low = lane.id & 7, middle = (lane.id >> 3 & 1) * 8, high = (lane.id >> 4) * 8;
    const u32 corner = matrices.parts + head * (HEAD_DIM * MATRIX_PITCH)
        + (TRANSPOSED ? (first + high + low) * MATRIX_PITCH + middle * 2 : (middle + low) * MATRIX_PITCH + (first + high) * 2);
    UNROLL for (int part = 0; part < PARTS; ++part)
      UNROLL for (int s = 0; s < INNER; ++s)
        UNROLL for (int j = 0; j < 4; j += 2) {
          u32 r[4];
          if (TRANSPOSED) load_matrices(r, corner + part * PART_BYTES + 8 * j * MATRIX_PITCH + 32 * s);
          else load_transposed(r, corner + part * PART_BYTES + 16 * s * MATRIX_PITCH + 16 * j);
          fragments[part][s][j][0] = r[0];
          fragments[part][s][j][1] = r[1];
          fragments[part][s][j + 1][0] = r[2];
          fragments[part][s][j + 1][1] = r[3];
        }
    unscale = IS_BF16 ? 1.0f : matrices.unscale[head];
  }
};

// Sixteen tokens of a head as left operand.
struct LeftOperand { u32 fragments[INNER][4]; };

// Sixteen tokens by 32 channels: thread (g, c) holds channels 8 j + 2 c + {0, 1} of token g, then of token g + 8.
struct Tile {
  float of[4][4];

  __device__ __forceinline__ void product(const LeftOperand& left, const RightOperand& right, const float (&bias)[8]) {
    UNROLL for (int j = 0; j < 4; ++j)
      UNROLL for (int i = 0; i < 4; ++i) of[j][i] = 0.0f;
    // Column tiles innermost: consecutive instructions then do not wait for each other's sums.
    UNROLL for (int part = PARTS - 1; part >= 0; --part)
      UNROLL for (int s = 0; s < INNER; ++s)
        UNROLL for (int j = 0; j < 4; ++j) {
          const u32 (&a)[4] = left.fragments[s], (&b)[2] = right.fragments[part][s][j];
          mma16(of[j], a[0], a[1], a[2], a[3], b[0], b[1]);
        }
    // The bias last: where it cancels the product, as with a single key, nothing is left.
    UNROLL for (int j = 0; j < 4; ++j)
      UNROLL for (int i = 0; i < 4; ++i) of[j][i] = IS_BF16 ? of[j][i] + bias[2 * j + (i & 1)] : fmaf(of[j][i], right.unscale, bias[2 * j + (i & 1)]);
  }

  // Through the warp's own shared memory, 16 · PITCH bytes, so that every thread stores a chunk.
  // `first` and `second`: chunk c of tokens `row` and `row` + 8.
  __device__ __forceinline__ void store(u32 staging, u16* first, u16* second, bool first_inside, bool second_inside, const Lane& lane) const {
    const u32 mine = staging + lane.g * PITCH + lane.c * 4;
    UNROLL for (int j = 0; j < 4; ++j) {
      store_shared(mine + j * 16, pack(of[j][0], of[j][1]));
      store_shared(mine + j * 16 + 8 * PITCH, pack(of[j][2], of[j][3]));
    }
    __syncwarp();
    const u32 chunk = staging + lane.row * PITCH + lane.c * 16;
    const uint4 upper = load_shared(chunk), lower = load_shared(chunk + 8 * PITCH);
    if (first_inside) store_global(first, upper);
    if (second_inside) store_global(second, lower);
  }
};

// Values that every row of a tile starts from: channels 8 j + 2 c + {0, 1} of a slab.
__device__ __forceinline__ void load_bias(float (&bias)[8], const float* slab, const Lane& lane) {
  UNROLL for (int i = 0; i < 8; ++i) bias[i] = slab[8 * (i >> 1) + 2 * lane.c + (i & 1)];
}

// Sum over tokens of left^T right, per head. Forward: keys and values, which gives their means and covariance.
// Backward: queries and output gradients, which gives the covariance's gradient, while the queries' own gradient
// is written on the way.
struct AccumulateParams {
  const u16* left; i64 left_batch, left_token;
  const u16* right; i64 right_batch, right_token;
  float* product;          // [B, H, splits, HEAD_DIM, HEAD_DIM]; forward: centered
  float* left_mean;        // [B, H, splits, HEAD_DIM]; forward only
  float* right_mean;       // [B, H, splits, HEAD_DIM]; backward: the sum
  const float* covariance; // backward only
  u16* grad_left; i64 grad_batch, grad_token;
  float product_factor, right_factor;
  int tokens, tokens_per_split, splits, channels, units;
  u32 splits_inverse, units_inverse;
};
static_assert(sizeof(AccumulateParams) == AccumulateParams_BYTES, PACKED_OTHERWISE);

constexpr int ACCUMULATE_WARPS = BLOCK_THREADS / 32;
constexpr int TENSOR_BYTES = STAGE_TOKENS * UNIT * 2;
constexpr int STAGE_BYTES = 2 * TENSOR_BYTES;

// Rows of 128 bytes whose sixteen-byte chunks are permuted, so that eight rows' equal chunks lie in different banks.
__device__ __forceinline__ u32 swizzled(int row, int chunk) { return row * (UNIT * 2) + ((chunk ^ (row & 7)) << 4); }

__device__ __forceinline__ void load_stage(const AccumulateParams& p, const u16* left, const u16* right, u32 stage, int first_token, int end, int channels_left) {
  UNROLL for (int i = 0; i < STAGE_TOKENS / (ACCUMULATE_WARPS * 4); ++i) {
    int row = (threadIdx.x >> 3) + i * (ACCUMULATE_WARPS * 4), chunk = threadIdx.x & 7, token = first_token + row;
    bool inside = token < end && chunk * CHUNK < channels_left;
    i64 at = inside ? token : 0;
    int channel = inside ? chunk * CHUNK : 0;
    copy_async(stage + swizzled(row, chunk), left + at * p.left_token + channel, inside);
    copy_async(stage + TENSOR_BYTES + swizzled(row, chunk), right + at * p.right_token + channel, inside);
  }
}

// The reference that keys and values are measured from, negated: a channel whose first tokens lie within a factor of
// two of each other is dominated by its mean, and subtracting its first value is then exact in the half type itself.
// Any other channel needs no help: products are exact, and its mean cancels nothing.
__device__ __forceinline__ u16 negative_reference(const unsigned char* stage, int channel, int tokens) {
  float smallest = 3.4e38f, largest = -3.4e38f;
  u32 first = 0;
  UNROLL for (int i = 15; i >= 0; --i) {
    first = *(const u16*)(stage + swizzled(i < tokens ? i : 0, channel / CHUNK) + channel % CHUNK * 2);
    const float value = low_half(first);
    smallest = fminf(smallest, value);
    largest = fmaxf(largest, value);
  }
  const bool dominated = (smallest > 0.0f && largest <= 2.0f * smallest) || (largest < 0.0f && smallest >= 2.0f * largest);
  return dominated ? (u16)(first ^ 0x8000u) : (u16)0;
}

// Where a block's sums go: the first of its heads' slots, and how far apart they are.
struct Sums {
  float* product; float* left_mean; float* right_mean;
  i64 first_slot; int slot_stride;
};

template <bool BACKWARD> __device__ __forceinline__ void accumulate(const AccumulateParams& p, int unit, int split, int batch, const Sums& results) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ u16 references[2][UNIT];
  constexpr int ROW_TILES = HEAD_DIM / 16;
  const Lane lane;
  const int warp = threadIdx.x >> 5, slab = warp & 1, group = warp >> 1;
  const int start = split * p.tokens_per_split;
  const int end = min(start + p.tokens_per_split, p.tokens), count = end - start;
  const int channels_left = p.channels - unit * UNIT;
  const int heads = p.channels / HEAD_DIM;
  const int column = HALVES > 1 ? slab * SLAB : 0;  // where the slab starts within its head
  const bool active = slab * SLAB < channels_left;
  const u16* left = p.left + batch * p.left_batch + unit * UNIT;
  const u16* right = p.right + batch * p.right_batch + unit * UNIT;
  const u32 ring = shared_address(memory);

  const auto send_first_stages = [&] {
    UNROLL for (int s = 0; s < STAGES - 1; ++s) {
      load_stage(p, left, right, ring + s * STAGE_BYTES, start + s * STAGE_TOKENS, end, channels_left);
      commit_copies();
    }
  };

  u32 left_reference[ROW_TILES][2], right_reference[4];
  RightOperand covariance;
  const float zeros[8] = {};
  if (BACKWARD) {
    const int first_head = unit * HEADS_PER_UNIT;
    FetchedMatrices fetched(p.covariance + ((i64)batch * heads + first_head) * (HEAD_DIM * HEAD_DIM), heads - first_head);
    send_first_stages();
    const Matrices matrices;
    fetched.share(matrices);
    covariance.load<true>(matrices, HEADS_PER_UNIT > 1 ? slab : 0, column, lane);
  } else {
    send_first_stages();
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int channel = threadIdx.x % UNIT, tensor = threadIdx.x / UNIT;
    references[tensor][channel] = negative_reference(memory + tensor * TENSOR_BYTES, channel, count);
    __syncthreads();
    const int first_row = HALVES > 1 ? 0 : slab * SLAB;
    UNROLL for (int m = 0; m < ROW_TILES; ++m)
      UNROLL for (int i = 0; i < 2; ++i) left_reference[m][i] = references[0][first_row + 16 * m + 8 * i + lane.g] * 0x10001u;
    UNROLL for (int j = 0; j < 4; ++j) right_reference[j] = references[1][slab * SLAB + 8 * j + lane.g] * 0x10001u;
  }

  float sums[ROW_TILES][4][4] = {}, left_sums[ROW_TILES][4] = {}, right_sums[4][4] = {};
  const int stages = (count + STAGE_TOKENS - 1) / STAGE_TOKENS;
  for (int s = 0; s < stages; ++s) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int next = s + STAGES - 1;
    if (next < stages) load_stage(p, left, right, ring + next % STAGES * STAGE_BYTES, start + next * STAGE_TOKENS, end, channels_left);
    commit_copies();
    const u32 left_tile = ring + s % STAGES * STAGE_BYTES, right_tile = left_tile + TENSOR_BYTES;
    UNROLL for (int step = 0; step < STAGE_TOKENS / 16 / (ACCUMULATE_WARPS / 2); ++step) {
      const int row = 16 * (step * (ACCUMULATE_WARPS / 2) + group), valid = count - s * STAGE_TOKENS - row;
      if (valid <= 0 || !active) continue;
      u32 ones[2] = {ONES, ONES}, real[2] = {~0u, ~0u};
      if (valid < 16) {
        UNROLL for (int i = 0; i < 2; ++i) {
          int token = 2 * lane.c + 8 * i;
          real[i] = (token < valid ? 0xffffu : 0u) | (token + 1 < valid ? 0xffff0000u : 0u);
          ones[i] &= real[i];
        }
      }
      u32 b[2][4];
      UNROLL for (int pair = 0; pair < 2; ++pair) {
        load_transposed(b[pair], right_tile + swizzled(row + (lane.id >> 3 & 1) * 8 + (lane.id & 7), slab * 4 + 2 * pair + (lane.id >> 4)));
        if (!BACKWARD)
          UNROLL for (int i = 0; i < 4; ++i) b[pair][i] = plus(b[pair][i], right_reference[2 * pair + (i >> 1)]);
      }
      UNROLL for (int m = 0; m < ROW_TILES; ++m) {
        u32 a[4];
        load_transposed(a, left_tile + swizzled(row + (lane.id >> 4) * 8 + (lane.id & 7), (HALVES > 1 ? 0 : slab * 4) + 2 * m + (lane.id >> 3 & 1)));
        UNROLL for (int i = 0; i < 4; ++i) {
          if (!BACKWARD) a[i] = plus(a[i], left_reference[m][i & 1]);
          a[i] &= real[i >> 1];
        }
        UNROLL for (int j = 0; j < 4; ++j) mma16(sums[m][j], a[0], a[1], a[2], a[3], b[j >> 1][2 * (j & 1)], b[j >> 1][2 * (j & 1) + 1]);
        if (!BACKWARD) mma16(left_sums[m], a[0], a[1], a[2], a[3], ONES, ONES);
      }
      UNROLL for (int j = 0; j < 4; ++j) mma16(right_sums[j], ones[0], ones[0], ones[1], ones[1], b[j >> 1][2 * (j & 1)], b[j >> 1][2 * (j & 1) + 1]);
      if (BACKWARD) {
        LeftOperand grad;
        UNROLL for (int i = 0; i < INNER; ++i)
          load_matrices(grad.fragments[i], right_tile + swizzled(row + (lane.id & 15), (HALVES > 1 ? 0 : 4 * slab) + 2 * i + (lane.id >> 4)));
        Tile tile;
        tile.product(grad, covariance, zeros);
        u16* target = p.grad_left + batch * p.grad_batch + (start + s * STAGE_TOKENS + row + lane.row) * p.grad_token + unit * UNIT + slab * SLAB + CHUNK * lane.c;
        __syncwarp();  // the chunks of the step before have been read
        tile.store(ring + STAGES * STAGE_BYTES + warp * (16 * PITCH), target, target + 8 * p.grad_token, lane.row < valid, lane.row + 8 < valid, lane);
      }
    }
  }

  // Two groups of warps took turns with the tokens. Each finishes half of the row tiles: it takes over the other's sums of
  // those, through shared memory. The sums of the columns both want.
  static_assert(ACCUMULATE_WARPS == 4, "two slabs, two groups");
  constexpr int OWN_TILES = ROW_TILES / 2, SUMS = OWN_TILES * 20 + 16;
  wait_copies<0>();
  __syncthreads();
  float* given = (float*)memory + warp * (SUMS * 32) + lane.id;
  const float* taken = (float*)memory + (warp ^ 2) * (SUMS * 32) + lane.id;
  // Not a lambda with an `auto` parameter: NVRTC before 13.2 takes it for a host function.
  const auto exchange = [&](bool own) {
    const auto one = [&](int at, float& sum) {
      if (own) sum += taken[at];
      else given[at] = sum;
    };
    UNROLL for (int m = 0; m < ROW_TILES; ++m)
      if ((m / OWN_TILES == group) == own)
        UNROLL for (int i = 0; i < 4; ++i) {
          UNROLL for (int j = 0; j < 4; ++j) one((m % OWN_TILES * 20 + j * 4 + i) * 32, sums[m][j][i]);
          one((m % OWN_TILES * 20 + 16 + i) * 32, left_sums[m][i]);
        }
    UNROLL for (int i = 0; i < 16; ++i) one((OWN_TILES * 20 + i) * 32, right_sums[i / 4][i % 4]);
  };
  exchange(false);
  __syncthreads();
  exchange(true);
  if (!active) return;

  const i64 slot = results.first_slot + (HEADS_PER_UNIT > 1 ? slab : 0) * results.slot_stride;
  const float inverse_count = 1.0f / count;
  UNROLL for (int m = 0; m < ROW_TILES; ++m)
    UNROLL for (int half = 0; half < 2; ++half) {
      if (m / OWN_TILES != group) continue;
      const int row = 16 * m + 8 * half + lane.g;
      const float left_sum = left_sums[m][2 * half];
      UNROLL for (int j = 0; j < 4; ++j) {
        float2 value;
        value.x = sums[m][j][2 * half];
        value.y = sums[m][j][2 * half + 1];
        if (!BACKWARD) {
          value.x = fmaf(-left_sum * inverse_count, right_sums[j][0], value.x);
          value.y = fmaf(-left_sum * inverse_count, right_sums[j][1], value.y);
        }
        value.x *= p.product_factor;
        value.y *= p.product_factor;
        *(float2*)(results.product + (slot * HEAD_DIM + row) * HEAD_DIM + column + 8 * j + 2 * lane.c) = value;
      }
      if (!BACKWARD && lane.c == 0 && (HALVES == 1 || slab == 0))
        results.left_mean[slot * HEAD_DIM + row] = fmaf(left_sum, inverse_count, -low_half(left_reference[m][half]));
    }
  if (group != 0) return;
  UNROLL for (int j = 0; j < 4; ++j)
    if (BACKWARD) {
      if (lane.g == 0) {
        results.right_mean[slot * HEAD_DIM + column + 8 * j + 2 * lane.c] = right_sums[j][0] * p.right_factor;
        results.right_mean[slot * HEAD_DIM + column + 8 * j + 2 * lane.c + 1] = right_sums[j][1] * p.right_factor;
      }
    } else if (lane.c == lane.g >> 1) {
      // Column g of the tile; its sum lies with the thread whose c is g / 2, its reference with the one whose g is g.
      results.right_mean[slot * HEAD_DIM + column + 8 * j + lane.g] =
          fmaf(lane.g & 1 ? right_sums[j][1] : right_sums[j][0], inverse_count, -low_half(right_reference[j]));
    }
}

template <bool BACKWARD> __device__ __forceinline__ void accumulate_part(const AccumulateParams& p) {
  const Division by_unit(blockIdx.x, p.units, p.units_inverse), by_split(by_unit.quotient, p.splits, p.splits_inverse);
  const int unit = by_unit.rest, split = by_split.rest, batch = by_split.quotient;
  const i64 first_head = (i64)batch * (p.channels / HEAD_DIM) + unit * HEADS_PER_UNIT;
  accumulate<BACKWARD>(p, unit, split, batch, {p.product, p.left_mean, p.right_mean, first_head * p.splits + split, p.splits});
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) inline_accumulate(const __grid_constant__ AccumulateParams p) { accumulate_part<false>(p); }
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) inline_accumulate_backward(const __grid_constant__ AccumulateParams p) { accumulate_part<true>(p); }

struct MergeParams {
  const float* product; const float* left_mean; const float* right_mean;
  float* merged_product; float* merged_left; float* merged_right;
  float product_factor, right_factor;
  int splits, tokens, tokens_per_split;
};
static_assert(sizeof(MergeParams) == MergeParams_BYTES, PACKED_OTHERWISE);

// blockIdx.x = head, blockIdx.y = some elements of its matrix; SHARES threads share the splits of an element.
template <bool CENTERED, int MERGE_SHARES> __device__ __forceinline__ void merge(const MergeParams& p) {
  constexpr int MERGE_ELEMENTS = MERGE_THREADS / MERGE_SHARES;
  __shared__ float shares[4][MERGE_SHARES][MERGE_ELEMENTS];
  const int share = threadIdx.x / MERGE_ELEMENTS, element = blockIdx.y * MERGE_ELEMENTS + threadIdx.x % MERGE_ELEMENTS;
  const int row = element / HEAD_DIM, column = element % HEAD_DIM;
  const i64 first_slot = (i64)blockIdx.x * p.splits;
  const float* product = p.product + first_slot * (HEAD_DIM * HEAD_DIM) + element;
  const float* left = p.left_mean + first_slot * HEAD_DIM + row;
  const float* right = p.right_mean + first_slot * HEAD_DIM + column;
  // Means count relative to the first split's: what is added up is then small, however large the mean.
  const float left_first = CENTERED ? left[0] : 0.0f, right_first = CENTERED ? right[0] : 0.0f;
  float sums[4] = {};  // of products, of left means, of right means, of the means' products
#pragma unroll 8
  for (int s = share; s < p.splits; s += MERGE_SHARES) {
    sums[0] += product[(i64)s * (HEAD_DIM * HEAD_DIM)];
    const float count = CENTERED ? min(p.tokens_per_split, p.tokens - s * p.tokens_per_split) : 1.0f;
    const float right_part = count * (right[s * HEAD_DIM] - right_first);
    sums[2] += right_part;
    if (CENTERED) {
      const float left_part = left[s * HEAD_DIM] - left_first;
      sums[1] = fmaf(count, left_part, sums[1]);
      sums[3] = fmaf(left_part, right_part, sums[3]);
    }
  }
  UNROLL for (int i = 0; i < 4; ++i) shares[i][share][threadIdx.x % MERGE_ELEMENTS] = sums[i];
  __syncthreads();
  if (share != 0) return;
  UNROLL for (int i = 0; i < 4; ++i)
    UNROLL for (int from = 1; from < MERGE_SHARES; ++from) sums[i] += shares[i][from][threadIdx.x];
  const float inverse_count = 1.0f / p.tokens;
  float total = sums[0];
  if (CENTERED) {
    total += fmaf(-sums[1] * inverse_count, sums[2], sums[3]);
    if (column == 0) p.merged_left[blockIdx.x * HEAD_DIM + row] = fmaf(sums[1], inverse_count, left_first);
  }
  if (row == 0) p.merged_right[blockIdx.x * HEAD_DIM + column] = CENTERED ? fmaf(sums[2], inverse_count, right_first) : sums[2] * p.right_factor;
  p.merged_product[(i64)blockIdx.x * (HEAD_DIM * HEAD_DIM) + element] = total * p.product_factor;
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) inline_merge(const __grid_constant__ MergeParams p) { merge<true, 1>(p); }
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) inline_merge_backward(const __grid_constant__ MergeParams p) { merge<false, 1>(p); }
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) inline_merge_many(const __grid_constant__ MergeParams p) { merge<true, MANY_SHARES>(p); }
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) inline_merge_many_backward(const __grid_constant__ MergeParams p) { merge<false, MANY_SHARES>(p); }

// Which tokens a block works on: a rectangle of the grid, two strips wide, and a run of tokens beside the grid.
struct Layout {
  int tokens, channels, units, batches;
  int prefix, height, width;           // the grid follows `prefix` tokens; height 0 without a local term
  int tile_height, tiles_across, tiles;
  int run;                             // tokens of a tile when there is no grid
  int roles;                           // kinds of blocks for the same tile
  u32 units_inverse, tiles_across_inverse, tiles_inverse, roles_inverse;
};

struct Place {
  int role, unit, tile, batch;
  int top, rows, left;                 // of the rectangle
  int run_start, run_end;              // tokens outside the grid

  // Later samples first: the pass before this one left the last ones in the cache.
  __device__ __forceinline__ Place(const Layout& l) {
    const Division by_role(blockIdx.x, l.roles, l.roles_inverse);
    const Division by_unit(by_role.quotient, l.units, l.units_inverse), by_tile(by_unit.quotient, l.tiles, l.tiles_inverse);
    role = by_role.rest;
    unit = by_unit.rest;
    tile = by_tile.rest;
    batch = l.batches - 1 - by_tile.quotient;
    if (l.height > 0) {
      const Division by_column(tile, l.tiles_across, l.tiles_across_inverse);
      top = by_column.quotient * l.tile_height;
      left = by_column.rest * (GROUPS * STRIP);
      rows = min(l.tile_height, l.height - top);
      run_start = 0;
      run_end = tile == 0 ? l.prefix : 0;
    } else {
      top = rows = left = 0;
      run_start = tile * l.run;
      run_end = min(run_start + l.run, l.tokens);
    }
  }
};

// A warp's way down a strip of eight columns, two rows a step. On the way come, several steps ahead, two more rows of
// the tensor whose neighborhoods are read (ten columns, zero outside the grid) and the step's own rows of another
// tensor. Both land in rings of four in the warp's own shared memory: nothing here waits for other warps.
template <bool NEIGHBORS, int SLABS> struct Strip {
  static constexpr int SLOTS = 4, AHEAD = 2;
  static constexpr int ROW = (STRIP + 2) * PITCH, PAIR = 2 * ROW, OWN = 16 * PITCH;
  static constexpr int BYTES = SLOTS * ((NEIGHBORS ? PAIR : 0) + SLABS * OWN);
  const Lane& lane;
  const u32 neighbor_ring, own_ring;
  const i64 neighbor_row, own_row;    // elements from row to row
  const int width, height;             // of the grid
  const u16* neighbor;                // this lane's chunk: of its column, of the next two rows to come
  const u16* neighbor_beyond;         // and of columns nine and ten
  const u16* own;                      // of its column, of the next rows to come
  int y;                               // the grid's row of the next own rows to come
  int to_send, left;                   // steps
  u32 slot;                            // of the current step
  bool column_inside, neighbor_inside, beyond_inside;

  __device__ __forceinline__ Strip(const Layout& l, const Place& place, const Lane& lane, int group, u32 memory,
                                   const u16* neighbor_slab, i64 neighbor_token, const u16* own_slab, i64 own_token)
      : lane(lane), neighbor_ring(memory), own_ring(memory + (NEIGHBORS ? SLOTS * PAIR : 0)),
        neighbor_row(l.width * neighbor_token), own_row(l.width * own_token), width(l.width), height(l.height) {
    const int x = place.left + group * STRIP;
    y = place.top;
    to_send = left = x < l.width ? (place.rows + 1) / 2 : 0;
    slot = SLOTS - 1;
    column_inside = x + lane.row < l.width;
    own = own_slab + (l.prefix + (i64)y * l.width + min(x + lane.row, l.width - 1)) * own_token + lane.c * CHUNK;
    if (NEIGHBORS) {
      const int beyond = x + STRIP - 1 + (lane.g & 1);
      neighbor_inside = (u32)(x - 1 + lane.row) < (u32)l.width;
      beyond_inside = lane.id < 16 && beyond < l.width;
      neighbor = neighbor_slab + (l.prefix + (i64)(y - 1) * l.width + x - 1 + lane.row) * neighbor_token + lane.c * CHUNK;
      neighbor_beyond = neighbor_slab + (l.prefix + (i64)(y - 1 + (lane.g >> 1 & 1)) * l.width + beyond) * neighbor_token + lane.c * CHUNK;
      if (left > 0) send_neighbors(y - 1, 0);
    }
    commit_copies();
    UNROLL for (int i = 0; i < AHEAD; ++i) send(i);
  }
  // Rows first_row and first_row + 1 of the grid, into a slot.
  __device__ __forceinline__ void send_neighbors(int first_row, u32 to) {
    const u32 target = neighbor_ring + to * PAIR + lane.row * PITCH + lane.c * 16;
    const bool first = (u32)first_row < (u32)height, second = (u32)(first_row + 1) < (u32)height;
    copy_async(target, neighbor, first && neighbor_inside);
    copy_async(target + ROW, neighbor + neighbor_row, second && neighbor_inside);
    if (lane.id < 16) {
      const bool inside = beyond_inside && (lane.id < 8 ? first : second);
      copy_async(neighbor_ring + to * PAIR + (lane.id >> 3) * ROW + (STRIP + (lane.g & 1)) * PITCH + lane.c * 16,
                 neighbor_beyond, inside);
    }
    neighbor += 2 * neighbor_row;
    neighbor_beyond += 2 * neighbor_row;
  }
  __device__ __forceinline__ void send(u32 to) {
    if (to_send > 0) {
      const u32 target = own_ring + to * (SLABS * OWN) + lane.row * PITCH + lane.c * 16;
      const u16* below = y + 1 < height ? own + own_row : own;
      UNROLL for (int h = 0; h < SLABS; ++h) {
        copy_async(target + h * OWN, own + SLAB * h, true);
        copy_async(target + h * OWN + 8 * PITCH, below + SLAB * h, true);
      }
      if (NEIGHBORS) send_neighbors(y + 1, (to + 1) % SLOTS);
      own += 2 * own_row;
      y += 2;
      --to_send;
    }
    commit_copies();
  }
  // Wait for the next step's rows and send for later ones. Its slot of `own` stays the warp's until the step after.
  __device__ __forceinline__ void advance() {
    slot = (slot + 1) % SLOTS;
    --left;
    wait_copies<AHEAD - 1>();
    __syncwarp();
    send((slot + AHEAD) % SLOTS);
  }
  __device__ __forceinline__ u32 own_slot() const { return own_ring + slot * (SLABS * OWN); }
  __device__ __forceinline__ u32 pair(u32 which) const { return neighbor_ring + (slot + which) % SLOTS * PAIR; }
  __device__ __forceinline__ void read_own(LeftOperand& rows) const {
    const u32 matrix = own_slot() + (lane.id & 15) * PITCH + (lane.id >> 4) * 16;
    UNROLL for (int s = 0; s < INNER; ++s) load_matrices(rows.fragments[s], matrix + (s >> 1) * OWN + (s & 1) * 32);
    __syncwarp();  // the slot may now serve to store from
  }
};

// Where a walk's results go: two rows a step.
struct Target {
  u16* chunk;
  i64 row;
  int y, last;  // the next row, and the last
  bool column_inside;
  __device__ __forceinline__ Target(const Layout& l, const Place& place, const Lane& lane, int group, u16* slab, i64 token)
      : row(l.width * token), y(place.top), last(place.top + place.rows - 1), column_inside(place.left + group * STRIP + lane.row < l.width) {
    chunk = slab + (l.prefix + (i64)y * l.width + place.left + group * STRIP + lane.row) * token + lane.c * CHUNK;
  }
  __device__ __forceinline__ void store(const Tile& tile, u32 staging, const Lane& lane) {
    tile.store(staging, chunk, chunk + row, column_inside, column_inside && y < last, lane);
    chunk += 2 * row;
    y += 2;
  }
};

// Tokens outside the grid, sixteen at a time; few of them in a model, all of them where there is no local term.
template <class Use> __device__ __forceinline__ void for_each_run_step(const Place& place, const Lane& lane, int group, const u16* head, i64 token_stride, const Use& use) {
  for (int start = place.run_start + group * 16; start < place.run_end; start += GROUPS * 16) {
    const int first = min(start + lane.g, place.run_end - 1), second = min(start + lane.g + 8, place.run_end - 1);
    LeftOperand rows;
    UNROLL for (int s = 0; s < INNER; ++s)
      UNROLL for (int i = 0; i < 4; ++i)
        rows.fragments[s][i] = *(const u32*)(head + (i & 1 ? second : first) * token_stride + 16 * s + 8 * (i >> 1) + 2 * lane.c);
    __syncwarp();  // what was stored from has been read
    use(rows, (i64)start + lane.row, (i64)start + lane.row + 8, start + lane.row < place.run_end, start + lane.row + 8 < place.run_end);
  }
}

// Write the products of a place's tokens with a matrix, plus the bias: first of the tokens of the grid, to which `add_local`
// adds the 3×3 term, then of those outside. `source` and `target` begin with the head and with the slab.
template <bool LOCAL, class Walk, class Stride, class AddLocal>
__device__ __forceinline__ void write_products(const Layout& l, const Place& place, const Lane& lane, int group, u32 own_memory, Walk& strip, const u16* source, i64 source_token,
                                               const RightOperand& operand, const float (&bias)[8], u16* target, const Stride& target_token, const AddLocal& add_local) {
  if (LOCAL) {
    Target rows_target(l, place, lane, group, target, target_token);
    while (strip.left > 0) {
      strip.advance();
      LeftOperand rows;
      strip.read_own(rows);
      Tile tile;
      tile.product(rows, operand, bias);
      add_local(tile);
      rows_target.store(tile, strip.own_slot(), lane);
    }
  }
  target += CHUNK * lane.c;
  for_each_run_step(place, lane, group, source, source_token, [&](const LeftOperand& rows, i64 first, i64 second, bool first_inside, bool second_inside) {
    Tile tile;
    tile.product(rows, operand, bias);
    tile.store(own_memory, target + first * target_token, target + second * target_token, first_inside, second_inside, lane);
  });
}

// Nine diagonal matrices over the 32 channels of a slab; FLIPPED turns the kernel around, for the transposed product.
template <bool FLIPPED> struct Diagonals {
  u32 fragments[9][4];  // tap, chunk

  __device__ __forceinline__ void load(const u16* weights, const Lane& lane) {
    const u32 place = lane.c == lane.g >> 1 ? (lane.g & 1 ? 0x10000u : 1u) : 0u;
    const u16* channel = weights + lane.g * 9;
    UNROLL for (int k = 0; k < 4; ++k)
      UNROLL for (int tap = 0; tap < 9; ++tap) fragments[tap][k] = channel[k * CHUNK * 9 + (FLIPPED ? 8 - tap : tap)] * place;
  }
  // Two taps to an instruction: one in the lower half of its inner dimension, one in the upper. The four rows in reach
  // of a step's two, fetched at once, are the operand for the taps above and below; the middle two serve the tap between.
  template <class Walk> __device__ __forceinline__ void add(Tile& tile, const Walk& walk) const {
    const int matrix = walk.lane.id >> 3;
    const u32 rows = walk.pair(matrix >> 1) + (matrix & 1) * Walk::ROW + (walk.lane.id & 7) * PITCH;
    UNROLL for (int dx = 0; dx < 3; ++dx)
      UNROLL for (int pair = 0; pair < 4; pair += 2) {
        u32 a[2][4];
        UNROLL for (int k = 0; k < 2; ++k) load_matrices(a[k], rows + dx * PITCH + (pair + k) * 16);
        UNROLL for (int k = 0; k < 2; ++k) mma16(tile.of[pair + k], a[k][0], a[k][1], a[k][2], a[k][3], fragments[dx][pair + k], fragments[6 + dx][pair + k]);
        UNROLL for (int k = 0; k < 2; ++k) mma8(tile.of[pair + k], a[k][1], a[k][2], fragments[3 + dx][pair + k]);
      }
  }
};

struct OutputParams {
  Layout layout;
  const u16* query; i64 query_batch, query_token;
  const u16* value; i64 value_batch, value_token;
  const u16* local_weight;       // [B, channels, 9]
  const float* covariance;       // [B, H, HEAD_DIM, HEAD_DIM]
  const float* value_mean;       // [B, channels]
  // [B, tokens, channels]. With heads of one slab it may be `query`: a query is read only by the warp that writes its
  // output, before that, as tiles are of even height (but for the last) and reads are clamped to a warp's own tokens.
  // Hence no __restrict__ here. Wider heads are read by two warps, each of which writes one part.
  u16* out;
};
static_assert(sizeof(OutputParams) == OutputParams_BYTES, PACKED_OTHERWISE);

static_assert(2 * GROUPS * 32 == BLOCK_THREADS, "matrices are shared by all threads of a block");
using OutputStrip = Strip<true, HALVES>;

// `value_mean` and `weights` of the unit; `prepare` sees to it that the covariances are in shared memory.
template <bool LOCAL, class Prepare>
__device__ __forceinline__ void output(const OutputParams& p, const Place& place, const float* value_mean, const u16* weights, const Matrices& covariances, const Prepare& prepare) {
  extern __shared__ __align__(128) unsigned char memory[];
  const Layout& l = p.layout;
  const Lane lane;
  const int warp = threadIdx.x >> 5, slab = warp & 1, group = warp >> 1;
  const int channel = place.unit * UNIT + slab * SLAB, head = channel / HEAD_DIM;
  if (channel >= l.channels) {
    prepare();
    return;
  }
  const u32 own_memory = shared_address(memory) + warp * OutputStrip::BYTES;
  const u16* queries = p.query + place.batch * p.query_batch + head * HEAD_DIM;
  u16* out = p.out + (i64)place.batch * l.tokens * l.channels + channel;
  OutputStrip strip(l, place, lane, group, own_memory, p.value + place.batch * p.value_batch + channel, p.value_token, queries, p.query_token);

  Diagonals<false> diagonals;
  if (LOCAL) diagonals.load(weights + slab * SLAB * 9, lane);
  float mean[8];
  load_bias(mean, value_mean + slab * SLAB, lane);
  prepare();
  RightOperand covariance;
  covariance.load<false>(covariances, HEADS_PER_UNIT > 1 ? slab : 0, channel % HEAD_DIM, lane);

  write_products<LOCAL>(l, place, lane, group, own_memory, strip, queries, p.query_token, covariance, mean, out, l.channels, [&](Tile& tile) { diagonals.add(tile, strip); });
}

template <bool LOCAL> __device__ __forceinline__ void output_tile(const OutputParams& p) {
  const Place place(p.layout);
  const int heads = p.layout.channels / HEAD_DIM, first_head = place.unit * HEADS_PER_UNIT;
  const i64 first = (i64)place.batch * heads + first_head;
  const Matrices covariances;
  FetchedMatrices fetched(p.covariance + first * (HEAD_DIM * HEAD_DIM), heads - first_head);
  output<LOCAL>(p, place, p.value_mean + first * HEAD_DIM, p.local_weight + first * (HEAD_DIM * 9), covariances, [&] { fetched.share(covariances); });
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) inline_output(const __grid_constant__ OutputParams p) { output_tile<false>(p); }
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, TILE_BLOCKS) inline_output_local(const __grid_constant__ OutputParams p) { output_tile<true>(p); }

// Samples small enough for one block per unit: the state never leaves the chip, and the values' second reading hits the
// cache. It is written out as well where a backward pass will want it.
struct SampleParams { AccumulateParams accumulate; OutputParams output; };
static_assert(sizeof(SampleParams) == SampleParams_BYTES, PACKED_OTHERWISE);

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, TILE_BLOCKS) inline_sample(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float key_mean[UNIT], value_mean[UNIT];
  __shared__ __align__(16) u16 weights[UNIT * 9];
  // Beside what the groups of warps exchange; strips come later.
  float* product = (float*)(memory + STAGES * STAGE_BYTES - UNIT * HEAD_DIM * 4);
  const Layout& l = p.output.layout;
  Place place(l);
  const int first_head = place.unit * HEADS_PER_UNIT, heads = l.channels / HEAD_DIM, channels = min(UNIT, l.channels - place.unit * UNIT);
  const i64 first = (i64)place.batch * heads + first_head;
  if (threadIdx.x < channels * 9 / CHUNK)
    copy_async(shared_address(weights) + threadIdx.x * 16, p.output.local_weight + first * (HEAD_DIM * 9) + threadIdx.x * CHUNK, true);
  commit_copies();
  accumulate<false>(p.accumulate, place.unit, 0, place.batch, {product, key_mean, value_mean, 0, 1});
  __syncthreads();
  const Matrices covariances;
  FetchedMatrices fetched(product, heads - first_head);
  if (p.accumulate.product != nullptr) {
    float4* target = (float4*)(p.accumulate.product + first * (HEAD_DIM * HEAD_DIM)) + threadIdx.x;
    UNROLL for (int i = 0; i < FetchedMatrices::VECTORS; ++i)
      if (FetchedMatrices::head_of(i) < heads - first_head) target[i * BLOCK_THREADS] = fetched.values[i];
    if (threadIdx.x < channels) {
      p.accumulate.left_mean[first * HEAD_DIM + threadIdx.x] = key_mean[threadIdx.x];
      p.accumulate.right_mean[first * HEAD_DIM + threadIdx.x] = value_mean[threadIdx.x];
    }
  }
  fetched.share(covariances);
  for (; place.left < l.width; place.left += GROUPS * STRIP) {
    output<true>(p.output, place, value_mean, weights, covariances, [] {});
    place.run_end = 0;
    __syncwarp();  // the next strip's rows come into memory this one was stored from
  }
}

struct GradientParams {
  Layout layout;
  const u16* grad_out; i64 grad_out_batch, grad_out_token;
  const u16* key; i64 key_batch, key_token;
  const u16* value; i64 value_batch, value_token;
  const u16* local_weight;
  const float* grad_covariance;  // [B, H, HEAD_DIM, HEAD_DIM], times scale / tokens
  const float* grad_mean;        // [B, channels]: the output gradients' sum, over tokens
  const float* key_mean;
  const float* value_mean;
  u16* grad_key; i64 grad_key_batch, grad_key_token;
  u16* grad_value; i64 grad_value_batch, grad_value_token;
  u16* grad_local;               // [B, channels, 9], if one tile covers a sample
  float* grad_local_parts;       // [B, tiles, channels, 9], if not
};
static_assert(sizeof(GradientParams) == GradientParams_BYTES, PACKED_OTHERWISE);

__device__ __forceinline__ void fetch_mean(float (&mean)[INNER][4], const float* head_mean, const Lane& lane) {
  UNROLL for (int s = 0; s < INNER; ++s)
    UNROLL for (int i = 0; i < 4; ++i) mean[s][i] = head_mean[16 * s + 8 * (i >> 1) + 2 * lane.c + (i & 1)];
}

// Take from `bias` what the operand makes of a mean, by the arithmetic that its rows go through: where all rows equal
// their mean, nothing is left.
__device__ __forceinline__ void subtract_mean(float (&bias)[8], float (&rest)[INNER][4], const RightOperand& operand, const Lane& lane) {
  // The mean is no half number but the sum of three, which take the first three rows of one tile.
  LeftOperand rows;
  UNROLL for (int s = 0; s < INNER; ++s)
    UNROLL for (int r = 0; r < 2; ++r) {
      u32 mine = 0;
      UNROLL for (int part = 0; part < 3; ++part) {
        const u32 pair = pack(rest[s][2 * r], rest[s][2 * r + 1]);
        rest[s][2 * r] -= low_half(pair);
        rest[s][2 * r + 1] -= high_half(pair);
        if (lane.g == part) mine = pair;
      }
      rows.fragments[s][2 * r] = mine;
      rows.fragments[s][2 * r + 1] = 0;
    }
  const float zeros[8] = {};
  Tile tile;
  tile.product(rows, operand, zeros);
  UNROLL for (int i = 0; i < 8; ++i)
    UNROLL for (int part = 0; part < 3; ++part) bias[i] -= __shfl_sync(~0u, tile.of[i >> 1][i & 1], 4 * part + lane.c);
}

enum Role { GRAD_KEY, GRAD_VALUE, GRAD_LOCAL };

using KeyStrip = Strip<false, HALVES>;
using ValueStrip = Strip<true, HALVES>;
using LocalStrip = Strip<true, 1>;

template <bool LOCAL> __device__ __forceinline__ void gradient(const GradientParams& p) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float exchange[GROUPS][UNIT * 9];
  const Layout& l = p.layout;
  const Place place(l);
  const Lane lane;
  const int warp = threadIdx.x >> 5, slab = warp & 1, group = warp >> 1;
  const int channel = place.unit * UNIT + slab * SLAB, head = channel / HEAD_DIM, column = channel % HEAD_DIM;
  const bool active = channel < l.channels;
  const i64 vector = (i64)place.batch * l.channels + head * HEAD_DIM;
  const u32 own_memory = shared_address(memory) + warp * ValueStrip::BYTES;
  const u16* values = p.value + place.batch * p.value_batch + head * HEAD_DIM;
  const u16* grads = p.grad_out + place.batch * p.grad_out_batch + channel;

  const int heads = l.channels / HEAD_DIM, first_head = place.unit * HEADS_PER_UNIT;
  const Matrices matrices;
  FetchedMatrices fetched(p.grad_covariance + ((i64)place.batch * heads + first_head) * (HEAD_DIM * HEAD_DIM), place.role == GRAD_LOCAL ? 0 : heads - first_head);
  if (place.role != GRAD_LOCAL && !active) {
    fetched.share(matrices);
  } else if (place.role == GRAD_KEY) {
    // (v - vbar) A^T
    KeyStrip strip(l, place, lane, group, own_memory, nullptr, 0, values, p.value_token);
    float bias[8] = {}, mean[INNER][4];
    fetch_mean(mean, p.value_mean + vector, lane);
    fetched.share(matrices);
    RightOperand operand;
    operand.load<true>(matrices, head - first_head, column, lane);
    subtract_mean(bias, mean, operand, lane);
    u16* grad_key = p.grad_key + place.batch * p.grad_key_batch + channel;
    write_products<LOCAL>(l, place, lane, group, own_memory, strip, values, p.value_token, operand, bias, grad_key, p.grad_key_token, [](Tile&) {});
  } else if (place.role == GRAD_VALUE) {
    // (k - kbar) A + mean gradient, and the 3×3 kernel turned around over the output gradients
    const u16* keys = p.key + place.batch * p.key_batch + head * HEAD_DIM;
    ValueStrip strip(l, place, lane, group, own_memory, grads, p.grad_out_token, keys, p.key_token);
    Diagonals<true> diagonals;
    if (LOCAL) diagonals.load(p.local_weight + ((i64)place.batch * l.channels + channel) * 9, lane);
    float bias[8], mean[INNER][4];
    load_bias(bias, p.grad_mean + vector + column, lane);
    fetch_mean(mean, p.key_mean + vector, lane);
    fetched.share(matrices);
    RightOperand operand;
    operand.load<false>(matrices, head - first_head, column, lane);
    subtract_mean(bias, mean, operand, lane);
    u16* grad_value = p.grad_value + place.batch * p.grad_value_batch + channel;
    write_products<LOCAL>(l, place, lane, group, own_memory, strip, keys, p.key_token, operand, bias, grad_value, p.grad_value_token, [&](Tile& tile) { diagonals.add(tile, strip); });
  } else if (LOCAL && place.role == GRAD_LOCAL) {
    float sums[9][8] = {};
    if (active) {
      LocalStrip strip(l, place, lane, group, own_memory, grads, p.grad_out_token, values + column, p.value_token);
      int y = place.top;
      const int last = place.top + place.rows - 1;
      while (strip.left > 0) {
        strip.advance();
        const u32 mine = strip.own_slot() + lane.row * PITCH + lane.c * 16;
        float pixels[2][8];
        unpack(pixels[0], load_shared(mine), strip.column_inside);
        unpack(pixels[1], load_shared(mine + 8 * PITCH), strip.column_inside && y < last);
        y += 2;
        UNROLL for (int i = 0; i < 4; ++i) {
          // Gradients of row i - 1, as seen from the first token: the output at p - t read this value with weight t.
          const u32 row = strip.pair(i >> 1) + (i & 1) * LocalStrip::ROW + lane.row * PITCH + lane.c * 16;
          UNROLL for (int dx = 0; dx < 3; ++dx) {
            float around[8];
            unpack(around, load_shared(row + (2 - dx) * PITCH), true);
            UNROLL for (int which = 0; which < 2; ++which) {
              const int dy = 2 - i + which;
              if (dy < 0 || dy > 2) continue;
              UNROLL for (int e = 0; e < 8; ++e) sums[3 * dy + dx][e] = fmaf(pixels[which][e], around[e], sums[3 * dy + dx][e]);
            }
          }
        }
      }
    }
    UNROLL for (int tap = 0; tap < 9; ++tap)
      UNROLL for (int i = 0; i < 8; ++i) {
        float sum = sums[tap][i];
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (lane.g == 0) exchange[group][(slab * SLAB + CHUNK * lane.c + i) * 9 + tap] = sum;
      }
    __syncthreads();
    const int weights = min(UNIT, l.channels - place.unit * UNIT) * 9;
    const i64 target = (((i64)place.batch * l.tiles + place.tile) * l.channels + place.unit * UNIT) * 9;
    for (int i = threadIdx.x; i < weights; i += BLOCK_THREADS) {
      const float sum = exchange[0][i] + exchange[1][i];
      if (l.tiles == 1) p.grad_local[target + i] = (u16)pack(sum, 0.0f);
      else p.grad_local_parts[target + i] = sum;
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, TILE_BLOCKS) inline_gradient(const __grid_constant__ GradientParams p) { gradient<false>(p); }
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, TILE_BLOCKS) inline_gradient_local(const __grid_constant__ GradientParams p) { gradient<true>(p); }

struct TileSumParams { const float* parts; u16* total; int tiles, per_sample; i64 size; };
static_assert(sizeof(TileSumParams) == TileSumParams_BYTES, PACKED_OTHERWISE);

// SHARES threads share the tiles of an element.
template <int SHARES> __device__ __forceinline__ void sum_tiles(const TileSumParams& p) {
  constexpr int ELEMENTS = MERGE_THREADS / SHARES;
  __shared__ float shares[SHARES][ELEMENTS];
  const int share = threadIdx.x / ELEMENTS, which = threadIdx.x % ELEMENTS;
  const i64 element = min((i64)blockIdx.x * ELEMENTS + which, p.size - 1);
  const float* part = p.parts + element / p.per_sample * p.tiles * p.per_sample + element % p.per_sample;
  float sum = 0.0f;
#pragma unroll 8
  for (int tile = share; tile < p.tiles; tile += SHARES) sum += part[(i64)tile * p.per_sample];
  shares[share][which] = sum;
  __syncthreads();
  if (share != 0) return;
  UNROLL for (int from = 1; from < SHARES; ++from) sum += shares[from][which];
  p.total[element] = (u16)pack(sum, 0.0f);
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) inline_sum_tiles(const __grid_constant__ TileSumParams p) { sum_tiles<1>(p); }
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) inline_sum_many_tiles(const __grid_constant__ TileSumParams p) { sum_tiles<MANY_TILES_SHARES>(p); }

// From a sample's tokens to its 3×3 weights: mean over the tokens, linear, GELU, linear, each head on its own. Where
// samples are few and large, their tokens are summed by a kernel before, in several blocks each.
struct TokenSumParams {
  const u16* tokens; i64 batch_stride, token_stride;
  float* sums;  // [B, splits, channels]
  int count, count_each, splits, channels, units, unused;
};
static_assert(sizeof(TokenSumParams) == TokenSumParams_BYTES, PACKED_OTHERWISE);

struct PredictParams {
  const u16* tokens; i64 batch_stride, token_stride;
  const float* sums;                                 // [B, splits, channels], or null: sum the tokens here
  const u16* hidden_weight; const u16* hidden_bias;  // [channels, HEAD_DIM], [channels]
  const u16* weight; const u16* bias;                // [9 channels, HEAD_DIM], [9 channels]
  u16* out;                                          // [B, channels, 9]
  int count, splits, channels, units;
};
static_assert(sizeof(PredictParams) == PredictParams_BYTES, PACKED_OTHERWISE);

__device__ __forceinline__ float dot(const u16* row, const float* vector, int chunks) {
  float sum = 0.0f;
  for (int i = 0; i < chunks; ++i) {
    float values[8];
    unpack(values, *(const uint4*)(row + CHUNK * i), true);
    UNROLL for (int e = 0; e < 8; ++e) sum = fmaf(values[e], vector[CHUNK * i + e], sum);
  }
  return sum;
}

// Sums of `count` tokens' first `channels` of UNIT channels, in the first UNIT threads.
__device__ __forceinline__ float sum_tokens(const u16* tokens, i64 token_stride, int count, int channels) {
  __shared__ float partial[PREDICT_THREADS / 32][UNIT];
  const int chunk = threadIdx.x & 7, warp = threadIdx.x >> 5;
  float sums[8] = {};
  if (chunk * CHUNK < channels) {
    const u16* column = tokens + chunk * CHUNK;
#pragma unroll 4
    for (int token = threadIdx.x >> 3; token < count; token += PREDICT_THREADS / 8) {
      float values[8];
      unpack(values, *(const uint4*)(column + token * token_stride), true);
      UNROLL for (int i = 0; i < 8; ++i) sums[i] += values[i];
    }
  }
  UNROLL for (int i = 0; i < 8; ++i) {
    sums[i] += __shfl_xor_sync(~0u, sums[i], 8);
    sums[i] += __shfl_xor_sync(~0u, sums[i], 16);
    if ((threadIdx.x & 31) < 8) partial[warp][chunk * CHUNK + i] = sums[i];
  }
  __syncthreads();
  float sum = 0.0f;
  if (threadIdx.x < UNIT) {
    UNROLL for (int from = 0; from < PREDICT_THREADS / 32; ++from) sum += partial[from][threadIdx.x];
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(PREDICT_THREADS) inline_sum_tokens(const __grid_constant__ TokenSumParams p) {
  const int split = blockIdx.x % p.splits, unit = blockIdx.x / p.splits % p.units, batch = blockIdx.x / (p.splits * p.units);
  const int first = unit * UNIT, channels = min(UNIT, p.channels - first), begin = split * p.count_each;
  const u16* tokens = p.tokens + batch * p.batch_stride + begin * p.token_stride + first;
  const float sum = sum_tokens(tokens, p.token_stride, min(p.count_each, p.count - begin), channels);
  if (threadIdx.x < channels) p.sums[((i64)batch * p.splits + split) * p.channels + first + threadIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(PREDICT_THREADS) inline_predict(const __grid_constant__ PredictParams p) {
  __shared__ float mean[UNIT], hidden[UNIT];
  const int unit = blockIdx.x % p.units, batch = blockIdx.x / p.units, first = unit * UNIT;
  const int channels = min(UNIT, p.channels - first);
  float sum = 0.0f;
  if (p.sums == nullptr) {
    sum = sum_tokens(p.tokens + batch * p.batch_stride + first, p.token_stride, p.count, channels);
  } else {
    constexpr int SHARES = PREDICT_THREADS / UNIT;
    __shared__ float shares[SHARES][UNIT];
    const int channel = threadIdx.x % UNIT, share = threadIdx.x / UNIT;
    if (channel < channels) {
      const float* part = p.sums + (i64)batch * p.splits * p.channels + first + channel;
#pragma unroll 4
      for (int split = share; split < p.splits; split += SHARES) sum += part[(i64)split * p.channels];
    }
    shares[share][channel] = sum;
    __syncthreads();
    if (threadIdx.x < UNIT) sum = (shares[0][channel] + shares[1][channel]) + (shares[2][channel] + shares[3][channel]);
  }
  if (threadIdx.x < UNIT) mean[threadIdx.x] = sum / p.count;
  __syncthreads();
  {
    // Four threads to an output.
    const int output = threadIdx.x >> 2, share = threadIdx.x & 3, head = output / HEAD_DIM * HEAD_DIM;
    float sum = 0.0f;
    if (output < channels) sum = dot(p.hidden_weight + (i64)(first + output) * HEAD_DIM + share * (HEAD_DIM / 4), mean + head + share * (HEAD_DIM / 4), HEAD_DIM / 4 / CHUNK);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (share == 0 && output < channels) {
      sum += low_half(p.hidden_bias[first + output]);
      hidden[output] = 0.5f * sum * (1.0f + erff(sum * 0.70710678f));
    }
  }
  __syncthreads();
  for (int output = threadIdx.x; output < channels * 9; output += PREDICT_THREADS) {
    const i64 row = (i64)first * 9 + output;
    const float sum = dot(p.weight + row * HEAD_DIM, hidden + output / 9 / HEAD_DIM * HEAD_DIM, HEAD_DIM / CHUNK) + low_half(p.bias[row]);
    p.out[(i64)batch * p.channels * 9 + row] = (u16)pack(sum, 0.0f);
  }
}
