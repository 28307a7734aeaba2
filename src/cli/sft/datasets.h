// The rows that a recipe names: entries of dataset_info.json and plain files, found and looked into as far as the first
// row, so that a missing file or column is an error before anything is loaded. Python reads the rest.
#pragma once
#include <string>
#include <vector>

#include "cli/sft/recipe.h"

namespace kt::inline cli {

struct TrainingRows {
  std::string name;                // as the recipe has it
  std::vector<std::string> files;  // .json and .jsonl
  std::string layout;              // "alpaca", "sharegpt", "messages", "pairs" or "judged"
  bool ranking = false;            // answers are pairs
  Json columns = Json::object();   // which column is what: {"prompt": "instruction", ...}
  Json tags = Json::object();      // of sharegpt: {"role_tag": "from", ...}
  int64_t most = 0;                // rows that the entry takes; 0: all
  std::vector<std::string> notes = {};

  OrderedJson json() const;
};

// Those of `dataset` or `eval_dataset`. Errors name the key's line, the dataset, the file, and the columns that are
// missing beside those that are there; also for rows that are no examples for the recipe's stage.
std::vector<TrainingRows> find_rows(const Recipe& recipe, std::string_view key);

// A path of the recipe: as it is where it exists or is absolute, else beside the recipe.
std::string beside_recipe(const Recipe& recipe, const std::string& path);

}  // namespace kt::inline cli
