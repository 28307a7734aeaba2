#include "cuda/driver_library.h"

#include <dlfcn.h>

#include "base/text.h"

namespace kt::inline cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

template <typename Function>
void find(void* library, const char* name, Function*& function, std::string& missing) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  if (!function) missing += (missing.empty() ? "" : ", ") + std::string(name);
}

// The names of those that the library lacks, with commas; empty when it has all.
std::string find_all(void* library, CudaSymbols& s) {
  std::string missing;
  find(library, "cuInit", s.init, missing);
  find(library, "cuDriverGetVersion", s.driver_version, missing);
  find(library, "cuDeviceGetCount", s.device_count, missing);
  find(library, "cuGetErrorName", s.error_name, missing);
  find(library, "cuGetErrorString", s.error_string, missing);
  find(library, "cuCtxGetCurrent", s.current_context, missing);
  find(library, "cuCtxGetDevice", s.current_device, missing);
  find(library, "cuDeviceGetAttribute", s.device_attribute, missing);
  find(library, "cuDeviceGetName", s.device_name, missing);
  find(library, "cuDeviceTotalMem_v2", s.device_memory, missing);
  find(library, "cuMemGetInfo_v2", s.memory_info, missing);
  find(library, "cuMemAlloc_v2", s.device_alloc, missing);
  find(library, "cuMemFree_v2", s.device_free, missing);
  find(library, "cuStreamCreate", s.stream_create, missing);
  find(library, "cuStreamDestroy_v2", s.stream_destroy, missing);
  find(library, "cuCtxSetCurrent", s.set_current_context, missing);
  find(library, "cuDevicePrimaryCtxRetain", s.retain_primary_context, missing);
  find(library, "cuStreamGetCtx", s.stream_context, missing);
  find(library, "cuMemcpyAsync", s.copy_async, missing);
  find(library, "cuLaunchHostFunc", s.launch_host_function, missing);
  find(library, "cuStreamGetCaptureInfo_v2", s.capture_info, missing);
  find(library, "cuUserObjectCreate", s.user_object_create, missing);
  find(library, "cuGraphRetainUserObject", s.graph_retain_user_object, missing);
  find(library, "cuThreadExchangeStreamCaptureMode", s.exchange_capture_mode, missing);
  find(library, "cuStreamBeginCapture_v2", s.begin_capture, missing);
  find(library, "cuStreamEndCapture", s.end_capture, missing);
  find(library, "cuGraphInstantiateWithFlags", s.graph_instantiate, missing);
  find(library, "cuGraphLaunch", s.graph_launch, missing);
  find(library, "cuGraphDestroy", s.graph_destroy, missing);
  find(library, "cuGraphExecDestroy", s.graph_exec_destroy, missing);
  find(library, "cuStreamQuery", s.stream_query, missing);
  find(library, "cuStreamSynchronize", s.synchronize, missing);
  find(library, "cuEventCreate", s.event_create, missing);
  find(library, "cuEventRecord", s.event_record, missing);
  find(library, "cuEventQuery", s.event_query, missing);
  find(library, "cuStreamWaitEvent", s.stream_wait_event, missing);
  find(library, "cuEventDestroy_v2", s.event_destroy, missing);
  find(library, "cuMemHostAlloc", s.host_alloc, missing);
  find(library, "cuMemFreeHost", s.host_free, missing);
  find(library, "cuMemHostRegister_v2", s.host_register, missing);
  find(library, "cuMemHostUnregister", s.host_unregister, missing);
  find(library, "cuModuleLoadData", s.load_module, missing);
  find(library, "cuModuleGetFunction", s.function_of_module, missing);
  find(library, "cuLaunchKernel", s.launch_kernel, missing);
  return missing;
}

void say_why_not_opened(CudaLibrary& library) {
  const char* error = ::dlerror();
  const std::string why = error ? error : "unknown error";
  // A library that needs another one which is missing begins with that one's name.
  library.absent = why.starts_with(kLibrary) && why.find("No such file") != std::string::npos;
  library.status =
      library.absent ? text("{} was not found", kLibrary) : text("{} cannot be opened: {}", kLibrary, why);
}

std::string why_not_started(const CudaSymbols& symbols, CudaResult result) {
  if (result == kCudaNoDevice) return text("no CUDA device: {}", symbols.describe(result));
  // What a child gets when its parent used CUDA, through whatever library, before the fork.
  const char* hint =
      result == kCudaNotInitialized ? "; a process forked from one that uses CUDA cannot use it" : "";
  return text("cuInit: {}{}", symbols.describe(result), hint);
}

}  // namespace

std::string CudaSymbols::describe(CudaResult result) const {
  const char* name = nullptr;
  const char* description = nullptr;
  if (!error_name || error_name(result, &name) != 0 || !name) return text("CUDA error {}", result);
  if (!error_string || error_string(result, &description) != 0 || !description) return name;
  return text("{} ({})", name, description);
}

CudaLibrary open_cuda_library() {
  CudaLibrary library;
  CudaSymbols& symbols = library.symbols;
  void* const handle = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    say_why_not_opened(library);
    return library;
  }
  if (const std::string missing = find_all(handle, symbols); !missing.empty()) {
    library.status = text("{} lacks {}: the driver is too old", kLibrary, missing);
    return library;
  }
  int version = 0, devices = 0;
  if (const CudaResult result = symbols.init(0); result != 0) {
    library.status = why_not_started(symbols, result);
    library.absent = result == kCudaNoDevice;
    return library;
  }
  CudaResult result = symbols.driver_version(&version);
  if (result == 0) result = symbols.device_count(&devices);
  if (result != 0) {
    library.status = text("CUDA does not tell its version and devices: {}", symbols.describe(result));
    return library;
  }
  library.ready = devices > 0;
  library.absent = devices == 0;
  library.status = text("CUDA {}.{}, {} {}", version / 1000, version % 1000 / 10,
                        devices > 0 ? std::to_string(devices) : "no", devices > 1 ? "devices" : "device");
  return library;
}

}  // namespace kt::inline cuda
