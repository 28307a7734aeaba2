#include "engine/described_model.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/memory.h"
#include "engine/folder_tokenizer.h"
#include "engine/gguf_vocabulary.h"
#include "models/families.h"
#include "weights/gguf/gguf_config.h"

namespace kt::inline engine {
namespace {

Json json_or_empty(const std::string& path) {
  return std::filesystem::exists(path) ? read_json(path) : Json::object();
}

// The text of a special token in tokenizer_config.json: a string, or an object that holds it.
std::optional<std::string> token_named(const Json& tokenizer_config, const char* name) {
  const auto found = tokenizer_config.find(name);
  if (found == tokenizer_config.end()) return std::nullopt;
  const Json content = found->is_object() ? found->value("content", Json()) : *found;
  if (!content.is_string()) return std::nullopt;
  return content.get<std::string>();
}

// eos_token_id of generation_config.json and config.json, a number or a list, and the eos_token of the
// tokenizer.
std::vector<int32_t> read_end_ids(const Checkpoint& checkpoint, const Json& tokenizer_config,
                                  const Tokenizer* tokenizer) {
  std::vector<int32_t> ids;
  const auto add = [&](const Json& value) {
    if (value.is_number_integer()) ids.push_back(value.get<int32_t>());
  };
  const Json generation =
      checkpoint.is_gguf() ? Json::object() : json_or_empty(checkpoint.folder() + "/generation_config.json");
  for (const Json& config : {generation, checkpoint.config_json()}) {
    const auto found = config.find("eos_token_id");
    if (found == config.end()) continue;
    if (found->is_array()) {
      for (const Json& id : *found) add(id);
    } else {
      add(*found);
    }
  }
  if (const auto token = token_named(tokenizer_config, "eos_token"); token && tokenizer)
    if (const auto id = tokenizer->id_of(*token)) ids.push_back(*id);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

std::optional<Tokenizer> read_tokenizer(const Checkpoint& checkpoint, TokenizerNeed need) {
  const bool optional = need == TokenizerNeed::kIfReadable;
  if (optional && !checkpoint.is_gguf() && !tokenizer_file_of(checkpoint.folder())) return std::nullopt;
  try {
    return checkpoint.is_gguf() ? Tokenizer::from_gguf(read_gguf_vocabulary(checkpoint).view())
                                : read_folder_tokenizer(checkpoint.folder());
  } catch (const Error& error) {
    if (!optional) throw;
    KT_LOG(LogLevel::kWarning, "the tokenizer's memory is not counted: {}", error.what());
    return std::nullopt;
  }
}

Json read_template_tokens(const Checkpoint& checkpoint, const Json& tokenizer_config,
                          const Tokenizer* tokenizer) {
  Json out = Json::object();
  constexpr std::pair<const char*, const char*> kNames[] = {{"bos_token", "bos_token_id"},
                                                            {"eos_token", "eos_token_id"},
                                                            {"unk_token", "unknown_token_id"},
                                                            {"pad_token", "padding_token_id"}};
  for (const auto& [name, gguf_name] : kNames) {
    if (const auto token = token_named(tokenizer_config, name)) out[name] = *token;
    if (!checkpoint.is_gguf() || !tokenizer) continue;
    const auto id = gguf_token_id(checkpoint.gguf(), text("tokenizer.ggml.{}", gguf_name), tokenizer->size());
    if (!id) continue;
    if (const auto token = tokenizer->token_of(static_cast<TokenId>(*id))) out[name] = *token;
  }
  return out;
}

std::string read_chat_template(const std::string& folder, const Json& tokenizer_config) {
  const std::string file = folder + "/chat_template.jinja";
  if (std::filesystem::exists(file)) return read_file(file, kSmallFile);
  const auto found = tokenizer_config.find("chat_template");
  if (found == tokenizer_config.end()) return {};
  if (found->is_string()) return found->get<std::string>();
  // A list of named templates: the one called "default".
  if (found->is_array())
    for (const Json& entry : *found)
      if (entry.is_object() && entry.value("name", "") == "default") return entry.value("template", "");
  return {};
}

}  // namespace

DescribedModel::DescribedModel(const std::string& path, TokenizerNeed need)
    : DescribedModel(path, open_model_parts(path, gguf_families()), need) {}

DescribedModel::DescribedModel(const std::string& path, ModelParts parts, TokenizerNeed need)
    : path_(path),
      experts_path_(std::move(parts.experts)),
      checkpoint_(std::move(parts.checkpoint)),
      spec_(describe_model(*checkpoint_)),
      tokenizer_(read_tokenizer(*checkpoint_, need)),
      base_bytes_(own_memory()) {
  // A GGUF file by itself is the model: what lies beside it may belong to another.
  const bool gguf = checkpoint_->is_gguf();
  const Json tokenizer_config =
      gguf ? Json::object() : json_or_empty(checkpoint_->folder() + "/tokenizer_config.json");
  const Tokenizer* const tokenizer = tokenizer_ ? &*tokenizer_ : nullptr;
  end_ids_ = read_end_ids(*checkpoint_, tokenizer_config, tokenizer);
  template_tokens_ = read_template_tokens(*checkpoint_, tokenizer_config, tokenizer);
  chat_template_ = gguf ? std::string(gguf_string(checkpoint_->gguf(), "tokenizer.chat_template"))
                        : read_chat_template(checkpoint_->folder(), tokenizer_config);
}

const Tokenizer& DescribedModel::tokenizer() const {
  KT_CHECK(tokenizer_, "{}: opened without a tokenizer", path_);
  return *tokenizer_;
}

}  // namespace kt::inline engine
