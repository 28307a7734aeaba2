// One dense linear of a foreign model on the CPU: packed weights of any format, rows of f32 in and out.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "hybrid/cpu_team.h"
#include "nn/linear.h"
#include "weights/experts.h"

namespace kt::inline hybrid {

// What linears of one team share: the memory that a step takes. One step at a time.
class LinearSteps {
 public:
  explicit LinearSteps(std::shared_ptr<CpuTeam> team);

 private:
  friend class LinearLayer;
  std::shared_ptr<CpuTeam> team_;
  std::mutex mutex_;
  LinearWork work_;
};

class LinearLayer {
 public:
  // Reads and packs the matrix on all workers; errors name `name`. The bias is [n] or empty.
  LinearLayer(std::shared_ptr<LinearSteps> steps, const StoredMatrix& weights, const std::vector<float>& bias,
              Precision precision, std::string_view name);

  // y[m, n] = x[m, k] W^T + bias, at once; strides in elements. Any thread; x and y may not overlap.
  void forward(int m, const float* x, int64_t x_stride, float* y, int64_t y_stride) const;

  const Linear& linear() const { return linear_; }

 private:
  std::shared_ptr<LinearSteps> steps_;
  Linear linear_;
};

}  // namespace kt::inline hybrid
