// Placement rules, for tests that compare with PyYAML, with Python's re and with trees of transformers:
//
//   rules_probe read FILE...             for each a line: the rules as JSON, or "error: " and the message
//   rules_probe match CONFIG FILE...     a line of module names of a config.json; then for each file one of
//                                        {"rule": [of each module], "idle": [[rule, why], ...]}, or "error: ..."
//   rules_probe search PATTERNS NAMES    files of JSON lists: for each pattern "01..." for the names, or "error: ..."
#include <cstdio>
#include <functional>
#include <string>

#include "base/error.h"
#include "models/families.h"
#include "models/rule_matches.h"

namespace {

using kt::Json;

void print_line(const std::function<std::string()>& line) {
  std::string out;
  try {
    out = line();
  } catch (const kt::Error& error) {
    out = kt::text("error: {}", error.what());
  }
  std::printf("%s\n", out.c_str());
}

Json json_of(const kt::Rule& rule) {
  Json match = Json::object();
  if (rule.name) match["name"] = rule.name->pattern();
  if (!rule.match_class.empty()) match["class"] = rule.match_class;
  return {{"match", match},
          {"replace", {{"class", rule.replace}, {"kwargs", rule.kwargs}}},
          {"recursive", rule.recursive},
          {"line", rule.line}};
}

std::string rules_of(const char* path) {
  Json out = Json::array();
  for (const kt::Rule& rule : kt::read_rules(path).rules) out.push_back(json_of(rule));
  return out.dump();
}

std::string matches_of(const char* path, const kt::ModuleTree& tree) {
  const kt::RuleFile file = kt::read_rules(path);
  const kt::RuleMatches found = kt::match_rules(file, tree);
  Json idle = Json::array();
  for (const auto& each : found.idle) idle.push_back({each.rule, each.why});
  return Json{{"rule", found.rule}, {"idle", idle}}.dump();
}

void match(int count, char** arguments) {
  const kt::ModuleTree tree = kt::module_tree(kt::describe_model(kt::read_json(arguments[0]), arguments[0]));
  Json names = Json::array();
  for (const kt::ModelModule& module : tree.modules) names.push_back(module.name);
  std::printf("%s\n", names.dump().c_str());
  for (int i = 1; i < count; ++i) print_line([&] { return matches_of(arguments[i], tree); });
}

void search(char** arguments) {
  const Json patterns = kt::read_json(arguments[0]), names = kt::read_json(arguments[1]);
  for (const Json& pattern : patterns)
    print_line([&] {
      const kt::Regex regex(pattern.get_ref<const std::string&>(), kt::RegexDialect::kPython);
      std::string out;
      for (const Json& name : names)
        out +=
            kt::RegexSearch(regex, name.get_ref<const std::string&>(), kt::kMostNameSteps).next() ? '1' : '0';
      return out;
    });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc >= 3 ? argv[1] : "";
  try {
    if (verb == "read") {
      for (int i = 2; i < argc; ++i) print_line([&] { return rules_of(argv[i]); });
      return 0;
    }
    if (verb == "match") return match(argc - 2, argv + 2), 0;
    if (verb == "search" && argc == 4) return search(argv + 2), 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rules_probe: %s\n", error.what());
    return 1;
  }
  std::fprintf(stderr, "usage: rules_probe read FILE... | match CONFIG FILE... | search PATTERNS NAMES\n");
  return 2;
}
