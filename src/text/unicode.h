// What the tokenizer has to know of Unicode: sets of code points by property, simple case folding, and the
// four normal forms. The facts are tables made by tools/make_unicode_tables.py (unicode_tables.inc).
#pragma once
#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"

namespace kt::inline texts {

struct CodeRange {
  CodePoint first = 0, last = 0;  // both inside
  bool operator==(const CodeRange&) const = default;
};

// A set of code points: sorted, disjoint, not touching ranges, with a bitmap in front for the first 2048.
// Immutable.
class CodeSet {
 public:
  CodeSet() = default;
  explicit CodeSet(std::vector<CodeRange> ranges);  // in any order, may overlap; last >= first

  bool contains(CodePoint code) const {
    return code < kMapped ? map_[code / 64] >> (code % 64) & 1 : contains_far(code);
  }
  std::span<const CodeRange> ranges() const { return ranges_; }
  CodeSet inverted() const;
  CodeSet united(const CodeSet& other) const;
  CodeSet intersected(const CodeSet& other) const;
  // With every code point that folds to the same as a member does.
  CodeSet case_closed() const;
  bool operator==(const CodeSet& other) const { return ranges_ == other.ranges_; }

 private:
  static constexpr CodePoint kMapped = 2048;
  bool contains_far(CodePoint code) const;

  std::vector<CodeRange> ranges_;
  std::array<uint64_t, kMapped / 64> map_{};
};

// The set of a property by the name in \p{...}: a general category (L, Lu, Letter, ...), LC, Any, White_Space
// or a script (Han, Script=Han, ...). Case, '_', '-' and spaces do not count. nullopt: a name we do not know.
std::optional<CodeSet> property_set(std::string_view name);

const CodeSet& whitespace_set();  // \s
// \w: letters, marks, digits, connecting punctuation, and little things on which the two engines differ.
const CodeSet& word_set();  // Oniguruma's
const CodeSet& rust_word_set();
const CodeSet& digit_set();  // \d: Nd

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };
// `text` is valid UTF-8; so is the result.
std::string normalised(std::string_view text, NormalForm form);

}  // namespace kt::inline texts
