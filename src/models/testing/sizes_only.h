// For tests: published models as sizes. A checkpoint is a header and a hole of as many bytes as it names, routed
// experts are a format and a shape, and the Transformer over both reads none of it.
#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/families.h"
#include "models/placement.h"
#include "models/transformer.h"
#include "nn/cpu_ops.h"
#include "weights/safetensors.h"
#include "weights/testing/files.h"

namespace kt::testing_files {

// Experts that have sizes and no values.
class ExpertSizes final : public ExpertSource {
 public:
  ExpertSizes(const ModelSpec& spec, Format format, bool biases)
      : spec_(spec), format_(format), biases_(biases) {}
  std::string_view dialect() const override { return "sizes"; }
  std::vector<int> layers() const override {
    std::vector<int> out;
    for (size_t i = 0; i < spec_.layers.size(); ++i)
      if (spec_.layers[i].moe()) out.push_back(static_cast<int>(i));
    return out;
  }
  int experts() const override { return spec_.moe()->experts; }
  int64_t hidden() const override { return spec_.hidden; }
  int64_t inter() const override { return spec_.moe()->inter; }
  std::unique_ptr<StoredMatrix> at(int, int, Projection projection) const override {
    auto out = std::make_unique<NoValues>();
    out->format = format_;
    const bool down = projection == Projection::kDown;
    out->n = down ? hidden() : inter();
    out->k = down ? inter() : hidden();
    return out;
  }
  std::optional<std::vector<float>> bias(int, int, Projection projection) const override {
    if (!biases_) return {};
    return std::vector<float>(static_cast<size_t>(projection == Projection::kDown ? hidden() : inter()));
  }
  bool owns(std::string_view) const override { return false; }
  std::string module_name(int, int, Projection) const override { return "expert"; }

 private:
  struct NoValues final : StoredMatrix {
    Matrix rows(int64_t, int64_t) const override { fail("a matrix without values was read"); }
  };
  const ModelSpec& spec_;
  const Format format_;
  const bool biases_;
};

// Tensors of a checkpoint, as it is published.
struct TensorList {
  std::vector<TensorSpec> tensors;

  void add(const std::string& name, std::vector<int64_t> shape, Dtype dtype = Dtype::kBf16) {
    tensors.push_back({name, dtype, std::move(shape)});
  }
  void bf16(const std::string& module, int64_t n, int64_t k) { add(module + ".weight", {n, k}); }
  // With a scale for each block of 128 x 128.
  void fp8(const std::string& module, int64_t n, int64_t k) {
    add(module + ".weight", {n, k}, Dtype::kE4m3);
    add(module + ".weight_scale_inv", {(n + 127) / 128, (k + 127) / 128}, Dtype::kF32);
  }
};

struct SizesOnlyOptions {
  const char* experts = "int4_g32";
  const char* linears = nullptr;  // as stored
  KvType kv = KvType::kBf16;
  int nodes = 1;
  int step_tokens = 1024;
  bool biases = false;  // of routed experts
};

class SizesOnlyModel {
 public:
  SizesOnlyModel(const TensorList& list, const std::string& config) {
    std::string header = safetensors_header(list.tensors, {});
    size_t bytes = header.size();
    for (const TensorSpec& tensor : list.tensors) bytes += byte_count(tensor);
    const std::string path = folder_.put("model.safetensors", header);
    std::filesystem::resize_file(path, bytes);  // a hole
    folder_.put("config.json", config);
    checkpoint_ = std::make_unique<Checkpoint>(folder_.path());
    spec_ = describe_model(checkpoint_->config_json(), folder_.path());
  }

  Transformer transformer(const SizesOnlyOptions& options) const {
    const ExpertSizes experts(spec_, format_named(options.experts), options.biases);
    const auto pool = std::make_shared<Pool>(
        PoolOptions{.threads = options.nodes,
                    .nodes = options.nodes,
                    .topology = Topology::synthetic(text("numa:{} core:1", options.nodes)),
                    .pin = false});
    TransformerOptions how{.kv_type = options.kv, .max_tokens = options.step_tokens, .experts = &experts};
    if (options.linears) how.linear_format = format_named(options.linears);
    return {*checkpoint_, spec_, make_cpu_ops(pool, {.sizes_only = true}), how};
  }

  PlacementSizes sizes(const MemoryRequest& use, const SizesOnlyOptions& options = {}) const {
    return transformer(options).placement_sizes(use);
  }
  const ModelSpec& spec() const { return spec_; }

 private:
  TempFolder folder_;
  std::unique_ptr<Checkpoint> checkpoint_;
  ModelSpec spec_;
};

// DeepSeek-V3: fp8 but for the embedding, the head, norms and routers.
inline SizesOnlyModel deepseek_v3() {
  TensorList list;
  list.bf16("model.embed_tokens", 129280, 7168);
  list.bf16("lm_head", 129280, 7168);
  list.add("model.norm.weight", {7168});
  for (int i = 0; i < 61; ++i) {
    const std::string at = text("model.layers.{}.", i);
    list.add(at + "input_layernorm.weight", {7168});
    list.add(at + "post_attention_layernorm.weight", {7168});
    list.add(at + "self_attn.q_a_layernorm.weight", {1536});
    list.add(at + "self_attn.kv_a_layernorm.weight", {512});
    list.fp8(at + "self_attn.q_a_proj", 1536, 7168);
    list.fp8(at + "self_attn.q_b_proj", 128 * 192, 1536);
    list.fp8(at + "self_attn.kv_a_proj_with_mqa", 576, 7168);
    list.fp8(at + "self_attn.kv_b_proj", 128 * 256, 512);
    list.fp8(at + "self_attn.o_proj", 7168, 128 * 128);
    const std::string mlp = at + (i < 3 ? "mlp." : "mlp.shared_experts.");
    const int64_t inter = i < 3 ? 18432 : 2048;
    list.fp8(mlp + "gate_proj", inter, 7168);
    list.fp8(mlp + "up_proj", inter, 7168);
    list.fp8(mlp + "down_proj", 7168, inter);
    if (i < 3) continue;
    list.bf16(at + "mlp.gate", 256, 7168);
    list.add(at + "mlp.gate.e_score_correction_bias", {256}, Dtype::kF32);
  }
  return {list,
          R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": true, "scoring_func": "sigmoid",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "torch_dtype": "bfloat16",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]}})"};
}

// Qwen3-30B-A3B, bf16.
inline SizesOnlyModel qwen3_30b() {
  TensorList list;
  list.bf16("model.embed_tokens", 151936, 2048);
  list.bf16("lm_head", 151936, 2048);
  list.add("model.norm.weight", {2048});
  for (int i = 0; i < 48; ++i) {
    const std::string at = text("model.layers.{}.", i);
    list.add(at + "input_layernorm.weight", {2048});
    list.add(at + "post_attention_layernorm.weight", {2048});
    list.add(at + "self_attn.q_norm.weight", {128});
    list.add(at + "self_attn.k_norm.weight", {128});
    list.bf16(at + "self_attn.q_proj", 4096, 2048);
    list.bf16(at + "self_attn.k_proj", 512, 2048);
    list.bf16(at + "self_attn.v_proj", 512, 2048);
    list.bf16(at + "self_attn.o_proj", 2048, 4096);
    list.bf16(at + "mlp.gate", 128, 2048);
  }
  return {list, R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "torch_dtype": "bfloat16"})"};
}

}  // namespace kt::testing_files
