// Numbers for tests.
#pragma once
#include <cstddef>
#include <random>
#include <vector>

namespace kt::inline base {

// Normally distributed; the same for the same seed.
inline std::vector<float> random_values(size_t count, unsigned seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> out(count);
  for (float& x : out) x = normal(random);
  return out;
}

}  // namespace kt::inline base
