// Flags of every verb that runs a model.
#pragma once
#include <functional>
#include <string>

#include "cli/gpu_flags.h"
#include "cli/registry/fetch_model.h"
#include "cli/registry/registry.h"
#include "cli/verbs.h"
#include "engine/loaded_model.h"

namespace kt::inline cli {

struct ModelFlags {
  // `model` is the path, also where a name was given; `found` has the name and what is linked to it.
  ResolvedModel found;
  std::string model, weights, format, linear_format, acts = "default", kv = "bf16", max_memory;
  GpuUseFlags gpu;
  RuleWords rules;
  std::string rules_out;
  std::vector<std::string> adapters;  // as given
  bool dense_attention = false;
  int threads = 0, step_tokens = ModelOptions{}.max_tokens;
  void add_to(CLI::App& verb, Invocation& run);  // MODEL and the options
  void add_options(CLI::App& verb);              // for a verb that takes the model its own way
  bool uses_gpu() const { return gpu.choice().kind != GpuChoice::Kind::kOff; }
  ModelOptions options() const;
  // For verbs whose every answer has the same weights: the number of the one adapter that was given, or -1. Error for
  // several.
  int one_adapter() const;
  // One line for those of a GPU's flags that were given where none is used; kt run says it among other flags.
  void note_idle_flags() const;

  const CLI::App* verb = nullptr;  // whose flags these are, once add_options() was called

 private:
  void add_rules(CLI::App& verb);
  void add_adapters(CLI::App& verb);
};

// Makes `option` of a verb take a model by any name (registry.h) and adds --download. `path`, which the option fills,
// and what is `found` are those of a model on this disk when the verb's action runs: one that is not is downloaded
// before that, if the user agrees. Error while the command line is read for a word that means nothing. `path` and
// `found` must live as long as the option.
struct ModelArgument {
  std::string* path = nullptr;
  ResolvedModel* found = nullptr;                  // may be null
  std::function<ModelUse()> use = {};              // asked once all flags are known; without it kRun
  bool* download = nullptr;                        // gets --download, where the verb has more to fetch
  bool (*is_other)(const std::string&) = nullptr;  // words that are no model's and stay as they are
};
CLI::Option* take_model(CLI::App& verb, Invocation& run, CLI::Option* option, const ModelArgument& argument);
// --download alone, for a verb that takes the model its own way.
void add_download_flag(CLI::App& verb, bool& download);

inline constexpr const char* kModelHelp =
    "The model: its folder as it was published, a .gguf file, a name of kt model list, or "
    "ORG/REPO[:FILE.gguf] of a hub";

}  // namespace kt::inline cli
