#include "cli/saved_runs.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "base/error.h"
#include "cli/home.h"
#include "cli/registry/model_files.h"
#include "cli/registry/registry.h"
#include "terminal/language.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

constexpr std::string_view kRunsHeading =
    "# Command lines that `kt run --save NAME` kept; `kt run @NAME` runs one. Each is the list of its "
    "words.\n";
constexpr const char* kRunsKey = "runs";

// Of one call alone.
constexpr auto kPassing = std::to_array<std::string_view>({"--save", "--dry-run", "--json", "--download"});
// Options that name a file or a folder.
constexpr auto kPaths =
    std::to_array<std::string_view>({"--model-path", "--weights", "--chat-template", "--api-key-file",
                                     "--ssl-certfile", "--ssl-keyfile", "--expert-statistics", "--rules"});

template <typename Names>
bool is_one_of(const CLI::Option* option, const Names& names) {
  return option && std::ranges::any_of(
                       names, [&](std::string_view name) { return option->check_name(std::string(name)); });
}

std::string saved_runs_path() { return kt_home() + "/runs.yaml"; }

// Of the file's mapping; Error naming the file and what is wrong there.
Json runs_in(const Json& mapping, const std::string& path) {
  Json out = Json::object();
  for (const auto& [key, runs] : mapping.items()) {
    if (key != kRunsKey)
      fail(tr("{}: unknown key '{}'; the nearest known one is {}"), path, shown(key), kRunsKey);
    if (runs.is_null()) continue;
    if (!runs.is_object())
      fail("{}: {}: expected a mapping of names to lists of words, found {}", path, kRunsKey,
           json_kind(runs));
    for (const auto& [name, words] : runs.items()) {
      if (!words.is_array())
        fail("{}: {}: expected a list of words, found {}", path, shown(name), json_kind(words));
      for (const Json& word : words)
        if (!word.is_string()) fail("{}: {}: expected words, found {}", path, shown(name), json_kind(word));
    }
    out = runs;
  }
  return out;
}

[[noreturn]] void refuse_name(const std::string& name, const Json& runs) {
  std::vector<std::string> known;
  for (const auto& [each, words] : runs.items()) known.push_back(each);
  fail(tr("no run is saved as '{}': {}"), shown(name),
       known.empty() ? tr_now("none is; kt run MODEL --save NAME saves one")
                     : text(tr("known are {}"), shown_list(known)));
}

void check_run_name(const std::string& name) {
  constexpr std::string_view kFits = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  if (name.empty() || name.size() > 64 || name.find_first_not_of(kFits) != std::string::npos)
    fail(tr("--save: '{}' is no name: expected up to 64 letters, digits, '.', '_' and '-'"), shown(name));
}

Words words_in(const Words& words, const WordGroup& group) {
  return {words.begin() + static_cast<ptrdiff_t>(group.begin),
          words.begin() + static_cast<ptrdiff_t>(group.end)};
}

// What exists here is meant by its place, unless it is a name of the registry.
std::string anywhere(const std::string& word) {
  std::error_code ignored;
  if (!std::filesystem::exists(word, ignored)) return word;
  if (const auto found = try_find_model(word); found && !found->name.empty()) return word;
  return absolute_path(word);
}

// Also those of SGLang's flags that mean nothing here.
bool is_secret(const WordGroup& group) {
  if (group.option) return group.option->check_name("--api-key");
  return group.flag.ends_with("api-key") || group.flag.ends_with("password");
}

Words saved_words(const Words& words, const WordGroup& group) {
  if (is_secret(group))
    fail(tr("--save: {} would be kept in {}; --api-key-file names a file with keys"), group.flag,
         saved_runs_path());
  Words out = words_in(words, group);
  if (group.flag.empty()) {
    out[0] = anywhere(out[0]);
  } else if (is_one_of(group.option, kPaths)) {
    if (const size_t equals = out[0].find('='); equals != std::string::npos)
      out[0] = out[0].substr(0, equals + 1) + anywhere(out[0].substr(equals + 1));
    for (size_t i = 1; i < out.size(); ++i) out[i] = anywhere(out[i]);
  }
  return out;
}

bool is_saved_name(const Words& words, const WordGroup& group) {
  return group.flag.empty() && words[group.begin].starts_with('@');
}

}  // namespace

void save_run(const CLI::App& app, const std::string& name, const Words& words) {
  check_run_name(name);
  const CommandWords all = told_apart(app, words);
  Words kept;
  for (const WordGroup& group : all.groups)
    if (!is_one_of(group.option, kPassing))
      for (std::string& word : saved_words(words, group)) kept.push_back(std::move(word));
  const std::string path = saved_runs_path();
  update_mapping(path, kRunsHeading, [&](Json& mapping) {
    Json runs = runs_in(mapping, path);
    runs[name] = kept;
    mapping[kRunsKey] = runs;
  });
}

void forget_run(const std::string& name) {
  const std::string path = saved_runs_path();
  if (const Json runs = runs_in(read_mapping(path), path); !runs.contains(name)) refuse_name(name, runs);
  update_mapping(path, kRunsHeading, [&](Json& mapping) {
    Json runs = runs_in(mapping, path);
    runs.erase(name);
    mapping[kRunsKey] = runs;
  });
}

Words with_saved_run(const CLI::App& app, const Words& words) {
  const CommandWords typed = told_apart(app, words);
  if (typed.path != "kt run") return words;
  const auto at =
      std::ranges::find_if(typed.groups, [&](const WordGroup& group) { return is_saved_name(words, group); });
  if (at == typed.groups.end()) return words;
  const std::string name = words[at->begin].substr(1), path = saved_runs_path();
  const Json runs = runs_in(read_mapping(path), path);
  if (!runs.contains(name)) refuse_name(name, runs);
  Words saved = {"run"};
  for (const Json& word : runs[name]) saved.push_back(word.get<std::string>());

  Words out = {"run"};
  const auto is_typed = [&](const WordGroup& group) {
    return std::ranges::any_of(typed.groups, [&](const WordGroup& other) {
      if (&other == &*at) return false;
      const bool model = other.flag.empty() || is_one_of(other.option, std::to_array({"--model-path"}));
      if (group.flag.empty() || is_one_of(group.option, std::to_array({"--model-path"}))) return model;
      return group.option ? group.option == other.option : group.flag == other.flag;
    });
  };
  for (const WordGroup& group : told_apart(app, saved).groups)
    if (!is_typed(group))
      for (std::string& word : words_in(saved, group)) out.push_back(std::move(word));
  for (const WordGroup& group : typed.groups)
    if (&group != &*at)
      for (std::string& word : words_in(words, group)) out.push_back(std::move(word));
  return out;
}

}  // namespace kt::inline cli
