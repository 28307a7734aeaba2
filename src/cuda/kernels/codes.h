// KT_FOR_CODES(KERNELS): KERNELS(name, code, step) for the one code and step that nvcc compiles (KT_CODE_NAME, KT_CODE,
// KT_STEP: scripts/kernels.sh), or for all of them. KT_FOR_ROUNDED_CODES: for all but f32, whose numbers bf16 would cut
// short.
#pragma once

#ifdef KT_CODE_NAME
#define KT_ONE_CODE(KERNELS, name, code, step) KERNELS(name, code, step)
#define KT_FOR_CODES(KERNELS) KT_ONE_CODE(KERNELS, KT_CODE_NAME, KT_CODE, KT_STEP)
#define KT_FOR_ROUNDED_CODES(KERNELS) KT_FOR_CODES(KERNELS)
#else
#define KT_BOTH_STEPS(KERNELS, name, code) KERNELS(name, code, 4) KERNELS(name, code, 8)
#define KT_FOR_ROUNDED_CODES(KERNELS) \
  KT_BOTH_STEPS(KERNELS, i8, kI8)     \
  KT_BOTH_STEPS(KERNELS, u2, kU2)     \
  KT_BOTH_STEPS(KERNELS, u3, kU3)     \
  KT_BOTH_STEPS(KERNELS, u4, kU4)     \
  KT_BOTH_STEPS(KERNELS, u5, kU5)     \
  KT_BOTH_STEPS(KERNELS, u6, kU6)     \
  KT_BOTH_STEPS(KERNELS, iq4, kIq4)   \
  KT_BOTH_STEPS(KERNELS, e2m1, kE2m1) \
  KT_BOTH_STEPS(KERNELS, e4m3, kE4m3) \
  KT_BOTH_STEPS(KERNELS, bf16, kBf16) \
  KT_BOTH_STEPS(KERNELS, f16, kF16)
#define KT_FOR_CODES(KERNELS)   \
  KT_FOR_ROUNDED_CODES(KERNELS) \
  KT_BOTH_STEPS(KERNELS, f32, kF32)
#endif
