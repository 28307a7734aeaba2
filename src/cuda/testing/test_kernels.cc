// Kernels of the test driver: it cannot run a module's code, so it knows the two kernels of KT by their names
// and does in a stream's order what they are to do. Whether the code says the same shows on a GPU only.
#include <atomic>
#include <cstring>
#include <string>
#include <thread>

#include "cuda/testing/test_driver.h"
#include "cuda/testing/test_memory.h"

#pragma GCC visibility push(default)

namespace kt::test_driver {
namespace {

constexpr int kNotFound = 500, kNoBinary = 218;

enum class Kernel : uintptr_t { kNone, kPost, kFetch };

// An argument of a launch, by its place.
template <typename T>
T argument(void** all, int place) {
  T value;
  std::memcpy(&value, all[place], sizeof(T));
  return value;
}

void* memory_at(CudaAddress address, size_t bytes) {
  const auto* const pointer = reinterpret_cast<const void*>(static_cast<uintptr_t>(address));
  const Place place = place_of(pointer);
  return place == Place::kOrdinary ? nullptr : reach(place, pointer, bytes);
}

// An address that a GPU does not reach ends everything, as there.
void* reached(CudaAddress address, size_t bytes) {
  void* const found = memory_at(address, bytes);
  if (found) return found;
  const Lock lock(World::get().mutex);
  World::get().broken = kIllegalAddress;
  return nullptr;
}

struct Piece {
  CudaAddress to, from;
  uint32_t count;
  size_t unit;

  Piece(void** all, int place, size_t unit)
      : to(argument<CudaAddress>(all, place)),
        from(argument<CudaAddress>(all, place + 1)),
        count(argument<uint32_t>(all, place + 2)),
        unit(unit) {}
  void copy() const {
    if (count == 0) return;
    void* const target = reached(to, count * unit);
    const void* const source = reached(from, count * unit);
    if (target && source && (to | from) % unit == 0) std::memcpy(target, source, count * unit);
  }
};

std::atomic_ref<uint32_t> wait_for_zero(CudaAddress busy) {
  static uint32_t none = 0;
  auto* const word = static_cast<uint32_t*>(reached(busy, sizeof(uint32_t)));
  const std::atomic_ref flag(word ? *word : none);
  while (flag.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  return flag;
}

Work post_of(void** all) {
  const Piece large(all, 1, 16), first(all, 4, 4), second(all, 7, 4);
  const auto busy = argument<CudaAddress>(all, 0), ring = argument<CudaAddress>(all, 10);
  const auto mask = argument<uint32_t>(all, 11), number = argument<uint32_t>(all, 12);
  const auto letter = argument<uint64_t>(all, 13);
  return [=] {
    static std::atomic<uint32_t> letters[16];
    wait_for_zero(busy).store(1, std::memory_order_relaxed);
    for (const Piece& piece : {large, first, second}) piece.copy();
    const uint64_t at = letters[number].fetch_add(1, std::memory_order_relaxed) & mask;
    auto* const word = static_cast<uint64_t*>(reached(ring + 8 * at, 8));
    if (word) std::atomic_ref(*word).store(letter, std::memory_order_release);
  };
}

Work fetch_of(void** all) {
  const auto busy = argument<CudaAddress>(all, 0);
  const Piece piece(all, 1, 16);
  return [=] {
    wait_for_zero(busy);
    piece.copy();
  };
}

}  // namespace
}  // namespace kt::test_driver

using namespace kt;
using namespace kt::test_driver;

extern "C" {

CudaResult cuModuleLoadData(CudaModule* module, const void* image) {
  return entry("cuModuleLoadData", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    const std::string words = static_cast<const char*>(image);
    if (words.find(".version") == std::string::npos) return kNoBinary;
    static std::string& kept = *std::make_unique<std::string>().release();
    kept = words;
    *module = reinterpret_cast<CudaModule>(&kept);
    return 0;
  });
}

CudaResult cuModuleGetFunction(CudaFunction* function, CudaModule module, const char* name) {
  return entry("cuModuleGetFunction", Needs::kContext, [&](World&, Lock&) -> CudaResult {
    const auto& words = *reinterpret_cast<const std::string*>(module);
    const std::string known = name;
    if (words.find(".entry " + known + "(") == std::string::npos) return kNotFound;
    const Kernel kernel = known == "kt_post"    ? Kernel::kPost
                          : known == "kt_fetch" ? Kernel::kFetch
                                                : Kernel::kNone;
    *function = reinterpret_cast<CudaFunction>(kernel);
    return kernel == Kernel::kNone ? kNotFound : 0;
  });
}

CudaResult cuLaunchKernel(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned, CudaStream handle,
                          void** parameters, void**) {
  return stream_entry("cuLaunchKernel", handle, [&](World& world, Lock&, const auto& stream) -> CudaResult {
    if (grid_x * grid_y * grid_z != 1 || block_y * block_z != 1 || block_x == 0 || block_x > 1024)
      return kInvalidValue;
    const auto kernel = static_cast<Kernel>(reinterpret_cast<uintptr_t>(function));
    if (kernel == Kernel::kNone || !parameters) return kInvalidHandle;
    append(world, stream, {kernel == Kernel::kPost ? post_of(parameters) : fetch_of(parameters)});
    return 0;
  });
}

}  // extern "C"
