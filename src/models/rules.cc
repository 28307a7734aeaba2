#include "models/rules.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"
#include "base/file.h"
#include "models/placement.h"
#include "text/shown.h"

namespace kt::inline models {
namespace {

// One rule of a file while it is read: every fault has its place.
class RuleReader {
 public:
  RuleReader(const RuleFile& file, Rule& rule) : file_(file), rule_(rule) {}

  void read(const Json& value) {
    mapping(value, "", {"match", "replace", "recursive"}, rule_.lines);
    for (const char* needed : {"match", "replace"})
      if (!value.contains(needed)) fail_at(rule_.line, text("no {}", needed));
    read_match(value["match"]);
    read_replace(value["replace"]);
    if (!value.contains("recursive")) return;
    const Json& recursive = value["recursive"];
    if (!recursive.is_boolean())
      fail_at(rule_.lines.of("recursive").line,
              text("recursive: expected true or false without quotes, found {}", found(recursive)));
    rule_.recursive = recursive.get<bool>();
  }

 private:
  [[noreturn]] void fail_at(int line, const std::string& what) const {
    fail("{}: {}", file_.place(rule_, line), what);
  }

  static std::string found(const Json& value) {
    if (!value.is_string()) return std::string(json_kind(value));
    return text("{} \"{}\"", json_kind(value), shown(value.get_ref<const std::string&>()));
  }

  // Checks that it is one and has no other keys.
  void mapping(const Json& value, const std::string& where, const std::vector<std::string>& keys,
               const YamlLines& lines) const {
    if (!value.is_object())
      fail_at(lines.line,
              text("{}expected a mapping with {}, found {}", where, shown_list(keys), found(value)));
    for (const auto& [key, unused] : value.items())
      if (std::ranges::find(keys, key) == keys.end())
        fail_at(lines.of(key).line,
                text("{}no key \"{}\"; the nearest is {}", where, shown(key), nearest_name(key, keys)));
  }

  std::string string_of(const Json& mapping, const char* key, const std::string& where,
                        const YamlLines& lines) const {
    const Json& value = mapping[key];
    if (!value.is_string())
      fail_at(lines.of(key).line, text("{}{}: expected text, found {}", where, key, found(value)));
    return value.get<std::string>();
  }

  void read_match(const Json& match) {
    const YamlLines& lines = rule_.lines.of("match");
    mapping(match, "match: ", {"name", "class"}, lines);
    if (match.empty()) fail_at(lines.line, "match: neither name nor class");
    if (match.contains("class")) {
      rule_.match_class = string_of(match, "class", "match: ", lines);
      if (rule_.match_class.empty()) fail_at(lines.of("class").line, "match: class: empty");
    }
    if (!match.contains("name")) return;
    try {
      rule_.name.emplace(string_of(match, "name", "match: ", lines), RegexDialect::kPython);
    } catch (const Error& error) {
      const std::string_view what = error.what();
      if (what.starts_with(file_.name)) throw;  // not of the pattern
      fail_at(lines.of("name").line, text("match: name: {}", what));
    }
  }

  void read_replace(const Json& replace) {
    const YamlLines& lines = rule_.lines.of("replace");
    mapping(replace, "replace: ", {"class", "kwargs"}, lines);
    if (replace.contains("class")) rule_.replace = string_of(replace, "class", "replace: ", lines);
    if (rule_.replace.empty()) fail_at(lines.of("class").line, "replace: class: empty");
    if (!replace.contains("kwargs")) return;
    rule_.kwargs = replace["kwargs"];
    if (!rule_.kwargs.is_object())
      fail_at(lines.of("kwargs").line,
              text("replace: kwargs: expected a mapping of names to values, found {}", found(rule_.kwargs)));
  }

  const RuleFile& file_;
  Rule& rule_;
};

// "FILE:3:6: found ..." of the YAML reader with the number of the rule that it was in.
std::string with_rule(std::string_view message, std::string_view name, const YamlLines& lines) {
  const size_t end = message.starts_with(name) ? message.find(": ", name.size()) : std::string_view::npos;
  if (end == std::string_view::npos || lines.parts.empty() || !lines.parts.back().key.empty())
    return std::string(message);
  return text("{}: rule {}: {}", message.substr(0, end), lines.parts.size(), message.substr(end + 2));
}

// "cuda:1:int8" as a device and a format.
std::pair<std::string, std::string> device_and_format(std::string_view value) {
  size_t end = std::min(value.find(':'), value.size());
  if (end + 1 < value.size() && value[end + 1] >= '0' && value[end + 1] <= '9')
    end = std::min(value.find(':', end + 1), value.size());
  const size_t begin = std::min(end + 1, value.size());
  return {std::string(value.substr(0, end)), std::string(value.substr(begin))};
}

// A rule that stands in one line: what it means is checked with the others.
Rule placing_rule(const std::string& line, int number) {
  Rule out{.number = number, .given = line};
  const size_t cut = line.rfind('=');
  if (cut == std::string::npos || cut == 0 || cut + 1 == line.size())
    fail("`place` '{}': expected REGEX=DEVICE or REGEX=DEVICE:FORMAT", shown(line));
  const auto [device, format] = device_and_format(std::string_view(line).substr(cut + 1));
  if (!is_device(device))
    fail("`place` '{}': no device \"{}\"; the nearest is {}", shown(line), shown(device),
         nearest_name(device, {"cpu", "cuda", "cuda:0", "cuda:1"}));
  out.kwargs["device"] = device;
  if (!format.empty()) out.kwargs["format"] = format;
  try {
    out.name.emplace(line.substr(0, cut), RegexDialect::kPython);
  } catch (const Error& error) {
    fail("`place` '{}': {}", shown(line), error.what());
  }
  return out;
}

std::vector<std::pair<std::string, std::string>> renamed_devices(std::string_view list) {
  std::vector<std::pair<std::string, std::string>> out;
  while (!list.empty()) {
    const std::string_view one = list.substr(0, list.find(','));
    list.remove_prefix(std::min(one.size() + 1, list.size()));
    const size_t cut = std::min(one.find('='), one.size());
    std::string from(one.substr(0, cut)), to(one.substr(std::min(cut + 1, one.size())));
    for (const std::string& word : {from, to})
      if (!is_device(word))
        fail("`rule_devices` {}: expected OLD=NEW of cpu, cuda, cuda:N, xpu, npu; found \"{}\"", shown(one),
             shown(word));
    if (from == "cpu") fail("`rule_devices` {}: the CPU is always there", shown(one));
    for (const auto& [known, other] : out)
      if (known == from) fail("`rule_devices`: {} becomes {} and {}", from, other, to);
    out.emplace_back(std::move(from), std::move(to));
  }
  return out;
}

}  // namespace

std::string Rule::label() const {
  return given.empty() ? text("rule {}", number) : text("`place` {}", number);
}

bool is_device(std::string_view word) {
  for (const std::string_view kind : {"cpu", "cuda", "xpu", "npu"}) {
    if (word == kind) return true;
    if (kind == "cpu" || !word.starts_with(kind) || word.size() < kind.size() + 2 || word[kind.size()] != ':')
      continue;
    const std::string_view number = word.substr(kind.size() + 1);
    return number.size() <= 3 && std::ranges::all_of(number, [](char c) { return c >= '0' && c <= '9'; });
  }
  return false;
}

std::string RuleFile::device(std::string_view word) const {
  for (const std::string_view sought : {word, word.substr(0, word.find(':'))})
    for (const auto& [from, to] : renamed)
      if (from == sought) return to;
  return std::string(word);
}

std::string RuleFile::place(const Rule& rule, int line) const {
  if (!rule.given.empty()) return text("`place` '{}'", shown(rule.given));
  return text("{}:{}: rule {}", name, line > 0 ? line : rule.line, rule.number);
}

std::string RuleFile::labels(const std::set<int>& indices) const {
  std::vector<int> numbers, given;
  for (const int index : indices) {
    if (index < 0) continue;
    const Rule& rule = rules[static_cast<size_t>(index)];
    (rule.given.empty() ? numbers : given).push_back(rule.number);
  }
  std::string out;
  if (!numbers.empty()) out = text("rule{} {}", numbers.size() == 1 ? "" : "s", ranges_text(numbers));
  if (!given.empty()) out += text("{}`place` {}", out.empty() ? "" : ", ", ranges_text(given));
  return out;
}

RuleFile parse_rules(std::string_view characters, std::string_view name) {
  RuleFile file{.name = std::string(name)};
  YamlLines lines;
  Json value;
  try {
    value = parse_yaml(characters, name, {}, &lines);
  } catch (const Error& error) {
    throw Error(error.kind(), with_rule(error.what(), name, lines));
  }
  if (value.is_null()) fail("{}: empty, expected a list of rules", name);
  if (!value.is_array())
    fail("{}:{}: expected a list of rules, found {}", name, lines.line, json_kind(value));
  if (value.empty()) fail("{}:{}: no rule in the list", name, lines.line);
  if (value.size() > kMostRules) fail("{}: {} rules, at most {} are read", name, value.size(), kMostRules);
  file.rules.resize(value.size());
  for (size_t i = 0; i < value.size(); ++i) {
    Rule& rule = file.rules[i];
    rule.number = static_cast<int>(i) + 1;
    rule.lines = std::move(lines.parts[i]);
    rule.line = rule.lines.line;
    RuleReader(file, rule).read(value[i]);
  }
  return file;
}

RuleFile read_rules(const std::string& path) {
  const MappedFile bytes(path);
  return parse_rules({reinterpret_cast<const char*>(bytes.bytes().data()), bytes.size()}, path);
}

std::optional<RuleFile> read_rules(const RuleWords& words) {
  if (words.file.empty() && words.place.empty()) {
    if (!words.devices.empty()) fail("`rule_devices` {}: there are no `rules`", shown(words.devices));
    return std::nullopt;
  }
  RuleFile out{.name = "`place`"};
  if (!words.file.empty()) out = read_rules(words.file);
  out.renamed = renamed_devices(words.devices);
  std::vector<Rule> all;
  for (const std::string& each : words.place)
    all.push_back(placing_rule(each, static_cast<int>(all.size()) + 1));
  std::ranges::move(out.rules, std::back_inserter(all));
  out.rules = std::move(all);
  return out;
}

}  // namespace kt::inline models
