// The words that our GPU kernels are written in: threads, blocks, barriers, shuffles, memory that a block shares, words
// that the host sees. nvcc compiles them for a GPU; g++ compiles the same kernels for the test driver, where a block's
// threads are fibers that run in any order between barriers (testing/block_runner.h), so that CI runs whole models
// and a missing barrier shows.
//
// A kernel is   KT_KERNEL(name, Args, args, most) { ... }   with one struct of plain members as its argument and
// blocks of at most `most` threads; KT_KERNEL_BESIDE(..., most, blocks) takes so few registers that as many blocks run
// side by side on a multiprocessor. Blocks are rows of threads, grids have two dimensions. A warp is 32 neighbouring
// threads; all of them take part in a shuffle. Multiply-adds are fused where `fma` says so and nowhere else.
#pragma once
#include <cstdint>

#ifdef __CUDACC__

#include <cuda_runtime.h>

#define KT_GPU __device__ __forceinline__
#define KT_KERNEL(name, Args, args, most) KT_KERNEL_BESIDE(name, Args, args, most, 1)
#define KT_KERNEL_BESIDE(name, Args, args, most, blocks) \
  extern "C" __global__ void __launch_bounds__(most, blocks) name(const __grid_constant__ Args args)
// Memory of the block, without a value; declared at the beginning of the kernel.
#define KT_SHARED(Type, name, count) __shared__ Type name[count]
// Before a loop: whole rounds of it are unrolled by so many, and 1 is as it stands.
// clang-format off
#define KT_UNROLL(count) _Pragma(KT_TEXT(unroll (count)))
// clang-format on
#define KT_TEXT(words) #words

namespace kt::inline cuda::gpu {

// 16 bytes, which a thread loads at once from a multiple of 16.
struct alignas(16) Words {
  uint32_t word[4];
};

struct alignas(8) Words2 {
  uint32_t word[2];
};

KT_GPU int thread() { return static_cast<int>(threadIdx.x); }
// The same, read anew: what follows from it takes no register from one round of a loop to the next.
KT_GPU int thread_again() {
  int out;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(out));
  return out;
}
KT_GPU int threads() { return static_cast<int>(blockDim.x); }
KT_GPU int block() { return static_cast<int>(blockIdx.x); }
KT_GPU int block_y() { return static_cast<int>(blockIdx.y); }
KT_GPU int blocks() { return static_cast<int>(gridDim.x); }

KT_GPU void barrier() { __syncthreads(); }
KT_GPU void warp_barrier() { __syncwarp(); }  // what lanes of the warp wrote before, copies that arrived too
KT_GPU float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }

KT_GPU float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KT_GPU float exp(float x) { return ::expf(x); }
KT_GPU float exp2(float x) { return ::exp2f(x); }
KT_GPU float tanh(float x) { return ::tanhf(x); }
KT_GPU float erf(float x) { return ::erff(x); }
KT_GPU float sqrt(float x) { return __fsqrt_rn(x); }
KT_GPU float round(float x) { return ::rintf(x); }
KT_GPU float float_of(uint32_t bits) { return __uint_as_float(bits); }
KT_GPU uint32_t bits_of(float x) { return __float_as_uint(x); }

// Words that other blocks or the host see. What a thread wrote before `publish` is there for whoever saw the word; of a
// whole block, after a barrier and a fence of the thread that publishes.
KT_GPU void fence() { __threadfence_system(); }
KT_GPU uint32_t add_to(uint32_t* word, uint32_t more) { return atomicAdd(word, more); }  // what it was
KT_GPU void publish(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// Until the word is `value` or `otherwise`; which.
KT_GPU uint32_t await(const uint32_t* word, uint32_t value, uint32_t otherwise) {
  for (;;) {
    uint32_t seen;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
    if (seen == value || seen == otherwise) return seen;
    __nanosleep(100);
  }
}

// A clock that all blocks share.
KT_GPU uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// What the host may have written after this kernel began: past the caches.
KT_GPU float load_fresh(const float* from) { return __ldcv(from); }
// The four bytes of {low, high} that the low four digits of `selector` name, 0 to 7.
KT_GPU uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

KT_GPU float from_f16(uint16_t bits) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}

KT_GPU Words load16(const void* from) {
  const uint4 words = *static_cast<const uint4*>(from);
  return {{words.x, words.y, words.z, words.w}};
}

KT_GPU Words load16_fresh(const void* from) {
  const float4 x = __ldcv(static_cast<const float4*>(from));
  return {{__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)}};
}
KT_GPU void store16(void* to, const Words& from) {
  *static_cast<uint4*>(to) = make_uint4(from.word[0], from.word[1], from.word[2], from.word[3]);
}
KT_GPU Words2 load8(const void* from) {
  const uint2 words = *static_cast<const uint2*>(from);
  return {{words.x, words.y}};
}
KT_GPU void store8(void* to, const Words2& from) {
  *static_cast<uint2*>(to) = make_uint2(from.word[0], from.word[1]);
}

// 16 bytes of device memory to the block's own, both at multiples of 16, on their way while the thread goes on. Copies
// that a thread began since its last `end_copies` are a group; `await_copies<n>` waits until at most its n newest
// groups are under way.
KT_GPU void copy16(void* shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(from)
               : "memory");
}
KT_GPU void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kNewest>
KT_GPU void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

// Two numbers as bf16, to nearest, `low` in the lower half.
KT_GPU uint32_t bf16_pair(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
// sums [16, 8] += a [16, 16] b [8, 16]^T of bf16, by a whole warp. Of lane 4 i + j, a.word: columns 2 j and 2 j + 1 of
// row i, of row i + 8, then columns 8 further of both; b.word: columns 2 j and 2 j + 1 of row i, then 8 further; sums:
// rows i, i, i + 8, i + 8 and columns 2 j, 2 j + 1, 2 j, 2 j + 1.
KT_GPU void multiply_add(float (&sums)[4], const Words& a, const Words2& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]), "r"(b.word[1]));
}
// The same, sums = from + a b^T.
KT_GPU void multiply_from(float (&sums)[4], const float (&from)[4], const Words& a, const Words2& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]), "r"(b.word[1]),
        "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
}
// a * b + c of two bf16 each, rounded once, subnormal numbers as well.
KT_GPU uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

}  // namespace kt::inline cuda::gpu

#else

#include "cuda/testing/block_runner.h"

#endif

namespace kt::inline cuda::gpu {

constexpr int kWarp = 32;

// The same on all lanes of a warp, in one order.
KT_GPU float warp_sum(float x) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
KT_GPU float warp_max(float x) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float other = shuffle_xor(x, mask);
    x = other > x ? other : x;
  }
  return x;
}

// The same on all threads of a block of whole warps; `partial` has a place for each of them. Between two calls with
// the same memory stands a barrier.
KT_GPU float block_sum(float x, float* partial) {
  x = warp_sum(x);
  if (thread() % kWarp == 0) partial[thread() / kWarp] = x;
  barrier();
  float sum = 0;
  for (int i = 0; i < threads() / kWarp; ++i) sum += partial[i];
  return sum;
}
KT_GPU float block_max(float x, float* partial) {
  x = warp_max(x);
  if (thread() % kWarp == 0) partial[thread() / kWarp] = x;
  barrier();
  float most = partial[0];
  for (int i = 1; i < threads() / kWarp; ++i) most = partial[i] > most ? partial[i] : most;
  return most;
}

// a - b of pairs of bf16, to nearest.
KT_GPU uint32_t subtract_pairs(uint32_t a, uint32_t b) { return fma_bf16(b, 0xBF80BF80u, a); }
KT_GPU float from_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
// To nearest, ties to even; NaN stays one.
KT_GPU uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
}  // namespace kt::inline cuda::gpu
