#include "cli/chinese_words.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "base/utf8.h"
#include "cli/questions.h"
#include "cli/verbs.h"
#include "terminal/terminal_text.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

// The words of a string literal that begins at `at`, with those beside it; `at` is behind them afterwards.
std::string literal_at(const std::string& source, size_t& at) {
  std::string out;
  while (at < source.size() && source[at] == '"') {
    for (++at; source[at] != '"'; ++at) {
      if (source[at] == '\\') ++at;
      out += source[at] == 'n' && source[at - 1] == '\\' ? '\n' : source[at];
    }
    at = std::min(source.find_first_not_of(" \n", at + 1), source.size());
  }
  return out;
}

// The patterns that a source has as tr("..."), tr_now("..."), tr_later("...") and tr_counted(n, "...", "..."), with its
// name.
void add_patterns(const fs::path& path, std::map<std::string, std::string>& patterns) {
  std::ostringstream content;
  content << std::ifstream(path).rdbuf();
  const std::string source = content.str();
  static const std::regex call("\\b(tr|tr_now|tr_later|tr_counted)\\(");
  for (auto found = std::sregex_iterator(source.begin(), source.end(), call); found != std::sregex_iterator();
       ++found) {
    size_t at = source.find_first_not_of(" \n", static_cast<size_t>(found->position() + found->length()));
    const bool counted = found->str(1) == "tr_counted";
    if (counted) at = source.find('"', at);
    for (int i = 0; i < (counted ? 2 : 1) && source[at] == '"'; ++i) {
      patterns[literal_at(source, at)] = path.filename().string();
      if (source[at] == ',') at = source.find_first_not_of(" \n", at + 1);
    }
  }
}

const std::map<std::string, std::string>& patterns_of_the_sources() {
  static std::map<std::string, std::string> out;
  if (!out.empty()) return out;
  for (const char* floor : {"cli", "terminal"})
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(KT_SOURCES) / floor)) {
      const std::string name = entry.path().filename().string();
      if (name.ends_with(".cc") && !name.ends_with("_test.cc") && name != "chinese_words.cc")
        add_patterns(entry.path(), out);
    }
  return out;
}

std::set<std::string> phrases_of_questions() {
  Invocation invocation;
  CLI::App app{"", "kt"};
  for (const auto add : {add_run, add_generate, add_model, add_quant, add_estimate, add_bench, add_perplexity,
                         add_config, add_sft})
    add(app, invocation);
  const std::vector<std::string> phrases = asked_phrases(app);
  return {phrases.begin(), phrases.end()};
}

bool has_chinese(std::string_view string) {
  for (size_t at = 0; at < string.size();)
    if (cell_width(next_code_point(string, at)) == 2) return true;
  return false;
}

const Translation* entry_of(std::string_view english) {
  const auto table = chinese_words();
  const auto at = std::ranges::find(table, english, &Translation::english);
  return at == table.end() ? nullptr : &*at;
}

TEST(ChineseWords, NoneIsMissing) {
  const auto& patterns = patterns_of_the_sources();
  ASSERT_GT(patterns.size(), 200u) << "of " << KT_SOURCES;
  for (const auto& [pattern, file] : patterns)
    EXPECT_TRUE(entry_of(pattern)) << file << ": tr(\"" << pattern << "\") has no entry";
  const auto asked = phrases_of_questions();
  ASSERT_GT(asked.size(), 50u);
  for (const std::string& phrase : asked)
    EXPECT_TRUE(entry_of(phrase)) << "a question may show \"" << phrase << "\", which has no entry";
}

TEST(ChineseWords, EachIsUsed) {
  const auto& patterns = patterns_of_the_sources();
  const auto asked = phrases_of_questions();
  for (const Translation& entry : chinese_words()) {
    const std::string english(entry.english);
    EXPECT_TRUE(patterns.contains(english) || asked.contains(english)) << "nobody says \"" << english << '"';
  }
}

TEST(ChineseWords, AreOneEntryEachWithTheSameHoles) {
  std::set<std::string_view> seen;
  for (const Translation& entry : chinese_words()) {
    EXPECT_TRUE(seen.insert(entry.english).second) << "twice: " << entry.english;
    EXPECT_EQ(holes_of(entry.english), holes_of(entry.other)) << entry.english << " / " << entry.other;
    EXPECT_NE(entry.english, entry.other);
    EXPECT_TRUE(is_valid_utf8(entry.other)) << entry.english;
    EXPECT_TRUE(has_chinese(entry.other)) << entry.english << " / " << entry.other;
  }
}

// What stands behind a flag or a command of kt is typed as it is: the same ones in both languages.
TEST(ChineseWords, NameTheSameFlagsAndCommands) {
  static const std::regex word("--[a-z][-a-z]*|\\bkt [a-z]+( [a-z]+[a-z-]*)?|`[a-z_]+`|[A-Z]+_[A-Z_]+");
  const auto words_in = [](std::string_view text) {
    std::multiset<std::string> out;
    const std::string copy(text);
    for (std::sregex_iterator at(copy.begin(), copy.end(), word), end; at != end; ++at)
      if (at->str().starts_with("--") || at->str().find('_') != std::string::npos) out.insert(at->str());
    return out;
  };
  for (const Translation& entry : chinese_words())
    EXPECT_EQ(words_in(entry.english), words_in(entry.other)) << entry.english << " / " << entry.other;
}

TEST(ChineseWords, AreSpokenOnceTheyAreChosen) {
  EXPECT_EQ(tr_now("; "), "; ");
  speak(chinese_words());
  EXPECT_EQ(tr_now("; "), "；");
  EXPECT_EQ(tr_now("no entry has {} these words"), "no entry has {} these words");
  EXPECT_EQ(tr_counted(1, "{} core", "{} cores"), "1 个核心");
  EXPECT_EQ(tr_counted(2, "{} core", "{} cores"), "2 个核心");
  speak({});
  EXPECT_EQ(tr_counted(2, "{} core", "{} cores"), "2 cores");
}

}  // namespace
}  // namespace kt::inline cli
