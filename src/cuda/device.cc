#include "cuda/device.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "cuda/driver.h"
#include "cuda/kernel_modules.h"

namespace kt::inline cuda {
namespace {

constexpr int kLeastMajor = 8;        // mma of bf16, asynchronous copies
constexpr int kLeastDriver = 12'000;  // what the header of our modules asks for
constexpr int kLeastDriverNumber = 525;

CudaAddress number_of(const void* memory) {
  return static_cast<CudaAddress>(reinterpret_cast<uintptr_t>(memory));
}

const CudaSymbols& symbols() {
  const CudaSymbols* const found = cuda_symbols();
  if (!found) fail_as(ErrorKind::kUnsupported, "no GPU: {}", cuda_driver_status());
  return *found;
}

// The text of a module: the program's own, or a file of that name in the folder that KT_CUDA_PTX names.
std::string module_text(const EmbeddedFile& file) {
  const char* const folder = std::getenv("KT_CUDA_PTX");
  if (!folder || !*folder) return std::string(file.bytes);
  const std::string path = std::string(folder) + "/" + std::string(file.name);
  std::ifstream in(path, std::ios::binary);
  if (!in) fail("{}: cannot be read (KT_CUDA_PTX is {})", path, folder);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

bool has_kernel(std::string_view module, std::string_view kernel) {
  return module.find(text(".entry {}(", kernel)) != std::string_view::npos;
}

// Errors that a context does not recover from: hardware and kernels that failed.
bool for_good(CudaResult result) {
  // Of the first hundred two say what is page-locked already, and what is not.
  return (result >= 700 && result < 800 && result != 712 && result != 713) || result == 214 ||
         result == 220 || result == 221 || result == 226 || result == 999;
}

struct LostGpu {
  std::mutex mutex;
  std::optional<std::string> message;
  static LostGpu& first() {
    static LostGpu lost;
    return lost;
  }
};

// Of what cannot be given back; where the GPU is lost everybody knows, and a forked child has nothing of it.
void warn(const std::exception& error) {
  if (!lost_gpu() && !cuda_forked()) log_line(LogLevel::kWarning, error.what());
}

}  // namespace

std::optional<std::string> lost_gpu() {
  LostGpu& lost = LostGpu::first();
  const std::lock_guard lock(lost.mutex);
  return lost.message;
}

std::string GpuFacts::describe() const { return text("GPU {} ({})", number, name); }

int gpu_count() {
  int count = 0;
  const CudaSymbols* const found = cuda_symbols();
  return found && found->device_count(&count) == 0 ? count : 0;
}

Gpu::Gpu(int number) : cuda_(symbols()) {
  facts_.number = number;
  int count = 0, version = 0, screen = 0;
  check(cuda_.device_count(&count), "count devices");
  if (number < 0 || number >= count)
    fail_as(ErrorKind::kUnsupported, "GPU {}: there {} {}, numbered from 0", number,
            count == 1 ? "is" : "are", count);
  check(cuda_.driver_version(&version), "tell its version");
  if (version < kLeastDriver)
    fail_as(ErrorKind::kUnsupported,
            "GPU {}: the driver speaks CUDA {}.{}, needed is 12.0 (driver {} or newer)", number,
            version / 1000, version % 1000 / 10, kLeastDriverNumber);
  char name[256] = {};
  check(cuda_.device_name(name, sizeof name - 1, number), "name a device");
  facts_.name = name;
  const auto attribute = [&](int which, int& value) {
    check(cuda_.device_attribute(&value, which, number), "describe a device");
  };
  attribute(kCudaMajor, facts_.major);
  attribute(kCudaMinor, facts_.minor);
  attribute(kCudaMultiprocessors, facts_.multiprocessors);
  attribute(kCudaKernelTimeLimit, screen);
  facts_.shows_screen = screen != 0;
  size_t memory = 0;
  check(cuda_.device_memory(&memory, number), "tell a device's memory");
  facts_.memory = memory;
  if (facts_.major < kLeastMajor)
    fail_as(ErrorKind::kUnsupported, "{}: compute capability {}.{}, needed is {}.0 or newer (Ampere, 2020)",
            facts_.describe(), facts_.major, facts_.minor, kLeastMajor);
  check(cuda_.retain_primary_context(&context_, number), "open a device");
}

void Gpu::check(CudaResult result, std::string_view asked) const {
  if (result == 0) [[likely]]
    return;
  const ErrorKind kind = result == kCudaOutOfMemory ? ErrorKind::kMemory : ErrorKind::kInternal;
  const std::string message =
      text("{}: CUDA cannot {}: {}", facts_.name.empty() ? text("GPU {}", facts_.number) : facts_.describe(),
           asked, cuda_.describe(result));
  if (for_good(result)) {
    LostGpu& lost = LostGpu::first();
    const std::lock_guard lock(lost.mutex);
    if (!lost.message) lost.message = message;
  }
  throw Error(kind, message);
}

uint64_t Gpu::free_memory() const {
  const GpuContext context(*this);
  size_t free = 0, total = 0;
  check(cuda_.memory_info(&free, &total), "tell its free memory");
  return free;
}

// Under the lock, in the context.
CudaModule Gpu::module_of(std::string_view kernel) const {
  for (const EmbeddedFile& file : kernel_modules()) {
    const std::string source = module_text(file);
    if (!has_kernel(source, kernel)) continue;
    if (const auto at = modules_.find(file.name); at != modules_.end()) return at->second;
    CudaModule module = nullptr;
    check(cuda_.load_module(&module, source.c_str()), text("compile {} for this device", file.name));
    modules_.emplace(file.name, module);
    return module;
  }
  fail_as(ErrorKind::kInternal, "{}: no kernel {}", facts_.describe(), kernel);
}

GpuKernel Gpu::kernel(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  if (const auto at = found_.find(name); at != found_.end()) return {at->second};
  const GpuContext context(*this);
  CudaFunction function = nullptr;
  const std::string known(name);
  check(cuda_.function_of_module(&function, module_of(name), known.c_str()),
        text("find the kernel {}", name));
  found_.emplace(known, function);
  return {function};
}

GpuContext::GpuContext(const Gpu& gpu) : gpu_(gpu) {
  if (cuda_forked()) [[unlikely]]
    fail_as(ErrorKind::kInternal, "{}: {}", gpu.facts().describe(), cuda_driver_status());
  gpu.check(gpu.cuda_.current_context(&before_), "name the current context");
  if (before_ != gpu.context_)
    gpu.check(gpu.cuda_.set_current_context(gpu.context_), "make its context current");
}

GpuContext::~GpuContext() {
  if (before_ != gpu_.context_) gpu_.cuda_.set_current_context(before_);
}

DeviceBuffer::DeviceBuffer(std::shared_ptr<const Gpu> gpu, size_t bytes, std::string_view what)
    : gpu_(std::move(gpu)), size_(bytes) {
  if (bytes == 0) return;
  const GpuContext context(*gpu_);
  CudaAddress address = 0;
  const CudaResult result = gpu_->cuda_.device_alloc(&address, bytes);
  if (result == kCudaOutOfMemory)
    fail_as(ErrorKind::kMemory, "{}: {} needs {} of its memory, {} is free", gpu_->facts().describe(), what,
            human_bytes(bytes), human_bytes(gpu_->free_memory()));
  gpu_->check(result, text("allocate {} bytes", bytes));
  data_ = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(address));
  gpu_->held_.fetch_add(bytes, std::memory_order_relaxed);
}

DeviceBuffer::~DeviceBuffer() {
  if (!data_) return;
  gpu_->held_.fetch_sub(size_, std::memory_order_relaxed);
  try {
    const GpuContext context(*gpu_);
    const CudaResult result = gpu_->cuda_.device_free(number_of(data_));
    if (result != kCudaDeinitialized) gpu_->check(result, "free memory");
  } catch (const std::exception& error) {
    warn(error);
  }
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : gpu_(std::move(other.gpu_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

PinnedBuffer pinned_for(const Gpu& gpu, size_t bytes) {
  try {
    const GpuContext context(gpu);
    return PinnedBuffer(bytes);
  } catch (const Error& error) {
    const std::string name = gpu.facts().describe();
    if (std::string_view(error.what()).starts_with(name)) throw;
    fail_as(error.kind(), "{}: {}", name, error.what());
  }
}

LockedMemory::LockedMemory(std::shared_ptr<const Gpu> gpu, const void* memory, size_t bytes)
    : gpu_(std::move(gpu)) {
  if (bytes == 0) return;
  const GpuContext context(*gpu_);
  void* const from = const_cast<void*>(memory);  // it is read alone; CUDA asks for no promise of that
  const CudaResult result = gpu_->cuda_.host_register(from, bytes, kCudaHostPortable);
  if (result != 0) gpu_->check(result, text("page-lock {} of memory", human_bytes(bytes)));
  memory_ = from;
}

LockedMemory::~LockedMemory() {
  if (!memory_) return;
  try {
    const GpuContext context(*gpu_);
    const CudaResult result = gpu_->cuda_.host_unregister(memory_);
    if (result != kCudaDeinitialized) gpu_->check(result, "unlock memory");
  } catch (const std::exception& error) {
    warn(error);
  }
}

LockedMemory::LockedMemory(LockedMemory&& other) noexcept
    : gpu_(std::move(other.gpu_)), memory_(std::exchange(other.memory_, nullptr)) {}

LockedMemory& LockedMemory::operator=(LockedMemory&& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(memory_, other.memory_);
  return *this;
}

GpuEvent::GpuEvent(std::shared_ptr<const Gpu> gpu) : gpu_(std::move(gpu)) {
  const GpuContext context(*gpu_);
  gpu_->check(gpu_->cuda_.event_create(&event_, kCudaEventNoTime), "make an event");
}

GpuEvent::~GpuEvent() {
  if (!event_) return;
  try {
    const GpuContext context(*gpu_);
    const CudaResult result = gpu_->cuda_.event_destroy(event_);
    if (result != kCudaDeinitialized) gpu_->check(result, "end an event");
  } catch (const std::exception& error) {
    warn(error);
  }
}

GpuEvent::GpuEvent(GpuEvent&& other) noexcept
    : gpu_(std::move(other.gpu_)), event_(std::exchange(other.event_, nullptr)) {}

GpuEvent& GpuEvent::operator=(GpuEvent&& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(event_, other.event_);
  return *this;
}

bool GpuEvent::passed() const {
  const GpuContext context(*gpu_);
  const CudaResult result = gpu_->cuda_.event_query(event_);
  if (result == kCudaNotReady) return false;
  gpu_->check(result, "tell whether an event has passed");
  return true;
}

GpuStream::GpuStream(std::shared_ptr<const Gpu> gpu) : gpu_(std::move(gpu)) {
  const GpuContext context(*gpu_);
  gpu_->check(gpu_->cuda_.stream_create(&stream_, kCudaNonBlocking), "make a stream");
}

GpuStream::~GpuStream() {
  try {
    const GpuContext context(*gpu_);
    const CudaResult result = gpu_->cuda_.stream_destroy(stream_);
    if (result != kCudaDeinitialized) gpu_->check(result, "end a stream");
  } catch (const std::exception& error) {
    warn(error);
  }
}

void GpuStream::launch_bytes(std::string_view kernel, int64_t x, int64_t y, int threads, const void* args) {
  if (x == 0 || y == 0) return;
  const GpuKernel found = gpu_->kernel(kernel);
  const GpuContext context(*gpu_);
  void* parameters[] = {const_cast<void*>(args)};
  const CudaResult result =
      gpu_->cuda_.launch_kernel(found.function, static_cast<unsigned>(x), static_cast<unsigned>(y), 1,
                                static_cast<unsigned>(threads), 1, 1, 0, stream_, parameters, nullptr);
  if (result != 0) gpu_->check(result, text("launch {}", kernel));
}

void GpuStream::copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const GpuContext context(*gpu_);
  const CudaResult result = gpu_->cuda_.copy_async(number_of(to), number_of(from), bytes, stream_);
  if (result != 0) gpu_->check(result, text("copy {} bytes", bytes));
}

bool GpuStream::done() {
  const GpuContext context(*gpu_);
  const CudaResult result = gpu_->cuda_.stream_query(stream_);
  if (result == kCudaNotReady) return false;
  gpu_->check(result, "tell whether it is done");
  return true;
}

void GpuStream::record(const GpuEvent& event) {
  const GpuContext context(*gpu_);
  gpu_->check(gpu_->cuda_.event_record(event.event_, stream_), "record an event");
}

void GpuStream::hold(const GpuEvent& event) {
  const GpuContext context(*gpu_);
  gpu_->check(gpu_->cuda_.stream_wait_event(stream_, event.event_, 0), "wait for an event");
}

void GpuStream::begin_graph() {
  const GpuContext context(*gpu_);
  gpu_->check(gpu_->cuda_.begin_capture(stream_, kCudaCaptureRelaxed), "begin a graph");
}

GpuGraph GpuStream::end_graph() {
  const GpuContext context(*gpu_);
  CudaGraph noted = nullptr;
  gpu_->check(gpu_->cuda_.end_capture(stream_, &noted), "end a graph");
  GpuGraph out;
  out.gpu_ = gpu_;
  const CudaResult result = gpu_->cuda_.graph_instantiate(&out.graph_, noted, 0);
  gpu_->cuda_.graph_destroy(noted);
  gpu_->check(result, "make a graph");
  return out;
}

void GpuStream::drop_graph() noexcept {
  try {
    const GpuContext context(*gpu_);
    CudaGraph noted = nullptr;
    if (gpu_->cuda_.end_capture(stream_, &noted) == 0 && noted) gpu_->cuda_.graph_destroy(noted);
  } catch (...) {
    // The context is gone, and the graph with it.
  }
}

void GpuStream::launch(const GpuGraph& graph) {
  const GpuContext context(*gpu_);
  gpu_->check(gpu_->cuda_.graph_launch(graph.graph_, stream_), "launch a graph");
}

GpuGraph::~GpuGraph() {
  if (!graph_) return;
  try {
    const GpuContext context(*gpu_);
    gpu_->cuda_.graph_exec_destroy(graph_);
  } catch (...) {
    // The context is gone, and the graph with it.
  }
}

GpuGraph::GpuGraph(GpuGraph&& other) noexcept
    : gpu_(std::move(other.gpu_)), graph_(std::exchange(other.graph_, nullptr)) {}

GpuGraph& GpuGraph::operator=(GpuGraph&& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(graph_, other.graph_);
  return *this;
}

void GpuStream::wait() {
  const GpuContext context(*gpu_);
  gpu_->check(gpu_->cuda_.synchronize(stream_), "finish what was asked of it");
}

}  // namespace kt::inline cuda
