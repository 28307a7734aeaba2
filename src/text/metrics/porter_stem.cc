// Porter's stemmer: five steps, each a list of endings of which the first that a word has decides. "Measure" is the
// number of times that a vowel is followed by a consonant in what is left.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "text/metrics/words.h"

namespace kt::inline texts {
namespace {

bool is_vowel_letter(char c) { return std::string_view("aeiou").find(c) != std::string_view::npos; }

// Of each letter; y is a consonant at the beginning and behind a vowel. Digits are consonants.
std::vector<bool> consonants(std::string_view word) {
  std::vector<bool> out;
  for (const char c : word) out.push_back(c == 'y' ? out.empty() || !out.back() : !is_vowel_letter(c));
  return out;
}

int measure(std::string_view stem) {
  const std::vector<bool> consonant = consonants(stem);
  int out = 0;
  for (size_t at = 1; at < consonant.size(); ++at) out += !consonant[at - 1] && consonant[at];
  return out;
}

bool has_vowel(std::string_view stem) { return std::ranges::count(consonants(stem), false) > 0; }

// Consonant, vowel, consonant other than w, x, y; of two letters vowel and consonant will do.
bool ends_short(std::string_view word) {
  const std::vector<bool> consonant = consonants(word);
  const size_t n = word.size();
  if (n == 2) return !consonant[0] && consonant[1];
  return n >= 3 && consonant[n - 3] && !consonant[n - 2] && consonant[n - 1] &&
         std::string_view("wxy").find(word.back()) == std::string_view::npos;
}

struct Ending {
  std::string_view from, to;
};

std::string_view cut(std::string_view word, std::string_view ending) {
  return word.substr(0, word.size() - ending.size());
}

// The first ending that the word has is replaced if what is before it measures more than `above`, and decides either
// way.
std::string replace_ending(const std::string& word, std::span<const Ending> endings, int above) {
  for (const auto& [from, to] : endings) {
    if (!word.ends_with(from)) continue;
    const std::string_view stem = cut(word, from);
    return measure(stem) > above ? std::string(stem).append(to) : word;
  }
  return word;
}

std::string without_plural(const std::string& word) {
  if (word.ends_with("ies")) return std::string(cut(word, "ies")) + (word.size() == 4 ? "ie" : "i");
  if (word.ends_with("sses")) return std::string(cut(word, "es"));
  if (word.ends_with("ss") || !word.ends_with('s')) return word;
  return std::string(cut(word, "s"));
}

std::string without_past(const std::string& word) {
  if (word.ends_with("ied")) return std::string(cut(word, "ied")) + (word.size() == 4 ? "ie" : "i");
  if (word.ends_with("eed")) return measure(cut(word, "eed")) > 0 ? std::string(cut(word, "d")) : word;
  std::string stem;
  for (const std::string_view ending : {"ed", "ing"})
    if (stem.empty() && word.ends_with(ending) && has_vowel(cut(word, ending))) stem = cut(word, ending);
  if (stem.empty()) return word;
  for (const std::string_view ending : {"at", "bl", "iz"})
    if (stem.ends_with(ending)) return stem + "e";
  const size_t n = stem.size();
  if (n >= 2 && stem[n - 1] == stem[n - 2] && consonants(stem).back()) {
    const bool stays = std::string_view("lsz").find(stem.back()) != std::string_view::npos;
    return stays ? stem : stem.substr(0, n - 1);
  }
  return measure(stem) == 1 && ends_short(stem) ? stem + "e" : stem;
}

std::string with_i_for_y(std::string word) {
  if (word.size() > 2 && word.back() == 'y' && consonants(word)[word.size() - 2]) word.back() = 'i';
  return word;
}

constexpr Ending kDouble[] = {{"ational", "ate"}, {"tional", "tion"}, {"enci", "ence"},   {"anci", "ance"},
                              {"izer", "ize"},    {"bli", "ble"},     {"alli", "al"},     {"entli", "ent"},
                              {"eli", "e"},       {"ousli", "ous"},   {"ization", "ize"}, {"ation", "ate"},
                              {"ator", "ate"},    {"alism", "al"},    {"iveness", "ive"}, {"fulness", "ful"},
                              {"ousness", "ous"}, {"aliti", "al"},    {"iviti", "ive"},   {"biliti", "ble"},
                              {"fulli", "ful"}};
constexpr Ending kAdjective[] = {{"icate", "ic"}, {"ative", ""}, {"alize", "al"}, {"iciti", "ic"},
                                 {"ical", "ic"},  {"ful", ""},   {"ness", ""}};
constexpr Ending kBefore[] = {{"al", ""},    {"ance", ""}, {"ence", ""}, {"er", ""},
                              {"ic", ""},    {"able", ""}, {"ible", ""}, {"ant", ""},
                              {"ement", ""}, {"ment", ""}, {"ent", ""}};
constexpr Ending kBehind[] = {{"ou", ""},  {"ism", ""}, {"ate", ""}, {"iti", ""},
                              {"ous", ""}, {"ive", ""}, {"ize", ""}};

std::string without_double(std::string word) {
  while (word.ends_with("alli") && measure(cut(word, "alli")) > 0) word = cut(word, "li");
  for (const auto& [from, to] : kDouble)
    if (word.ends_with(from)) return replace_ending(word, kDouble, 0);
  // The l counts as part of what is before, so that short ones ("geologi") lose it too.
  if (word.ends_with("logi") && measure(cut(word, "ogi")) > 0) return std::string(cut(word, "i"));
  return word;
}

std::string without_suffix(const std::string& word) {
  for (const auto& [from, to] : kBefore)
    if (word.ends_with(from)) return replace_ending(word, kBefore, 1);
  if (word.ends_with("ion")) {
    const std::string_view stem = cut(word, "ion");
    return measure(stem) > 1 && (stem.back() == 's' || stem.back() == 't') ? std::string(stem) : word;
  }
  return replace_ending(word, kBehind, 1);
}

std::string tidied(std::string word) {
  if (word.ends_with('e')) {
    const std::string_view stem = cut(word, "e");
    const int m = measure(stem);
    if (m > 1 || (m == 1 && !ends_short(stem))) word.pop_back();
  }
  if (word.ends_with("ll") && measure(cut(word, "l")) > 1) word.pop_back();
  return word;
}

}  // namespace

std::string porter_stem(std::string word) {
  struct Irregular {
    std::string_view word, stem;
  };
  static constexpr Irregular kIrregular[] = {
      {"sky", "sky"},        {"skies", "sky"},       {"dying", "die"},        {"lying", "lie"},
      {"tying", "tie"},      {"news", "news"},       {"innings", "inning"},   {"inning", "inning"},
      {"outings", "outing"}, {"outing", "outing"},   {"cannings", "canning"}, {"canning", "canning"},
      {"howe", "howe"},      {"proceed", "proceed"}, {"exceed", "exceed"},    {"succeed", "succeed"}};
  for (const Irregular& one : kIrregular)
    if (one.word == word) return std::string(one.stem);
  if (word.size() <= 2) return word;
  word = with_i_for_y(without_past(without_plural(word)));
  return tidied(without_suffix(replace_ending(without_double(std::move(word)), kAdjective, 0)));
}

}  // namespace kt::inline texts
