#include "text/grammar/pattern.h"

#include <algorithm>
#include <map>

#include "base/error.h"

namespace kt::inline texts {
namespace {

constexpr int kMostPatternStates = 30'000;
constexpr size_t kMostPatternEdges = 200'000, kMostPatternSets = 500;
constexpr int kDeepestGroups = 50;  // groups within each other
constexpr int64_t kMostRepeats = 10'000;

CodeSet set_of(std::vector<CodeRange> ranges) { return CodeSet(std::move(ranges)); }

const CodeSet& digits() {
  static const CodeSet set = set_of({{'0', '9'}});
  return set;
}
const CodeSet& words() {
  static const CodeSet set = set_of({{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}});
  return set;
}
const CodeSet& spaces() {
  static const CodeSet set = set_of({{9, 13},
                                     {' ', ' '},
                                     {0xA0, 0xA0},
                                     {0x1680, 0x1680},
                                     {0x2000, 0x200A},
                                     {0x2028, 0x2029},
                                     {0x202F, 0x202F},
                                     {0x205F, 0x205F},
                                     {0x3000, 0x3000},
                                     {0xFEFF, 0xFEFF}});
  return set;
}

struct Part {
  int begin = 0, end = 0;
};

class PatternParser {
 public:
  explicit PatternParser(std::string_view expression) : text_(expression) {
    if (!is_valid_utf8(expression)) fail("pattern: not UTF-8");
  }

  Pattern parse() {
    pattern_.start = pattern_.state();
    pattern_.end = pattern_.state();
    const int any = pattern_.set(all_characters());
    do {
      const bool from_start = take('^');
      tied_end_ = false;
      const Part part = sequence();
      const int before = pattern_.state(), after = pattern_.state();
      if (!from_start) pattern_.edge(before, before, any);
      if (!tied_end_) pattern_.edge(after, after, any);
      pattern_.edge(pattern_.start, before);
      pattern_.edge(before, part.begin);
      pattern_.edge(part.end, after);
      pattern_.edge(after, pattern_.end);
    } while (take('|'));
    if (at_ < text_.size()) refuse("a ')' without its group");
    return std::move(pattern_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    fail("pattern \"{}\": {} at byte {}", printable(text_.substr(0, 200)), what, at_);
  }
  bool ends() const { return at_ >= text_.size(); }
  char peek() const { return ends() ? '\0' : text_[at_]; }
  bool take(char c) {
    if (ends() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  Part alternatives() {
    const Part whole{pattern_.state(), pattern_.state()};
    do {
      const Part part = sequence();
      pattern_.edge(whole.begin, part.begin);
      pattern_.edge(part.end, whole.end);
    } while (take('|'));
    return whole;
  }

  Part sequence() {
    Part whole{pattern_.state(), 0};
    whole.end = whole.begin;
    while (!ends() && peek() != '|' && peek() != ')') {
      if (peek() == '$' && depth_ == 0 && (at_ + 1 == text_.size() || text_[at_ + 1] == '|')) {
        ++at_;
        tied_end_ = true;
        break;
      }
      const Part part = repeated();
      pattern_.edge(whole.end, part.begin);
      whole.end = part.end;
    }
    return whole;
  }

  // Repetitions read the atom again for every copy: the text is the tree.
  Part repeated() {
    const size_t begin = at_;
    Part part = atom();
    const size_t end = at_;
    int64_t least = 1, most = 1;
    if (!quantifier(least, most)) return part;
    take('?');  // lazy
    if (std::string_view("*+?{").find(peek()) != std::string_view::npos && !ends())
      refuse("a repetition of a repetition");
    const size_t next = at_;
    const auto copy = [&] {
      at_ = begin;
      const Part made = atom();
      KT_CHECK(at_ == end);
      return made;
    };
    Part whole{pattern_.state(), pattern_.state()};
    int now = whole.begin;
    for (int64_t i = 0; i < std::max(least, most); ++i) {
      if (i >= least) pattern_.edge(now, whole.end);
      const Part one = i == 0 ? part : copy();
      pattern_.edge(now, one.begin);
      now = one.end;
    }
    if (most < 0) {
      const Part one = least == 0 ? part : copy();
      const int loop = pattern_.state();
      pattern_.edge(now, loop);
      pattern_.edge(loop, one.begin);
      pattern_.edge(one.end, loop);
      now = loop;
    }
    pattern_.edge(now, whole.end);
    at_ = next;
    return whole;
  }

  bool quantifier(int64_t& least, int64_t& most) {
    if (take('*')) return least = 0, most = -1, true;
    if (take('+')) return least = 1, most = -1, true;
    if (take('?')) return least = 0, most = 1, true;
    if (peek() != '{' || ends()) return false;
    ++at_;
    least = most = number();
    if (take(',')) most = peek() == '}' ? -1 : number();
    if (!take('}')) refuse("expected {m}, {m,} or {m,n}");
    if (most >= 0 && most < least) refuse("a repetition whose most is below its least");
    return true;
  }

  int64_t number() {
    int64_t value = 0;
    const size_t begin = at_;
    while (peek() >= '0' && peek() <= '9' && value <= kMostRepeats) value = value * 10 + (text_[at_++] - '0');
    if (at_ == begin) refuse("expected {m}, {m,} or {m,n}");
    if (value > kMostRepeats) refuse("too many repetitions");
    return value;
  }

  Part atom() {
    const char c = peek();
    if (c == '(') return group();
    if (c == '^' || c == '$') refuse("an anchor that is not at the end of an outermost alternative");
    if (c == '*' || c == '+' || c == '?' || c == '{' || c == '}' || c == ']') refuse("a special character");
    if (c == '[') return single(char_class());
    if (c == '.') {
      ++at_;
      static const CodeSet line_ends = set_of({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}});
      return single(line_ends.inverted());
    }
    if (c == '\\') return single(escape());
    const CodePoint code = next_code_point(text_, at_);
    return single(set_of({{code, code}}));
  }

  Part group() {
    ++at_;
    if (take('?')) {
      if (take('<') && peek() != '=' && peek() != '!') {
        while (!ends() && !take('>')) ++at_;
      } else if (!take(':')) {
        refuse("only (...), (?:...) and (?<name>...) groups are supported; not this");
      }
    }
    if (++depth_ > kDeepestGroups) refuse("groups nest too far");
    const Part part = alternatives();
    --depth_;
    if (!take(')')) refuse("a group without its ')'");
    return part;
  }

  Part single(const CodeSet& set) {
    const Part part{pattern_.state(), pattern_.state()};
    pattern_.edge(part.begin, part.end, pattern_.set(set));
    return part;
  }

  CodeSet char_class() {
    ++at_;
    const bool negative = take('^');
    CodeSet all;
    while (!take(']')) {
      if (ends()) refuse("a class without its ']'");
      CodeSet item = class_item();
      const bool range = peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']';
      if (range) {
        ++at_;
        const CodeSet last = class_item();
        const auto one = [](const CodeSet& set) {
          return set.ranges().size() == 1 && set.ranges()[0].first == set.ranges()[0].last;
        };
        if (!one(item) || !one(last) || last.ranges()[0].first < item.ranges()[0].first)
          refuse("a range that is none");
        item = set_of({{item.ranges()[0].first, last.ranges()[0].first}});
      }
      all = all.united(item);
    }
    return negative ? all.inverted() : all;
  }

  CodeSet class_item() {
    if (ends()) refuse("a class without its ']'");
    if (peek() == '\\') return escape();
    const CodePoint code = next_code_point(text_, at_);
    return set_of({{code, code}});
  }

  CodeSet escape() {
    ++at_;
    if (ends()) refuse("a '\\' at the end");
    const char c = text_[at_++];
    switch (c) {
      case 'd':
        return digits();
      case 'D':
        return digits().inverted();
      case 'w':
        return words();
      case 'W':
        return words().inverted();
      case 's':
        return spaces();
      case 'S':
        return spaces().inverted();
      case 'n':
        return set_of({{'\n', '\n'}});
      case 'r':
        return set_of({{'\r', '\r'}});
      case 't':
        return set_of({{'\t', '\t'}});
      case 'f':
        return set_of({{'\f', '\f'}});
      case 'v':
        return set_of({{'\v', '\v'}});
      case '0':
        return set_of({{0, 0}});
      case 'x':
        return hex(2);
      case 'u':
        return unicode();
      case 'p':
        return property();
      case 'P':
        return property().inverted();
      default:
        break;
    }
    const bool word = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (word) refuse("an escape that is not supported");
    --at_;
    const CodePoint code = next_code_point(text_, at_);
    return set_of({{code, code}});
  }

  CodeSet hex(int count) {
    CodePoint code = 0;
    for (int i = 0; i < count; ++i) {
      const char c = peek();
      const bool digit = c >= '0' && c <= '9', letter = (c | 32) >= 'a' && (c | 32) <= 'f';
      if (!digit && !letter) refuse("expected a hexadecimal digit");
      code = code * 16 + static_cast<CodePoint>(digit ? c - '0' : (c | 32) - 'a' + 10);
      ++at_;
    }
    return set_of({{code, code}});
  }

  CodeSet unicode() {
    if (!take('{')) return hex(4);
    const size_t end = text_.find('}', at_);
    if (end == std::string_view::npos || end - at_ < 1 || end - at_ > 6) refuse("expected \\u{...}");
    CodeSet set = hex(static_cast<int>(end - at_));
    ++at_;
    if (set.ranges()[0].first > 0x10FFFF) refuse("a character above U+10FFFF");
    return set;
  }

  CodeSet property() {
    const size_t end = text_.find('}', at_);
    if (!take('{') || end == std::string_view::npos) refuse("expected \\p{...}");
    const auto set = property_set(text_.substr(at_, end - at_));
    if (!set) refuse("a property that is not known");
    at_ = end + 1;
    return *set;
  }

  std::string_view text_;
  size_t at_ = 0;
  int depth_ = 0;
  bool tied_end_ = false;
  Pattern pattern_;
};

}  // namespace

const CodeSet& all_characters() {
  static const CodeSet set = set_of({{0, 0x10FFFF}});
  return set;
}

int Pattern::state() {
  if (states >= kMostPatternStates)
    fail("pattern: too large; expected at most {} states", kMostPatternStates);
  return states++;
}

int Pattern::set(const CodeSet& set) {
  const auto found = std::ranges::find(sets, set);
  if (found != sets.end()) return static_cast<int>(found - sets.begin());
  if (sets.size() >= kMostPatternSets) fail("pattern: too many different characters and classes");
  sets.push_back(set);
  return static_cast<int>(sets.size() - 1);
}

void Pattern::edge(int from, int to, int set) {
  if (edges.size() >= kMostPatternEdges)
    fail("pattern: too large; expected at most {} edges", kMostPatternEdges);
  edges.push_back({from, to, set});
}

Pattern compiled_pattern(std::string_view expression) { return PatternParser(expression).parse(); }

Pattern length_pattern(int64_t least, int64_t most) {
  Pattern out;
  const int any = out.set(all_characters());
  out.start = out.state();
  out.end = out.state();
  int now = out.start;
  for (int64_t i = 0; i < std::max(least, most); ++i) {
    if (i >= least) out.edge(now, out.end);
    const int next = out.state();
    out.edge(now, next, any);
    now = next;
  }
  if (most < 0) out.edge(now, now, any);
  out.edge(now, out.end);
  return out;
}

Pattern intersection(const Pattern& a, const Pattern& b) {
  std::vector<std::vector<Pattern::Edge>> from_a(static_cast<size_t>(a.states)),
      from_b(static_cast<size_t>(b.states));
  for (const auto& edge : a.edges) from_a[static_cast<size_t>(edge.from)].push_back(edge);
  for (const auto& edge : b.edges) from_b[static_cast<size_t>(edge.from)].push_back(edge);
  Pattern out;
  std::map<std::pair<int, int>, int> states;
  std::vector<std::pair<int, int>> todo;
  const auto state_of = [&](int left, int right) {
    const auto [place, is_new] = states.emplace(std::pair(left, right), 0);
    if (is_new) {
      place->second = out.state();
      todo.emplace_back(left, right);
    }
    return place->second;
  };
  std::map<std::pair<int, int>, int> sets;  // by the two; kNoSet: nothing in common
  const auto common = [&](int left, int right) {
    const auto [place, is_new] = sets.emplace(std::pair(left, right), Pattern::kNoSet);
    if (!is_new) return place->second;
    const CodeSet both = a.sets[static_cast<size_t>(left)].intersected(b.sets[static_cast<size_t>(right)]);
    return place->second = both.ranges().empty() ? Pattern::kNoSet : out.set(both);
  };
  out.start = state_of(a.start, b.start);
  out.end = state_of(a.end, b.end);
  while (!todo.empty()) {
    const auto [left, right] = todo.back();
    todo.pop_back();
    const int from = state_of(left, right);
    for (const auto& x : from_a[static_cast<size_t>(left)]) {
      if (x.set == Pattern::kNoSet) {
        out.edge(from, state_of(x.to, right));
        continue;
      }
      for (const auto& y : from_b[static_cast<size_t>(right)]) {
        if (y.set == Pattern::kNoSet) continue;
        const int set = common(x.set, y.set);
        if (set != Pattern::kNoSet) out.edge(from, state_of(x.to, y.to), set);
      }
    }
    for (const auto& y : from_b[static_cast<size_t>(right)])
      if (y.set == Pattern::kNoSet) out.edge(from, state_of(left, y.to));
  }
  return out;
}

bool matches(const Pattern& pattern, std::string_view text) {
  std::vector<std::vector<Pattern::Edge>> from(static_cast<size_t>(pattern.states));
  for (const auto& edge : pattern.edges) from[static_cast<size_t>(edge.from)].push_back(edge);
  std::vector<int> now;
  std::vector<char> seen;
  const auto visit = [&](int state, std::vector<int>& list) {
    if (!seen[static_cast<size_t>(state)]) list.push_back(state);
    seen[static_cast<size_t>(state)] = 1;
  };
  const auto close = [&](std::vector<int>& list) {
    for (size_t i = 0; i < list.size(); ++i)
      for (const auto& edge : from[static_cast<size_t>(list[i])])
        if (edge.set == Pattern::kNoSet) visit(edge.to, list);
  };
  seen.assign(from.size(), 0);
  visit(pattern.start, now);
  close(now);
  for (size_t at = 0; at < text.size();) {
    const CodePoint code = next_code_point(text, at);
    std::vector<int> next;
    seen.assign(from.size(), 0);
    for (int state : now)
      for (const auto& edge : from[static_cast<size_t>(state)])
        if (edge.set != Pattern::kNoSet && pattern.sets[static_cast<size_t>(edge.set)].contains(code))
          visit(edge.to, next);
    close(next);
    now = std::move(next);
  }
  return std::ranges::find(now, pattern.end) != now.end();
}

}  // namespace kt::inline texts
