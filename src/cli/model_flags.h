// Flags of every verb that runs a model.
#pragma once
#include <string>

#include "cli/verbs.h"
#include "engine/loaded_model.h"

namespace kt {

struct ModelFlags {
  std::string model, weights, format, linear_format, acts = "default", kv = "bf16", max_memory;
  int threads = 0, step_tokens = ModelOptions{}.max_tokens;
  void add_to(CLI::App& verb);
  ModelOptions options() const;
};

}  // namespace kt
