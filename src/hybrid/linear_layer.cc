#include "hybrid/linear_layer.h"

#include <utility>

#include "models/load_experts.h"

namespace kt::inline hybrid {

LinearSteps::LinearSteps(std::shared_ptr<CpuTeam> team) : team_(std::move(team)), work_(team_->pool()) {}

LinearLayer::LinearLayer(std::shared_ptr<LinearSteps> steps, const StoredMatrix& weights,
                         const std::vector<float>& bias, Precision precision, std::string_view name)
    : steps_(std::move(steps)) {
  steps_->team_->check_outside();
  linear_ = Linear(*steps_->team_->pool(), reader_of(weights), bias, {.precision = precision}, name);
}

void LinearLayer::forward(int m, const float* x, int64_t x_stride, float* y, int64_t y_stride) const {
  if (m == 0) return;
  steps_->team_->check_outside();
  const LinearCall call{.linear = &linear_, .x = x, .x_stride = x_stride, .y = y, .y_stride = y_stride};
  const std::lock_guard lock(steps_->mutex_);
  steps_->work_.run(m, {&call, 1});
}

}  // namespace kt::inline hybrid
