// A recipe brought together with a model, rows and a machine: what will be trained, with what, and what it takes.
// Nothing is loaded for it; everything that can be refused is refused here.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "cli/sft/datasets.h"
#include "cli/sft/lora_parts.h"
#include "cli/sft/recipe.h"
#include "cli/sft/training_memory.h"

namespace kt::inline cli {

// What placement rules ask of the experts, and the devices they name.
struct RuleWishes {
  std::string format;                // of kFormats; "": as stored
  std::vector<std::string> devices;  // of CUDA, in order
};

struct TrainingPlan {
  explicit TrainingPlan(Recipe read) : recipe(std::move(read)) {}

  Recipe recipe;
  std::string model, name, family;  // its folder, as it was named, "deepseek_v3"
  std::string weights, format,
      stored;  // experts from elsewhere, what they are rounded to, how they are stored; "": not so
  int layers = 0, routed_layers = 0, experts = 0, top_k = 0;
  uint64_t parameters = 0;
  int64_t rank = 0;
  double alpha = 0;
  std::vector<std::string> targets;  // words of lora_target
  std::vector<LoraPart> parts;
  std::string adapter;  // to train on; "": a new one
  std::vector<TrainingRows> rows, eval_rows;
  int64_t batch = 0, tokens = 0;  // rows of a micro-batch, and the most tokens it has
  double rows_per_expert = 0;     // of such a micro-batch
  bool bf16 = false;              // in torch; experts follow the recipe
  bool retain = true;
  int threads = 0, nodes = 0;
  std::vector<std::string> devices;  // of torch: "cpu", "cuda:0", ...
  std::string output, resume;        // resume: a checkpoint's folder; "": from the beginning
  TrainingMemory memory;
  std::vector<std::string> notes;

  uint64_t trainable() const;
  OrderedJson json() const;  // for programs and for the Python side
};

// Errors: as Recipe's, OpenedModel's and find_rows'; Error(kMemory) only from check_memory().
TrainingPlan plan_training(Recipe recipe);
// Error(kMemory) with the largest parts and what makes it smaller, if the plan does not fit this machine.
void check_memory(const TrainingPlan& plan);

// For people: the plan and its memory, in tables.
std::string describe(const TrainingPlan& plan);

}  // namespace kt::inline cli
