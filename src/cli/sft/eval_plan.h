// A recipe brought together with its model and its rows: what kt sft eval will ask. Of the weights only headers are
// read.
#pragma once
#include <string>
#include <vector>

#include "cli/sft/eval_cases.h"
#include "cli/sft/recipe_model.h"
#include "engine/evaluation.h"
#include "engine/opened_model.h"

namespace kt::inline cli {

struct EvalPlan {
  std::string name, adapter, output;  // the model as it was named; "": no adapter
  std::vector<std::string> rows_of;   // datasets, by name
  bool held = false;                  // the rows that val_size holds back
  std::vector<EvalCase> cases;
  size_t dropped = 0, choices = 0;  // rows that are no questions; cases of multiple choice
  EvaluationOptions how;
  MemoryRequest use;
  uint64_t bytes = 0;  // of the model with this use
  std::vector<std::string> notes;

  OrderedJson json() const;
};

// Everything that can be refused before loading is refused here: a missing dataset, rows of which none is left, an
// adapter of another model (by the model that is `opened`).
EvalPlan plan_evaluation(const Recipe& recipe, const OpenedModel& opened);

// For people, in a table.
std::string describe(const EvalPlan& plan);

}  // namespace kt::inline cli
