// From a pattern to the steps of regex.h: a tree first, then code.
#include <memory>

#include "base/error.h"
#include "text/regex.h"

namespace kt {
namespace {

constexpr size_t kMaxPattern = 16 << 10;
constexpr size_t kMaxSteps = 10'000;
constexpr uint32_t kMaxRepeats = 1000;
constexpr int kMaxDepth = 50;

struct Node {
  enum class Kind { kSequence, kEither, kSet, kRepeat, kLook, kBehind, kAtomic, kAssert };
  Kind kind = Kind::kSequence;
  std::vector<Node> parts = {};
  uint32_t set = 0;
  uint32_t min = 0, max = 0;
  RegexStep::Mode mode = RegexStep::Mode::kGreedy;
  RegexStep::Place place = RegexStep::Place::kTextBegin;
  bool negative = false;
};

bool can_be_empty(const Node& node) {
  switch (node.kind) {
    case Node::Kind::kSet:
      return false;
    case Node::Kind::kSequence:
      for (const Node& part : node.parts)
        if (!can_be_empty(part)) return false;
      return true;
    case Node::Kind::kEither:
      for (const Node& part : node.parts)
        if (can_be_empty(part)) return true;
      return false;
    case Node::Kind::kRepeat:
      return node.min == 0 || can_be_empty(node.parts[0]);
    case Node::Kind::kAtomic:
      return can_be_empty(node.parts[0]);
    default:
      return true;
  }
}

class Parser {
 public:
  Parser(std::string_view pattern, RegexDialect dialect, std::vector<CodeSet>& sets)
      : pattern_(pattern), dialect_(dialect), sets_(sets) {}

  Node parse() {
    if (pattern_.size() > kMaxPattern)
      fail("a pattern of {} bytes; at most {}", pattern_.size(), kMaxPattern);
    if (!is_valid_utf8(pattern_)) bad("invalid UTF-8");
    Node node = either();
    if (!done()) bad("')' without '('");
    return node;
  }

 private:
  [[noreturn]] void bad(std::string_view what) const {
    fail("pattern \"{}\": {} at byte {}", printable(pattern_), what, at_);
  }
  bool done() const { return at_ == pattern_.size(); }
  char peek() const { return done() ? '\0' : pattern_[at_]; }
  bool take(std::string_view words) {
    if (!pattern_.substr(at_).starts_with(words)) return false;
    at_ += words.size();
    return true;
  }

  uint32_t add_set(CodeSet set) {
    for (size_t i = 0; i < sets_.size(); ++i)
      if (sets_[i] == set) return static_cast<uint32_t>(i);
    sets_.push_back(std::move(set));
    return static_cast<uint32_t>(sets_.size() - 1);
  }
  Node set_node(const CodeSet& set) {
    return {.kind = Node::Kind::kSet, .set = add_set(ignore_case_ ? set.case_closed() : set)};
  }
  Node literal(CodePoint code) { return set_node(CodeSet({{code, code}})); }

  Node either() {
    if (++depth_ > kMaxDepth) bad(text("groups nested deeper than {}", kMaxDepth));
    const bool outer_case = ignore_case_;
    Node node{.kind = Node::Kind::kEither};
    do node.parts.push_back(sequence());
    while (take("|"));
    ignore_case_ = outer_case;
    --depth_;
    if (node.parts.size() > 1) return node;
    Node only = std::move(node.parts[0]);
    return only;
  }

  Node sequence() {
    Node node;
    while (!done() && peek() != '|' && peek() != ')') {
      if (take("(?i)")) {
        ignore_case_ = true;
        continue;
      }
      node.parts.push_back(repeated(atom()));
    }
    return node;
  }

  Node repeated(Node node) {
    while (true) {
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
      if (max > 1 && can_be_empty(node)) bad("repetition of what may be empty");
      if (node.kind == Node::Kind::kAssert || node.kind == Node::Kind::kLook)
        bad("repetition of an assertion");
      RegexStep::Mode mode = RegexStep::Mode::kGreedy;
      if (take("?"))
        mode = RegexStep::Mode::kLazy;
      else if (!(braces && dialect_ == RegexDialect::kOniguruma) && take("+"))
        mode = RegexStep::Mode::kPossessive;
      Node outer{.kind = Node::Kind::kRepeat, .min = min, .max = max, .mode = mode};
      outer.parts.push_back(std::move(node));
      node = std::move(outer);
      if (++quantifiers_ > 1000) bad("more than 1000 quantifiers");
    }
  }

  // {m} {m,} {m,n} {,n}; other braces are literals.
  bool take_braces(uint32_t& min, uint32_t& max) {
    if (peek() != '{') return false;
    const size_t start = at_++;
    const std::optional<uint32_t> low = number();
    std::optional<uint32_t> high = low;
    if (take(",")) high = number();
    if (!take("}") || (!low && !high)) return at_ = start, false;
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

  Node atom() {
    if (take("(")) return group();
    if (peek() == '[') return set_node(bracket());
    if (take(".")) return set_node(CodeSet({{'\n', '\n'}}).inverted());
    const bool lines = dialect_ == RegexDialect::kOniguruma;
    if (take("^")) return place(lines ? RegexStep::Place::kLineBegin : RegexStep::Place::kTextBegin);
    if (take("$"))
      return place(lines                               ? RegexStep::Place::kLineEnd
                   : dialect_ == RegexDialect::kPython ? RegexStep::Place::kTextEndOrNewline
                                                       : RegexStep::Place::kTextEnd);
    if (peek() == '*' || peek() == '+' || peek() == '?') bad("nothing to repeat");
    if (take("\\A")) return place(RegexStep::Place::kTextBegin);
    if (take("\\z")) return place(RegexStep::Place::kTextEnd);
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

  static Node place(RegexStep::Place where) { return {.kind = Node::Kind::kAssert, .place = where}; }

  Node group() {
    const bool outer_case = ignore_case_;
    Node node;
    if (take("?=")) {
      node.kind = Node::Kind::kLook;
    } else if (take("?!")) {
      node = {.kind = Node::Kind::kLook, .negative = true};
    } else if (take("?<=")) {
      node.kind = Node::Kind::kBehind;
    } else if (take("?<!")) {
      node = {.kind = Node::Kind::kBehind, .negative = true};
    } else if (take("?>")) {
      node.kind = Node::Kind::kAtomic;
    } else if (take("?i:")) {
      ignore_case_ = true;
    } else if (take("?-i:")) {
      ignore_case_ = false;
    } else if (dialect_ == RegexDialect::kPython && take("?P<")) {
      const size_t end = pattern_.find('>', at_);
      if (end == std::string_view::npos) bad("missing '>'");
      at_ = end + 1;
    } else if (!take("?:") && peek() == '?') {
      bad("a group of a kind we do not know");
    }
    node.parts.push_back(either());
    ignore_case_ = outer_case;
    if (!take(")")) bad("missing ')'");
    if (node.kind == Node::Kind::kBehind) {
      const Node* inner = &node.parts[0];
      while (inner->kind == Node::Kind::kSequence && inner->parts.size() == 1) inner = &inner->parts[0];
      if (inner->kind != Node::Kind::kSet) bad("lookbehind over more than one character");
      node.set = inner->set;
    }
    return node;
  }

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
    if (digits == 0) bad("expected hexadecimal digits");
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
        return code = 0x1B, std::nullopt;
      case 'u':
        return code = hex(4), std::nullopt;
      case 'x':
        if (!take("{")) return code = hex(2), std::nullopt;
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
      if (std::optional<CodeSet> set = escape(first)) return add(*set);
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
};

class Writer {
 public:
  Writer(std::string_view pattern, std::vector<RegexStep>& steps) : pattern_(pattern), steps_(steps) {}

  void write(const Node& node) {
    switch (node.kind) {
      case Node::Kind::kSequence:
        for (const Node& part : node.parts) write(part);
        return;
      case Node::Kind::kEither:
        return either(node);
      case Node::Kind::kSet:
        add({.op = RegexStep::Op::kSet, .set = node.set});
        return;
      case Node::Kind::kRepeat:
        return repeat(node);
      case Node::Kind::kLook:
        return enclosed(node.parts[0], {.op = RegexStep::Op::kLook, .negative = node.negative});
      case Node::Kind::kBehind:
        add({.op = RegexStep::Op::kBehind, .negative = node.negative, .set = node.set});
        return;
      case Node::Kind::kAtomic:
        return enclosed(node.parts[0], {.op = RegexStep::Op::kAtomic});
      case Node::Kind::kAssert:
        add({.op = RegexStep::Op::kAssert, .place = node.place});
        return;
    }
  }

  uint32_t add(const RegexStep& step) {
    if (steps_.size() >= kMaxSteps)
      fail("pattern \"{}\": compiles to more than {} steps", printable(pattern_), kMaxSteps);
    steps_.push_back(step);
    return here() - 1;
  }

 private:
  uint32_t here() const { return static_cast<uint32_t>(steps_.size()); }

  void enclosed(const Node& body, const RegexStep& opening) {
    const uint32_t open = add(opening);
    write(body);
    add({.op = RegexStep::Op::kAccept});
    steps_[open].target = here();
  }

  void either(const Node& node) {
    std::vector<uint32_t> jumps;
    for (size_t i = 0; i + 1 < node.parts.size(); ++i) {
      const uint32_t split = add({.op = RegexStep::Op::kSplit});
      steps_[split].target = here();
      write(node.parts[i]);
      jumps.push_back(add({.op = RegexStep::Op::kJump}));
      steps_[split].other = here();
    }
    write(node.parts.back());
    for (uint32_t jump : jumps) steps_[jump].target = here();
  }

  void repeat(const Node& node) {
    const Node& body = node.parts[0];
    const Node* inner = &body;  // a group around one set changes nothing
    while (inner->kind == Node::Kind::kSequence && inner->parts.size() == 1) inner = &inner->parts[0];
    if (inner->kind == Node::Kind::kSet) {
      add({.op = RegexStep::Op::kLoop,
           .mode = node.mode,
           .set = inner->set,
           .min = node.min,
           .max = node.max});
      return;
    }
    if (node.mode == RegexStep::Mode::kPossessive) {
      Node greedy = node;
      greedy.mode = RegexStep::Mode::kGreedy;
      return enclosed(greedy, {.op = RegexStep::Op::kAtomic});
    }
    for (uint32_t i = 0; i < node.min; ++i) write(body);
    std::vector<uint32_t> splits;
    const auto optional_body = [&] {
      splits.push_back(add({.op = RegexStep::Op::kSplit}));
      write(body);
    };
    if (node.max == kUnbounded) {
      const uint32_t top = here();
      optional_body();
      add({.op = RegexStep::Op::kJump, .target = top});
    } else {
      for (uint32_t i = node.min; i < node.max; ++i) optional_body();
    }
    for (uint32_t split : splits) {
      const bool lazy = node.mode == RegexStep::Mode::kLazy;
      steps_[split].target = lazy ? here() : split + 1;
      steps_[split].other = lazy ? split + 1 : here();
    }
  }

  std::string_view pattern_;
  std::vector<RegexStep>& steps_;
};

}  // namespace

RegexProgram compile_regex(std::string_view pattern, RegexDialect dialect) {
  RegexProgram program;
  const Node tree = Parser(pattern, dialect, program.sets).parse();
  Writer writer(pattern, program.steps);
  writer.write(tree);
  writer.add({.op = RegexStep::Op::kAccept});
  return program;
}

}  // namespace kt
