#include "models/given_tree.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>

#include "base/error.h"
#include "models/operators.h"
#include "text/shown.h"

namespace kt::inline models {
namespace {

bool is_below(std::string_view name, std::string_view other) {
  return other.empty() ||
         (name.size() > other.size() && name.starts_with(other) && name[other.size()] == '.');
}

std::string_view last_component(std::string_view name) { return name.substr(name.rfind('.') + 1); }

// The first component of a name that is a number: its layer's; -1: there is none.
int layer_in(std::string_view name) {
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    int number = 0;
    const auto [rest, error] = std::from_chars(name.data() + begin, name.data() + end, number);
    if (error == std::errc() && rest == name.data() + end && number >= 0) return number;
    begin = end + 1;
  }
  return -1;
}

class GivenTreeBuilder {
 public:
  explicit GivenTreeBuilder(std::string family) { tree_.family = std::move(family); }

  ModuleTree build(std::span<const GivenModule> modules) {
    for (const GivenModule& given : modules) add(given);
    close_all_but(0);
    find_own_words(tree_);
    return std::move(tree_);
  }

 private:
  void close_all_but(size_t depth) {
    for (; above_.size() > depth; above_.pop_back()) tree_.modules[above_.back()].end = tree_.modules.size();
  }

  void add(const GivenModule& given) {
    while (!above_.empty() && !is_below(given.name, tree_.modules[above_.back()].name))
      close_all_but(above_.size() - 1);
    if (above_.empty() != tree_.modules.empty())
      fail("module \"{}\": expected the modules of one model, depth first", shown(given.name));
    ModelModule module{.name = given.name, .bias = given.bias, .count = given.experts};
    module.classes = given.classes;
    module.layer = layer_in(given.name);
    module.kind = kind_of(given);
    if (!given.shape.empty()) module.n = given.shape.front();
    if (given.shape.size() > 1) module.k = given.shape[1];
    module.part = part_of(module);
    settle_exact(module, given);
    if (!given.stored.empty() && (module.k > 0 || given.experts > 0)) {
      module.stored = given.stored;
      module.formats.assign(given.experts > 0 ? 3 : 1, format_named(given.stored));
    }
    above_.push_back(tree_.modules.size());
    tree_.modules.push_back(std::move(module));
  }

  const ModelModule* parent() const { return above_.empty() ? nullptr : &tree_.modules[above_.back()]; }
  bool is_below_kind(ModuleKind kind) const {
    return std::ranges::any_of(above_, [&](size_t at) { return tree_.modules[at].kind == kind; });
  }

  ModuleKind kind_of(const GivenModule& given) {
    if (above_.empty()) return ModuleKind::kModel;
    if (given.experts > 0) return ModuleKind::kExperts;
    const ModelModule& above = *parent();
    if (above.kind == ModuleKind::kList && layer_in(last_component(given.name)) >= 0)
      return ModuleKind::kLayer;
    for (const std::string& word : given.classes) {
      const auto [known, added] = kinds_.try_emplace(word, ModuleKind::kOther);
      if (added && word != "Module") {
        const MatchedClass found = matched_class(word, tree_.family);
        if (found.state == MatchedClass::State::kHere) known->second = found.kinds.front();
      }
      // A list inside a layer is not that of the layers.
      if (known->second == ModuleKind::kList && layer_in(given.name) >= 0) return ModuleKind::kOther;
      if (known->second != ModuleKind::kOther) return known->second;
    }
    return ModuleKind::kOther;
  }

  ModulePart part_of(const ModelModule& module) const {
    const bool matrix = module.kind == ModuleKind::kLinear;
    if (module.layer < 0) switch (module.kind) {
        case ModuleKind::kEmbedding:
          return ModulePart::kEmbedding;
        case ModuleKind::kNorm:
          return ModulePart::kFinalNorm;
        case ModuleKind::kRotary:
          return ModulePart::kRotary;
        default:
          return matrix ? ModulePart::kHead : ModulePart::kWhole;
      }
    if (module.kind == ModuleKind::kLayer) return ModulePart::kLayer;
    if (module.kind == ModuleKind::kRouter) return ModulePart::kRouter;
    if (module.kind == ModuleKind::kExperts || is_below_kind(ModuleKind::kExperts))
      return ModulePart::kExperts;
    const bool in_block = is_below_kind(ModuleKind::kMoe);
    if (module.kind == ModuleKind::kMlp) return in_block ? ModulePart::kShared : ModulePart::kMlp;
    if (module.kind == ModuleKind::kMoe) return ModulePart::kMoeBlock;
    if (is_below_kind(ModuleKind::kMlp)) return in_block ? ModulePart::kShared : ModulePart::kMlp;
    if (module.kind == ModuleKind::kAttention || module.kind == ModuleKind::kRecurrent)
      return ModulePart::kAttention;
    if (in_block && matrix) return module.n == 1 ? ModulePart::kShared : ModulePart::kRouter;
    if (in_block) return ModulePart::kMoeBlock;
    if (is_below_kind(ModuleKind::kAttention) || is_below_kind(ModuleKind::kRecurrent))
      return ModulePart::kAttention;
    return module.kind == ModuleKind::kNorm ? ModulePart::kNorms : ModulePart::kLayer;
  }

  // As in trees of ours: routers, gates of shared experts, latent attention's kv_b, small ones of the delta rule and
  // indexers.
  void settle_exact(ModelModule& module, const GivenModule& given) const {
    const std::string_view word = last_component(module.name);
    module.exact = module.kind == ModuleKind::kRouter ||
                   (module.kind == ModuleKind::kLinear &&
                    (module.part == ModulePart::kRouter ||
                     (module.part == ModulePart::kShared && module.n == 1) || word == "kv_b_proj" ||
                     (parent()->kind == ModuleKind::kRecurrent &&
                      (word == "in_proj_ba" || word == "in_proj_a" || word == "in_proj_b")) ||
                     (parent()->kind == ModuleKind::kIndexer && word == "weights_proj")));
    // It has no matrix of its own: nothing to round.
    if (module.kind == ModuleKind::kLinear && given.shape.size() != 2) module.kind = ModuleKind::kOther;
  }

  ModuleTree tree_;
  std::vector<size_t> above_;  // from the outermost
  std::map<std::string, ModuleKind> kinds_;
};

}  // namespace

ModuleTree given_tree(std::string family, std::span<const GivenModule> modules) {
  if (modules.empty()) fail("a model without modules");
  return GivenTreeBuilder(std::move(family)).build(modules);
}

}  // namespace kt::inline models
