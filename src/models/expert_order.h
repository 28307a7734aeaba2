// Which experts go to a GPU first. A strategy is an order of all routed experts of a model, and a placement is as many
// of its first ones as are wanted or fit: the masks are those of kt_kernel.placement and of SGLang's
// --kt-expert-placement-strategy.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weights/expert_statistics.h"

namespace kt::inline models {

enum class ExpertStrategy : uint8_t {
  kUniform,    // as many in each layer, its first experts; the first layers have one more
  kFrequency,  // the most used of all layers, by statistics; of equals the lower layer, then the lower expert
  kFrontLoading,  // whole layers from the first on
  kRandom,        // any, drawn with a seed: torch.randperm's order, the same in every process
};
std::string_view name_of(ExpertStrategy strategy);            // "uniform", "front-loading" ...
ExpertStrategy expert_strategy_named(std::string_view name);  // Error with the list otherwise

inline constexpr uint32_t kPlacementSeed = 42;

struct ExpertOfLayer {
  int layer = 0, expert = 0;
  bool operator==(const ExpertOfLayer&) const = default;
};

struct ExpertOrderInput {
  std::vector<int> experts = {};                 // of each layer of the model; 0: it does not route
  const ExpertStatistics* statistics = nullptr;  // kFrequency needs them: of as many layers and experts
  uint32_t seed = kPlacementSeed;
};

// Every routed expert once, the first to place first. Errors: kFrequency without statistics, or with those of another
// model.
std::vector<ExpertOfLayer> expert_order(ExpertStrategy strategy, const ExpertOrderInput& input);

// How many experts are wanted: as many as fit, so many a layer on average, or a share of all.
struct ExpertWish {
  enum class Kind : uint8_t { kAuto, kPerLayer, kShare } kind = Kind::kAuto;
  double amount = 0;  // experts of a layer, or 0 to 1
  bool operator==(const ExpertWish&) const = default;

  // Of `layers` that route, with `experts` in all; none: as many as fit. More than there are means all.
  std::optional<int64_t> total(int64_t layers, int64_t experts) const;
};
// "auto", "8", "25%". Error that begins with `name` otherwise.
ExpertWish parse_expert_wish(std::string_view value, std::string_view name);
std::string text_of(const ExpertWish& wish);  // "auto", "8 a layer", "25%"

// What a placement rule says of the experts that a GPU holds of some layers.
struct ExpertRule {
  std::vector<int> layers = {};                 // ascending
  std::optional<std::vector<int>> ids = {};     // ascending, of each of them; none: as follows
  ExpertWish wish = {};                         // of these layers alone
  std::optional<ExpertStrategy> strategy = {};  // none: as PlacementWish's
  std::string statistics_file = {};             // for the frequency; empty: those of the model's other layers
  std::shared_ptr<const ExpertStatistics> statistics = {};  // what whoever places has read of it
  std::string decided_by = {};                              // "rule 4, line 26"
  std::string place = {};                                   // "FILE:26: rule 4", of errors

  // Whether it may put any there.
  bool asks() const { return ids ? !ids->empty() : wish.kind == ExpertWish::Kind::kAuto || wish.amount > 0; }
};

}  // namespace kt::inline models
