// Kernels on the test driver: threads of a block run in the orders that seeds choose, wait for each other where they
// say so, and what they forget is found out. Not for a GPU.
#include <cmath>
#include <cstdlib>

#include "cuda/testing/driver_fixture.h"

namespace kt::inline cuda {
namespace {

class BlockRunnerTest : public CudaDriverTest {
 protected:
  void SetUp() override {
    if (TestCuda::real()) GTEST_SKIP() << "kernels of the test driver";
    CudaDriverTest::SetUp();
  }
  void TearDown() override {
    ::unsetenv("KT_TEST_CUDA_SEED");
    CudaDriverTest::TearDown();
  }

  // What a kernel leaves, of two blocks of 128 threads; the error of the wait in `result`.
  static std::vector<float> run(const char* kernel, int seed, CudaResult& result) {
    ::setenv("KT_TEST_CUDA_SEED", std::to_string(seed).c_str(), 1);
    const std::string module = ".version 7.8\n.entry " + std::string(kernel) + "(\n";
    CudaModule loaded = nullptr;
    CudaFunction function = nullptr;
    kTestCuda.call("cuModuleLoadData", &loaded, static_cast<const void*>(module.c_str()));
    kTestCuda.call("cuModuleGetFunction", &function, loaded, kernel);
    const TestStream stream;
    const DeviceArray<float> out(std::vector<float>(256, -1));
    float* address = out.data();
    void* arguments[] = {&address};
    kTestCuda.call("cuLaunchKernel", function, 2u, 1u, 1u, 128u, 1u, 1u, 0u, static_cast<CudaStream>(stream),
                   static_cast<void**>(arguments), static_cast<void**>(nullptr));
    result = kTestCuda.ask("cuStreamSynchronize", static_cast<CudaStream>(stream));
    if (result != 0) kTestCuda.mend();
    return out.read();
  }
};

TEST_F(BlockRunnerTest, ABarrierIsWaitedForInEveryOrder) {
  for (int seed = 0; seed < 20; ++seed) {
    CudaResult result = 0;
    for (const float value : run("kt_test_barrier", seed, result)) ASSERT_EQ(value, 127) << "seed " << seed;
    ASSERT_EQ(result, 0);
  }
}

TEST_F(BlockRunnerTest, AMissingBarrierShows) {
  int wrong = 0;
  for (int seed = 0; seed < 20; ++seed) {
    CudaResult result = 0;
    for (const float value : run("kt_test_no_barrier", seed, result)) wrong += !(value == 127);
  }
  EXPECT_GT(wrong, 20 * 64);  // half of the threads read what is not there yet, and that is NaN
}

TEST_F(BlockRunnerTest, ABarrierThatSomeDoNotReachEndsTheContext) {
  CudaResult result = 0;
  run("kt_test_uneven_barrier", 1, result);
  EXPECT_EQ(result, 719);
}

TEST_F(BlockRunnerTest, ShufflesAddUpAWarp) {
  CudaResult result = 0;
  const std::vector<float> out = run("kt_test_shuffle", 3, result);
  for (int i = 0; i < 128; ++i) {
    float sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += static_cast<float>(i / 32 * 32 + lane);
    EXPECT_EQ(out[static_cast<size_t>(i)], sum);
  }
}

TEST_F(BlockRunnerTest, WarpsWaitForTheirOwn) {
  for (int seed = 0; seed < 20; ++seed) {
    CudaResult result = 0;
    const std::vector<float> out = run("kt_test_warp_barrier", seed, result);
    ASSERT_EQ(result, 0);
    for (int i = 0; i < 256; ++i)
      ASSERT_EQ(out[static_cast<size_t>(i)], static_cast<float>(i % 128 / 32 * 64 + 31)) << "seed " << seed;
  }
}

TEST_F(BlockRunnerTest, PairsOfBf16AreMultipliedAndAdded) {
  CudaResult result = 0;
  const std::vector<float> out = run("kt_test_fma_bf16", 1, result);
  for (int i = 0; i < 128; ++i) {
    EXPECT_EQ(out[static_cast<size_t>(i)], static_cast<float>(2 * i + 1));
    EXPECT_EQ(out[static_cast<size_t>(128 + i)], static_cast<float>(i)) << "of subnormal numbers";
  }
}

TEST_F(BlockRunnerTest, ProductsOfAWarpBeginAtOtherSums) {
  CudaResult result = 0;
  const std::vector<float> out = run("kt_test_multiply_from", 2, result);
  for (int i = 0; i < 256; ++i) {
    const int lane = i % 32, columns = 2 * (2 * (lane % 4) + 1 + 2 * (lane % 4) + 2);
    EXPECT_EQ(out[static_cast<size_t>(i)], static_cast<float>(4 * lane + 16 * columns));
  }
}

TEST_F(BlockRunnerTest, DeviceMemoryIsClosedToTheHostAgain) {
  const DeviceArray<float> memory(16);
  CudaResult result = 0;
  run("kt_test_shuffle", 1, result);
  EXPECT_DEATH({ *const_cast<volatile float*>(memory.data()) = 1; }, "");
}

}  // namespace
}  // namespace kt::inline cuda
