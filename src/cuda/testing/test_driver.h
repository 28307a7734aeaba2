// What every entry of the test driver begins with.
#pragma once
#include "cuda/testing/test_stream.h"

namespace kt::inline cuda::test_driver {

using Lock = std::unique_lock<std::mutex>;

extern thread_local CudaContext current_context;
// KT_TEST_CUDA_DEVICES=N in the environment: so many; without it one.
int devices();
CudaContext primary_context(int device);
int device_of(CudaContext context);  // that of a primary one; of others 0
bool is_primary(CudaContext context);

enum class Needs { kNothing, kStart, kContext };

// The error that the call named so returns at once, or 0: injected ones, calls after a fork or from a host
// function, before cuInit, without a context, after an operation failed.
CudaResult refuse(World& world, const char* name, Needs needs);
bool forked();                                        // before anything is locked
void started();                                       // cuInit was called
const char* string_of(CudaResult result, bool name);  // null for an unknown one

// body(world, lock) under the lock unless the call is refused.
template <typename Body>
CudaResult entry(const char* name, Needs needs, const Body& body) {
  if (forked()) return kCudaNotInitialized;
  if (in_host_function) return kNotPermitted;
  World& world = World::get();
  Lock lock(world.mutex);
  const CudaResult refused = refuse(world, name, needs);
  return refused ? refused : body(world, lock);
}

// The calling thread waits in the driver, and is counted among those that do.
template <typename Done>
void wait_for(World& world, Lock& lock, const Done& done) {
  ++world.waiting;
  world.changed.wait(lock, done);
  --world.waiting;
}

void wait_for_room(World& world, Lock& lock, const Stream& stream);

// The same for a call on a stream: body(world, lock, stream).
template <typename Body>
CudaResult stream_entry(const char* name, CudaStream handle, const Body& body) {
  return entry(name, Needs::kContext, [&](World& world, Lock& lock) {
    std::shared_ptr<Stream> stream;
    if (const CudaResult refused = find_stream(world, handle, stream)) return refused;
    wait_for_room(world, lock, *stream);
    return body(world, lock, stream);
  });
}

}  // namespace kt::inline cuda::test_driver
