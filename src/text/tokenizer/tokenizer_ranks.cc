// Ranks files of tiktoken, as TokenizerParts.
#include <algorithm>
#include <charconv>

#include "base/error.h"
#include "text/tokenizer/tokenizer.h"

namespace kt {
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

}  // namespace

Tokenizer Tokenizer::from_tiktoken(const TiktokenRanks& source) {
  const std::vector<RankedToken> ranked = read_ranks(source);
  TokenizerParts parts{.name = source.name, .added = source.added};
  parts.bpe = {.bytes = true, .ignore_merges = true};
  parts.decoding.byte_level = true;
  const size_t limit = 2 * ranked.size() + 65536;
  std::unordered_map<std::string_view, TokenId> ids;
  for (const auto& [bytes, rank] : ranked) {
    if (static_cast<size_t>(rank) >= limit)
      fail("{}: rank {} of {} tokens", source.name, rank, ranked.size());
    if (static_cast<size_t>(rank) >= parts.tokens.size()) parts.tokens.resize(rank + 1);
    if (parts.tokens[rank] || !ids.emplace(bytes, rank).second)
      fail("{}: rank {} or its token stands there twice", source.name, rank);
    parts.tokens[rank] = spell_bytes(bytes);
  }
  // Two neighbours merge where their bytes together are a token, in the order of its rank: every cut of every
  // token into two tokens is a merge.
  size_t pairs = 0;
  for (const auto& [bytes, rank] : ranked) {
    const std::string_view whole = bytes;
    for (size_t cut = 1; cut < whole.size(); ++cut) {
      const auto left = ids.find(whole.substr(0, cut));
      const auto right = ids.find(whole.substr(cut));
      if (left == ids.end() || right == ids.end()) continue;
      if (++pairs > 64 * ranked.size() + 65536) fail("{}: too many merges", source.name);
      parts.merges.push_back({left->second, right->second, rank, static_cast<uint32_t>(rank)});
    }
    if (whole.size() > 1024) fail("{}: token {} has {} bytes; at most 1024", source.name, rank, whole.size());
  }
  try {
    parts.word_steps.push_back(SplitStep{Regex(source.pattern, RegexDialect::kRust)});
  } catch (const Error& error) {
    fail("{}: {}", source.name, error.what());
  }
  return Tokenizer(std::move(parts));
}

}  // namespace kt
