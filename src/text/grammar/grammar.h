// Languages that an answer can be held to: JSON, JSON that fits a schema, and text around it. A Grammar is a
// value over bytes, compiled once and shared; GrammarConstraint walks it along the tokens of one sequence.
#pragma once
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "text/constraint.h"
#include "text/tokenizer/tokenizer.h"

namespace kt::inline texts {

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

// A value of an object whose values do not stand in JSON themselves: `part` is a schema within `root`, where its
// references lead. Error(kInput) as json_schema_grammar's, "json_schema.properties.x: ..." with `path`.
struct SchemaPart {
  const nlohmann::ordered_json& root;
  const nlohmann::ordered_json& part;
  std::string path = "json_schema";
};
// How texts that are neither quoted nor escaped are told from what follows and from other values.
struct BareText {
  std::string without;         // what ends it: it does not contain that
  std::string not_first = {};  // ASCII characters that it does not begin with
  std::function<bool(const std::string&)> fits =
      {};  // whether a constant may come; not_first does not hold for those
};
// The strings that are valid against the schema, bare; nullptr: none. Bounded ones may be kept from more than
// `without`, from a beginning of it, so that counting stays small.
Grammar bare_string_grammar(const SchemaPart& schema, const BareText& text);
// JSON that is valid against it; without strings, if so wished: then nullptr if nothing is left.
enum class JsonStrings { kWith, kWithout };
Grammar json_part_grammar(const SchemaPart& schema, JsonStrings strings);

// The properties of an object, in the schema's order.
struct SchemaProperty {
  std::string name;
  nlohmann::ordered_json schema;
  bool required = false;
  std::string path;
};
// Error(kInput) if anything but its properties says what is valid.
std::vector<SchemaProperty> schema_properties(const nlohmann::ordered_json& schema);

Grammar literal_grammar(const std::string& bytes);
// A token by its id, as no spelled text can be (markers that are special tokens); or the same bytes when the
// id is an ordinary added token.
Grammar token_grammar(TokenId id);
Grammar sequence_grammar(const std::vector<Grammar>& parts);
Grammar choice_grammar(const std::vector<Grammar>& parts);
Grammar repeat_grammar(const Grammar& part, int least, int most);  // most -1: any number
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

}  // namespace kt::inline texts
