// Memory of the test driver. Device memory is mapped twice: the address that callers see cannot be touched but by
// kernels, copies of a stream reach it through the other one. Thread-safe.
#pragma once
#include <cstddef>

namespace kt::inline cuda::test_driver {

enum class Place { kOrdinary, kPinned, kDevice };

// kPinned or kDevice, there of that device; null where there is none.
void* allocate(Place place, size_t bytes, int device = 0);
bool release(Place place, const void* address);  // false: not the address of an allocation of this kind

// Ordinary memory of the caller's becomes kPinned and ordinary again. False: a part of it is pinned already; not the
// beginning of such memory.
bool lock_pages(void* address, size_t bytes);
bool unlock_pages(const void* address);

Place place_of(const void* address);
// Where [address, address + bytes) can be touched; null where it is not within one live allocation of
// `place`.
std::byte* reach(Place place, const void* address, size_t bytes);

// While one lives, device memory can be touched where callers see it: a kernel runs. It stays so until the host has
// waited for a stream, because the next kernel comes soon and a change takes time for every page.
class DeviceMemoryOpen {
 public:
  DeviceMemoryOpen();
  ~DeviceMemoryOpen();
  DeviceMemoryOpen(const DeviceMemoryOpen&) = delete;
  DeviceMemoryOpen& operator=(const DeviceMemoryOpen&) = delete;
};

void close_device_memory();  // the host goes on; kernels that run keep it open

// KT_TEST_CUDA_MIG=1: the device is a slice of one.
bool is_slice();

// Memory of a device that is there and that allocations have left. KT_TEST_CUDA_MEMORY=BYTES says how much there is;
// BYTES,BYTES,... of one device after the other, those behind the last as it; not given: 8 GiB, of a slice 1 GiB.
struct MemoryLeft {
  size_t total, free;
};
MemoryLeft device_memory(int device);

}  // namespace kt::inline cuda::test_driver
