// Few rows (1 to 8 a pass): codes are expanded in registers and every span is scaled exactly.
//
// Integer layouts, per row r and token i, over spans s of the weights and steps of kActSpan columns t in them:
//   out = sum_s  wscale * sum_t ascale * (sum_k code * a  -  bias * asum)  -  min * sum_t ascale * asum
// where a are s8 codes, ascale is theirs and asum their sum: sums of whole numbers start from what the bias takes and
// are exact, so the result does not depend on how many rows are computed together. A zero point is a min, times
// wscale. The sum over t is scaled where the span ends and at every kExactK columns, which is where many_spans puts
// its sums down. Activations have outliers, and one scale for a whole row would leave the others few bits.
//
// Float layouts:
//   out = sum_s  wscale * sum_k value(code) * a
// in f32, chains of accumulators merged at the span's end. Where there is a bf16 product and E4M3 codes stand in pairs,
// they meet bf16 activations: 3 bits of fraction times 7 make products exact in f32, so K columns round K times as with
// f32 activations, which keep 16 bits more.
#pragma once
#include "kernels/few_float.inl.h"
#include "kernels/few_integer.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

// Rows in passes of 8, then one pass of 1, 2, 4 or 8 that covers the rest (padding rows are zeros); or each
// alone.
template <Layout kL>
void few(const MultiplyArgs& args) noexcept {
  const auto pass = [&](auto m, int m0) {
    if constexpr (is_integer(kL.code))
      few_integer_pass<kL, decltype(m)::value>(args, m0);
    else
      few_float_pass<kL, decltype(m)::value>(args, m0);
  };
  int m0 = 0;
  if constexpr (Isa::kFewPass == 1) {
    for (; m0 < args.m; ++m0) pass(Int<1>{}, m0);
  } else {
    for (; args.m - m0 > 4; m0 += 8) pass(Int<8>{}, m0);
    const int rest = args.m - m0;
    if (rest > 2)
      pass(Int<4>{}, m0);
    else if (rest == 2)
      pass(Int<2>{}, m0);
    else if (rest == 1)
      pass(Int<1>{}, m0);
  }
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
