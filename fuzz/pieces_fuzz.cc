// Any bytes as a vocabulary of SentencePiece or tiktoken: an Error, or a tokenizer that keeps its promises for a prompt
// and for its own text. The first byte chooses: a tokenizer.model follows, or the arrays of a GGUF file, a line for
// each token: its type, a byte that is its score, and its text; "llama" with scores, or "gemma4", where two tokens and
// a space are a merge; or, from 240 on, a tiktoken.model.
#include <algorithm>

#include "base/error.h"
#include "token_checks.h"

namespace kt {
namespace {

struct Arrays {
  std::vector<std::string> tokens, merges;
  std::vector<float> scores;
  std::vector<int32_t> types;
};

Arrays read_arrays(std::string_view bytes) {
  Arrays out;
  while (!bytes.empty()) {
    const size_t end = std::min(bytes.find('\n'), bytes.size());
    const std::string_view line = bytes.substr(0, end);
    bytes.remove_prefix(std::min(end + 1, bytes.size()));
    if (line.find(' ', 1) != std::string_view::npos) {
      out.merges.emplace_back(line);
    } else if (line.size() >= 2) {
      out.types.push_back(line[0] - '0');
      out.scores.push_back(static_cast<float>(static_cast<int8_t>(line[1])));
      out.tokens.emplace_back(line.substr(2));
    }
  }
  return out;
}

Tokenizer make(uint8_t choice, std::string_view bytes) {
  if (choice >= 240)
    return Tokenizer::from_tiktoken({.name = "fuzz",
                                     .characters = bytes,
                                     .pattern = "\\w+|\\W+",
                                     .added = {{.id = 7, .content = "<s>", .special = true}},
                                     .reserved = choice % 8u});
  if (choice % 4 == 0) return Tokenizer::from_sentencepiece(bytes, "fuzz");
  const Arrays arrays = read_arrays(bytes);
  GgufVocabulary source{.name = "fuzz",
                        .model = choice % 4 == 1 ? "gemma4" : "llama",
                        .tokens = arrays.tokens,
                        .merges = arrays.merges,
                        .scores = arrays.scores,
                        .types = arrays.types,
                        .add_prefix = choice % 4 == 2,
                        .collapse_spaces = choice % 8 > 4};
  if (!arrays.tokens.empty()) source.unknown = 0;
  return Tokenizer::from_gguf(source);
}

}  // namespace
}  // namespace kt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    const kt::Tokenizer tokenizer = kt::make(data[0], bytes);
    kt::check_prompt(tokenizer, "Hello, it's  1234\t\xF0\x9F\x98\x80 <s>\n\n\xE2\x96\x81\xFF");
    kt::check_prompt(tokenizer, bytes.substr(0, 300));
    std::vector<kt::TokenId> ids;
    for (size_t i = 0; i < tokenizer.size() && i < 1000; ++i)
      ids.push_back(static_cast<kt::TokenId>(i * 7919 % tokenizer.size()));
    kt::check_ids(tokenizer, ids);
  } catch (const kt::Error&) {
  }
  return 0;
}
