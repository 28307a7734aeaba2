// What a model's config says about its shape, whatever spelling its authors chose. Values the weights code
// needs; the engine reads the rest from the JSON itself.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "text/json.h"

namespace kt::inline weights {

// `quantization_config` (or `compression_config`, at the top or under text_config), with the fields that
// change how bytes are read. Empty method: not quantised.
struct QuantizationConfig {
  std::string method;             // "fp8", "gptq", "awq", "compressed-tensors", "mxfp4", ...
  std::string format;             // compressed-tensors: "pack-quantized", "float-quantized", ...
  std::string checkpoint_format;  // gptq: "gptq", "gptq_v2"
  int bits = 0;
  int group_size = 0;            // -1: one per channel; 0: not said
  int block_n = 0, block_k = 0;  // weight_block_size
  bool symmetric = true;
  bool desc_act = false;
  std::vector<std::string> ignore;  // modules left unquantised
};

struct ModelConfig {
  std::string architecture;  // architectures[0]; "" if absent
  std::string model_type;    // of the text model
  std::string dtype;         // "bfloat16"; "" if absent
  int layers = 0;            // num_hidden_layers; 0 where the config is silent, as everywhere below
  int hidden = 0;            // hidden_size
  int inter = 0;    // one expert's: moe_intermediate_size, or intermediate_size where that family means it
  int experts = 0;  // num_experts, n_routed_experts, num_local_experts, ...
  int top_k = 0;
  int dense_first = 0;  // first_k_dense_replace
  int moe_every = 1;    // moe_layer_freq / decoder_sparse_step
  int moe_phase = 0;    // experts are where (layer + moe_phase) % moe_every == 0
  int mtp_layers = 0;   // num_nextn_predict_layers: stored after `layers`, never converted
  std::vector<int>
      dense_layers;  // mlp_only_layers, mlp_layer_types, the zeros of a list-valued moe_layer_freq
  QuantizationConfig quantization;

  bool is_moe_layer(int layer) const;  // by the config alone
};

// What errors call a key, "rope_scaling.factor": its name where the config was made from; empty: by itself.
using KeyNames = std::function<std::string(std::string_view key)>;

// Reads every spelling, also nested (text_config, language_config, llm_config, thinker_config.text_config). A
// key with a value of the wrong kind, negative, or disagreeing with its other spelling is an Error naming
// file and key.
ModelConfig read_model_config(const Json& config, std::string_view name, const KeyNames& key_names = {});

}  // namespace kt::inline weights
