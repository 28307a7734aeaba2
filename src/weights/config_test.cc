#include "weights/config.h"

#include <gmock/gmock.h>

#include "weights/testing/files.h"

namespace kt::inline weights {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using namespace testing_files;

ModelConfig read(std::string_view json) { return read_model_config(parse_json(json, "c"), "c"); }
std::string message(std::string_view json) {
  return error_of([&] { read(json); });
}
std::vector<int> moe_layers(const ModelConfig& config) {
  std::vector<int> out;
  for (int i = -1; i <= config.layers; ++i)
    if (config.is_moe_layer(i)) out.push_back(i);
  return out;
}

TEST(Config, EmptyIsSilent) {
  const ModelConfig c = read("{}");
  EXPECT_EQ(c.model_type + c.architecture + c.dtype + c.quantization.method, "");
  EXPECT_EQ(c.layers + c.hidden + c.inter + c.experts + c.top_k + c.dense_first + c.mtp_layers, 0);
  EXPECT_EQ(c.moe_every, 1);
  EXPECT_FALSE(c.is_moe_layer(0));
}

TEST(Config, DeepSeekV3) {
  const ModelConfig c = read(R"({"architectures":["DeepseekV3ForCausalLM"],"model_type":"deepseek_v3",
    "torch_dtype":"bfloat16","num_hidden_layers":5,"hidden_size":7168,"intermediate_size":18432,
    "moe_intermediate_size":2048,"n_routed_experts":256,"num_experts_per_tok":8,"first_k_dense_replace":3,
    "moe_layer_freq":1,"num_nextn_predict_layers":1,"quantization_config":{"activation_scheme":"dynamic",
    "fmt":"e4m3","quant_method":"fp8","weight_block_size":[128,64]}})");
  EXPECT_EQ(c.architecture, "DeepseekV3ForCausalLM");
  EXPECT_EQ(c.model_type, "deepseek_v3");
  EXPECT_EQ(c.dtype, "bfloat16");
  EXPECT_THAT((std::vector{c.layers, c.hidden, c.inter, c.experts, c.top_k, c.mtp_layers}),
              ElementsAre(5, 7168, 2048, 256, 8, 1));
  EXPECT_THAT(moe_layers(c), ElementsAre(3, 4));
  EXPECT_EQ(c.quantization.method, "fp8");
  EXPECT_EQ(c.quantization.block_n, 128);
  EXPECT_EQ(c.quantization.block_k, 64);
}

TEST(Config, EverySpellingOfExperts) {
  for (const char* key :
       {"num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts"})
    EXPECT_EQ(read(text("{{\"{}\":60}}", key)).experts, 60) << key;
  for (const char* key : {"num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk",
                          "moe_top_k", "moe_k", "num_selected_experts"})
    EXPECT_EQ(read(text("{{\"{}\":6}}", key)).top_k, 6) << key;
  EXPECT_EQ(read(R"({"num_layers":4})").layers, 4);
  EXPECT_EQ(read(R"({"moe_topk":[2,2,2],"num_experts":[64,64]})").top_k, 2);
}

TEST(Config, IntermediateSizeIsAnExpertsOnlyWithoutItsOwn) {
  EXPECT_EQ(read(R"({"num_local_experts":8,"intermediate_size":14336})").inter, 14336);
  EXPECT_EQ(read(R"({"num_experts":8,"intermediate_size":14336,"moe_intermediate_size":768})").inter, 768);
  EXPECT_EQ(read(R"({"intermediate_size":14336})").inter, 0);
  EXPECT_EQ(read(R"({"num_experts":null,"intermediate_size":14336})").inter, 0);
  EXPECT_EQ(read(R"({"num_experts":8,"intermediate_size":14336,"expert_hidden_dim":1536})").inter, 1536);
}

TEST(Config, WhichLayersHaveExperts) {
  EXPECT_THAT(moe_layers(read(R"({"num_hidden_layers":6,"num_experts":2,"decoder_sparse_step":2})")),
              ElementsAre(1, 3, 5));
  EXPECT_THAT(moe_layers(read(R"({"num_hidden_layers":6,"n_routed_experts":2,"moe_layer_freq":2,
    "first_k_dense_replace":1})")),
              ElementsAre(2, 4));
  EXPECT_THAT(moe_layers(read(R"({"num_hidden_layers":4,"num_experts":2,"decoder_sparse_step":1,
    "mlp_only_layers":[2,0]})")),
              ElementsAre(1, 3));
  EXPECT_THAT(moe_layers(read(R"({"num_hidden_layers":4,"num_experts":2,"moe_layer_freq":[0,1,0,1]})")),
              ElementsAre(1, 3));
  EXPECT_THAT(moe_layers(read(R"({"num_hidden_layers":6,"moe_num_experts":2,"moe_layer_start_index":1,
    "moe_layer_interval":1,"moe_layer_end_index":3})")),
              ElementsAre(1, 2, 3));
  EXPECT_THAT(moe_layers(read(R"({"num_hidden_layers":6,"moe_num_experts":2,"moe_layer_start_index":3,
    "moe_layer_interval":2,"moe_layer_end_index":-1})")),
              ElementsAre(3, 5));
  EXPECT_THAT(moe_layers(read(R"({"num_hidden_layers":4})")), ElementsAre());
}

TEST(Config, NestedTextModels) {
  for (const char* key : {"text_config", "language_config", "llm_config"}) {
    const ModelConfig c =
        read(text(R"({{"architectures":["Whole"],"model_type":"outer","torch_dtype":"bfloat16",
      "hidden_size":1,"vision_config":{{"hidden_size":5,"num_hidden_layers":9}},"{}":{{"model_type":"inner",
      "hidden_size":2048,"num_experts":128}}}})",
                  key));
    EXPECT_EQ(c.architecture, "Whole");
    EXPECT_EQ(c.model_type, "inner");
    EXPECT_EQ(c.dtype, "bfloat16");
    EXPECT_EQ(c.hidden, 2048);
    EXPECT_EQ(c.experts, 128);
    EXPECT_EQ(c.layers, 0);
  }
  EXPECT_EQ(read(R"({"thinker_config":{"text_config":{"num_experts":7}}})").experts, 7);
  EXPECT_EQ(read(R"({"text_config":null,"num_experts":7})").experts, 7);
  EXPECT_EQ(read(R"({"text_config":{"quantization_config":{"quant_method":"awq"}}})").quantization.method,
            "awq");
}

TEST(Config, Gptq) {
  const QuantizationConfig q = read(R"({"quantization_config":{"quant_method":"gptq","bits":4,"group_size":-1,
    "desc_act":true,"sym":false,"checkpoint_format":"gptq_v2","dynamic":{}}})")
                                   .quantization;
  EXPECT_EQ(q.method, "gptq");
  EXPECT_EQ(q.bits, 4);
  EXPECT_EQ(q.group_size, -1);
  EXPECT_TRUE(q.desc_act);
  EXPECT_FALSE(q.symmetric);
  EXPECT_EQ(q.checkpoint_format, "gptq_v2");
}

TEST(Config, Awq) {
  const QuantizationConfig q =
      read(R"({"quantization_config":{"quant_method":"awq","w_bit":4,"q_group_size":128,
    "zero_point":true,"modules_to_not_convert":["gate"]}})")
          .quantization;
  EXPECT_EQ(q.bits, 4);
  EXPECT_EQ(q.group_size, 128);
  EXPECT_FALSE(q.symmetric);
  EXPECT_THAT(q.ignore, ElementsAre("gate"));
}

TEST(Config, CompressedTensors) {
  const auto read_weights = [](std::string_view weights, std::string_view key = "quantization_config") {
    return read(text(R"({{"{}":{{"quant_method":"compressed-tensors","format":"pack-quantized",
      "ignore":["lm_head","re:.*gate$"],"config_groups":{{"group_0":{{"targets":["Linear"],"weights":{}}}}}}}}})",
                     key, weights))
        .quantization;
  };
  const QuantizationConfig q =
      read_weights(R"({"num_bits":4,"group_size":32,"strategy":"group","symmetric":true,
    "actorder":null,"block_structure":null})");
  EXPECT_EQ(q.method, "compressed-tensors");
  EXPECT_EQ(q.format, "pack-quantized");
  EXPECT_EQ(q.bits, 4);
  EXPECT_EQ(q.group_size, 32);
  EXPECT_TRUE(q.symmetric);
  EXPECT_THAT(q.ignore, ElementsAre("lm_head", "re:.*gate$"));
  EXPECT_EQ(read_weights(R"({"num_bits":8,"strategy":"channel","group_size":null})").group_size, -1);
  EXPECT_EQ(read_weights(R"({"num_bits":8,"strategy":"block","block_structure":[128,64]})").block_k, 64);
  EXPECT_FALSE(read_weights(R"({"symmetric":false})", "compression_config").symmetric);
  EXPECT_EQ(read_weights("null").bits, 0);
  // The group about experts, wherever it is listed.
  EXPECT_EQ(
      read(R"({"quantization_config":{"config_groups":{"a":{"targets":["Linear"],"weights":{"num_bits":8}},
    "b":{"targets":["re:.*experts.*"],"weights":{"num_bits":4},"format":"f"}}}})")
          .quantization.bits,
      4);
}

TEST(Config, OtherQuantization) {
  EXPECT_EQ(read(R"({"quantization_config":{"quant_method":"mxfp4","modules_to_not_convert":["a"]}})")
                .quantization.method,
            "mxfp4");
  EXPECT_EQ(read(R"({"quantization_config":{"quant_method":null}})").quantization.method, "");
  EXPECT_EQ(read(R"({"quantization_config":null})").quantization.method, "");
  EXPECT_EQ(
      read(R"({"quantization_config":{"quant_method":"fp8","weight_block_size":null}})").quantization.block_n,
      0);
}

TEST(Config, ErrorsNameFileAndKey) {
  EXPECT_EQ(message("[]"), "c: expected a JSON object");
  EXPECT_EQ(message(R"({"hidden_size":"big"})"),
            "c: hidden_size is \"big\", expected a whole number from 0 to 2147483647");
  EXPECT_THAT(message(R"({"hidden_size":-1})"), HasSubstr("c: hidden_size is -1, expected a whole number"));
  EXPECT_THAT(message(R"({"hidden_size":1.5})"), HasSubstr("c: hidden_size is 1.5"));
  EXPECT_THAT(message(R"({"hidden_size":4294967296})"), HasSubstr("c: hidden_size is 4294967296"));
  EXPECT_THAT(message(R"({"hidden_size":true})"), HasSubstr("c: hidden_size is true"));
  EXPECT_THAT(message(R"({"hidden_size":{}})"), HasSubstr("c: hidden_size is an object"));
  EXPECT_THAT(message(R"({"num_experts":[1,2]})"),
              HasSubstr("c: num_experts is a list of 2, expected one number"));
  EXPECT_EQ(message(R"({"num_experts":8,"num_local_experts":16})"),
            "c: num_experts is 8, but c: num_local_experts is 16");
  EXPECT_EQ(message(R"({"num_experts":8,"num_local_experts":8})"), "no error");
  EXPECT_THAT(message(R"({"text_config":{"num_experts":"x"}})"),
              HasSubstr("c: text_config.num_experts is \"x\""));
  EXPECT_THAT(message(R"({"text_config":3})"), HasSubstr("c: text_config is 3, expected an object"));
  EXPECT_THAT(message(R"({"architectures":"x"})"),
              HasSubstr("c: architectures is \"x\", expected a list of strings"));
  EXPECT_THAT(message(R"({"model_type":3})"), HasSubstr("c: model_type is 3, expected a string"));
  EXPECT_THAT(message(R"({"mlp_only_layers":[-1]})"), HasSubstr("c: mlp_only_layers"));
  EXPECT_THAT(message(R"({"quantization_config":[]})"), HasSubstr("c: quantization_config is a list of 0"));
  EXPECT_THAT(message(R"({"quantization_config":{"weight_block_size":[128]}})"),
              HasSubstr("c: quantization_config.weight_block_size is a list of 1, expected two block sizes"));
  EXPECT_THAT(message(R"({"quantization_config":{"bits":"four"}})"), HasSubstr("quantization_config.bits"));
  EXPECT_THAT(message(R"({"quantization_config":{"config_groups":{"g":{"weights":{"group_size":-2}}}}})"),
              HasSubstr("config_groups.g.weights.group_size is -2"));
  EXPECT_THAT(message(R"({"num_hidden_layers":2000000000})"), HasSubstr("2000000000 layers, at most 100000"));
  EXPECT_THAT(message(R"({"num_experts":2,"decoder_sparse_step":0})"), HasSubstr("every 0th layer"));
}

}  // namespace
}  // namespace kt::inline weights
