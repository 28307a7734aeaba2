#include "engine/gguf_vocabulary.h"

#include <gmock/gmock.h>

#include "base/testing/error_of.h"
#include "weights/testing/files.h"

namespace kt::inline engine {
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
  EXPECT_THAT(error_of([&] { tokenizer_json_of({.name = "x.gguf", .model = "bert"}); }),
              HasSubstr("\"bert\""));
}

TEST(GgufVocabulary, PiecesWrittenAsTokenizerJson) {
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {2, 3, 3};
  for (int byte = 0; byte < 256; ++byte) {
    constexpr std::string_view kDigits = "0123456789ABCDEF";
    tokens.push_back(std::string("<0x") + kDigits[byte >> 4] + kDigits[byte & 15] + ">");
    types.push_back(6);
  }
  std::vector<float> scores(tokens.size(), 0.0f);
  const auto add = [&](const char* piece, float score, int32_t type = 1) {
    tokens.push_back(piece);
    scores.push_back(score);
    types.push_back(type);
  };
  add("▁a", -1), add("ab", -2), add("▁ab", -3), add("▁▁", -4), add("<note>", 0, 4);
  for (const char* piece : {"▁", "a", "b", "c"}) add(piece, -100);
  for (const bool prefix : {false, true}) {
    for (const bool collapse : {false, true}) {
      const GgufVocabulary source{.name = "x.gguf",
                                  .model = "llama",
                                  .tokens = tokens,
                                  .scores = scores,
                                  .types = types,
                                  .add_bos = 1,
                                  .unknown = 0,
                                  .add_prefix = prefix,
                                  .collapse_spaces = collapse};
      const Tokenizer from = Tokenizer::from_gguf(source),
                      to = Tokenizer::from_json(tokenizer_json_of(source).dump(), "tokenizer.json");
      for (const char* text : {"ab ab<note>ab", "  a  b\n ▁c ", "é</s> ab", "", " ", "<unk>"}) {
        EXPECT_EQ(from.encode(text, {.add_special = true}), to.encode(text, {.add_special = true})) << text;
        EXPECT_EQ(from.decode(from.encode(text)), to.decode(to.encode(text)));
      }
      for (TokenId id = 0; id < static_cast<TokenId>(tokens.size()); ++id) {
        EXPECT_EQ(from.is_special(id), to.is_special(id)) << id;
        EXPECT_EQ(from.token_bytes(id), to.token_bytes(id)) << id;
      }
    }
  }
  GgufVocabulary odd{.name = "x.gguf", .model = "llama", .tokens = tokens, .scores = scores, .types = types};
  add("ac", -5, 5);
  odd.tokens = tokens, odd.scores = scores, odd.types = types;
  EXPECT_THAT(error_of([&] { tokenizer_json_of(odd); }),
              HasSubstr("x.gguf: \"ac\" is unused but may be merged"));
  types.back() = 1;
  add("az", -6);
  odd.tokens = tokens, odd.scores = scores, odd.types = types;
  EXPECT_THAT(error_of([&] { tokenizer_json_of(odd); }),
              HasSubstr("x.gguf: tokens hold \"z\", which is none"));
}

// Tables are built of what the file lists: no more than the model has rows for.
TEST(GgufVocabulary, NoMoreTokensThanRows) {
  using testing_files::GgufBytes;
  using testing_files::raw;
  const testing_files::TempFolder folder;
  const auto refusal = [&](uint64_t tokens, uint64_t merges) {
    GgufBytes file(1, 4);
    file.pair("general.architecture", "llama").pair("tokenizer.ggml.model", "gpt2");
    const auto list = [&](std::string_view name, uint64_t count, std::string_view word) {
      std::string bytes = GgufBytes::string(text("tokenizer.ggml.{}", name)) + raw(uint32_t{9}) +
                          raw(uint32_t{8}) + raw(count);
      for (uint64_t i = 0; i < count; ++i) bytes += GgufBytes::string(word);
      file.add(bytes);
    };
    list("tokens", tokens, "a");
    list("merges", merges, "a a");
    file.tensor("token_embd.weight", {32, 3}, 0, 0).data(3 * 32 * 4);
    folder.put("m.gguf", file.str());
    return error_of([&] { read_gguf_vocabulary(Checkpoint(folder.at("m.gguf"), {})); });
  };
  EXPECT_EQ(refusal(3, 48), "no error");
  EXPECT_THAT(refusal(4, 1), HasSubstr("m.gguf: tokenizer.ggml.tokens has 4 entries, at most 3 are read"));
  EXPECT_THAT(refusal(3, 49), HasSubstr("m.gguf: tokenizer.ggml.merges has 49 entries, at most 48 are read"));
}

}  // namespace
}  // namespace kt::inline engine
