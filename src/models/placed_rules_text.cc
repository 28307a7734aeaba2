// What rules decide, as a table and as JSON.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/text.h"
#include "formats/format.h"
#include "models/placed_rules.h"
#include "models/placement.h"
#include "models/ruled_experts.h"
#include "terminal/report.h"

namespace kt::inline models {
namespace {

// A part of some layers, or of the model, that the same rules put in one place.
struct RuledPart {
  ModulePart part;
  std::vector<int> layers = {};
  std::string device = {};
  std::set<std::string> formats = {};  // "int8", "bf16, stored"
  std::set<int> rules = {};            // indices; kNone: some modules have none
  std::string flag = {};               // that says a format
  double bytes = 0;
  size_t modules = 0;

  bool is_like(const RuledPart& other) const {
    return part == other.part && device == other.device && formats == other.formats && rules == other.rules &&
           flag == other.flag;
  }
};

double matrix_bytes(const Format& format, int64_t n, int64_t k) {
  return stored_bits(format, n, k) / 8 * static_cast<double>(n) * static_cast<double>(k);
}

// What one module adds to its part: weights in their formats' own bytes, norms and biases in f32.
void add_module(const PlacedRules& placed, size_t at, RuledPart& to) {
  const ModelModule& module = placed.tree.modules[at];
  const PlacedModule& where = placed.modules[at];
  to.rules.insert(where.rule);
  ++to.modules;
  const bool experts = module.kind == ModuleKind::kExperts;
  if (where.by_flag) to.flag = experts ? "`format`" : "`linear_format`";
  const double times = experts ? static_cast<double>(module.count) : 1;
  for (size_t m = 0; m < where.rounded.size(); ++m) {
    const bool known = m < module.formats.size();
    if (!where.rounded[m] && !known) continue;
    const Format& format = where.rounded[m] ? *where.rounded[m] : module.formats[m];
    const bool down = m == 2;
    to.bytes += times * matrix_bytes(format, down ? module.k : module.n, down ? module.n : module.k);
    to.formats.insert(name_of(format) + (where.rounded[m]                        ? ""
                                         : module.kind == ModuleKind::kEmbedding ? ", mapped"
                                                                                 : ", stored"));
  }
  const bool vector = where.rounded.empty() && module.n > 0;
  if (vector || module.bias) to.bytes += static_cast<double>(module.n) * sizeof(float);
}

// Parts that hold bytes, in the order of the model; layers whose part is that of others are together.
std::vector<RuledPart> ruled_parts(const PlacedRules& placed, bool on_gpu) {
  std::vector<RuledPart> out;
  const std::vector<ModelModule>& modules = placed.tree.modules;
  for (size_t begin = 0, end = 0; begin < modules.size(); begin = end) {
    // One layer, or one module beside them.
    end = modules[begin].layer < 0 ? begin + 1 : modules[begin].end;
    std::map<ModulePart, RuledPart> here;
    for (size_t i = begin; i < end; ++i) {
      if (modules[i].kind == ModuleKind::kExpert) continue;
      RuledPart& part = here[modules[i].part];
      part.part = modules[i].part;
      const std::string& device = placed.modules[i].device;
      part.device = !device.empty() ? device : on_gpu ? "cuda:0" : "cpu";
      add_module(placed, i, part);
    }
    for (const auto& [unused, part] : here) {
      if (part.bytes == 0) continue;
      auto same = std::ranges::find_if(out, [&](const RuledPart& other) { return other.is_like(part); });
      if (same == out.end()) {
        same = out.insert(out.end(), part);
      } else {
        same->bytes += part.bytes;
        same->modules += part.modules;
      }
      if (modules[begin].layer >= 0) same->layers.push_back(modules[begin].layer);
    }
  }
  std::ranges::sort(out, {}, [](const RuledPart& part) {
    return std::tuple(part.part, part.layers.empty() ? -1 : part.layers.front(), part.rules);
  });
  return out;
}

std::string joined(const std::set<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : "; ") + word;
  return out.empty() ? "-" : out;
}

// "rule 4, line 26", "rules 4 and 12, lines 26 and 104"; "no rule".
std::string decided_by(const RuledPart& part, const RuleFile& file) {
  std::vector<int> numbers, lines;
  std::set<int> given;
  for (const int index : part.rules) {
    if (index < 0) continue;
    const Rule& rule = file.rules[static_cast<size_t>(index)];
    if (!rule.given.empty()) {
      given.insert(index);
      continue;
    }
    numbers.push_back(rule.number);
    lines.push_back(rule.line);
  }
  const auto listed = [](const std::vector<int>& those) {
    std::string out;
    for (size_t i = 0; i < those.size(); ++i)
      out += text("{}{}", i == 0 ? "" : i + 1 == those.size() ? " and " : ", ", those[i]);
    return out;
  };
  const char* const plural = numbers.size() == 1 ? "" : "s";
  std::string out =
      numbers.empty() ? "" : text("rule{} {}, line{} {}", plural, listed(numbers), plural, listed(lines));
  for (const std::string& more : {given.empty() ? "" : file.labels(given), part.flag})
    if (!more.empty()) out += (out.empty() ? "" : "; ") + more;
  if (out.empty()) return file.rules.empty() ? "as stored" : "no rule";
  return part.rules.contains(RuleMatches::kNone) && part.flag.empty() ? out + "; the rest by none" : out;
}

size_t layers_of(const ModuleTree& tree) {
  return static_cast<size_t>(std::ranges::count(tree.modules, ModuleKind::kLayer, &ModelModule::kind));
}

}  // namespace

std::vector<std::string> rule_notes(const PlacedRules& placed) {
  std::vector<std::string> out;
  std::map<std::string, std::set<int>> idle;
  for (const RuleMatches::Idle& each : placed.matches.idle) idle[each.why].insert(each.rule);
  std::string line;
  for (const auto& [why, rules] : idle)
    line += text("{}{} ({})", line.empty() ? "" : "; ", placed.file.labels(rules), why);
  if (!line.empty()) out.push_back(text("{}: idle: {}", placed.file.name, line));
  for (const auto* notes : {&placed.matches.notes, &placed.notes})
    out.insert(out.end(), notes->begin(), notes->end());
  return out;
}

std::string describe(const PlacedRules& placed, bool on_gpu) {
  const RuleFile& file = placed.file;
  std::string out = text("placement of {}, {}: {} ({})\n", placed.tree.family,
                         counted(static_cast<int64_t>(layers_of(placed.tree)), "layer"), file.name,
                         counted(std::ssize(file.rules), "rule"));
  Table table({"part", "layers", "device", "format", "bytes", "decided by"}, 4);
  std::map<std::string, double> bytes;
  for (const RuledPart& part : ruled_parts(placed, on_gpu)) {
    bytes[part.device] += part.bytes;
    table.add({std::string(name_of(part.part)), ranges_text(part.layers), part.device, joined(part.formats),
               human_bytes(static_cast<uint64_t>(part.bytes)), decided_by(part, file)});
  }
  out += table.str();
  std::string line;
  for (const auto& [device, all] : bytes)
    line += text("{}{} {}", line.empty() ? "" : ", ", device, human_bytes(static_cast<uint64_t>(all)));
  out += line + "\n";
  for (const RuleMatches::Idle& idle : placed.matches.idle)
    out += text("idle: {}: {}\n", rule_and_line(file.rules[static_cast<size_t>(idle.rule)]), idle.why);
  for (const auto* notes : {&placed.matches.notes, &placed.notes})
    for (const std::string& note : *notes) out += text("note: {}\n", note);
  return out;
}

OrderedJson json_of(const PlacedRules& placed, bool on_gpu) {
  const RuleFile& file = placed.file;
  const auto number = [&](int index) -> OrderedJson {
    if (index < 0) return {};
    const Rule& rule = file.rules[static_cast<size_t>(index)];
    return rule.given.empty() ? OrderedJson(rule.number) : OrderedJson(rule.given);
  };
  OrderedJson parts = OrderedJson::array(), idle = OrderedJson::array(), bytes = OrderedJson::object();
  for (const RuledPart& part : ruled_parts(placed, on_gpu)) {
    OrderedJson rules = OrderedJson::array();
    for (const int rule : part.rules) rules.push_back(number(rule));
    parts.push_back({{"part", name_of(part.part)},
                     {"layers", part.layers},
                     {"modules", part.modules},
                     {"device", part.device},
                     {"formats", part.formats},
                     {"bytes", static_cast<uint64_t>(part.bytes)},
                     {"decided_by", decided_by(part, file)},
                     {"rules", std::move(rules)}});
    bytes[part.device] = bytes.value(part.device, uint64_t{0}) + static_cast<uint64_t>(part.bytes);
  }
  for (const RuleMatches::Idle& each : placed.matches.idle)
    idle.push_back({{"rule", number(each.rule)},
                    {"line", file.rules[static_cast<size_t>(each.rule)].line},
                    {"why", each.why}});
  std::vector<std::string> notes = placed.matches.notes;
  notes.insert(notes.end(), placed.notes.begin(), placed.notes.end());
  return {{"file", file.name},         {"rules", file.rules.size()}, {"parts", std::move(parts)},
          {"bytes", std::move(bytes)}, {"idle", std::move(idle)},    {"notes", std::move(notes)}};
}

std::string largest_rules(const PlacedRules& placed, std::string_view device, bool on_gpu) {
  constexpr size_t kMost = 3;
  std::map<int, double> bytes;
  for (size_t i = 0; i < placed.modules.size(); ++i) {
    const PlacedModule& where = placed.modules[i];
    const std::string_view implied = on_gpu ? "cuda:0" : "cpu";
    const std::string_view there = where.device.empty() ? implied : where.device;
    if (where.rule < 0 || there != device || placed.tree.modules[i].kind == ModuleKind::kExpert) continue;
    RuledPart part{.part = placed.tree.modules[i].part};
    add_module(placed, i, part);
    bytes[where.rule] += part.bytes;
  }
  std::vector<std::pair<double, int>> order;
  for (const auto& [rule, taken] : bytes)
    if (taken > 0) order.emplace_back(-taken, rule);
  std::ranges::sort(order);
  std::string out;
  for (size_t i = 0; i < std::min(order.size(), kMost); ++i)
    out += text("{}{} {}{}", out.empty() ? "" : ", ",
                rule_and_line(placed.file.rules[static_cast<size_t>(order[i].second)]),
                i == 0 ? "takes " : "", human_bytes(static_cast<uint64_t>(-order[i].first)));
  return out;
}

}  // namespace kt::inline models
