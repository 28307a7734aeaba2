#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cuda/testing/test_driver.h"

namespace kt::inline cuda::test_driver {
namespace {

struct Failure {
  CudaResult result;
  int skip;  // calls that go well before
};

// By the name of an entry; guarded by the world's lock.
std::map<std::string, Failure>& next_failures() {
  static auto& all = *std::make_unique<std::map<std::string, Failure>>().release();
  return all;
}

// Calls of each entry so far; guarded by the world's lock.
std::map<std::string, int>& counts() {
  static auto& all = *std::make_unique<std::map<std::string, int>>().release();
  return all;
}

// KT_TEST_CUDA_FAIL=cuInit=100,cuDeviceGetCount=1: for all calls; cuMemAlloc_v2=2@7: for the one after seven that went
// well.
CudaResult failure_of_environment(const char* name) {
  const char* const all = std::getenv("KT_TEST_CUDA_FAIL");
  const std::string list = std::string(",") + (all ? all : "");
  const size_t at = list.find("," + std::string(name) + "=");
  if (at == std::string::npos) return 0;
  const char* value = list.c_str() + at + std::strlen(name) + 2;
  const CudaResult result = std::atoi(value);
  value += std::strspn(value, "0123456789");
  return *value != '@' || counts()[name] - 1 == std::atoi(value + 1) ? result : 0;
}

// Calls that need a context until the device is lost; below 0: it never is. Guarded by the world's lock.
int& calls_left() {
  static int left = [] {
    const char* const value = std::getenv("KT_TEST_CUDA_LOST");
    return value ? std::atoi(value) : -1;
  }();
  return left;
}

// Which one that is, with KT_TEST_CUDA_LOST=CALLS@DEVICE; -1: all of them, by calls to any.
int device_to_lose() {
  const char* const value = std::getenv("KT_TEST_CUDA_LOST");
  const char* const at = value ? std::strchr(value, '@') : nullptr;
  return at ? std::atoi(at + 1) : -1;
}

constexpr int kMostDevices = 8;
char primary_contexts[kMostDevices];

bool is_started = false;
std::atomic<bool> is_forked = false;

struct ErrorStrings {
  CudaResult result;
  const char* name;
  const char* string;
};
constexpr ErrorStrings kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a capture from another thread"},
};

}  // namespace

thread_local CudaContext current_context = nullptr;

int devices() {
  static const int count = [] {
    const char* const value = std::getenv("KT_TEST_CUDA_DEVICES");
    return value ? std::clamp(std::atoi(value), 1, kMostDevices) : 1;
  }();
  return count;
}

CudaContext primary_context(int device) { return reinterpret_cast<CudaContext>(&primary_contexts[device]); }

bool is_primary(CudaContext context) {
  const auto* const at = reinterpret_cast<const char*>(context);
  return at >= primary_contexts && at < primary_contexts + devices();
}

int device_of(CudaContext context) {
  return is_primary(context) ? static_cast<int>(reinterpret_cast<const char*>(context) - primary_contexts)
                             : 0;
}

bool forked() { return is_forked.load(std::memory_order_relaxed); }

void started() {
  if (!is_started)
    ::pthread_atfork(nullptr, nullptr, [] { is_forked.store(true, std::memory_order_relaxed); });
  is_started = true;
}

CudaResult refuse(World& world, const char* name, Needs needs) {
  ++counts()[name];
  if (const CudaResult result = failure_of_environment(name)) return result;
  if (const auto at = next_failures().find(name); at != next_failures().end() && at->second.skip-- <= 0) {
    const CudaResult result = at->second.result;
    next_failures().erase(at);
    return result;
  }
  const int lost = device_to_lose();
  const bool counts_here = needs == Needs::kContext && (lost < 0 || lost == device_of(current_context));
  if (counts_here && calls_left() >= 0 && calls_left()-- == 0) {
    world.broken = 719;
    world.broken_device = lost;
    world.changed.notify_all();
  }
  if (needs != Needs::kNothing && !is_started) return kCudaNotInitialized;
  if (needs == Needs::kContext && !current_context) return kInvalidContext;
  return needs == Needs::kContext ? world.error_of(device_of(current_context)) : 0;
}

void wait_for_room(World& world, Lock& lock, const Stream& stream) {
  wait_for(world, lock, [&] { return stream.capture || stream.enqueued - stream.done < world.most_queued; });
}

const char* string_of(CudaResult result, bool name) {
  for (const ErrorStrings& error : kErrors)
    if (error.result == result) return name ? error.name : error.string;
  return nullptr;
}

}  // namespace kt::inline cuda::test_driver

using namespace kt::test_driver;

extern "C" [[gnu::visibility("default")]] void kt_test_cuda_fail(const char* name, int result, int skip) {
  const Lock lock(World::get().mutex);
  next_failures()[name] = {result, skip};
}

extern "C" [[gnu::visibility("default")]] void kt_test_cuda_mend() {
  const Lock lock(World::get().mutex);
  next_failures().clear();
  calls_left() = -1;
  World::get().broken = 0;
  World::get().broken_device = -1;
}

extern "C" [[gnu::visibility("default")]] void kt_test_cuda_lose(int calls) {
  const Lock lock(World::get().mutex);
  calls_left() = calls;
}

extern "C" [[gnu::visibility("default")]] void kt_test_cuda_limit(uint64_t count) {
  const Lock lock(World::get().mutex);
  World::get().most_queued = count;
  World::get().changed.notify_all();
}

extern "C" [[gnu::visibility("default")]] int kt_test_cuda_waiting() {
  const Lock lock(World::get().mutex);
  return World::get().waiting;
}

extern "C" [[gnu::visibility("default")]] int kt_test_cuda_calls(const char* name) {
  const Lock lock(World::get().mutex);
  return counts()[name];
}
