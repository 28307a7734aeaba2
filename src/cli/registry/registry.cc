#include "cli/registry/registry.h"

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <limits>
#include <system_error>

#include "base/error.h"
#include "cli/home.h"
#include "cli/registry/model_files.h"
#include "terminal/language.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kHeading =
    "# Models that kt knows by name; `kt run NAME` and every other verb take the names. `kt model` changes "
    "this\n"
    "# file and keeps these lines, but no comments of your own. Nothing here is a model: removing an entry\n"
    "# deletes no weights.\n";

const std::vector<std::string> kEntryKeys = {"path",   "kind",    "architecture", "size", "experts",
                                             "active", "weights", "gpu",          "repo", "added"};

// A value of an entry, or Error saying what was expected. Absent is empty.
template <typename T>
T field(const Json& entry, const char* key, const std::string& where) {
  const auto at = entry.find(key);
  if (at == entry.end() || at->is_null()) return {};
  constexpr bool kIsText = std::is_same_v<T, std::string>;
  if (kIsText ? !at->is_string() : !at->is_number_unsigned())
    fail("{}: {}: expected {}, found {}", where, key, kIsText ? "text" : "an integer of at least 0",
         json_kind(*at));
  if constexpr (!kIsText)
    if (at->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<T>::max()))
      fail("{}: {}: expected at most {}, found {}", where, key, std::numeric_limits<T>::max(),
           at->get<uint64_t>());
  return at->get<T>();
}

ModelEntry entry_from(const std::string& name, const Json& value, const std::string& path) {
  const std::string where = text("{}: {}", path, shown(name));
  if (!value.is_object()) fail("{}: expected a mapping of keys to values, found {}", where, json_kind(value));
  for (const auto& [key, ignored] : value.items())
    if (std::ranges::find(kEntryKeys, key) == kEntryKeys.end())
      fail(tr("{}: unknown key '{}'; the nearest known one is {}"), where, shown(key),
           nearest_name(key, kEntryKeys));
  ModelEntry out{.name = name,
                 .path = field<std::string>(value, "path", where),
                 .kind = field<std::string>(value, "kind", where),
                 .architecture = field<std::string>(value, "architecture", where),
                 .size = field<uint64_t>(value, "size", where),
                 .experts = field<int>(value, "experts", where),
                 .active = field<int>(value, "active", where),
                 .weights = field<std::string>(value, "weights", where),
                 .gpu = field<std::string>(value, "gpu", where),
                 .repo = field<std::string>(value, "repo", where),
                 .added = field<std::string>(value, "added", where)};
  if (out.path.empty()) fail("{}: path: expected the model's folder or file, found nothing", where);
  if (out.kind.empty()) out.kind = out.path.ends_with(".gguf") ? "gguf" : "folder";
  return out;
}

Json to_json(const ModelEntry& entry) {
  Json out = {{"path", entry.path}, {"kind", entry.kind}, {"size", entry.size}, {"added", entry.added}};
  for (const auto& [key, value] : {std::pair("architecture", &entry.architecture),
                                   {"weights", &entry.weights},
                                   {"gpu", &entry.gpu},
                                   {"repo", &entry.repo}})
    if (!value->empty()) out[key] = *value;
  if (entry.experts > 0) out["experts"] = entry.experts;
  if (entry.active > 0) out["active"] = entry.active;
  return out;
}

std::vector<ModelEntry> entries_of(const Json& mapping, const std::string& path) {
  std::vector<ModelEntry> out;
  for (const auto& [key, models] : mapping.items()) {
    if (key != "models") fail("{}: unknown key '{}'; the nearest known one is models", path, shown(key));
    if (models.is_null()) continue;
    if (!models.is_object())
      fail("{}: models: expected a mapping of names to entries, found {}", path, json_kind(models));
    for (const auto& [name, value] : models.items()) out.push_back(entry_from(name, value, path));
  }
  return out;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char out[16];
  std::strftime(out, sizeof out, "%Y-%m-%d", &parts);  // digits only: no locale
  return out;
}

bool path_exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

}  // namespace

std::string registry_path() { return kt_home() + "/models.yaml"; }

std::vector<ModelEntry> registered_models() {
  const std::string path = registry_path();
  return entries_of(read_mapping(path), path);
}

void check_model_name(std::string_view name) {
  const auto is_inner = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  const bool fits = !name.empty() && name.size() <= 64 && std::ranges::all_of(name, is_inner) &&
                    name[0] != '.' && name[0] != '_' && name[0] != '-';
  if (!fits)
    fail(tr("'{}' is no name for a model: expected up to 64 letters, digits, '.', '_' and '-', first a "
            "letter or "
            "digit"),
         shown(name));
  if (lower_case(name) == kDemoName)
    fail(tr("'{}' is the model that comes with kt; choose another name"), name);
}

void put_models(std::vector<ModelEntry> entries) {
  for (ModelEntry& entry : entries) {
    check_model_name(entry.name);
    if (entry.added.empty()) entry.added = today();
  }
  const std::string path = registry_path();
  update_mapping(path, kHeading, [&](Json& mapping) {
    entries_of(mapping, path);  // a file with mistakes in it is not written over
    for (const ModelEntry& entry : entries) mapping["models"][entry.name] = to_json(entry);
  });
}

bool remove_model(std::string_view name) {
  const std::string path = registry_path();
  bool found = false;
  update_mapping(path, kHeading, [&](Json& mapping) {
    entries_of(mapping, path);
    const auto models = mapping.find("models");
    found = models != mapping.end() && models->is_object() && models->erase(std::string(name)) > 0;
  });
  return found;
}

std::string demo_path() {
  constexpr const char* kFolder = "demo/tiny-deepseekv3";
  if (const char* given = std::getenv("KT_DEMO_MODEL"); given && *given) {
    if (!path_exists(std::string(given) + "/config.json"))
      fail("the demo model: KT_DEMO_MODEL is {}, which has no config.json", given);
    return given;
  }
  std::error_code code;
  const fs::path program = fs::read_symlink("/proc/self/exe", code);
  if (code) fail(tr("the demo model: cannot tell where kt is ({}); set KT_DEMO_MODEL"), code.message());
  const fs::path here = program.parent_path();
  std::vector<std::string> looked;
  for (const fs::path& root : {here / ".." / "..", here / ".." / "share" / "kt"}) {
    const std::string folder = (root / kFolder).lexically_normal().string();
    if (path_exists(folder + "/config.json")) return folder;
    looked.push_back(folder);
  }
  fail(tr("the demo model is not there; looked in {}; KT_DEMO_MODEL names its folder"), shown_list(looked));
}

}  // namespace kt::inline cli
