// Whether a GPU does what KT asks of one, tried on a little of everything: a context, device memory, page-locked
// memory, a copy, and a kernel that the driver compiles and whose result is known.
#pragma once
#include <cstdint>

namespace kt::inline bench {

struct GpuCheck {
  uint64_t free = 0;           // of its memory, with the context of this process
  double to_gpu = 0;           // bytes per second, from page-locked memory
  double seconds_compile = 0;  // of the module with the kernel; little where the driver remembers it
  double difference = 0;       // of the kernel's result, relative
  double bound = 0;
  bool ok() const { return difference <= bound; }
};

// Error as Gpu's and its streams': which of them failed, and CUDA's own words.
GpuCheck check_gpu(int number);

}  // namespace kt::inline bench
