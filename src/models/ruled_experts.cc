#include "models/ruled_experts.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/error.h"
#include "text/shown.h"

namespace kt::inline models {
namespace {

class ExpertRuleReader {
 public:
  ExpertRuleReader(const RuleFile& file, const ModuleTree& tree) : file_(file), tree_(tree) {}

  void add(const RuledLayer& at) {
    const ModelModule& module = tree_.modules[at.module];
    count_ = static_cast<int>(module.end - at.module) - 1;
    const Rule* const rule = at.rule < 0 ? nullptr : &file_.rules[static_cast<size_t>(at.rule)];
    const bool counted = rule && (rule->kwargs.contains("gpu_experts") || rule->kwargs.contains("strategy") ||
                                  rule->kwargs.contains("statistics"));
    if (at.on_gpu || !at.singles.empty()) {
      if (counted && rule->kwargs.contains("gpu_experts") && read(*rule).asks())
        bad(*rule, "gpu_experts",
            text("copies are of experts that lie on the CPU, and of {} {} on the GPU", module.name,
                 at.on_gpu ? "all lie" : "rules put single ones"));
      return add(named_ones(at), module.layer);
    }
    if (!counted) return;
    ExpertRule asked = read(*rule);
    if (at.layer_on_cpu && asked.asks() && (asked.ids || asked.wish.kind != ExpertWish::Kind::kAuto))
      bad(*rule, "gpu_experts",
          text("copies lie on the GPU of the layer, and {} lies on the CPU",
               module.name.substr(0, module.name.find(".mlp"))));
    add(std::move(asked), module.layer);
  }

  std::vector<ExpertRule> take() { return std::move(out_); }

 private:
  [[noreturn]] void bad(const Rule& rule, const char* kwarg, const std::string& what) const {
    fail("{}: kwargs: {}: {}", file_.place(rule, rule.line_of_kwarg(kwarg)), kwarg, what);
  }

  void add(ExpertRule rule, int layer) {
    const auto same = [&](const ExpertRule& other) {
      return other.place == rule.place && other.decided_by == rule.decided_by && other.ids == rule.ids;
    };
    auto found = std::ranges::find_if(out_, same);
    if (found == out_.end()) found = out_.insert(out_.end(), std::move(rule));
    found->layers.push_back(layer);
  }

  ExpertRule named_ones(const RuledLayer& at) const {
    std::vector<bool> on_gpu(static_cast<size_t>(count_), at.on_gpu);
    std::set<int> rules;
    if (at.on_gpu && at.rule >= 0) rules.insert(at.rule);
    for (const RuledLayer::Single& each : at.singles) {
      on_gpu[static_cast<size_t>(each.expert)] = each.on_gpu;
      rules.insert(each.rule);
    }
    ExpertRule out;
    out.ids.emplace();
    for (int i = 0; i < count_; ++i)
      if (on_gpu[static_cast<size_t>(i)]) out.ids->push_back(i);
    if (rules.empty()) return out;
    const Rule& first = file_.rules[static_cast<size_t>(*rules.begin())];
    out.place = file_.place(first);
    out.decided_by = rules.size() == 1 ? rule_and_line(first) : file_.labels(rules);
    return out;
  }

  ExpertRule read(const Rule& rule) const {
    ExpertRule out{.decided_by = rule_and_line(rule), .place = file_.place(rule)};
    if (const auto found = rule.kwargs.find("gpu_experts"); found != rule.kwargs.end())
      read_count(rule, *found, out);
    if (const auto found = rule.kwargs.find("strategy"); found != rule.kwargs.end()) try {
        out.strategy = expert_strategy_named(found->get_ref<const std::string&>());
      } catch (const Error& error) {
        bad(rule, "strategy", error.what());
      }
    out.statistics_file = rule.kwargs.value("statistics", "");
    if (!out.statistics_file.empty() && out.strategy && *out.strategy != ExpertStrategy::kFrequency)
      bad(rule, "statistics",
          text("a placement by frequency reads them, the strategy is {}", name_of(*out.strategy)));
    return out;
  }

  void read_count(const Rule& rule, const Json& value, ExpertRule& out) const {
    if (value.is_array()) {
      out.ids.emplace();
      for (const Json& id : value) {
        if (!id.is_number_integer() || id < 0 || id >= count_)
          bad(rule, "gpu_experts",
              text("expected numbers of experts, 0 to {}, found {}", count_ - 1,
                   id.is_number() ? id.dump() : std::string(json_kind(id))));
        out.ids->push_back(id.get<int>());
      }
      std::ranges::sort(*out.ids);
      if (const auto twice = std::ranges::adjacent_find(*out.ids); twice != out.ids->end())
        bad(rule, "gpu_experts", text("expert {} is named twice", *twice));
      return;
    }
    if (!value.is_string() && !value.is_number_integer())
      bad(rule, "gpu_experts",
          text("expected experts a layer, a share such as 25%, or a list of ids, found {}",
               json_kind(value)));
    const std::string given = value.is_string() ? value.get<std::string>() : value.dump();
    out.wish = parse_expert_wish(
        given, text("{}: kwargs: gpu_experts", file_.place(rule, rule.line_of_kwarg("gpu_experts"))));
    if (out.wish.kind == ExpertWish::Kind::kPerLayer && out.wish.amount > count_)
      bad(rule, "gpu_experts", text("{} of {} experts a layer", given, count_));
  }

  const RuleFile& file_;
  const ModuleTree& tree_;
  int count_ = 0;  // experts of the layer that is looked at
  std::vector<ExpertRule> out_;
};

}  // namespace

std::vector<ExpertRule> expert_rules(const RuleFile& file, const ModuleTree& tree,
                                     const std::vector<RuledLayer>& layers) {
  ExpertRuleReader reader(file, tree);
  for (const RuledLayer& each : layers) reader.add(each);
  return reader.take();
}

std::string rule_and_line(const Rule& rule) {
  return rule.given.empty() ? text("rule {}, line {}", rule.number, rule.line) : rule.label();
}

}  // namespace kt::inline models
