// From text to the words that byte-pair merges work in: normalisation, then splits. The steps are those of
// Hugging Face's tokenizers, whose results they reproduce.
#pragma once
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/function_ref.h"
#include "text/regex.h"

namespace kt {

// Puts `content` in place of every match.
struct ReplaceStep {
  Regex pattern;
  std::string content;
};
// Puts `content` in front of a text that is not empty.
struct PrependStep {
  std::string content;
};
struct StripStep {
  bool left = true, right = true;  // white space at which ends
};
using NormalStep = std::variant<NormalForm, ReplaceStep, PrependStep, StripStep>;

// `text` is valid UTF-8, as is the result.
std::string apply_steps(const std::vector<NormalStep>& steps, std::string_view text);

// What becomes of the matches of a split.
enum class SplitBehaviour { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };
struct SplitStep {
  Regex pattern;
  SplitBehaviour behaviour = SplitBehaviour::kIsolated;
  bool invert = false;  // the text between matches counts as the match
};
// A space in front of a piece that does not start with one.
struct PrefixSpaceStep {};
struct MetaspaceStep {
  enum class Prepend { kAlways, kFirst, kNever };
  std::string replacement;  // of a space, one character
  Prepend prepend = Prepend::kAlways;
  Regex pattern;  // matches the replacement
  bool split = true;
};
using WordStep = std::variant<SplitStep, PrefixSpaceStep, MetaspaceStep>;

// Cuts `text` (valid UTF-8) by all steps in order and hands each word that is not empty to `word`; a view is
// valid during the call only. `at_start`: the text begins the whole input, which a Metaspace may ask for.
void split_words(const std::vector<WordStep>& steps, std::string_view text, bool at_start,
                 FunctionRef<void(std::string_view)> word);

// The pattern of GPT-2, built into the byte-level step.
extern const std::string_view kGpt2Pattern;

// The splits that GGUF files name in tokenizer.ggml.pre. Error(kInput) listing the known names for others.
struct NamedSplits {
  std::vector<std::string_view> patterns;  // in the order they apply
  bool ignore_merges = false;              // a word that is a token is that token
};
NamedSplits splits_of(std::string_view name);

}  // namespace kt
