// Converted weights that are damaged, incomplete or contradict themselves: one line that says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "weights/kt/kt_arrays.h"
#include "weights/kt/kt_plan.h"
#include "weights/testing/tiny_model.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

constexpr TinyModel kModel{.hidden = 128, .inter = 64};

class KtWeights : public testing::Test {
 protected:
  void convert(bool merge, int parts = 2, int bits = 8) {
    write_tiny_model(kModel, folder_ / "in");
    const Checkpoint checkpoint(folder_ / "in");
    const auto source = open_experts(checkpoint);
    run_tiny_plan(
        plan_kt_weights(checkpoint, *source,
                        {.output = out(), .bits = bits, .parts = parts, .merge = merge, .tool = "kt test"}));
  }
  std::string out() const { return folder_ / "out"; }
  std::string error() const {
    return error_of([&] {
      const auto source = open_kt_weights(out());
      for (const int layer : source->layers()) source->at(layer, 0, Projection::kGate)->matrix();
    });
  }
  TemporaryFolder folder_;
};

constexpr char kGate[] = "_layer_1/_numa_0/INT8_gate_0_4096Byte_quant_.kt";
constexpr char kGateScale[] = "_layer_1/_numa_0/INT8_gate_0_128Byte_scale_.kt";

TEST_F(KtWeights, MissingFile) {
  convert(false);
  ASSERT_TRUE(fs::remove(out() + "/" + kGate));
  EXPECT_THAT(error(), AllOf(HasSubstr(out()), HasSubstr("blk.1.ffn_gate_exps.0.numa.0.weight is missing"),
                             HasSubstr("need 48 arrays, there are 47")));
}

TEST_F(KtWeights, MissingExpertPartAndLayer) {
  convert(false);
  for (const fs::directory_entry& part : fs::directory_iterator(out() + "/_layer_2"))
    for (const fs::directory_entry& file : fs::directory_iterator(part))
      if (file.path().filename().string().find("_1_") != std::string::npos) fs::remove(file);
  EXPECT_THAT(error(), HasSubstr("blk.2.ffn_gate_exps.1.numa.0.weight is missing"));
  fs::remove_all(out() + "/_layer_2");
  EXPECT_THAT(error(), HasSubstr("layer 2 is missing; 1 layers are there"));
  fs::remove_all(out() + "/_layer_1/_numa_0");
  EXPECT_THAT(error(), HasSubstr("blk.1.ffn_gate_exps.0.numa.0.weight is missing"));
}

TEST_F(KtWeights, PartsAndExpertsTheDescriptionsDeny) {
  convert(false);
  fs::remove_all(out() + "/_layer_1/_numa_1");
  fs::remove_all(out() + "/_layer_2/_numa_1");
  EXPECT_THAT(error(), HasSubstr("has 1 parts, its description says 2"));
  fs::remove(out() + "/kt_weights.json");
  EXPECT_THAT(error(), HasSubstr("expected")) << "the config's intermediate size";
}

TEST_F(KtWeights, SizesThatAreNotTheNames) {
  convert(false);
  fs::resize_file(out() + "/" + kGate, 4000);
  EXPECT_THAT(error(), AllOf(HasSubstr(kGate), HasSubstr("its name says 4096 bytes, it has 4000")));
}

TEST_F(KtWeights, TwoFilesForOneArray) {
  convert(false);
  write_atomically(out() + "/_layer_1/_numa_0/INT8_gate_0_64Byte_scale_.kt", std::string(64, 'x'));
  EXPECT_THAT(error(), AllOf(HasSubstr("two files for one array"), HasSubstr("gate_0_64Byte_scale_.kt"),
                             HasSubstr("gate_0_128Byte_scale_.kt")));
}

TEST_F(KtWeights, WrongSizeWithAMatchingName) {
  convert(false);
  fs::remove(out() + "/" + kGateScale);
  write_atomically(out() + "/_layer_1/_numa_0/INT8_gate_0_64Byte_scale_.kt", std::string(64, '\0'));
  EXPECT_THAT(error(), AllOf(HasSubstr("blk.1.ffn_gate_exps.0.numa.0.scale"), HasSubstr("expected 128 bytes"),
                             HasSubstr("found 64")));
}

TEST_F(KtWeights, BothKindsInOneFolder) {
  convert(false);
  write_atomically(out() + "/_layer_1/_numa_0/INT4_up_9_4Byte_scale_.kt", std::string(4, '\0'));
  EXPECT_THAT(error(), testing::AnyOf(HasSubstr("INT4 beside INT8"), HasSubstr("INT8 beside INT4")));
}

TEST_F(KtWeights, NamesThatAreNone) {
  convert(false);
  write_atomically(out() + "/_layer_1/_numa_0/INT8_gate_00_4Byte_scale_.kt", std::string(4, '\0'));
  EXPECT_THAT(error(), HasSubstr("not a name of kt weights"));
  fs::remove(out() + "/_layer_1/_numa_0/INT8_gate_00_4Byte_scale_.kt");
  write_atomically(out() + "/_layer_1/_numa_0/INT8_gate_0_4096Byte_quant_.kt.tmp", std::string("half"));
  EXPECT_EQ(error(), "no error");
}

TEST_F(KtWeights, HugeNumbersInNamesCostNothing) {
  convert(false);
  fs::create_directories(out() + "/_layer_99999/_numa_99999");
  write_atomically(out() + "/_layer_99999/_numa_99999/INT8_up_99999_4Byte_scale_.kt", std::string(4, '\0'));
  EXPECT_THAT(error(), HasSubstr("49 arrays cannot be 100000 parts"));
}

TEST_F(KtWeights, ScalesThatAreNotNumbers) {
  convert(false);
  std::vector<float> scales(32, std::numeric_limits<float>::quiet_NaN());
  write_atomically(out() + "/" + kGateScale, std::as_bytes(std::span(scales)));
  EXPECT_THAT(error(), HasSubstr("blk.1.ffn_gate_exps.0.numa.0.scale: row 0 is not a finite number"));
}

TEST_F(KtWeights, AFileThatChangesWhileOpen) {
  convert(false);
  const auto source = open_kt_weights(out());
  fs::resize_file(out() + "/" + kGate, 4095);
  EXPECT_THAT(error_of([&] { source->at(1, 0, Projection::kGate)->matrix(); }),
              HasSubstr("expected 4096 bytes, it has 4095 now"));
  fs::remove(out() + "/" + kGate);
  EXPECT_THAT(error_of([&] { source->at(1, 0, Projection::kGate)->matrix(); }), HasSubstr(kGate));
}

TEST_F(KtWeights, AConfigThatDisagrees) {
  for (const bool merge : {false, true}) {
    fs::remove_all(out());
    convert(merge);
    const auto with = [&](const char* key, int value) {
      Json config = read_json(folder_ / "in/config.json");
      config[key] = value;
      write_atomically(out() + "/config.json", config.dump());
      return error();
    };
    EXPECT_THAT(with("n_routed_experts", 3), HasSubstr("has 2 experts, its config says 3"));
    EXPECT_THAT(with("hidden_size", 256), HasSubstr("hidden size 128, its config says 256"));
    EXPECT_THAT(with("moe_intermediate_size", 96), HasSubstr("intermediate size 64, its config says 96"));
    EXPECT_THAT(with("num_hidden_layers", 5), HasSubstr("layer 3 is missing"));
  }
}

TEST_F(KtWeights, MergedWithWrongTypesOrMissingTensors) {
  const auto write = [&](std::vector<TensorSpec> specs) {
    fs::create_directories(out());
    SafetensorsWriter writer(out() + "/model.safetensors", specs, {});
    for (size_t i = 0; i < specs.size(); ++i)
      writer.write(i, 0, std::vector<std::byte>(byte_count(specs[i])));
    writer.commit();
  };
  const KtModel model{8, 64, 32, 1, false, {}, {}, {}};
  std::vector<TensorSpec> specs;
  for (const KtName& name : kt_expert_arrays(model, 0, 0)) specs.push_back(kt_tensor_spec(model, name));
  write(specs);
  EXPECT_EQ(error_of([&] { open_kt_weights(out())->at(0, 0, Projection::kDown)->matrix(); }), "no error");
  EXPECT_EQ(open_kt_weights(out())->dialect(), "kt-int8") << "64 columns are never int4 without metadata";
  auto wrong = specs;
  wrong[0].dtype = Dtype::kF32;
  wrong[0].shape = {512};
  write(wrong);
  EXPECT_THAT(error(), HasSubstr("expected I8 with one dimension, the file has F32 [512]"));
  wrong = specs;
  wrong.pop_back();
  write(wrong);
  EXPECT_THAT(error(), HasSubstr("blk.0.ffn_down_exps.0.numa.0.scale is missing"));
  wrong = specs;
  wrong[0].shape = {100};
  write(wrong);
  EXPECT_THAT(error(), HasSubstr("a gate of 32 rows and 64 columns has 100 bytes"));
  wrong = {{"a", Dtype::kF32, {1}}};
  write(wrong);
  EXPECT_THAT(error(), HasSubstr("no converted experts in it"));
  EXPECT_FALSE(is_kt_weights(out()));
  EXPECT_FALSE(is_kt_weights(folder_ / "nothing"));
}

TEST_F(KtWeights, MergeRefusesAnotherModel) {
  convert(false);
  write_tiny_model({.hidden = 64, .inter = 64}, folder_ / "other");
  EXPECT_THAT(
      error_of([&] {
        plan_merge({.folder = out(), .original = folder_ / "other", .output = folder_ / "m", .tool = "t"});
      }),
      AllOf(HasSubstr("hidden 128"), HasSubstr("the original")));
}

TEST_F(KtWeights, EstablishedFilesAreRead) {
  const std::string root = KT_FIXTURES "/kt-weights";
  const auto merged = open_kt_weights(root + "/int4-layer1-experts01.safetensors");
  const auto folder = open_kt_weights(root + "/folder");
  const auto eight = open_kt_weights(root + "/int8-layer1-experts01.safetensors");
  EXPECT_EQ(merged->dialect(), "kt-int4");
  EXPECT_EQ(eight->dialect(), "kt-int8");
  const Checkpoint original(KT_DEMO_MODEL);
  const auto source = open_experts(original);
  for (int expert = 0; expert < 2; ++expert) {
    for (const Projection projection : kProjections) {
      const auto stored = source->at(1, expert, projection);
      std::vector<float> values(static_cast<size_t>(stored->n * stored->k));
      stored->values(0, stored->n, values.data());
      for (const ExpertSource* kt : {merged.get(), folder.get(), eight.get()}) {
        const Matrix got = kt->at(1, expert, projection)->matrix();
        const Matrix want = quantise(got.format, values, stored->n, stored->k);
        EXPECT_EQ(got.codes, want.codes);
        EXPECT_EQ(got.scales, want.scales);
      }
    }
  }
}

}  // namespace
}  // namespace kt::inline weights
