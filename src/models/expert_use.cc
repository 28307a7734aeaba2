#include "models/expert_use.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

namespace kt::inline models {

std::optional<ExpertUse> expert_use(const ExpertCounts& counts, std::span<const uint64_t> before,
                                    std::span<const uint64_t> after) {
  const auto experts = static_cast<size_t>(counts.experts());
  const double n = counts.experts(), top_k = counts.top_k();
  ExpertUse use{.experts = counts.experts()};
  int layers = 0;
  for (size_t first = 0; first < after.size(); first += experts) {
    std::vector<uint64_t> chosen(experts);
    for (size_t e = 0; e < experts; ++e) chosen[e] = after[first + e] - before[first + e];
    const auto total = static_cast<double>(std::accumulate(chosen.begin(), chosen.end(), uint64_t{0}));
    if (total == 0) continue;
    ++layers;
    std::ranges::sort(chosen, std::greater());
    const size_t busiest = std::min<size_t>(kBusiest, experts);
    const auto most =
        static_cast<double>(std::accumulate(chosen.begin(), chosen.begin() + busiest, uint64_t{0}));
    use.tokens += total / top_k;
    use.distinct += static_cast<double>(experts - static_cast<size_t>(std::ranges::count(chosen, 0u)));
    use.busiest += most / total;
    use.even += n * (1 - std::pow(1 - top_k / n, total / top_k));
  }
  if (layers == 0) return {};
  for (double* sum : {&use.tokens, &use.distinct, &use.busiest, &use.even}) *sum /= layers;
  return use;
}

std::optional<ExpertUse> expert_use(const ExpertCounts& counts) {
  const std::vector<uint64_t> all = counts.snapshot();
  return expert_use(counts, std::vector<uint64_t>(all.size()), all);
}

}  // namespace kt::inline models
