// Short names of published models: which repository is meant, and how large it is. No settings: those come from the
// plan that is made for a model.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>

namespace kt::inline cli {

struct ModelAlias {
  std::string_view names;       // "k2 k2-thinking ...": any of them, in letters of any case
  std::string_view repository;  // "ORG/REPO"
  std::string_view type;        // its model_type
  double gigabytes = 0;         // 10^9 bytes of weights, as published; 0: not said here
};

std::span<const ModelAlias> known_aliases();
const ModelAlias* find_alias(std::string_view name);  // null: there is none

}  // namespace kt::inline cli
