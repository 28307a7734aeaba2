#include "weights/lora/lora_file.h"

#include <gmock/gmock.h>

#include <cmath>
#include <fstream>

#include "text/json.h"
#include "weights/testing/files.h"

namespace kt::inline weights {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_files::raw;
using testing_files::TempFolder;

// A folder as PEFT saves it, of f32 tensors whose numbers count up from `first`.
class Folder {
 public:
  Folder() { config_ = {{"peft_type", "LORA"}, {"r", 2}, {"lora_alpha", 4}}; }
  Json& config() { return config_; }
  Folder& add(const std::string& name, std::vector<int64_t> shape, float first) {
    const int64_t count = elements(shape), at = static_cast<int64_t>(data_.size());
    for (int64_t i = 0; i < count; ++i) data_ += raw(first + static_cast<float>(i));
    header_[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {at, at + 4 * count}}};
    return *this;
  }
  std::string write() {
    std::ofstream(folder_.at("adapter_config.json")) << config_.dump();
    std::ofstream(folder_.at("adapter_model.safetensors"))
        << testing_files::safetensors_file(header_.dump(), data_);
    return folder_.path();
  }
  LoraFile open() { return LoraFile(write(), {}); }
  std::string refusal() {
    const std::string path = write();
    return error_of([&] { LoraFile(path, {}); });
  }

 private:
  TempFolder folder_;
  Json config_, header_ = Json::object();
  std::string data_;
};

constexpr const char* kQ = "base_model.model.model.layers.1.self_attn.q_proj.lora_";
constexpr const char* kExperts = "base_model.model.model.layers.1.mlp.experts";

Folder& add_q(Folder& folder) {
  return folder.add(std::string(kQ) + "A.weight", {2, 3}, 0).add(std::string(kQ) + "B.weight", {4, 2}, 10);
}

TEST(LoraFile, FactorsOfAModule) {
  Folder folder;
  folder.config()["layers_to_transform"] = 1;
  const LoraFile file = add_q(folder).open();
  EXPECT_FALSE(file.linear("model.layers.0.self_attn.q_proj", 4, 3));
  // Whatever the model stands inside of.
  for (const char* name :
       {"model.layers.1.self_attn.q_proj", "language_model.model.layers.1.self_attn.q_proj"}) {
    const auto factors = file.linear(name, 4, 3);
    ASSERT_TRUE(factors);
    EXPECT_EQ(factors->rank, 2);
    EXPECT_EQ(factors->scale, 2);
    EXPECT_THAT(factors->a, ElementsAre(0, 1, 2, 3, 4, 5));
    EXPECT_THAT(factors->b, ElementsAre(10, 11, 12, 13, 14, 15, 16, 17));
  }
  file.check_all_taken();
}

TEST(LoraFile, ScalesAreWhatPeftTakes) {
  Folder stabilised;
  stabilised.config()["use_rslora"] = true;
  EXPECT_FLOAT_EQ(add_q(stabilised).open().linear("layers.1.self_attn.q_proj", 4, 3)->scale,
                  4 / std::sqrt(2.0f));
  // The first pattern that matches; one of another module's does not.
  Folder patterns;
  patterns.config()["alpha_pattern"] = {{"k_proj", 100}, {"self_attn.q_proj", 6}};
  EXPECT_EQ(add_q(patterns).open().linear("layers.1.self_attn.q_proj", 4, 3)->scale, 3);
}

// Two experts, hidden 3, inter 2, rank 1: rows of a are experts', columns of b ranks' and in these experts'.
TEST(LoraFile, FusedExpertsAreSortedByExpert) {
  Folder folder;
  folder.config()["layers_to_transform"] = Json::array({1});
  const std::string at = kExperts;
  folder
      .add(at + ".base_layer.lora_A.weight", {4, 3}, 0)  // rank 2
      .add(at + ".base_layer.lora_B.weight", {4, 4}, 100)
      .add(at + ".lora_A.weight", {2, 2}, 50)
      .add(at + ".lora_B.weight", {3, 2}, 200);
  const LoraFile file = folder.open();
  EXPECT_FALSE(file.experts(0, {.experts = 2, .hidden = 3, .inter = 2}));
  const auto factors = file.experts(1, {.experts = 2, .hidden = 3, .inter = 2});
  ASSERT_TRUE(factors);
  EXPECT_EQ(factors->gate_up.rank, 2);
  EXPECT_EQ(factors->gate_up.scale, 2);
  EXPECT_EQ(factors->down.rank, 1);
  EXPECT_EQ(factors->down.scale, 4);
  EXPECT_THAT(factors->gate_up.a, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
  // Row o of b is 100 + 4 o + {rank 0 of experts 0 and 1, rank 1 of both}.
  EXPECT_THAT(factors->gate_up.b,
              ElementsAre(100, 102, 104, 106, 108, 110, 112, 114, 101, 103, 105, 107, 109, 111, 113, 115));
  EXPECT_THAT(factors->down.b, ElementsAre(200, 202, 204, 201, 203, 205));
  file.check_all_taken();
}

// Gate and up have factors of their own: both together have zeros where one does not meet the other.
TEST(LoraFile, SingleExpertsAndThoseWithoutFactors) {
  Folder folder;
  const std::string at = std::string(kExperts) + ".1.";
  folder.add(at + "gate_proj.lora_A.weight", {1, 3}, 1)
      .add(at + "gate_proj.lora_B.weight", {2, 1}, 5)
      .add(at + "up_proj.lora_A.weight", {1, 3}, 11)
      .add(at + "up_proj.lora_B.weight", {2, 1}, 15);
  const LoraFile file = folder.open();
  const auto factors = file.experts(1, {.experts = 2, .hidden = 3, .inter = 2});
  ASSERT_TRUE(factors);
  EXPECT_EQ(factors->down.rank, 0);
  EXPECT_EQ(factors->gate_up.rank, 2);
  EXPECT_THAT(factors->gate_up.a, ElementsAre(0, 0, 0, 0, 0, 0, 1, 2, 3, 11, 12, 13));
  EXPECT_THAT(factors->gate_up.b, ElementsAre(0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 6, 0, 0, 15, 0, 16));
  file.check_all_taken();
}

TEST(LoraFile, WhatFitsNoMatrixIsTold) {
  Folder folder;
  const LoraFile file = add_q(folder).open();
  EXPECT_THAT(error_of([&] { file.check_all_taken(); }),
              HasSubstr("1 of 1 pairs of factors fit no matrix of this model: "
                        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight [2, 3]"));
  EXPECT_THAT(error_of([&] { file.linear("layers.1.self_attn.q_proj", 4, 5); }),
              HasSubstr("lora_A.weight: expected [rank, 5], found F32 [2, 3]"));
  EXPECT_THAT(error_of([&] { file.linear("layers.1.self_attn.q_proj", 7, 3); }),
              HasSubstr("lora_B.weight: expected [7, 2], found F32 [4, 2]"));
  Folder experts;
  experts.add(std::string(kExperts) + ".lora_A.weight", {4, 3}, 0);
  EXPECT_THAT(error_of([&] { experts.open().experts(1, {.experts = 2, .hidden = 3, .inter = 2}); }),
              HasSubstr("stands alone: its other factor is missing"));
  experts.add(std::string(kExperts) + ".lora_B.weight", {5, 4}, 0);
  EXPECT_THAT(error_of([&] { experts.open().experts(1, {.experts = 2, .hidden = 3, .inter = 2}); }),
              HasSubstr("neither gate and up nor down of 2 experts of 3 x 2"));
}

// A layer whose factors are gone is told, and one that the configuration leaves out is not.
TEST(LoraFile, LayersThatOthersHave) {
  const auto ask = [](const char* key, const Json& value) {
    Folder folder;
    if (key) folder.config()[key] = value;
    const LoraFile file = add_q(folder).open();
    for (const char* layer : {"0", "1"}) {
      file.linear(text("layers.{}.self_attn.q_proj", layer), 4, 3);
      file.linear(text("layers.{}.self_attn.k_proj", layer), 4, 3);
    }
    file.linear("lm_head", 4, 3);
    return error_of([&] { file.check_all_taken(); });
  };
  for (const Json& modules : {Json(), Json::array({"q_proj", "v_proj"})})
    EXPECT_THAT(ask("target_modules", modules),
                HasSubstr("no factors for layers.0.self_attn.q_proj, which other layers have "
                          "(base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight [2, 3])"));
  EXPECT_EQ(ask("layers_to_transform", Json::array({1})), "no error");
  for (const char* name : {"model.layers.1.self_attn.q_proj", "1.self_attn.q_proj"})
    EXPECT_EQ(ask("target_modules", Json::array({name})), "no error");
  EXPECT_EQ(ask("target_modules", ".*1.*q_proj"), "no error");
  Folder folder;
  const std::string at = kExperts;
  folder.add(at + ".lora_A.weight", {2, 2}, 50).add(at + ".lora_B.weight", {3, 2}, 200);
  const LoraFile file = folder.open();
  for (const int layer : {1, 2}) file.experts(layer, {.experts = 2, .hidden = 3, .inter = 2});
  EXPECT_THAT(error_of([&] { file.check_all_taken(); }), HasSubstr("no factors for layers.2.experts, which"));
}

TEST(LoraFile, RefusesWhatItDoesNotRead) {
  const auto with = [](const char* key, const Json& value) {
    Folder folder;
    folder.config()[key] = value;
    return add_q(folder).refusal();
  };
  EXPECT_THAT(with("peft_type", "IA3"), HasSubstr("peft_type \"IA3\": only LORA adapters are read"));
  EXPECT_THAT(with("use_dora", true), HasSubstr("adapters with DoRA are not read"));
  EXPECT_THAT(with("bias", "all"), HasSubstr("bias \"all\": trained biases are not read"));
  EXPECT_THAT(with("modules_to_save", Json::array({"lm_head"})), HasSubstr("modules_to_save [\"lm_head\"]"));
  EXPECT_THAT(with("lora_alpha", "x"), HasSubstr("expected a number as lora_alpha, found \"x\""));
  EXPECT_THAT(with("alpha_pattern", {{"(", 1}}), HasSubstr("pattern"));
  EXPECT_EQ(with("bias", "none"), "no error");
  Folder other;
  EXPECT_THAT(other.add("base_model.model.lm_head.weight", {2, 2}, 0).refusal(),
              HasSubstr("neither lora_A nor lora_B"));
  Folder empty;
  EXPECT_THAT(empty.refusal(), HasSubstr("an adapter without a tensor"));
  EXPECT_THAT(error_of([] { LoraFile("/nowhere/at/all", {}); }), HasSubstr("expected an adapter"));
  const TempFolder folder;
  EXPECT_THAT(error_of([&] { LoraFile(folder.path(), {}); }), HasSubstr("no adapter_config.json"));
}

}  // namespace
}  // namespace kt::inline weights
