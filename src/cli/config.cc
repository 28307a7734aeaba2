// kt config: shows and changes the settings of settings.h.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "cli/home.h"
#include "cli/registry/model_files.h"
#include "cli/settings.h"
#include "cli/verbs.h"
#include "terminal/language.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

constexpr std::string_view kHidden = "(set)";

struct ConfigFlags {
  std::string key, value;
  bool json = false, all = false, yes = false;
  // Of init.
  std::vector<std::string> paths;
  std::optional<int64_t> port, threads;
};

std::string string_of(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return value.dump();
  std::string out;
  for (const Json& entry : value) out += (out.empty() ? "" : "\n") + entry.get<std::string>();
  return out;
}

// Listings are pasted into reports: keys stay out of them.
Json shown_value(const Setting& setting, const Settings& settings) {
  const Json& value = settings.value(setting.name);
  return setting.secret && !string_of(value).empty() ? Json(kHidden) : value;
}

void show(const ConfigFlags& flags) {
  const Settings settings = load_settings();
  if (!flags.key.empty()) setting_named(flags.key);  // or says which there are
  const auto is_shown = [&](const Setting& setting) {
    return flags.key.empty() || setting.name == flags.key;
  };
  if (flags.json) {
    nlohmann::ordered_json out = nlohmann::ordered_json::object();
    for (const Setting& setting : known_settings()) {
      if (!is_shown(setting)) continue;
      const std::string name(setting.name);
      out[name] = {
          {"value", shown_value(setting, settings)}, {"set", settings.is_set(name)}, {"help", setting.help}};
    }
    std::printf("%s\n", out.dump(2).c_str());
    return;
  }
  Table table({"key", "value", "", "meaning"}, 4);
  for (const Setting& setting : known_settings()) {
    if (!is_shown(setting)) continue;
    std::string value = string_of(shown_value(setting, settings));
    std::ranges::replace(value, '\n', ' ');
    if (value.size() > 40) value = value.substr(0, 37) + "...";
    table.add({std::string(setting.name), value.empty() ? "-" : value,
               settings.is_set(setting.name) ? "set" : "default", std::string(setting.help)});
  }
  std::printf("%s\n%s\n", table.str().c_str(), settings.path().c_str());
}

void get(const ConfigFlags& flags) {
  setting_named(flags.key);
  std::printf("%s\n", string_of(load_settings().value(flags.key)).c_str());
}

void set(const ConfigFlags& flags) {
  const Setting& setting = setting_named(flags.key);
  if (setting.type == SettingType::kList)
    fail(tr("{} is a list: kt model path-add PATH and kt model path-remove PATH change it"), flags.key);
  change_settings({{flags.key, setting_from_string(setting, flags.value)}});
}

void reset(const ConfigFlags& flags) {
  const bool all = flags.all || (flags.key.empty() && flags.yes);
  if (all != flags.key.empty())
    fail("reset: expected a KEY, or --yes for all, {}", all ? "got both" : "got neither");
  if (!all) {
    setting_named(flags.key);
    return change_settings({{flags.key, nullptr}});
  }
  if (!flags.yes) fail(tr("reset --all forgets every setting in {}; add --yes to do it"), settings_path());
  // Also where the file cannot be read: this is the way out.
  std::error_code code;
  std::filesystem::remove(settings_path(), code);
  if (code) fail("{}: cannot be removed: {}", settings_path(), code.message());
}

void init(const ConfigFlags& flags) {
  const std::string path = settings_path();
  std::error_code code;
  const bool exists = std::filesystem::exists(path, code);
  if (exists && !flags.yes) fail(tr("{} exists; --yes writes it anew and forgets what is set there"), path);
  Json values = Json::object();
  for (const char* name : {"server.host", "server.port", "run.cpu-threads"})
    values[name] = setting_from_string(setting_named(name), setting_named(name).standard);
  if (flags.port) values["server.port"] = *flags.port;
  if (flags.threads) values["run.cpu-threads"] = *flags.threads;
  for (const std::string& folder : flags.paths) {
    if (!is_folder(folder)) fail("--model-path: {}: no such folder", folder);
    values["model.paths"].push_back(absolute_path(folder));
  }
  // In one step with the new values: a value that is refused leaves the file as it was.
  for (const Setting& setting : known_settings())
    if (!values.contains(setting.name)) values[std::string(setting.name)] = nullptr;
  change_settings(values);
  std::printf("%s\n", path.c_str());
}

CLI::App* add_action(CLI::App& verb, Invocation& run, const char* name, const char* help,
                     const std::shared_ptr<ConfigFlags>& flags, void (*action)(const ConfigFlags&)) {
  CLI::App* const out = verb.add_subcommand(name, help);
  out->callback([&run, flags, action] { run.action = [flags, action] { action(*flags); }; });
  return out;
}

}  // namespace

void add_config(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("config", "Settings that verbs use where no flag is given");
  verb->require_subcommand(1);
  const auto flags = std::make_shared<ConfigFlags>();
  const auto action = [&](const char* name, const char* help, void (*what)(const ConfigFlags&)) {
    return add_action(*verb, run, name, help, flags, what);
  };
  CLI::App* const shown = action("show", "Keys with values and meaning", show);
  shown->add_option("KEY", flags->key, "A key, such as server.port; default: all");
  shown->add_flag("--json", flags->json, "Print JSON");
  shown->footer("Examples:\n  kt config show\n  kt config show server.port");
  CLI::App* const one = action("get", "The value of a key", get);
  one->add_option("KEY", flags->key, "A key, such as server.port")->required();
  one->footer("Example:\n  kt config get server.port");
  CLI::App* const setting = action("set", "Set a key", set);
  setting->add_option("KEY", flags->key, "A key, such as server.port")->required();
  setting->add_option("VALUE", flags->value, "Its value")->required();
  setting->footer("Example:\n  kt config set server.port 8080");
  CLI::App* const back = action("reset", "Forget the value of a key, or of all", reset);
  back->add_option("KEY", flags->key, "A key, such as server.port");
  back->add_flag("--all", flags->all, "Every key; needs --yes");
  back->add_flag("-y,--yes", flags->yes, "Do it; without a KEY, for every key");
  back->footer(
      "Examples:\n  kt config reset server.port\n  kt config reset --yes          forgets every setting");
  action("path", "Where the settings are", [](const ConfigFlags&) {
    std::printf("%s\n", settings_path().c_str());
  })->footer("Example:\n  kt config path");
  CLI::App* const fresh = action("init", "Write a first config.yaml", init);
  fresh->add_option("--model-path", flags->paths, "Folder with models, for kt model scan");
  fresh->add_option("--port", flags->port, "Port of kt run")->check(CLI::Range(0, 65535));
  fresh->add_option("--cpu-threads", flags->threads, "Workers; 0: one for each core")
      ->check(CLI::NonNegativeNumber);
  fresh->add_flag("-y,--yes", flags->yes, "Replace the one that exists");
  fresh->footer("Example:\n  kt config init --model-path /data/models --port 8080");
  verb->footer(
      "The file is config.yaml in $KT_HOME, $XDG_CONFIG_HOME/kt or ~/.config/kt. Flags win over it.\n\n"
      "Examples:\n"
      "  kt config set server.port 8080\n"
      "  kt config get server.port\n"
      "  kt config show\n"
      "  kt config reset server.port");
}

}  // namespace kt::inline cli
