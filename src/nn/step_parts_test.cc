#include "nn/step_parts.h"

#include <gtest/gtest.h>

#include <thread>

namespace kt::inline nn {
namespace {

void busy(StepParts& parts, size_t index, int milliseconds, double bytes) {
  const StepParts::Scope scope(&parts, index);
  parts.count({.bytes = bytes});
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

TEST(StepParts, AddUpByName) {
  StepParts parts;
  const size_t experts = parts.index("experts"), head = parts.index("head");
  EXPECT_EQ(parts.index("experts"), experts);
  busy(parts, experts, 4, 100);
  busy(parts, experts, 4, 50);
  busy(parts, head, 2, 7);
  parts.count({.bytes = 1000});  // outside of all
  const StepPart &first = parts.all()[experts], &second = parts.all()[head];
  EXPECT_EQ(first.calls, 2u);
  EXPECT_EQ(first.amount.bytes, 150);
  EXPECT_GE(first.seconds, 0.008);
  EXPECT_EQ(second.calls, 1u);
  EXPECT_EQ(second.amount.bytes, 7);
}

TEST(StepParts, InsideAnotherItIsThatOnes) {
  StepParts parts;
  const size_t outer = parts.index("router"), inner = parts.index("linear");
  {
    const StepParts::Scope scope(&parts, outer);
    busy(parts, inner, 1, 5);
  }
  EXPECT_EQ(parts.all()[outer].amount.bytes, 5);
  EXPECT_EQ(parts.all()[outer].calls, 1u);
  EXPECT_EQ(parts.all()[inner].calls, 0u);
  EXPECT_EQ(parts.all()[inner].seconds, 0);
}

TEST(StepParts, Since) {
  StepParts parts;
  busy(parts, parts.index("a"), 1, 5);
  busy(parts, parts.index("idle"), 1, 5);
  const std::vector<StepPart> before = parts.all();
  busy(parts, parts.index("a"), 1, 6);
  busy(parts, parts.index("new"), 1, 7);
  const std::vector<StepPart> since = parts_since(before, parts.all());
  ASSERT_EQ(since.size(), 2u);
  EXPECT_EQ(since[0].name, "a");
  EXPECT_EQ(since[0].amount.bytes, 6);
  EXPECT_EQ(since[0].calls, 1u);
  EXPECT_EQ(since[1].name, "new");
  EXPECT_EQ(since[1].amount.bytes, 7);
}

}  // namespace
}  // namespace kt::inline nn
