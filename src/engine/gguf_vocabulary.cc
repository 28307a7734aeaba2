#include "engine/gguf_vocabulary.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "base/utf8.h"
#include "weights/gguf/gguf_config.h"

namespace kt::inline engine {
namespace {

constexpr uint32_t kI32 = 5, kF32 = 6;  // GGUF value types
constexpr int32_t kUnknown = 2;         // token type
// What readers take for the begin and the end of SentencePiece's texts where a file does not say.
constexpr TokenId kPieceBegin = 1, kPieceEnd = 2, kNone = -1;

std::string key(std::string_view tail) { return text("tokenizer.ggml.{}", tail); }

const GgufArray* find_array(const Checkpoint& checkpoint, std::string_view tail) {
  const auto found = checkpoint.gguf().metadata.find(key(tail));
  if (found == checkpoint.gguf().metadata.end()) return nullptr;
  const auto* const array = std::get_if<GgufArray>(&found->second);
  if (array == nullptr) fail("{}: {} is not an array", checkpoint.gguf().name, key(tail));
  return array;
}

// Tables are built of them: no more than the model can have, `tokens` of them.
std::vector<std::string> read_strings(const Checkpoint& checkpoint, std::string_view tail, uint64_t tokens,
                                      uint64_t most) {
  const GgufArray* const array = find_array(checkpoint, tail);
  if (array == nullptr) fail("{}: {} is missing", checkpoint.gguf().name, key(tail));
  if (!array->is_strings()) fail("{}: {} is not an array of strings", checkpoint.gguf().name, key(tail));
  if (array->count > most)
    fail("{}: {} has {} entries, at most {} are read of a model with {} tokens", checkpoint.gguf().name,
         key(tail), array->count, most, tokens);
  const std::vector<std::string_view> views = array->strings();
  return {views.begin(), views.end()};
}

uint64_t embedding_rows(const Checkpoint& checkpoint) {
  constexpr uint64_t kMostTokens = 1 << 20;  // where the file has no embedding to tell
  const Tensor* const embedding = checkpoint.find("token_embd.weight");
  if (embedding == nullptr || embedding->shape.size() != 2) return kMostTokens;
  return static_cast<uint64_t>(embedding->shape[0]);
}

std::vector<int32_t> read_types(const Checkpoint& checkpoint) {
  const GgufArray* const array = find_array(checkpoint, "token_type");
  if (array == nullptr) return {};
  if (array->element_type != kI32)
    fail("{}: {} is not an array of i32", checkpoint.gguf().name, key("token_type"));
  std::vector<int32_t> out(array->count);
  if (!out.empty()) std::memcpy(out.data(), array->bytes.data(), out.size() * sizeof(int32_t));
  return out;
}

std::vector<float> read_scores(const Checkpoint& checkpoint) {
  const GgufArray* const array = find_array(checkpoint, "scores");
  if (array == nullptr)
    fail("{}: {} is missing, by which the pieces of \"llama\" merge", checkpoint.gguf().name, key("scores"));
  if (array->element_type != kF32 && array->element_type != kI32)
    fail("{}: {} is not an array of f32", checkpoint.gguf().name, key("scores"));
  std::vector<float> out(array->count);
  for (size_t i = 0; i < out.size(); ++i) {
    int32_t whole = 0;
    const std::byte* const at = array->bytes.data() + i * sizeof(float);
    if (array->element_type == kI32) {
      std::memcpy(&whole, at, sizeof(whole));
      out[i] = static_cast<float>(whole);
    } else {
      std::memcpy(&out[i], at, sizeof(float));
    }
  }
  return out;
}

std::optional<TokenId> token_id(const Checkpoint& checkpoint, std::string_view tail, size_t tokens) {
  const auto id = gguf_token_id(checkpoint.gguf(), key(tail), tokens);
  if (!id) return std::nullopt;
  return static_cast<TokenId>(*id);
}

// ... or, where the file does not name one, `otherwise`, unless that is none or past the tokens.
std::optional<TokenId> token_or(const Checkpoint& checkpoint, std::string_view tail, size_t tokens,
                                TokenId otherwise) {
  if (const auto id = token_id(checkpoint, tail, tokens)) return id;
  if (otherwise < 0 || static_cast<size_t>(otherwise) >= tokens) return std::nullopt;
  return otherwise;
}

bool flag(const Checkpoint& checkpoint, std::string_view tail, bool fallback) {
  const auto found = checkpoint.gguf().metadata.find(key(tail));
  if (found == checkpoint.gguf().metadata.end()) return fallback;
  const auto* const value = std::get_if<bool>(&found->second);
  if (value == nullptr) fail("{}: {} is not true or false", checkpoint.gguf().name, key(tail));
  return *value;
}

}  // namespace

GgufVocabulary GgufVocabularyArrays::view() const {
  return {.name = name,
          .model = model,
          .pre = pre,
          .tokens = tokens,
          .merges = merges,
          .scores = scores,
          .types = types,
          .add_bos = add_bos,
          .add_eos = add_eos,
          .unknown = unknown,
          .add_prefix = add_prefix,
          .collapse_spaces = collapse_spaces};
}

GgufVocabularyArrays read_gguf_vocabulary(const Checkpoint& checkpoint) {
  GgufVocabularyArrays out;
  out.name = checkpoint.gguf().name;
  out.model = gguf_string(checkpoint.gguf(), key("model"));
  if (out.model.empty())
    fail("{}: {} is missing: the file has no tokenizer", checkpoint.gguf().name, key("model"));
  out.pre = gguf_string(checkpoint.gguf(), key("pre"));
  const bool pieces = out.model == "llama";
  // Of others the arrays mean other things; who makes a tokenizer refuses them.
  if (!pieces && out.model != "gpt2" && out.model != "gemma4") return out;
  const uint64_t rows = embedding_rows(checkpoint);
  out.tokens = read_strings(checkpoint, "tokens", rows, rows);
  // A token may be made in several ways: Llama 3 has 2.2 merges for each.
  if (!pieces) out.merges = read_strings(checkpoint, "merges", rows, 16 * rows);
  if (pieces) out.scores = read_scores(checkpoint);
  out.types = read_types(checkpoint);
  out.add_prefix = flag(checkpoint, "add_space_prefix", true);
  out.collapse_spaces = flag(checkpoint, "remove_extra_whitespaces", false);
  const size_t count = out.tokens.size();
  out.unknown = token_id(checkpoint, "unknown_token_id", count);
  if (!out.unknown && out.types.size() == count)
    if (const auto found = std::ranges::find(out.types, kUnknown); found != out.types.end())
      out.unknown = static_cast<TokenId>(found - out.types.begin());
  // Where nothing is said, readers of such files put a begin before the texts of some tokenizers; and gemma4's files
  // say wrongly that there is none.
  const NamedSplits* const splits = find_splits(split_name(out.view()));
  const bool begins = pieces || (splits && splits->add_bos);
  if (out.model == "gemma4" || flag(checkpoint, "add_bos_token", begins))
    out.add_bos = token_or(checkpoint, "bos_token_id", count, pieces ? kPieceBegin : kNone);
  if (flag(checkpoint, "add_eos_token", false))
    out.add_eos = token_or(checkpoint, "eos_token_id", count, pieces ? kPieceEnd : kNone);
  return out;
}

Json tokenizer_config_of(const Checkpoint& checkpoint, const GgufVocabulary& vocabulary) {
  Json out = {{"tokenizer_class", "PreTrainedTokenizerFast"},
              {"clean_up_tokenization_spaces", false},
              {"add_bos_token", vocabulary.add_bos.has_value()},
              {"add_eos_token", vocabulary.add_eos.has_value()}};
  for (const char* name : {"bos", "eos", "pad", "unk"}) {
    const std::string tail = text("{}_token_id", name == std::string_view("pad")   ? "padding"
                                                 : name == std::string_view("unk") ? "unknown"
                                                                                   : name);
    if (const auto id = token_id(checkpoint, tail, vocabulary.tokens.size()))
      out[text("{}_token", name)] = vocabulary.tokens[static_cast<size_t>(*id)];
  }
  const std::string_view chat = gguf_string(checkpoint.gguf(), "tokenizer.chat_template");
  if (!chat.empty()) out["chat_template"] = chat;
  return out;
}

std::vector<SideFile> gguf_tokenizer_files(const Checkpoint& checkpoint) {
  try {
    const GgufVocabularyArrays arrays = read_gguf_vocabulary(checkpoint);
    const GgufVocabulary vocabulary = arrays.view();
    return {{"tokenizer.json", tokenizer_json_of(vocabulary).dump() + "\n", ""},
            {"tokenizer_config.json", tokenizer_config_of(checkpoint, vocabulary).dump(2) + "\n", ""}};
  } catch (const Error& error) {
    KT_LOG(LogLevel::kWarning, "no tokenizer files are written, copy the original model's: {}", error.what());
    return {};
  }
}

}  // namespace kt::inline engine
