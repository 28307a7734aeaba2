#include "models/rule_arguments.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "text/shown.h"

namespace kt::inline models {
namespace {

// Arguments that decide nothing here, whatever they say.
// Latent attention runs from the cached vectors for prompts too.
constexpr std::string_view kIdleArguments[] = {"chunck_size", "stride",    "group_max_len",
                                               "act_order",   "is_k_full", "out_device",
                                               "dump_enable", "dump_dir",  "absorb_for_prefill"};

[[noreturn]] void not_yet(const RuleFile& file, const Rule& rule, const char* kwarg, std::string_view what) {
  fail_as(ErrorKind::kUnsupported, "{}: kwargs: {}: {}", file.place(rule, rule.line_of_kwarg(kwarg)), kwarg,
          what);
}

void check_streaming(const RuleFile& file, const Rule& rule) {
  for (const char* kwarg : {"per_layer_prefill_intput_threshold", "prefill_threshold"})
    if (const auto found = rule.kwargs.find(kwarg); found != rule.kwargs.end() && *found > 0)
      not_yet(file, rule, kwarg,
              text("{} tokens: experts are not streamed to a GPU for prompts yet; 0 asks for none",
                   found->get<int64_t>()));
  if (const auto found = rule.kwargs.find("prefill"); found != rule.kwargs.end()) {
    const std::vector<std::string> known = {"cpu", "stream", "auto"};
    const auto word = found->get<std::string>();
    if (std::ranges::find(known, word) == known.end())
      fail("{}: kwargs: prefill: no way \"{}\"; the nearest is {}",
           file.place(rule, rule.line_of_kwarg("prefill")), shown(word), nearest_name(word, known));
    if (word == "stream") not_yet(file, rule, "prefill", "experts are not streamed to a GPU for prompts yet");
  }
}

// What rules say of copies is of routed experts.
void check_experts(const RuleFile& file, const Rule& rule, const ModuleTree& tree, const RuleMatches& matches,
                   int index) {
  for (const char* kwarg : {"gpu_experts", "strategy", "statistics", "prefill"}) {
    if (!rule.kwargs.contains(kwarg)) continue;
    size_t first = tree.modules.size();
    for (size_t i = tree.modules.size(); i-- > 0;) {
      if (matches.rule[i] != index) continue;
      if (tree.modules[i].part == ModulePart::kExperts) return;
      first = i;
    }
    fail("{}: kwargs: {}: of routed experts, and {} is none of them",
         file.place(rule, rule.line_of_kwarg(kwarg)), kwarg,
         tree.modules[first].name.empty() ? "the model" : tree.modules[first].name);
  }
}

bool is_of_model(const ModelModule& module) {
  return module.kind == ModuleKind::kModel || module.kind == ModuleKind::kDecoder ||
         module.kind == ModuleKind::kList;
}

}  // namespace

std::vector<std::string> checked_arguments(const RuleFile& file, const ModuleTree& tree,
                                           const RuleMatches& matches) {
  std::map<std::string, std::set<int>> idle;
  std::set<int> seen, llama, below;  // below: rules of parts of the model
  for (size_t i = 0; i < tree.modules.size(); ++i)
    if (!is_of_model(tree.modules[i])) below.insert(matches.rule[i]);
  for (size_t i = 0; i < tree.modules.size(); ++i) {
    const int index = matches.rule[i];
    if (index < 0 || !seen.insert(index).second) continue;
    const Rule& rule = file.rules[static_cast<size_t>(index)];
    const OperatorUse& use = matches.uses[static_cast<size_t>(index)];
    if (rule.own) continue;
    check_streaming(file, rule);
    check_experts(file, rule, tree, matches, index);
    for (const std::string_view kwarg : kIdleArguments)
      if (rule.kwargs.contains(kwarg)) idle[std::string(kwarg)].insert(index);
    for (const char* kwarg : {"prefill_device", "prefill_op"})
      if (rule.kwargs.contains(kwarg) && use.what != Replaces::kExperts) idle[kwarg].insert(index);
    for (const char* kwarg : {"device", "generate_device"})
      if (rule.kwargs.contains(kwarg) && !below.contains(index))
        idle[text("{} of a model", kwarg)].insert(index);
    if (use.name == "KLlamaAttention") llama.insert(index);
  }
  std::vector<std::string> out;
  std::string list;
  for (const auto& [kwarg, rules] : idle)
    list += text("{}{} ({})", list.empty() ? "" : "; ", kwarg, file.labels(rules));
  if (!list.empty()) out.push_back(text("{}: no meaning here: {}", file.name, list));
  if (!llama.empty())
    out.push_back(text("{}: KLlamaAttention ({}): all keys are attended to, not a choice of them", file.name,
                       file.labels(llama)));
  return out;
}

}  // namespace kt::inline models
