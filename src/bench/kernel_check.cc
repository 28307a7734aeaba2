#include "bench/kernel_check.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/memory.h"
#include "bench/random_matrix.h"

namespace kt::inline bench {
namespace {

constexpr int kRows = 40,
              kColumns = 512;  // a row block that is not full; two super-blocks, four groups of 128

// Relative to sum |a * w|:
// f32 activations: 512 additions, each rounded to 2^-24, in two different orders.
constexpr double kF32Bound = 2.0 * kColumns * 0x1p-24;
// int8: both sides quantise alike and add integers exactly, but a scale that differs in its last bit may move
// a code that lies on a boundary: one step in 127 of one column in 512, for a handful of columns.
constexpr double kS8Bound = 8.0 / (127 * kColumns) + kF32Bound;
// bf16: weight and activation each rounded to 2^-9 where the other side has f32.
constexpr double kBf16Bound = 2 * 0x1p-9 + kF32Bound;

struct Inputs {
  Matrix weights;
  std::vector<float> values;       // [kRows, kColumns], the weights as numbers
  std::vector<float> activations;  // [rows, kColumns]
};

// out: [rows, ld]
std::vector<float> multiply(const Kernels& kernels, const Plan& plan, const Packing& packing,
                            const Inputs& in, int rows) {
  Buffer packed(packing.bytes());
  for (int64_t b = 0; b < packing.blocks; ++b)
    pack_block(packing, in.weights.view(), 0, b,
               packed.data() + static_cast<size_t>(b) * packing.block_bytes);
  Buffer memory(act_bytes(plan.acts)), scratch(std::max<size_t>(plan.scratch_bytes, 64));
  const Acts acts = acts_in(plan.acts, memory.data());
  kernels.pack_acts(
      {.source = in.activations.data(), .stride = kColumns, .m = rows, .k = kColumns, .out = acts});
  const int64_t ld = packing.blocks * kBlockRows;
  std::vector<float> out(static_cast<size_t>(rows * ld));
  plan.multiply({.packing = &packing,
                 .blocks = packed.data(),
                 .count = static_cast<int>(packing.blocks),
                 .acts = acts,
                 .m = rows,
                 .out = out.data(),
                 .ld = ld,
                 .scratch = scratch.data()});
  return out;
}

Inputs inputs_for(const Format& format, int rows) {
  Inputs in{random_matrix(format, kRows, kColumns, 1), std::vector<float>(kRows * kColumns),
            std::vector<float>(static_cast<size_t>(rows) * kColumns)};
  dequantise(in.weights.view(), in.values);
  RandomBits random(2);
  for (float& a : in.activations) a = random_activation(random);
  return in;
}

}  // namespace

KernelCheck check_kernel(const Kernels& kernels, const Kernels& portable, const Format& format, int rows) {
  const Inputs in = inputs_for(format, rows);
  const Packing packing = packing_for(format, kRows, kColumns, kernels.fragment, "kernel check");
  const Packing plain = packing_for(format, kRows, kColumns, portable.fragment, "kernel check");
  const Plan plan = plan_for(kernels, packing, Precision::kDefault, rows);
  // The same route and activations on both sides where portable has them; it has no bf16 product and takes
  // f32.
  const Route route = plan.route == Route::kManyBf16 ? Route::kManyF32 : plan.route;
  const Plan reference = plan_route(portable, plain, route, rows);
  const auto ours = multiply(kernels, plan, packing, in, rows);
  const auto theirs = multiply(portable, reference, plain, in, rows);

  KernelCheck out{.route = name_of(plan.route), .rows = rows};
  out.bound = plan.acts.code == ActCode::kS8     ? kS8Bound
              : plan.acts.code == ActCode::kBf16 ? kBf16Bound
                                                 : kF32Bound;
  const size_t ld = ours.size() / static_cast<size_t>(rows);
  for (int i = 0; i < rows; ++i) {
    for (int r = 0; r < kRows; ++r) {
      double size = 0;
      for (int k = 0; k < kColumns; ++k)
        size += std::fabs(static_cast<double>(in.activations[static_cast<size_t>(i * kColumns + k)]) *
                          in.values[static_cast<size_t>(r * kColumns + k)]);
      const size_t at = static_cast<size_t>(i) * ld + static_cast<size_t>(r);
      const double difference = std::fabs(static_cast<double>(ours[at]) - theirs[at]) / size;
      // written so that a NaN wins and stays
      if (!(difference <= out.difference) && !std::isnan(out.difference)) out.difference = difference;
    }
  }
  return out;
}

}  // namespace kt::inline bench
