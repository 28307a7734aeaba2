// Texts as words, the way that measures of likeness count them. Each way is a published one, kept in all its quirks:
// figures are only worth something beside those of others.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline texts {

using TextWords = std::vector<std::string>;  // none of them empty, none with a space in it

// 13a: spaces part words, ASCII punctuation is words of its own, a point or comma between digits is not. Of WMT, and
// sacrebleu's default.
// zh: the same, and every Chinese character is a word.
enum class WordSplit : uint8_t { k13a, kZh };
std::string_view name_of(WordSplit split);  // "13a", "zh"

// Of valid UTF-8; as sacrebleu's tokenizers of these names.
TextWords split_words(std::string_view text, WordSplit split);

enum class Stemming : uint8_t { kNone, kPorter };

// ROUGE's own: runs of ASCII letters and digits in lower case, all else parts them; so of Chinese nothing is left. With
// stemming words of more than three characters lose their endings. As rouge-score's default tokenizer.
TextWords alphanumeric_words(std::string_view text, Stemming stemming = Stemming::kNone);

// "happily" is "happili", "hoping" is "hope": Porter's algorithm of 1980 with the changes that NLTK made to it. Of
// lower case letters and digits.
std::string porter_stem(std::string word);

}  // namespace kt::inline texts
