// What the tests of the driver share.
#pragma once
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "base/error.h"
#include "cuda/driver.h"
#include "cuda/testing/test_cuda.h"

namespace kt::inline cuda {

inline std::vector<int> numbers(size_t size, int first = 0) {
  std::vector<int> values(size);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// The error that `body` throws; fails the test when there is none.
template <typename Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorKind::kInput, "");
}

// A host function that holds a stream until it is opened, or for 10 minutes.
struct StreamGate {
  std::atomic<bool> reached = false, open = false;
  static void hold(void* argument) noexcept {
    StreamGate& gate = *static_cast<StreamGate*>(argument);
    gate.reached = true;
    for (int i = 0; i < 600'000 && !gate.open; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void wait() const {
    while (!reached) std::this_thread::yield();
  }
};

inline void count(void* argument) noexcept { ++*static_cast<std::atomic<int>*>(argument); }

// Until it counts so many; the driver may be late.
inline void wait_for(const std::atomic<int>& calls, int wanted) {
  for (int i = 0; i < 300'000 && calls < wanted; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

class CudaDriverTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(cuda_driver(), nullptr) << cuda_driver_status();
    kTestCuda.use_device();
  }
  void TearDown() override {
    if (!TestCuda::real()) kTestCuda.mend();
  }
  const CudaDriver& driver() { return *cuda_driver(); }
};

}  // namespace kt::inline cuda
