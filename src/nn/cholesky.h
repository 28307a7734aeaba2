// Triangular factors of symmetric matrices, blocked, on one thread. No LAPACK: nn/ needs libc and pthread
// only, and calibration has an expert for each core, so one thread's speed is what counts.
#pragma once
#include <cstdint>

namespace kt::inline nn {

// a: the lower triangle of a symmetric matrix [n, n], rows `stride` apart; what stands above it is neither
// read nor written. Becomes G, lower, with A = G^T G (and not G G^T: the factor that belongs to eliminating
// the last column first). False if a pivot is not a positive finite number; `a` is spoilt then.
bool factor(float* a, int n, int64_t stride);

}  // namespace kt::inline nn
