// Weights to measure and check kernels with: every code the format has, scales of a trained model's size.
// Made fast, straight from random bits; quantising random numbers would take minutes at the sizes of a
// benchmark.
#pragma once
#include <cstdint>
#include <vector>

#include "formats/matrix.h"

namespace kt::inline bench {

// Small and fast (splitmix64); the same numbers everywhere.
class RandomBits {
 public:
  explicit RandomBits(uint64_t seed) : state_(seed) {}
  uint64_t next();
  double uniform();            // [0, 1)
  uint32_t below(uint32_t n);  // 0 .. n-1, n > 0

 private:
  uint64_t state_;
};

std::vector<int> shuffled(int count, RandomBits& random);  // 0 .. count-1 in random order

// A number of an activation: within 1 of zero, but one in 256 within 20, as large models' activations have outliers.
float random_activation(RandomBits& random);

// Values lie within about 0.1 of zero; no NaN, no infinity.
Matrix random_matrix(const Format& format, int64_t n, int64_t k, uint64_t seed);

}  // namespace kt::inline bench
