// From text to the words that byte-pair merges work in: normalisation, then splits. The steps are those of
// Hugging Face's tokenizers, whose results they reproduce.
#pragma once
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/function_ref.h"
#include "text/regex.h"

namespace kt::inline texts {

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

// What the steps of a file may make of text: each Replace can be a thousandfold, and they multiply.
class TextBudget {
 public:
  // For `bytes` of text: the compatibility forms make at most eleven of one, a space written as one character
  // three. `whose` outlives it, for the Error.
  static TextBudget of_text(size_t bytes, std::string_view whose) { return TextBudget(bytes, whose); }

  // Error(kInput) where a text of `made` bytes is more than what is left.
  void fits(size_t made) const {
    if (made > left_) [[unlikely]]
      refuse();
  }
  void pay(size_t made) {
    fits(made);
    left_ -= made;
  }

 private:
  TextBudget(size_t bytes, std::string_view whose)
      : whose_(whose), bytes_(bytes), most_((size_t{64} << 10) + 16 * bytes), left_(most_) {}
  [[noreturn]] void refuse() const;
  std::string_view whose_;
  size_t bytes_, most_, left_;
};

// `text` is valid UTF-8, as is the result, for which the budget pays.
std::string apply_steps(const std::vector<NormalStep>& steps, std::string_view text, TextBudget& budget);
// `text` with every `from`, which is not empty, as `to`.
std::string replaced(std::string_view text, std::string_view from, std::string_view to,
                     const TextBudget& budget);

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
  bool add_bos = false;                    // texts begin with the begin token where the file does not say
  bool escaped = false;                    // tokens are UTF-8 with U+2581 for spaces, and "<0x0A>" for bytes
};
NamedSplits splits_of(std::string_view name);
const NamedSplits* find_splits(std::string_view name);  // null for others
std::vector<std::string_view> split_names();

}  // namespace kt::inline texts
