#include "weights/gguf/gguf_model.h"

#include <gtest/gtest.h>

#include <set>

#include "models/families.h"
#include "weights/gguf/gguf_config.h"
#include "weights/testing/files.h"

namespace kt {
namespace {

using testing_files::bytes_of;
using testing_files::GgufBytes;
using testing_files::raw;

// The config of a file with these pairs, in which tensors of these names and shapes are.
struct Tiny {
  GgufBytes file;
  std::vector<Tensor> tensors = {};

  Tiny& tensor(std::string name, std::vector<int64_t> shape, uint32_t type = 0) {
    Tensor& made = tensors.emplace_back();
    made.name = std::move(name);
    made.dtype = Dtype::kGguf;
    made.gguf_type = type;
    made.shape = std::move(shape);
    return *this;
  }
  Json config() const {
    const GgufHeader header = parse_gguf(bytes_of(file.str()), "f");
    const GgufFamily* const family = find_gguf_family(gguf_families(), header);
    Json out = gguf_config(header, family);
    const auto find = [this](std::string_view name) -> const Tensor* {
      for (const Tensor& each : tensors)
        if (each.name == name) return &each;
      return nullptr;
    };
    if (family) GgufFacts(header, find, *family, out).add();
    return out;
  }
};

Tiny deepseek(uint64_t more = 0) {
  Tiny tiny{GgufBytes(0, 6 + more)};
  tiny.file.pair("general.architecture", "deepseek2").number("deepseek2.block_count", 3);
  tiny.file.number("deepseek2.attention.head_count", 128).number("deepseek2.rope.dimension_count", 64);
  tiny.file.number("deepseek2.expert_count", 4).number("deepseek2.expert_gating_func", 2);
  tiny.tensor("blk.0.attn_kv_a_mqa.weight", {576, 7168}).tensor("token_embd.weight", {100, 7168}, 12);
  return tiny;
}

TEST(GgufModel, LatentAttentionInBothForms) {
  Tiny absorbed = deepseek(5);
  absorbed.file.number("deepseek2.attention.head_count_kv", 1).number("deepseek2.attention.key_length", 576);
  absorbed.file.number("deepseek2.attention.value_length", 512);
  absorbed.file.number("deepseek2.attention.key_length_mla", 192);
  absorbed.file.number("deepseek2.attention.value_length_mla", 128);
  Tiny plain = deepseek(3);
  plain.file.number("deepseek2.attention.head_count_kv", 128).number("deepseek2.attention.key_length", 192);
  plain.file.number("deepseek2.attention.value_length", 128);
  for (const Tiny* tiny : {&absorbed, &plain}) {
    const Json config = tiny->config();
    EXPECT_EQ(config["qk_rope_head_dim"], 64);
    EXPECT_EQ(config["qk_nope_head_dim"], 128);
    EXPECT_EQ(config["v_head_dim"], 128);
    EXPECT_EQ(config["num_key_value_heads"], 128);
    EXPECT_TRUE(config["q_lora_rank"].is_null());
    EXPECT_FALSE(config.contains("head_dim"));
  }
}

TEST(GgufModel, WhatAbsentKeysMean) {
  const Json config = deepseek().config();
  EXPECT_EQ(config["model_type"], "deepseek_v3");
  EXPECT_EQ(config["architectures"], Json({"DeepseekV3ForCausalLM"}));
  EXPECT_EQ(config["norm_topk_prob"], false);
  EXPECT_EQ(config["routed_scaling_factor"], 1.0);
  EXPECT_EQ(config["rope_theta"], 10000.0);
  EXPECT_EQ(config["first_k_dense_replace"], 0);
  EXPECT_EQ(config["tie_word_embeddings"], true);
  EXPECT_EQ(config["vocab_size"], 100);
  EXPECT_EQ(config["torch_dtype"], "bfloat16");
  EXPECT_FALSE(config.contains("rope_scaling"));
  EXPECT_FALSE(config.contains("eos_token_id"));
}

TEST(GgufModel, TensorsTell) {
  Tiny tiny = deepseek();
  tiny.tensor("blk.0.ffn_gate.weight", {8, 8}).tensor("blk.1.ffn_gate.weight", {8, 8});
  tiny.tensor("output.weight", {100, 8});
  EXPECT_EQ(tiny.config()["first_k_dense_replace"], 2);
  EXPECT_EQ(tiny.config()["tie_word_embeddings"], false);
  tiny.tensors.erase(tiny.tensors.begin() + 2);
  EXPECT_EQ(tiny.config()["mlp_only_layers"], Json({1}));
}

TEST(GgufModel, Yarn) {
  Tiny tiny = deepseek(4);
  tiny.file.pair("deepseek2.rope.scaling.type", "yarn").pair("deepseek2.rope.scaling.factor", 6, 40.0f);
  tiny.file.number("deepseek2.rope.scaling.original_context_length", 4096);
  tiny.file.pair("deepseek2.rope.scaling.yarn_log_multiplier", 6, 0.125f);
  EXPECT_EQ(tiny.config()["rope_scaling"],
            Json::parse(R"({"rope_type": "yarn", "type": "yarn", "factor": 40.0, "mscale": 1.25,
                            "mscale_all_dim": 1.25, "original_max_position_embeddings": 4096})"));
}

TEST(GgufModel, HeadsAndTheirRotation) {
  const auto config = [](std::string_view architecture, uint32_t head, uint32_t turning) {
    Tiny tiny{GgufBytes(0, 3 + (head > 0) + (turning > 0))};
    const std::string prefix(architecture);
    tiny.file.pair("general.architecture", architecture).number(prefix + ".embedding_length", 96);
    tiny.file.number(prefix + ".attention.head_count", 2);
    if (head > 0) tiny.file.number(prefix + ".attention.key_length", head);
    if (turning > 0) tiny.file.number(prefix + ".rope.dimension_count", turning);
    return tiny.config();
  };
  EXPECT_EQ(config("qwen3", 0, 0)["head_dim"], 48);
  EXPECT_EQ(config("qwen3", 128, 0)["head_dim"], 128);
  EXPECT_EQ(config("qwen3", 128, 0)["partial_rotary_factor"], 1.0);
  EXPECT_EQ(config("glm4moe", 128, 64)["partial_rotary_factor"], 0.5);
  // Readers cut off: 192 of it must not become 63.
  for (uint32_t turning = 2; turning <= 192; turning += 2) {
    const double part = config("minimax-m2", 192, turning)["partial_rotary_factor"];
    EXPECT_EQ(static_cast<uint32_t>(192 * part), turning);
  }
}

TEST(GgufModel, EndsOfATurn) {
  Tiny tiny{GgufBytes(0, 4)};
  tiny.file.pair("general.architecture", "qwen3").number("tokenizer.ggml.eos_token_id", 7);
  tiny.file.number("tokenizer.ggml.eot_token_id", 9).number("tokenizer.ggml.eom_token_id", 7);
  EXPECT_EQ(tiny.config()["eos_token_id"], Json({7, 9}));
}

TEST(GgufModel, MetadataInTheWordsOfConfigJson) {
  GgufBytes file(0, 10);
  file.pair("general.architecture", "deepseek2").number("deepseek2.block_count", 62);
  file.number("deepseek2.embedding_length", 7168).number("deepseek2.expert_count", 256);
  file.number("deepseek2.expert_used_count", 8).number("deepseek2.expert_feed_forward_length", 2048);
  file.number("deepseek2.leading_dense_block_count", 3).number("deepseek2.nextn_predict_layers", 1);
  file.number("deepseek2.expert_gating_func", 2).pair("deepseek2.expert_weights_scale", 6, 2.5f);
  const GgufHeader header = parse_gguf(bytes_of(file.str()), "f");
  EXPECT_EQ(gguf_config(header, find_gguf_family(gguf_families(), header)),
            Json::parse(
                R"({"model_type":"deepseek_v3","num_hidden_layers":61,"hidden_size":7168,
    "n_routed_experts":256,"num_experts_per_tok":8,"moe_intermediate_size":2048,"first_k_dense_replace":3,
    "num_nextn_predict_layers":1,"scoring_func":"sigmoid","routed_scaling_factor":2.5})"));
}

TEST(GgufModel, FamiliesOfOneArchitecture) {
  const auto config = [](std::string_view architecture, std::string_view key, uint32_t value) {
    Tiny tiny{GgufBytes(0, 2)};
    tiny.file.pair("general.architecture", architecture).number(text("{}.{}", architecture, key), value);
    return tiny.config();
  };
  EXPECT_EQ(config("llama", "expert_count", 8)["model_type"], "mixtral");
  EXPECT_EQ(config("llama", "expert_count", 8)["num_local_experts"], 8);
  EXPECT_EQ(config("llama", "expert_count", 0)["model_type"], "llama");
  EXPECT_EQ(config("qwen3moe", "expert_count", 4)["num_experts"], 4);
  EXPECT_EQ(config("deepseek2", "expert_gating_func", 1)["model_type"], "deepseek_v2");
  EXPECT_EQ(config("deepseek2", "expert_gating_func", 2)["model_type"], "deepseek_v3");
}

TEST(GgufModel, OtherArchitecturesAreLeftAlone) {
  for (const char* architecture : {"unheard-of", "deepseek_v3"}) {  // the second is a type, no architecture
    Tiny tiny{GgufBytes(0, 1)};
    tiny.file.pair("general.architecture", architecture);
    EXPECT_EQ(tiny.config(), Json({{"model_type", architecture}}));
  }
}

TEST(GgufModel, AbsurdLayerCountsEnd) {
  Tiny tiny{GgufBytes(0, 3)};
  tiny.file.pair("general.architecture", "qwen3moe").number("qwen3moe.block_count", 0xffffffff);
  tiny.file.number("qwen3moe.expert_count", 4);
  EXPECT_EQ(tiny.config()["num_hidden_layers"], 0xffffffff);
}

}  // namespace
}  // namespace kt
