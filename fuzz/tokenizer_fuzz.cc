// libFuzzer: bytes as a tokenizer.json, or as a prompt. The first byte chooses. Only kt::Error may come out,
// and what a tokenizer makes of valid UTF-8 without normalisation must decode to the same text.
//   clang++-19 -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -Isrc fuzz/tokenizer_fuzz.cc
//   src/engine/*.cc (no tests) src/weights/json.cc src/weights/shown.cc src/base/{error,text,file}.cc
// KT_FUZZ_TOKENIZER names a tokenizer.json for the prompts; without it they meet bare bytes under the
// patterns of GGUF.
#include <cstdlib>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "engine/detokenizer.h"
#include "engine/tokenizer.h"

namespace kt {
namespace {

const std::vector<Tokenizer>& prompt_tokenizers() {
  static const std::vector<Tokenizer> made = [] {
    std::vector<Tokenizer> all;
    if (const char* path = std::getenv("KT_FUZZ_TOKENIZER")) all.push_back(Tokenizer::from_file(path));
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 256; ++byte)
      tokens.push_back(spell_bytes(std::string(1, static_cast<char>(byte))));
    tokens.push_back("<|end|>");
    tokens.push_back("ab");
    const std::vector<std::string> merges = {"a b"};
    std::vector<int32_t> types(tokens.size(), 1);
    types[256] = 3;
    for (const char* pre :
         {"qwen2", "llama-bpe", "deepseek-v3", "deepseek-llm", "gpt-4o", "kimi-k2", "default"})
      all.push_back(Tokenizer::from_gguf(
          {.name = "fuzz", .model = "gpt2", .pre = pre, .tokens = tokens, .merges = merges, .types = types}));
    return all;
  }();
  return made;
}

void check(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

void try_prompt(const Tokenizer& tokenizer, std::string_view prompt, bool exact) {
  const std::vector<TokenId> ids = tokenizer.encode(prompt, {.add_special = true});
  const std::string text = tokenizer.decode(ids, SpecialTokens::kKeep);
  check(is_valid_utf8(text), "decode gave invalid UTF-8");
  if (exact) check(text == replace_invalid_utf8(prompt), "the prompt did not come back");
  Detokenizer detokenizer(tokenizer);
  for (TokenId id : ids) check(is_valid_utf8(detokenizer.push(id)), "a piece is invalid UTF-8");
  detokenizer.flush();
}

}  // namespace
}  // namespace kt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const bool has_file = std::getenv("KT_FUZZ_TOKENIZER") != nullptr;
  try {
    if (data[0] % 2 == 0) {
      const kt::Tokenizer tokenizer = kt::Tokenizer::from_json(bytes, "fuzz");
      kt::try_prompt(tokenizer, "Hello, it's 1234\t\xF0\x9F\x98\x80 <s>\n\xFF", false);
      kt::try_prompt(tokenizer, bytes.substr(0, 300), false);
    } else {
      const auto& all = kt::prompt_tokenizers();
      const size_t choice = data[0] / 2 % all.size();
      kt::try_prompt(all[choice], bytes, !(has_file && choice == 0));
    }
  } catch (const kt::Error&) {
  }
  return 0;
}
