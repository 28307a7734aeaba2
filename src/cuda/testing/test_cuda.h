// CUDA for tests in C++: streams, device memory, graphs and events through the driver's own entries. Programs
// that include it (CMake: kt_use_test_driver) run on the test driver beside this file, or on the machine's
// driver with KT_TEST_REAL_CUDA=1 in the environment. Loaded before main(), so that cuda_driver() finds the
// same library by its name.
#pragma once
#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver_library.h"

namespace kt::inline cuda {

class TestCuda {
 public:
  static const TestCuda& get() {
    static const TestCuda cuda;
    return cuda;
  }

  static bool real() {
    const char* const value = std::getenv("KT_TEST_REAL_CUDA");
    return value && std::string(value) == "1";
  }

  // Calls the entry; throws with its name when it fails. Arguments have the entry's own types.
  template <typename... Args>
  void call(const char* name, Args... args) const {
    const CudaResult result = ask(name, args...);
    if (result != 0) throw std::runtime_error(std::string(name) + ": error " + std::to_string(result));
  }

  // The same, with the error as result.
  template <typename... Args>
  CudaResult ask(const char* name, Args... args) const {
    const auto entry = reinterpret_cast<CudaResult (*)(Args...)>(find(name));
    return entry(args...);
  }

  // Gives the calling thread the context of device 0.
  void use_device() const {
    CudaContext context = nullptr;
    call("cuDevicePrimaryCtxRetain", &context, CudaDevice{0});
    call("cuCtxSetCurrent", context);
  }

  // The call of that entry after `skip` ones fails. Test driver only.
  void fail_next(const char* name, CudaResult result, int skip = 0) const {
    reinterpret_cast<void (*)(const char*, int, int)>(find("kt_test_cuda_fail"))(name, result, skip);
  }
  // How often that entry was called; 0 on a real driver, which does not count.
  int calls(const char* name) const {
    return real() ? 0 : reinterpret_cast<int (*)(const char*)>(find("kt_test_cuda_calls"))(name);
  }
  // A stream takes so many operations before calls that add one wait. Test driver only, as waiting().
  void limit(uint64_t count) const {
    reinterpret_cast<void (*)(uint64_t)>(find("kt_test_cuda_limit"))(count);
  }
  int waiting() const { return reinterpret_cast<int (*)()>(find("kt_test_cuda_waiting"))(); }
  // The device is lost after so many more calls. Test driver only.
  void lose(int calls) const { reinterpret_cast<void (*)(int)>(find("kt_test_cuda_lose"))(calls); }
  void mend() const { reinterpret_cast<void (*)()>(find("kt_test_cuda_mend"))(); }

 private:
  TestCuda() : library_(::dlopen(real() ? "libcuda.so.1" : KT_TEST_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL)) {
    if (!library_) throw std::runtime_error(std::string("no CUDA for the tests: ") + ::dlerror());
    call("cuInit", 0u);
  }

  void* find(const char* name) const {
    void* const entry = ::dlsym(library_, name);
    if (!entry) throw std::runtime_error(std::string(name) + " is not in libcuda.so.1");
    return entry;
  }

  void* library_;
};

// Before main(), whoever asks first.
inline const TestCuda& kTestCuda = TestCuda::get();

class TestStream {
 public:
  enum class Kind : unsigned { kBlocking = 0, kNonBlocking = 1 };
  explicit TestStream(Kind kind = Kind::kNonBlocking) {
    kTestCuda.use_device();
    kTestCuda.call("cuStreamCreate", &stream_, static_cast<unsigned>(kind));
  }
  ~TestStream() {
    kTestCuda.ask("cuStreamSynchronize", stream_);
    kTestCuda.ask("cuStreamDestroy_v2", stream_);
  }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;

  operator CudaStream() const { return stream_; }
  void wait() const { kTestCuda.call("cuStreamSynchronize", stream_); }

 private:
  CudaStream stream_ = nullptr;
};

// A second context of device 0, not current.
class TestContext {
 public:
  TestContext() {
    kTestCuda.call("cuCtxCreate_v2", &context_, 0u, CudaDevice{0});
    kTestCuda.use_device();
  }
  ~TestContext() { kTestCuda.ask("cuCtxDestroy_v2", context_); }
  TestContext(const TestContext&) = delete;
  TestContext& operator=(const TestContext&) = delete;

  // A stream of this context; the calling thread's current one stays.
  CudaStream make_stream() const {
    CudaStream stream = nullptr;
    kTestCuda.call("cuCtxSetCurrent", context_);
    kTestCuda.call("cuStreamCreate", &stream, 1u);
    kTestCuda.use_device();
    return stream;
  }

 private:
  CudaContext context_ = nullptr;
};

// Device memory of `size` elements. The address must not be touched by the host.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) : size_(size) {
    kTestCuda.use_device();
    kTestCuda.call("cuMemAlloc_v2", &address_, size * sizeof(T));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { write(values); }
  ~DeviceArray() { kTestCuda.ask("cuMemFree_v2", address_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return reinterpret_cast<T*>(static_cast<uintptr_t>(address_)); }
  size_t size() const { return size_; }

  // At once, after what is in the null stream and in blocking ones.
  void write(const std::vector<T>& values) const {
    kTestCuda.call("cuMemcpy", address_, static_cast<CudaAddress>(reinterpret_cast<uintptr_t>(values.data())),
                   values.size() * sizeof(T));
    // From ordinary memory the call may return before the last bytes have arrived.
    kTestCuda.call("cuStreamSynchronize", CudaStream{nullptr});
  }
  std::vector<T> read() const {
    std::vector<T> values(size_);
    kTestCuda.call("cuMemcpy", static_cast<CudaAddress>(reinterpret_cast<uintptr_t>(values.data())), address_,
                   size_ * sizeof(T));
    return values;
  }

 private:
  size_t size_;
  CudaAddress address_ = 0;
};

// What `record` puts into the stream, to be launched again and again.
class TestGraph {
 public:
  enum class Mode : int { kGlobal = 0, kThread = 1, kRelaxed = 2 };
  template <typename Record>
  TestGraph(CudaStream stream, const Record& record, Mode mode = Mode::kGlobal) {
    kTestCuda.call("cuStreamBeginCapture_v2", stream, static_cast<int>(mode));
    void* graph = nullptr;
    try {
      record();
    } catch (...) {
      if (kTestCuda.ask("cuStreamEndCapture", stream, &graph) == 0) kTestCuda.ask("cuGraphDestroy", graph);
      throw;
    }
    kTestCuda.call("cuStreamEndCapture", stream, &graph);
    const CudaResult result = kTestCuda.ask("cuGraphInstantiateWithFlags", &executable_, graph, 0ull);
    kTestCuda.call("cuGraphDestroy", graph);
    if (result != 0) throw std::runtime_error("cuGraphInstantiateWithFlags: error " + std::to_string(result));
  }
  ~TestGraph() { kTestCuda.ask("cuGraphExecDestroy", executable_); }
  TestGraph(const TestGraph&) = delete;
  TestGraph& operator=(const TestGraph&) = delete;

  void launch(CudaStream stream) const { kTestCuda.call("cuGraphLaunch", executable_, stream); }

 private:
  void* executable_ = nullptr;
};

class TestEvent {
 public:
  TestEvent() {
    kTestCuda.use_device();
    kTestCuda.call("cuEventCreate", &event_, 2u);  // without a time
  }
  ~TestEvent() { kTestCuda.ask("cuEventDestroy_v2", event_); }
  TestEvent(const TestEvent&) = delete;
  TestEvent& operator=(const TestEvent&) = delete;

  void record(CudaStream stream) const { kTestCuda.call("cuEventRecord", event_, stream); }
  void hold(CudaStream stream) const { kTestCuda.call("cuStreamWaitEvent", stream, event_, 0u); }
  bool passed() const { return kTestCuda.ask("cuEventQuery", event_) == 0; }
  void wait() const { kTestCuda.call("cuEventSynchronize", event_); }

 private:
  void* event_ = nullptr;
};

}  // namespace kt::inline cuda
