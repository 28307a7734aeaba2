#include "kernels/pack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>

#include "formats/known_formats.h"
#include "kernels/testing/matrices.h"

namespace kt::inline kernels {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr Fragment kFragments[] = {{4, true}, {8, false}};

// Bit for bit: packing moves codes and scales, and may widen a scale to f32, which is exact.
void expect_same_values(const Packed& packed, const MatrixView& w, int64_t first_column) {
  for (int64_t row = 0; row < packed.packing.n; ++row)
    for (int64_t k = 0; k < packed.packing.k; ++k) {
      const float want = value_at(w, row, first_column + k);
      const float have = packed_value(packed.packing, packed.memory.as(), row, k);
      ASSERT_EQ(std::bit_cast<uint32_t>(have), std::bit_cast<uint32_t>(want))
          << packed.packing.describe() << " at row " << row << ", column " << k << ": " << have << " for "
          << want;
    }
}

TEST(Pack, KeepsEveryValueOfEveryFormat) {
  for (const NamedFormat& named : kFormats)
    for (const Fragment& fragment : kFragments)
      for (const int64_t n : {1, 16, 17, 37})
        for (const int64_t k : {1, 30, 63, 64, 65, 96, 130, 200, 777}) {
          const Matrix w = random_matrix(named.format, n, fitting_columns(named.format, k), 1);
          const Packed packed(w.view(), fragment);
          expect_same_values(packed, w.view(), 0);
          ASSERT_TRUE(packed.memory.intact()) << packed.packing.describe();
          ASSERT_EQ(packed.packing.block_bytes % 64, 0u) << packed.packing.describe();
          ASSERT_EQ(packed.packing.header_bytes % 64, 0) << packed.packing.describe();
        }
}

TEST(Pack, PaddingIsZero) {
  for (const NamedFormat& named : kFormats)
    for (const Fragment& fragment : kFragments) {
      const Matrix w = random_matrix(named.format, 19, fitting_columns(named.format, 130), 2);
      const Packed packed(w.view(), fragment);
      for (int64_t row = 19; row < 32; ++row)
        for (int64_t k = 0; k < packed.packing.k_pad; ++k)
          ASSERT_EQ(packed_value(packed.packing, packed.memory.as(), row, k), 0.0f)
              << packed.packing.describe() << " row " << row << ", column " << k;
    }
}

// A cut at the format's granularity packs the same values as that part of the whole.
TEST(Pack, CutsColumns) {
  for (const NamedFormat& named : kFormats)
    for (const Fragment& fragment : kFragments) {
      const Format& format = named.format;
      const int64_t k = fitting_columns(format, 640);
      const Matrix w = random_matrix(format, 18, k, 3);
      const int cut = column_granularity(format, k);
      ASSERT_EQ(cut % kChunk, 0) << named.name;
      ASSERT_TRUE(format.span.k == 0 || cut % format.span.k == 0) << named.name;
      for (const int64_t first : {int64_t{cut}, int64_t{2} * cut})
        for (const int64_t columns : {std::min<int64_t>(cut, k - first), k - first})
          if (columns > 0) expect_same_values(Packed(w.view(), fragment, first, columns), w.view(), first);
    }
}

// Codes, scales and mins come back as they were, and nothing else of the plain matrix is written.
void expect_unpacked(const Packed& packed, const Matrix& w, int64_t first_column) {
  const Packing& p = packed.packing;
  for (int64_t block = 0; block < p.blocks; ++block) {
    const int64_t rows = std::min<int64_t>(kBlockRows, p.n - block * kBlockRows);
    Matrix out(unpacked_format(p), rows, w.k);
    std::ranges::fill(out.codes, uint8_t{0xA5});
    unpack_block(p, packed.memory.as() + static_cast<size_t>(block) * p.block_bytes, rows, first_column, out);
    const int size = code_bytes(w.format.code);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t k = 0; k < w.k; ++k) {
        const bool inside = k >= first_column && k < first_column + p.k;
        for (int byte = 0; byte < size; ++byte)
          ASSERT_EQ(out.codes[(row * w.k + k) * size + byte],
                    inside ? w.codes[((block * kBlockRows + row) * w.k + k) * size + byte] : 0xA5)
              << p.describe() << " row " << row << ", column " << k;
        if (!inside) continue;
        const float want = value_at(w.view(), block * kBlockRows + row, k),
                    have = value_at(out.view(), row, k);
        ASSERT_EQ(std::bit_cast<uint32_t>(have), std::bit_cast<uint32_t>(want)) << p.describe();
      }
  }
}

TEST(Pack, UnpacksWhatItPacked) {
  for (const NamedFormat& named : kFormats)
    for (const Fragment& fragment : kFragments)
      for (const int64_t n : {1, 37, 130})
        for (const int64_t k : {30, 64, 96, 200}) {
          const Matrix w = random_matrix(named.format, n, fitting_columns(named.format, k), 5);
          expect_unpacked(Packed(w.view(), fragment), w, 0);
        }
}

TEST(Pack, UnpacksCutColumns) {
  for (const NamedFormat& named : kFormats)
    for (const Fragment& fragment : kFragments) {
      const Matrix w = random_matrix(named.format, 18, fitting_columns(named.format, 640), 6);
      const int cut = column_granularity(named.format, w.k);
      expect_unpacked(Packed(w.view(), fragment, cut, std::min<int64_t>(cut, w.k - cut)), w, cut);
    }
}

TEST(Pack, DescribesItself) {
  const Packing p = packing_for(format_named("int4_g128"), 100, 512, {8, false}, "w");
  EXPECT_THAT(p.describe(), AllOf(HasSubstr("int4_g128"), HasSubstr("100x512"), HasSubstr("span 128")));
}

TEST(Pack, NamesWhatItCannotPack) {
  const auto error = [](const Format& format, int64_t n, int64_t k) {
    return error_of([&] { packing_for(format, n, k, {8, false}, "layers.3.up"); });
  };
  EXPECT_THAT(error(format_named("q4_k"), 16, 300),
              AllOf(HasSubstr("layers.3.up"), HasSubstr("256"), HasSubstr("300")));
  EXPECT_THAT(error(format_named("int8"), 0, 64), AllOf(HasSubstr("layers.3.up"), HasSubstr("[0, 64]")));
  EXPECT_THAT(error(format_named("int8"), 16, 0), HasSubstr("layers.3.up"));
  EXPECT_THAT(error(format_named("int8"), 16, int64_t{1} << 25),
              AllOf(HasSubstr("layers.3.up"), HasSubstr("33554432")));
  EXPECT_THAT(error(format_named("int8"), 16, 70000),
              AllOf(HasSubstr("layers.3.up"), HasSubstr("70000"), HasSubstr("65536")));
  // spans that no step divides, formats without a kernel, and a bias besides zero points
  EXPECT_THAT(error({Code::kU4, 8, Scale::kF16, Min::kNone, {.k = 24}}, 16, 240),
              AllOf(HasSubstr("layers.3.up"), HasSubstr("24")));
  EXPECT_THAT(error({Code::kU6, 32, Scale::kF32, Min::kNone, {}}, 16, 64),
              AllOf(HasSubstr("layers.3.up"), HasSubstr("no kernel")));
  EXPECT_THAT(error({Code::kU4, 8, Scale::kF16, Min::kZero, {.k = 32}}, 16, 64),
              AllOf(HasSubstr("layers.3.up"), HasSubstr("bias")));
}

TEST(Pack, RefusesAMatrixOfAnotherShape) {
  const Matrix w = random_matrix(format_named("int8"), 16, 128, 4);
  const Packing p = packing_for(format_named("int8"), 16, 128, {8, false}, "w");
  std::vector<std::byte> out(p.block_bytes);
  EXPECT_THAT(error_of([&] { pack_block(p, w.view(), 64, 0, out.data()); }), HasSubstr("at column 64"));
}

}  // namespace
}  // namespace kt::inline kernels
