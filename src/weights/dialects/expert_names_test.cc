#include "weights/dialects/expert_names.h"

#include <gtest/gtest.h>

namespace kt::inline weights {
namespace {

struct Row {
  std::string_view tensor, prefix, stem, module;
  int layer, expert;
  NamedPart part;
  std::string_view suffix;
};

TEST(ExpertNames, EveryStyle) {
  const Row rows[] = {
      {"model.layers.3.mlp.experts.7.gate_proj.weight", "model.layers.", "model.layers.3.mlp.experts",
       "model.layers.3.mlp.experts.7.gate_proj", 3, 7, NamedPart::kGate, "weight"},
      {"model.layers.61.mlp.experts.255.down_proj.weight_scale_inv", "model.layers.",
       "model.layers.61.mlp.experts", "model.layers.61.mlp.experts.255.down_proj", 61, 255, NamedPart::kDown,
       "weight_scale_inv"},
      {"language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed", "language_model.model.layers.",
       "language_model.model.layers.1.mlp.experts", "language_model.model.layers.1.mlp.experts.0.up_proj", 1,
       0, NamedPart::kUp, "weight_packed"},
      {"model.layers.0.block_sparse_moe.experts.5.w2.qweight", "model.layers.",
       "model.layers.0.block_sparse_moe.experts", "model.layers.0.block_sparse_moe.experts.5.w2", 0, 5,
       NamedPart::kDown, "qweight"},
      {"layers.4.ffn.experts.12.w1.weight", "layers.", "layers.4.ffn.experts", "layers.4.ffn.experts.12.w1",
       4, 12, NamedPart::kGate, "weight"},
      {"layers.4.experts.12.w3.scale", "layers.", "layers.4.experts", "layers.4.experts.12.w3", 4, 12,
       NamedPart::kUp, "scale"},
      {"model.language_model.layers.9.mlp.experts.gate_up_proj", "model.language_model.layers.",
       "model.language_model.layers.9.mlp.experts", "model.language_model.layers.9.mlp.experts.gate_up_proj",
       9, -1, NamedPart::kGateUp, ""},
      {"model.layers.2.mlp.experts.gate_up_proj_blocks", "model.layers.", "model.layers.2.mlp.experts",
       "model.layers.2.mlp.experts.gate_up_proj", 2, -1, NamedPart::kGateUp, "blocks"},
      {"model.layers.2.mlp.experts.down_proj_bias", "model.layers.", "model.layers.2.mlp.experts",
       "model.layers.2.mlp.experts.down_proj", 2, -1, NamedPart::kDown, "bias"},
      {"language_model.model.layers.7.feed_forward.experts.down_proj", "language_model.model.layers.",
       "language_model.model.layers.7.feed_forward.experts",
       "language_model.model.layers.7.feed_forward.experts.down_proj", 7, -1, NamedPart::kDown, ""},
      {"blk.11.ffn_gate_exps.weight", "blk.", "blk.11", "blk.11.ffn_gate_exps", 11, -1, NamedPart::kGate,
       "weight"},
      {"blk.11.ffn_gate_up_exps.weight", "blk.", "blk.11", "blk.11.ffn_gate_up_exps", 11, -1,
       NamedPart::kGateUp, "weight"},
      {"blk.11.ffn_down.3.weight", "blk.", "blk.11", "blk.11.ffn_down.3", 11, 3, NamedPart::kDown, "weight"},
  };
  for (const Row& row : rows) {
    const auto name = parse_expert_name(row.tensor);
    ASSERT_TRUE(name) << row.tensor;
    EXPECT_EQ(name->prefix, row.prefix) << row.tensor;
    EXPECT_EQ(name->stem, row.stem) << row.tensor;
    EXPECT_EQ(name->module, row.module) << row.tensor;
    EXPECT_EQ(name->layer, row.layer) << row.tensor;
    EXPECT_EQ(name->expert, row.expert) << row.tensor;
    EXPECT_EQ(name->part, row.part) << row.tensor;
    EXPECT_EQ(name->suffix, row.suffix) << row.tensor;
    EXPECT_FALSE(name->extra) << row.tensor;
  }
  EXPECT_TRUE(parse_expert_name("mtp.layers.0.mlp.experts.3.up_proj.weight")->extra);
}

TEST(ExpertNames, Others) {
  for (const std::string_view tensor : {"model.layers.3.mlp.shared_experts.gate_proj.weight",
                                        "model.layers.3.mlp.shared_expert.up_proj.weight",
                                        "model.layers.3.mlp.gate.weight",
                                        "model.layers.3.mlp.gate.e_score_correction_bias",
                                        "model.layers.0.mlp.gate_proj.weight",
                                        "model.layers.3.block_sparse_moe.gate.weight",
                                        "model.layers.3.mlp.router.weight",
                                        "blk.3.ffn_gate_inp.weight",
                                        "blk.3.ffn_gate_shexp.weight",
                                        "blk.3.ffn_gate.weight",
                                        "blk.3.exp_probs_b.bias",
                                        "model.embed_tokens.weight",
                                        "",
                                        "blk.",
                                        "layers.",
                                        "model.layers.",
                                        "model.layers.x.mlp.experts.0.up_proj.weight",
                                        "model.layers.-1.mlp.experts.0.w1.weight",
                                        "model.layers.01.mlp.experts.0.w1.weight",
                                        "model.layers.1.mlp.experts.0.w4.weight",
                                        "model.layers.1.mlp.experts.99999999999.w1.weight",
                                        "model.layers.1.mlp.experts.0.w1.",
                                        "model.layers.1.mlp.experts.",
                                        "model.layers.1.mlp.experts.0",
                                        "blk.1.ffn_gate_exps_x",
                                        "blk.1.ffn_up.x.weight",
                                        "visual.blocks.1.mlp.experts.0.w1.weight"}) {
    EXPECT_FALSE(parse_expert_name(tensor)) << tensor;
  }
}

}  // namespace
}  // namespace kt::inline weights
