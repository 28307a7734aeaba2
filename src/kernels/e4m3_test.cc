// The look-up of E4M3 codes as bf16 (isa/avx512.h) in plain C++, by its definition: every code, every place
// in a step.
#include <gtest/gtest.h>

#include "formats/floats.h"
#include "formats/layout.h"

#define KT_ISA_NAMESPACE kt_e4m3_test
#define KT_STEP_BYTES 4
#define KT_UNSIGNED_BYTES true
#include "kernels/isa/amx_emulated.h"

namespace kt_e4m3_test {
namespace {

using Isa = PortableBf16;

// Byte tables of the magnitudes and the sign put into the high byte make the bf16 nearest to value * scale.
TEST(E4m3, BytesOfEveryCode) {
  for (const float scale : {1.0f, -1.0f, 0.0123f, -3.7e-5f, 1e30f, 1e-30f, 0.0f}) {
    const Isa::E4m3Table table = Isa::e4m3_table(scale);
    for (int first = 0; first < 256; first += 64) {
      Isa::Bytes codes, out[2];
      for (int i = 0; i < 64; ++i) codes.v[i] = static_cast<uint8_t>(first + i);
      Isa::e4m3_bf16(table, codes, out);
      for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 4; ++k) {
          const uint8_t code =
              codes.v[kt::row_byte(kt::Code::kE4m3, 4, row) + kt::column_byte(kt::Code::kE4m3, 4, k)];
          if (kt::is_nan_e4m3(code)) continue;
          const uint16_t have = u16_at(out[k / 2].v + row * 4 + k % 2 * 2);  // the packed order of bf16 codes
          ASSERT_EQ(have, kt::to_bf16(kt::e4m3_to_f32(code) * scale).bits)
              << "code " << int{code} << ", scale " << scale;
        }
    }
  }
}

// In f32: a column of a step, value * 2^-8.
TEST(E4m3, ColumnsOfAStep) {
  Isa::Bytes codes;
  for (int i = 0; i < 64; ++i) codes.v[i] = static_cast<uint8_t>(i * 37 + 11);
  const Isa::F32 columns[] = {Isa::column_e4m3<0>(codes), Isa::column_e4m3<1>(codes),
                              Isa::column_e4m3<2>(codes), Isa::column_e4m3<3>(codes)};
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 4; ++k) {
      const uint8_t code =
          codes.v[kt::row_byte(kt::Code::kE4m3, 4, row) + kt::column_byte(kt::Code::kE4m3, 4, k)];
      if (kt::is_nan_e4m3(code)) continue;
      EXPECT_EQ(columns[k].v[row] * 256, kt::e4m3_to_f32(code)) << row << " " << k;
    }
}

TEST(E4m3, ScalesThatAreEqual) {
  Isa::F32 scales = Isa::set1(0.5f);
  EXPECT_TRUE(Isa::all_equal(scales));
  scales.v[15] = 0;
  EXPECT_FALSE(Isa::all_equal(scales));
}

}  // namespace
}  // namespace kt_e4m3_test
