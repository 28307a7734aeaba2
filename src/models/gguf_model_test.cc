#include "weights/gguf/gguf_model.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "models/families.h"
#include "weights/gguf/gguf_config.h"
#include "weights/testing/files.h"

namespace kt::inline models {
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
    const auto find = [this](std::string_view name) -> const Tensor* {
      for (const Tensor& each : tensors)
        if (each.name == name) return &each;
      return nullptr;
    };
    const GgufFamily* const family = find_gguf_family(gguf_families(), header, find);
    Json out = gguf_config(header, family);
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

// As transformers' config has them; the attention factor, where a file does not say it, is for the reader.
TEST(GgufModel, LongRope) {
  const auto rope = [](const std::vector<const char*>& tensors, auto more, uint64_t pairs,
                       uint32_t type = 0) {
    static const float kDivisors[] = {1.0f, 2.5f};
    Tiny tiny{GgufBytes(0, 2 + pairs)};
    tiny.file.pair("general.architecture", "llama").number("llama.context_length", 1024);
    more(tiny.file);
    for (const char* name : tensors) {
      tiny.tensor(name, {2}, type);
      tiny.tensors.back().bytes = std::as_bytes(std::span(kDivisors));
    }
    return tiny.config()["rope_scaling"];
  };
  const auto nothing = [](GgufBytes&) {};
  const std::vector<const char*> both = {"rope_factors_short.weight", "rope_factors_long.weight"};
  EXPECT_EQ(rope(both, nothing, 0), Json::parse(R"({"rope_type": "longrope", "type": "longrope",
      "short_factor": [1.0, 2.5], "long_factor": [1.0, 2.5]})"));
  const auto said = [](GgufBytes& file) {
    file.pair("llama.rope.scaling.type", "longrope").pair("llama.rope.scaling.attn_factor", 6, 1.25f);
    file.number("llama.rope.scaling.original_context_length", 256);
  };
  EXPECT_EQ(rope(both, said, 3), Json::parse(R"({"rope_type": "longrope", "type": "longrope",
      "short_factor": [1.0, 2.5], "long_factor": [1.0, 2.5], "original_max_position_embeddings": 256,
      "attention_factor": 1.25})"));
  // Llama 3's are for texts of any length, whatever else is said.
  EXPECT_EQ(rope({"rope_freqs.weight"}, said, 3), Json::parse(R"({"rope_type": "longrope", "type": "longrope",
      "short_factor": [1.0, 2.5], "long_factor": [1.0, 2.5], "original_max_position_embeddings": 1024,
      "factor": 1.0, "attention_factor": 1.0})"));
  EXPECT_FALSE(rope({"rope_factors_short.weight"}, nothing, 0).contains("long_factor"));
  EXPECT_EQ(rope({}, said, 3)["rope_type"], "longrope");
  EXPECT_EQ(error_of([&] { rope(both, nothing, 0, 1); }),
            "f: rope_factors_short.weight is F16, expected F32");
}

TEST(GgufModel, HeadsAndTheirRotation) {
  const auto config = [](std::string_view architecture, uint32_t head, uint32_t rotated) {
    Tiny tiny{GgufBytes(0, 3 + (head > 0) + (rotated > 0))};
    const std::string prefix(architecture);
    tiny.file.pair("general.architecture", architecture).number(prefix + ".embedding_length", 96);
    tiny.file.number(prefix + ".attention.head_count", 2);
    if (head > 0) tiny.file.number(prefix + ".attention.key_length", head);
    if (rotated > 0) tiny.file.number(prefix + ".rope.dimension_count", rotated);
    return tiny.config();
  };
  EXPECT_EQ(config("qwen3", 0, 0)["head_dim"], 48);
  EXPECT_EQ(config("qwen3", 128, 0)["head_dim"], 128);
  EXPECT_EQ(config("qwen3", 128, 0)["partial_rotary_factor"], 1.0);
  EXPECT_EQ(config("glm4moe", 128, 64)["partial_rotary_factor"], 0.5);
  // Readers cut off: 192 of it must not become 63.
  for (uint32_t rotated = 2; rotated <= 192; rotated += 2) {
    const double part = config("minimax-m2", 192, rotated)["partial_rotary_factor"];
    EXPECT_EQ(static_cast<uint32_t>(192 * part), rotated);
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
  const auto no_tensor = [](std::string_view) -> const Tensor* { return nullptr; };
  EXPECT_EQ(gguf_config(header, find_gguf_family(gguf_families(), header, no_tensor)),
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

// What each of these families says in words of its own.
TEST(GgufModel, WordsOfFamilies) {
  constexpr uint32_t kF32 = 6;
  Tiny hy{GgufBytes(0, 5)};
  hy.file.pair("general.architecture", "hy_v3").number("hy_v3.block_count", 3);
  hy.file.number("hy_v3.expert_feed_forward_length", 16).number("hy_v3.expert_gating_func", 2);
  hy.file.pair("hy_v3.expert_weights_scale", kF32, 2.5f);
  hy.tensor("blk.0.ffn_gate.weight", {96, 64}).tensor("blk.1.ffn_gate_shexp.weight", {32, 64});
  EXPECT_EQ(hy.config()["num_shared_experts"], 2);
  EXPECT_EQ(hy.config()["router_scaling_factor"], 2.5);
  EXPECT_EQ(hy.config()["first_k_dense_replace"], 1);

  Tiny ernie{GgufBytes(0, 6)};
  ernie.file.pair("general.architecture", "ernie4_5-moe").number("ernie4_5-moe.block_count", 4);
  ernie.file.number("ernie4_5-moe.expert_count", 64).number("ernie4_5-moe.expert_shared_count", 2);
  ernie.file.number("ernie4_5-moe.interleave_moe_layer_step", 2);
  ernie.file.number("ernie4_5-moe.leading_dense_block_count", 1);
  ernie.tensor("blk.0.ffn_gate.weight", {96, 64}).tensor("blk.2.ffn_gate.weight", {96, 64});
  const Json config = ernie.config();
  EXPECT_EQ(config["moe_num_experts"], 64);
  EXPECT_EQ(config["moe_num_shared_experts"], 2);
  const ModelConfig layers = read_model_config(config, "f");
  for (int i = 0; i < 4; ++i) EXPECT_EQ(layers.is_moe_layer(i), i % 2 == 1) << i;

  // Queries grow as the file says, or as those of the published model.
  for (const bool says : {false, true}) {
    Tiny mistral{GgufBytes(0, says ? 4 : 3)};
    mistral.file.pair("general.architecture", "mistral4").pair("mistral4.rope.scaling.type", "yarn");
    mistral.file.number("mistral4.rope.scaling.original_context_length", 8192);
    if (says) mistral.file.pair("mistral4.attention.temperature_scale", kF32, 0.25f);
    EXPECT_EQ(mistral.config()["rope_scaling"]["llama_4_scaling_beta"], says ? 0.25 : 0.1);
    EXPECT_FALSE(mistral.config().contains("llama_4_scaling_beta"));
  }
}

// Files from newer configs say nothing of the scores: a correction bias, in whichever layer, does.
TEST(GgufModel, ACorrectionBiasMeansSigmoidScores) {
  const auto type = [](std::string_view tensor) {
    Tiny tiny{GgufBytes(0, 2)};
    tiny.file.pair("general.architecture", "deepseek2").number("deepseek2.block_count", 5);
    tiny.tensor(std::string(tensor), {8});
    return tiny.config()["model_type"].get<std::string>();
  };
  EXPECT_EQ(type("blk.3.exp_probs_b.bias"), "deepseek_v3");
  EXPECT_EQ(type("blk.5.exp_probs_b.bias"), "deepseek_v2");  // there is no such layer
  EXPECT_EQ(type("blk.3.ffn_norm.weight"), "deepseek_v2");
}

// A value of the wrong kind is not a missing one.
TEST(GgufModel, WrongMetadataIsRefusedByItsKey) {
  const auto refusal = [](auto add) {
    Tiny tiny{GgufBytes(0, 3)};
    tiny.file.pair("general.architecture", "qwen3moe").number("qwen3moe.embedding_length", 64);
    add(tiny.file);
    tiny.tensor("token_embd.weight", {100, 64});
    return error_of([&] { tiny.config(); });
  };
  constexpr uint32_t kI32 = 5, kF32 = 6, kBool = 7;
  const auto with = [&](std::string_view key, uint32_t type, auto value) {
    return refusal([&](GgufBytes& file) { file.pair(key, type, value); });
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(with("qwen3moe.rope.freq_base", kF32, nan),
            "f: qwen3moe.rope.freq_base is nan, expected a finite number");
  EXPECT_EQ(with("qwen3moe.rope.scaling.factor", kF32, std::numeric_limits<float>::infinity()),
            "f: qwen3moe.rope.scaling.factor is inf, expected a finite number");
  EXPECT_EQ(with("qwen3moe.attention.key_length", kI32, int32_t{-16}),
            "f: qwen3moe.attention.key_length is -16, expected a whole number of at least 0");
  EXPECT_EQ(with("qwen3moe.block_count", kF32, 2.0f),
            "f: qwen3moe.block_count is 2, expected a whole number of at least 0");
  EXPECT_EQ(with("qwen3moe.expert_weights_norm", kF32, 1.0f),
            "f: qwen3moe.expert_weights_norm is 1, expected true or false");
  EXPECT_EQ(with("qwen3moe.expert_count", kBool, uint8_t{1}),
            "f: qwen3moe.expert_count is true, expected a whole number of at least 0");
  EXPECT_EQ(with("tokenizer.ggml.eos_token_id", 4, ~uint32_t{0}),
            "f: tokenizer.ggml.eos_token_id is 4294967295, there are 100 tokens");
  EXPECT_EQ(refusal([](GgufBytes& file) { file.pair("qwen3moe.context_length", "long"); }),
            "f: qwen3moe.context_length is \"long\", expected a whole number of at least 0");
  EXPECT_EQ(refusal([](GgufBytes& file) { file.number("qwen3moe.rope.scaling.type", 1); }),
            "f: qwen3moe.rope.scaling.type is 1, expected a string");
  EXPECT_EQ(refusal([](GgufBytes& file) { file.pair("qwen3moe.rope.scaling.type", "yarn\xff"); }),
            "f: qwen3moe.rope.scaling.type is not UTF-8");
  const auto list = [&](uint32_t type, auto... values) {
    return refusal([&](GgufBytes& file) {
      file.add(GgufBytes::string("qwen3moe.attention.head_count_kv") + raw(uint32_t{9}) + raw(type) +
               raw(uint64_t{sizeof...(values)}) + (raw(values) + ...));
    });
  };
  EXPECT_EQ(list(kI32, int32_t{4}, int32_t{4}), "no error");
  EXPECT_EQ(list(kI32, int32_t{4}, int32_t{2}), "no error");
  EXPECT_EQ(list(kI32, int32_t{4}, int32_t{-4}),
            "f: qwen3moe.attention.head_count_kv[1] is -4, expected whole numbers of at least 0");
  EXPECT_EQ(list(kF32, 1.0f),
            "f: qwen3moe.attention.head_count_kv is a list of 1, expected whole numbers of at least 0");
}

// Faults of the config made from a file are told in the file's words.
TEST(GgufModel, ErrorsNameTheKeysOfTheFile) {
  GgufBytes file(0, 1);
  file.pair("general.architecture", "qwen3moe");
  const GgufHeader header = parse_gguf(bytes_of(file.str()), "f");
  const auto refusal = [&](const Json& more) {
    Json config = {{"model_type", "qwen3_moe"},     {"hidden_size", 64},      {"vocab_size", 10},
                   {"max_position_embeddings", 64}, {"num_hidden_layers", 2}, {"num_attention_heads", 4}};
    config.merge_patch(more);
    return error_of([&] { describe_model(config, "f", gguf_key_names(header)); });
  };
  EXPECT_EQ(refusal({{"num_hidden_layers", nullptr}}), "f: qwen3moe.block_count is missing");
  EXPECT_EQ(refusal({{"hidden_size", uint64_t{1} << 40}}),
            "f: qwen3moe.embedding_length is 1099511627776, expected a whole number from 0 to 2147483647");
  EXPECT_EQ(refusal({{"num_attention_heads", nullptr}}), "f: qwen3moe.attention.head_count is missing");
  EXPECT_EQ(refusal({{"rope_scaling", {{"rope_type", "linear"}}}}),
            "f: qwen3moe.rope.scaling.factor is missing");
  EXPECT_EQ(refusal({{"rope_scaling", {{"rope_type", "longrope"}}}}),
            "f: rope_factors_short.weight has 0 numbers, expected 8");
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
}  // namespace kt::inline models
