// Placement rules as a YAML file gives them, read and not yet applied to a model: a list of
//
//   - match: {name: REGEX, class: DOTTED}                 # one of both at least; both hold where both stand there
//     replace: {class: DOTTED or default, kwargs: {...}}
//     recursive: true
//
// Nothing is imported or run. What a class or an operator is, models/operators.h knows; what a rule matches,
// models/rule_matches.h.
#pragma once
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/json.h"
#include "text/regex.h"
#include "text/yaml.h"

namespace kt::inline models {

struct Rule {
  int number = 0, line = 0;         // from 1; where the rule begins
  std::optional<Regex> name = {};   // searched for in a module's name, as Python's re.search does
  std::string match_class = {};     // as written; empty: any
  std::string replace = "default";  // as written
  Json kwargs = Json::object();
  bool recursive = true;  // whether modules below are looked at
  bool own = false;  // its operator is the caller's, not one of models/operators.h: all arguments are for it
  YamlLines lines = {};    // of the rule
  std::string given = {};  // by `place`, as written; empty: it stands in the file

  int line_of_kwarg(std::string_view kwarg) const { return lines.of("replace").of("kwargs").of(kwarg).line; }
  std::string label() const;  // "rule 4", "`place` 2"
};

// Devices that rules name: "cpu", "cuda", "cuda:1", "xpu", "npu:0".
bool is_device(std::string_view word);

struct RuleFile {
  std::string name;  // for messages
  std::vector<Rule> rules = {};
  std::vector<std::pair<std::string, std::string>> renamed = {};  // devices: what stands for which

  // "FILE:26: rule 4", or with another line of the rule; "`place` 'q_proj=cpu'".
  std::string place(const Rule& rule, int line = 0) const;
  // "rule 3", "rules 3-7, 12", "rule 2, `place` 1": of indices of rules; those below 0 are left out.
  std::string labels(const std::set<int>& indices) const;
  // What a device's word means here: itself, or what it was renamed to, by its own name or else by its kind's ("cuda"
  // of "cuda:1").
  std::string device(std::string_view word) const;
};

constexpr size_t kMostRules = 4096;

// The rules, at least one, or Error(kInput) in one line: "FILE:26: rule 4: match: no key \"nmae\"; the nearest is
// name". What YAML refuses has the rule's number too.
RuleFile parse_rules(std::string_view characters, std::string_view name);
// The same of a file; Errors name it too where it is missing or larger than 16 MiB.
RuleFile read_rules(const std::string& path);

// Rules as a command line has them.
struct RuleWords {
  std::string file = {};                // empty: none
  std::vector<std::string> place = {};  // "REGEX=DEVICE[:FORMAT]": rules in a line each, before the file's
  std::string devices = {};             // "cuda=cpu,xpu:0=cuda:0": renamed
};
// None where there is neither a file nor a rule in a line. Errors name the words as `place` and `rule_devices`.
std::optional<RuleFile> read_rules(const RuleWords& words);

}  // namespace kt::inline models
