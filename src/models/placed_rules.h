// What rules decide of a model: where each module lies and in which format, and which rule said so. A value made from
// sizes and headers before anything is read. describe -> decide -> load: the loader, estimates and reports take it from
// here, and what rules may not ask for, or what the engine cannot do yet, is refused here.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "models/expert_order.h"
#include "models/placement.h"
#include "models/rule_matches.h"
#include "weights/requantise.h"

namespace kt::inline models {

// A source with fewer bits for each weight is not rounded a second time by rules.
inline constexpr double kLeastRoundedBits = 6;

// What holds where rules are silent.
struct RuleDefaults {
  std::optional<Format> experts = {}, linears = {};  // `format` and `linear_format`; none: as stored
  bool gpu = false;                                  // `gpu` names one, so that dense parts go there
  // Of a given tree, which somebody else runs: each module lies where its rule or its layer's says, and gate and up of
  // an MLP may differ.
  bool given = false;
};

struct PlacedModule {
  // The rule that decides it, its own or that of a module above it in the layer, as an index; or kNone.
  int rule = RuleMatches::kNone;
  std::string device =
      {};  // "cpu", "cuda:0", "host" of the embedding; empty: where `gpu`, or the caller, says
  // What it is rounded to, of a matrix or of experts' gate, up and down; none: as stored. Empty: it has no matrix.
  std::vector<std::optional<Format>> rounded = {};
  bool by_flag = false;  // a flag, not a rule, says what it is rounded to
};

struct PlacedRules {
  // Layers without routed experts, and the head: kGpu where a rule names one for any of them.
  enum class Dense : uint8_t { kAsFlagsSay, kCpu, kGpu };

  RuleFile file;
  ModuleTree tree;
  RuleMatches matches;
  std::vector<PlacedModule> modules = {};  // of the tree's
  Dense dense = Dense::kAsFlagsSay;
  // Of kGpu: by layer which GPU, kOnHost or kUndecided (models/placement.h), the same of the head, and how many GPUs.
  std::vector<int> layers_on = {};
  int head_on = kUndecided;
  int gpus = 0;
  std::vector<ExpertRule> experts = {};  // that a GPU holds
  std::string gpu_from = {};  // who names the last of them: "FILE:4: rule 2: model.layers.0.self_attn"
  std::vector<std::string> notes =
      {};  // what of the rules has no meaning here, or not the one they mean; a line each

  LinearFormats linear_formats() const;
  ExpertFormats expert_formats() const;
};

// Without rules all is as the flags and the checkpoint say. `tree` has stored formats (add_stored_formats). Errors,
// each with the rule's place and the module: as match_rules(); devices, formats and arguments that a model cannot be
// placed by; Error(kUnsupported): those that are not there yet.
PlacedRules place_by_rules(RuleFile file, ModuleTree tree, const RuleDefaults& defaults);

// The same with devices where rules have none, as a placement has them.
PlacedRules with_devices(PlacedRules placed, const Placement& beside_gpu);

// Notes, and idle rules in one line, for whoever loads a model by them.
std::vector<std::string> rule_notes(const PlacedRules& placed);

// For people: parts of the model, where each lies, in which format and who decided; ranges of layers in one line.
std::string describe(const PlacedRules& placed, bool on_gpu);
OrderedJson json_of(const PlacedRules& placed, bool on_gpu);
// "rule 4 takes 1.2 GiB, rule 2 300.0 MiB": those of whose parts there is most on a device; "": none.
std::string largest_rules(const PlacedRules& placed, std::string_view device, bool on_gpu);

}  // namespace kt::inline models
