// Rows of random numbers for tests of the work on single rows.
#pragma once
#include <algorithm>
#include <random>
#include <vector>

#include "kernels/testing/guarded.h"

namespace kt::inline kernels {

inline std::vector<float> random_row(int64_t n, unsigned seed, float spread = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> out(static_cast<size_t>(n));
  for (float& x : out) x = normal(random);
  return out;
}

// A row whose end is the end of what may be read and written.
struct Row {
  Guarded memory;
  int n;
  explicit Row(const std::vector<float>& x)
      : memory(x.size() * sizeof(float), 4), n(static_cast<int>(x.size())) {
    std::copy(x.begin(), x.end(), data());
  }
  float* data() const { return memory.as<float>(); }
  std::vector<float> values() const { return {data(), data() + n}; }
};

}  // namespace kt::inline kernels
