#include "base/function_ref.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace kt::inline base {
namespace {

int twice(int x) { return 2 * x; }
int apply(FunctionRef<int(int)> f, int x) { return f(x); }

struct Counter {
  int calls = 0;
  int operator()(int x) {
    ++calls;
    return x;
  }
};

TEST(FunctionRef, TakesFunctionsPointersAndLambdas) {
  EXPECT_EQ(apply(twice, 3), 6);
  EXPECT_EQ(apply(&twice, 3), 6);
  int (*const pointer)(int) = twice;
  EXPECT_EQ(apply(pointer, 4), 8);
  const int y = 5;
  EXPECT_EQ(apply([&](int x) { return x + y; }, 1), 6);
}

TEST(FunctionRef, RefersAndDoesNotCopy) {
  Counter counter;
  EXPECT_EQ(apply(counter, 7), 7);
  FunctionRef<int(int)> ref = counter;
  const FunctionRef<int(int)> copy = ref;
  copy(1);
  EXPECT_EQ(counter.calls, 2);
}

TEST(FunctionRef, ForwardsMoveOnlyAndReferences) {
  const auto take = [](std::unique_ptr<int> p, std::string& s) { s = std::to_string(*p); };
  const FunctionRef<void(std::unique_ptr<int>, std::string&)> ref = take;
  std::string s;
  ref(std::make_unique<int>(9), s);
  EXPECT_EQ(s, "9");
}

}  // namespace
}  // namespace kt::inline base
