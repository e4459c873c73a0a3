// What kernels.cu needs of a GPU, on a CPU: the threads of one block at a time are fibers that take turns, and the
// instructions of a warp are exchanges between 32 of them. Slow, and strict where hardware is lenient: a copy that nobody
// waited for has not happened, lanes of a warp that call different instructions abort, shared memory starts as NaN.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;
struct __attribute__((aligned(8))) float2 { float x, y; };
struct __attribute__((aligned(16))) float4 { float x, y, z, w; };
struct __attribute__((aligned(16))) uint4 { uint32_t x, y, z, w; };
struct Index { int x, y, z; };
static Index threadIdx, blockIdx;

namespace emulated {

constexpr int MOST_THREADS = 1024, MOST_SHARED = 232448, STACK = 1 << 18;
__attribute__((aligned(128))) static unsigned char dynamic_memory[MOST_SHARED];

struct Copy { unsigned char* target; const void* source; bool inside; };
struct Barrier { int arrived = 0; long generation = 0; };
struct Warp { Barrier barrier; unsigned char buffers[2][32][64]; const char* instruction[2]; };
struct Thread {
  ucontext_t context;
  std::vector<unsigned char> stack = std::vector<unsigned char>(STACK);
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open_group;
  long exchanges;
  bool finished;
};

static ucontext_t scheduler;
static std::vector<std::unique_ptr<Thread>> threads;
static Warp warps[MOST_THREADS / 32];
static Barrier block_barrier;
static int thread_count, live_threads, current;
static std::function<void()> kernel;

static void fail(const char* reason) {
  std::fprintf(stderr, "emulated GPU: %s (block %d, thread %d)\n", reason, blockIdx.x, threadIdx.x);
  std::abort();
}

static void yield() {
  const int self = current;
  swapcontext(&threads[self]->context, &scheduler);
  threadIdx.x = current = self;
}

static void wait(Barrier& barrier, int expected) {
  const long generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    while (barrier.generation == generation) yield();
  }
}

static void run_thread() {
  kernel();
  threads[current]->finished = true;
  --live_threads;
  if (block_barrier.arrived > 0 && block_barrier.arrived == live_threads) {  // those that are gone count as arrived
    block_barrier.arrived = 0;
    ++block_barrier.generation;
  }
}

static void run_block() {
  live_threads = thread_count;
  for (int i = 0; i < thread_count; ++i) {
    Thread& thread = *threads[i];
    thread.groups.clear();
    thread.open_group.clear();
    thread.exchanges = 0;
    thread.finished = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, run_thread, 0);
  }
  long idle_rounds = 0;
  while (live_threads > 0) {
    const int before = live_threads;
    for (int i = 0; i < thread_count; ++i)
      if (!threads[i]->finished) {
        threadIdx.x = current = i;
        swapcontext(&scheduler, &threads[i]->context);
      }
    idle_rounds = live_threads == before ? idle_rounds + 1 : 0;
    if (idle_rounds > 50'000'000 / thread_count) fail("threads wait for each other without end");
  }
}

static void launch(std::function<void()> call, int grid_x, int grid_y, int block_threads, int shared_bytes) {
  if (shared_bytes > MOST_SHARED || block_threads > MOST_THREADS) fail("the launch asks for too much");
  kernel = std::move(call);
  thread_count = block_threads;
  while ((int)threads.size() < block_threads) threads.push_back(std::make_unique<Thread>());
  for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) {
      std::memset(dynamic_memory, 0xff, sizeof dynamic_memory);
      run_block();
    }
}

// Every lane of a warp gives a value and sees those of all lanes.
template <class Value> static const Value* exchange(const Value& value, const char* instruction) {
  static_assert(sizeof(Value) <= 64);
  Warp& warp = warps[current / 32];
  const int phase = threads[current]->exchanges++ & 1;
  if (warp.barrier.arrived == 0) warp.instruction[phase] = instruction;
  else if (std::strcmp(warp.instruction[phase], instruction) != 0) fail("lanes of a warp call different instructions");
  std::memcpy(warp.buffers[phase][current % 32], &value, sizeof value);
  wait(warp.barrier, 32);
  return (const Value*)warp.buffers[phase];
}
template <class Value> static Value of_lane(const Value* values, int lane) {
  Value value;
  std::memcpy(&value, (const unsigned char*)values + 64 * lane, sizeof value);
  return value;
}

// Shared memory has 32-bit addresses: offsets from this symbol, beside which all static memory lies.
static unsigned char* at(uint32_t address) { return dynamic_memory + (int32_t)address; }

}  // namespace emulated

static void __syncthreads() { emulated::wait(emulated::block_barrier, emulated::live_threads); }
static void __syncwarp() { emulated::exchange(0, "syncwarp"); }
template <class T> static T __shfl_xor_sync(unsigned, T value, int step) {
  return emulated::of_lane(emulated::exchange(value, "shfl"), (threadIdx.x & 31) ^ step);
}
template <class T> static T __shfl_sync(unsigned, T value, int lane) {
  return emulated::of_lane(emulated::exchange(value, "shfl"), lane);
}
static uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
static float __uint_as_float(uint32_t bits) { float r; std::memcpy(&r, &bits, 4); return r; }
static uint32_t __float_as_uint(float value) { uint32_t r; std::memcpy(&r, &value, 4); return r; }
static uint32_t __cvta_generic_to_shared(const void* pointer) {
  return (uint32_t)((const unsigned char*)pointer - emulated::dynamic_memory);
}

// ---------------------------------------------------------------------------------------------- instructions

static float half_value(uint16_t bits) {
#if IS_BF16
  return __uint_as_float((uint32_t)bits << 16);
#else
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return (float)value;
#endif
}
static uint16_t half_bits(double value) {
#if IS_BF16
  float nearest = (float)value;  // doubles come from sums of two halves only, which float32 rounds seldom
  if (std::isnan(nearest)) return 0x7fff;
  uint32_t bits = __float_as_uint(nearest);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#else
  _Float16 nearest = (_Float16)(float)value;
  uint16_t bits;
  std::memcpy(&bits, &nearest, 2);
  return bits;
#endif
}
static uint32_t pack(float low, float high) { return half_bits(low) | (uint32_t)half_bits(high) << 16; }
static float low_half(uint32_t pair) { return half_value((uint16_t)pair); }
static float high_half(uint32_t pair) { return half_value((uint16_t)(pair >> 16)); }
static float half_of(uint32_t pair, int which) { return which ? high_half(pair) : low_half(pair); }
static uint32_t plus(uint32_t pair, uint32_t other) {
  return half_bits((double)low_half(pair) + low_half(other)) | (uint32_t)half_bits((double)high_half(pair) + high_half(other)) << 16;
}

struct Operands { uint32_t a[4], b[2]; };
template <int INNER_SIZE> static void multiply(float (&d)[4], const Operands& mine, const char* instruction) {
  const Operands* all = emulated::exchange(mine, instruction);
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i >> 1), column = 2 * c + (i & 1);
    float sum = d[i];
    for (int k = 0; k < INNER_SIZE; ++k) {
      const Operands left = emulated::of_lane(all, row % 8 * 4 + k % 8 / 2), right = emulated::of_lane(all, column * 4 + k % 8 / 2);
      sum += half_of(left.a[row / 8 + 2 * (k / 8)], k & 1) * half_of(right.b[k / 8], k & 1);
    }
    d[i] = sum;
  }
}
static void mma16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply<16>(d, {{a0, a1, a2, a3}, {b0, b1}}, "mma16");
}
static void mma8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) { multiply<8>(d, {{a0, a1, 0, 0}, {b0, 0}}, "mma8"); }

static void load_four(uint32_t (&r)[4], uint32_t address, bool transposed) {
  if (address % 16 != 0) emulated::fail("ldmatrix from an address that is no multiple of sixteen");
  const uint32_t* rows = emulated::exchange(address, transposed ? "ldmatrix.trans" : "ldmatrix");
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  for (int m = 0; m < 4; ++m) {
    uint16_t halves[2];
    for (int i = 0; i < 2; ++i) {
      const int row = transposed ? 2 * c + i : g, column = transposed ? g : 2 * c + i;
      std::memcpy(&halves[i], emulated::at(emulated::of_lane(rows, 8 * m + row)) + 2 * column, 2);
    }
    r[m] = halves[0] | (uint32_t)halves[1] << 16;
  }
  __syncwarp();  // what was read may be overwritten now, not before
}
static void load_transposed(uint32_t (&r)[4], uint32_t address) { load_four(r, address, true); }
static void load_matrices(uint32_t (&r)[4], uint32_t address) { load_four(r, address, false); }

static void store_shared(uint32_t address, uint32_t value) { std::memcpy(emulated::at(address), &value, 4); }
static void store_shared(uint32_t address, uint32_t first, uint32_t second) {
  store_shared(address, first);
  store_shared(address + 4, second);
}
static uint4 load_shared(uint32_t address) {
  uint4 r;
  std::memcpy(&r, emulated::at(address), 16);
  return r;
}
static void store_global(uint16_t* address, const uint4& value) {
  if ((uintptr_t)address % 16 != 0) emulated::fail("a store of sixteen bytes to an address that is no multiple of sixteen");
  std::memcpy(address, &value, 16);
}

static void copy_async(uint32_t target, const uint16_t* source, bool inside) {
  if (target % 16 != 0 || (inside && (uintptr_t)source % 16 != 0)) emulated::fail("a copy between addresses that are no multiples of sixteen");
  emulated::threads[emulated::current]->open_group.push_back({emulated::at(target), source, inside});
}
static void commit_copies() {
  auto& thread = *emulated::threads[emulated::current];
  thread.groups.push_back(std::move(thread.open_group));
  thread.open_group.clear();
}
template <int PENDING> static void wait_copies() {
  auto& groups = emulated::threads[emulated::current]->groups;
  while ((int)groups.size() > PENDING) {
    for (const auto& copy : groups.front()) {
      if (copy.inside) std::memcpy(copy.target, copy.source, 16);
      else std::memset(copy.target, 0, 16);
    }
    groups.erase(groups.begin());
  }
}
