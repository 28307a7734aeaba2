// A small regular-expression matcher over code points, for the patterns by which tokenizers cut text into
// words and those by which users name modules. Backtracking, leftmost, first alternative wins, as Oniguruma and Rust's
// fancy-regex do. It captures nothing, and it is bounded: a search pays for its steps, so no pattern runs away.
//
// Understood: literals, '.', [classes] with ranges, negation, nesting and &&, \s \S \d \D \w \W \p{..} \P{..}
// \xHH \x{H..} \uHHHH and the escapes of control characters, groups ( ) (?: ) (?i: ) (?-i: ), (?i) to the end
// of its group, atomic groups (?> ), lookahead (?= ) (?! ), lookbehind (?<= ) (?<! ) over one character,
// ? * + {m} {m,} {m,n} greedy, lazy and possessive, ^ $ \A \z \Z \b \B. Anything else is an Error naming the
// position.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/unicode.h"

namespace kt::inline texts {

// Where the engines that patterns were written for disagree. Oniguruma (tokenizer.json): ^ and $ are ends of
// lines, and {m,n}+ repeats the repetition. Rust (tiktoken): ^ and $ are the ends of the text, and {m,n}+ is
// possessive. Python (compressed-tensors): as Rust, but $ also stands before a newline that ends the text, \Z
// does not; '[' and && in a class are characters; (?P<name> ) is a group; {,} is *; and what Python's `re` refuses is
// an Error: repetitions of repetitions, (?i) behind the start, \p \e \z, \x with one digit.
enum class RegexDialect { kOniguruma, kRust, kPython };

// What a pattern compiles to; for regex_compile.cc and regex.cc.
struct RegexStep {
  enum class Op : uint8_t {
    kSet,     // one code point of set
    kLoop,    // min to max of set
    kSplit,   // try target first, then other
    kJump,    // to target
    kLook,    // what follows, up to its kAccept, must (not, if negative) match here; go on at target
    kBehind,  // the code point before must (not) be in set
    kAtomic,  // what follows, up to its kAccept, matched once for all; go on at target
    kAssert,  // a place
    kAccept,
  };
  enum class Place : uint8_t {
    kTextBegin,
    kTextEnd,
    kTextEndOrNewline,
    kLineBegin,
    kLineEnd,
    kWordEdge,
    kNoWordEdge
  };
  enum class Mode : uint8_t { kGreedy, kLazy, kPossessive };
  Op op = Op::kAccept;
  Place place = Place::kTextBegin;
  Mode mode = Mode::kGreedy;
  bool negative = false;
  uint32_t set = 0;
  uint32_t target = 0, other = 0;
  uint32_t min = 0, max = 0;
};
constexpr uint32_t kUnbounded = 0xFFFFFFFF;

struct RegexProgram {
  std::vector<RegexStep> steps;
  std::vector<CodeSet> sets;
};
RegexProgram compile_regex(std::string_view pattern, RegexDialect dialect);

// Immutable after construction; any number of threads may search with it.
class Regex {
 public:
  // Error(kInput) "pattern \"...\": ... at byte N" for syntax outside the list above.
  explicit Regex(std::string_view pattern, RegexDialect dialect = RegexDialect::kOniguruma)
      : program_(compile_regex(pattern, dialect)), pattern_(pattern) {}
  const RegexProgram& program() const { return program_; }
  const std::string& pattern() const { return pattern_; }

 private:
  RegexProgram program_;
  std::string pattern_;
};

// What a pattern on the name of a module may take: several ".*" need a power of the name's length, and what people
// write a few thousand steps.
constexpr size_t kMostNameSteps = 200'000;

struct RegexMatch {
  size_t begin = 0, end = 0;  // bytes
};

// The matches in one text, from left to right, not overlapping; an empty match right behind the last one is
// passed over. `text` is valid UTF-8; both arguments must outlive the search.
class RegexSearch {
 public:
  RegexSearch(const Regex& regex, std::string_view text)
      : RegexSearch(regex, text, 512 + 256 * text.size()) {}
  RegexSearch(const Regex& regex, std::string_view text, size_t most_steps);
  // nullopt at the end. Error(kInput) when the pattern took more than `most_steps`.
  std::optional<RegexMatch> next();
  // The match that begins with the text, as Python's re.match; looks nowhere else.
  std::optional<RegexMatch> at_start();
  size_t steps() const { return most_steps_ - steps_left_; }  // taken so far

 private:
  struct Choice {
    enum class Kind : uint8_t { kGo, kShrink, kGrow };
    uint32_t step = 0;
    Kind kind = Kind::kGo;
    uint32_t count = 0;      // kGrow: repetitions that may still be added
    size_t at = 0, low = 0;  // kShrink: gives back one code point of [low, at)
  };
  std::optional<size_t> run(uint32_t step, size_t at);
  std::optional<size_t> run_choices(uint32_t step, size_t at, size_t base);
  bool fails_at_once(uint32_t step, size_t at) const;
  bool loop(uint32_t step, size_t& at);
  bool retry(uint32_t& step, size_t& at, size_t base);
  bool holds(const RegexStep& step, size_t at) const;
  void pay(size_t steps);
  void choose(const Choice& choice);

  const Regex& regex_;
  std::string_view text_;
  std::vector<Choice> choices_;
  size_t most_steps_, steps_left_;
  size_t next_ = 0;
  std::optional<size_t> last_end_;
};

}  // namespace kt::inline texts
