#include "hybrid/shared_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing/error_of.h"
#include "weights/testing/tiny_model.h"

namespace kt::inline hybrid {
namespace {

using ::testing::HasSubstr;

TEST(SharedExperts, OneOpenSourceForAPath) {
  const TemporaryFolder folder;
  write_tiny_model({}, folder / "bf16");
  const auto a = shared_experts(folder / "bf16");
  EXPECT_EQ(a, shared_experts(folder / "bf16/"));
  EXPECT_EQ(a, shared_experts(folder / "../" + folder.path().substr(folder.path().rfind('/') + 1) + "/bf16"));
  forget_experts(folder / "bf16");
  EXPECT_NE(a, shared_experts(folder / "bf16"));
}

TEST(SharedExperts, NamesWhatIsNotThere) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of([&] { shared_experts(folder / "none"); }), HasSubstr(folder / "none"));
}

}  // namespace
}  // namespace kt::inline hybrid
