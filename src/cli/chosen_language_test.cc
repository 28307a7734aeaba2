#include "cli/chosen_language.h"

#include <gtest/gtest.h>

namespace kt::inline cli {
namespace {

TEST(ChosenLanguage, OfALocale) {
  for (const char* name : {"zh", "zh_CN", "zh_CN.UTF-8", "zh_TW.utf8", "zh_CN.UTF-8@pinyin", "zh-Hans"})
    EXPECT_EQ(language_of_locale(name), Language::kChinese) << name;
  for (const char* name :
       {"", "C", "C.UTF-8", "POSIX", "en_US.UTF-8", "de_DE", "zh_CN.GB18030", "zh_TW.Big5"})
    EXPECT_EQ(language_of_locale(name), Language::kEnglish) << name;
}

}  // namespace
}  // namespace kt::inline cli
