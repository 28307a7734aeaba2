#include "cli/settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "cli/gpu_flags.h"
#include "cli/home.h"
#include "cli/method_flag.h"
#include "cli/server_key.h"
#include "terminal/amounts.h"
#include "terminal/language.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

constexpr auto kSettings = std::to_array<Setting>({
    {.name = "general.language",
     .standard = "auto",
     .help = "Language of what kt says to people; auto: as the locale has it",
     .choices = "auto|en|zh"},
    {"server.host", SettingType::kText, "127.0.0.1", "Address that kt run listens on"},
    {"server.port", SettingType::kInteger, "30000", "Its port; 0: any free one", 0, 65535},
    {.name = "server.api-key",
     .standard = "",
     .help = "Clients have to send this key; empty: no key",
     .secret = true,
     .problem = server_key_problem},
    {"server.served-model-name", SettingType::kText, "", "The model's name in the API; empty: its own"},
    {"server.max-running-requests", SettingType::kInteger, "0", "Requests at once; 0: 8", 0, 65536},
    {"server.max-total-tokens", SettingType::kInteger, "0", "Tokens in the cache; 0: by the memory there is",
     0, 1e12},
    {"run.model", SettingType::kText, "", "Model of kt run without one: a name or a path"},
    {"run.cpu-threads", SettingType::kInteger, "0", "Workers; 0: one for each core", 0, 65536},
    {"run.numa-nodes", SettingType::kInteger, "0", "NUMA nodes to use; 0: all", 0, 1024},
    {.name = "run.kt-method",
     .standard = "",
     .help = "How the experts' weights are stored, as --kt-method takes it",
     .problem = weight_method_problem},
    {"run.chunked-prefill-size", SettingType::kInteger, "1024", "Tokens of prompts to run at once", 1,
     1 << 20},
    {"run.max-memory", SettingType::kSize, "", "Refuse a model that needs more; empty: what is available"},
    {.name = "run.kv",
     .standard = "bf16",
     .help = "Precision of cached keys and values",
     .choices = "bf16|int8|f32"},
    {.name = "run.gpu",
     .standard = kUsualGpu,
     .help = "GPU to use: its number, several as 0,1, auto or off",
     .problem = gpu_problem},
    {"run.gpu-memory", SettingType::kSize, "",
     "All that kt run may take of the GPU; empty: what is free, less 5 %"},
    {.name = "run.gpu-experts",
     .standard = "auto",
     .help = "Experts on the GPU: so many a layer, a share such as 25%, or auto: as many as fit",
     .problem = gpu_experts_problem},
    {.name = "run.expert-placement",
     .standard = "",
     .help =
         "Which experts: uniform, frequency, front-loading or random; empty: by statistics where there are",
     .problem = expert_placement_problem},
    {"run.expert-statistics", SettingType::kText, "", "File that says how often each expert was chosen"},
    {.name = "run.gpu-prefill-threshold",
     .standard = "auto",
     .help = "Tokens of a prompt's step from which experts pass through the GPU: a number, auto or off",
     .problem = prefill_threshold_problem},
    {"run.rules", SettingType::kText, "", "File of placement rules that kt run loads models by"},
    {"chat.url", SettingType::kText, "",
     "Server that kt chat talks to; empty: the one of server.host and port"},
    {"chat.system", SettingType::kText, "", "System message of a new conversation"},
    {"chat.temperature", SettingType::kNumber, "0.7", "0: always the most probable token", 0, 100},
    {"chat.top-p", SettingType::kNumber, "1", "Choose among the most probable that hold this probability", 0,
     1},
    {"chat.max-tokens", SettingType::kInteger, "1024", "Tokens of an answer at most", 1, 1 << 24},
    {.name = "model.source",
     .standard = "hf",
     .help = "Hub that models are downloaded from",
     .choices = "hf|modelscope"},
    {"model.paths", SettingType::kList, "", "Folders that kt model scan looks into; kt model path-add"},
});

constexpr std::string_view kHeading =
    "# Settings of kt: what you would otherwise repeat on every command line. A flag wins over a line here.\n"
    "# `kt config show` lists all keys with their meaning and defaults. `kt config set KEY VALUE` rewrites "
    "this\n"
    "# file and keeps these lines, but no comments of your own.\n";

std::string_view type_name(SettingType type) {
  switch (type) {
    case SettingType::kText:
      return tr_later("text");
    case SettingType::kInteger:
      return tr_later("an integer");
    case SettingType::kNumber:
      return tr_later("a number");
    case SettingType::kSize:
      return tr_later("a size such as 8GiB");
    case SettingType::kList:
      return tr_later("a list of texts");
  }
  return "";
}

std::vector<std::string> names() {
  std::vector<std::string> out;
  for (const Setting& setting : kSettings) out.emplace_back(setting.name);
  return out;
}

const Setting* find_setting(std::string_view name) {
  const auto at = std::ranges::find(kSettings, name, &Setting::name);
  return at == kSettings.end() ? nullptr : &*at;
}

bool is_list_of_text(const Json& value) {
  return value.is_array() && std::ranges::all_of(value, [](const Json& entry) { return entry.is_string(); });
}

bool has_type(const Json& value, SettingType type) {
  switch (type) {
    case SettingType::kText:
    case SettingType::kSize:
      return value.is_string();
    case SettingType::kInteger:
      return value.is_number_integer();
    case SettingType::kNumber:
      return value.is_number();
    case SettingType::kList:
      return is_list_of_text(value);
  }
  return false;
}

bool is_choice(std::string_view choices, std::string_view word) {
  while (!choices.empty()) {
    const size_t end = std::min(choices.find('|'), choices.size());
    if (choices.substr(0, end) == word) return true;
    choices.remove_prefix(std::min(end + 1, choices.size()));
  }
  return false;
}

// Error beginning with `where`, which names the key.
void check_value(const Setting& setting, const Json& value, const std::string& where) {
  if (!has_type(value, setting.type))
    fail("{}: expected {}, found {}{}", where, type_name(setting.type), json_kind(value),
         value.is_primitive() && !setting.secret ? text(" ({})", shown(value.dump())) : "");
  if (value.is_number() && (setting.least != 0 || setting.most != 0)) {
    const double number = value.get<double>();
    if (!(number >= setting.least && number <= setting.most))
      fail(tr("{}: expected {} from {} to {}, found {}"), where, tr_now(type_name(setting.type)),
           setting.least, setting.most, number);
  }
  if (setting.type == SettingType::kSize && !value.get_ref<const std::string&>().empty())
    parse_bytes(value.get_ref<const std::string&>(), where);
  if (!setting.choices.empty() && !is_choice(setting.choices, value.get_ref<const std::string&>()))
    fail(tr("{}: expected one of {}, found '{}'"), where, setting.choices,
         shown(value.get_ref<const std::string&>()));
  if (!setting.problem || value == "") return;
  const std::string problem = setting.problem(value.get_ref<const std::string&>());
  if (!problem.empty()) fail("{}: {}", where, problem);
}

// The file nests one level; {"server.port": 1} of it by full names.
Json flattened(const Json& mapping, const std::string& path) {
  Json out = Json::object();
  const auto unknown = [&](const std::string& name) {
    fail(tr("{}: unknown key '{}'; the nearest known one is {}"), path, shown(name),
         nearest_name(name, names()));
  };
  for (const auto& [section, keys] : mapping.items()) {
    const bool is_section =
        std::ranges::any_of(kSettings, [&](const Setting& s) { return s.name.starts_with(section + "."); });
    if (keys.is_null() && is_section) continue;
    if (!keys.is_object() && is_section)
      fail("{}: {}: expected a mapping of keys to values, found {}", path, shown(section), json_kind(keys));
    if (!keys.is_object()) unknown(section);
    for (const auto& [key, value] : keys.items()) {
      const std::string name = section + "." + key;
      const Setting* setting = find_setting(name);
      if (!setting) unknown(name);
      if (value.is_null()) continue;  // "key:" with nothing behind it
      check_value(*setting, value, text("{}: {}", path, name));
      out[name] = value;
    }
  }
  return out;
}

Json nested(const Json& values) {
  Json out = Json::object();
  for (const auto& [name, value] : values.items()) {
    const size_t dot = name.find('.');
    out[name.substr(0, dot)][name.substr(dot + 1)] = value;
  }
  return out;
}

// Lets `change` edit the values by full names.
void change_file(const std::function<void(Json&)>& change) {
  const std::string path = settings_path();
  update_mapping(path, kHeading, [&](Json& mapping) {
    Json values = flattened(mapping, path);
    change(values);
    mapping = nested(values);
    flattened(mapping, path);  // nothing is written that could not be read
  });
}

template <typename Number>
Json number_from(const Setting& setting, std::string_view value) {
  Number number{};
  const auto [end, code] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (code != std::errc() || end != value.data() + value.size())
    fail(tr("{}: expected {}, got '{}'"), setting.name, tr_now(type_name(setting.type)), shown(value));
  return number;
}

}  // namespace

std::span<const Setting> known_settings() { return kSettings; }

const Setting& setting_named(std::string_view name) {
  const Setting* found = find_setting(name);
  if (!found)
    fail(tr("unknown key '{}'; the nearest known one is {}; kt config show lists them"), shown(name),
         nearest_name(name, names()));
  return *found;
}

Settings::Settings(const Json& mapping, std::string path)
    : path_(std::move(path)), values_(flattened(mapping, path_)), standards_(Json::object()) {
  for (const Setting& setting : kSettings)
    standards_[std::string(setting.name)] = setting_from_string(setting, setting.standard);
}

const Json& Settings::value(std::string_view name) const {
  const auto set = values_.find(name);
  if (set != values_.end()) return *set;
  const auto standard = standards_.find(name);
  KT_CHECK(standard != standards_.end(), "no setting {}", name);
  return *standard;
}

const Json& Settings::typed(std::string_view name, SettingType type) const {
  KT_CHECK(setting_named(name).type == type, "setting {} is {}", name, type_name(setting_named(name).type));
  return value(name);
}

std::string Settings::text(std::string_view name) const { return typed(name, SettingType::kText); }
int64_t Settings::integer(std::string_view name) const { return typed(name, SettingType::kInteger); }
double Settings::number(std::string_view name) const { return typed(name, SettingType::kNumber); }
std::vector<std::string> Settings::list(std::string_view name) const {
  return typed(name, SettingType::kList);
}
uint64_t Settings::bytes(std::string_view name) const {
  const std::string value = typed(name, SettingType::kSize);
  return value.empty() ? 0 : parse_bytes(value, kt::text("{}: {}", path_, name));
}

std::string settings_path() { return kt_home() + "/config.yaml"; }

Settings load_settings() {
  const std::string path = settings_path();
  return {read_mapping(path), path};
}

Json setting_from_string(const Setting& setting, std::string_view value) {
  Json out;
  switch (setting.type) {
    case SettingType::kText:
    case SettingType::kSize:
      out = std::string(value);
      break;
    case SettingType::kInteger:
      out = number_from<int64_t>(setting, value);
      break;
    case SettingType::kNumber:
      out = number_from<double>(setting, value);
      break;
    case SettingType::kList:
      out = Json::array();
      if (!value.empty()) out.push_back(std::string(value));
      break;
  }
  check_value(setting, out, std::string(setting.name));
  return out;
}

void change_settings(const Json& values) {
  change_file([&](Json& file) {
    for (const auto& [name, value] : values.items()) {
      setting_named(name);
      if (value.is_null())
        file.erase(name);
      else
        file[name] = value;
    }
  });
}

bool add_to_setting(std::string_view name, const std::string& entry) {
  bool changed = false;
  change_file([&](Json& file) {
    Json& list = file[std::string(name)];
    if (!list.is_array()) list = Json::array();
    changed = std::ranges::find(list, Json(entry)) == list.end();
    if (changed) list.push_back(entry);
  });
  return changed;
}

bool remove_from_setting(std::string_view name, const std::string& entry) {
  bool changed = false;
  change_file([&](Json& file) {
    const auto list = file.find(name);
    if (list == file.end()) return;
    const auto at = std::ranges::find(*list, Json(entry));
    changed = at != list->end();
    if (changed) list->erase(at);
    if (list->empty()) file.erase(list);
  });
  return changed;
}

}  // namespace kt::inline cli
