// A GPU of our own: its context, memory, streams and kernels, through the driver library that is found at run time
// (driver.h serves streams of others). Addresses of device memory are for kernels and copies; the host never reads
// what they point to. Owners are move-only and give back what they own; errors name the GPU and carry CUDA's own words.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "cuda/driver_library.h"

namespace kt::inline cuda {

struct GpuFacts {
  int number = 0;
  std::string name;  // "NVIDIA H200"
  int major = 0, minor = 0;
  int multiprocessors = 0;
  uint64_t memory = 0;
  bool shows_screen = false;  // kernels that take seconds are killed

  std::string describe() const;  // "GPU 0 (NVIDIA H200)"
};

struct GpuKernel {
  CudaFunction function = nullptr;
};

// How many there are: 0 without a driver.
int gpu_count();
// What was said when a GPU first failed for good (a kernel that went wrong, a card that is gone): every later call in
// its context fails too, and nothing but a new process mends that.
std::optional<std::string> lost_gpu();

class Gpu {
 public:
  // Error(kUnsupported) where there is no driver, no such device, or one older than our kernels: what is needed and
  // what was found.
  explicit Gpu(int number);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const GpuFacts& facts() const { return facts_; }
  uint64_t free_memory() const;
  // What buffers of this object hold; the driver's context comes on top. Any thread.
  uint64_t held_memory() const { return held_.load(std::memory_order_relaxed); }
  // Of cuda/kernels, compiled by the driver at the first call. Any thread.
  GpuKernel kernel(std::string_view name) const;

 private:
  friend class GpuContext;
  friend class GpuStream;
  friend class DeviceBuffer;
  friend class GpuGraph;
  friend class GpuEvent;
  friend class LockedMemory;
  // Throws with what was asked; kMemory where memory is short.
  void check(CudaResult result, std::string_view asked) const;
  CudaModule module_of(std::string_view kernel) const;

  const CudaSymbols& cuda_;
  GpuFacts facts_;
  CudaContext context_ = nullptr;  // the primary one; kept to the end of the process
  mutable std::atomic<uint64_t> held_ = 0;
  mutable std::mutex mutex_;
  mutable std::map<std::string, CudaModule, std::less<>> modules_;  // loaded, by file
  mutable std::map<std::string, CudaFunction, std::less<>> found_;  // kernels, by name
};

// While it lives, the GPU's context is current in this thread.
class GpuContext {
 public:
  explicit GpuContext(const Gpu& gpu);
  ~GpuContext();
  GpuContext(const GpuContext&) = delete;
  GpuContext& operator=(const GpuContext&) = delete;

 private:
  const Gpu& gpu_;
  CudaContext before_ = nullptr;
};

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // Error(kMemory) with what was asked and what is free; `what` names it.
  DeviceBuffer(std::shared_ptr<const Gpu> gpu, size_t bytes, std::string_view what);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  uint8_t* at(size_t byte = 0) const { return data_ + byte; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return size_; }

 private:
  std::shared_ptr<const Gpu> gpu_;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// What a stream was asked between begin_graph() and end_graph(), to be asked again at once.
class GpuGraph {
 public:
  GpuGraph() = default;
  ~GpuGraph();
  GpuGraph(GpuGraph&& other) noexcept;
  GpuGraph& operator=(GpuGraph&& other) noexcept;

 private:
  friend class GpuStream;
  std::shared_ptr<const Gpu> gpu_;
  CudaGraphExec graph_ = nullptr;
};

// Page-locked memory for its streams; errors name the GPU.
PinnedBuffer pinned_for(const Gpu& gpu, size_t bytes);

// While it lives, memory of somebody else's is page-locked where it lies: streams of any GPU copy from it as from a
// PinnedBuffer. The memory outlives it; no stream still uses it at the end.
class LockedMemory {
 public:
  LockedMemory() = default;
  // Error with CUDA's words where the system does not allow it.
  LockedMemory(std::shared_ptr<const Gpu> gpu, const void* memory, size_t bytes);
  ~LockedMemory();
  LockedMemory(LockedMemory&& other) noexcept;
  LockedMemory& operator=(LockedMemory&& other) noexcept;

  explicit operator bool() const { return memory_ != nullptr; }

 private:
  std::shared_ptr<const Gpu> gpu_;
  void* memory_ = nullptr;
};

// A place in a stream that other streams of the GPU, and the host, can wait for.
class GpuEvent {
 public:
  GpuEvent() = default;
  explicit GpuEvent(std::shared_ptr<const Gpu> gpu);
  ~GpuEvent();
  GpuEvent(GpuEvent&& other) noexcept;
  GpuEvent& operator=(GpuEvent&& other) noexcept;

  bool passed() const;  // by the stream that recorded it last; true before that

 private:
  friend class GpuStream;
  std::shared_ptr<const Gpu> gpu_;
  CudaEvent event_ = nullptr;
};

class GpuStream {
 public:
  explicit GpuStream(std::shared_ptr<const Gpu> gpu);
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  // In this stream's order; blocks of `threads` threads, x * y of them.
  template <typename Args>
  void launch(std::string_view kernel, int64_t x, int64_t y, int threads, const Args& args) {
    launch_bytes(kernel, x, y, threads, &args);
  }
  // Between any two of device memory, page-locked and ordinary memory. Ordinary memory may change after it returns.
  void copy(void* to, const void* from, size_t bytes);
  void record(const GpuEvent& event);  // behind what it has now
  void hold(const GpuEvent& event);    // what follows is after the event
  void wait();                         // until all of it is done
  bool done();                         // whether all of it is, without waiting

  // Launches and copies between page-locked and device memory are noted down from here on and not done; waiting is an
  // error. Kernels must have been loaded: Gpu::kernel().
  void begin_graph();
  GpuGraph end_graph();
  void drop_graph() noexcept;  // where something was thrown between the two
  void launch(const GpuGraph& graph);

 private:
  void launch_bytes(std::string_view kernel, int64_t x, int64_t y, int threads, const void* args);

  std::shared_ptr<const Gpu> gpu_;
  CudaStream stream_ = nullptr;
};

}  // namespace kt::inline cuda
