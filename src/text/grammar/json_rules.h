// The pieces of JSON as networks: each function gives the state where a network begins, made once for each
// builder, to be called. How it is written:
// - white space is nothing, one blank, or a line break with at most kMostIndent blanks or tabs, after '{',
//   '[' and ',' and before '}' and ']'; after ':' it is nothing or one blank. None elsewhere.
// - numbers have at most 19 digits before the point, 20 behind it, and exponents up to 279, so that every
//   reader can hold them.
// - strings are UTF-8 or escapes, surrogates only in pairs. Keys escape only what must be, in one way, so
//   that equal keys are equal bytes.
#pragma once
#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "text/grammar/rules.h"

namespace kt::inline texts {

constexpr int kMostIndent = 40;
constexpr int kMostDigits = 19, kMostFraction = 20;

class JsonRules {
 public:
  explicit JsonRules(RuleBuilder& builder) : builder_(builder) {}

  StateId value();      // any
  StateId object();     // any
  StateId array();      // any
  StateId string();     // any, with its quotes
  StateId character();  // one of a string, or its escape
  StateId number();
  StateId integer();
  StateId space();  // after '{', '[', ','; before '}', ']'
  // The characters of a key that is none of these, and the closing quote.
  StateId key_except(const std::vector<std::string>& names);

  // One character, or its escape, between two states.
  void add_character(StateId from, StateId to);
  // ':' and perhaps a blank.
  StateId colon(StateId from);
  // A key that is none of those whose characters `key` refuses, to its ':'; keys of one object do not repeat.
  StateId free_key(StateId from, StateId key);
  // The value as it is, in our white space.
  StateId literal(StateId from, const nlohmann::ordered_json& value);

 private:
  StateId chain_of_digits(StateId from, StateId to, int least, int most);
  void hex(StateId from, StateId to) { hex(from, to, 0, 15); }
  void hex(StateId from, StateId to, int low, int high);
  void add_utf8(StateId from, StateId to);

  RuleBuilder& builder_;
  std::optional<StateId> value_, object_, array_, string_, character_, number_, integer_, space_;
  std::optional<StateId> any_key_, key_end_;
};

// As JSON spells it with nothing escaped but what must be; with quotes.
std::string json_text_of(const std::string& text);

}  // namespace kt::inline texts
