// Which pairs may wait for the next layer.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "hybrid/expert_layer.h"

namespace kt::inline hybrid {
namespace {

// Heavier first, then the earlier slot; NaN is lighter than all. A total order, so that sorting is safe.
bool heavier(std::span<const float> weights, int a, int b) {
  const float x = weights[static_cast<size_t>(a)], y = weights[static_cast<size_t>(b)];
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) == std::isnan(y) ? a < b : std::isnan(y);
  return x != y ? x > y : a < b;
}

}  // namespace

void split_deferred(std::span<const int64_t> ids, std::span<const float> weights, int top_k, int max_deferred,
                    int experts, std::span<int64_t> now, std::span<int64_t> later) {
  if (top_k < 1 || ids.size() % static_cast<size_t>(top_k) != 0)
    fail("deferral: {} ids do not divide into rows of {}", ids.size(), top_k);
  if (weights.size() != ids.size() || now.size() != ids.size() || later.size() != ids.size())
    fail("deferral: {} ids, but {} weights and room for {} and {}", ids.size(), weights.size(), now.size(),
         later.size());
  const auto exists = [&](int64_t id) { return id >= 0 && id < experts; };
  const int keep = std::clamp(top_k - max_deferred, 0, top_k);
  std::vector<uint8_t> is_protected(static_cast<size_t>(experts));
  std::vector<int> order(static_cast<size_t>(top_k));
  for (size_t row = 0; row < ids.size(); row += static_cast<size_t>(top_k)) {
    for (int i = 0; i < top_k; ++i) order[static_cast<size_t>(i)] = i;
    const auto mine = weights.subspan(row, static_cast<size_t>(top_k));
    std::partial_sort(order.begin(), order.begin() + keep, order.end(),
                      [&](int a, int b) { return heavier(mine, a, b); });
    for (int i = 0; i < keep; ++i)
      if (const int64_t id = ids[row + static_cast<size_t>(order[static_cast<size_t>(i)])]; exists(id))
        is_protected[static_cast<size_t>(id)] = 1;
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool here = exists(ids[i]);
    const bool at_once = here && is_protected[static_cast<size_t>(ids[i])];
    const int64_t id = ids[i];
    now[i] = at_once ? id : -1;
    later[i] = here && !at_once ? id : -1;
  }
}

}  // namespace kt::inline hybrid
