// What users set once instead of on every command line: config.yaml in kt's folder. One table says which keys
// there are; a key that is not in it is an error, so that a typing mistake never passes for a default.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/json.h"

namespace kt::inline cli {

enum class SettingType : uint8_t { kText, kInteger, kNumber, kSize, kList };

struct Setting {
  std::string_view name;  // "server.port": section and key, as the file nests them
  SettingType type = SettingType::kText;
  std::string_view standard;  // the default as `kt config set` takes it; "" is empty text, no list, or 0
  std::string_view help;
  double least = 0, most = 0;     // of a number; without a bound if both are 0
  std::string_view choices = {};  // "a|b|c": nothing else is accepted
  bool secret = false;            // not shown in listings
  // What is wrong with a text; empty: nothing. Not asked about an empty one.
  std::string (*problem)(std::string_view value) = nullptr;
};

std::span<const Setting> known_settings();
const Setting& setting_named(std::string_view name);  // Error naming the nearest known one

class Settings {
 public:
  // Values of config.yaml's mapping; `path` is for errors: unknown keys with the nearest known one, wrong
  // types with expected and found, numbers out of range.
  Settings(const Json& mapping, std::string path);

  // The value in the file, else the default. The getter must be the key's own (KT_CHECK): integer() also of a
  // number would hide a mistake in the table.
  std::string text(std::string_view name) const;
  int64_t integer(std::string_view name) const;
  double number(std::string_view name) const;
  uint64_t bytes(std::string_view name) const;  // of a size such as "8GiB"; 0 if empty
  std::vector<std::string> list(std::string_view name) const;

  bool is_set(std::string_view name) const { return values_.contains(name); }  // by the file
  const Json& value(std::string_view name) const;
  const std::string& path() const { return path_; }

 private:
  const Json& typed(std::string_view name, SettingType type) const;

  std::string path_;
  Json values_, standards_;  // by full name
};

std::string settings_path();  // config.yaml in kt_home()
Settings load_settings();     // all defaults if there is no file

// `value` as the setting's type; Error naming the key, what was expected and what came.
Json setting_from_string(const Setting& setting, std::string_view value);
// Puts values into the file, or takes keys out where they are null. Everything is checked before it is
// written, also what was in the file.
void change_settings(const Json& values);
// Adds to or removes from a list without losing what others add meanwhile. False: nothing had to change.
bool add_to_setting(std::string_view name, const std::string& entry);
bool remove_from_setting(std::string_view name, const std::string& entry);

}  // namespace kt::inline cli
