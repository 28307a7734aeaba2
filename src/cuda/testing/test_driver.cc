// A CUDA driver on the CPU, for tests: streams, copies in stream order, host functions, capture and replay of
// graphs, events, with the driver's own rules about what is forbidden when. No kernels but KT's own
// (test_kernels.cc); contexts share a null stream. KT_TEST_CUDA_DEVICES=N in the environment: so many devices, each
// with memory of its own.
//
// Beyond the driver's entries it exports
//   kt_test_cuda_fail(name, result, skip): the call of that entry after `skip` ones returns the error
//   `result`; kt_test_cuda_mend(): forgets those, and the error of a failed operation;
//   kt_test_cuda_lose(calls): the call with a context after so many, and all behind it, find the device lost (also
//   KT_TEST_CUDA_LOST=CALLS in the environment, or CALLS@DEVICE: calls to that one, and it alone);
//   kt_test_cuda_calls(name): how often that entry was called;
//   kt_test_cuda_limit(count): a call that adds to a stream with so many operations ahead waits for room, as
//   the driver's do; kt_test_cuda_waiting(): how many calls do that now, or wait for an earlier launch;
//   KT_TEST_CUDA_VERSION=11080 in the environment makes it an older one;
// and every call of an entry named in the environment's KT_TEST_CUDA_FAIL=cuInit=100,... fails, or one of them
// (cuInit=100@0).
#include "cuda/testing/test_driver.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cuda/testing/test_memory.h"

#pragma GCC visibility push(default)

namespace kt::inline cuda::test_driver {
namespace {

const void* pointer(CudaAddress address) {
  return reinterpret_cast<const void*>(static_cast<uintptr_t>(address));
}

// A range of memory, of the kind that it had when the operation was asked for.
struct Range {
  explicit Range(CudaAddress address, size_t bytes)
      : address(pointer(address)), bytes(bytes), place(place_of(this->address)) {}
  std::byte* reached() const { return reach(place, address, bytes); }

  const void* address;
  size_t bytes;
  Place place;
};

void break_down() {
  const Lock lock(World::get().mutex);
  World::get().broken = kIllegalAddress;
}

void run_copy(const Range& to, const Range& from) {
  std::byte* const target = to.reached();
  const std::byte* const source = from.reached();
  if (!target || !source) return break_down();
  std::memmove(target, source, to.bytes);
}

CudaResult copy(World& world, Lock& lock, const std::shared_ptr<Stream>& stream, const Range& to,
                const Range& from) {
  if (!to.address || !from.address || !to.reached() || !from.reached()) return kInvalidValue;
  const bool ordinary = to.place == Place::kOrdinary || from.place == Place::kOrdinary;
  if (const CudaResult forbidden = ordinary ? forbid(*stream) : 0) return forbidden;
  const Point point = append(world, stream, {[to, from] { run_copy(to, from); }});
  // Ordinary memory may be gone or changed when the caller goes on.
  if (ordinary) world.changed.wait(lock, [&] { return point.passed(); });
  return 0;
}

void wait_for_all(World& world, Lock& lock) {
  std::vector<Point> points;
  if (world.null_stream) points.push_back({world.null_stream, world.null_stream->enqueued});
  for (const auto& [handle, stream] : world.streams) points.push_back({stream, stream->enqueued});
  world.changed.wait(lock, [&] {
    for (const Point& point : points)
      if (!point.passed()) return false;
    return true;
  });
}

template <typename Handle, typename Object>
Handle add(World& world, std::map<uintptr_t, std::shared_ptr<Object>>& objects,
           std::shared_ptr<Object> object) {
  objects[world.last_handle += 16] = std::move(object);
  return reinterpret_cast<Handle>(world.last_handle);
}

template <typename Object>
std::shared_ptr<Object> object_of(const std::map<uintptr_t, std::shared_ptr<Object>>& objects,
                                  const void* handle) {
  const auto at = objects.find(reinterpret_cast<uintptr_t>(handle));
  return at == objects.end() ? nullptr : at->second;
}

template <typename Object>
CudaResult remove(std::map<uintptr_t, std::shared_ptr<Object>>& objects, const void* handle) {
  return objects.erase(reinterpret_cast<uintptr_t>(handle)) > 0 ? 0 : kInvalidHandle;
}

// Not one of the null stream's.
std::shared_ptr<Stream> stream_of(World& world, CudaStream handle) {
  return reinterpret_cast<uintptr_t>(handle) == 2 ? thread_stream(world) : object_of(world.streams, handle);
}

}  // namespace
}  // namespace kt::inline cuda::test_driver

using namespace kt;
using namespace kt::test_driver;

// The rest are the driver's entries, by its names and with its parameters.
extern "C" {

CudaResult cuInit(unsigned flags) {
  return entry("cuInit", Needs::kNothing, [&](World&, Lock&) -> CudaResult {
    if (flags != 0) return kInvalidValue;
    started();
    return 0;
  });
}

CudaResult cuDriverGetVersion(int* version) {
  return entry("cuDriverGetVersion", Needs::kNothing, [&](World&, Lock&) {
    const char* const value = std::getenv("KT_TEST_CUDA_VERSION");
    return *version = value ? std::atoi(value) : 13010, 0;
  });
}

CudaResult cuDeviceGetCount(int* count) {
  return entry("cuDeviceGetCount", Needs::kStart, [&](World&, Lock&) { return *count = devices(), 0; });
}

CudaResult cuDeviceGet(CudaDevice* device, int number) {
  return entry("cuDeviceGet", Needs::kStart,
               [&](World&, Lock&) { return *device = number, number >= 0 && number < devices() ? 0 : 101; });
}

CudaResult cuGetErrorName(CudaResult result, const char** name) {
  *name = string_of(result, true);
  return *name ? 0 : kInvalidValue;
}

CudaResult cuGetErrorString(CudaResult result, const char** string) {
  *string = string_of(result, false);
  return *string ? 0 : kInvalidValue;
}

CudaResult cuCtxGetCurrent(CudaContext* context) {
  return entry("cuCtxGetCurrent", Needs::kStart,
               [&](World&, Lock&) { return *context = current_context, 0; });
}

CudaResult cuCtxSetCurrent(CudaContext context) {
  return entry("cuCtxSetCurrent", Needs::kStart, [&](World& world, Lock&) -> CudaResult {
    if (context && !is_primary(context) && !object_of(world.contexts, context)) return kInvalidContext;
    current_context = context;
    return 0;
  });
}

CudaResult cuDevicePrimaryCtxRetain(CudaContext* context, CudaDevice device) {
  return entry("cuDevicePrimaryCtxRetain", Needs::kStart, [&](World& world, Lock&) -> CudaResult {
    if (device < 0 || device >= devices()) return 101;
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    *context = primary_context(device);
    return 0;
  });
}

// Becomes current, as the driver's.
CudaResult cuCtxCreate_v2(CudaContext* context, unsigned, CudaDevice device) {
  return entry("cuCtxCreate_v2", Needs::kStart, [&](World& world, Lock&) -> CudaResult {
    if (device != 0) return 101;
    *context = current_context = add<CudaContext>(world, world.contexts, std::make_shared<char>());
    return 0;
  });
}

// Of streams that are destroyed.
CudaResult cuCtxDestroy_v2(CudaContext context) {
  return entry("cuCtxDestroy_v2", Needs::kStart, [&](World& world, Lock&) -> CudaResult {
    if (current_context == context) current_context = nullptr;
    return remove(world.contexts, context);
  });
}

CudaResult cuCtxSynchronize() {
  return entry("cuCtxSynchronize", Needs::kContext, [&](World& world, Lock& lock) {
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    return wait_for_all(world, lock), world.error_of(device_of(current_context));
  });
}

CudaResult cuMemAlloc_v2(CudaAddress* address, size_t bytes) {
  return entry("cuMemAlloc_v2", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    if (bytes == 0) return kInvalidValue;
    *address = reinterpret_cast<uintptr_t>(allocate(Place::kDevice, bytes, device_of(current_context)));
    return *address ? 0 : kCudaOutOfMemory;
  });
}

CudaResult cuMemFree_v2(CudaAddress address) {
  return entry("cuMemFree_v2", Needs::kContext, [&](World& world, Lock& lock) -> CudaResult {
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    wait_for_all(world, lock);
    return !address || release(Place::kDevice, pointer(address)) ? 0 : kInvalidValue;
  });
}

CudaResult cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  return entry("cuMemHostAlloc", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    if (bytes == 0 || flags > 7) return kInvalidValue;
    *memory = allocate(Place::kPinned, bytes);
    return *memory ? 0 : kCudaOutOfMemory;
  });
}

CudaResult cuMemFreeHost(void* memory) {
  return entry("cuMemFreeHost", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    return release(Place::kPinned, memory) ? 0 : kInvalidValue;
  });
}

CudaResult cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
  return entry("cuMemHostRegister_v2", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    if (bytes == 0 || flags > 7) return kInvalidValue;
    return lock_pages(memory, bytes) ? 0 : kAlreadyLocked;
  });
}

CudaResult cuMemHostUnregister(void* memory) {
  return entry("cuMemHostUnregister", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    return unlock_pages(memory) ? 0 : kNotLocked;
  });
}

CudaResult cuMemcpyAsync(CudaAddress to, CudaAddress from, size_t bytes, CudaStream handle) {
  return stream_entry("cuMemcpyAsync", handle, [&](World& world, Lock& lock, const auto& stream) {
    return bytes == 0 ? 0 : copy(world, lock, stream, Range(to, bytes), Range(from, bytes));
  });
}

CudaResult cuMemcpy(CudaAddress to, CudaAddress from, size_t bytes) {
  return stream_entry("cuMemcpy", nullptr, [&](World& world, Lock& lock, const auto& stream) -> CudaResult {
    if (bytes == 0) return 0;
    if (const CudaResult result = copy(world, lock, stream, Range(to, bytes), Range(from, bytes)))
      return result;
    const Point point{stream, stream->enqueued};
    world.changed.wait(lock, [&] { return point.passed(); });
    return world.error_of(device_of(current_context));
  });
}

CudaResult cuMemsetD8Async(CudaAddress to, unsigned char value, size_t bytes, CudaStream handle) {
  return stream_entry("cuMemsetD8Async", handle, [&](World& world, Lock&, const auto& stream) -> CudaResult {
    const Range range(to, bytes);
    if (range.place == Place::kOrdinary || !range.reached()) return kInvalidValue;
    append(world, stream, {[range, value] {
             std::byte* const target = range.reached();
             if (!target) return break_down();
             std::memset(target, value, range.bytes);
           }});
    return 0;
  });
}

CudaResult cuLaunchHostFunc(CudaStream handle, void (*function)(void*), void* argument) {
  return stream_entry("cuLaunchHostFunc", handle, [&](World& world, Lock&, const auto& stream) -> CudaResult {
    if (!function) return kInvalidValue;
    append(world, stream, {[function, argument] { run_host_function(function, argument); }});
    return 0;
  });
}

CudaResult cuStreamCreate(CudaStream* handle, unsigned flags) {
  return entry("cuStreamCreate", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    if (flags > 1) return kInvalidValue;
    *handle = add<CudaStream>(world, world.streams, start_stream(world, flags == 0));
    return 0;
  });
}

// What is in the stream is still done.
CudaResult cuStreamDestroy_v2(CudaStream handle) {
  return entry("cuStreamDestroy_v2", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    const auto stream = object_of(world.streams, handle);
    if (!stream) return kInvalidHandle;
    if (stream->capture) {
      stream->capture->invalid = true;
      if (stream->capture->origin == stream.get()) {
        world.captures.erase(stream->capture);
        for (const auto& [key, other] : world.streams)
          if (other != stream && other->capture == stream->capture) other->capture = nullptr;
      }
    }
    stream->next_after.clear();
    stream->closing = true;
    world.changed.notify_all();
    return remove(world.streams, handle);
  });
}

CudaResult cuStreamGetCtx(CudaStream handle, CudaContext* context) {
  return entry("cuStreamGetCtx", Needs::kStart, [&](World& world, Lock&) -> CudaResult {
    const auto stream = object_of(world.streams, handle);
    if (reinterpret_cast<uintptr_t>(handle) > 2 && !stream) return kInvalidHandle;
    *context = stream ? stream->context : current_context;
    return *context ? 0 : kInvalidContext;
  });
}

CudaResult cuStreamSynchronize(CudaStream handle) {
  return stream_entry("cuStreamSynchronize", handle, [&](World& world, Lock& lock, const auto& stream) {
    if (const CudaResult forbidden = forbid(*stream)) return forbidden;
    const Point point{stream, stream->enqueued};
    world.changed.wait(lock, [&] { return point.passed(); });
    close_device_memory();
    return world.error_of(device_of(current_context));
  });
}

CudaResult cuStreamQuery(CudaStream handle) {
  return stream_entry("cuStreamQuery", handle, [&](World&, Lock&, const auto& stream) -> CudaResult {
    if (const CudaResult forbidden = forbid(*stream)) return forbidden;
    return Point{stream, stream->enqueued}.passed() ? 0 : kNotReady;
  });
}

CudaResult cuStreamGetCaptureInfo_v2(CudaStream handle, CudaCaptureStatus* status, uint64_t* id, void** graph,
                                     const void** nodes, size_t* count) {
  return entry("cuStreamGetCaptureInfo_v2", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    std::shared_ptr<Stream> stream;
    if (reinterpret_cast<uintptr_t>(handle) <= 1) {
      for (const auto& capture : world.captures)
        if (capture->origin->blocking) return kCaptureImplicit;  // asking does no harm
    } else if (!(stream = stream_of(world, handle))) {
      return kInvalidHandle;
    }
    if (nodes || count) return 801;
    *status = CudaCaptureStatus::kNone;
    if (!stream || !stream->capture) return 0;
    *status = stream->capture->invalid ? CudaCaptureStatus::kInvalidated : CudaCaptureStatus::kActive;
    if (id) *id = stream->capture->id;
    if (graph) *graph = stream->capture.get();
    return 0;
  });
}

CudaResult cuUserObjectCreate(CudaUserObject* handle, void* argument, void (*end)(void*), unsigned references,
                              unsigned flags) {
  return entry("cuUserObjectCreate", Needs::kStart, [&](World& world, Lock&) -> CudaResult {
    if (!end || references != 1 || flags != kCudaUnsyncedEnd) return kInvalidValue;
    *handle = add<CudaUserObject>(world, world.user_objects, std::make_shared<UserObject>(end, argument));
    return 0;
  });
}

// Of a graph that is being captured only.
CudaResult cuGraphRetainUserObject(void* graph, CudaUserObject handle, unsigned references, unsigned flags) {
  return entry("cuGraphRetainUserObject", Needs::kStart, [&](World& world, Lock&) -> CudaResult {
    const auto capture =
        std::ranges::find(world.captures, graph, [](const auto& it) -> void* { return it.get(); });
    const auto object = object_of(world.user_objects, handle);
    if (capture == world.captures.end() || !object || references != 1 || flags != kCudaMoveReference)
      return kInvalidValue;
    (*capture)->nodes.emplace_back([object] {});
    return remove(world.user_objects, handle);
  });
}

CudaResult cuStreamIsCapturing(CudaStream handle, CudaCaptureStatus* status) {
  return cuStreamGetCaptureInfo_v2(handle, status, nullptr, nullptr, nullptr, nullptr);
}

CudaResult cuThreadExchangeStreamCaptureMode(int* mode) {
  return entry("cuThreadExchangeStreamCaptureMode", Needs::kStart, [&](World&, Lock&) -> CudaResult {
    if (*mode < kModeGlobal || *mode > kModeRelaxed) return kInvalidValue;
    std::swap(*mode, capture_mode);
    return 0;
  });
}

CudaResult cuStreamBeginCapture_v2(CudaStream handle, int mode) {
  return stream_entry("cuStreamBeginCapture_v2", handle, [&](World& world, Lock&, const auto& stream) {
    return begin_capture(world, stream, mode);
  });
}

CudaResult cuStreamEndCapture(CudaStream handle, void** graph) {
  return entry("cuStreamEndCapture", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    *graph = nullptr;
    const auto stream = stream_of(world, handle);
    if (!stream) return kInvalidHandle;
    std::shared_ptr<Graph> captured;
    if (const CudaResult result = end_capture(world, stream, captured)) return result;
    *graph = add<void*>(world, world.graphs, std::move(captured));
    return 0;
  });
}

CudaResult cuGraphInstantiateWithFlags(void** executable, void* handle, unsigned long long flags) {
  return entry("cuGraphInstantiateWithFlags", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    const auto graph = object_of(world.graphs, handle);
    if (!graph || flags != 0) return kInvalidValue;
    *executable =
        add<void*>(world, world.executables, std::make_shared<Executable>(Executable{graph->nodes}));
    return 0;
  });
}

// A driver that has no room for another launch of an executable keeps the caller waiting until those before are done.
// How many it takes is its own affair; this one takes one, so that nobody counts on more.
CudaResult cuGraphLaunch(void* handle, CudaStream where) {
  return stream_entry("cuGraphLaunch", where,
                      [&](World& world, Lock& lock, const auto& stream) -> CudaResult {
                        const auto executable = object_of(world.executables, handle);
                        if (!executable) return kInvalidHandle;
                        wait_for(world, lock, [&] { return stream->capture || executable->last.passed(); });
                        executable->last = append(world, stream, executable->nodes, {executable->last});
                        return 0;
                      });
}

CudaResult cuGraphDestroy(void* handle) {
  return entry("cuGraphDestroy", Needs::kStart,
               [&](World& world, Lock&) { return remove(world.graphs, handle); });
}

CudaResult cuGraphExecDestroy(void* handle) {
  return entry("cuGraphExecDestroy", Needs::kStart,
               [&](World& world, Lock&) { return remove(world.executables, handle); });
}

CudaResult cuEventCreate(void** handle, unsigned) {
  return entry("cuEventCreate", Needs::kContext, [&](World& world, Lock&) {
    return *handle =
               add<void*>(world, world.events, std::make_shared<Event>(Event{.context = current_context})),
           0;
  });
}

CudaResult cuEventDestroy_v2(void* handle) {
  return entry("cuEventDestroy_v2", Needs::kStart,
               [&](World& world, Lock&) { return remove(world.events, handle); });
}

CudaResult cuEventRecord(void* handle, CudaStream where) {
  return stream_entry("cuEventRecord", where, [&](World& world, Lock&, const auto& stream) {
    const auto event = object_of(world.events, handle);
    return event ? record_event(world, stream, *event) : kInvalidHandle;
  });
}

CudaResult cuStreamWaitEvent(CudaStream where, void* handle, unsigned) {
  return stream_entry("cuStreamWaitEvent", where, [&](World& world, Lock&, const auto& stream) {
    const auto event = object_of(world.events, handle);
    return event ? wait_event(stream, *event) : kInvalidHandle;
  });
}

CudaResult cuEventQuery(void* handle) {
  return entry("cuEventQuery", Needs::kContext, [&](World& world, Lock&) -> CudaResult {
    if (const CudaResult forbidden = unsafe_call(world)) return forbidden;
    const auto event = object_of(world.events, handle);
    if (!event) return kInvalidHandle;
    if (event->capture) return 907;
    return event->point.passed() ? 0 : kNotReady;
  });
}

CudaResult cuEventSynchronize(void* handle) {
  return entry("cuEventSynchronize", Needs::kContext, [&](World& world, Lock& lock) -> CudaResult {
    const auto event = object_of(world.events, handle);
    if (!event) return kInvalidHandle;
    if (event->capture) return 907;
    const Point point = event->point;
    world.changed.wait(lock, [&] { return point.passed(); });
    return world.error_of(device_of(current_context));
  });
}

}  // extern "C"
