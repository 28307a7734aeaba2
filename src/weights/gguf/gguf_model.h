// What a GGUF file says beyond names and sizes that config.json would say too, so that a file by itself is a
// model: dimensions of heads, rotation, biases, tied embeddings, tokens that end a turn. Told by metadata
// where it has a key, else by the tensors that are there, else by what the public converter leaves unsaid.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/json.h"
#include "weights/gguf/gguf_family.h"

namespace kt::inline weights {

// A config.json in the making, from what gguf_config made. Metadata of the wrong kind is an Error naming the
// file and its key; sizes that cannot be are left for who needs them to refuse.
class GgufFacts {
 public:
  GgufFacts(const GgufHeader& header, TensorFinder find, const GgufFamily& family, Json& config)
      : header_(header), find_(std::move(find)), family_(family), config_(config) {}

  // What all families say, then what this one does.
  void add();

  // For families.
  Json& config() { return config_; }
  const Tensor* find(std::string_view name) const { return find_(name); }
  const Tensor* in_any_layer(std::string_view tail) const;  // "blk.3." + tail in the first layer that has it
  uint64_t known(const char* json_key) const;               // a number of the config; 0: none
  // "<architecture>." + tail; empty: none.
  std::vector<bool> flags(std::string_view tail) const;
  std::vector<uint64_t> counts(std::string_view tail) const;  // one for each layer
  std::optional<uint64_t> number(std::string_view tail) const;
  std::optional<double> real(std::string_view tail) const;
  template <typename T>
  void add_if_absent(const char* json_key, const T& value) {
    if (!config_.contains(json_key)) config_[json_key] = value;
  }
  // Layers with an MLP in place of experts: their number where they come first, as first_k_dense_replace; or
  // always a list, mlp_only_layers; or no word. What is not in front is a list in any case.
  enum class DenseLayers : uint8_t { kUnsaid, kCounted, kListed };
  void add_dense_layers(DenseLayers how);
  // Families in which every layer has experts say their size in the common word.
  void rename_expert_size();

 private:
  std::string key(std::string_view tail) const;
  uint64_t layers() const;

  void add_embeddings();
  void add_attention();
  void add_latent_attention();
  void add_rope();
  Json yarn() const;
  std::vector<float> rope_factors(const Tensor& tensor) const;
  Json longrope(const Tensor* in_short_texts, const Tensor* in_long_texts) const;
  void add_end_tokens();

  const GgufHeader& header_;
  TensorFinder find_;
  const GgufFamily& family_;
  Json& config_;
};

}  // namespace kt::inline weights
