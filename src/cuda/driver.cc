#include "cuda/driver.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>

#include "base/error.h"
#include "base/fork_mutex.h"
#include "base/log.h"
#include "cuda/driver_library.h"
#include "cuda/post_kernels.h"

namespace kt::inline cuda {
namespace {

// Set in a process that was forked from one which had the driver: its threads and its device memory are the
// parent's, and the real library crashes or hangs there.
std::atomic<bool> forked = false;

constexpr const char* kForked =
    "CUDA was started before fork() and does not work in the child: fork earlier, or start the process anew "
    "(multiprocessing: the spawn method)";

CudaAddress address_of(const void* memory) {
  return static_cast<CudaAddress>(reinterpret_cast<uintptr_t>(memory));
}

// While it lives, this thread may do what a capture under way in any thread forbids, without spoiling it.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const CudaSymbols& symbols) : symbols_(symbols) {
    exchanged_ = symbols_.exchange_capture_mode(&mode_) == 0;
  }
  ~RelaxedCapture() {
    if (exchanged_) symbols_.exchange_capture_mode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const CudaSymbols& symbols_;
  int mode_ = kCudaCaptureRelaxed;  // then what the thread had
  bool exchanged_;
};

// Of one context; null where they cannot be had.
struct PostKernels {
  CudaFunction post = nullptr, fetch = nullptr;
};

bool posts_wanted() {
  static const bool wanted = [] {
    const char* const value = std::getenv("KT_CUDA_POST");
    return !value || std::string_view(value) != "0";
  }();
  return wanted;
}

// Threads of a block that copies so many units.
unsigned block_for(size_t units) {
  constexpr size_t kWarp = 32, kMost = 1024;
  return static_cast<unsigned>(std::clamp((units + kWarp - 1) / kWarp * kWarp, kWarp, kMost));
}

class LoadedDriver final : public CudaDriver {
 public:
  explicit LoadedDriver(const CudaSymbols& symbols) : symbols_(symbols) {}

  void copy(void* to, const void* from, size_t bytes, CudaStream stream) const override {
    if (bytes == 0) return;
    enter(stream);
    check(symbols_.copy_async(address_of(to), address_of(from), bytes, stream), "copy {} bytes in a stream",
          bytes);
  }

  void call(void (*function)(void*) noexcept, void* argument, CudaStream stream) const override {
    enter(stream);
    check(symbols_.launch_host_function(stream, function, argument), "call a host function in a stream");
  }

  uint64_t capture(CudaStream stream) const override {
    enter(stream);
    CudaCaptureStatus status = CudaCaptureStatus::kNone;
    uint64_t id = 0;
    check(symbols_.capture_info(stream, &status, &id, nullptr, nullptr, nullptr),
          "tell whether a stream is captured");
    if (status == CudaCaptureStatus::kNone) return 0;
    if (status == CudaCaptureStatus::kInvalidated) check(kCudaCaptureInvalidated, "go on with a capture");
    return id + 1;  // CUDA does not promise that its own numbers start above 0
  }

  void at_end_of_graph(void (*function)(void*) noexcept, void* argument, CudaStream stream) const override {
    enter(stream);
    CudaCaptureStatus status = CudaCaptureStatus::kNone;
    void* graph = nullptr;
    CudaUserObject object = nullptr;
    check(symbols_.capture_info(stream, &status, nullptr, &graph, nullptr, nullptr),
          "name the graph of a stream");
    if (status != CudaCaptureStatus::kActive || !graph)
      fail_as(ErrorKind::kInternal, "CUDA cannot name the graph of a stream that is not captured");
    check(symbols_.user_object_create(&object, argument, function, 1, kCudaUnsyncedEnd),
          "make what ends with a graph");
    // Refused, the object is left: its end would call the function.
    check(symbols_.graph_retain_user_object(graph, object, 1, kCudaMoveReference), "tell the end of a graph");
  }

  const void* context() const override {
    enter(nullptr);
    CudaContext context = nullptr;
    check(symbols_.current_context(&context), "name the current context");
    return context;
  }

  bool posts() const override { return posts_wanted() && post_kernels().post; }

  void post(uint32_t* busy, const CudaPiece& large, const CudaPiece& first, const CudaPiece& second,
            const CudaRing& ring, uint64_t message, CudaStream stream) const override {
    enter(stream);
    CudaAddress flag = address_of(busy), words = address_of(ring.words);
    CudaAddress to[] = {address_of(large.to), address_of(first.to), address_of(second.to)};
    CudaAddress from[] = {address_of(large.from), address_of(first.from), address_of(second.from)};
    uint32_t counts[] = {units(large, 16), units(first, 4), units(second, 4)};
    uint32_t mask = ring.count - 1, number = ring.number;
    void* parameters[] = {&flag,  &to[0],   &from[0],   &counts[0], &to[1], &from[1], &counts[1],
                          &to[2], &from[2], &counts[2], &words,     &mask,  &number,  &message};
    launch(post_kernels().post, block_for(std::max({counts[0], counts[1], counts[2]})), parameters, stream);
  }

  void fetch(const uint32_t* busy, const CudaPiece& piece, CudaStream stream) const override {
    enter(stream);
    CudaAddress flag = address_of(busy), to = address_of(piece.to), from = address_of(piece.from);
    uint32_t count = units(piece, 16);
    void* parameters[] = {&flag, &to, &from, &count};
    launch(post_kernels().fetch, block_for(count), parameters, stream);
  }

  const void* use_context_of(CudaStream stream) const override {
    // Default streams are those of the current one. Where the driver does not say, the current one must do.
    if (reinterpret_cast<uintptr_t>(stream) <= kCudaLastDefaultStream) return nullptr;
    enter(stream);
    CudaContext before = nullptr, own = nullptr;
    check(symbols_.current_context(&before), "name the current context");
    if (symbols_.stream_context(stream, &own) != 0 || !own || own == before) return nullptr;
    check(symbols_.set_current_context(own), "make a stream's context current");
    return before;
  }

  void use_context(const void* context) const noexcept override {
    // It was current before: the driver has it, unless the caller destroyed it meanwhile.
    symbols_.set_current_context(static_cast<CudaContext>(const_cast<void*>(context)));
  }

  void wait(CudaStream stream) const override {
    // Asked first, because CUDA's own refusal makes the capture invalid.
    if (capture(stream) != 0)
      fail_as(ErrorKind::kInternal, "CUDA cannot wait for a stream while it is captured into a graph");
    check(symbols_.synchronize(stream), "wait for a stream");
  }

  CudaEvent make_event() const override {
    enter(nullptr);
    const RelaxedCapture relaxed(symbols_);
    CudaEvent event = nullptr;
    check(symbols_.event_create(&event, kCudaEventNoTime), "make an event");
    return event;
  }

  void record(CudaEvent event, CudaStream stream) const override {
    enter(stream);
    check(symbols_.event_record(event, stream), "record an event in a stream");
  }

  bool passed(CudaEvent event) const override {
    enter(nullptr);
    const RelaxedCapture relaxed(symbols_);
    const CudaResult result = symbols_.event_query(event);
    if (result != kCudaNotReady) check(result, "tell whether an event has passed");
    return result == 0;
  }

  void hold(CudaStream stream, CudaEvent event) const override {
    enter(stream);
    check(symbols_.stream_wait_event(stream, event, 0), "make a stream wait for an event");
  }

  void end_event(CudaEvent event) const noexcept override {
    give_back(event, "end an event", [&] { return symbols_.event_destroy(event); });
  }

  void* pin(size_t bytes) const override {
    if (bytes == 0) return nullptr;
    enter(nullptr);
    const RelaxedCapture relaxed(symbols_);
    void* memory = nullptr;
    check(symbols_.host_alloc(&memory, bytes, kCudaHostPortable), "lock {} bytes of memory", bytes);
    return memory;
  }

  void unpin(void* memory) const noexcept override {
    give_back(memory, "free locked memory", [&] { return symbols_.host_free(memory); });
  }

 private:
  static uint32_t units(const CudaPiece& piece, size_t unit) {
    const auto places = reinterpret_cast<uintptr_t>(piece.to) | reinterpret_cast<uintptr_t>(piece.from);
    if (places % unit || piece.bytes % unit || piece.bytes / unit > UINT32_MAX)
      fail_as(ErrorKind::kInternal, "CUDA: a piece of {} bytes at {} does not stand at multiples of {}",
              piece.bytes, piece.from, unit);
    return static_cast<uint32_t>(piece.bytes / unit);
  }

  void launch(CudaFunction kernel, unsigned block, void** parameters, CudaStream stream) const {
    check(symbols_.launch_kernel(kernel, 1, 1, 1, block, 1, 1, 0, stream, parameters, nullptr),
          "hand work to the host in a stream");
  }

  // Of the current context.
  PostKernels post_kernels() const {
    const auto key = static_cast<CudaContext>(const_cast<void*>(context()));
    const std::lock_guard lock(mutex_);
    const auto [at, is_new] = kernels_.try_emplace(key);
    if (is_new) at->second = load_post_kernels();
    return at->second;
  }

  // A GPU that shows a screen kills kernels that wait for seconds, as those may for a slow CPU.
  bool kernels_may_wait() const {
    CudaDevice device = 0;
    int limited = 1;
    return symbols_.current_device(&device) == 0 &&
           symbols_.device_attribute(&limited, kCudaKernelTimeLimit, device) == 0 && limited == 0;
  }

  PostKernels load_post_kernels() const {
    const RelaxedCapture relaxed(symbols_);
    if (!kernels_may_wait()) return {};
    CudaModule module = nullptr;  // stays as long as the context
    PostKernels found;
    CudaResult result = symbols_.load_module(&module, kPostKernels);
    if (result == 0) result = symbols_.function_of_module(&found.post, module, "kt_post");
    if (result == 0) result = symbols_.function_of_module(&found.fetch, module, "kt_fetch");
    if (result == 0) return found;
    log_line(LogLevel::kInfo,
             text("CUDA does not take KT's kernels ({}): work is handed over by copies and host functions",
                  symbols_.describe(result)));
    return {};
  }

  template <typename... Args>
  void check(CudaResult result, TextPattern<sizeof...(Args)> asked, const Args&... args) const {
    if (result == 0) [[likely]]
      return;
    const ErrorKind kind = result == kCudaOutOfMemory ? ErrorKind::kMemory : ErrorKind::kInternal;
    fail_as(kind, "CUDA cannot {}: {}", text(asked, args...), symbols_.describe(result));
  }

  // After a fork it is the parent's, at the end of the process the driver's: nothing to give back.
  template <typename Give>
  void give_back(const void* what, const char* asked, const Give& give) const noexcept {
    if (!what || forked.load(std::memory_order_relaxed)) return;
    try {
      enter(nullptr);
      const RelaxedCapture relaxed(symbols_);
      const CudaResult result = give();
      if (result == kCudaDeinitialized || (result >= 700 && result < 800))
        return;  // gone, as everybody knows
      check(result, "{}", asked);
    } catch (const std::exception& error) {
      log_line(LogLevel::kWarning, error.what());
    }
  }

  // Before every call: the process is the one that started CUDA, and the thread has a context.
  void enter(CudaStream stream) const {
    if (forked.load(std::memory_order_relaxed)) [[unlikely]]
      fail_as(ErrorKind::kInternal, "{}", kForked);
    CudaContext context = nullptr;
    if (symbols_.current_context(&context) == 0 && context) [[likely]]
      return;
    choose_context(stream);
  }

  // For a thread without a context, for good: the stream's own; without a stream, the context that the
  // runtime and torch use on device 0, as the runtime does for a thread that has chosen no device.
  void choose_context(CudaStream stream) const {
    const RelaxedCapture relaxed(symbols_);
    CudaContext context = nullptr;
    if (!stream || symbols_.stream_context(stream, &context) != 0 || !context) context = primary_context();
    check(symbols_.set_current_context(context), "make a context current");
  }

  CudaContext primary_context() const {
    const std::lock_guard lock(mutex_);
    if (!primary_) check(symbols_.retain_primary_context(&primary_, 0), "get the context of device 0");
    return primary_;
  }

  const CudaSymbols symbols_;
  mutable std::mutex mutex_;
  mutable CudaContext primary_ = nullptr;  // of device 0; kept to the end of the process
  mutable std::map<CudaContext, PostKernels> kernels_;
};

struct Found {
  CudaLibrary library = open_cuda_library();
  LoadedDriver driver{library.symbols};

  Found() {
    if (library.ready)
      ::pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
  }
};

// Never destroyed: buffers with static storage are given back through it. A lock instead of a static's own
// guard, which a fork would not wait for.
struct Search {
  ForkMutex mutex{ForkLock::kCudaDriver};
  std::atomic<const Found*> found = nullptr;
};

Search& search() {
  static Search& it = *std::make_unique<Search>().release();
  return it;
}

[[maybe_unused]] const Search& made_early = search();

const Found& found() {
  Search& it = search();
  if (const Found* const there = it.found.load(std::memory_order_acquire)) return *there;
  const std::lock_guard lock(it.mutex);
  if (!it.found.load(std::memory_order_relaxed))
    it.found.store(std::make_unique<Found>().release(), std::memory_order_release);
  return *it.found.load(std::memory_order_relaxed);
}

}  // namespace

const CudaDriver* cuda_driver() { return found().library.ready ? &found().driver : nullptr; }

const CudaSymbols* cuda_symbols() {
  if (!cuda_driver()) return nullptr;
  if (cuda_forked()) fail_as(ErrorKind::kInternal, "{}", kForked);
  return &found().library.symbols;
}

bool cuda_forked() { return forked.load(std::memory_order_relaxed); }

bool cuda_absent() { return found().library.absent; }

std::string cuda_driver_status() {
  const std::string& status = found().library.status;
  return cuda_forked() ? kForked : status;
}

}  // namespace kt::inline cuda
