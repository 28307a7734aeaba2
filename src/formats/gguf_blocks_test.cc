#include "formats/gguf_blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <string>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "formats/floats.h"

// Bit-exactness with the reference implementation is tests/formats_gguf_test.py; here are layouts by hand,
// the round trip and the errors.
namespace kt::inline formats {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::vector<GgufType> kTypes = {
    GgufType::kF32,    GgufType::kF16,     GgufType::kBF16,   GgufType::kQ4_0,  GgufType::kQ4_1,
    GgufType::kQ5_0,   GgufType::kQ5_1,    GgufType::kQ8_0,   GgufType::kQ2_K,  GgufType::kQ3_K,
    GgufType::kQ4_K,   GgufType::kQ5_K,    GgufType::kQ6_K,   GgufType::kMXFP4, GgufType::kIQ4_NL,
    GgufType::kIQ4_XS, GgufType::kIQ2_XXS, GgufType::kIQ2_XS, GgufType::kIQ2_S, GgufType::kIQ3_XXS,
    GgufType::kIQ3_S,  GgufType::kIQ1_S,   GgufType::kIQ1_M,  GgufType::kNVFP4};

std::span<const std::byte> bytes_of(const std::vector<uint8_t>& bytes) {
  return std::as_bytes(std::span(bytes));
}

TEST(GgufTypes, NumbersNamesAndFormats) {
  for (const GgufType type : kTypes) {
    EXPECT_EQ(gguf_type(static_cast<uint32_t>(type)), type);
    EXPECT_EQ(gguf_type(name_of(type)), type);
    EXPECT_EQ(gguf_type(gguf_format(type)), type);
    // A block's bytes are what the format says it stores.
    EXPECT_DOUBLE_EQ(stored_bits(gguf_format(type), 1, gguf_block_size(type)) * gguf_block_size(type),
                     8.0 * gguf_block_bytes(type))
        << name_of(type);
  }
  EXPECT_EQ(gguf_type(4u), std::nullopt);
  EXPECT_EQ(gguf_type(std::string_view("Q7_K")), std::nullopt);
  EXPECT_EQ(gguf_type(format_named("fp8")), std::nullopt);
}

TEST(GgufBlocks, FourBitBlockByHand) {
  std::vector<uint8_t> block(18);
  block[0] = 0x00, block[1] = 0x38;  // 0.5
  block[2] = 0x3F;                   // column 0: 15, column 16: 3
  const Matrix w = matrix_from_gguf(GgufType::kQ4_0, bytes_of(block), 1, 32);
  EXPECT_EQ(value_at(w.view(), 0, 0), 3.5f);
  EXPECT_EQ(value_at(w.view(), 0, 16), -2.5f);
  EXPECT_EQ(value_at(w.view(), 0, 1), -4.0f);
}

TEST(GgufBlocks, MinIsAddedInTheFile) {
  std::vector<uint8_t> block(20);
  block[1] = 0x3C;                   // d = 1
  block[2] = 0x00, block[3] = 0xC0;  // m = -2
  block[4] = 0x05;
  const Matrix w = matrix_from_gguf(GgufType::kQ4_1, bytes_of(block), 1, 32);
  EXPECT_EQ(min_at(w.view(), 0, 0), 2.0f);
  EXPECT_EQ(value_at(w.view(), 0, 0), 3.0f);
  EXPECT_EQ(value_at(w.view(), 0, 1), -2.0f);
}

TEST(GgufBlocks, SuperBlockByHand) {
  std::vector<uint8_t> block(144);
  block[1] = 0x3C, block[3] = 0x38;  // d = 1, dmin = 0.5
  block[4 + 3] = 0xC0 | 17;          // scale of span 3; top bits of span 7's
  block[12 + 3] = 0x2A;              // span 7: scale's low nibble 10, min's 2
  block[8 + 3] = 0x40;               // top bits of span 7's min: 1
  block[16 + 3 * 32] = 0x90;         // columns 192: 0, 224: 9
  const Matrix w = matrix_from_gguf(GgufType::kQ4_K, bytes_of(block), 1, 256);
  EXPECT_EQ(scale_at(w.view(), 0, 96), 17.0f);
  EXPECT_EQ(scale_at(w.view(), 0, 224), 58.0f);
  EXPECT_EQ(min_at(w.view(), 0, 224), 9.0f);
  EXPECT_EQ(value_at(w.view(), 0, 224), 9 * 58.0f - 9.0f);
}

TEST(GgufBlocks, MinusZeroCodesBecomeZero) {
  std::vector<uint8_t> block(17, 0x88);
  block[0] = 127;
  const Matrix w = matrix_from_gguf(GgufType::kMXFP4, bytes_of(block), 1, 32);
  EXPECT_EQ(std::bit_cast<uint32_t>(value_at(w.view(), 0, 0)), 0u);
}

TEST(GgufBlocks, RandomBytesSurviveTheRoundTrip) {
  std::mt19937 random(5);
  for (const GgufType type : kTypes) {
    const int64_t n = 5, k = 512;
    std::vector<uint8_t> rows(n * k / gguf_block_size(type) * gguf_block_bytes(type));
    for (auto& byte : rows) byte = static_cast<uint8_t>(random());
    const Matrix w = matrix_from_gguf(type, bytes_of(rows), n, k);
    const std::vector<std::byte> again = gguf_from_matrix(type, w.view());
    ASSERT_EQ(again.size(), rows.size());
    if (type != GgufType::kMXFP4 && type != GgufType::kNVFP4) {
      EXPECT_TRUE(std::ranges::equal(again, bytes_of(rows)))
          << name_of(type) << ": every bit has one meaning";
    }
    const Matrix same = matrix_from_gguf(type, again, n, k);
    EXPECT_EQ(same.codes, w.codes);
    EXPECT_EQ(same.scales, w.scales);
    EXPECT_EQ(same.mins, w.mins);
    EXPECT_EQ(same.supers, w.supers);
    EXPECT_EQ(same.super_mins, w.super_mins);
  }
}

TEST(GgufBlocks, QuantisedMatricesFitTheBlocks) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  std::vector<float> values(3 * 512);
  for (float& value : values) value = normal(random);
  for (const GgufType type : kTypes) {
    if (!can_round_to(gguf_format(type))) continue;
    const Matrix w = quantise(gguf_format(type), values, 3, 512);
    const Matrix again = matrix_from_gguf(type, gguf_from_matrix(type, w.view()), 3, 512);
    for (int64_t i = 0; i < 3 * 512; ++i) {
      ASSERT_EQ(value_at(again.view(), i / 512, i % 512), value_at(w.view(), i / 512, i % 512))
          << name_of(type);
    }
  }
}

TEST(GgufBlocks, GridBlockByHand) {
  std::vector<uint8_t> block(66);
  block[1] = 0x3C;          // d = 1
  block[2 + 8] = 1;         // columns 32 to 39: entry 1, 43 and then seven of 8
  block[2 + 8 + 4] = 0x02;  // column 33 is negative, and so column 39 as well
  block[2 + 8 + 7] = 0x50;  // s = 5
  const Matrix w = matrix_from_gguf(GgufType::kIQ2_XXS, bytes_of(block), 1, 256);
  EXPECT_EQ(value_at(w.view(), 0, 32), 43 * 5.5f / 4);
  EXPECT_EQ(value_at(w.view(), 0, 33), -8 * 5.5f / 4);
  EXPECT_EQ(value_at(w.view(), 0, 39), -8 * 5.5f / 4);
  EXPECT_EQ(value_at(w.view(), 0, 40), 8 * 5.5f / 4);
  EXPECT_EQ(value_at(w.view(), 0, 0), 1.0f);
}

TEST(GgufBlocks, WhatGridsCannotStoreIsAnError) {
  const auto encode = [](GgufType type, const Matrix& w) {
    return error_of([&] { gguf_from_matrix(type, w.view(), "x"); });
  };
  const auto zeros = [](GgufType type) {
    const std::vector<uint8_t> block(static_cast<size_t>(gguf_block_bytes(type)));
    return matrix_from_gguf(type, bytes_of(block), 1, 256);
  };
  Matrix w = zeros(GgufType::kIQ2_XXS);
  w.codes[3] = kGridBias + 9;
  EXPECT_THAT(encode(GgufType::kIQ2_XXS, w), AllOf(HasSubstr("x: IQ2_XXS"), HasSubstr("8 numbers")));
  w = zeros(GgufType::kIQ2_XXS);
  w.codes[3] = static_cast<uint8_t>(2 * kGridBias - w.codes[3]);
  EXPECT_THAT(encode(GgufType::kIQ2_XXS, w), HasSubstr("even number of negative"));
  w = zeros(GgufType::kIQ2_S);
  w.codes[3] = static_cast<uint8_t>(2 * kGridBias - w.codes[3]);
  EXPECT_EQ(encode(GgufType::kIQ2_S, w), "no error");
  w.scales[1] = 33;
  EXPECT_THAT(encode(GgufType::kIQ2_S, w), AllOf(HasSubstr("1 to 31"), HasSubstr("33")));
  w = zeros(GgufType::kIQ1_S);
  for (int i = 8; i < 16; ++i) w.codes[static_cast<size_t>(i)] -= 2;
  EXPECT_THAT(encode(GgufType::kIQ1_S, w), HasSubstr("an eighth"));
}

TEST(GgufBlocks, ErrorsSayWhatWasExpected) {
  const std::vector<uint8_t> short_by_one(143);
  EXPECT_THAT(
      error_of([&] { matrix_from_gguf(GgufType::kQ4_K, bytes_of(short_by_one), 1, 256, "blk.3.up"); }),
      AllOf(HasSubstr("blk.3.up"), HasSubstr("expected 144 bytes"), HasSubstr("found 143")));
  EXPECT_THAT(error_of([&] { matrix_from_gguf(GgufType::kQ8_0, bytes_of(short_by_one), 1, 33, "x"); }),
              AllOf(HasSubstr("Q8_0"), HasSubstr("multiple of 32"), HasSubstr("[1, 33]")));
  EXPECT_THAT(
      error_of([&] { matrix_from_gguf(GgufType::kF32, {}, int64_t{1} << 40, int64_t{1} << 40, "x"); }),
      HasSubstr("overflows"));
  const Matrix int8(format_named("int8"), 1, 32);
  EXPECT_THAT(error_of([&] { gguf_from_matrix(GgufType::kQ8_0, int8.view(), "x"); }),
              AllOf(HasSubstr("q8_0"), HasSubstr("int8")));
  Matrix wide(format_named("q4_k"), 1, 256);
  wide.scales[3] = 64;
  EXPECT_THAT(error_of([&] { gguf_from_matrix(GgufType::kQ4_K, wide.view(), "x"); }),
              AllOf(HasSubstr("0 to 63"), HasSubstr("64")));
}

}  // namespace
}  // namespace kt::inline formats
