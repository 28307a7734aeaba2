#include "text/unicode.h"

#include <algorithm>
#include <cctype>
#include <iterator>

namespace kt::inline texts {
namespace {

#include "text/unicode_tables.inc"

// The order of the generator's CATEGORIES.
constexpr std::string_view kCategories[] = {"cn", "cc", "cf", "co", "cs", "ll", "lm", "lo", "lt", "lu",
                                            "mc", "me", "mn", "nd", "nl", "no", "pc", "pd", "pe", "pf",
                                            "pi", "po", "ps", "sc", "sk", "sm", "so", "zl", "zp", "zs"};

// Ranges of all categories whose name begins with `prefix`.
std::vector<CodeRange> categories(std::string_view prefix) {
  std::vector<CodeRange> ranges;
  for (size_t i = 0; i < std::size(kCategoryRuns); ++i) {
    if (!kCategories[kCategoryRuns[i] & 31].starts_with(prefix)) continue;
    const bool is_last = i + 1 == std::size(kCategoryRuns);
    ranges.push_back({kCategoryRuns[i] >> 5, is_last ? kLastCodePoint : (kCategoryRuns[i + 1] >> 5) - 1});
  }
  return ranges;
}

CodeSet categories_of(std::initializer_list<std::string_view> prefixes) {
  std::vector<CodeRange> all;
  for (std::string_view prefix : prefixes) {
    const std::vector<CodeRange> some = categories(prefix);
    all.insert(all.end(), some.begin(), some.end());
  }
  return CodeSet(std::move(all));
}

// Letters, marks, digits, number letters, connecting punctuation, encircled letters.
CodeSet word_basis() {
  return categories_of({"l", "m", "nd", "nl", "pc"})
      .united(CodeSet({{0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}}));
}

CodeSet pairs_to_set(std::span<const uint32_t> pairs) {
  std::vector<CodeRange> ranges;
  for (size_t i = 0; i + 1 < pairs.size(); i += 2) ranges.push_back({pairs[i], pairs[i + 1]});
  return CodeSet(std::move(ranges));
}

struct Script {
  std::string_view name;
  std::span<const uint32_t> pairs;
};
constexpr Script kScripts[] = {
    {"arabic", kArabic},     {"bopomofo", kBopomofo}, {"cyrillic", kCyrillic}, {"devanagari", kDevanagari},
    {"greek", kGreek},       {"han", kHan},           {"hangul", kHangul},     {"hebrew", kHebrew},
    {"hiragana", kHiragana}, {"katakana", kKatakana}, {"latin", kLatin},       {"thai", kThai},
};

struct LongName {
  std::string_view name, category;
};
constexpr LongName kLongNames[] = {
    {"letter", "l"},
    {"lowercaseletter", "ll"},
    {"uppercaseletter", "lu"},
    {"titlecaseletter", "lt"},
    {"modifierletter", "lm"},
    {"otherletter", "lo"},
    {"mark", "m"},
    {"nonspacingmark", "mn"},
    {"number", "n"},
    {"decimalnumber", "nd"},
    {"punctuation", "p"},
    {"symbol", "s"},
    {"separator", "z"},
    {"spaceseparator", "zs"},
    {"other", "c"},
    {"control", "cc"},
};

std::string plain_name(std::string_view name) {
  std::string plain;
  for (char c : name)
    if (c != '_' && c != '-' && c != ' ')
      plain.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
  return plain;
}

}  // namespace

CodeSet::CodeSet(std::vector<CodeRange> ranges) {
  std::ranges::sort(ranges, {}, &CodeRange::first);
  for (const CodeRange& range : ranges) {
    if (!ranges_.empty() && range.first <= ranges_.back().last + 1)
      ranges_.back().last = std::max(ranges_.back().last, range.last);
    else
      ranges_.push_back(range);
  }
  for (const CodeRange& range : ranges_)
    for (CodePoint c = range.first; c <= range.last && c < kMapped; ++c)
      map_[c / 64] |= uint64_t{1} << (c % 64);
}

bool CodeSet::contains_far(CodePoint code) const {
  const auto after = std::ranges::upper_bound(ranges_, code, {}, &CodeRange::first);
  return after != ranges_.begin() && code <= std::prev(after)->last;
}

CodeSet CodeSet::inverted() const {
  std::vector<CodeRange> gaps;
  CodePoint next = 0;
  for (const CodeRange& range : ranges_) {
    if (range.first > next) gaps.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= kLastCodePoint) gaps.push_back({next, kLastCodePoint});
  return CodeSet(std::move(gaps));
}

CodeSet CodeSet::united(const CodeSet& other) const {
  std::vector<CodeRange> all = ranges_;
  all.insert(all.end(), other.ranges_.begin(), other.ranges_.end());
  return CodeSet(std::move(all));
}

CodeSet CodeSet::intersected(const CodeSet& other) const {
  return inverted().united(other.inverted()).inverted();
}

CodeSet CodeSet::case_closed() const {
  std::vector<CodeRange> all = ranges_;
  std::vector<CodeRange> folded;
  for (size_t i = 0; i < std::size(kFolds); i += 2)
    if (contains(kFolds[i])) folded.push_back({kFolds[i + 1], kFolds[i + 1]});
  all.insert(all.end(), folded.begin(), folded.end());
  const CodeSet targets(all);
  for (size_t i = 0; i < std::size(kFolds); i += 2)
    if (targets.contains(kFolds[i + 1])) all.push_back({kFolds[i], kFolds[i]});
  return CodeSet(std::move(all));
}

std::optional<CodeSet> property_set(std::string_view name) {
  std::string plain = plain_name(name);
  for (std::string_view prefix : {"script=", "sc=", "generalcategory=", "gc="})
    if (plain.starts_with(prefix)) plain.erase(0, prefix.size());
  for (const LongName& row : kLongNames)
    if (plain == row.name) plain = row.category;
  for (const Script& script : kScripts)
    if (plain == script.name) return pairs_to_set(script.pairs);
  if (plain == "any") return CodeSet().inverted();
  if (plain == "lc" || plain == "l&") return categories_of({"lu", "ll", "lt"});
  if (plain == "whitespace" || plain == "space") return whitespace_set();
  if (plain.empty() || plain.size() > 2) return std::nullopt;
  std::vector<CodeRange> ranges = categories(plain);
  if (ranges.empty()) return std::nullopt;
  return CodeSet(std::move(ranges));
}

const CodeSet& whitespace_set() {
  static const CodeSet set({{0x09, 0x0D},
                            {0x20, 0x20},
                            {0x85, 0x85},
                            {0xA0, 0xA0},
                            {0x1680, 0x1680},
                            {0x2000, 0x200A},
                            {0x2028, 0x2029},
                            {0x202F, 0x202F},
                            {0x205F, 0x205F},
                            {0x3000, 0x3000}});
  return set;
}

const CodeSet& word_set() {
  // That the superscripts and fractions of Latin-1 are words, and no others, is Oniguruma's.
  static const CodeSet set = word_basis().united(CodeSet({{0xB2, 0xB3}, {0xB9, 0xB9}, {0xBC, 0xBE}}));
  return set;
}

const CodeSet& rust_word_set() {
  static const CodeSet set = word_basis().united(CodeSet({{0x200C, 0x200D}}));
  return set;
}

const CodeSet& digit_set() {
  static const CodeSet set = categories_of({"nd"});
  return set;
}

}  // namespace kt::inline texts
