// Functions of vectors of floats.
#pragma once
#include "kernels/isa/inline.h"

namespace KT_ISA_NAMESPACE {
namespace {

using F32 = typename Isa::F32;
using I32 = typename Isa::I32;

// e^x for |x| <= 87, relative error below 2e-7: 2^n * P(x - n ln 2), P of degree 7.
KT_INLINE F32 exp(F32 x) {
  x = Isa::min(Isa::max(x, Isa::set1(-87.0f)), Isa::set1(87.0f));
  const I32 n = Isa::round(Isa::mul(x, Isa::set1(1.44269504f)));
  const F32 nf = Isa::to_f32(n);
  F32 r = Isa::fma(nf, Isa::set1(-0.693359375f), x);
  r = Isa::fma(nf, Isa::set1(2.12194440e-4f), r);
  F32 p = Isa::set1(1.9875691500e-4f);
  p = Isa::fma(p, r, Isa::set1(1.3981999507e-3f));
  p = Isa::fma(p, r, Isa::set1(8.3334519073e-3f));
  p = Isa::fma(p, r, Isa::set1(4.1665795894e-2f));
  p = Isa::fma(p, r, Isa::set1(1.6666665459e-1f));
  p = Isa::fma(p, r, Isa::set1(5.0000001201e-1f));
  p = Isa::fma(Isa::mul(p, r), r, r);
  return Isa::mul(Isa::add(p, Isa::set1(1.0f)), Isa::exp2i(n));
}

KT_INLINE F32 sigmoid(F32 x) {
  const F32 one = Isa::set1(1.0f);
  return Isa::div(one, Isa::add(one, exp(Isa::sub(Isa::set1(0.0f), x))));
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
