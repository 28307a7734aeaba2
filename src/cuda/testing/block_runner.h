// The words of gpu.h on the host: a block's threads are fibers of one thread of the operating system, run in an order
// that a seed chooses, each until it waits for the others. Shared memory holds no values at first. Kernels are found by
// name. Only for the test driver.
#pragma once
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#define KT_GPU inline
#define KT_KERNEL(name, Args, args, most)                                                          \
  static void name(const Args& args);                                                              \
  static const ::kt::gpu::KnownKernel name##_row(                                                  \
      #name, sizeof(Args), most, [](const void* from) { name(*static_cast<const Args*>(from)); }); \
  static void name(const Args& args)
#define KT_KERNEL_BESIDE(name, Args, args, most, blocks) KT_KERNEL(name, Args, args, most)
#define KT_UNROLL(count)
#define KT_SHARED(Type, name, count) \
  Type* const name = static_cast<Type*>(::kt::gpu::shared_memory(sizeof(Type) * (count)))

namespace kt::inline cuda::gpu {

struct KnownKernel {
  const char* name;
  size_t argument_bytes;
  int most_threads;
  void (*run)(const void* arguments);
  const KnownKernel* next;

  KnownKernel(const char* name, size_t argument_bytes, int most_threads, void (*run)(const void*));
  static const KnownKernel* find(std::string_view name);  // null: none of that name
};

struct Grid {
  int x = 1, y = 1, threads = 1;
};

// Every block of the grid, one after the other. What went wrong, or null: then the kernel ended where it was.
const char* run_grid(const KnownKernel& kernel, const void* arguments, const Grid& grid, uint64_t seed);

// What the fiber that runs now is.
struct Lane {
  int thread = 0, threads = 0, block = 0, block_y = 0, blocks = 0;
};
extern thread_local const Lane* lane;

void* shared_memory(size_t bytes);
void wait_for_block();
// The value that the lane of that number in the same warp gave.
uint32_t exchange(uint32_t value, int with);

inline int thread() { return lane->thread; }
inline int thread_again() { return lane->thread; }
inline int threads() { return lane->threads; }
inline int block() { return lane->block; }
inline int block_y() { return lane->block_y; }
inline int blocks() { return lane->blocks; }
inline void barrier() { wait_for_block(); }
inline void warp_barrier() { exchange(0, lane->thread % 32); }

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float shuffle_xor(float value, int mask) {
  return float_of(exchange(bits_of(value), (lane->thread % 32) ^ mask));
}
// 16 bytes, which a thread loads at once from a multiple of 16.
struct Words {
  uint32_t word[4];
};
inline Words load16(const void* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}
inline Words load16_fresh(const void* from) { return load16(from); }
inline void store16(void* to, const Words& from) { std::memcpy(to, &from, sizeof from); }
struct Words2 {
  uint32_t word[2];
};
inline Words2 load8(const void* from) {
  Words2 words;
  std::memcpy(&words, from, sizeof words);
  return words;
}
inline void store8(void* to, const Words2& from) { std::memcpy(to, &from, sizeof from); }
// Copies arrive when they are waited for and not before.
void copy16(void* shared, const void* from);
void end_copies();
void arrive_copies(int newest);
template <int kNewest>
void await_copies() {
  arrive_copies(kNewest);
}
inline uint32_t bf16_pair(float low, float high) {
  const auto nearest = [](float x) {
    const uint32_t bits = bits_of(x);
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  };
  return nearest(low) | nearest(high) << 16;
}
void multiply_from(float (&sums)[4], const float (&from)[4], const Words& a, const Words2& b);
inline void multiply_add(float (&sums)[4], const Words& a, const Words2& b) {
  multiply_from(sums, sums, a, b);
}
inline uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [](uint32_t low, uint32_t x, uint32_t y) {
    return static_cast<float>(static_cast<double>(float_of(low << 16)) *
                                  static_cast<double>(float_of(x << 16)) +
                              static_cast<double>(float_of(y << 16)));
  };
  return bf16_pair(half(a, b, c), half(a >> 16, b >> 16, c >> 16));
}
inline void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline uint32_t add_to(uint32_t* word, uint32_t more) { return std::atomic_ref(*word).fetch_add(more); }
inline void publish(uint32_t* word, uint32_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}
inline uint64_t nanoseconds() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
inline float load_fresh(const float* from) { return *from; }
// Ends too where the context is gone.
uint32_t await(const uint32_t* word, uint32_t value, uint32_t otherwise);
// Subnormal halves through the float subnormals' place: exact for all of them.
inline float from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7FFF;
  if (rest >= 0x7C00) return float_of(sign | 0x7F800000u | (rest & 0x3FF) << 13);
  const float scaled = float_of(rest << 13) * 0x1p112f;
  return float_of(sign | bits_of(scaled));
}
inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= (bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return out;
}
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float exp(float x) { return std::exp(x); }
inline float exp2(float x) { return std::exp2(x); }
inline float tanh(float x) { return std::tanh(x); }
inline float erf(float x) { return std::erf(x); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float round(float x) { return std::nearbyint(x); }

}  // namespace kt::inline cuda::gpu
