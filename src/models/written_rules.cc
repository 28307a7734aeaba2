// A decided placement as a rule file: a rule for all matrices of one format in the same layers, one for experts that
// are placed alike, then layers, which what has no rule follows.
#include <algorithm>
#include <map>
#include <set>

#include "base/text.h"
#include "models/decided_placement.h"
#include "text/shown.h"

namespace kt::inline models {
namespace {

std::string escaped(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (c == '.') out += '\\';
    out += c;
  }
  return out;
}

template <typename Words>
std::string one_of(const Words& words) {
  std::string out;
  for (const auto& word : words) out += text("{}{}", out.empty() ? "" : "|", word);
  return words.size() == 1 ? out : text("({})", out);
}

// Modules of layers, by the layers that are meant. `all`: those are all that have one of this name.
struct LayerSet {
  std::set<int> layers = {};
  bool all = false;
  auto operator<=>(const LayerSet&) const = default;
};

class RuleWriter {
 public:
  explicit RuleWriter(const DecidedPlacement& decided) : decided_(decided) {
    for (const DecidedModule& module : decided.modules)
      if (module.kind == ModuleKind::kLayer) layers_.emplace(module.layer, &module);
    for (const DecidedModule& module : decided.modules)
      if (module.layer >= 0 && module.kind != ModuleKind::kLayer)
        having_[suffix_of(module)].insert(module.layer);
  }

  std::string write(std::string_view model) {
    out_ = text("# What kt decided for {} ({}), as placement rules.\n", shown(model), decided_.family);
    for (const auto& [pattern, kwargs] : in_layers()) rule(pattern, kwargs);
    whole_layers();
    for (const DecidedModule& module : decided_.modules)
      if (module.layer < 0) rule(text("^{}$", escaped(module.name)), device(module) + format(module));
    rule(text("^{}$", escaped(prefix().substr(0, prefix().rfind('.')))),
         text("prefill_threshold: {}", decided_.prefill_threshold));
    return std::move(out_);
  }

 private:
  // "model.layers" of "model.layers.3".
  std::string prefix() const {
    const std::string& name = layers_.begin()->second->name;
    return name.substr(0, name.rfind('.'));
  }
  std::string suffix_of(const DecidedModule& module) const {
    return module.name.substr(layers_.at(module.layer)->name.size() + 1);
  }

  void rule(const std::string& pattern, const std::string& kwargs) {
    out_ += text("- match: {{name: '{}'}}\n  replace: {{class: default, kwargs: {{{}}}}}\n", pattern, kwargs);
  }

  static std::string device(const DecidedModule& module) {
    return text("device: '{}'", module.device == "host" ? "cpu" : module.device);
  }
  // Matrices that are left alone have the format "stored" of their layer.
  static std::string format(const DecidedModule& module) {
    if (module.kind == ModuleKind::kEmbedding || module.formats.empty()) return "";
    const auto rounded =
        std::ranges::find_if(module.formats, [](const auto& one) { return one != "stored"; });
    return text(", format: {}{}", rounded == module.formats.end() ? "stored" : *rounded,
                module.rounds_again ? ", rounds_again: true" : "");
  }

  // What a module says that its layer does not; "": nothing.
  std::string own_kwargs(const DecidedModule& module) const {
    const bool elsewhere = module.device != layers_.at(module.layer)->device;
    const bool rounded = std::ranges::any_of(module.formats, [](const auto& one) { return one != "stored"; });
    if (module.kind == ModuleKind::kExperts) {
      std::string ids;
      for (const int id : module.on_gpu) ids += text("{}{}", ids.empty() ? "" : ", ", id);
      const bool counted =
          decided_.beside_gpu && module.device == "cpu" && layers_.at(module.layer)->device != "cpu";
      return device(module) + format(module) + (counted ? text(", gpu_experts: [{}]", ids) : "");
    }
    if (!elsewhere && !rounded) return "";
    const std::string kwargs = (elsewhere ? device(module) : "") + (rounded ? format(module) : "");
    return kwargs.starts_with(", ") ? kwargs.substr(2) : kwargs;
  }

  std::string layers_pattern(const LayerSet& set) const {
    return text("^{}\\.{}", escaped(prefix()), set.all ? "\\d+" : one_of(set.layers));
  }

  // Patterns and arguments: names that the same layers have in the same way stand together.
  std::vector<std::pair<std::string, std::string>> in_layers() const {
    std::map<std::string, std::map<std::string, std::set<int>>> meant;  // by arguments, by suffix
    for (const DecidedModule& module : decided_.modules) {
      if (module.layer < 0 || module.kind == ModuleKind::kLayer) continue;
      const std::string kwargs = own_kwargs(module);
      if (!kwargs.empty()) meant[kwargs][suffix_of(module)].insert(module.layer);
    }
    std::vector<std::pair<std::string, std::string>> out;
    for (const auto& [kwargs, suffixes] : meant) {
      std::map<LayerSet, std::vector<std::string>> together;
      for (const auto& [suffix, layers] : suffixes)
        together[{layers, layers == having_.at(suffix)}].push_back(escaped(suffix));
      for (const auto& [set, names] : together)
        out.emplace_back(text("{}\\.{}$", layers_pattern(set), one_of(names)), kwargs);
    }
    return out;
  }

  void whole_layers() {
    std::map<std::string, std::set<int>> devices;
    for (const auto& [number, layer] : layers_) devices[device(*layer)].insert(number);
    for (const auto& [kwargs, layers] : devices)
      rule(layers_pattern({layers, devices.size() == 1}) + "$", kwargs + ", format: stored");
  }

  const DecidedPlacement& decided_;
  std::map<int, const DecidedModule*> layers_;
  std::map<std::string, std::set<int>> having_;  // layers, by the names below them
  std::string out_;
};

}  // namespace

std::string rules_text(const DecidedPlacement& decided, std::string_view model) {
  return RuleWriter(decided).write(model);
}

}  // namespace kt::inline models
