// Products of every format from both packings, by the kernels that GPU operations launch, against a double loop over
// the same numbers. On the test driver, or on a GPU with KT_TEST_REAL_CUDA=1.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "base/testing/random_values.h"
#include "base/text.h"
#include "cuda/device.h"
#include "cuda/testing/test_cuda.h"
#include "formats/floats.h"
#include "formats/known_formats.h"
#include "kernels/pack.h"
#include "nn/gpu_weights.h"

namespace kt::inline nn {
namespace {

const char* code_word(Code code) {
  constexpr const char* kWords[] = {"i8",  "u2",   "u3",   "u4",   "u5",  "u6",
                                    "iq4", "e2m1", "e4m3", "bf16", "f16", "f32"};
  return kWords[static_cast<size_t>(code)];
}

struct ProductCase {
  const NamedFormat* format;
  Fragment fragment;
};

class GpuProducts : public testing::TestWithParam<ProductCase> {};

enum class Kernel : uint8_t { kExact, kFew, kMany };

// (x W^T + bias) * factors by a kernel, poisoned where it has to write.
struct ProductRun {
  ProductCase of;
  int64_t n, k;
  int m = 0;
  std::vector<float> values, x, bias, factors, y;

  using Change = void (*)(const Packing& packing, std::byte* blocks);
  ProductRun(const ProductCase& of, int64_t n, int64_t k, int most, unsigned seed, Change change = nullptr);
  // The first `rows` rows of x; a warp of Kernel::kFew takes as many row blocks.
  void run(int rows, Kernel kernel, int blocks = 1);
  // Against a double loop over operands; the bound is of a sum of products with these sizes.
  void check(float (*of_x)(float), float (*of_weights)(float),
             double (*bound)(int64_t k, double sizes, double largest)) const;

 private:
  std::shared_ptr<Gpu> gpu_ = std::make_shared<Gpu>(0);
  GpuStream stream_{gpu_};
  GpuMemory memory_{gpu_, &stream_};
  std::optional<GpuLinear> linear_;
};

ProductRun::ProductRun(const ProductCase& of, int64_t n, int64_t k, int most, unsigned seed, Change change)
    : of(of),
      n(n),
      k(k),
      values(static_cast<size_t>(n * k)),
      x(random_values(static_cast<size_t>(most * (k + 3)), seed + 1)),
      bias(random_values(static_cast<size_t>(n), seed + 2)),
      factors(random_values(static_cast<size_t>(most), seed + 3)) {
  const Format& format = of.format->format;
  const Matrix matrix = quantise(format, random_values(values.size(), seed), n, k);
  dequantise(matrix.view(), values);
  const Packing packing = packing_for(format, n, k, of.fragment, "w");
  std::vector<std::byte> blocks(packing.bytes());
  for (int64_t b = 0; b < packing.blocks; ++b)
    pack_block(packing, matrix.view(), 0, b, blocks.data() + static_cast<size_t>(b) * packing.block_bytes);
  if (change) change(packing, blocks.data());
  linear_.emplace(memory_, packing, blocks, "w");
}

void ProductRun::run(int rows, Kernel kernel, int blocks) {
  m = rows;
  y.assign(static_cast<size_t>(m * (n + 2)), std::nanf(""));
  const Packing& packing = linear_->packing;
  const int64_t tiled = (m + kTileRows - 1) / kTileRows * kTileRows;
  const std::vector<uint16_t> poisoned(static_cast<size_t>(tiled * packing.k_pad), 0x7FFF);
  const DeviceBuffer in = memory_.hold(x.data(), x.size() * 4, "x"),
                     add = memory_.hold(bias.data(), bias.size() * 4, "b"),
                     times = memory_.hold(factors.data(), factors.size() * 4, "f"),
                     out = memory_.hold(y.data(), y.size() * 4, "y"),
                     round = memory_.hold(poisoned.data(), poisoned.size() * 2, "r");
  ProductsArgs args;
  args.count = 1;
  args.of[0] = {.weights = linear_->rows(),
                .x = in.as<const float>(),
                .x_stride = k + 3,
                .y = out.as<float>(),
                .y_stride = n + 2,
                .bias = add.as<const float>(),
                .factors = times.as<const float>(),
                .m = m,
                .rounded = round.as<const uint16_t>()};
  const char* const code = code_word(of.format->format.code);
  const int step = of.fragment.step_bytes;
  if (kernel == Kernel::kMany) {
    stream_.launch("kt_round_rows", tiled, 1, 256,
                   RoundRowsArgs{.from = in.as<const float>(),
                                 .from_stride = k + 3,
                                 .to = round.as<uint16_t>(),
                                 .width = static_cast<int>(k),
                                 .to_width = packing.k_pad,
                                 .rows = m});
    stream_.launch(text("kt_product_many_{}_{}", code, step), (n + kTileColumns - 1) / kTileColumns,
                   tiled / kTileRows, kManyThreads, args);
  } else if (kernel == Kernel::kFew) {
    stream_.launch(text("kt_product_few_{}_{}_{}_{}", code, step, m > 8 ? 16 : 8, blocks),
                   (packing.blocks + blocks - 1) / blocks, 1, kFewThreads, args);
  } else {
    const int at_once = m == 1 ? 1 : 8;
    stream_.launch(text("kt_product_{}_{}_{}", code, step, at_once), packing.blocks,
                   (m + at_once - 1) / at_once, kProductThreads, args);
  }
  stream_.copy(y.data(), out.at(), y.size() * 4);
  stream_.wait();
}

void ProductRun::check(float (*of_x)(float), float (*of_weights)(float),
                       double (*bound)(int64_t, double, double)) const {
  for (int i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n + 2; ++j) {
      const float found = y[static_cast<size_t>(i * (n + 2) + j)];
      if (j >= n) {
        ASSERT_TRUE(std::isnan(found)) << "wrote behind a row";
        continue;
      }
      double sum = 0, sizes = 0, largest = 0;
      for (int64_t c = 0; c < k; ++c) {
        const double product = static_cast<double>(of_x(x[static_cast<size_t>(i * (k + 3) + c)])) *
                               static_cast<double>(of_weights(values[static_cast<size_t>(j * k + c)]));
        sum += product;
        sizes += std::abs(product);
        largest = std::max(largest, std::abs(product));
      }
      const double factor = factors[static_cast<size_t>(i)];
      ASSERT_NEAR(found, (sum + bias[static_cast<size_t>(j)]) * factor,
                  bound(k, sizes, largest) * std::abs(factor) + 1e-30)
          << n << " x " << k << ", row " << i << ", column " << j;
    }
  }
}

float as_it_is(float x) { return x; }
float as_bf16(float x) { return to_f32(to_bf16(x)); }

void check_product(const ProductCase& of, int64_t n, int64_t k, int m, unsigned seed) {
  // Numbers are added one by one in f32: their sizes times k * 2^-24 at most, and a few roundings more.
  ProductRun product(of, n, k, m, seed);
  product.run(m, Kernel::kExact);
  product.check(as_it_is, as_it_is, [](int64_t columns, double sizes, double) {
    return (sizes * static_cast<double>(columns + 24) + 4) * 0x1p-24;
  });
}

// Operands are bf16. A weight may lie so near to the middle of two that a kernel, which adds its factors in another
// order, takes the other one.
void check_many(const ProductCase& of, int64_t n, int64_t k, int m, unsigned seed) {
  ProductRun product(of, n, k, m, seed);
  product.run(m, Kernel::kMany);
  product.check(as_bf16, as_bf16, [](int64_t columns, double sizes, double largest) {
    return sizes * static_cast<double>(columns + 24) * 0x1p-23 + largest * 0x1p-7 + 1e-6;
  });
}

// Codes are exact and x is bf16; and a row of x gives the same numbers in whatever call.
void check_few(const ProductCase& of, int64_t n, int64_t k, unsigned seed) {
  ProductRun product(of, n, k, 16, seed);
  product.run(16, Kernel::kFew, 2);
  product.check(as_bf16, as_it_is, [](int64_t columns, double sizes, double) {
    return (sizes * static_cast<double>(columns + 24) + 4) * 0x1p-23;
  });
  const std::vector<float> all = product.y;
  for (const int rows : {1, 2, 7, 8, 9, 16}) {
    for (const int blocks : {1, 2}) {
      product.run(rows, Kernel::kFew, blocks);
      for (size_t i = 0; i < product.y.size(); ++i) {
        const bool behind = static_cast<int64_t>(i) % (n + 2) >= n;
        ASSERT_TRUE(behind ? std::isnan(product.y[i]) : product.y[i] == all[i])
            << n << " x " << k << ", number " << i << " of " << rows << " rows: " << product.y[i] << ", "
            << all[i];
      }
    }
  }
}

TEST_P(GpuProducts, ManyRows) {
  if (GetParam().format->format.code == Code::kF32) return;  // exact: there is no such kernel
  const int64_t unit = column_granularity(GetParam().format->format, 1 << 20);
  check_many(GetParam(), 150, 2 * unit, 21, 5);
  if (GetParam().format->format.span.k == 0) check_many(GetParam(), 17, 197, 129, 6);
}

TEST_P(GpuProducts, FewRows) {
  if (GetParam().format->format.code == Code::kF32) return;  // as above
  const int64_t unit = column_granularity(GetParam().format->format, 1 << 20);
  const bool whole_rows = GetParam().format->format.span.k == 0;
  check_few(GetParam(), 1, whole_rows ? 37 : unit, 7);
  check_few(GetParam(), 71, 2 * unit, 8);
  check_few(GetParam(), 19, 2880 / unit * unit, 9);
  if (whole_rows) check_few(GetParam(), 17, 197, 10);
}

// A code of E4M3 that is no number is not taken for one: its row has no numbers, the others have theirs.
TEST_P(GpuProducts, NanCodesOfFewRows) {
  if (GetParam().format->format.code != Code::kE4m3) return;
  const int64_t unit = column_granularity(GetParam().format->format, 1 << 20);
  ProductRun product(GetParam(), 19, 2 * unit, 9, 11, [](const Packing& packing, std::byte* blocks) {
    constexpr int kRow = 5, kColumn = 23;
    const int step = packing.fragment.step_bytes, columns = step_columns(Code::kE4m3, step);
    blocks[packing.header_bytes + kColumn / columns * kBlockRows * step_bytes(Code::kE4m3, step) +
           row_byte(Code::kE4m3, step, kRow) + column_byte(Code::kE4m3, step, kColumn % columns)] =
        std::byte{0xFF};
  });
  for (const int rows : {1, 9}) {
    product.run(rows, Kernel::kFew);
    for (int i = 0; i < rows; ++i)
      for (int64_t j = 0; j < 19; ++j)
        EXPECT_EQ(std::isnan(product.y[static_cast<size_t>(i * 21 + j)]), j == 5) << i << ", " << j;
  }
}

TEST_P(GpuProducts, OddShapes) {
  const int64_t unit = column_granularity(GetParam().format->format, 1 << 20);
  const int64_t narrow = GetParam().format->format.span.k == 0 ? 37 : unit;
  check_product(GetParam(), 1, narrow, 1, 1);
  check_product(GetParam(), 71, 2 * unit, 1, 2);
  check_product(GetParam(), 33, narrow, 9, 3);
  if (GetParam().format->format.span.k == 0) check_product(GetParam(), 17, 197, 3, 4);
}

std::vector<ProductCase> product_cases() {
  std::vector<ProductCase> out;
  for (const NamedFormat& format : kFormats)
    if (gpu_reads(format.format))
      for (const Fragment& fragment : {Fragment{4, true}, Fragment{8, false}})
        out.push_back({&format, fragment});
  return out;
}

INSTANTIATE_TEST_SUITE_P(All, GpuProducts, testing::ValuesIn(product_cases()), [](const auto& each) {
  return std::string(each.param.format->name) + "_" + std::to_string(each.param.fragment.step_bytes);
});

}  // namespace
}  // namespace kt::inline nn
