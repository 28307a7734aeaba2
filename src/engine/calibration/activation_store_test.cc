#include "engine/calibration/activation_store.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>
#include <vector>

#include "base/error.h"

namespace kt::inline engine {
namespace {

TEST(ActivationStore, TheSameRowsFromMemoryAndDisk) {
  const std::string file = testing::TempDir() + "/activation_store_rows";
  constexpr int64_t kRows = 37, kWidth = 5;
  std::vector<int32_t> values(kRows * kWidth);
  std::iota(values.begin(), values.end(), 0);
  const std::vector<int32_t> picks = {36, 0, 1, 2, 7, 9, 10, 7};
  for (const std::string& path : {std::string(), file}) {
    ActivationStore store(kRows, kWidth * sizeof(int32_t), path);
    EXPECT_EQ(store.on_disk(), !path.empty());
    EXPECT_FALSE(std::filesystem::exists(file));  // nothing to clean up after a crash
    store.write(20, 17, values.data() + 20 * kWidth);
    store.write(0, 20, values.data());
    std::vector<int32_t> back(values.size()), picked(picks.size() * kWidth);
    store.read(0, kRows, back.data());
    EXPECT_EQ(back, values);
    store.gather(picks, picked.data());
    for (size_t i = 0; i < picked.size(); ++i)
      EXPECT_EQ(picked[i], picks[i / kWidth] * kWidth + static_cast<int32_t>(i % kWidth));
  }
}

TEST(ActivationStore, AFolderThatIsNotThere) {
  EXPECT_THROW(ActivationStore(1, 4, testing::TempDir() + "/no/such/folder/x"), Error);
}

}  // namespace
}  // namespace kt::inline engine
