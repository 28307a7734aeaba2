#include "weights/kt/kt_names.h"

#include <gtest/gtest.h>

namespace kt::inline weights {
namespace {

TEST(KtNames, TensorNamesComeBack) {
  EXPECT_EQ(kt_tensor_name({.layer = 3, .projection = Projection::kUp, .expert = 7}),
            "blk.3.ffn_up_exps.7.numa.0.weight");
  for (const Projection projection : kProjections) {
    for (const bool backward : {false, true}) {
      for (const bool scale : {false, true}) {
        const KtName name{.layer = 60,
                          .projection = projection,
                          .backward = backward,
                          .expert = kLargestKtNumber,
                          .part = 1,
                          .scale = scale};
        EXPECT_EQ(parse_kt_tensor_name(kt_tensor_name(name)), name) << kt_tensor_name(name);
      }
    }
  }
}

TEST(KtNames, FileNamesComeBack) {
  const KtName name{.layer = 1, .projection = Projection::kDown, .expert = 12, .part = 2};
  EXPECT_EQ(kt_file_name(name, 4, 16384), "_layer_1/_numa_2/INT4_down_12_16384Byte_quant_.kt");
  for (const Projection projection : kProjections) {
    for (const bool backward : {false, true}) {
      for (const bool scale : {false, true}) {
        for (const int bits : {4, 8}) {
          const KtFileName file{
              .name = {.projection = projection, .backward = backward, .expert = 5, .scale = scale},
              .bits = bits,
              .bytes = 3670016};
          const std::string path = kt_file_name(file.name, bits, file.bytes);
          EXPECT_EQ(parse_kt_file_name(path.substr(path.rfind('/') + 1)), file) << path;
        }
      }
    }
  }
  EXPECT_EQ(parse_kt_layer_folder("_layer_60"), 60);
  EXPECT_EQ(parse_kt_part_folder("_numa_0"), 0);
}

TEST(KtNames, NothingElseIsAName) {
  for (const char* bad :
       {"", "blk.", "blk..ffn_up_exps.7.numa.0.weight", "blk.3.ffn_up_exps.7.numa.0.weights",
        "blk.3.ffn_up_exps.7.numa.0.", "blk.03.ffn_up_exps.7.numa.0.weight",
        "blk.-3.ffn_up_exps.7.numa.0.weight", "blk.+3.ffn_up_exps.7.numa.0.weight",
        "blk.100000.ffn_up_exps.7.numa.0.weight", "blk.99999999999999999999999.ffn_up_exps.7.numa.0.weight",
        "blk.3.ffn_side_exps.7.numa.0.weight", "blk.3.ffn_up_exps.weight",
        "blk.3.ffn_up_bwd_bwd_exps.7.numa.0.weight", " blk.3.ffn_up_exps.7.numa.0.weight",
        "blk.3.ffn_up_exps.7.numa.0x1.weight"})
    EXPECT_EQ(parse_kt_tensor_name(bad), std::nullopt) << bad;
  for (const char* bad :
       {"", "INT4_", "INT2_up_0_512Byte_scale_.kt", "INT4_up_0_512Byte_scale_.kt.tmp",
        "INT4_up_0_0512Byte_scale_.kt", "INT4_up_0_Byte_scale_.kt", "INT4_up_0_512Byte_other_.kt",
        "INT4_up_0_999999999999999999999Byte_quant_.kt", "INT4_up_0_281474976710657Byte_quant_.kt",
        "int4_up_0_512Byte_scale_.kt", "INT4_up__512Byte_scale_.kt", "../INT4_up_0_512Byte_scale_.kt"})
    EXPECT_EQ(parse_kt_file_name(bad), std::nullopt) << bad;
  EXPECT_TRUE(parse_kt_file_name("INT4_up_0_281474976710656Byte_quant_.kt"));
  for (const char* bad : {"_layer_", "_layer_a", "_layer_1/", "layer_1", "_layer_01", "_layer_1 "})
    EXPECT_EQ(parse_kt_layer_folder(bad), std::nullopt) << bad;
  EXPECT_EQ(parse_kt_part_folder("_numa_1a"), std::nullopt);
}

}  // namespace
}  // namespace kt::inline weights
