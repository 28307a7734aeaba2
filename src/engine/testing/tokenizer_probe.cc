// For tests/tokenizer_test.py. Documents of text end with the bytes "\xFF<end>\xFF", those of ids with the
// line.
//   tokenizer_probe FILE encode [--as-text] [--add-special]   text to ids
//   tokenizer_probe FILE decode|stream [--keep]               ids to text, at once or by single tokens
//   tokenizer_probe FILE speed                                MB/s of encoding, on stderr
//   tokenizer_probe RANKS tiktoken PATTERN                    text to ids by a ranks file
//   tokenizer_probe FILE json                                 a .gguf file's tokenizer as tokenizer.json
// FILE is a tokenizer.json, a .gguf file, or a folder with a tokenizer.json, a tokenizer.model or a tiktoken.model.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "engine/folder_tokenizer.h"
#include "engine/gguf_vocabulary.h"
#include "text/tokenizer/detokenizer.h"
#include "text/tokenizer/tokenizer.h"

namespace kt::inline engine {
namespace {

constexpr std::string_view kEnd = "\xFF<end>\xFF";

std::string read_stdin() { return {std::istreambuf_iterator<char>(std::cin), {}}; }

std::vector<std::string> read_documents() {
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

std::string streamed(const Tokenizer& tokenizer, std::span<const TokenId> ids, SpecialTokens special) {
  Detokenizer detokenizer(tokenizer, special);
  std::string out;
  for (TokenId id : ids) {
    const std::string piece = detokenizer.push(id);
    if (!is_valid_utf8(piece)) fail("token {} split a character", id);
    out += piece;
  }
  return out + detokenizer.flush();
}

void decode(const Tokenizer& tokenizer, std::string_view mode, SpecialTokens special) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    const std::vector<TokenId> ids{std::istream_iterator<TokenId>(words), {}};
    std::cout << (mode == "stream" ? streamed(tokenizer, ids, special) : tokenizer.decode(ids, special))
              << kEnd;
  }
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

Tokenizer open_tokenizer(const std::string& path) {
  if (path.ends_with(".gguf")) return Tokenizer::from_gguf(read_gguf_vocabulary(Checkpoint(path)).view());
  return std::filesystem::is_directory(path) ? read_folder_tokenizer(path) : Tokenizer::from_file(path);
}

int run(const std::vector<std::string>& args) {
  const auto has = [&](std::string_view flag) { return std::ranges::find(args, flag) != args.end(); };
  if (args.size() > 2 && args[1] == "tiktoken") {
    const std::string ranks = read_small_file(args[0]).value_or("");
    encode(Tokenizer::from_tiktoken({.name = args[0], .characters = ranks, .pattern = args[2]}), {});
    return 0;
  }
  if (args.size() == 2 && args[1] == "json") {
    std::cout << tokenizer_json_of(read_gguf_vocabulary(Checkpoint(args[0])).view()).dump();
    return 0;
  }
  if (args.size() < 2) fail("usage: tokenizer_probe FILE encode|decode|stream|speed|tiktoken");
  const Tokenizer tokenizer = open_tokenizer(args[0]);
  if (args[1] == "encode") {
    encode(tokenizer, {.special = has("--as-text") ? SpecialText::kAsText : SpecialText::kRecognise,
                       .add_special = has("--add-special")});
  } else if (args[1] == "decode" || args[1] == "stream") {
    decode(tokenizer, args[1], has("--keep") ? SpecialTokens::kKeep : SpecialTokens::kSkip);
  } else if (args[1] == "speed") {
    speed(tokenizer);
  } else {
    fail("no mode \"{}\"", args[1]);
  }
  return 0;
}

}  // namespace
}  // namespace kt::inline engine

int main(int argc, char** argv) {
  try {
    return kt::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const kt::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.kind());
  }
}
