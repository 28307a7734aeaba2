// Any bytes as a prompt, and as token ids, for the tokenizer of the demo model and for bare bytes under the
// patterns that GGUF files name. The first byte chooses the tokenizer.
#include "token_checks.h"

namespace kt {
namespace {

Tokenizer bytes_under(const char* pattern) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte)
    tokens.push_back(spell_bytes(std::string(1, static_cast<char>(byte))));
  tokens.push_back("<|end|>");
  tokens.push_back("ab");
  const std::vector<std::string> merges = {"a b"};
  std::vector<int32_t> types(tokens.size(), 1);
  types[256] = 3;
  return Tokenizer::from_gguf(
      {.name = "fuzz", .model = "gpt2", .pre = pattern, .tokens = tokens, .merges = merges, .types = types});
}

const std::vector<Tokenizer>& tokenizers() {
  static const std::vector<Tokenizer> made = [] {
    std::vector<Tokenizer> all;
    all.push_back(Tokenizer::from_file(KT_DEMO_TOKENIZER));
    for (const char* pattern :
         {"qwen2", "llama-bpe", "deepseek-v3", "deepseek-llm", "gpt-4o", "kimi-k2", "default"})
      all.push_back(bytes_under(pattern));
    return all;
  }();
  return made;
}

void try_prompt(size_t choice, std::string_view bytes) {
  const Tokenizer& tokenizer = tokenizers()[choice];
  const std::vector<TokenId> ids = check_prompt(tokenizer, bytes);
  // The tokenizer of the demo normalises (NFC); the others give back what they got.
  if (choice > 0)
    require(tokenizer.decode(ids, SpecialTokens::kKeep) == replace_invalid_utf8(bytes),
            "the prompt did not come back");
}

void try_ids(size_t choice, std::string_view bytes) {
  const Tokenizer& tokenizer = tokenizers()[choice];
  std::vector<TokenId> ids;
  for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
    const size_t number = static_cast<uint8_t>(bytes[i]) | static_cast<uint8_t>(bytes[i + 1]) << 8;
    ids.push_back(static_cast<TokenId>(number % tokenizer.size()));
  }
  check_ids(tokenizer, ids);
}

}  // namespace
}  // namespace kt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t choice = data[0] % kt::tokenizers().size();
  kt::try_prompt(choice, bytes);
  kt::try_ids(choice, bytes);
  return 0;
}
