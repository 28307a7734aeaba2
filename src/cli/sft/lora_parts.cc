#include "cli/sft/lora_parts.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

// Components that mean the same in names of different families; the first of each is what names are compared in.
constexpr std::pair<std::string_view, std::string_view> kSameComponents[] = {
    {"block_sparse_moe", "mlp"},
    {"feed_forward", "mlp"},
    {"shared_expert", "shared_experts"},
    {"shared_mlp", "shared_experts"},
    {"w1", "gate_proj"},
    {"w3", "up_proj"},
    {"w2", "down_proj"},
};

std::vector<std::string> components_of(const std::string& name) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    std::string one = name.substr(at, end - at);
    for (const auto& [other, own] : kSameComponents)
      if (one == other) one = own;
    out.push_back(std::move(one));
    at = end + 1;
  }
  return out;
}

bool names(const std::vector<std::string>& word, const std::string& name) {
  const std::vector<std::string> components = components_of(name);
  return std::ranges::search(components, word).begin() != components.end();
}

bool is_named(const LoraMatrix& matrix, const std::vector<std::string>& word) {
  return names(word, matrix.name) ||
         std::ranges::any_of(matrix.other, [&](const std::string& other) { return names(word, other); });
}

// What people may have meant: the ends of all names.
std::vector<std::string> known_words(const std::vector<LoraMatrix>& all) {
  std::vector<std::string> out = {"all", "all_attention"};
  const auto add = [&](const std::string& name) {
    const std::string last = name.substr(name.rfind('.') + 1);
    if (std::ranges::find(out, last) == out.end()) out.push_back(last);
  };
  for (const LoraMatrix& matrix : all) {
    add(matrix.name);
    for (const std::string& other : matrix.other) add(other);
    if (matrix.part == ModulePart::kExperts) add("experts");
    if (matrix.part == ModulePart::kShared) add("shared_experts");
  }
  return out;
}

[[noreturn]] void refuse_word(const std::vector<LoraMatrix>& all, const std::string& word,
                              const std::string& place) {
  for (const std::string_view whole : {"gate", "router", "lm_head", "embed_tokens", "norm"})
    if (word == whole || word.ends_with(text(".{}", whole)))
      fail("{}: '{}' has no LoRA here; additional_target trains a module whole", place, shown(word));
  const std::vector<std::string> known = known_words(all);
  fail("{}: no module of this model is called '{}'; the nearest is {}; known are {}", place, shown(word),
       nearest_name(word, known), shown_list(known));
}

}  // namespace

std::vector<LoraMatrix> lora_matrices(const ModelSpec& spec, const ModuleTree& tree) {
  std::vector<LoraMatrix> out;
  for (const ModelModule& module : tree.modules) {
    if (module.layer < 0) continue;
    const auto layer = static_cast<size_t>(module.layer);
    if (module.kind == ModuleKind::kExperts) {
      const int64_t experts = spec.layers[layer].moe()->experts;
      const std::string at = module.name + ".";
      out.push_back({.name = at + "gate_up_proj",
                     .other = {at + "gate_proj", at + "up_proj"},
                     .part = ModulePart::kExperts,
                     .layer = module.layer,
                     .n = 2 * module.n,
                     .k = module.k,
                     .count = experts});
      out.push_back({.name = at + "down_proj",
                     .part = ModulePart::kExperts,
                     .layer = module.layer,
                     .n = module.k,
                     .k = module.n,
                     .count = experts});
    }
    constexpr std::array kParts = {ModulePart::kAttention, ModulePart::kShared, ModulePart::kMlp};
    const bool may =
        module.kind == ModuleKind::kLinear && std::ranges::find(kParts, module.part) != kParts.end();
    if (!may || module.n == 1) continue;  // the gate of a shared expert is one row
    out.push_back(
        {.name = module.name, .part = module.part, .layer = module.layer, .n = module.n, .k = module.k});
  }
  return out;
}

std::vector<LoraMatrix> chosen_matrices(std::vector<LoraMatrix> all, const std::vector<std::string>& words,
                                        const std::string& place) {
  std::vector<bool> taken(all.size());
  for (const std::string& word : words) {
    const std::vector<std::string> components = components_of(word);
    bool any = false;
    for (size_t i = 0; i < all.size(); ++i) {
      const bool takes = word == "all" || (word == "all_attention" ? all[i].part == ModulePart::kAttention
                                                                   : is_named(all[i], components));
      taken[i] = taken[i] || takes;
      any = any || takes;
    }
    if (!any) refuse_word(all, word, place);
  }
  std::vector<LoraMatrix> out;
  for (size_t i = 0; i < all.size(); ++i)
    if (taken[i]) out.push_back(std::move(all[i]));
  if (out.empty()) fail("{}: expected all, all_attention or names of modules, found nothing", place);
  return out;
}

std::vector<LoraPart> count_lora(const std::vector<LoraMatrix>& chosen, int64_t rank) {
  std::vector<LoraPart> out;
  for (const ModulePart part :
       {ModulePart::kAttention, ModulePart::kExperts, ModulePart::kShared, ModulePart::kMlp}) {
    LoraPart sum{.part = part};
    for (const LoraMatrix& matrix : chosen) {
      if (matrix.part != part) continue;
      sum.matrices += matrix.count;
      sum.weights += matrix.weights();
      sum.trainable += matrix.trainable(rank);
    }
    if (sum.matrices > 0) out.push_back(sum);
  }
  return out;
}

}  // namespace kt::inline cli
