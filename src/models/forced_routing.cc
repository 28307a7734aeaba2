#include "models/forced_routing.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <random>

#include "base/error.h"
#include "nn/router.h"

namespace kt::inline models {
namespace {

std::mt19937_64 random_of(const ForcedRouting& routing, int layer) {
  return std::mt19937_64(routing.seed * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(layer));
}

// A layer's experts, the most popular first.
std::vector<int> popular_experts(std::mt19937_64& random, int experts) {
  std::vector<int> out(static_cast<size_t>(experts));
  std::iota(out.begin(), out.end(), 0);
  for (size_t i = out.size(); i > 1; --i) std::swap(out[i - 1], out[random() % i]);
  return out;
}

}  // namespace

ForcedRouting ForcedRouting::parse(std::string_view value) {
  constexpr std::string_view kZipf = "zipf:";
  if (value == "uniform") return {};
  double exponent = -1;
  if (value.starts_with(kZipf)) {
    const std::string_view number = value.substr(kZipf.size());
    const auto read = std::from_chars(number.data(), number.data() + number.size(), exponent);
    if (read.ec != std::errc() || read.ptr != number.data() + number.size()) exponent = -1;
  }
  if (!(exponent >= 0 && exponent <= 10))
    fail("'{}': uniform, or zipf:S with S from 0 to 10, such as zipf:1.0", value);
  return {.exponent = exponent};
}

std::string ForcedRouting::describe() const { return exponent == 0 ? "uniform" : text("zipf:{}", exponent); }

std::vector<float> forced_ids(const ForcedRouting& routing, int layer, int experts, int top_k) {
  KT_CHECK(top_k <= experts, "{} of {} experts", top_k, experts);
  std::mt19937_64 random = random_of(routing, layer);
  const std::vector<int> popular = popular_experts(random, experts);
  // Not std::uniform_real_distribution, whose numbers are the library's own.
  const auto uniform = [&] { return (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53; };
  std::vector<std::pair<double, int>> arrivals(popular.size());
  std::vector<float> out;
  out.reserve(static_cast<size_t>(kForcedRounds) * static_cast<size_t>(top_k));
  for (int round = 0; round < kForcedRounds; ++round) {
    // Each expert arrives after a time with its weight as rate: the first ones are drawn one by one without putting
    // back.
    for (size_t rank = 0; rank < popular.size(); ++rank)
      arrivals[rank] = {-std::log(uniform()) * std::pow(static_cast<double>(rank + 1), routing.exponent),
                        popular[rank]};
    std::partial_sort(arrivals.begin(), arrivals.begin() + top_k, arrivals.end());
    for (int i = 0; i < top_k; ++i)
      out.push_back(static_cast<float>(arrivals[static_cast<size_t>(i)].second));
  }
  return out;
}

ExpertStatistics forced_statistics(const ForcedRouting& routing, const ModelSpec& spec) {
  constexpr double kMost = 1e9;  // of the most popular one
  const int experts = spec.moe() ? spec.moe()->experts : 0;
  ExpertStatistics out{.layers = static_cast<int>(spec.layers.size()), .experts = experts, .counts = {}};
  out.counts.resize(spec.layers.size() * static_cast<size_t>(experts));
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    if (!spec.layers[layer].moe()) continue;
    std::mt19937_64 random = random_of(routing, static_cast<int>(layer));
    double rank = 0;
    for (const int expert : popular_experts(random, experts))
      out.counts[layer * static_cast<size_t>(experts) + static_cast<size_t>(expert)] =
          std::llround(kMost * std::pow(++rank, -routing.exponent));
  }
  return out;
}

}  // namespace kt::inline models
