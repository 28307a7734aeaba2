// How far numbers are from those expected, for tests.
#pragma once
#include <cmath>
#include <vector>

namespace kt::inline models {

inline double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double noise = 0, signal = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    noise += std::pow(static_cast<double>(a[i]) - b[i], 2);
    signal += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(noise / signal);
}

}  // namespace kt::inline models
