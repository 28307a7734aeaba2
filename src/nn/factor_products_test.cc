// Products with low-rank factors and their gradients, f32 and bf16, against sums in double precision.
#include "nn/factor_products.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/memory.h"
#include "base/text.h"
#include "kernels/testing/activations.h"
#include "kernels/testing/emulated_tiles.h"
#include "kernels/testing/tables.h"

namespace kt::inline nn {
namespace {

// f32 sums of some hundred terms; two operands rounded to 8 bits.
constexpr double kInF32 = 5e-6, kInBf16 = 6e-3;

// Every table in f32, and those with a product of bf16 in that too.
template <typename Check>
void for_each(Check check) {
  std::vector<const Kernels*> tables = tables_under_test();
  if (emulated_tiles()) tables.push_back(emulated_tiles());
  int bf16 = 0;
  for (const Kernels* table : tables)
    for (const bool wanted : {false, true}) {
      const FactorProducts products(*table, wanted);
      if (wanted && !products.bf16()) continue;
      bf16 += wanted;
      check(products, text("{}, {}", table->name, wanted ? "bf16" : "f32"), wanted ? kInBf16 : kInF32);
    }
  std::printf("in bf16: %d tables\n", bf16);
}

double relative(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(got[i] - want[i], 2);
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

Buffer memory_of(size_t bytes) { return Buffer(std::max<size_t>(bytes, 64)); }

// A factor as it lies and turned, in one piece or in parts of K.
TEST(FactorProducts, MultiplyByAFactorEitherWay) {
  constexpr int kM = 37, kK = 75, kLanes = 41, kBlocks = 4;
  const auto a = random_rows(kM, kK, 1), f = random_rows(kK, kLanes, 2);
  for_each([&](const FactorProducts& products, const std::string& what, double bar) {
    for (const bool across : {false, true}) {
      std::vector<float> from(f.size());
      std::vector<double> want(static_cast<size_t>(kM) * kBlocks * kBlockRows);
      for (int k = 0; k < kK; ++k)
        for (int lane = 0; lane < kLanes; ++lane) {
          from[across ? lane * kK + k : k * kLanes + lane] = f[k * kLanes + lane];
          for (int i = 0; i < kM; ++i)
            want[i * kBlocks * kBlockRows + lane] += double{a[i * kK + k]} * f[k * kLanes + lane];
        }
      Buffer turned = memory_of(static_cast<size_t>(kBlocks * products.block_bytes(kK)));
      Buffer scratch = memory_of(products.product_bytes(kM, kK));
      std::ranges::fill(turned.bytes(), std::byte{0x7F});
      for (const auto& [first, count] : {std::pair{48, kK - 48}, {0, 48}})
        products.turn({.from = from.data() + int64_t{first} * (across ? 1 : kLanes),
                       .k_step = across ? 1 : kLanes,
                       .lane_step = across ? kK : 1,
                       .k = count,
                       .lanes = kLanes,
                       .blocks = kBlocks,
                       .k_pad = first ? round_up(kK, kChunk) - first : count,
                       .out = turned.data() + first * products.row_bytes(),
                       .out_stride = products.block_bytes(kK)});
      std::vector<float> out(want.size(), NAN);
      products.multiply({.a = a.data(),
                         .a_stride = kK,
                         .m = kM,
                         .k = kK,
                         .turned = turned.data(),
                         .blocks = kBlocks,
                         .out = out.data(),
                         .out_stride = kBlocks * kBlockRows},
                        scratch.data());
      EXPECT_LT(relative(out, want), bar) << what << (across ? ", across" : "");
    }
  });
}

// More rows than are summed at once, columns of a and of b that end anywhere, both orders of the result.
TEST(FactorProducts, OuterSumsAreAddedTo) {
  constexpr int kRows = FactorProducts::kMostRows + 77;
  for (const auto& [narrow, wide] : {std::pair{8, 300}, {40, 70}, {5, 31}}) {
    const auto a = random_rows(kRows, narrow, 3), b = random_rows(kRows, wide, 4);
    std::vector<int32_t> index;
    for (int t = 0; t < kRows; ++t) index.push_back((t * 7 + 3) % kRows);
    for_each([&](const FactorProducts& products, const std::string& what, double bar) {
      Buffer scratch = memory_of(products.sum_bytes(narrow));
      for (const bool strided : {false, true}) {
        std::vector<float> out(static_cast<size_t>(narrow) * wide, 2.0f);
        std::vector<double> want(out.size(), 2.0);
        for (int t = 0; t < kRows; ++t)
          for (int i = 0; i < narrow; ++i)
            for (int c = 0; c < wide; ++c)
              want[strided ? c * narrow + i : i * wide + c] +=
                  0.5 * a[t * narrow + i] * double{b[index[t] * wide + c]};
        products.outer_sum({.a = a.data(),
                            .a_ld = narrow,
                            .a_columns = narrow,
                            .b = b.data(),
                            .b_ld = wide,
                            .b_columns = wide,
                            .index = index.data(),
                            .rows = kRows,
                            .factor = 0.5f,
                            .out = out.data(),
                            .out_ld = strided ? 1 : wide,
                            .out_step = strided ? narrow : 1},
                           scratch.data());
        EXPECT_LT(relative(out, want), bar) << what << ", " << narrow << " x " << wide;
      }
    });
  }
}

}  // namespace
}  // namespace kt::inline nn
