// What rules match, as a table and as JSON.
#include <algorithm>
#include <set>
#include <tuple>

#include "base/text.h"
#include "models/placement.h"
#include "models/rule_matches.h"
#include "terminal/report.h"

namespace kt {
namespace {

// A part of some layers, or of the model, that the same rules decide.
struct RuledPart {
  ModulePart part;
  std::vector<int> layers = {};
  std::set<int> rules = {};  // indices; kNone: some modules have none
  std::set<std::string> stored = {};
  size_t modules = 0;
};

// Parts in the order of the model, of which each layer's are together where its rules are those of others.
std::vector<RuledPart> ruled_parts(const RuleMatches& matches, const ModuleTree& tree) {
  std::vector<RuledPart> out;
  const std::vector<ModelModule>& modules = tree.modules;
  for (size_t begin = 0, end = 0; begin < modules.size(); begin = end) {
    // One layer, or one module beside them.
    end = modules[begin].layer < 0 ? begin + 1 : modules[begin].end;
    std::vector<RuledPart> here;
    for (size_t i = begin; i < end; ++i) {
      if (matches.rule[i] == RuleMatches::kBelow) continue;
      auto at = std::ranges::find(here, modules[i].part, &RuledPart::part);
      if (at == here.end()) at = here.insert(here.end(), {.part = modules[i].part});
      at->rules.insert(matches.rule[i]);
      if (!modules[i].stored.empty()) at->stored.insert(modules[i].stored);
      ++at->modules;
    }
    for (RuledPart& part : here) {
      auto same = std::ranges::find_if(out, [&](const RuledPart& other) {
        return other.part == part.part && other.rules == part.rules && other.stored == part.stored;
      });
      if (same == out.end()) same = out.insert(out.end(), {part.part, {}, part.rules, part.stored});
      if (modules[begin].layer >= 0) same->layers.push_back(modules[begin].layer);
      same->modules += part.modules;
    }
  }
  std::ranges::sort(out, {}, [](const RuledPart& part) {
    return std::tuple(part.part, part.layers.empty() ? -1 : part.layers.front(), part.rules);
  });
  return out;
}

std::string joined(const std::set<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : ", ") + word;
  return out.empty() ? "-" : out;
}

template <typename Of>
std::set<std::string> said_by(const RuleMatches& matches, const RuledPart& part, Of of) {
  std::set<std::string> out;
  for (const int rule : part.rules)
    if (rule >= 0 && !(matches.uses[static_cast<size_t>(rule)].*of).empty())
      out.insert(matches.uses[static_cast<size_t>(rule)].*of);
  return out;
}

// "rule 4, line 26", "rules 4 and 12, lines 26 and 104"; "no rule".
std::string decided_by(const RuledPart& part, const RuleFile& file) {
  std::string numbers, lines;
  const bool some = part.rules.contains(RuleMatches::kNone);
  const size_t count = part.rules.size() - (some ? 1 : 0);
  if (count == 0) return "no rule";
  size_t at = 0;
  for (const int index : part.rules) {
    if (index < 0) continue;
    const Rule& rule = file.rules[static_cast<size_t>(index)];
    const char* const between = at == 0 ? "" : at + 1 == count ? " and " : ", ";
    numbers += text("{}{}", between, rule.number);
    lines += text("{}{}", between, rule.line);
    ++at;
  }
  const char* const plural = count == 1 ? "" : "s";
  return text("rule{} {}, line{} {}{}", plural, numbers, plural, lines, some ? "; the rest by none" : "");
}

size_t layers_of(const ModuleTree& tree) {
  return static_cast<size_t>(std::ranges::count(tree.modules, ModuleKind::kLayer, &ModelModule::kind));
}

}  // namespace

std::string describe(const RuleMatches& matches, const RuleFile& file, const ModuleTree& tree) {
  std::string out = text("what the rules of {} name in {}, {}\n", file.name, tree.family,
                         counted(static_cast<int64_t>(layers_of(tree)), "layer"));
  Table table({"part", "layers", "device", "format", "stored", "decided by"}, 6);
  for (const RuledPart& part : ruled_parts(matches, tree)) {
    if (part.part == ModulePart::kWhole && part.rules == std::set<int>{RuleMatches::kNone}) continue;
    table.add({std::string(name_of(part.part)), ranges_text(part.layers),
               joined(said_by(matches, part, &OperatorUse::device)),
               joined(said_by(matches, part, &OperatorUse::format)), joined(part.stored),
               decided_by(part, file)});
  }
  out += table.str();
  for (const RuleMatches::Idle& idle : matches.idle) {
    const Rule& rule = file.rules[static_cast<size_t>(idle.rule)];
    out += text("idle: rule {}, line {}: {}\n", rule.number, rule.line, idle.why);
  }
  for (const std::string& note : matches.notes) out += note + "\n";
  return out;
}

OrderedJson json_of(const RuleMatches& matches, const RuleFile& file, const ModuleTree& tree) {
  OrderedJson parts = OrderedJson::array(), idle = OrderedJson::array();
  for (const RuledPart& part : ruled_parts(matches, tree)) {
    OrderedJson rules = OrderedJson::array();
    for (const int rule : part.rules) rules.push_back(rule < 0 ? OrderedJson() : OrderedJson(rule + 1));
    parts.push_back({{"part", name_of(part.part)},
                     {"layers", part.layers},
                     {"modules", part.modules},
                     {"devices", said_by(matches, part, &OperatorUse::device)},
                     {"formats", said_by(matches, part, &OperatorUse::format)},
                     {"operators", said_by(matches, part, &OperatorUse::name)},
                     {"stored", part.stored},
                     {"rules", std::move(rules)}});
  }
  for (const RuleMatches::Idle& each : matches.idle) {
    const Rule& rule = file.rules[static_cast<size_t>(each.rule)];
    idle.push_back({{"rule", rule.number}, {"line", rule.line}, {"why", each.why}});
  }
  return {{"file", file.name},
          {"rules", file.rules.size()},
          {"parts", std::move(parts)},
          {"idle", std::move(idle)},
          {"notes", matches.notes}};
}

}  // namespace kt
