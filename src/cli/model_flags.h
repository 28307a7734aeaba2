// Flags of every verb that runs a model.
#pragma once
#include <string>

#include "cli/registry/registry.h"
#include "cli/verbs.h"
#include "engine/loaded_model.h"

namespace kt {

struct ModelFlags {
  // `model` is the path, also where a name was given; `found` has the name and what is linked to it.
  ResolvedModel found;
  std::string model, weights, format, linear_format, acts = "default", kv = "bf16", max_memory;
  int threads = 0, step_tokens = ModelOptions{}.max_tokens;
  void add_to(CLI::App& verb);       // MODEL and the options
  void add_options(CLI::App& verb);  // for a verb that takes the model its own way
  ModelOptions options() const;
};

// For an option that takes a model: a registered name becomes its path while the command line is read. Error
// listing the known names for a word that is neither. `found`, if not null, gets all of the answer and must
// live as long as the option.
CLI::Validator model_name(ResolvedModel* found = nullptr);

}  // namespace kt
