#include "models/expert_order.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <random>
#include <string>
#include <utility>

#include "base/error.h"

namespace kt::inline models {
namespace {

struct NamedStrategy {
  ExpertStrategy strategy;
  std::string_view name;
};
constexpr NamedStrategy kStrategies[] = {{ExpertStrategy::kUniform, "uniform"},
                                         {ExpertStrategy::kFrequency, "frequency"},
                                         {ExpertStrategy::kFrontLoading, "front-loading"},
                                         {ExpertStrategy::kRandom, "random"}};

// Layer by layer.
std::vector<ExpertOfLayer> all_experts(std::span<const int> experts) {
  std::vector<ExpertOfLayer> out;
  for (size_t layer = 0; layer < experts.size(); ++layer)
    for (int expert = 0; expert < experts[layer]; ++expert) out.push_back({static_cast<int>(layer), expert});
  return out;
}

void check_statistics(const ExpertOrderInput& input) {
  if (!input.statistics)
    fail("the placement by frequency needs statistics: `expert_statistics` names a file of them");
  const ExpertStatistics& found = *input.statistics;
  int experts = 0;
  for (const int each : input.experts) experts = std::max(experts, each);
  if (std::cmp_not_equal(found.layers, input.experts.size()) || found.experts != experts)
    fail("statistics of {} layers with {} experts, the model has {} with {}", found.layers, found.experts,
         input.experts.size(), experts);
}

// The order of torch.randperm(n, generator=Generator().manual_seed(seed)) on a CPU: each place in turn is swapped with
// one drawn from itself and those behind it, by the remainder of a number of the Mersenne twister.
void shuffle_as_torch(std::vector<ExpertOfLayer>& all, uint32_t seed) {
  std::mt19937 random(seed);
  for (size_t i = 0; i + 1 < all.size(); ++i) std::swap(all[i], all[i + random() % (all.size() - i)]);
}

}  // namespace

std::string_view name_of(ExpertStrategy strategy) {
  return std::ranges::find(kStrategies, strategy, &NamedStrategy::strategy)->name;
}

ExpertStrategy expert_strategy_named(std::string_view name) {
  const auto found = std::ranges::find(kStrategies, name, &NamedStrategy::name);
  if (found != std::end(kStrategies)) return found->strategy;
  std::string names;
  for (const NamedStrategy& each : kStrategies) names += text("{}{}", names.empty() ? "" : ", ", each.name);
  fail("unknown placement strategy '{}'; there are {}", name, names);
}

std::vector<ExpertOfLayer> expert_order(ExpertStrategy strategy, const ExpertOrderInput& input) {
  std::vector<ExpertOfLayer> all = all_experts(input.experts);
  switch (strategy) {
    case ExpertStrategy::kUniform:
      std::ranges::stable_sort(all, {}, &ExpertOfLayer::expert);
      break;
    case ExpertStrategy::kFrequency:
      check_statistics(input);
      std::ranges::stable_sort(all, std::ranges::greater(), [&](const ExpertOfLayer& each) {
        return input.statistics->at(each.layer, each.expert);
      });
      break;
    case ExpertStrategy::kFrontLoading:
      break;
    case ExpertStrategy::kRandom:
      shuffle_as_torch(all, input.seed);
      break;
  }
  return all;
}

std::optional<int64_t> ExpertWish::total(int64_t layers, int64_t experts) const {
  if (kind == Kind::kAuto) return {};
  if (experts == 0) return 0;
  // A share is of whole experts of the whole model, multiplied in SGLang's order: the same number to the last bit.
  const double each = kind == Kind::kPerLayer
                          ? amount
                          : amount * (static_cast<double>(experts) / static_cast<double>(layers));
  const double wanted = std::floor(each * static_cast<double>(layers));
  return wanted < static_cast<double>(experts) ? static_cast<int64_t>(wanted) : experts;
}

ExpertWish parse_expert_wish(std::string_view value, std::string_view name) {
  if (value == "auto") return {};
  const bool share = value.ends_with('%');
  const std::string_view digits = value.substr(0, value.size() - share);
  double amount = 0;
  int whole = 0;
  const char* const end = digits.data() + digits.size();
  const auto read =
      share ? std::from_chars(digits.data(), end, amount) : std::from_chars(digits.data(), end, whole);
  const bool good = read.ec == std::errc() && read.ptr == end && !digits.empty();
  if (!share && good && whole >= 0) return {.kind = ExpertWish::Kind::kPerLayer, .amount = double(whole)};
  if (share && good && amount >= 0 && amount <= 100)
    return {.kind = ExpertWish::Kind::kShare, .amount = amount / 100};
  fail("{}: expected auto, experts a layer such as 8, or a share such as 25%, got '{}'", name, value);
}

std::string text_of(const ExpertWish& wish) {
  switch (wish.kind) {
    case ExpertWish::Kind::kAuto:
      return "auto";
    case ExpertWish::Kind::kPerLayer:
      return text("{} a layer", wish.amount);
    case ExpertWish::Kind::kShare:
      return text("{}%", wish.amount * 100);
  }
  return {};
}

}  // namespace kt::inline models
