#include "base/error.h"

#include <gmock/gmock.h>

namespace kt::inline base {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST(Error, FailIsTheCallersFault) {
  try {
    fail("{}: expected {}, got {}", "weight", 3, 4);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInput);
    EXPECT_STREQ(e.what(), "weight: expected 3, got 4");
  }
}

TEST(Error, FailAsKeepsTheKind) {
  for (const ErrorKind kind : {ErrorKind::kMemory, ErrorKind::kUnsupported, ErrorKind::kInternal}) {
    try {
      fail_as(kind, "no");
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), kind);
    }
  }
}

TEST(Error, CheckNamesPlaceConditionAndMessage) {
  try {
    KT_CHECK(1 + 1 == 3, "sum of {}", 1);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInternal);
    EXPECT_THAT(e.what(), StartsWith("base/error_test.cc:"));
    EXPECT_THAT(e.what(), HasSubstr("check failed: 1 + 1 == 3: sum of 1"));
  }
  EXPECT_THROW(KT_CHECK(false), Error);
}

TEST(Error, CheckThatHoldsEvaluatesNoArgument) {
  int calls = 0;
  KT_CHECK(true, "{}", ++calls);
  EXPECT_EQ(calls, 0);
}

TEST(Error, CheckIsOneStatement) {
  if (true)
    KT_CHECK(true);
  else
    KT_CHECK(false);
  KT_DCHECK(true, "{}", 1);
}

}  // namespace
}  // namespace kt::inline base
