// What quantised weights do to an expert's output, on random inputs: both versions of the expert run side by
// side while its rows pass by. A figure for reports, not an engine.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "weights/experts.h"
#include "weights/plans/quality.h"

namespace kt::inline weights {

class OutputProbe {
 public:
  static constexpr int kInputs = 8;  // rows of length 1, the same for every expert of this size
  OutputProbe(int64_t hidden, int64_t inter);

  // Rows [first, first + count) of a projection as they were and as they are stored, f32 [count, k]. Gate and
  // up before down, each row once.
  void add_rows(Projection projection, int64_t first, int64_t count, const float* original,
                const float* stored);
  // After the last row of down: stored against original outputs.
  WeightError error() const;

 private:
  using Column = std::array<float, kInputs>;  // one element of every input
  void activate();

  struct Run {
    std::vector<Column> gate, up;  // [inter]; after activate() the middle is in gate
    std::vector<Column> down;      // [hidden]
  };
  std::vector<Column> inputs_;  // [hidden]
  Run original_, stored_;
  bool activated_ = false;
};

}  // namespace kt::inline weights
