// Kernels of the test driver: it cannot run a module's code. Those of cuda/kernels are compiled for it too and found by
// their names (block_runner.h); the two that are written in the driver's assembly it knows, and does in a stream's
// order what they are to do. Whether a module says the same shows on a GPU only. A kernel that fails ends where it is,
// and so do those that wait: the context is gone. KT_TEST_CUDA_SEED=N chooses the order of a block's threads.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "cuda/testing/block_runner.h"
#include "cuda/testing/test_driver.h"
#include "cuda/testing/test_memory.h"

#pragma GCC visibility push(default)

namespace kt::inline cuda::test_driver {
namespace {

constexpr int kNotFound = 500, kNoBinary = 218, kLaunchFailed = 719;

// As a context loaded it.
struct Module {
  std::string source;
  CudaContext context = nullptr;
  std::atomic<uint32_t> messages[16] = {};
};

struct Function {
  Module* module;
  bool posts;
  const gpu::KnownKernel* known = nullptr;  // of cuda/kernels
};

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
  bool copy() const {
    if (count == 0) return true;
    void* const target = reached(to, count * unit);
    const void* const source = reached(from, count * unit);
    if (!target || !source || (to | from) % unit != 0) return false;
    std::memcpy(target, source, count * unit);
    return true;
  }
};

bool is_broken() {
  const Lock lock(World::get().mutex);
  return World::get().broken != 0;
}

// Null where it was not to be waited for.
uint32_t* wait_for_zero(CudaAddress busy) {
  auto* const word = static_cast<uint32_t*>(reached(busy, sizeof(uint32_t)));
  for (unsigned looks = 0; word && std::atomic_ref(*word).load(std::memory_order_acquire) != 0; ++looks) {
    if (looks % 256 == 255 && is_broken()) return nullptr;
    std::this_thread::yield();
  }
  return word;
}

Work post_of(Module* module, void** all) {
  const Piece large(all, 1, 16), first(all, 4, 4), second(all, 7, 4);
  const auto busy = argument<CudaAddress>(all, 0), ring = argument<CudaAddress>(all, 10);
  const auto mask = argument<uint32_t>(all, 11), number = argument<uint32_t>(all, 12);
  const auto message = argument<uint64_t>(all, 13);
  return [=] {
    uint32_t* const flag = wait_for_zero(busy);
    if (!flag) return;
    std::atomic_ref(*flag).store(1, std::memory_order_relaxed);
    for (const Piece& piece : {large, first, second})
      if (!piece.copy()) return;
    const uint64_t at = module->messages[number].fetch_add(1, std::memory_order_relaxed) & mask;
    auto* const word = static_cast<uint64_t*>(reached(ring + 8 * at, 8));
    if (word) std::atomic_ref(*word).store(message, std::memory_order_release);
  };
}

Work fetch_of(void** all) {
  const auto busy = argument<CudaAddress>(all, 0);
  const Piece piece(all, 1, 16);
  return [=] {
    if (wait_for_zero(busy)) piece.copy();
  };
}

uint64_t seed_of_environment() {
  const char* const value = std::getenv("KT_TEST_CUDA_SEED");
  return value ? std::strtoull(value, nullptr, 10) : 1;
}

Work work_of(const gpu::KnownKernel& kernel, const gpu::Grid& grid, void** all) {
  std::vector<std::byte> arguments(kernel.argument_bytes);
  std::memcpy(arguments.data(), all[0], arguments.size());
  return [&kernel, grid, arguments] {
    if (is_broken()) return;
    const DeviceMemoryOpen open;
    const char* const wrong = gpu::run_grid(kernel, arguments.data(), grid, seed_of_environment());
    if (!wrong) return;
    std::fprintf(stderr, "%s: %s\n", kernel.name, wrong);
    const Lock lock(World::get().mutex);
    World::get().broken = kLaunchFailed;
  };
}

}  // namespace
}  // namespace kt::inline cuda::test_driver

namespace kt::inline cuda::gpu {

uint32_t await(const uint32_t* word, uint32_t value, uint32_t otherwise) {
  for (unsigned looks = 0;; ++looks) {
    const uint32_t seen = std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
    if (seen == value || seen == otherwise) return seen;
    if (looks % 256 == 255 && test_driver::is_broken()) return otherwise;
    std::this_thread::yield();
  }
}

}  // namespace kt::inline cuda::gpu

using namespace kt;
using namespace kt::test_driver;

extern "C" {

CudaResult cuCtxGetDevice(CudaDevice* device) {
  return entry("cuCtxGetDevice", Needs::kContext,
               [&](World&, Lock&) { return *device = device_of(current_context), 0; });
}

// KT_TEST_CUDA_SCREEN=1: a GPU that shows a screen; KT_TEST_CUDA_CAPABILITY=75: one of compute capability 7.5;
// KT_TEST_CUDA_MIG=1: a slice of one, with a name, one multiprocessor and memory (test_memory.h) of its own.
CudaResult cuDeviceGetAttribute(int* value, int attribute, CudaDevice) {
  return entry("cuDeviceGetAttribute", Needs::kStart, [&](World&, Lock&) {
    const char* const screen = std::getenv("KT_TEST_CUDA_SCREEN");
    const char* const capability = std::getenv("KT_TEST_CUDA_CAPABILITY");
    const int version = capability ? std::atoi(capability) : 80;
    *value = attribute == kCudaMajor   ? version / 10
             : attribute == kCudaMinor ? version % 10
             : attribute == kCudaMultiprocessors
                 ? (is_slice() ? 1 : 4)
                 : attribute == kCudaKernelTimeLimit && screen && *screen == '1';
    return 0;
  });
}

CudaResult cuDeviceGetName(char* name, int length, CudaDevice) {
  return entry("cuDeviceGetName", Needs::kStart, [&](World&, Lock&) {
    return std::snprintf(name, static_cast<size_t>(length),
                         is_slice() ? "test driver MIG 1g.1gb" : "test driver"),
           0;
  });
}

CudaResult cuDeviceTotalMem_v2(size_t* bytes, CudaDevice device) {
  return entry("cuDeviceTotalMem_v2", Needs::kStart,
               [&](World&, Lock&) { return *bytes = device_memory(device).total, 0; });
}

CudaResult cuMemGetInfo_v2(size_t* free, size_t* total) {
  return entry("cuMemGetInfo_v2", Needs::kContext, [&](World&, Lock&) {
    const MemoryLeft memory = device_memory(device_of(current_context));
    *free = memory.free;
    *total = memory.total;
    return 0;
  });
}

CudaResult cuModuleLoadData(CudaModule* module, const void* image) {
  return entry("cuModuleLoadData", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    const std::string source = static_cast<const char*>(image);
    if (source.find(".version") == std::string::npos) return kNoBinary;
    Module* const made = std::make_unique<Module>().release();  // to the end of the process
    made->source = source;
    made->context = current_context;
    *module = reinterpret_cast<CudaModule>(made);
    return 0;
  });
}

CudaResult cuModuleGetFunction(CudaFunction* function, CudaModule module, const char* name) {
  return entry("cuModuleGetFunction", Needs::kContext, [&](World&, Lock&) -> CudaResult {
    auto* const found = reinterpret_cast<Module*>(module);
    const std::string known = name;
    if (found->source.find(".entry " + known + "(") == std::string::npos) return kNotFound;
    const gpu::KnownKernel* const compiled = gpu::KnownKernel::find(known);
    if (!compiled && known != "kt_post" && known != "kt_fetch") return kNotFound;
    auto made = std::make_unique<Function>(Function{found, known == "kt_post", compiled});
    *function = reinterpret_cast<CudaFunction>(made.release());
    return 0;
  });
}

CudaResult cuLaunchKernel(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned, CudaStream handle,
                          void** parameters, void**) {
  return stream_entry("cuLaunchKernel", handle, [&](World& world, Lock&, const auto& stream) -> CudaResult {
    if (grid_x == 0 || grid_y == 0 || grid_y > 65535 || grid_z != 1 || block_y * block_z != 1 ||
        block_x == 0 || block_x > 1024)
      return kInvalidValue;
    const auto* const kernel = reinterpret_cast<const Function*>(function);
    if (!kernel || !parameters) return kInvalidHandle;
    if (device_of(kernel->module->context) != device_of(stream->context)) return kInvalidHandle;
    if (kernel->known) {
      if (static_cast<int>(block_x) > kernel->known->most_threads) return kInvalidValue;
      const gpu::Grid grid{static_cast<int>(grid_x), static_cast<int>(grid_y), static_cast<int>(block_x)};
      append(world, stream, {work_of(*kernel->known, grid, parameters)});
      return 0;
    }
    if (grid_x * grid_y != 1) return kInvalidValue;
    append(world, stream, {kernel->posts ? post_of(kernel->module, parameters) : fetch_of(parameters)});
    return 0;
  });
}

}  // extern "C"
