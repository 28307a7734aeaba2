#include "text/tokenizer/tokenizer.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "text/tokenizer/detokenizer.h"

namespace kt::inline texts {
namespace {

constexpr size_t kLongestAdded = 4096;

// By byte, the code point that spells it.
const std::array<CodePoint, 256>& spelling() {
  static const std::array<CodePoint, 256> table = [] {
    std::array<CodePoint, 256> made{};
    CodePoint next = 0x100;
    for (CodePoint byte = 0; byte < 256; ++byte) {
      const bool itself = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      made[byte] = itself ? byte : next++;
    }
    return made;
  }();
  return table;
}

// The way back, for the code points below 0x144; -1: none.
const std::array<int16_t, 0x144>& spelled() {
  static const std::array<int16_t, 0x144> table = [] {
    std::array<int16_t, 0x144> made;
    made.fill(-1);
    for (int16_t byte = 0; byte < 256; ++byte) made[spelling()[byte]] = byte;
    return made;
  }();
  return table;
}

void check_added(const TokenizerParts& parts) {
  for (const AddedToken& token : parts.added) {
    if (token.content.empty()) fail("{}: added token {} has no content", parts.name, token.id);
    if (token.content.size() > kLongestAdded || !is_valid_utf8(token.content))
      fail("{}: added token {} is {}", parts.name, token.id,
           token.content.size() > kLongestAdded ? text("longer than {} bytes", kLongestAdded) : "not UTF-8");
    // Ids are dense but for a few holes; memory follows the highest one.
    const size_t limit = 2 * (parts.tokens.size() + parts.added.size()) + 65536;
    if (token.id < 0 || static_cast<size_t>(token.id) >= limit)
      fail("{}: added token \"{}\" has id {}; expected one in [0, {})", parts.name, printable(token.content),
           token.id, limit);
  }
}

}  // namespace

std::string spell_bytes(std::string_view bytes) {
  std::string out;
  for (char c : bytes) append_utf8(out, spelling()[static_cast<uint8_t>(c)]);
  return out;
}

std::optional<std::string> unspell_bytes(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const CodePoint code = next_code_point(text, at);
    if (code >= spelled().size() || spelled()[code] < 0) return std::nullopt;
    out.push_back(static_cast<char>(spelled()[code]));
  }
  return out;
}

std::optional<uint8_t> spelled_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) return std::nullopt;
  int value = 0;
  for (char c : token.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) return std::nullopt;
    value = value * 16 + digit;
  }
  return static_cast<uint8_t>(value);
}

Tokenizer::Tokenizer(TokenizerParts parts)
    : added_(parts.added),
      normal_steps_(std::move(parts.normal_steps)),
      word_steps_(std::move(parts.word_steps)),
      prefix_(parts.prefix),
      suffix_(parts.suffix),
      decoding_(std::move(parts.decoding)) {
  check_added(parts);
  const auto count = static_cast<TokenId>(parts.tokens.size());
  const auto known = [&](TokenId id) { return id >= 0 && id < count && parts.tokens[id]; };
  for (const Merge& merge : parts.merges)
    KT_CHECK(known(merge.left) && known(merge.right) && known(merge.result), "{}: merge of unknown ids",
             parts.name);
  KT_CHECK(parts.ranks.empty() || (parts.ranks.size() == parts.tokens.size() && parts.merges.empty()));
  if (parts.bpe.unknown && !known(*parts.bpe.unknown))
    fail("{}: no token {}, the unknown one", parts.name, *parts.bpe.unknown);
  index_tokens(parts);
  for (TokenId id : prefix_)
    if (!token_of(id))
      fail("{}: the post-processor adds token {}, which is not in the vocabulary", parts.name, id);
  for (TokenId id : suffix_)
    if (!token_of(id))
      fail("{}: the post-processor adds token {}, which is not in the vocabulary", parts.name, id);
}

void Tokenizer::index_tokens(TokenizerParts& parts) {
  TokenTexts words;  // what a word consists of
  size_t bytes = 0;
  for (const auto& token : parts.tokens) bytes += token ? token->size() : 0;
  words.reserve(parts.tokens.size(), bytes);
  tokens_.resize(parts.tokens.size());
  for (size_t id = 0; id < parts.tokens.size(); ++id) {
    if (!parts.tokens[id]) continue;
    tokens_[id].spelled = std::move(*parts.tokens[id]);
    tokens_[id].exists = true;
    const std::string& spelled = tokens_[id].spelled;
    if (!is_valid_utf8(spelled)) fail("{}: token {} is not UTF-8", parts.name, id);
    if (!parts.bpe.bytes) {
      words.add(static_cast<TokenId>(id), spelled);
    } else if (const std::optional<std::string> word = unspell_bytes(spelled)) {
      words.add(static_cast<TokenId>(id), *word);
    }
  }
  for (const AddedToken& token : added_) {
    const auto id = static_cast<size_t>(token.id);
    if (id >= tokens_.size()) tokens_.resize(id + 1);
    if (tokens_[id].exists && tokens_[id].spelled != token.content)
      fail("{}: id {} is both \"{}\" and the added token \"{}\"", parts.name, id,
           printable(tokens_[id].spelled), printable(token.content));
    tokens_[id].spelled = token.content;
    tokens_[id].exists = true;
    tokens_[id].special |= token.special;
  }
  parts.tokens = {};
  size_t spelled_bytes = 0;
  for (const Token& token : tokens_) spelled_bytes += token.spelled.size();
  TextBudget budget = TextBudget::of_text(spelled_bytes, parts.name);
  ids_.reserve(tokens_.size());
  for (size_t id = 0; id < tokens_.size(); ++id) {
    Token& token = tokens_[id];
    if (!token.exists) continue;
    token.bytes = bytes_of(token.spelled, budget);
    const auto [place, is_new] = ids_.emplace(token.spelled, static_cast<TokenId>(id));
    if (!is_new)
      fail("{}: \"{}\" has two ids, {} and {}", parts.name, printable(token.spelled), place->second, id);
  }
  bpe_ = Bpe({.texts = std::move(words),
              .merges = std::move(parts.merges),
              .ranks = std::move(parts.ranks),
              .options = parts.bpe,
              .unused = std::move(parts.unused)});
  index_added(budget);
}

void Tokenizer::index_added(TextBudget& budget) {
  for (const AddedToken& token : added_) {
    if (!token.normalized) {
      raw_added_.add(token.content, token);
      continue;
    }
    const std::string content =
        token.as_spelled ? token.content : apply_steps(normal_steps_, token.content, budget);
    if (!content.empty()) normal_added_.add(content, token);
    tokens_[token.id].bytes = bytes_of(content, budget);  // as tokenizers has it
  }
}

std::string Tokenizer::bytes_of(const std::string& spelled, TextBudget& budget) const {
  if (decoding_.byte_level) return unspell_bytes(spelled).value_or(spelled);
  if (decoding_.byte_fallback)
    if (const auto byte = spelled_byte(spelled)) return std::string(1, static_cast<char>(*byte));
  std::string now = spelled;
  for (const auto& [from, to] : decoding_.replacements) now = replaced(now, from, to, budget);
  budget.pay(now.size());
  return now;
}

std::vector<TokenId> Tokenizer::encode(std::string_view input, EncodeOptions options) const {
  std::string mended;
  if (!is_valid_utf8(input)) {
    mended = replace_invalid_utf8(input);
    input = mended;
  }
  std::vector<TokenId> out;
  if (options.add_special) out = prefix_;
  Bpe::Scratch scratch;
  TextBudget budget = TextBudget::of_text(input.size(), "the tokenizer");
  const auto skips = [&](const AddedToken& token) {
    return token.special && options.special == SpecialText::kAsText;
  };
  const auto found = [&](const AddedToken& token) { out.push_back(token.id); };
  const auto word = [&](std::string_view part) { bpe_.encode(part, scratch, out); };
  const AddedTokenTrie::Rules rules{.skips = skips, .mark = options.mark};
  const auto unmarked = [&](std::string_view text, std::string& kept) -> std::string_view {
    if (options.mark.empty() || text.find(options.mark) == std::string_view::npos) return text;
    return kept = replaced(text, options.mark, "", budget);
  };
  raw_added_.cut(
      input, rules,
      [&](std::string_view section, size_t offset) {
        // Marks stay in sight as long as there is something to be found.
        std::string kept, changed;
        if (normal_added_.empty()) section = unmarked(section, kept);
        if (!normal_steps_.empty()) section = changed = apply_steps(normal_steps_, section, budget);
        normal_added_.cut(
            section, rules,
            [&](std::string_view part, size_t at) {
              std::string plain;
              split_words(word_steps_, unmarked(part, plain), offset == 0 && at == 0, word);
            },
            found);
      },
      found);
  if (options.add_special) out.insert(out.end(), suffix_.begin(), suffix_.end());
  return out;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, SpecialTokens special) const {
  for (TokenId id : ids)
    if (id < 0 || static_cast<size_t>(id) >= size())
      fail("token {} is outside the vocabulary of {}", id, size());
  Detokenizer detokenizer(*this, special);
  detokenizer.whole_runs_ = decoding_.byte_fallback;
  std::string out;
  for (TokenId id : ids) out += detokenizer.push(id);
  return out += detokenizer.flush();
}

std::string_view Tokenizer::token_bytes(TokenId id) const {
  return id >= 0 && static_cast<size_t>(id) < size() ? std::string_view(tokens_[id].bytes)
                                                     : std::string_view();
}

std::optional<std::string_view> Tokenizer::token_of(TokenId id) const {
  if (id < 0 || static_cast<size_t>(id) >= size() || !tokens_[id].exists) return std::nullopt;
  return tokens_[id].spelled;
}

std::optional<TokenId> Tokenizer::id_of(std::string_view token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

bool Tokenizer::is_special(TokenId id) const {
  return id >= 0 && static_cast<size_t>(id) < size() && tokens_[id].special;
}

std::optional<uint8_t> Tokenizer::byte_of(TokenId id) const {
  const std::optional<std::string_view> spelled = token_of(id);
  return spelled ? spelled_byte(*spelled) : std::nullopt;
}

}  // namespace kt::inline texts
