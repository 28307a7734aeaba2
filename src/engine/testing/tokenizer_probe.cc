// For tests/tokenizer_test.py: text on stdin to ids on stdout, and back.
//   tokenizer_probe FILE encode [--as-text] [--add-special]   ids, a line for each document; a document ends
//                                                             with the bytes "\xFF<end>\xFF"
//   tokenizer_probe FILE decode [--keep]                      stdin: ids; stdout: text
//   tokenizer_probe FILE stream [--keep]                      the same by single tokens
//   tokenizer_probe FILE speed                                encode MB/s on stderr
//   tokenizer_probe RANKS tiktoken PATTERN                    encode by a ranks file
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <iterator>

#include "base/error.h"
#include "base/file.h"
#include "engine/detokenizer.h"
#include "engine/tokenizer.h"

namespace kt {
namespace {

std::string read_stdin() { return {std::istreambuf_iterator<char>(std::cin), {}}; }

std::vector<std::string> read_documents() {
  constexpr std::string_view kEnd = "\xFF<end>\xFF";
  const std::string all = read_stdin();
  std::vector<std::string> documents;
  size_t begin = 0;
  for (size_t end; (end = all.find(kEnd, begin)) != std::string::npos; begin = end + kEnd.size())
    documents.push_back(all.substr(begin, end - begin));
  if (begin < all.size()) documents.push_back(all.substr(begin));
  return documents;
}

void encode(const Tokenizer& tokenizer, EncodeOptions options) {
  std::string out;
  for (const std::string& document : read_documents()) {
    for (TokenId id : tokenizer.encode(document, options)) out += std::to_string(id) + ' ';
    out += '\n';
  }
  std::fwrite(out.data(), 1, out.size(), stdout);
}

std::vector<TokenId> read_ids() {
  std::vector<TokenId> ids;
  for (TokenId id; std::cin >> id;) ids.push_back(id);
  return ids;
}

// By the CPU's time, which other programs on the machine do not stretch.
void speed(const Tokenizer& tokenizer) {
  const std::string text = read_stdin();
  const std::clock_t begin = std::clock();
  const size_t count = tokenizer.encode(text).size();
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  std::fprintf(stderr, "%zu bytes, %zu tokens, %.1f MB/s\n", text.size(), count,
               static_cast<double>(text.size()) / seconds / 1e6);
}

int run(const std::vector<std::string>& args) {
  const auto has = [&](std::string_view flag) { return std::ranges::find(args, flag) != args.end(); };
  if (args.size() > 2 && args[1] == "tiktoken") {
    const std::string ranks = read_small_file(args[0]).value_or("");
    encode(Tokenizer::from_tiktoken({.name = args[0], .characters = ranks, .pattern = args[2]}), {});
    return 0;
  }
  if (args.size() < 2) fail("usage: tokenizer_probe FILE encode|decode|stream|speed|tiktoken");
  const Tokenizer tokenizer = Tokenizer::from_file(args[0]);
  const SpecialTokens special = has("--keep") ? SpecialTokens::kKeep : SpecialTokens::kSkip;
  if (args[1] == "encode") {
    encode(tokenizer, {.special = has("--as-text") ? SpecialText::kAsText : SpecialText::kRecognise,
                       .add_special = has("--add-special")});
  } else if (args[1] == "decode") {
    std::cout << tokenizer.decode(read_ids(), special);
  } else if (args[1] == "stream") {
    Detokenizer detokenizer(tokenizer, special);
    for (TokenId id : read_ids()) {
      const std::string piece = detokenizer.push(id);
      if (!is_valid_utf8(piece)) fail("token {} split a character", id);
      std::cout << piece;
    }
    std::cout << detokenizer.flush();
  } else if (args[1] == "speed") {
    speed(tokenizer);
  } else {
    fail("no mode \"{}\"", args[1]);
  }
  return 0;
}

}  // namespace
}  // namespace kt

int main(int argc, char** argv) {
  try {
    return kt::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const kt::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.kind());
  }
}
