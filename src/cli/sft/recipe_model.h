// What a recipe says of the model that runs: its folder, its adapter, and how it is held. For the native engine.
#pragma once
#include <string>

#include "cli/sft/recipe.h"

namespace kt::inline cli {

struct RecipeModel {
  std::string model;    // as kt's verbs take it: a folder, a file or a name
  std::string adapter;  // a folder or a .gguf file; "": none
  std::string weights, rules;
  int threads = 0, step_tokens = 0;  // 0: not said
};

// Error where no model is named, or an adapter that is not there. Without one that is named it is what output_dir
// holds.
RecipeModel recipe_model(const Recipe& recipe);

}  // namespace kt::inline cli
