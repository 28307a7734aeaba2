#include "engine/gguf_vocabulary.h"

#include <gmock/gmock.h>

#include "base/testing/error_of.h"

namespace kt {
namespace {

using testing::HasSubstr;

TEST(GgufVocabulary, WrittenAsTokenizerJson) {
  const std::vector<std::string> tokens = {"a", "b", "Ġ", "ab", "Ġab", "<|begin|>", "<|end|>", "<note>"};
  const std::vector<std::string> merges = {"a b", "Ġ ab"};
  const std::vector<int32_t> types = {1, 1, 1, 1, 1, 3, 3, 4};
  for (const char* pre : {"qwen2", "llama-bpe", "default", "deepseek-v3", "kimi-k2"}) {
    GgufVocabulary source{
        .name = "x.gguf", .model = "gpt2", .pre = pre, .tokens = tokens, .merges = merges, .types = types};
    for (const bool around : {false, true}) {
      if (around) {
        source.add_bos = 5;
        source.add_eos = 6;
      }
      const Tokenizer from = Tokenizer::from_gguf(source),
                      to = Tokenizer::from_json(tokenizer_json_of(source).dump(), "tokenizer.json");
      const std::string text = "ab ab<|end|> b<note>ab  a";
      EXPECT_EQ(from.encode(text, {.add_special = true}), to.encode(text, {.add_special = true})) << pre;
      EXPECT_EQ(from.decode(from.encode(text)), to.decode(to.encode(text)));
      for (TokenId id = 0; id < 8; ++id) EXPECT_EQ(from.is_special(id), to.is_special(id)) << id;
    }
  }
  EXPECT_THAT(error_of([&] { tokenizer_json_of({.name = "x.gguf", .model = "llama"}); }),
              HasSubstr("\"llama\""));
}

}  // namespace
}  // namespace kt
