#include "cli/chosen_language.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "cli/settings.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

std::string first_set(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (const char* const value = std::getenv(name); value && *value) return value;
  return "";
}

std::string language_setting() {
  try {
    return load_settings().text("general.language");
  } catch (const Error&) {
    return "auto";
  }
}

}  // namespace

Language language_of_locale(std::string_view name) {
  if (!name.starts_with("zh")) return Language::kEnglish;
  const size_t dot = name.find('.');
  if (dot == name.npos) return Language::kChinese;
  std::string encoding;
  for (const char c : name.substr(dot + 1, name.find('@', dot) - dot - 1))
    if (c != '-') encoding += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return encoding == "utf8" ? Language::kChinese : Language::kEnglish;
}

Language chosen_language() {
  std::string wanted = first_set({"KT_LANG"});
  if (!wanted.empty() && wanted != "auto" && wanted != "en" && wanted != "zh")
    fail("KT_LANG: expected one of auto|en|zh, found '{}'", shown(wanted));
  if (wanted.empty()) wanted = language_setting();
  if (wanted == "auto") return language_of_locale(first_set({"LC_ALL", "LC_MESSAGES", "LANG"}));
  return wanted == "zh" ? Language::kChinese : Language::kEnglish;
}

}  // namespace kt::inline cli
