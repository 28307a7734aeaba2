// Prints cuda_driver_status(); exit status 0 where there is a driver, 1 where there is none. Then ordinary
// memory must do.
#include <cstdio>

#include "cuda/driver.h"

int main() {
  std::puts(kt::cuda_driver_status().c_str());
  if (kt::cuda_driver()) return 0;
  const kt::PinnedBuffer buffer(1000);
  for (size_t i = 0; i < buffer.size(); ++i)
    if (buffer.data()[i] != std::byte{0}) return 2;
  return reinterpret_cast<uintptr_t>(buffer.data()) % 64 == 0 ? 1 : 2;
}
