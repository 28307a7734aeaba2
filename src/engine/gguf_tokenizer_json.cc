// The tokenizer of a GGUF file in the words of tokenizer.json.
#include <algorithm>

#include "base/error.h"
#include "engine/gguf_vocabulary.h"
#include "text/tokenizer/piece_vocabulary.h"

namespace kt::inline engine {
namespace {

Json byte_level(bool trim) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", trim}, {"use_regex", false}};
}

Json pre_tokenizer(const NamedSplits& splits) {
  Json steps = Json::array();
  for (const std::string_view pattern : splits.patterns)
    steps.push_back(
        {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
  if (!splits.escaped) steps.push_back(byte_level(false));
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

// Puts the begin and end of a text around where the file asks for them.
Json post_processor(const GgufVocabulary& vocabulary, const Json& otherwise) {
  if (!vocabulary.add_bos && !vocabulary.add_eos) return otherwise;
  Json single = Json::array(), special = Json::object();
  const auto add = [&](std::optional<TokenId> id) {
    if (!id) return;
    const std::string& token = vocabulary.tokens[static_cast<size_t>(*id)];
    single.push_back({{"SpecialToken", {{"id", token}, {"type_id", 0}}}});
    special[token] = {{"id", token}, {"ids", {*id}}, {"tokens", {token}}};
  };
  add(vocabulary.add_bos);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  Json pair = single;
  pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 1}}}});
  add(vocabulary.add_eos);
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", special}};
}

Json added_tokens(const Tokenizer& tokenizer) {
  Json out = Json::array();
  std::vector<AddedToken> sorted(tokenizer.added_tokens().begin(), tokenizer.added_tokens().end());
  std::ranges::sort(sorted, {}, &AddedToken::id);
  for (const AddedToken& token : sorted)
    out.push_back({{"id", token.id},
                   {"content", token.content},
                   {"single_word", token.single_word},
                   {"lstrip", token.lstrip},
                   {"rstrip", token.rstrip},
                   {"normalized", token.normalized},
                   {"special", token.special}});
  return out;
}

Json replace(const Json& pattern, std::string_view content) {
  return {{"type", "Replace"}, {"pattern", pattern}, {"content", content}};
}

// piece_normal_steps, step by step.
Json piece_normalizer(bool add_prefix, bool collapse_spaces) {
  Json steps = Json::array();
  if (collapse_spaces) {
    steps.push_back(replace({{"Regex", kFirstSpaces}}, ""));
    steps.push_back(replace({{"Regex", kManySpaces}}, " "));
  }
  if (add_prefix) steps.push_back({{"type", "Prepend"}, {"prepend", kPieceSpace}});
  steps.push_back(replace({{"String", " "}}, kPieceSpace));
  if (collapse_spaces) steps.push_back(replace({{"Regex", kLastPieceSpaces}}, ""));
  return {{"type", "Sequence"}, {"normalizers", steps}};
}

// piece_decoding.
Json piece_decoder(bool add_prefix) {
  Json steps = Json::array();
  steps.push_back(replace({{"String", kPieceSpace}}, " "));
  for (const char* const type : {"ByteFallback", "Fuse"}) steps.push_back({{"type", type}});
  if (add_prefix) steps.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  return {{"type", "Sequence"}, {"decoders", steps}};
}

// Merges in the order that published files have for scores: the longer left half first.
Json merges_by_score(const GgufVocabulary& vocabulary) {
  PieceMerges made = merges_of({.name = vocabulary.name,
                                .pieces = vocabulary.tokens,
                                .scores = vocabulary.scores,
                                .types = vocabulary.types});
  const auto spelled = [&](TokenId id) -> const std::string& {
    return vocabulary.tokens[static_cast<size_t>(id)];
  };
  if (!made.nameless.empty())
    fail_as(ErrorKind::kUnsupported,
            "{}: tokens hold \"{}\", which is none; a tokenizer.json cannot say that", vocabulary.name,
            printable(made.nameless[0]));
  for (const Merge& merge : made.merges)
    if (!vocabulary.types.empty() &&
        vocabulary.types[static_cast<size_t>(merge.result)] == static_cast<int32_t>(PieceType::kUnused))
      fail_as(ErrorKind::kUnsupported,
              "{}: \"{}\" is unused but may be merged; a tokenizer.json cannot say that", vocabulary.name,
              printable(spelled(merge.result)));
  std::ranges::stable_sort(made.merges, [&](const Merge& a, const Merge& b) {
    return a.rank != b.rank ? a.rank < b.rank : spelled(a.left).size() > spelled(b.left).size();
  });
  Json out = Json::array();
  for (const Merge& merge : made.merges)
    out.push_back(Json::array({spelled(merge.left), spelled(merge.right)}));
  return out;
}

}  // namespace

Json tokenizer_json_of(const GgufVocabulary& vocabulary) {
  const Tokenizer tokenizer = Tokenizer::from_gguf(vocabulary);  // refuses what is not read
  const bool pieces = vocabulary.model == "llama";
  const NamedSplits splits =
      pieces ? NamedSplits{.patterns = {}, .escaped = true} : splits_of(split_name(vocabulary));
  const bool add_prefix = pieces && vocabulary.add_prefix, collapse = pieces && vocabulary.collapse_spaces;
  Json ids = Json::object(), merges = Json::array(), unknown;
  for (size_t i = 0; i < vocabulary.tokens.size(); ++i)
    if (tokenizer.token_of(static_cast<TokenId>(i))) ids[vocabulary.tokens[i]] = i;
  for (const std::string& merge : vocabulary.merges) merges.push_back(merge);
  if (pieces) merges = merges_by_score(vocabulary);
  if (splits.escaped && vocabulary.unknown)
    unknown = vocabulary.tokens[static_cast<size_t>(*vocabulary.unknown)];
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added_tokens(tokenizer)},
          {"normalizer", splits.escaped ? piece_normalizer(add_prefix, collapse) : Json()},
          {"pre_tokenizer", pieces ? Json() : pre_tokenizer(splits)},
          {"post_processor", post_processor(vocabulary, splits.escaped ? Json() : byte_level(false))},
          {"decoder", splits.escaped ? piece_decoder(add_prefix) : byte_level(true)},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", unknown},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", splits.escaped},
            {"byte_fallback", splits.escaped},
            {"ignore_merges", splits.ignore_merges},
            {"vocab", ids},
            {"merges", merges}}}};
}

}  // namespace kt::inline engine
