// Placements of published models on a card of 24 GiB, from sizes alone.
#include <gmock/gmock.h>

#include "models/testing/sizes_only.h"

namespace kt::inline models {
namespace {

using namespace testing_files;
using testing::HasSubstr;

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kDriver = uint64_t{400} << 20;  // what a context takes

PlacementWish in_24_gib(const MemoryRequest& use) {
  return {.devices = {{.index = 0, .name = "a card", .free = 80 * kGiB - kDriver, .taken = kDriver}},
          .gpu_memory = 24 * kGiB,
          .use = use};
}

uint64_t bytes_on(const Placement& placement, Place::Kind kind) {
  uint64_t sum = 0;
  for (const PlaceBytes& each : bytes_by_place(placement))
    if (each.place.kind == kind) sum += each.bytes;
  return sum;
}

double dense_gib(const PlacementSizes& sizes) {
  uint64_t sum = 0;
  for (const PlacementSizes::Layer& layer : sizes.layers) sum += layer.dense;
  return static_cast<double>(sum) / kGiB;
}

// Parameters of the layers' dense parts: 61 x 187.1 of attention, 3 x 396.4 of MLPs, 58 x 44.0 of shared experts and
// 58 x 1.8 of routers, in millions: 15.3 billion. A byte each, two for kv_b (1.0 billion) and routers, and one scale of
// four bytes for 128 columns: 15.7 GiB. In int4_g64, 4.25 bits, and kv_b and routers as before: 9.1.
class DeepSeekV3 : public testing::Test {
 protected:
  const SizesOnlyModel model = deepseek_v3();
  const MemoryRequest use{.sequences = 1, .context = 139000};
};

TEST_F(DeepSeekV3, FitsWithACacheOfInt8) {
  const PlacementSizes sizes = model.sizes(use, {.kv = KvType::kS8});
  EXPECT_NEAR(dense_gib(sizes), 15.7, 0.3);
  const Placement got = decide_placement(sizes, in_24_gib(use));
  EXPECT_LE(bytes_on(got, Place::Kind::kGpu), 24 * kGiB);
  EXPECT_GT(got.hot_experts(), 0);
  EXPECT_LT(got.hot_experts(), 2 * 58);
  EXPECT_EQ(got.routed_layers(), 58);
  EXPECT_EQ(got.pages, 2172);
  EXPECT_THAT(describe(got), HasSubstr("KV cache        0-60    GPU 0  `gpu`: 2172 pages of 64 tokens"));
  EXPECT_THAT(describe(got), HasSubstr("routed experts  3-60    host   run by the CPU"));
}

TEST_F(DeepSeekV3, FitsWithLinearsOfFourBits) {
  const PlacementSizes sizes = model.sizes(use, {.linears = "int4_g64"});
  EXPECT_NEAR(dense_gib(sizes), 9.1, 0.3);
  const Placement got = decide_placement(sizes, in_24_gib(use));
  const uint64_t taken = bytes_on(got, Place::Kind::kGpu), expert = got.layers[3].expert_bytes;
  EXPECT_LE(taken, 24 * kGiB);
  EXPECT_GT(taken, 24 * kGiB - expert);  // not one more fits
  EXPECT_NEAR(static_cast<double>(expert), 3 * 7168 * 2048 * 4.5 / 8, 0.01 * static_cast<double>(expert));
  EXPECT_GE(got.hot_experts(), 3 * 58);
}

TEST_F(DeepSeekV3, AsStoredItIsRefused) {
  const PlacementSizes sizes = model.sizes(use);
  try {
    decide_placement(sizes, in_24_gib(use));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kMemory);
    const std::string line = error.what();
    EXPECT_THAT(line, HasSubstr("GPU 0 (a card): 27."));
    EXPECT_THAT(line, HasSubstr("cache of 139000 tokens 9.1 GiB"));
    EXPECT_THAT(line, HasSubstr("driver 400.0 MiB), 24.0 GiB allowed (`gpu_memory`): 3."));
    EXPECT_THAT(line,
                HasSubstr("; try `kv` int8 (4.5 GiB less), `linear_format` int4_g64, a context of at most "));
    // What is advised holds.
    const size_t at = line.find("at most ") + 8;
    const MemoryRequest shorter{.sequences = 1, .context = std::stoi(line.substr(at))};
    EXPECT_GT(shorter.context, 60000);
    EXPECT_NO_THROW(decide_placement(model.sizes(shorter), in_24_gib(shorter)));
    const MemoryRequest longer{.sequences = 1, .context = shorter.context + 64};
    EXPECT_THROW(decide_placement(model.sizes(longer), in_24_gib(longer)), Error);
  }
}

class Qwen3Of30B : public testing::Test {
 protected:
  const SizesOnlyModel model = qwen3_30b();
  const MemoryRequest use{.sequences = 1, .context = 32768};
};

// 15.2 GiB of experts, 1.7 dense, 0.6 of head and 3.0 of cache: all of it.
TEST_F(Qwen3Of30B, IsWhollyOnTheCardInFourBits) {
  const Placement got = decide_placement(model.sizes(use, {.experts = "q4_0"}), in_24_gib(use));
  EXPECT_EQ(got.hot_experts(), 48 * 128);
  EXPECT_NEAR(static_cast<double>(bytes_on(got, Place::Kind::kGpu)) / kGiB, 20.9, 0.3);
  EXPECT_THAT(describe(got), HasSubstr("`gpu_experts` auto, uniform: 128 of 128 a layer"));
}

// Of 9 MiB each on two nodes of the host, whose pieces are copied together.
TEST_F(Qwen3Of30B, SomeExpertsAreHotInBf16) {
  const PlacementSizes sizes = model.sizes(use, {.experts = "bf16", .nodes = 2});
  ASSERT_EQ(sizes.layers[0].expert.size(), 2u);
  const Placement got = decide_placement(sizes, in_24_gib(use));
  EXPECT_NEAR(static_cast<double>(got.hot_experts()) / 48, 43.5, 1);
  EXPECT_LE(bytes_on(got, Place::Kind::kGpu), 24 * kGiB);
  EXPECT_NEAR(static_cast<double>(bytes_on(got, Place::Kind::kNode)) / kGiB, 54.0, 1);
  for (const LayerPlacement& layer : got.layers) EXPECT_GE(layer.hot.size() + 1, got.layers[0].hot.size());

  PlacementWish more = in_24_gib(use);
  more.experts = parse_expert_wish("64", "gpu_experts");
  try {
    decide_placement(sizes, more);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("`gpu_experts` 64 a layer: 3072 experts are 27.0 GiB, 18."));
    EXPECT_THAT(error.what(), HasSubstr(" fit, 43 a layer: try `gpu_experts` 43 or auto"));
  }
  more.experts = parse_expert_wish("43", "gpu_experts");
  EXPECT_EQ(decide_placement(sizes, more).hot_experts(), 43 * 48);
  more.experts = parse_expert_wish("10%", "gpu_experts");
  EXPECT_EQ(decide_placement(sizes, more).hot_experts(), 614);
}

// gpt-oss keeps biases of its experts beside what is packed: 2 x 64 + 128 floats each, here.
TEST(PlacementSizesOfModels, BiasesGoWithTheirExperts) {
  TensorList list;
  list.bf16("model.embed_tokens", 300, 128);
  list.bf16("lm_head", 300, 128);
  list.add("model.norm.weight", {128});
  for (int i = 0; i < 2; ++i) {
    const std::string at = text("model.layers.{}.", i);
    list.add(at + "input_layernorm.weight", {128});
    list.add(at + "post_attention_layernorm.weight", {128});
    for (const auto& [name, n, k] :
         {std::tuple("q", 128, 128), {"k", 64, 128}, {"v", 64, 128}, {"o", 128, 128}}) {
      list.bf16(at + "self_attn." + name + "_proj", n, k);
      list.add(at + "self_attn." + name + "_proj.bias", {n});
    }
    list.add(at + "self_attn.sinks", {4});
    list.bf16(at + "mlp.router", 8, 128);
    list.add(at + "mlp.router.bias", {8});
  }
  const SizesOnlyModel model(list, R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
    "vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64, "num_local_experts": 8,
    "num_experts_per_tok": 3, "max_position_embeddings": 1024, "sliding_window": 24, "swiglu_limit": 7.0,
    "rope_theta": 150000, "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                     "original_max_position_embeddings": 4096}})");
  const MemoryRequest use{.sequences = 1, .context = 100};
  const Transformer sized = model.transformer({.experts = "bf16", .biases = true});
  const PlacementSizes sizes = sized.placement_sizes(use),
                       without = model.sizes(use, {.experts = "bf16", .biases = false});
  EXPECT_EQ(sizes.layers[1].expert_bytes(),
            without.layers[1].expert_bytes() + (2 * 64 + 128) * sizeof(float));
  uint64_t sum = sizes.head;
  for (const PlacementSizes::Layer& layer : sizes.layers) sum += layer.dense + 8 * layer.expert_bytes();
  EXPECT_EQ(sum, sized.memory_plan(use).weights());
}

}  // namespace
}  // namespace kt::inline models
