// A model folder or a GGUF file made ready to run: weights, tokenizer, template and the tokens that end a
// turn, together.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/runner.h"
#include "models/transformer.h"
#include "text/json.h"
#include "text/tokenizer/tokenizer.h"

namespace kt {

struct ModelOptions {
  // Experts to use with the folder's other tensors, converted or of any dialect; empty: its own.
  std::string weights;
  std::string format;         // experts rounded to this format as they are loaded; empty: as stored
  std::string linear_format;  // the same for dense matrices (TransformerOptions::linear_format)
  ModelRounding rounding;     // in place of both, where a format's name does not say enough
  Precision precision = Precision::kDefault;
  KvType kv_type = KvType::kBf16;
  int threads = 0;
  int nodes = 0;          // NUMA nodes to shard over; 0: all
  int max_tokens = 1024;  // of one step
  // Loading is refused when the model with this use needs more memory than is available, or than max_memory.
  MemoryRequest use = {.context = 0};
  uint64_t max_memory = 0;  // 0: what the machine has
  // After each layer that was read, of how many (TransformerOptions::on_layer).
  std::function<void(int, int)> on_layer = {};
  bool sizes_only = false;  // read headers only; nothing can run: for memory()
};

class LoadedModel {
 public:
  // A folder as it was published, or a .gguf file (any part of a split one, or a folder with only those),
  // whose config, tokenizer and template are its own. Errors: anything the checkpoint, the config, the
  // tokenizer or the weights are missing, by name; kMemory, before any weight is read, if it does not fit.
  LoadedModel(const std::string& path, const ModelOptions& options);
  ~LoadedModel();

  const std::string& path() const { return path_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  const Transformer& transformer() const { return *transformer_; }
  // To run it, with a cache of so many pages of kPageTokens. The model must outlive it; steps of two of them
  // must not overlap. Error(kMemory) if the pages do not fit.
  std::unique_ptr<Runner> make_runner(int pages);
  int max_tokens() const { return transformer_->max_tokens(); }         // of one step
  double stored_bytes() const { return transformer_->stored_bytes(); }  // of weights that were read
  const ModelSpec& spec() const { return transformer_->spec(); }
  const std::vector<int32_t>& end_ids() const { return end_ids_; }     // generation stops at any of these
  const std::string& chat_template() const { return chat_template_; }  // "" if the folder has none
  // bos_token, eos_token and their like, which templates spell out; those that the model names.
  const Json& template_tokens() const { return template_tokens_; }
  std::string experts_dialect() const { return dialect_; }  // "bf16", "kt-int4", ...; "" for a dense model
  double load_seconds() const { return load_seconds_; }
  // What the process had of its own when the headers and the tokenizer were read, before any weight.
  uint64_t base_bytes() const { return base_bytes_; }

 private:
  double load_seconds_ = 0;
  uint64_t base_bytes_ = 0;
  std::string path_;
  std::unique_ptr<Checkpoint> checkpoint_;
  Tokenizer tokenizer_;
  std::string dialect_;
  std::unique_ptr<Transformer> transformer_;
  std::vector<int32_t> end_ids_;
  std::string chat_template_;
  Json template_tokens_ = Json::object();
};

}  // namespace kt
