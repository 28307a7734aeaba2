// The modules of a model that somebody else made and runs (torch) as the tree that rules match: names and words of
// classes are given, kinds and parts are found by the same tables as for models of ours.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "models/module_tree.h"

namespace kt::inline models {

struct GivenModule {
  std::string name;                       // dotted; the whole model's is empty
  std::vector<std::string> classes = {};  // the word of its class, then of those it is derived from
  int64_t experts = 0;                    // it holds so many routed experts, of which `shape` is one's gate
  std::vector<int64_t> shape = {};        // of its weight; empty: it has none of its own
  bool bias = false;
  std::string stored = {};  // the format that its numbers have now; "": not known
};

// Depth first, the whole model first; Error naming a module that does not stand below the one before it or beside.
// `family` is the model_type of its config.
ModuleTree given_tree(std::string family, std::span<const GivenModule> modules);

}  // namespace kt::inline models
