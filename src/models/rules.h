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
#include <string>
#include <string_view>
#include <vector>

#include "text/json.h"
#include "text/regex.h"
#include "text/yaml.h"

namespace kt {

struct Rule {
  int number = 0, line = 0;         // from 1; where the rule begins
  std::optional<Regex> name = {};   // searched for in a module's name, as Python's re.search does
  std::string match_class = {};     // as written; empty: any
  std::string replace = "default";  // as written
  Json kwargs = Json::object();
  bool recursive = true;  // whether modules below are looked at
  YamlLines lines = {};   // of the rule

  int line_of_kwarg(std::string_view kwarg) const { return lines.of("replace").of("kwargs").of(kwarg).line; }
};

struct RuleFile {
  std::string name;  // for messages
  std::vector<Rule> rules = {};

  // "FILE:26: rule 4", or with another line of the rule.
  std::string place(const Rule& rule, int line = 0) const;
};

constexpr size_t kMostRules = 4096;

// The rules, at least one, or Error(kInput) in one line: "FILE:26: rule 4: match: no key \"nmae\"; the nearest is name".
// What YAML refuses has the rule's number too.
RuleFile parse_rules(std::string_view characters, std::string_view name);
// The same of a file; Errors name it too where it is missing or larger than 16 MiB.
RuleFile read_rules(const std::string& path);

}  // namespace kt
