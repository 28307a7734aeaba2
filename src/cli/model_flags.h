// Flags of every verb that runs a model.
#pragma once
#include <string>

#include "cli/verbs.h"
#include "engine/loaded_model.h"

namespace kt {

struct ModelFlags {
  std::string model, weights, format, acts = "default", kv = "bf16";
  int threads = 0, step_tokens = ModelOptions{}.max_tokens;
  void add_to(CLI::App& verb);
  ModelOptions options() const;
};

}  // namespace kt
