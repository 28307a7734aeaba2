#include "nn/step_parts.h"

#include <algorithm>

namespace kt::inline nn {

size_t StepParts::index(std::string_view name) {
  const auto found = std::ranges::find(parts_, name, &StepPart::name);
  if (found != parts_.end()) return static_cast<size_t>(found - parts_.begin());
  parts_.push_back({.name = std::string(name)});
  return parts_.size() - 1;
}

StepParts::Scope::Scope(StepParts* parts, size_t index)
    : parts_(parts && !parts->running_ ? parts : nullptr) {
  if (!parts_) return;
  parts_->running_ = true;
  parts_->at_ = index;
  start_ = std::chrono::steady_clock::now();
}

StepParts::Scope::~Scope() {
  if (!parts_) return;
  StepPart& part = parts_->parts_[parts_->at_];
  part.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  ++part.calls;
  parts_->running_ = false;
}

std::vector<StepPart> parts_since(const std::vector<StepPart>& before, std::vector<StepPart> now) {
  for (StepPart& part : now) {
    const auto old = std::ranges::find(before, part.name, &StepPart::name);
    if (old == before.end()) continue;
    part.calls -= old->calls;
    part.seconds -= old->seconds;
    part.amount -= old->amount;
  }
  std::erase_if(now, [](const StepPart& part) { return part.calls == 0; });
  return now;
}

}  // namespace kt::inline nn
