#include "engine/gguf_vocabulary.h"

#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "base/utf8.h"
#include "weights/gguf/gguf_config.h"

namespace kt {
namespace {

constexpr uint32_t kI32 = 5;  // GGUF value type
constexpr int32_t kControl = 3, kUserDefined = 4;

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

std::optional<TokenId> token_id(const Checkpoint& checkpoint, std::string_view tail, size_t tokens) {
  const auto id = gguf_token_id(checkpoint.gguf(), key(tail), tokens);
  if (!id) return std::nullopt;
  return static_cast<TokenId>(*id);
}

bool flag(const Checkpoint& checkpoint, std::string_view tail, bool fallback) {
  const auto found = checkpoint.gguf().metadata.find(key(tail));
  if (found == checkpoint.gguf().metadata.end()) return fallback;
  const auto* const value = std::get_if<bool>(&found->second);
  if (value == nullptr) fail("{}: {} is not true or false", checkpoint.gguf().name, key(tail));
  return *value;
}

Json byte_level(bool trim) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", trim}, {"use_regex", false}};
}

Json pre_tokenizer(const NamedSplits& splits) {
  Json steps = Json::array();
  for (const std::string_view pattern : splits.patterns)
    steps.push_back(
        {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
  steps.push_back(byte_level(false));
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

// Puts the begin and end of a text around where the file asks for them.
Json post_processor(const GgufVocabulary& vocabulary) {
  if (!vocabulary.add_bos && !vocabulary.add_eos) return byte_level(false);
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

Json added_tokens(const GgufVocabulary& vocabulary) {
  Json out = Json::array();
  for (size_t i = 0; i < vocabulary.types.size(); ++i) {
    const int32_t type = vocabulary.types[i];
    if (type != kControl && type != kUserDefined) continue;
    out.push_back({{"id", i},
                   {"content", vocabulary.tokens[i]},
                   {"single_word", false},
                   {"lstrip", false},
                   {"rstrip", false},
                   {"normalized", false},
                   {"special", type == kControl}});
  }
  return out;
}

}  // namespace

GgufVocabulary GgufVocabularyArrays::view() const {
  return {.name = name,
          .model = model,
          .pre = pre,
          .tokens = tokens,
          .merges = merges,
          .types = types,
          .add_bos = add_bos,
          .add_eos = add_eos};
}

GgufVocabularyArrays read_gguf_vocabulary(const Checkpoint& checkpoint) {
  GgufVocabularyArrays out;
  out.name = checkpoint.gguf().name;
  out.model = gguf_string(checkpoint.gguf(), key("model"));
  if (out.model.empty())
    fail("{}: {} is missing: the file has no tokenizer", checkpoint.gguf().name, key("model"));
  out.pre = gguf_string(checkpoint.gguf(), key("pre"));
  if (out.model != "gpt2") return out;  // whose arrays mean other things; who makes a tokenizer refuses it
  const uint64_t rows = embedding_rows(checkpoint);
  out.tokens = read_strings(checkpoint, "tokens", rows, rows);
  // A token may be made in several ways: Llama 3 has 2.2 merges for each.
  out.merges = read_strings(checkpoint, "merges", rows, 16 * rows);
  out.types = read_types(checkpoint);
  // Readers of such files put the begin in front of Llama 3's texts where nothing is said.
  const bool llama3 = out.pre == "llama-bpe" || out.pre == "llama3" || out.pre == "llama-v3";
  if (flag(checkpoint, "add_bos_token", llama3))
    out.add_bos = token_id(checkpoint, "bos_token_id", out.tokens.size());
  if (flag(checkpoint, "add_eos_token", false))
    out.add_eos = token_id(checkpoint, "eos_token_id", out.tokens.size());
  return out;
}

Json tokenizer_json_of(const GgufVocabulary& vocabulary) {
  Tokenizer::from_gguf(vocabulary);  // refuses what is not read
  const NamedSplits splits = splits_of(vocabulary.pre.empty() ? "default" : vocabulary.pre);
  Json ids = Json::object(), merges = Json::array();
  for (size_t i = 0; i < vocabulary.tokens.size(); ++i) ids[vocabulary.tokens[i]] = i;
  for (const std::string& merge : vocabulary.merges) merges.push_back(merge);
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added_tokens(vocabulary)},
          {"normalizer", nullptr},
          {"pre_tokenizer", pre_tokenizer(splits)},
          {"post_processor", post_processor(vocabulary)},
          {"decoder", byte_level(true)},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", splits.ignore_merges},
            {"vocab", ids},
            {"merges", merges}}}};
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

}  // namespace kt
