// Grammars from smaller ones, and plain text.
#include "text/grammar/grammar.h"

#include "base/error.h"
#include "text/grammar/json_rules.h"
#include "text/grammar/rules.h"

namespace kt::inline texts {
namespace {

constexpr size_t kLongestMarker = 1000;

Grammar finished(RuleBuilder&& builder, StateId start) {
  Grammar grammar = std::move(builder).finish(start);
  KT_CHECK(grammar != nullptr, "a grammar that nothing fits");
  return grammar;
}

// Texts read as far as they may be the marker (Knuth, Morris, Pratt): state i has seen its first i bytes.
struct MarkerSearch {
  explicit MarkerSearch(std::string marker) : bytes(std::move(marker)), fallback(bytes.size() + 1) {
    if (bytes.size() > kLongestMarker)
      fail("grammar: a marker of {} bytes; expected at most {}", bytes.size(), kLongestMarker);
    for (size_t i = 1, k = 0; i < bytes.size(); ++i) {
      while (k > 0 && bytes[i] != bytes[k]) k = fallback[k];
      if (bytes[i] == bytes[k]) ++k;
      fallback[i + 1] = k;
    }
  }
  size_t next(size_t seen, char c) const {
    while (seen > 0 && bytes[seen] != c) seen = fallback[seen];
    return bytes[seen] == c ? seen + 1 : seen;
  }
  std::string bytes;
  std::vector<size_t> fallback;
};

// The states of the search but the last, which is `found`.
std::vector<StateId> search_states(RuleBuilder& builder, const MarkerSearch& search, StateId found) {
  std::vector<StateId> states;
  for (size_t i = 0; i < search.bytes.size(); ++i) states.push_back(builder.state());
  states.push_back(found);
  for (size_t i = 0; i < search.bytes.size(); ++i) {
    for (int low = 0, high = 0; low < 256; low = high + 1) {
      const size_t to = search.next(i, static_cast<char>(low));
      high = low;
      while (high < 255 && search.next(i, static_cast<char>(high + 1)) == to) ++high;
      builder.byte(states[i], states[to], static_cast<uint8_t>(low), static_cast<uint8_t>(high));
    }
  }
  return states;
}

}  // namespace

Grammar literal_grammar(const std::string& bytes) {
  RuleBuilder builder;
  const StateId start = builder.state();
  builder.ends(builder.bytes(start, bytes));
  return finished(std::move(builder), start);
}

Grammar token_grammar(TokenId id) {
  RuleBuilder builder;
  const StateId start = builder.state(), end = builder.state();
  builder.token(start, end, id);
  builder.ends(end);
  return finished(std::move(builder), start);
}

Grammar sequence_grammar(const std::vector<Grammar>& parts) {
  RuleBuilder builder;
  const StateId start = builder.state();
  StateId at = start;
  for (const Grammar& part : parts) {
    const RuleFragment copy = builder.inlined(*part);
    builder.empty(at, copy.begin);
    at = copy.end;
  }
  builder.ends(at);
  return finished(std::move(builder), start);
}

Grammar choice_grammar(const std::vector<Grammar>& parts) {
  if (parts.empty()) fail("grammar: a choice of nothing; expected at least one alternative");
  RuleBuilder builder;
  const StateId start = builder.state(), end = builder.state();
  builder.ends(end);
  for (const Grammar& part : parts) {
    const RuleFragment copy = builder.inlined(*part);
    builder.empty(start, copy.begin);
    builder.empty(copy.end, end);
  }
  return finished(std::move(builder), start);
}

Grammar repeat_grammar(const Grammar& part, int least, int most) {
  if (least < 0 || (most >= 0 && most < least))
    fail("grammar: expected repetitions of at least 0 and not below the least, got {} to {}", least, most);
  RuleBuilder builder;
  const StateId start = builder.state(), end = builder.state();
  builder.ends(end);
  const RuleFragment copy = builder.inlined(*part);
  builder.ends(copy.end);
  StateId at = start;
  for (int i = 0; i < least; ++i) at = builder.after_call(at, copy.begin);
  builder.empty(at, end);
  if (most < 0) {
    // The loop has a copy of its own, without calls: most of a text that repeats is read in it.
    const RuleFragment loop = builder.inlined(*part);
    builder.empty(at, loop.begin);
    builder.empty(loop.end, loop.begin);
    builder.empty(loop.end, end);
  }
  for (int i = least; i < most; ++i) {
    at = builder.after_call(at, copy.begin);
    builder.empty(at, end);
  }
  return finished(std::move(builder), start);
}

Grammar until_grammar(std::string marker) {
  if (marker.empty()) return literal_grammar("");
  RuleBuilder builder;
  const StateId end = builder.state();
  builder.ends(end);
  return finished(std::move(builder), search_states(builder, MarkerSearch(std::move(marker)), end)[0]);
}

Grammar text_without_grammar(std::string marker) {
  RuleBuilder builder;
  if (marker.empty()) {
    const StateId any = builder.state();
    builder.byte(any, any, 0, 255);
    builder.ends(any);
    return finished(std::move(builder), any);
  }
  const StateId found = builder.state();  // leads nowhere
  const std::vector<StateId> states = search_states(builder, MarkerSearch(std::move(marker)), found);
  for (StateId state : states)
    if (state != found) builder.ends(state);
  return finished(std::move(builder), states[0]);
}

Grammar json_value_grammar() {
  static const Grammar grammar = [] {
    RuleBuilder builder;
    JsonRules json(builder);
    const StateId start = builder.state();
    builder.ends(builder.after_call(start, json.value()));
    return finished(std::move(builder), start);
  }();
  return grammar;
}

Grammar json_object_grammar() {
  static const Grammar grammar = [] {
    RuleBuilder builder;
    JsonRules json(builder);
    const StateId start = builder.state();
    builder.ends(builder.after_call(start, json.object()));
    return finished(std::move(builder), start);
  }();
  return grammar;
}

}  // namespace kt::inline texts
