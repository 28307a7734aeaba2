// What a checkpoint has beyond what its family reads: idle for a reason that is said, or an error.
#include "models/unread_tensors.h"

#include <gtest/gtest.h>

#include "base/testing/error_of.h"
#include "models/families.h"
#include "weights/testing/files.h"

namespace kt::inline models {
namespace {

using testing_files::GgufBytes;
using testing_files::safetensors_file;
using testing_files::TempFolder;

constexpr const char* kRead = "model.norm.weight";

struct Unread {
  std::vector<std::string> names;
  float value = 0;  // of each: one number
  bool tied = false;
};

class UnreadTensors : public testing::Test {
 protected:
  IdleTensors idle(const Unread& unread, const ExpertSource* routed = nullptr) {
    std::string header, data;
    const auto add = [&](const std::string& name) {
      header += text("{}\"{}\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[{},{}]}}",
                     header.empty() ? "" : ",", name, data.size(), data.size() + 4);
      data += testing_files::raw(unread.value);
    };
    add(kRead);
    for (const std::string& name : unread.names) add(name);
    const Checkpoint checkpoint(folder_.put("model.safetensors", safetensors_file("{" + header + "}", data)));
    return idle_tensors(checkpoint, spec(unread.tied), {kRead}, routed, "model.");
  }
  std::string said(const Unread& unread) { return idle(unread).describe(); }
  std::string refusal(const Unread& unread) {
    return error_of([&] { idle(unread); });
  }
  static ModelSpec spec(bool tied) {
    ModelSpec out;
    out.layers.resize(2);
    out.tied_embeddings = tied;
    return out;
  }

  TempFolder folder_;
};

TEST_F(UnreadTensors, NothingIsSaidOfNothing) { EXPECT_EQ(said({}), ""); }

TEST_F(UnreadTensors, EachKindThatIsIdle) {
  const std::pair<const char*, const char*> cases[] = {
      {"model.layers.2.eh_proj.weight", "layers for further tokens"},
      {"blk.2.attn_q.weight", "layers for further tokens"},
      {"blk.0.nextn.eh_proj.weight", "layers for further tokens"},
      {"mtp.fc.weight", "layers for further tokens"},
      {"model.mtp_block.0.self_attn.q_proj.weight", "layers for further tokens"},
      {"model.mtp_emb_norm.0.weight", "layers for further tokens"},
      {"mm_projector.proj.0.weight", "parts for images, sound or video"},
      {"model.visual.patch_embed.weight", "parts for images, sound or video"},
      {"vision_tower.blocks.0.weight", "parts for images, sound or video"},
      {"audio_tower.conv.weight", "parts for images, sound or video"},
      {"multi_modal_projector.linear_1.weight", "parts for images, sound or video"},
      {"model.layers.1.self_attn.k_scale", "scales of a cache in 8 bits"},
      {"model.layers.1.self_attn.rotary_emb.inv_freq", "angles that are computed"},
      {"model.layers.1.self_attn.o_proj.bias", "biases of zero"},
  };
  for (const auto& [name, why] : cases)
    EXPECT_EQ(said({.names = {name}}), text("1 tensor not used: {} ({})", why, name));
  EXPECT_EQ(said({.names = {"lm_head.weight"}, .tied = true}),
            "1 tensor not used: a head where it is the embedding (lm_head.weight)");
}

TEST_F(UnreadTensors, KindsAreSaidOnceWithTheirFirst) {
  EXPECT_EQ(said({.names = {"model.layers.2.b.weight", "mtp.fc.weight", "model.layers.2.a.weight",
                            "model.layers.0.mlp.gate.bias"}}),
            "4 tensors not used: biases of zero (model.layers.0.mlp.gate.bias); layers for further tokens "
            "(model.layers.2.a.weight and 2 more)");
}

TEST_F(UnreadTensors, WhatIsNotIdleIsNamed) {
  for (const char* name :
       {"model.layers.1.attn_gate.weight", "model.layers.0.mlp.bias_of_gate", "lm_head.weight",
        "model.layers.x.weight", "model.rope_freqs.weight", "rope_factors_long.weight"})
    EXPECT_EQ(refusal({.names = {name}}),
              text("{}: 1 tensor that this kind of model has no use for: {}; what it computes without them "
                   "would be wrong",
                   folder_.at("model.safetensors"), name));
  const std::string biased = refusal({.names = {"model.layers.1.self_attn.o_proj.bias"}, .value = 1});
  EXPECT_NE(
      biased.find("1 tensor that this kind of model has no use for: model.layers.1.self_attn.o_proj.bias;"),
      biased.npos)
      << biased;
}

TEST_F(UnreadTensors, ManyAreShortened) {
  Unread many;
  for (int i = 0; i < 9; ++i) many.names.push_back(text("model.extra.{}", i));
  const std::string message = refusal(many);
  EXPECT_NE(message.find("9 tensors that"), message.npos) << message;
  EXPECT_NE(message.find("model.extra.4, model.extra.5, ...; "), message.npos) << message;
  EXPECT_EQ(message.find("model.extra.6"), message.npos) << message;
}

// Whoever knows the experts says which tensors are theirs; else their names do.
TEST_F(UnreadTensors, RoutedExpertsAreNotUnread) {
  EXPECT_EQ(said({.names = {"model.layers.1.mlp.experts.0.gate_proj.weight"}, .value = 1}), "");
  EXPECT_EQ(said({.names = {"blk.1.ffn_gate_exps.weight"}, .value = 1}), "");
}

// Factors of frequencies became part of the config; every other tensor of a file is looked at.
TEST_F(UnreadTensors, GgufFactorsOfFrequenciesAreRead) {
  const auto file = [&](std::string_view name) {
    GgufBytes bytes(1, 1);
    bytes.pair("general.architecture", "llama").tensor(name, {1}, 0, 0).data(4);
    const Checkpoint checkpoint(folder_.put("m.gguf", bytes.str()), gguf_families());
    return error_of(
        [&] { EXPECT_EQ(idle_tensors(checkpoint, spec(true), {}, nullptr, "model.").count, 0u); });
  };
  for (const char* name : {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
    EXPECT_EQ(file(name), "no error") << name;
  EXPECT_NE(file("rope_other.weight").find("rope_other.weight"), std::string::npos);
}

}  // namespace
}  // namespace kt::inline models
