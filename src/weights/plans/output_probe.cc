#include "weights/plans/output_probe.h"

#include <cmath>
#include <random>

#include "base/error.h"

namespace kt::inline weights {
namespace {

constexpr int kInputs = OutputProbe::kInputs;
using Column = std::array<float, kInputs>;

// Inputs side by side, so that one weight multiplies a vector and the order of sums is fixed.
Column product(const float* row, const std::vector<Column>& inputs) {
  Column sum{};
  for (size_t i = 0; i < inputs.size(); ++i)
    for (size_t j = 0; j < kInputs; ++j) sum[j] += row[i] * inputs[i][j];
  return sum;
}

void activate_run(std::vector<Column>& gate, const std::vector<Column>& up) {
  for (size_t i = 0; i < gate.size(); ++i) {
    for (size_t j = 0; j < kInputs; ++j) {
      const float value = gate[i][j];
      gate[i][j] = value / (1 + std::exp(-value)) * up[i][j];
    }
  }
}

}  // namespace

OutputProbe::OutputProbe(int64_t hidden, int64_t inter) : inputs_(static_cast<size_t>(hidden)) {
  std::mt19937 random(20240229);
  // Sums of four uniform numbers: near enough to normal, and the same with every standard library.
  for (Column& column : inputs_) {
    for (float& value : column) {
      int32_t sum = 0;
      for (int i = 0; i < 4; ++i) sum += static_cast<int32_t>(random() >> 16) - 32768;
      value = static_cast<float>(sum);
    }
  }
  for (size_t j = 0; j < kInputs; ++j) {
    double square = 0;
    for (const Column& column : inputs_)
      square += static_cast<double>(column[j]) * static_cast<double>(column[j]);
    const double length = square > 0 ? std::sqrt(square) : 1;
    for (Column& column : inputs_) column[j] = static_cast<float>(static_cast<double>(column[j]) / length);
  }
  for (Run* run : {&original_, &stored_}) {
    run->gate.resize(static_cast<size_t>(inter));
    run->up.resize(static_cast<size_t>(inter));
    run->down.resize(static_cast<size_t>(hidden));
  }
}

void OutputProbe::activate() {
  activate_run(original_.gate, original_.up);
  activate_run(stored_.gate, stored_.up);
  activated_ = true;
}

void OutputProbe::add_rows(Projection projection, int64_t first, int64_t count, const float* original,
                           const float* stored) {
  const bool down = projection == Projection::kDown;
  if (down && !activated_) activate();
  for (Run* run : {&original_, &stored_}) {
    const float* rows = run == &original_ ? original : stored;
    const std::vector<Column>& inputs = down ? run->gate : inputs_;
    std::vector<Column>& out = down ? run->down : projection == Projection::kGate ? run->gate : run->up;
    KT_CHECK(first >= 0 && first + count <= std::ssize(out), "rows {} + {}", first, count);
    for (int64_t row = 0; row < count; ++row)
      out[static_cast<size_t>(first + row)] = product(rows + row * std::ssize(inputs), inputs);
  }
}

WeightError OutputProbe::error() const {
  WeightError out{};
  for (size_t i = 0; i < original_.down.size(); ++i) {
    for (size_t j = 0; j < kInputs; ++j) {
      const auto want = static_cast<double>(original_.down[i][j]);
      const double lost = static_cast<double>(stored_.down[i][j]) - want;
      out.add({want * want, lost * lost, std::fabs(lost), 1});
    }
  }
  return out;
}

}  // namespace kt::inline weights
