// A model folder or a GGUF file as it describes itself, before any weight: headers, what it is made of,
// tokenizer, chat template and the tokens that end a turn.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/spec.h"
#include "text/json.h"
#include "text/tokenizer/tokenizer.h"
#include "weights/checkpoint.h"
#include "weights/kt/kt_origin.h"

namespace kt::inline engine {

enum class TokenizerNeed : uint8_t {
  kNeeded,      // an Error where there is none
  kIfReadable,  // for plans, which count its memory: one that cannot be read is none, and a log line says why
};

class DescribedModel {
 public:
  // A folder as it was published, or a .gguf file (any part of a split one, or a folder with only those),
  // whose config, tokenizer and template are its own; or what kt quant wrote, by itself. Errors: anything the
  // checkpoint, the config or the tokenizer are missing, by name; kUnsupported for architectures that do not run.
  explicit DescribedModel(const std::string& path, TokenizerNeed need = TokenizerNeed::kNeeded);

  const std::string& path() const { return path_; }
  // Of another path where the one given has converted experts only: the model they were made from.
  const Checkpoint& checkpoint() const { return *checkpoint_; }
  const std::string& experts_path() const { return experts_path_; }  // those experts; "" otherwise
  const ModelSpec& spec() const { return spec_; }
  const Tokenizer& tokenizer() const;                                  // KT_CHECKed: there is one
  const std::vector<int32_t>& end_ids() const { return end_ids_; }     // generation stops at any of these
  const std::string& chat_template() const { return chat_template_; }  // "" if the folder has none
  // bos_token, eos_token and their like, which templates spell out; those that the model names.
  const Json& template_tokens() const { return template_tokens_; }
  // What the process had of its own when the headers and the tokenizer were read.
  uint64_t base_bytes() const { return base_bytes_; }

 protected:
  void forget_indexers() { spec_.forget_indexers(); }

 private:
  DescribedModel(const std::string& path, ModelParts parts, TokenizerNeed need);

  std::string path_, experts_path_;
  std::unique_ptr<Checkpoint> checkpoint_;
  ModelSpec spec_;
  std::optional<Tokenizer> tokenizer_;
  uint64_t base_bytes_ = 0;
  std::vector<int32_t> end_ids_;
  std::string chat_template_;
  Json template_tokens_ = Json::object();
};

}  // namespace kt::inline engine
