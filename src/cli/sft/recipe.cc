#include "cli/sft/recipe.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "text/shown.h"
#include "text/yaml.h"

namespace kt::inline cli {
namespace {

constexpr std::string_view kLauncher = "ACCELERATE_";  // begins its variables' names

std::vector<std::string> split_names(const std::string& list) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    std::string one = list.substr(at, end - at);
    one.erase(0, one.find_first_not_of(" \t"));
    one.erase(one.find_last_not_of(" \t") + 1);
    if (!one.empty()) out.push_back(std::move(one));
    at = end + 1;
  }
  return out;
}

bool is_whole(const Json& value) {
  if (value.is_number_integer()) return true;
  return value.is_number_float() && value.get<double>() == std::floor(value.get<double>()) &&
         std::fabs(value.get<double>()) < 9e15;
}

bool is_names(const Json& value) {
  if (value.is_string()) return true;
  return value.is_array() && std::ranges::all_of(value, [](const Json& one) { return one.is_string(); });
}

bool has_type(const RecipeKey& key, const Json& value) {
  switch (key.type) {
    case KeyType::kText:
      return value.is_string();
    case KeyType::kBoolean:
      return value.is_boolean();
    case KeyType::kInteger:
      return is_whole(value);
    case KeyType::kNumber:
      return value.is_number();
    case KeyType::kNames:
      return is_names(value);
    case KeyType::kTextOrBoolean:
      return value.is_string() || value.is_boolean();
    case KeyType::kMapping:
      return value.is_object();
  }
  return false;
}

// A value that switches nothing on.
bool asks_nothing(const Json& value) {
  if (value.is_boolean()) return !value.get<bool>();
  if (value.is_number()) return value.get<double>() == 0;
  return value.is_string() && (value.get<std::string>().empty() || value.get<std::string>() == "none");
}

std::string shown_value(const Json& value) {
  return value.is_string() ? text("'{}'", shown(value.get<std::string>())) : shown(value.dump());
}

std::string with_commas(std::string_view choices) {
  std::string out;
  for (const char c : choices) out += c == '|' ? std::string(", ") : std::string(1, c);
  return out;
}

bool is_choice(std::string_view choices, std::string_view value) {
  while (true) {
    const size_t end = std::min(choices.find('|'), choices.size());
    if (choices.substr(0, end) == value) return true;
    if (end == choices.size()) return false;
    choices.remove_prefix(end + 1);
  }
}

std::string range_text(const RecipeKey& key) {
  if (key.most >= kAnyNumber) return text("a number of at least {}", key.least);
  return text("a number from {} to {}", key.least, key.most);
}

// Error "PLACE: ..." unless the value may stand there.
void check(const RecipeKey& key, const Json& value, const std::string& place) {
  if (value.is_string())
    if (const char* const why = refused_value(key.name, value.get<std::string>()))
      fail("{}: {}: {}", place, shown(value.get<std::string>()), why);
  if (!has_type(key, value)) fail("{}: expected {}, found {}", place, name_of(key.type), shown_value(value));
  if (value.is_number() && !(value.get<double>() >= key.least && value.get<double>() <= key.most))
    fail("{}: expected {}, found {}", place, range_text(key), shown_value(value));
  if (value.is_string() && !key.choices.empty() && !is_choice(key.choices, value.get<std::string>()))
    fail("{}: expected {}{}, found {}", place, key.choices.find('|') == key.choices.npos ? "" : "one of ",
         with_commas(key.choices), shown_value(value));
  if (key.use == KeyUse::kRefused && !asks_nothing(value)) fail("{}: {}", place, key.meaning);
}

char upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }

std::string changed_key(std::string_view name, std::string_view value) {
  return text("{}={}", name, shown(value));
}

[[noreturn]] void refuse_key(const std::string& prefix, const std::string& name, const std::string& place) {
  const std::string nearest = nearest_name(name, recipe_key_names(prefix));
  fail("{}: unknown key '{}'; the nearest known one is {}{}; kt sft keys lists them", place, shown(name),
       prefix, nearest);
}

}  // namespace

Recipe::Recipe(const std::string& path, const std::vector<std::string>& changes) : path_(path) {
  YamlLines lines;
  const Json document = read_yaml(path, {.bytes = 1 << 20}, &lines);
  if (!document.is_object())
    ::kt::fail("{}: expected keys and values such as `stage: sft`, found {}", path,
               document.is_null() ? "nothing" : json_kind(document));
  take_all(document, "", lines);
  take_environment();
  for (const std::string& each : changes) change(each);
}

// accelerate's launcher hands on what stands below kt_config as ACCELERATE_KT_NUM_THREADS and the like; the file wins.
void Recipe::take_environment() {
  constexpr std::string_view kPrefix = "kt_config.";
  for (const RecipeKey& key : recipe_keys()) {
    if (!key.name.starts_with(kPrefix) || key.type == KeyType::kMapping || given(key.name)) continue;
    std::string variable(kLauncher);
    for (const char c : key.name.substr(kPrefix.size())) variable += c == '.' ? '_' : upper(c);
    const char* const written = std::getenv(variable.c_str());
    if (!written || !*written) continue;
    Json value = parse_yaml(written, variable);
    if (key.type == KeyType::kBoolean && (value == 0 || value == 1)) value = value == 1;
    if (value.is_null()) continue;
    take(std::string(key.name), value, changed_key(variable, written));
  }
}

void Recipe::take_all(const Json& mapping, const std::string& prefix, const YamlLines& lines) {
  // In the order of the file, so that the first mistake is the one that is told.
  for (const YamlLines& entry : lines.parts) {
    const std::string name = prefix + entry.key;
    const Json& value = mapping[entry.key];
    const std::string place = ::kt::text("{}:{}", path_, entry.line);
    const RecipeKey* const key = find_recipe_key(name);
    if (!key) refuse_key(prefix, entry.key, place);
    if (value.is_null()) continue;
    take(name, value, ::kt::text("{}: {}", place, name));
    if (key->type == KeyType::kMapping) take_all(value, name + ".", entry);
  }
}

void Recipe::take(const std::string& name, const Json& value, const std::string& place) {
  const RecipeKey& key = *find_recipe_key(name);
  // YAML reads `save_strategy: no` as false.
  const bool means_no = key.type == KeyType::kText && value == Json(false) && is_choice(key.choices, "no");
  Json kept = means_no ? Json("no") : value;
  check(key, kept, place);
  if (key.type == KeyType::kInteger) kept = static_cast<int64_t>(kept.get<double>());
  given_[name] = {.value = std::move(kept), .place = place};
}

void Recipe::change(const std::string& assignment) {
  const size_t equals = assignment.find('=');
  if (equals == assignment.npos || equals == 0)
    ::kt::fail("'{}': expected KEY=VALUE behind the recipe, such as learning_rate=1e-4", shown(assignment));
  const std::string name = assignment.substr(0, equals), written = assignment.substr(equals + 1);
  const size_t dot = name.rfind('.');
  const std::string prefix = dot == name.npos ? "" : name.substr(0, dot + 1);
  const std::string place = changed_key(name, written);
  if (!find_recipe_key(name)) {
    const bool known = !recipe_key_names(prefix).empty();
    refuse_key(known ? prefix : "", known ? name.substr(prefix.size()) : name, place);
  }
  const Json value = parse_yaml(written, name);
  if (value.is_null())
    given_.erase(name);
  else
    take(name, value, place);
}

std::string Recipe::folder() const {
  const std::string parent = std::filesystem::path(path_).parent_path().string();
  return parent.empty() ? "." : parent;
}

bool Recipe::given(std::string_view key) const { return given_.contains(key); }

Json Recipe::value(std::string_view key) const {
  const RecipeKey* const row = find_recipe_key(key);
  KT_CHECK(row, "no key {}", key);
  if (const auto found = given_.find(key); found != given_.end()) return found->second.value;
  return row->standard.empty() ? Json() : parse_yaml(row->standard, key);
}

std::string Recipe::text(std::string_view key) const {
  const Json found = value(key);
  return found.is_string() ? found.get<std::string>() : std::string();
}

int64_t Recipe::integer(std::string_view key) const {
  const Json found = value(key);
  return found.is_number() ? found.get<int64_t>() : 0;
}

double Recipe::number(std::string_view key) const {
  const Json found = value(key);
  return found.is_number() ? found.get<double>() : 0;
}

bool Recipe::flag(std::string_view key) const {
  const Json found = value(key);
  return found.is_boolean() && found.get<bool>();
}

std::vector<std::string> Recipe::names(std::string_view key) const {
  const Json found = value(key);
  if (found.is_string()) return split_names(found.get<std::string>());
  std::vector<std::string> out;
  for (const Json& one : found) out.push_back(one.get<std::string>());
  return out;
}

std::string Recipe::place(std::string_view key) const {
  const auto found = given_.find(key);
  return found == given_.end() ? ::kt::text("{}: {}", path_, key) : found->second.place;
}

std::vector<std::string> Recipe::notes() const {
  std::vector<std::pair<std::string_view, std::string>>
      reasons;  // with the keys that have them, in the table's order
  for (const RecipeKey& key : recipe_keys()) {
    const auto found = given_.find(key.name);
    if (key.use != KeyUse::kNoted || found == given_.end() || asks_nothing(found->second.value)) continue;
    const auto same =
        std::ranges::find(reasons, key.meaning, &std::pair<std::string_view, std::string>::first);
    if (same == reasons.end())
      reasons.emplace_back(key.meaning, key.name);
    else
      same->second += ::kt::text(", {}", key.name);
  }
  std::vector<std::string> out;
  for (const auto& [key, one] : given_)
    if (one.place.starts_with(kLauncher))
      out.push_back(::kt::text("{} of the environment counts as if it stood below kt_config",
                               one.place.substr(0, one.place.find('='))));
  for (const auto& [why, keys] : reasons) out.push_back(::kt::text("{}: {}", keys, why));
  return out;
}

OrderedJson Recipe::all() const {
  OrderedJson out = OrderedJson::object();
  for (const RecipeKey& key : recipe_keys()) {
    if (key.type == KeyType::kMapping) continue;
    const Json found = value(key.name);
    out[std::string(key.name)] =
        key.type == KeyType::kNames && !found.is_null() ? Json(names(key.name)) : found;
  }
  return out;
}

}  // namespace kt::inline cli
