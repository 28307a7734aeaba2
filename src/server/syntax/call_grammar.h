// Parts of the grammar of calls that more than one file writes.
#pragma once
#include "server/syntax/call_syntax.h"

namespace kt::inline server {

inline constexpr size_t kMostCallStates = 300'000;  // of all functions together, as of one schema

struct CallWriter {
  const CallSyntax& syntax;
  const Tokenizer& tokenizer;
  const ArgumentTypes& types;  // as the reader has them, so that it reads what is written
};

// Markers that are tokens come as tokens, spelled out in pieces they mean nothing to the model; so do special tokens
// within a marker.
Grammar marker_grammar(std::string_view spelled, const Tokenizer& tokenizer);

// A call in tags: named properties in the schema's order, strings bare, all else JSON. What a schema allows without
// naming it does not come: keys could repeat. Error(kInput) without the place of the tool.
Grammar tag_call_grammar(const CallWriter& writer, const OrderedJson& function);

}  // namespace kt::inline server
