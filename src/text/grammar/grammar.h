// Languages that an answer can be held to: JSON, JSON that fits a schema, and text around it. A Grammar is a
// value over bytes, compiled once and shared; GrammarConstraint walks it along the tokens of one sequence.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "text/constraint.h"
#include "text/tokenizer/tokenizer.h"

namespace kt {

struct GrammarRules;  // private to this folder
using Grammar = std::shared_ptr<const GrammarRules>;

// Any JSON value, or any object. White space as models write it: at most some blanks or a line break with
// indent.
Grammar json_value_grammar();
Grammar json_object_grammar();
// JSON that is valid against the schema (draft 2020-12, what OpenAI calls strict and more). Properties come
// in the schema's order. Error(kInput) "json_schema.properties.x: ..." for what is not supported,
// contradictory, nests or grows too far; nothing that constrains is ignored silently.
Grammar json_schema_grammar(const nlohmann::ordered_json& schema);
Grammar literal_grammar(std::string bytes);
// A token by its id, as no spelled text can be (markers that are special tokens); or the same bytes when the
// id is an ordinary added token.
Grammar token_grammar(TokenId id);
Grammar sequence_grammar(std::vector<Grammar> parts);
Grammar choice_grammar(std::vector<Grammar> parts);
Grammar repeat_grammar(Grammar part, int least, int most);  // most -1: any number
// Any text, up to and with the first time it ends in `marker`.
Grammar until_grammar(std::string marker);
// Any text that does not contain `marker`, perhaps empty; ends anywhere. An empty marker: any text.
Grammar text_without_grammar(std::string marker);

// States of its network: what it takes of memory, some 40 bytes each, for every sequence that is held to it.
size_t grammar_size(const Grammar& grammar);

// The tokens of a tokenizer ordered for masking. Built once per model (some 100 ms for 150,000 tokens); the
// tokenizer must outlive it. Immutable, any thread.
class TokenTrie {
 public:
  explicit TokenTrie(const Tokenizer& tokenizer);
  ~TokenTrie();
  struct State;
  const State& state() const { return *state_; }

 private:
  std::unique_ptr<const State> state_;
};

// Holds one sequence to a grammar: end tokens can come exactly where the grammar may end, and must where it
// cannot go on. The trie must outlive it.
std::unique_ptr<TokenConstraint> constrain(const TokenTrie& trie, Grammar grammar,
                                           std::span<const TokenId> end_tokens);

}  // namespace kt
