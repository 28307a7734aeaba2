#include "nn/step_forecast.h"

namespace kt::inline nn {

StepForecast::StepForecast(const Pool& pool, const LinearWork& linears, const AttentionWork& attention)
    : linears_(linears), attention_(attention) {
  for (int node = 0, index = 0; node < pool.nodes(); ++node)
    for (int rank = 0; rank < pool.threads(node); ++rank)
      workers_.push_back({.node = node, .rank = rank, .ranks = pool.threads(node), .index = index++});
}

void StepForecast::begin(const KvCache* cache, std::span<const AttentionSequence> sequences) {
  next_ = 0;
  cache_ = cache;
  sequences_ = sequences;
  attended_ = false;
}

const Forecast* StepForecast::enter(const void* reads, int rows, int plane) {
  if (next_ == operations_.size()) operations_.emplace_back();
  Operation& now = operations_[next_++];
  if (now.reads != reads || now.rows != rows || now.plane != plane)
    now = {.reads = reads, .rows = rows, .plane = plane, .firsts = {}};
  return this;
}

void StepForecast::multiplied() {
  Operation& now = operations_[next_ - 1];
  if (!now.firsts.empty()) return;
  for (const Worker& worker : workers_) now.firsts.push_back(linears_.first_read(worker));
}

// Behind the last operation comes the next step's first.
const StepForecast::Operation* StepForecast::known_next() const noexcept {
  for (size_t at = next_; at < next_ + 2; ++at) {
    const size_t wrapped = at < operations_.size() ? at : at - operations_.size();
    if (wrapped >= operations_.size()) return nullptr;
    const Operation& next = operations_[wrapped];
    if (next.plane >= 0 || !next.firsts.empty()) return &next;
  }
  return nullptr;
}

Ahead StepForecast::ahead(const Worker& worker) const noexcept {
  const Operation* const next = known_next();
  if (!next) return {};
  if (next->plane < 0) return next->firsts[static_cast<size_t>(worker.index)];
  return attended_ ? attention_.first_read(*cache_, next->plane, sequences_, worker) : Ahead();
}

}  // namespace kt::inline nn
