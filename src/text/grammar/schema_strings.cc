#include "text/grammar/schema_strings.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/error.h"
#include "text/grammar/pattern.h"

namespace kt::inline texts {
namespace {

using Json = nlohmann::ordered_json;
constexpr int64_t kMostCounted = 20'000;  // characters
constexpr int64_t kMostCount = 1'000'000'000;

#define KT_YEAR "(000[1-9]|00[1-9]\\d|0[1-9]\\d\\d|[1-9]\\d{3})"
#define KT_LEAP "(\\d\\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
#define KT_DATE                                                                           \
  "(" KT_YEAR                                                                             \
  "-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|02-(0[1-9]|" \
  "1\\d|2[0-8]))|" KT_LEAP "-02-29)"
#define KT_TIME "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,9})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"
#define KT_HMS "(\\d{1,9}H(\\d{1,9}M(\\d{1,9}S)?)?|\\d{1,9}M(\\d{1,9}S)?|\\d{1,9}S)"
#define KT_LABEL "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define KT_BYTE "(\\d|[1-9]\\d|1\\d\\d|2[0-4]\\d|25[0-5])"
#define KT_V4 KT_BYTE "(\\." KT_BYTE "){3}"
#define KT_H16 "[0-9A-Fa-f]{1,4}"

struct Format {
  std::string_view name, pattern;
};
constexpr std::array kFormats = {
    Format{"date", "^" KT_DATE "$"},
    Format{"time", "^" KT_TIME "$"},
    Format{"date-time", "^" KT_DATE "T" KT_TIME "$"},
    Format{"duration", "^P((\\d{1,9}D|\\d{1,9}M(\\d{1,9}D)?|\\d{1,9}Y(\\d{1,9}M(\\d{1,9}D)?)?)(T" KT_HMS
                       ")?|T" KT_HMS "|\\d{1,9}W)$"},
    Format{"uuid", "^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$"},
    Format{"email", "^[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@" KT_LABEL "(\\." KT_LABEL ")+$"},
    Format{"hostname", "^" KT_LABEL "(\\." KT_LABEL ")*$"},
    Format{"ipv4", "^" KT_V4 "$"},
    Format{"ipv6",
           "^((" KT_H16 ":){7}" KT_H16 "|(" KT_H16 ":){1,7}:|(" KT_H16 ":){1,6}:" KT_H16 "|(" KT_H16
           ":){1,5}(:" KT_H16 "){2}|(" KT_H16 ":){1,4}(:" KT_H16 "){3}|(" KT_H16 ":){1,3}(:" KT_H16
           "){4}|(" KT_H16 ":){1,2}(:" KT_H16 "){5}|" KT_H16 ":(:" KT_H16 "){6}|:((:" KT_H16 "){1,7}|:))$"},
    Format{"uri", "^[A-Za-z][A-Za-z0-9+.-]*:([!#$&'()*+,./0-9:;=?@A-Z_a-z~-]|%[0-9A-Fa-f]{2})+$"},
};
#undef KT_YEAR
#undef KT_LEAP
#undef KT_DATE
#undef KT_TIME
#undef KT_HMS
#undef KT_LABEL
#undef KT_BYTE
#undef KT_V4
#undef KT_H16

Pattern pattern_at(std::string_view expression, const std::string& path) {
  try {
    return compiled_pattern(expression);
  } catch (const Error& error) {
    fail("{}.pattern: {}", path, error.what());
  }
}

// What `pattern` and `format` say; nullopt: nothing.
std::optional<Pattern> pattern_of(const Json& schema, const std::string& path) {
  std::optional<Pattern> out;
  if (schema.contains("pattern")) {
    if (!schema.at("pattern").is_string()) fail("{}.pattern: expected a string", path);
    out = pattern_at(schema.at("pattern").get<std::string>(), path);
  }
  if (!schema.contains("format")) return out;
  if (!schema.at("format").is_string()) fail("{}.format: expected a string", path);
  const std::string name = schema.at("format").get<std::string>();
  for (const Format& format : kFormats) {
    if (format.name != name) continue;
    const Pattern made = compiled_pattern(format.pattern);
    out = out ? intersection(*out, made) : made;
  }
  return out;  // other formats are annotations
}

// Ways for the UTF-8 of the characters of a set, escaped where JSON must, or bare.
class SetWriter {
 public:
  enum class Form { kEscaped, kBare };
  explicit SetWriter(RuleBuilder& builder, Form form = Form::kEscaped) : builder_(builder), form_(form) {}

  void add(StateId from, StateId to, const CodeSet& set) {
    for (const CodeRange& range : set.ranges()) {
      if (form_ == Form::kBare) {
        plain(from, to, range.first, range.last);
        continue;
      }
      for (CodePoint code = range.first; code <= std::min<CodePoint>(range.last, 0x1F); ++code)
        escaped(from, to, code);
      plain(from, to, std::max<CodePoint>(range.first, 0x20), range.last);
    }
  }

 private:
  void escaped(StateId from, StateId to, CodePoint code) {
    const std::string quoted = json_text_of(std::string(1, static_cast<char>(code)));
    builder_.empty(builder_.bytes(from, std::string_view(quoted).substr(1, quoted.size() - 2)), to);
  }

  // Cut at what JSON escapes, at lengths of UTF-8 and at the surrogates, which are no characters.
  void plain(StateId from, StateId to, CodePoint first, CodePoint last) {
    constexpr CodePoint kEnds[] = {0x21, 0x22, 0x5B, 0x5C, 0x7F, 0x7FF, 0xD7FF, 0xDFFF, 0xFFFF, 0x10FFFF};
    CodePoint begin = 0;
    for (CodePoint end : kEnds) {
      const CodePoint low = std::max(first, begin), high = std::min(last, end);
      begin = end + 1;
      if (low > high || end == 0xDFFF) continue;
      if (form_ == Form::kEscaped && (end == 0x22 || end == 0x5C))
        escaped(from, to, end);
      else
        encoded(from, to, low, high);
    }
  }

  // A range within one length, cut until the bytes vary on their own.
  void encoded(StateId from, StateId to, CodePoint low, CodePoint high) {
    for (int bits = 6; bits <= 18 && low > 0x7F; bits += 6) {
      const CodePoint mask = (CodePoint{1} << bits) - 1;
      if ((low & ~mask) == (high & ~mask)) continue;
      if (low & mask) {
        encoded(from, to, low, low | mask);
        return encoded(from, to, (low | mask) + 1, high);
      }
      if ((high & mask) != mask) {
        encoded(from, to, low, (high & ~mask) - 1);
        return encoded(from, to, high & ~mask, high);
      }
    }
    std::string first, last;
    append_utf8(first, low);
    append_utf8(last, high);
    for (size_t i = 0; i < first.size(); ++i) {
      const StateId next = i + 1 == first.size() ? to : builder_.state();
      builder_.byte(from, next, static_cast<uint8_t>(first[i]), static_cast<uint8_t>(last[i]));
      from = next;
    }
  }

  RuleBuilder& builder_;
  const Form form_;
};

// The characters of a pattern between two states, which are the quotes' inner sides; without `json`, bare.
void add_pattern(RuleBuilder& builder, JsonRules* json, const Pattern& pattern, StateId from, StateId to) {
  constexpr size_t kFewRanges = 4;  // more are a network of their own, shared
  std::vector<StateId> callees;
  SetWriter writer(builder, json ? SetWriter::Form::kEscaped : SetWriter::Form::kBare);
  for (const CodeSet& set : pattern.sets) {
    const bool all = json && set == all_characters();
    callees.push_back(all ? json->character() : -1);
    if (all || set.ranges().size() <= kFewRanges) continue;
    const StateId start = builder.state(), end = builder.state();
    builder.ends(end);
    writer.add(start, end, set);
    callees.back() = start;
  }
  std::vector<StateId> states;
  for (int i = 0; i < pattern.states; ++i) states.push_back(builder.state());
  const auto at = [&](int state) { return states[static_cast<size_t>(state)]; };
  for (const auto& edge : pattern.edges) {
    if (edge.set == Pattern::kNoSet) {
      builder.empty(at(edge.from), at(edge.to));
      continue;
    }
    const auto set = static_cast<size_t>(edge.set);
    if (callees[set] >= 0)
      builder.call(at(edge.from), at(edge.to), callees[set]);
    else
      writer.add(at(edge.from), at(edge.to), pattern.sets[set]);
  }
  builder.empty(from, at(pattern.start));
  builder.empty(at(pattern.end), to);
}

struct Lengths {
  int64_t least = 0, most = -1;  // -1: any number
  bool counted() const { return least > 0 || most >= 0; }
};
Lengths lengths_of(const Json& schema, const std::string& path) {
  const Lengths out{count_of(schema, "minLength", 0, path), count_of(schema, "maxLength", -1, path)};
  if (out.most >= 0 && out.most < out.least)
    fail("{}: minLength {} is above maxLength {}", path, out.least, out.most);
  if (std::max(out.least, out.most) > kMostCounted)
    fail("{}: expected at most {} in minLength and maxLength, got {}", path, kMostCounted,
         std::max(out.least, out.most));
  return out;
}

// So many characters, each a call of `character`; `loop` reads any number of them at a state.
template <typename Loop>
void add_counted(RuleBuilder& builder, StateId character, Loop loop, Lengths lengths, StateId from,
                 StateId to) {
  const auto [least, most] = lengths;
  const int64_t count = std::max(least, most);
  std::vector<StateId> states{from};
  for (int64_t i = 0; i < count; ++i) states.push_back(builder.after_call(states.back(), character));
  for (int64_t i = least; i <= count; ++i) builder.empty(states[static_cast<size_t>(i)], to);
  if (most < 0) builder.call(states.back(), states.back(), character);
  // A character is a byte at least, so it takes so many bytes to see the end of a stretch.
  for (int64_t i = 1; i < least; ++i)
    builder.alike(states[static_cast<size_t>(i)], states[0], static_cast<int32_t>(least - i - 1));
  // Between least and most it is like a string without bounds, whose masks cost least.
  if (most <= least) return;
  const StateId any = builder.state();
  loop(any);
  builder.empty(any, to);
  for (int64_t i = least; i < most; ++i)
    builder.alike(states[static_cast<size_t>(i)], any, static_cast<int32_t>(most - i - 1));
}

// Texts without the marker, or without the beginning of it that has `places` characters, that do not begin with one of
// the ASCII characters `not_first`. Read as far as they may be the marker (Knuth, Morris, Pratt).
Pattern without_pattern(std::string_view marker, std::string_view not_first, size_t places) {
  std::vector<CodePoint> wanted;
  for (size_t at = 0; at < marker.size();) wanted.push_back(next_code_point(marker, at));
  wanted.resize(std::min(wanted.size(), places));
  std::vector<size_t> fallback(wanted.size() + 1);
  for (size_t i = 1, k = 0; i < wanted.size(); ++i) {
    while (k > 0 && wanted[i] != wanted[k]) k = fallback[k];
    if (wanted[i] == wanted[k]) ++k;
    fallback[i + 1] = k;
  }
  std::vector<CodePoint> letters = wanted;
  std::ranges::sort(letters);
  letters.erase(std::ranges::unique(letters).begin(), letters.end());
  std::vector<CodeRange> of_marker, of_first;
  for (const CodePoint letter : letters) of_marker.push_back({letter, letter});
  for (const char c : not_first) of_first.push_back({static_cast<CodePoint>(c), static_cast<CodePoint>(c)});
  const CodeSet others = all_characters().intersected(CodeSet(of_marker).inverted());
  const CodeSet firsts = all_characters().intersected(CodeSet(of_first).inverted());

  Pattern out;
  out.start = out.state();
  out.end = out.state();
  out.edge(out.start, out.end);
  std::vector<int> states;
  for (size_t i = 0; i < std::max<size_t>(wanted.size(), 1); ++i) {
    states.push_back(out.state());
    out.edge(states.back(), out.end);
  }
  const auto add = [&](int from, size_t seen, const CodeSet& among) {
    const auto step = [&](const CodeSet& set, size_t to) {
      const CodeSet both = set.intersected(among);
      if (!both.ranges().empty()) out.edge(from, states[to], out.set(both));
    };
    step(others, 0);
    for (const CodePoint letter : letters) {
      size_t at = seen;
      while (at > 0 && wanted[at] != letter) at = fallback[at];
      if (wanted[at] == letter) ++at;
      if (at < wanted.size()) step(CodeSet({{letter, letter}}), at);
    }
  };
  add(out.start, 0, firsts);
  for (size_t i = 0; i < states.size(); ++i) add(states[i], i, all_characters());
  return out;
}

}  // namespace

int64_t count_of(const Json& schema, const char* keyword, int64_t missing, const std::string& path) {
  if (!schema.contains(keyword)) return missing;
  const Json& value = schema.at(keyword);
  const double number = value.is_number() ? value.get<double>() : -1;
  if (!(number >= 0) || number != static_cast<double>(static_cast<int64_t>(std::min(number, 1e18))))
    fail("{}.{}: expected a whole number of at least 0", path, keyword);
  if (number > kMostCount) fail("{}.{}: expected at most {}, got {}", path, keyword, kMostCount, number);
  return static_cast<int64_t>(number);
}

StateId string_rule(RuleBuilder& builder, JsonRules& json, const Json& schema, const std::string& path) {
  const Lengths lengths = lengths_of(schema, path);
  const std::optional<Pattern> pattern = pattern_of(schema, path);
  if (!pattern && !lengths.counted()) return json.string();
  const StateId start = builder.state(), close = builder.state();
  const StateId open = builder.bytes(start, "\"");
  if (!pattern)
    add_counted(
        builder, json.character(), [&](StateId any) { json.add_character(any, any); }, lengths, open, close);
  else
    add_pattern(
        builder, &json,
        lengths.counted() ? intersection(*pattern, length_pattern(lengths.least, lengths.most)) : *pattern,
        open, close);
  builder.ends(builder.bytes(close, "\""));
  return start;
}

StateId bare_string_rule(RuleBuilder& builder, const BareText& text, const Json& schema,
                         const std::string& path) {
  const Lengths lengths = lengths_of(schema, path);
  std::optional<Pattern> pattern = pattern_of(schema, path);
  const StateId start = builder.state(), end = builder.state();
  builder.ends(end);
  constexpr int64_t kFewCounted = 1000;
  if (!pattern && std::max(lengths.least, lengths.most) > kFewCounted) {
    // What may begin the end is left out wherever it stands: then characters are all alike.
    std::vector<CodeRange> out;
    for (const char c : text.not_first) out.push_back({static_cast<CodePoint>(c), static_cast<CodePoint>(c)});
    size_t at = 0;
    const CodePoint first = text.without.empty() ? ' ' : next_code_point(text.without, at);
    out.push_back({first, first});
    const CodeSet set = all_characters().intersected(CodeSet(std::move(out)).inverted());
    SetWriter writer(builder, SetWriter::Form::kBare);
    const StateId character = builder.state(), after = builder.state();
    builder.ends(after);
    writer.add(character, after, set);
    add_counted(builder, character, [&](StateId any) { writer.add(any, any, set); }, lengths, start, end);
    return start;
  }
  if (lengths.counted()) {
    const Pattern counted = length_pattern(lengths.least, lengths.most);
    pattern = pattern ? intersection(*pattern, counted) : counted;
  }
  // Where every place of a pattern is told apart, so are the beginnings of what must not come.
  constexpr int kMostEdges = 100'000;
  size_t places = 1;
  const auto states = static_cast<size_t>(pattern ? pattern->states : 1);
  while (states * (places + 1) * (places + 5) <= kMostEdges && places < text.without.size()) ++places;
  const Pattern without = without_pattern(text.without, text.not_first, places);
  add_pattern(builder, nullptr, pattern ? intersection(*pattern, without) : without, start, end);
  return start;
}

bool string_fits(const std::string& text, const Json& schema, const std::string& path) {
  if (!is_valid_utf8(text)) fail("{}: a constant is not UTF-8", path);
  int64_t length = 0;
  for (size_t at = 0; at < text.size(); ++length) next_code_point(text, at);
  if (length < count_of(schema, "minLength", 0, path)) return false;
  if (length > count_of(schema, "maxLength", kMostCount, path)) return false;
  const std::optional<Pattern> pattern = pattern_of(schema, path);
  return !pattern || matches(*pattern, text);
}

}  // namespace kt::inline texts
