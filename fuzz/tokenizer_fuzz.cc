// Any bytes as a tokenizer.json: an Error, or a tokenizer that keeps its promises for a prompt and for its
// own text.
#include "base/error.h"
#include "token_checks.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const kt::Tokenizer tokenizer = kt::Tokenizer::from_json(bytes, "fuzz");
    kt::check_prompt(tokenizer, "Hello, it's 1234\t\xF0\x9F\x98\x80 <s>\n\xFF");
    kt::check_prompt(tokenizer, bytes.substr(0, 300));
  } catch (const kt::Error&) {
  }
  return 0;
}
