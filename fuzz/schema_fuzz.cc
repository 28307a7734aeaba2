// Any bytes as a JSON Schema: an Error, or a grammar whose masks always leave a token, and whose finished
// texts are JSON. The bytes also choose the tokens of the walk.
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "base/error.h"
#include "text/grammar/grammar.h"

namespace {

// Bytes, some longer tokens, and the end.
kt::Tokenizer tokenizer() {
  kt::TokenizerParts parts{.name = "fuzz"};
  parts.bpe.bytes = true;
  parts.decoding.byte_level = true;
  for (int byte = 0; byte < 256; ++byte)
    parts.tokens.push_back(kt::spell_bytes(std::string(1, static_cast<char>(byte))));
  for (const char* word :
       {"{\"", "\":", "\": ", "\",\"", "}}", "]}", "true", "  ", "12", "ab", "\\u", "a\"", "\n  "})
    parts.tokens.push_back(kt::spell_bytes(word));
  kt::AddedToken end;
  end.id = static_cast<kt::TokenId>(parts.tokens.size());
  end.content = "<end>";
  end.special = true;
  parts.added.push_back(end);
  return kt::Tokenizer(std::move(parts));
}

void walk(const kt::Grammar& grammar, const uint8_t* data, size_t size) {
  static const kt::Tokenizer words = tokenizer();
  static const kt::TokenTrie trie(words);
  const auto end = static_cast<kt::TokenId>(words.size() - 1);
  const auto constraint = kt::constrain(trie, grammar, {&end, 1});
  std::vector<float> logits(words.size());
  std::string text;
  for (size_t step = 0; step < 60; ++step) {
    logits.assign(logits.size(), 0);
    constraint->mask(logits);
    const size_t first = data[step % size] * 7u + step * data[(step * 5) % size];
    size_t id = first % logits.size();
    while (logits[id] != 0) id = (id + 1) % logits.size();
    constraint->accept(static_cast<kt::TokenId>(id));
    if (static_cast<kt::TokenId>(id) == end) {
      if (!nlohmann::json::accept(text)) std::abort();
      return;
    }
    text += words.token_bytes(static_cast<kt::TokenId>(id));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto schema = nlohmann::ordered_json::parse(data, data + size, nullptr, false);
  if (schema.is_discarded()) return 0;
  try {
    walk(kt::json_schema_grammar(schema), data, size);
  } catch (const kt::Error& error) {
    if (error.kind() != kt::ErrorKind::kInput) std::abort();
  }
  return 0;
}
