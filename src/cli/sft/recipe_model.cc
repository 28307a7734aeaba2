#include "cli/sft/recipe_model.h"

#include <filesystem>

#include "cli/sft/datasets.h"

namespace kt::inline cli {
namespace {

bool is_there(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

// That of the recipe, else what its training has written; "": none.
std::string adapter_of(const Recipe& recipe) {
  const std::vector<std::string> named = recipe.names("adapter_name_or_path");
  if (named.size() > 1) recipe.fail("adapter_name_or_path", "{} adapters; one at a time", named.size());
  if (named.empty()) {
    const std::string output = recipe.text("output_dir");
    return is_there(output + "/adapter_config.json") ? output : "";
  }
  const std::string folder = recipe.text("adapter_folder");
  const std::string path = beside_recipe(recipe, folder.empty() ? named[0] : folder + "/" + named[0]);
  if (!is_there(path)) recipe.fail("adapter_name_or_path", "no such folder or file: {}", path);
  return path;
}

int first_number(const Recipe& recipe, std::initializer_list<const char*> keys) {
  for (const char* const key : keys)
    if (recipe.given(key)) return static_cast<int>(recipe.integer(key));
  return 0;
}

}  // namespace

RecipeModel recipe_model(const Recipe& recipe) {
  if (!recipe.given("model_name_or_path")) recipe.fail("model_name_or_path", "is missing: which model?");
  RecipeModel out{.model = beside_recipe(recipe, recipe.text("model_name_or_path")),
                  .adapter = adapter_of(recipe),
                  .weights = {},
                  .rules = {},
                  .threads = first_number(recipe, {"cpu_infer", "kt_config.kt_num_threads"}),
                  .step_tokens = first_number(recipe, {"chunk_size"})};
  for (const char* const key : {"kt_weight_path", "kt_config.kt_weight_path"})
    if (recipe.given(key) && out.weights.empty()) out.weights = beside_recipe(recipe, recipe.text(key));
  const std::string rules = beside_recipe(recipe, recipe.text("kt_optimize_rule"));
  if (!rules.empty() && is_there(rules)) out.rules = rules;
  return out;
}

}  // namespace kt::inline cli
