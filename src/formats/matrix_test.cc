#include "formats/matrix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "formats/floats.h"
#include "formats/known_formats.h"

namespace kt::inline formats {
namespace {

using testing::AllOf;
using testing::HasSubstr;

template <class T>
void put(std::vector<uint8_t>& bytes, size_t index, T value) {
  ASSERT_LE((index + 1) * sizeof(T), bytes.size());
  std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
}

// Random codes, scales, mins: all finite, both signs where the type has them.
Matrix random_matrix(const Format& format, int64_t n, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  Matrix out(format, n, k);
  const auto half = [&] { return to_f16((static_cast<float>(random() % 2000) - 1000) / 700); };
  const uint32_t mask = (1u << std::min(8, code_bits(format.code))) - 1;
  for (auto& byte : out.codes)
    byte = static_cast<uint8_t>(random() & mask & (code_bits(format.code) > 8 ? 0x3F : 0xFF));
  if (format.code == Code::kE4m3) {
    for (auto& code : out.codes) code = is_nan_e4m3(code) ? 0 : code;
  }
  for (size_t i = 0; i < out.scales.size() / std::max(1, scale_bytes(format.scale)); ++i) {
    switch (format.scale) {
      case Scale::kF32:
        put(out.scales, i, to_f32(half()));
        break;
      case Scale::kBf16:
        put(out.scales, i, to_bf16(to_f32(half())));
        break;
      case Scale::kF16:
        put(out.scales, i, half());
        break;
      case Scale::kE4m3:
        out.scales[i] = static_cast<uint8_t>(random() % 127);
        break;
      default:
        out.scales[i] = static_cast<uint8_t>(random() % 255);
    }
  }
  for (size_t i = 0; i < out.mins.size() / std::max(1, min_bytes(format.min)); ++i) {
    if (format.min == Min::kF16) {
      put(out.mins, i, half());
    } else {
      out.mins[i] = static_cast<uint8_t>(random() % 64);
    }
  }
  for (size_t i = 0; i < out.supers.size() / 2; ++i) put(out.supers, i, half());
  for (size_t i = 0; i < out.super_mins.size() / 2; ++i) put(out.super_mins, i, half());
  return out;
}

TEST(Matrix, SizesOfArrays) {
  const Matrix fp8(format_named("fp8"), 129, 130);
  EXPECT_EQ(fp8.codes.size(), 129u * 130);
  EXPECT_EQ(fp8.scales.size(), 2u * 2 * 4);
  const Matrix q2(format_named("q2_k"), 3, 512);
  EXPECT_EQ(q2.scales.size(), 3u * 32);
  EXPECT_EQ(q2.mins.size(), 3u * 32);
  EXPECT_EQ(q2.supers.size(), 3u * 2 * 2);
  EXPECT_EQ(q2.super_mins.size(), 3u * 2 * 2);
  const Matrix plain(format_named("f32"), 3, 5);
  EXPECT_EQ(plain.codes.size(), 3u * 5 * 4);
  EXPECT_EQ(plain.view().scales, nullptr);
  EXPECT_EQ(spans(format_named("int4_g32"), 33), 2);
  EXPECT_EQ(spans(format_named("int8"), 33), 1);
}

TEST(Matrix, ShapesThatCannotBe) {
  EXPECT_THAT(error_of([] { check_shape(format_named("q4_k"), 2, 260, "blk.1"); }),
              AllOf(HasSubstr("blk.1"), HasSubstr("q4_k"), HasSubstr("256"), HasSubstr("[2, 260]")));
  EXPECT_THAT(error_of([] { check_shape(format_named("int8"), 0, 5, "empty"); }), HasSubstr("[0, 5]"));
  EXPECT_THAT(error_of([] { check_shape(format_named("int8"), 5, -1, "less"); }), HasSubstr("[5, -1]"));
  EXPECT_THAT(error_of([] { check_shape(format_named("int8"), int64_t{1} << 40, int64_t{1} << 40, "big"); }),
              AllOf(HasSubstr("big"), HasSubstr("overflows")));
  for (const NamedFormat& entry : kFormats) {
    EXPECT_EQ(error_of([&] { check_shape(entry.format, 129, entry.format.span.super_k ? 256 : 131, "w"); }),
              "no error")
        << entry.name;
  }
}

// Hand-computed: (code - bias) * scale - min.
TEST(Matrix, ValuesByHand) {
  Matrix int8(format_named("int8"), 1, 2);
  int8.codes = {0x80, 0x7F};
  put(int8.scales, 0, 0.25f);
  EXPECT_EQ(value_at(int8.view(), 0, 0), -32.0f);
  EXPECT_EQ(value_at(int8.view(), 0, 1), 31.75f);

  Matrix group(format_named("int4_g32"), 1, 33);
  group.codes[31] = 0, group.codes[32] = 15;
  put(group.scales, 0, to_bf16(0.5f));
  put(group.scales, 1, to_bf16(2.0f));
  EXPECT_EQ(value_at(group.view(), 0, 31), -4.0f);
  EXPECT_EQ(value_at(group.view(), 0, 32), 14.0f);

  Matrix zero(format_named("int4_g32_zero"), 1, 1);
  zero.codes[0] = 3, zero.mins[0] = 5;
  put(zero.scales, 0, to_f16(0.5f));
  EXPECT_EQ(value_at(zero.view(), 0, 0), -1.0f);
  EXPECT_EQ(min_at(zero.view(), 0, 0), 2.5f);

  Matrix fp8(format_named("fp8"), 130, 129);
  fp8.codes[129 * 129 + 128] = 0x38;  // 1.0
  put(fp8.scales, 3, 3.0f);
  EXPECT_EQ(value_at(fp8.view(), 129, 128), 3.0f);

  Matrix mx(format_named("mxfp4"), 1, 2);
  mx.codes = {7, 9};  // 6 and -0.5
  mx.scales[0] = 130;
  EXPECT_EQ(value_at(mx.view(), 0, 0), 48.0f);
  EXPECT_EQ(value_at(mx.view(), 0, 1), -4.0f);
  mx.scales[0] = 0;
  EXPECT_EQ(value_at(mx.view(), 0, 0), std::ldexp(6.0f, -127));

  Matrix q41(format_named("q4_1"), 1, 1);
  q41.codes[0] = 15;
  put(q41.scales, 0, to_f16(0.5f));
  put(q41.mins, 0, to_f16(-1.25f));
  EXPECT_EQ(value_at(q41.view(), 0, 0), 8.75f);

  Matrix q5k(format_named("q5_k"), 1, 256);
  q5k.codes[255] = 31, q5k.scales[7] = 63, q5k.mins[7] = 2;
  put(q5k.supers, 0, to_f16(0.5f));
  put(q5k.super_mins, 0, to_f16(0.25f));
  EXPECT_EQ(value_at(q5k.view(), 0, 255), 31 * 31.5f - 0.5f);

  Matrix q6k(format_named("q6_k"), 1, 256);
  q6k.codes[16] = 0, q6k.scales[1] = static_cast<uint8_t>(-128);
  put(q6k.supers, 0, to_f16(0.5f));
  EXPECT_EQ(value_at(q6k.view(), 0, 16), 2048.0f);

  Matrix iq4(format_named("iq4_nl"), 1, 2);
  iq4.codes = {0, 15};
  put(iq4.scales, 0, to_f16(2.0f));
  EXPECT_EQ(value_at(iq4.view(), 0, 0), -254.0f);
  EXPECT_EQ(value_at(iq4.view(), 0, 1), 226.0f);
}

TEST(Matrix, DequantiseIsValueAtBitForBit) {
  for (const NamedFormat& entry : kFormats) {
    const int64_t n = 131, k = entry.format.span.super_k ? 512 : 197;
    const Matrix w = random_matrix(entry.format, n, k, 7);
    std::vector<float> all(n * k);
    dequantise(w.view(), all);
    for (int64_t i = 0; i < n * k; ++i) {
      const float one = value_at(w.view(), i / k, i % k);
      ASSERT_EQ(std::bit_cast<uint32_t>(all[i]), std::bit_cast<uint32_t>(one)) << entry.name << " " << i;
    }
    EXPECT_EQ(error_of([&] { check_finite(w.view(), "w"); }), "no error") << entry.name;
  }
}

TEST(CheckFinite, NamesTensorRowAndColumn) {
  const auto found = [](const Matrix& w) { return error_of([&] { check_finite(w.view(), "blk.7.up"); }); };
  Matrix fp8(format_named("fp8"), 3, 200);
  fp8.codes[2 * 200 + 150] = 0xFF;
  EXPECT_THAT(found(fp8), AllOf(HasSubstr("blk.7.up"), HasSubstr("row 2, column 150"), HasSubstr("code")));
  Matrix mx(format_named("mxfp8"), 3, 64);
  mx.scales[1 * 2 + 1] = 255;
  EXPECT_THAT(found(mx), AllOf(HasSubstr("blk.7.up"), HasSubstr("row 1, column 32"), HasSubstr("scale")));
  Matrix plain(format_named("bf16"), 2, 3);
  put(plain.codes, 5, bf16{0x7F80});
  EXPECT_THAT(found(plain), HasSubstr("row 1, column 2"));
  Matrix q4k(format_named("q4_k"), 2, 512);
  put(q4k.super_mins, 3, f16{0x7C00});
  EXPECT_THAT(found(q4k), AllOf(HasSubstr("min"), HasSubstr("row 1, column 256")));
  Matrix q6k(format_named("q6_k"), 2, 512);
  put(q6k.supers, 1, f16{0xFC00});
  EXPECT_THAT(found(q6k), AllOf(HasSubstr("scale"), HasSubstr("row 0, column 256")));
  Matrix zero(format_named("int4_g32_zero"), 1, 40);
  put(zero.scales, 1, f16{0x7E00});
  EXPECT_THAT(found(zero), AllOf(HasSubstr("scale"), HasSubstr("row 0, column 32")));
  Matrix blocks(format_named("fp8"), 300, 300);
  put(blocks.scales, 4, std::nanf(""));
  EXPECT_THAT(found(blocks), HasSubstr("row 128, column 128"));
}

}  // namespace
}  // namespace kt::inline formats
