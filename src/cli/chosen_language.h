// The language that kt speaks to people.
#pragma once
#include <string_view>

namespace kt::inline cli {

enum class Language { kEnglish, kChinese };

// KT_LANG, else general.language of the settings, else (auto) the locale: Chinese where LC_ALL, LC_MESSAGES or LANG,
// the first that is set, begins with zh. Error for a KT_LANG that is none of auto, en and zh; settings that cannot be
// read do not count, since verbs that need them say what is wrong.
Language chosen_language();

// Of a locale's name, "zh_CN.UTF-8"; one of another encoding than UTF-8 is English.
Language language_of_locale(std::string_view name);

}  // namespace kt::inline cli
