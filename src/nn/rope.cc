#include "nn/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace kt::inline nn {
namespace {

// YaRN: frequencies that rotate often within the original context stay, slow ones are stretched, a ramp lies
// between.
void stretch_yarn(const RopeSpec& spec, std::vector<double>& frequencies) {
  const auto dimension_of = [&](double rotations) {
    return spec.dims * std::log(spec.original_context / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(spec.theta));
  };
  double low = dimension_of(spec.beta_fast), high = dimension_of(spec.beta_slow);
  if (spec.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, spec.dims - 1.0);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = frequencies[i] / spec.factor * ramp + frequencies[i] * (1 - ramp);
  }
}

// Llama 3: wavelengths beyond the original context are stretched, short ones stay, with a smooth part
// between.
void stretch_llama3(const RopeSpec& spec, std::vector<double>& frequencies) {
  for (double& f : frequencies) {
    const double wavelength = 2 * std::numbers::pi / f, rotations = spec.original_context / wavelength;
    if (rotations < spec.low_freq_factor) {
      f /= spec.factor;
    } else if (rotations < spec.high_freq_factor) {
      const double smooth =
          (rotations - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor);
      f = (1 - smooth) * f / spec.factor + smooth * f;
    }
  }
}

}  // namespace

float QueryGrowth::factor(int position) const {
  const int64_t reached = int64_t{position} + ahead;
  if (beta == 0 || reached < length) return 1;
  return static_cast<float>(1 + beta * std::log1p(reached / length));
}

Rope::Rope(const RopeSpec& spec) : spec_(spec), frequencies_(static_cast<size_t>(spec.dims / 2)) {
  if (spec.dims < 0 || spec.dims % 2) fail("rope: expected an even number of dimensions, got {}", spec.dims);
  for (size_t i = 0; i < frequencies_.size(); ++i)
    frequencies_[i] = std::pow(spec.theta, -2.0 * static_cast<double>(i) / spec.dims);
  if (spec.scaling == RopeSpec::Scaling::kLinear)
    for (double& f : frequencies_) f /= spec.factor;
  if (spec.scaling == RopeSpec::Scaling::kYarn) stretch_yarn(spec, frequencies_);
  if (spec.scaling == RopeSpec::Scaling::kLlama3) stretch_llama3(spec, frequencies_);
  if (spec.still < 0 || spec.still > spec.dims / 2)
    fail("rope: {} of {} pairs do not rotate", spec.still, spec.dims / 2);
  std::fill(frequencies_.end() - spec.still, frequencies_.end(), 0.0);
  if (spec.divisors.empty()) return;
  if (spec.divisors.size() != frequencies_.size())
    fail("rope: {} divisors for {} frequencies", spec.divisors.size(), frequencies_.size());
  for (size_t i = 0; i < frequencies_.size(); ++i) frequencies_[i] /= spec.divisors[i];
}

void Rope::angles(int position, float* cosines, float* sines) const {
  const auto factor = static_cast<float>(spec_.attention_factor);
  for (size_t i = 0; i < frequencies_.size(); ++i) {
    // The reference computes the angle in f32: position * frequency, both rounded.
    const float angle = static_cast<float>(position) * static_cast<float>(frequencies_[i]);
    cosines[i] = std::cos(angle) * factor;
    sines[i] = std::sin(angle) * factor;
  }
}

void Rope::rotate(const RowKernels& rows, float* x, int heads, int64_t stride, const float* cosines,
                  const float* sines) const {
  rows.rotate({.x = x,
               .heads = heads,
               .stride = stride,
               .half = spec_.dims / 2,
               .interleaved = spec_.interleaved,
               .cosines = cosines,
               .sines = sines});
}

}  // namespace kt::inline nn
