#include "weights/dialects/compressed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/error.h"
#include "formats/floats.h"

namespace kt::inline weights {
namespace {

using ::testing::HasSubstr;

struct Packed {
  std::vector<uint32_t> words;
  std::vector<std::byte> scales;
  WeightError error;
};

Packed pack(const PackedSpec& spec, int64_t rows, int64_t k, const std::vector<float>& values) {
  Packed out;
  out.words.resize(static_cast<size_t>(rows * spec.words(k)));
  out.scales.resize(static_cast<size_t>(rows * spec.groups(k)) * spec.scale_bytes());
  quantise_packed_rows(spec, rows, k, values.data(), k, out.words.data(), out.scales.data(), out.error, "w");
  return out;
}

uint32_t scale_bits(const PackedSpec& spec, const Packed& packed, size_t index) {
  uint32_t bits = 0;
  std::memcpy(&bits, packed.scales.data() + index * spec.scale_bytes(), spec.scale_bytes());
  return bits;
}

// What compressed_tensors 0.20.0 (torch 2.13.0, CPU) makes of w[i] = ((37i^2 + 11i + 5) mod 201 - 100) / 64.
struct LibraryRow {
  int bits;
  int64_t group;
  Dtype type;
  std::vector<uint32_t> scales, words;
};
const std::vector<LibraryRow>& library_rows() {
  static const std::vector<LibraryRow> rows = {
      {4,
       16,
       Dtype::kBf16,
       {0x3E4F, 0x3E4B, 0x3E44, 0x3E55},
       {0x7FE3DE41, 0x4ED3EF74, 0xB56C8A30, 0xA57EBE76, 0x2F197B54, 0x414DC0BC, 0xEC1AAFBC, 0x215F1746}},
      {4,
       16,
       Dtype::kF16,
       {0x3277, 0x3255, 0x3222, 0x32AB},
       {0x7FE3DE41, 0x4ED3EF74, 0xB56C8A30, 0xA57EBE76, 0x2F197B54, 0x414DC0BC, 0xEC1AAFBC, 0x215F1746}},
      {4,
       16,
       Dtype::kF32,
       {0x3E4EEEEF, 0x3E4AAAAB, 0x3E444444, 0x3E555555},
       {0x7FE3DE41, 0x4ED3EF74, 0xB56C8A30, 0xA57EBE76, 0x2F197B54, 0x414DC0BC, 0xEC1AAFBC, 0x215F1746}},
      {4,
       0,
       Dtype::kBf16,
       {0x3E4F, 0x3E55},
       {0x7FE3DE41, 0x4ED3EF74, 0xB56C8A31, 0xA67EBE76, 0x3E197B55, 0x414DC1BC, 0xEC1AAFBC, 0x215F1746}},
      {4,
       0,
       Dtype::kF16,
       {0x3277, 0x32AB},
       {0x7FE3DE41, 0x4ED3EF74, 0xB56C8A31, 0xA67EBE76, 0x3E197B55, 0x414DC1BC, 0xEC1AAFBC, 0x215F1746}},
      {4,
       0,
       Dtype::kF32,
       {0x3E4EEEEF, 0x3E555555},
       {0x7FE3DE41, 0x4ED3EF74, 0xB56C8A31, 0xA67EBE76, 0x3E197B55, 0x414DC1BC, 0xEC1AAFBC, 0x215F1746}},
      {8,
       16,
       Dtype::kBf16,
       {0x3C43, 0x3C3F, 0x3C39, 0x3C49},
       {0xDCE24204, 0x6EFFEA2E, 0xEAFF6E3D, 0x42E2DC2E, 0x85AA2400, 0xAC5159C4, 0xB6E8715D, 0xA2556CE6,
        0x6FB34742, 0x1EF40592, 0xC400BAC4, 0x36053BD7, 0x9CF6AFC6, 0xE1C202A0, 0x0A72385E, 0x160654FF}},
      {8,
       16,
       Dtype::kF16,
       {0x2216, 0x21F6, 0x21C6, 0x2246},
       {0xDCE34203, 0x6EFFEA2E, 0xEAFF6E3D, 0x42E3DC2E, 0x85AA2300, 0xAC5159C4, 0xB6E9715D, 0xA2556CE6,
        0x6FB34742, 0x1EF40592, 0xC400BAC4, 0x35053BD7, 0x9CF7AFC6, 0xE1C202A0, 0x0972395E, 0x160653FF}},
      {8,
       16,
       Dtype::kF32,
       {0x3C42C2C3, 0x3C3EBEBF, 0x3C38B8B9, 0x3C48C8C9},
       {0xDCE34203, 0x6EFFEA2F, 0xEAFF6E3D, 0x42E3DC2F, 0x85AA2300, 0xAC5159C4, 0xB6E9715D, 0xA2556CE6,
        0x6FB34742, 0x1EF40592, 0xC400BAC4, 0x35053BD7, 0x9CF7AFC6, 0xE1C202A0, 0x0972395E, 0x160653FF}},
      {8,
       0,
       Dtype::kBf16,
       {0x3C43, 0x3C49},
       {0xDCE24204, 0x6EFFEA2E, 0xEAFF6E3D, 0x42E2DC2E, 0x85A92604, 0xAB525AC3, 0xB4E6725E, 0xA1566CE4,
        0x71AF4C47, 0x26EB0E90, 0xBE0BB6BE, 0x3B0E40D0, 0x9CF6AFC6, 0xE1C202A0, 0x0A72385E, 0x160654FF}},
      {8,
       0,
       Dtype::kF16,
       {0x2216, 0x2246},
       {0xDCE34203, 0x6EFFEA2E, 0xEAFF6E3D, 0x42E3DC2E, 0x85A92503, 0xAB525AC3, 0xB5E7725E, 0xA1566CE4,
        0x71AF4C47, 0x25EB0E91, 0xBE0BB6BE, 0x3B0E40D0, 0x9CF7AFC6, 0xE1C202A0, 0x0972395E, 0x160653FF}},
      {8,
       0,
       Dtype::kF32,
       {0x3C42C2C3, 0x3C48C8C9},
       {0xDCE34203, 0x6EFFEA2F, 0xEAFF6E3D, 0x42E3DC2F, 0x85A92503, 0xAB525AC3, 0xB5E7725E, 0xA1566CE4,
        0x71AF4C47, 0x25EB0F91, 0xBE0BB6BE, 0x3B0F40D0, 0x9CF7AFC6, 0xE1C202A0, 0x0972395E, 0x160653FF}},
  };
  return rows;
}

TEST(Compressed, EqualsTheLibrary) {
  std::vector<float> values(64);
  for (int i = 0; i < 64; ++i)
    values[static_cast<size_t>(i)] = static_cast<float>((37 * i * i + 11 * i + 5) % 201 - 100) / 64;
  for (const LibraryRow& row : library_rows()) {
    const PackedSpec spec{row.bits, row.group, row.type};
    const Packed packed = pack(spec, 2, 32, values);
    EXPECT_EQ(packed.words, row.words) << row.bits << " bits, group " << row.group;
    for (size_t i = 0; i < row.scales.size(); ++i)
      EXPECT_EQ(scale_bits(spec, packed, i), row.scales[i]) << row.bits << " bits, scale " << i;
  }
}

float rounded(Dtype type, float value) {
  if (type == Dtype::kBf16) return to_f32(to_bf16(value));
  if (type == Dtype::kF16) return to_f32(to_f16(value));
  return value;
}

// The header's two lines, one element at a time.
void expect_reference(const PackedSpec& spec, int64_t rows, int64_t k, const std::vector<float>& values) {
  const Packed packed = pack(spec, rows, k, values);
  const int64_t length = spec.group == 0 ? k : spec.group;
  const int half = 1 << (spec.bits - 1);
  const float eps = spec.type == Dtype::kBf16 ? 0x1p-7f : spec.type == Dtype::kF16 ? 0x1p-10f : 0x1p-23f;
  double noise = 0;
  for (int64_t i = 0; i < rows * k; ++i) {
    const int64_t row = i / k, column = i % k, start = i - column % length;
    float largest = 0;
    for (int64_t j = start; j < start + length; ++j)
      largest = std::fmax(largest, std::fabs(rounded(spec.type, values[static_cast<size_t>(j)])));
    float scale = rounded(spec.type, largest / (static_cast<float>(half) - 0.5f));
    if (scale == 0) scale = eps;
    const float given = values[static_cast<size_t>(i)];
    const float quotient = rounded(spec.type, rounded(spec.type, given) / scale);
    const float bounded =
        std::fmin(std::fmax(quotient, static_cast<float>(-half)), static_cast<float>(half - 1));
    const int expected = static_cast<int>(std::nearbyint(bounded));
    const int64_t bit = column * spec.bits;
    const uint32_t word = packed.words[static_cast<size_t>(row * spec.words(k) + bit / 32)];
    const int code = static_cast<int>((word >> (bit % 32)) & ((1u << spec.bits) - 1)) - half;
    ASSERT_EQ(code, expected) << "row " << row << " column " << column << " of " << given << " / " << scale;
    const double difference = static_cast<double>(static_cast<float>(code) * scale - given);
    noise += difference * difference;
  }
  EXPECT_EQ(packed.error.weights, rows * k);
  EXPECT_NEAR(packed.error.noise, noise, noise * 1e-9);
}

TEST(Compressed, EqualsTheReferenceOverTypesGroupsAndSizes) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 1);
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32})
    for (const int bits : {4, 8})
      for (const int64_t group : {0, 1, 7, 16, 128})
        // 1e-7 lies among f16's denormals, where scales round to zero too.
        for (const float size : {1.0f, 1e-4f, 1e-7f}) {
          const int64_t rows = 5, k = group == 0 ? 83 : group * 3;
          std::vector<float> values(static_cast<size_t>(rows * k));
          for (float& value : values) value = normal(random) * size;
          expect_reference({bits, group, type}, rows, k, values);
        }
}

TEST(Compressed, ZerosHaveEpsScalesAndPaddingBitsAreZero) {
  const PackedSpec spec{4, 0, Dtype::kBf16};
  const Packed packed = pack(spec, 1, 5, std::vector<float>(5, -0.0f));
  EXPECT_EQ(scale_bits(spec, packed, 0), 0x3C00u);  // 2^-7
  EXPECT_EQ(packed.words, std::vector<uint32_t>{0x88888});
  EXPECT_EQ(packed.error.noise, 0);
}

TEST(Compressed, RowsDoNotDependOnTheCut) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 0.02f);
  const int64_t rows = 6, k = 96;
  const PackedSpec spec{4, 32, Dtype::kBf16};
  std::vector<float> values(static_cast<size_t>(rows * k));
  for (float& value : values) value = normal(random);
  const Packed whole = pack(spec, rows, k, values);
  for (int64_t row = 0; row < rows; ++row) {
    const Packed one = pack(spec, 1, k, {values.begin() + row * k, values.begin() + (row + 1) * k});
    EXPECT_TRUE(std::equal(one.words.begin(), one.words.end(), whole.words.begin() + row * spec.words(k)));
  }
}

std::string message_of(const PackedSpec& spec, int64_t rows, int64_t k, const std::vector<float>& values) {
  try {
    pack(spec, rows, k, values);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Compressed, RefusesWithNamesAndNumbers) {
  std::vector<float> values(192, 0.5f);
  EXPECT_THAT(message_of({4, 128, Dtype::kBf16}, 1, 192, values),
              HasSubstr("w: group size 128 does not divide its 192 columns; 32, 64 or -1"));
  EXPECT_THAT(message_of({4, 128, Dtype::kBf16}, 1, 9, values),
              HasSubstr("columns; -1 (one scale per row) does"));
  EXPECT_THAT(message_of({3, 0, Dtype::kBf16}, 1, 192, values), HasSubstr("3 bits"));
  EXPECT_THAT(message_of({4, 0, Dtype::kI8}, 1, 192, values), HasSubstr("scales in I8"));
  values[100] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(message_of({4, 32, Dtype::kBf16}, 2, 96, values), HasSubstr("w: row 1, column 4 is nan"));
  values[100] = -std::numeric_limits<float>::infinity();
  EXPECT_THAT(message_of({4, 32, Dtype::kF32}, 2, 96, values), HasSubstr("row 1, column 4 is -inf"));
  values[100] = 65520;
  EXPECT_THAT(message_of({4, 32, Dtype::kF16}, 2, 96, values),
              HasSubstr("row 1, column 4 is 65520, not a finite F16"));
  values[100] = 65519;
  EXPECT_EQ(message_of({4, 32, Dtype::kF16}, 2, 96, values), "");
}

}  // namespace
}  // namespace kt::inline weights
