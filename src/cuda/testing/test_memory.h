// Memory of the test driver. Device memory is mapped twice: the address that callers see cannot be touched,
// only copies of a stream reach it through the other one. Thread-safe.
#pragma once
#include <cstddef>

namespace kt::test_driver {

enum class Place { kOrdinary, kPinned, kDevice };

void* allocate(Place place, size_t bytes);       // kPinned or kDevice; null where there is none
bool release(Place place, const void* address);  // false: not the address of an allocation of this kind

Place place_of(const void* address);
// Where [address, address + bytes) can be touched; null where it is not within one live allocation of
// `place`.
std::byte* reach(Place place, const void* address, size_t bytes);

}  // namespace kt::test_driver
