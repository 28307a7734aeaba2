// The CUDA driver library: found at run time, its functions by name. Types and numbers are the driver's
// binary interface, as far as KT uses it. It makes no policy: contexts, forks and errors are driver.cc's.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/driver.h"

namespace kt::inline cuda {

using CudaResult = int;                  // 0: done, else the number of an error
using CudaDevice = int;                  // 0, 1, 2 ...
using CudaAddress = unsigned long long;  // of any memory
using CudaContext = struct CudaContextTag*;
using CudaModule = struct CudaModuleTag*;
using CudaFunction = struct CudaFunctionTag*;
using CudaUserObject = struct CudaUserObjectTag*;
using CudaGraph = struct CudaGraphTag*;
using CudaGraphExec = struct CudaGraphExecTag*;

constexpr CudaResult kCudaOutOfMemory = 2, kCudaNotInitialized = 3, kCudaDeinitialized = 4,
                     kCudaNoDevice = 100, kCudaNotReady = 600, kCudaCaptureInvalidated = 901;
constexpr unsigned kCudaHostPortable = 1;  // page-locked for all contexts
constexpr unsigned kCudaEventNoTime = 2;   // cheaper
constexpr unsigned kCudaUnsyncedEnd =
    1;  // of a user object: nothing waits for its end, the only kind there is
constexpr unsigned kCudaMoveReference = 1;  // the graph gets the caller's
constexpr int kCudaCaptureRelaxed = 2;      // of a thread: nothing is forbidden while a stream is captured
constexpr uintptr_t kCudaLastDefaultStream = 2;  // handles 0 to 2 are default streams of the current context
// Attributes of a device; of the second, a kernel that takes seconds is killed.
constexpr int kCudaMultiprocessors = 16, kCudaKernelTimeLimit = 17, kCudaMajor = 75, kCudaMinor = 76;
constexpr unsigned kCudaNonBlocking = 1;  // a stream that does not wait for the default one
enum class CudaCaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };

// Names without suffix _ptsz: stream null is the legacy default stream.
struct CudaSymbols {
  CudaResult (*init)(unsigned flags) = nullptr;
  CudaResult (*driver_version)(int* version) = nullptr;  // 13010 for 13.1
  CudaResult (*device_count)(int* count) = nullptr;
  CudaResult (*error_name)(CudaResult, const char**) = nullptr;
  CudaResult (*error_string)(CudaResult, const char**) = nullptr;
  CudaResult (*current_context)(CudaContext*) = nullptr;
  CudaResult (*current_device)(CudaDevice*) = nullptr;
  CudaResult (*device_attribute)(int* value, int attribute, CudaDevice) = nullptr;
  CudaResult (*device_name)(char* name, int length, CudaDevice) = nullptr;
  CudaResult (*device_memory)(size_t* bytes, CudaDevice) = nullptr;
  CudaResult (*memory_info)(size_t* free, size_t* total) = nullptr;
  CudaResult (*device_alloc)(CudaAddress*, size_t bytes) = nullptr;
  CudaResult (*device_free)(CudaAddress) = nullptr;
  CudaResult (*stream_create)(CudaStream*, unsigned flags) = nullptr;
  CudaResult (*stream_destroy)(CudaStream) = nullptr;
  CudaResult (*set_current_context)(CudaContext) = nullptr;
  CudaResult (*retain_primary_context)(CudaContext*, CudaDevice) = nullptr;
  CudaResult (*stream_context)(CudaStream, CudaContext*) = nullptr;
  CudaResult (*copy_async)(CudaAddress to, CudaAddress from, size_t bytes, CudaStream) = nullptr;
  CudaResult (*launch_host_function)(CudaStream, void (*)(void*), void* argument) = nullptr;
  CudaResult (*capture_info)(CudaStream, CudaCaptureStatus*, uint64_t* id, void** graph, const void** nodes,
                             size_t* count) = nullptr;  // all but the first two may be null
  CudaResult (*user_object_create)(CudaUserObject*, void* argument, void (*end)(void*), unsigned references,
                                   unsigned flags) = nullptr;
  CudaResult (*graph_retain_user_object)(void* graph, CudaUserObject, unsigned references,
                                         unsigned flags) = nullptr;
  CudaResult (*exchange_capture_mode)(int* mode) = nullptr;
  CudaResult (*begin_capture)(CudaStream, int mode) = nullptr;
  CudaResult (*end_capture)(CudaStream, CudaGraph*) = nullptr;
  CudaResult (*graph_instantiate)(CudaGraphExec*, CudaGraph, unsigned long long flags) = nullptr;
  CudaResult (*graph_launch)(CudaGraphExec, CudaStream) = nullptr;
  CudaResult (*graph_destroy)(CudaGraph) = nullptr;
  CudaResult (*graph_exec_destroy)(CudaGraphExec) = nullptr;
  CudaResult (*stream_query)(CudaStream) = nullptr;
  CudaResult (*synchronize)(CudaStream) = nullptr;
  CudaResult (*event_create)(CudaEvent*, unsigned flags) = nullptr;
  CudaResult (*event_record)(CudaEvent, CudaStream) = nullptr;
  CudaResult (*event_query)(CudaEvent) = nullptr;
  CudaResult (*stream_wait_event)(CudaStream, CudaEvent, unsigned flags) = nullptr;
  CudaResult (*event_destroy)(CudaEvent) = nullptr;
  CudaResult (*host_alloc)(void**, size_t bytes, unsigned flags) = nullptr;
  CudaResult (*host_free)(void*) = nullptr;
  CudaResult (*host_register)(void*, size_t bytes, unsigned flags) = nullptr;
  CudaResult (*host_unregister)(void*) = nullptr;
  CudaResult (*load_module)(CudaModule*, const void* image) = nullptr;
  CudaResult (*function_of_module)(CudaFunction*, CudaModule, const char* name) = nullptr;
  CudaResult (*launch_kernel)(CudaFunction, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                              unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                              CudaStream, void** parameters, void** extra) = nullptr;

  // "CUDA_ERROR_INVALID_VALUE (invalid argument)"; never empty.
  std::string describe(CudaResult result) const;
};

struct CudaLibrary {
  CudaSymbols symbols;
  bool ready = false;   // initialised, and there is a device
  bool absent = false;  // as cuda_absent()
  std::string status;   // as cuda_driver_status()
};

// Opens libcuda.so.1, or takes the one that is loaded already, and initialises it. It is never closed: the
// driver keeps threads of its own.
CudaLibrary open_cuda_library();

// The functions of the library that cuda_driver() found; null where that is null. Error(kInternal) in a child forked
// after it was found.
const CudaSymbols* cuda_symbols();
// This process is such a child: what a GPU's objects own there is the parent's.
bool cuda_forked();

}  // namespace kt::inline cuda
