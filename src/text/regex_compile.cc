// From a pattern to its tree, and over regex_steps.cc to the steps of regex.h.
#include <algorithm>
#include <memory>
#include <set>

#include "base/error.h"
#include "text/regex.h"
#include "text/regex_tree.h"

namespace kt::inline texts {
namespace {

constexpr size_t kMaxPattern = 16 << 10;
constexpr uint32_t kMaxRepeats = 1000;
constexpr int kMaxDepth = 50;

bool can_be_empty(const RegexNode& node) {
  switch (node.kind) {
    case RegexNode::Kind::kSet:
      return false;
    case RegexNode::Kind::kSequence:
      for (const RegexNode& part : node.parts)
        if (!can_be_empty(part)) return false;
      return true;
    case RegexNode::Kind::kEither:
      for (const RegexNode& part : node.parts)
        if (can_be_empty(part)) return true;
      return false;
    case RegexNode::Kind::kRepeat:
      return node.min == 0 || can_be_empty(node.parts[0]);
    case RegexNode::Kind::kAtomic:
      return can_be_empty(node.parts[0]);
    default:
      return true;
  }
}

class Parser {
 public:
  Parser(std::string_view pattern, RegexDialect dialect, std::vector<CodeSet>& sets)
      : pattern_(pattern), dialect_(dialect), sets_(sets) {}

  RegexNode parse() {
    if (pattern_.size() > kMaxPattern)
      fail("a pattern of {} bytes; at most {}", pattern_.size(), kMaxPattern);
    if (!is_valid_utf8(pattern_)) bad("invalid UTF-8");
    RegexNode node = either();
    if (!done()) bad("')' without '('");
    return node;
  }

 private:
  [[noreturn]] void bad(std::string_view what) const {
    fail("pattern \"{}\": {} at byte {}", printable(pattern_), what, at_);
  }
  bool done() const { return at_ == pattern_.size(); }
  char peek() const { return done() ? '\0' : pattern_[at_]; }
  bool take(std::string_view literal) {
    if (!pattern_.substr(at_).starts_with(literal)) return false;
    at_ += literal.size();
    return true;
  }

  uint32_t add_set(CodeSet set) {
    for (size_t i = 0; i < sets_.size(); ++i)
      if (sets_[i] == set) return static_cast<uint32_t>(i);
    sets_.push_back(std::move(set));
    return static_cast<uint32_t>(sets_.size() - 1);
  }
  RegexNode set_node(const CodeSet& set) {
    return {.kind = RegexNode::Kind::kSet, .set = add_set(ignore_case_ ? set.case_closed() : set)};
  }
  RegexNode literal(CodePoint code) { return set_node(CodeSet({{code, code}})); }

  RegexNode either() {
    if (++depth_ > kMaxDepth) bad(text("groups nested deeper than {}", kMaxDepth));
    const bool outer_case = ignore_case_;
    RegexNode node{.kind = RegexNode::Kind::kEither};
    do node.parts.push_back(sequence());
    while (take("|"));
    ignore_case_ = outer_case;
    --depth_;
    if (node.parts.size() > 1) return node;
    RegexNode only = std::move(node.parts[0]);
    return only;
  }

  RegexNode sequence() {
    RegexNode node;
    while (!done() && peek() != '|' && peek() != ')') {
      const size_t start = at_;
      if (take("(?i)")) {
        if (python() && start > 0) {
          at_ = start;
          bad("flags for the whole pattern that do not stand at its start");
        }
        ignore_case_ = true;
        continue;
      }
      node.parts.push_back(repeated(atom()));
    }
    return node;
  }

  RegexNode repeated(RegexNode node) {
    for (int rounds = 0;; ++rounds) {
      const size_t start = at_;
      uint32_t min = 0, max = kUnbounded;
      bool braces = false;
      if (take("*")) {
      } else if (take("+")) {
        min = 1;
      } else if (take("?")) {
        max = 1;
      } else if (braces = take_braces(min, max); !braces) {
        return node;
      }
      if (python() && rounds > 0) {
        at_ = start;
        bad("a repetition of a repetition");
      }
      if (max > 1 && can_be_empty(node)) bad("repetition of what may be empty");
      if (node.kind == RegexNode::Kind::kAssert || node.kind == RegexNode::Kind::kLook)
        bad("repetition of an assertion");
      RegexStep::Mode mode = RegexStep::Mode::kGreedy;
      if (take("?"))
        mode = RegexStep::Mode::kLazy;
      else if (!(braces && dialect_ == RegexDialect::kOniguruma) && take("+"))
        mode = RegexStep::Mode::kPossessive;
      RegexNode outer{.kind = RegexNode::Kind::kRepeat, .min = min, .max = max, .mode = mode};
      outer.parts.push_back(std::move(node));
      node = std::move(outer);
      if (++quantifiers_ > 1000) bad("more than 1000 quantifiers");
    }
  }

  // {m} {m,} {m,n} {,n}, and in Python {,}; other braces are literals.
  bool take_braces(uint32_t& min, uint32_t& max) {
    if (peek() != '{') return false;
    const size_t start = at_++;
    const std::optional<uint32_t> low = number();
    std::optional<uint32_t> high = low;
    const bool comma = take(",");
    if (comma) high = number();
    if (!take("}") || (!low && !high && !(python() && comma))) return at_ = start, false;
    min = low.value_or(0);
    max = high.value_or(kUnbounded);
    if (max < min) bad(text("repetition {{{},{}}}", min, max));
    return true;
  }

  std::optional<uint32_t> number() {
    std::optional<uint32_t> value;
    while (peek() >= '0' && peek() <= '9') {
      value = value.value_or(0) * 10 + static_cast<uint32_t>(pattern_[at_++] - '0');
      if (*value > kMaxRepeats) bad(text("more than {} repetitions", kMaxRepeats));
    }
    return value;
  }

  RegexNode atom() {
    if (take("(")) return group();
    if (peek() == '[') return set_node(bracket());
    if (take(".")) return set_node(CodeSet({{'\n', '\n'}}).inverted());
    const bool lines = dialect_ == RegexDialect::kOniguruma;
    if (take("^")) return place(lines ? RegexStep::Place::kLineBegin : RegexStep::Place::kTextBegin);
    if (take("$"))
      return place(lines                               ? RegexStep::Place::kLineEnd
                   : dialect_ == RegexDialect::kPython ? RegexStep::Place::kTextEndOrNewline
                                                       : RegexStep::Place::kTextEnd);
    uint32_t min = 0, max = 0;
    if (peek() == '*' || peek() == '+' || peek() == '?' || (python() && take_braces(min, max)))
      bad("nothing to repeat");
    if (take("\\A")) return place(RegexStep::Place::kTextBegin);
    if (!python() && take("\\z")) return place(RegexStep::Place::kTextEnd);
    if (take("\\Z"))
      return place(dialect_ == RegexDialect::kPython ? RegexStep::Place::kTextEnd
                                                     : RegexStep::Place::kTextEndOrNewline);
    if (take("\\b")) return place(RegexStep::Place::kWordEdge);
    if (take("\\B")) return place(RegexStep::Place::kNoWordEdge);
    if (peek() == '\\') {
      CodePoint code = 0;
      if (std::optional<CodeSet> set = escape(code)) return set_node(*set);
      return literal(code);
    }
    return literal(next_code_point(pattern_, at_));
  }

  static RegexNode place(RegexStep::Place where) {
    return {.kind = RegexNode::Kind::kAssert, .place = where};
  }

  RegexNode group() {
    const bool outer_case = ignore_case_;
    RegexNode node;
    if (take("?=")) {
      node.kind = RegexNode::Kind::kLook;
    } else if (take("?!")) {
      node = {.kind = RegexNode::Kind::kLook, .negative = true};
    } else if (take("?<=")) {
      node.kind = RegexNode::Kind::kBehind;
    } else if (take("?<!")) {
      node = {.kind = RegexNode::Kind::kBehind, .negative = true};
    } else if (take("?>")) {
      node.kind = RegexNode::Kind::kAtomic;
    } else if (take("?i:")) {
      ignore_case_ = true;
    } else if (take("?-i:")) {
      ignore_case_ = false;
    } else if (python() && take("?P<")) {
      group_name();
    } else if (!take("?:") && peek() == '?') {
      bad("a group of a kind we do not know");
    }
    node.parts.push_back(either());
    ignore_case_ = outer_case;
    if (!take(")")) bad("missing ')'");
    if (node.kind == RegexNode::Kind::kBehind) {
      const RegexNode* inner = &node.parts[0];
      while (inner->kind == RegexNode::Kind::kSequence && inner->parts.size() == 1) inner = &inner->parts[0];
      if (inner->kind != RegexNode::Kind::kSet) bad("lookbehind over more than one character");
      node.set = inner->set;
    }
    return node;
  }

  // Of (?P<name>...), which Python wants to be an identifier and no other group's.
  void group_name() {
    const size_t end = pattern_.find('>', at_);
    if (end == std::string_view::npos) bad("missing '>'");
    const std::string name(pattern_.substr(at_, end - at_));
    const auto letter = [](char c) { return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
    const bool word = !name.empty() && letter(name[0]) &&
                      std::ranges::all_of(name, [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
    if (!word) bad("a group's name that is no word");
    if (!group_names_.insert(name).second) bad("a second group of this name");
    at_ = end + 1;
  }

  bool python() const { return dialect_ == RegexDialect::kPython; }

  // Python wants all the digits.
  CodePoint hex(size_t most) {
    CodePoint value = 0;
    size_t digits = 0;
    for (; digits < most; ++digits, ++at_) {
      const char c = peek();
      if (c >= '0' && c <= '9')
        value = value * 16 + static_cast<CodePoint>(c - '0');
      else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'))
        value = value * 16 + static_cast<CodePoint>((c | 0x20) - 'a' + 10);
      else
        break;
    }
    if (digits == 0 || (python() && digits < most)) bad("expected hexadecimal digits");
    if (value > kLastCodePoint) bad("a code point past U+10FFFF");
    return value;
  }

  CodeSet words() const {
    if (dialect_ == RegexDialect::kPython)
      return property_set("L")->united(*property_set("N")).united(CodeSet({{'_', '_'}}));
    return dialect_ == RegexDialect::kOniguruma ? word_set() : rust_word_set();
  }

  // After a backslash: a set, or one code point in `code`.
  std::optional<CodeSet> escape(CodePoint& code) {
    ++at_;
    if (done()) bad("a backslash at the end");
    const size_t start = at_;
    const CodePoint c = next_code_point(pattern_, at_);
    switch (c) {
      case 's':
        return whitespace_set();
      case 'S':
        return whitespace_set().inverted();
      case 'd':
        return digit_set();
      case 'D':
        return digit_set().inverted();
      case 'w':
        return words();
      case 'W':
        return words().inverted();
      case 'p':
      case 'P':
        if (python()) break;
        return property(c == 'P');
      case 'n':
        return code = '\n', std::nullopt;
      case 'r':
        return code = '\r', std::nullopt;
      case 't':
        return code = '\t', std::nullopt;
      case 'f':
        return code = '\f', std::nullopt;
      case 'v':
        return code = '\v', std::nullopt;
      case 'a':
        return code = '\a', std::nullopt;
      case 'e':
        if (python()) break;
        return code = 0x1B, std::nullopt;
      case 'u':
        return code = hex(4), std::nullopt;
      case 'x':
        if (python() || !take("{")) return code = hex(2), std::nullopt;
        code = hex(8);
        if (!take("}")) bad("missing '}'");
        return std::nullopt;
      default:
        break;
    }
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) {
      at_ = start - 1;
      bad(text("an escape we do not know, \\{}", static_cast<char>(c)));
    }
    code = c;
    return std::nullopt;
  }

  CodeSet property(bool negative) {
    std::string_view name;
    if (take("{")) {
      const size_t end = pattern_.find('}', at_);
      if (end == std::string_view::npos) bad("missing '}'");
      name = pattern_.substr(at_, end - at_);
      if (name.starts_with('^')) {
        negative = !negative;
        name.remove_prefix(1);
      }
      at_ = end + 1;
    } else if (!done()) {
      name = pattern_.substr(at_++, 1);
    }
    const std::optional<CodeSet> set = property_set(name);
    if (!set) bad(text("a property we do not know, \"{}\",", printable(name)));
    return negative ? set->inverted() : *set;
  }

  // [ ... ], from the bracket on.
  CodeSet bracket() {
    if (++depth_ > kMaxDepth) bad(text("classes nested deeper than {}", kMaxDepth));
    ++at_;
    const bool negative = take("^");
    std::optional<CodeSet> left;  // what stands before &&
    std::vector<CodeRange> ranges;
    const auto close = [&] {
      CodeSet here(std::move(ranges));
      ranges.clear();
      left = left ? left->intersected(here) : here;
    };
    for (bool first = true; first || peek() != ']'; first = false) {
      if (done()) bad("missing ']'");
      if (dialect_ != RegexDialect::kPython && take("&&"))
        close();
      else
        bracket_item(ranges);
    }
    ++at_;
    close();
    --depth_;
    // Under (?i) the members are closed before the set is turned around.
    if (ignore_case_) left = left->case_closed();
    return negative ? left->inverted() : *left;
  }

  void bracket_item(std::vector<CodeRange>& ranges) {
    const auto add = [&](const CodeSet& set) {
      ranges.insert(ranges.end(), set.ranges().begin(), set.ranges().end());
    };
    const bool nests = dialect_ != RegexDialect::kPython;
    if (nests && pattern_.substr(at_).starts_with("[:")) bad("a POSIX bracket");
    if (nests && peek() == '[') return add(bracket());
    CodePoint first = 0;
    if (peek() == '\\') {
      if (std::optional<CodeSet> set = escape(first)) {
        if (python() && peek() == '-' && at_ + 1 < pattern_.size() && pattern_[at_ + 1] != ']')
          bad("a range that begins with a class");
        return add(*set);
      }
    } else {
      first = next_code_point(pattern_, at_);
    }
    CodePoint last = first;
    if (peek() == '-' && at_ + 1 < pattern_.size() && pattern_[at_ + 1] != ']') {
      ++at_;
      if (nests && peek() == '[') bad("a range that ends in a class");
      if (peek() == '\\') {
        if (escape(last)) bad("a range that ends in a class");
      } else {
        last = next_code_point(pattern_, at_);
      }
      if (last < first) bad("a range that runs backwards");
    }
    ranges.push_back({first, last});
  }

  std::string_view pattern_;
  RegexDialect dialect_;
  std::vector<CodeSet>& sets_;
  size_t at_ = 0;
  int depth_ = 0;
  int quantifiers_ = 0;
  bool ignore_case_ = false;
  std::set<std::string> group_names_;
};

}  // namespace

RegexProgram compile_regex(std::string_view pattern, RegexDialect dialect) {
  RegexProgram program;
  const RegexNode tree = Parser(pattern, dialect, program.sets).parse();
  program.steps = regex_steps(tree, pattern);
  return program;
}

}  // namespace kt::inline texts
