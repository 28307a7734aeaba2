#include "formats/format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "formats/known_formats.h"

namespace kt::inline formats {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Format, EveryNameIsFoundAndGivenBack) {
  for (const NamedFormat& entry : kFormats) {
    EXPECT_EQ(format_named(entry.name), entry.format);
    EXPECT_EQ(name_of(entry.format), entry.name);
  }
}

TEST(Format, AnUnknownNameListsTheKnownOnes) {
  try {
    format_named("int5");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("'int5'"));
    for (const NamedFormat& entry : kFormats) EXPECT_THAT(error.what(), HasSubstr(std::string(entry.name)));
  }
}

TEST(Format, ANamelessFormatIsDescribed) {
  const Format format{Code::kU4, 8, Scale::kF32, Min::kNone, {.k = 1024}};
  EXPECT_EQ(name_of(format), "u4-8 * f32 per 1024 columns");
}

TEST(Format, GroupSizesAreThoseOfTheList) {
  EXPECT_THAT(group_sizes(format_named("int4_g64")), ElementsAre(32, 64, 128, 256));
  EXPECT_THAT(group_sizes(format_named("int4_g128_zero")), ElementsAre(32, 64, 128, 256));
  EXPECT_THAT(group_sizes(format_named("int8")), ElementsAre());  // the whole row is no group
  EXPECT_THAT(group_sizes(format_named("mxfp4")), ElementsAre(32));
}

TEST(Format, StoredBitsOfLongRowsAreTheListedOnes) {
  constexpr int64_t n = 128, k = int64_t{1} << 30;
  // A per-row scale costs 32 bits per row, which long rows make vanish.
  for (const NamedFormat& entry : kFormats) {
    EXPECT_NEAR(stored_bits(entry.format, n, k), entry.bits, 1e-6) << entry.name;
  }
}

TEST(Format, StoredBitsOfRealShapes) {
  // hidden 7168, intermediate 2048 in two parts: 3,670,016 bytes of int4 codes, 4,096 bytes of scales.
  EXPECT_DOUBLE_EQ(stored_bits(format_named("int4"), 1024, 7168) * 1024 * 7168 / 8, 3670016 + 4096);
  // The down projection of that: 7168 rows of 1024 columns, 28,672 bytes of scales.
  EXPECT_DOUBLE_EQ(stored_bits(format_named("int4"), 7168, 1024) * 7168 * 1024 / 8, 3670016 + 28672);
  EXPECT_DOUBLE_EQ(stored_bits(format_named("int8"), 2048, 7168) * 2048 * 7168 / 8, 2048 * 7168 + 4 * 2048);
  EXPECT_DOUBLE_EQ(stored_bits(format_named("fp8"), 2048, 7168) * 2048 * 7168 / 8, 2048 * 7168 + 4 * 16 * 56);
  EXPECT_DOUBLE_EQ(stored_bits(format_named("int4_g32"), 2048, 7168), 4.5);
  EXPECT_DOUBLE_EQ(stored_bits(format_named("q4_k"), 2048, 7168), 144.0 * 8 / 256);
  EXPECT_DOUBLE_EQ(stored_bits(format_named("mxfp4"), 2048, 7168), 17.0 * 8 / 32);
}

TEST(Format, StoredBitsCountShortSpansWhole) {
  // 129 x 130 in 128 x 128 blocks: two by two scales.
  EXPECT_DOUBLE_EQ(stored_bits(format_named("fp8"), 129, 130) * 129 * 130, 129 * 130 * 8 + 4 * 32);
}

}  // namespace
}  // namespace kt::inline formats
