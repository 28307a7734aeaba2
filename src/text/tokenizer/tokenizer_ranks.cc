// Ranks files of tiktoken, as TokenizerParts.
#include <algorithm>
#include <charconv>

#include "base/error.h"
#include "text/tokenizer/tokenizer.h"

namespace kt::inline texts {
namespace {

// nullopt: not base64 with padding.
std::optional<std::string> from_base64(std::string_view characters) {
  if (characters.empty() || characters.size() % 4 != 0) return std::nullopt;
  constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const size_t padding = characters.ends_with("==") ? 2 : characters.ends_with('=') ? 1 : 0;
  characters.remove_suffix(padding);
  std::string out;
  uint32_t bits = 0;
  int held = 0;
  for (char c : characters) {
    const size_t value = kAlphabet.find(c);
    if (value == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(value);
    held += 6;
    if (held < 8) continue;
    held -= 8;
    out.push_back(static_cast<char>(bits >> held & 0xFF));
  }
  return out;
}

struct RankedToken {
  std::string bytes;
  TokenId rank = 0;
};

std::vector<RankedToken> read_ranks(const TiktokenRanks& source) {
  std::vector<RankedToken> ranked;
  size_t line_number = 0;
  for (std::string_view rest = source.characters; !rest.empty();) {
    ++line_number;
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    const size_t space = std::min(line.find(' '), line.size());
    std::optional<std::string> bytes = from_base64(line.substr(0, space));
    const std::string_view number = line.substr(std::min(space + 1, line.size()));
    TokenId rank = -1;
    const auto [stop, problem] = std::from_chars(number.data(), number.data() + number.size(), rank);
    if (!bytes || problem != std::errc() || stop != number.data() + number.size() || rank < 0)
      fail("{}: line {} is \"{}\"; expected base64, a space and a rank", source.name, line_number,
           printable(line));
    ranked.push_back({std::move(*bytes), rank});
  }
  if (ranked.empty()) fail("{}: no ranks", source.name);
  return ranked;
}

void add_reserved(const TiktokenRanks& source, size_t first, TokenizerParts& parts) {
  std::vector<bool> named(source.reserved);
  for (const AddedToken& token : source.added) {
    const size_t place = static_cast<size_t>(token.id) - first;
    if (token.id >= 0 && place < named.size()) named[place] = true;
  }
  for (size_t i = 0; i < named.size(); ++i)
    if (!named[i])
      parts.added.push_back({.id = static_cast<TokenId>(first + i),
                             .content = text("<|reserved_token_{}|>", first + i),
                             .special = true});
}

}  // namespace

Tokenizer Tokenizer::from_tiktoken(const TiktokenRanks& source) {
  const std::vector<RankedToken> ranked = read_ranks(source);
  TokenizerParts parts{.name = source.name, .added = source.added};
  parts.bpe = {.bytes = true, .ignore_merges = true};
  parts.decoding.byte_level = true;
  const size_t limit = 2 * ranked.size() + 65536;
  for (const auto& [bytes, rank] : ranked) {
    if (static_cast<size_t>(rank) >= limit)
      fail("{}: rank {} of {} tokens", source.name, rank, ranked.size());
    if (bytes.size() > TokenTexts::kLongestPart)
      fail("{}: token {} has {} bytes; at most {}", source.name, rank, bytes.size(),
           TokenTexts::kLongestPart);
    if (static_cast<size_t>(rank) >= parts.tokens.size()) parts.tokens.resize(static_cast<size_t>(rank) + 1);
    if (parts.tokens[static_cast<size_t>(rank)]) fail("{}: rank {} stands there twice", source.name, rank);
    parts.tokens[static_cast<size_t>(rank)] = spell_bytes(bytes);
  }
  // Two neighbours merge where their bytes together are a token, in the order of its rank.
  parts.ranks.assign(parts.tokens.size(), kNoRank);
  for (const auto& [bytes, rank] : ranked)
    parts.ranks[static_cast<size_t>(rank)] = static_cast<uint32_t>(rank);
  add_reserved(source, ranked.size(), parts);
  try {
    parts.word_steps.push_back(SplitStep{Regex(source.pattern, RegexDialect::kRust)});
  } catch (const Error& error) {
    fail("{}: {}", source.name, error.what());
  }
  return Tokenizer(std::move(parts));
}

}  // namespace kt::inline texts
