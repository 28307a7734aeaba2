// Matrices that every token visits and that multiply the same inputs, rounded with the second moments of
// those, and tried on rows that took no part.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/calibration/matrix_rounding.h"
#include "nn/hessian.h"
#include "nn/linear.h"
#include "weights/dialects/compressed.h"

namespace kt::inline engine {

struct RoundedLinear {
  Matrix matrix;
  ExpertFigures figures;
};

class LinearRounder {
 public:
  // For inputs of k numbers.
  LinearRounder(std::shared_ptr<Pool> pool, int64_t k, const CalibrationDefaults& options);
  // x: rows `stride` apart, of which those in `train` count for the moments and those in `held_out` are kept
  // for the trial: as many as the caller wants to hold, 2k bytes each.
  void add(const float* x, int64_t stride, std::span<const int32_t> train, std::span<const int32_t> held_out);
  // After all rows; `stored` is [n, k].
  RoundedLinear round(const StoredMatrix& stored, const PackedSpec& spec);
  // What one takes at most, with so many rows held out, and a matrix of n rows at work.
  static uint64_t bytes(int64_t n, int64_t k, int64_t held_out);

 private:
  void judge(const StoredMatrix& stored, const Matrix& rtn, const Matrix& other, ExpertFigures& figures);

  std::shared_ptr<Pool> pool_;
  int64_t k_;
  CalibrationDefaults options_;
  LinearWork linears_;
  Buffer scratch_;
  Hessian moments_;
  std::optional<std::optional<GptqFactor>> factor_;  // made when the first matrix asks
  std::vector<uint16_t> held_out_;                   // [rows, k] bf16
};

}  // namespace kt::inline engine
