// The arrays of GGUF files, as TokenizerParts: byte-level merges ("gpt2"), merges over UTF-8 ("gemma4"), and pieces
// with scores ("llama").
#include <algorithm>

#include "base/error.h"
#include "text/tokenizer/piece_vocabulary.h"
#include "text/tokenizer/tokenizer.h"

namespace kt::inline texts {
namespace {

PieceVocabulary pieces_of(const GgufVocabulary& source) {
  return {.name = source.name,
          .pieces = source.tokens,
          .scores = source.scores,
          .types = source.types,
          .add_prefix = source.add_prefix,
          .collapse_spaces = source.collapse_spaces,
          .cut_user_defined = true,
          .unknown = source.unknown,
          .add_bos = source.add_bos,
          .add_eos = source.add_eos};
}

using GgufIds = std::unordered_map<std::string_view, TokenId>;

GgufIds read_tokens(const GgufVocabulary& source, bool escaped, TokenizerParts& parts) {
  GgufIds ids;
  for (size_t i = 0; i < source.tokens.size(); ++i) {
    const auto id = static_cast<TokenId>(i);
    const std::string& token = source.tokens[i];
    const int32_t type = source.types.empty() ? 1 : source.types[i];
    if (type < 1 || type > 6) fail("{}: token {} has type {}; expected 1 to 6", source.name, i, type);
    const auto [place, is_new] = ids.emplace(token, id);
    if (!is_new) fail("{}: \"{}\" has two ids, {} and {}", source.name, printable(token), place->second, i);
    parts.tokens.emplace_back(token);
    const auto type_is = [&](PieceType other) { return type == static_cast<int32_t>(other); };
    const bool special = type_is(PieceType::kControl) || (escaped && type_is(PieceType::kUnknown));
    // Merges of lines are not in such files: a run of them that is a token is that token.
    const bool lines =
        escaped && type == 1 && token.size() > 1 && token.find_first_not_of('\n') == std::string::npos;
    if (special || lines || type_is(PieceType::kUserDefined))
      parts.added.push_back(
          {.id = id, .content = token, .special = special, .normalized = escaped && !special && !lines});
  }
  return ids;
}

void read_merges(const GgufVocabulary& source, const GgufIds& ids, TokenizerParts& parts) {
  for (const std::string& merge : source.merges) {
    const auto rank = static_cast<uint32_t>(parts.merges.size());
    const size_t space = std::min(merge.find(' ', 1), merge.size());
    const std::string left = merge.substr(0, space), right = merge.substr(std::min(space + 1, merge.size()));
    const auto a = ids.find(left), b = ids.find(right), c = ids.find(left + right);
    if (a == ids.end() || b == ids.end() || c == ids.end())
      fail("{}: merge {}, \"{}\", names a token that is not in the vocabulary", source.name, rank,
           printable(merge));
    parts.merges.push_back({a->second, b->second, c->second, rank});
  }
}

}  // namespace

Tokenizer Tokenizer::from_gguf(const GgufVocabulary& source) {
  if (source.model == "llama") return Tokenizer(parts_of(pieces_of(source)));
  if (source.model != "gpt2" && source.model != "gemma4")
    fail_as(ErrorKind::kUnsupported,
            "{}: tokenizer.ggml.model \"{}\" is not read; only \"gpt2\", \"llama\" and \"gemma4\"",
            source.name, printable(source.model));
  if (!source.types.empty() && source.types.size() != source.tokens.size())
    fail("{}: {} tokens, but {} token types", source.name, source.tokens.size(), source.types.size());
  TokenizerParts parts{.name = source.name};
  bool escaped = false;
  try {
    const NamedSplits splits = splits_of(split_name(source));
    for (std::string_view pattern : splits.patterns) parts.word_steps.push_back(SplitStep{Regex(pattern)});
    parts.bpe.ignore_merges = splits.ignore_merges;
    escaped = splits.escaped;
  } catch (const Error& error) {
    fail_as(error.kind(), "{}: {}", source.name, error.what());
  }
  if (escaped) {
    parts.bpe.byte_fallback = parts.bpe.fuse_unknown = true;
    parts.bpe.unknown = source.unknown;
    parts.normal_steps = piece_normal_steps(false, false);
    parts.decoding = piece_decoding(true, false);
  } else {
    parts.bpe.bytes = parts.decoding.byte_level = true;
  }
  read_merges(source, read_tokens(source, escaped, parts), parts);
  if (source.add_bos) parts.prefix.push_back(*source.add_bos);
  if (source.add_eos) parts.suffix.push_back(*source.add_eos);
  return Tokenizer(std::move(parts));
}

std::string_view split_name(const GgufVocabulary& source) {
  if (source.model == "gemma4") return source.model;
  return source.pre.empty() ? "default" : std::string_view(source.pre);
}

}  // namespace kt::inline texts
