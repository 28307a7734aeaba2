// Whole checkpoints on disk: discovery of layers and experts, fused orientations, and what is refused.
#include "weights/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "base/error.h"
#include "formats/floats.h"
#include "weights/safetensors.h"

namespace kt::inline weights {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Stored {
  TensorSpec spec;
  std::vector<std::byte> bytes;
};

// A number that tells its place: small integers, exact in bf16 when below 256.
Stored counted(std::string name, std::vector<int64_t> shape, Dtype dtype = Dtype::kBf16) {
  Stored out{{std::move(name), dtype, std::move(shape)}, {}};
  const int64_t count = elements(out.spec.shape);
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>((i * 37 + i / 251) % 256);
    const uint16_t bits = dtype == Dtype::kBf16 ? to_bf16(value).bits : to_f16(value).bits;
    for (const int shift : {0, 8}) out.bytes.push_back(static_cast<std::byte>(bits >> shift));
  }
  return out;
}
float counted_value(int64_t i) { return static_cast<float>((i * 37 + i / 251) % 256); }

class ExpertsTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("kt_experts_" + std::to_string(::getpid()) + "_" +
               testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  Checkpoint checkpoint(const std::vector<Stored>& tensors, const std::string& config) {
    std::vector<TensorSpec> specs;
    for (const Stored& tensor : tensors) specs.push_back(tensor.spec);
    SafetensorsWriter writer((folder_ / "model.safetensors").string(), specs, {});
    for (size_t i = 0; i < tensors.size(); ++i) writer.write(i, 0, tensors[i].bytes);
    writer.commit();
    std::ofstream(folder_ / "config.json") << config;
    return Checkpoint(folder_.string());
  }

  std::string error_of(const std::vector<Stored>& tensors, const std::string& config,
                       InputType type = InputType::kAuto) {
    try {
      const Checkpoint opened = checkpoint(tensors, config);
      open_experts(opened, type);
    } catch (const Error& error) {
      kind_ = error.kind();
      return error.what();
    }
    return "no error";
  }

  std::filesystem::path folder_;
  ErrorKind kind_ = ErrorKind::kInternal;
};

constexpr int64_t kHidden = 24, kInter = 10;

// Two experts in each of these layers, with the names of one style.
std::vector<Stored> per_expert(std::vector<int> layers, const std::string& prefix = "model.layers.",
                               const std::string& group = "mlp.experts",
                               std::vector<std::string> names = {"gate_proj", "up_proj", "down_proj"}) {
  std::vector<Stored> out;
  for (const int layer : layers)
    for (int expert = 0; expert < 2; ++expert)
      for (int i = 0; i < 3; ++i)
        out.push_back(counted(text("{}{}.{}.{}.{}.weight", prefix, layer, group, expert, names[i]),
                              i == 2 ? std::vector{kHidden, kInter} : std::vector{kInter, kHidden}));
  return out;
}

TEST_F(ExpertsTest, LayersAndNames) {
  auto tensors = per_expert({3, 1, 4});  // 4 is the multi-token-prediction layer
  tensors.push_back(counted("model.layers.1.mlp.shared_experts.gate_proj.weight", {4, 4}));
  tensors.push_back(counted("model.layers.1.mlp.gate.weight", {2, kHidden}));
  const Checkpoint opened = checkpoint(tensors, R"({"num_hidden_layers": 4, "hidden_size": 24,
      "moe_intermediate_size": 10, "n_routed_experts": 2})");
  const auto source = open_experts(opened);
  EXPECT_EQ(source->dialect(), "bf16");
  EXPECT_THAT(source->layers(), ElementsAre(1, 3));
  EXPECT_EQ(source->experts(), 2);
  EXPECT_EQ(source->hidden(), kHidden);
  EXPECT_EQ(source->inter(), kInter);
  EXPECT_EQ(source->module_name(3, 1, Projection::kUp), "model.layers.3.mlp.experts.1.up_proj");
  EXPECT_TRUE(source->owns("model.layers.4.mlp.experts.1.up_proj.weight"));
  EXPECT_FALSE(source->owns("model.layers.1.mlp.shared_experts.gate_proj.weight"));
  EXPECT_FALSE(source->owns("model.layers.1.mlp.gate.weight"));
  EXPECT_FALSE(source->bias(3, 1, Projection::kUp));
  const auto down = source->at(3, 1, Projection::kDown);
  EXPECT_EQ(down->name, "model.layers.3.mlp.experts.1.down_proj");
  ASSERT_EQ(down->n, kHidden);
  std::vector<float> values(kHidden * kInter);
  down->values(0, kHidden, values.data());
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], counted_value(static_cast<int64_t>(i)));
  EXPECT_THROW(source->at(4, 0, Projection::kUp), Error);
  EXPECT_THROW(source->at(3, 2, Projection::kUp), Error);
}

TEST_F(ExpertsTest, OtherStyles) {
  const auto mixtral =
      checkpoint(per_expert({0}, "model.layers.", "block_sparse_moe.experts", {"w1", "w3", "w2"}), "{}");
  EXPECT_EQ(open_experts(mixtral)->module_name(0, 1, Projection::kDown),
            "model.layers.0.block_sparse_moe.experts.1.w2");
  const auto kimi = checkpoint(per_expert({7}, "language_model.model.layers."), "{}");
  EXPECT_THAT(open_experts(kimi)->layers(), ElementsAre(7));
  const auto bare = checkpoint(per_expert({0}, "layers.", "ffn.experts", {"w1", "w3", "w2"}), "{}");
  EXPECT_EQ(open_experts(bare)->inter(), kInter);
}

struct Fused {
  std::string config;
  bool transposed, interleaved;
  int64_t hidden, inter;
};

TEST_F(ExpertsTest, FusedOrientations) {
  for (const Fused& f : {Fused{"{}", false, false, 24, 10}, Fused{"{}", true, false, 24, 10},
                         Fused{R"({"model_type": "gpt_oss"})", true, true, 24, 24},
                         Fused{R"({"model_type": "llama4_text"})", true, false, 20, 10},
                         Fused{R"({"hidden_size": 20})", false, false, 20, 10}}) {
    const std::string stem = "model.language_model.layers.0.mlp.experts.";
    const int64_t h = f.hidden, i = f.inter;
    std::vector<Stored> tensors = {
        counted(stem + "gate_up_proj",
                f.transposed ? std::vector<int64_t>{3, h, 2 * i} : std::vector<int64_t>{3, 2 * i, h}),
        counted(stem + "down_proj",
                f.transposed ? std::vector<int64_t>{3, i, h} : std::vector<int64_t>{3, h, i}),
        counted(stem + "gate_up_proj_bias", {3, 2 * i})};
    const Checkpoint opened = checkpoint(tensors, f.config);
    const auto source = open_experts(opened);
    ASSERT_EQ(source->hidden(), h);
    ASSERT_EQ(source->inter(), i);
    EXPECT_EQ(source->module_name(0, 2, Projection::kUp), stem + "2.up_proj");
    const bool interleaved = f.interleaved || (f.transposed && f.config == "{}");  // biases give it away
    const int expert = 2;
    for (const Projection projection : kProjections) {
      const auto matrix = source->at(0, expert, projection);
      std::vector<float> values(static_cast<size_t>(matrix->n * matrix->k));
      matrix->values(0, matrix->n, values.data());
      const int64_t up = projection == Projection::kUp ? 1 : 0;
      for (int64_t r = 0; r < matrix->n; ++r) {
        const int64_t row = projection == Projection::kDown ? r : interleaved ? 2 * r + up : up * i + r;
        const int64_t rows = projection == Projection::kDown ? h : 2 * i;
        for (int64_t c = 0; c < matrix->k; ++c) {
          const int64_t within = f.transposed ? c * rows + row : row * matrix->k + c;
          ASSERT_EQ(values[r * matrix->k + c], counted_value(expert * rows * matrix->k + within))
              << f.config << " " << name_of(projection) << " " << r << "," << c;
        }
        if (projection == Projection::kDown) continue;
        ASSERT_EQ((*source->bias(0, expert, projection))[r], counted_value(expert * rows + row));
      }
    }
    EXPECT_FALSE(source->bias(0, expert, Projection::kDown));
    EXPECT_EQ(source->at(0, 2, Projection::kUp)->name, stem + "gate_up_proj[2]");
  }
}

TEST_F(ExpertsTest, FusedRefusals) {
  const std::string stem = "model.layers.0.mlp.experts.";
  // Gate and up apart, square: both ways round fit, and only a known model_type may decide.
  const std::vector<Stored> square = {counted(stem + "gate_proj", {2, 8, 8}),
                                      counted(stem + "up_proj", {2, 8, 8}),
                                      counted(stem + "down_proj", {2, 8, 8})};
  EXPECT_THAT(error_of(square, "{}"), HasSubstr("may be either way round, and model_type '' does not tell"));
  EXPECT_EQ(error_of(square, R"({"model_type": "qwen3_moe"})"), "no error");
  const std::vector<Stored> odd = {counted(stem + "gate_up_proj", {2, 12, 8}),
                                   counted(stem + "down_proj", {2, 8, 5})};
  EXPECT_THAT(
      error_of(odd, "{}"),
      HasSubstr("BF16 [2, 12, 8] and model.layers.0.mlp.experts.down_proj BF16 [2, 8, 5] fit neither"));
  const std::vector<Stored> half = {counted(stem + "gate_up_proj", {2, 12, 8})};
  EXPECT_THAT(error_of(half, "{}"), HasSubstr("expert 0 has no down projection"));
  const std::vector<Stored> counts = {counted(stem + "gate_up_proj", {2, 12, 8}),
                                      counted(stem + "down_proj", {3, 8, 6})};
  EXPECT_THAT(error_of(counts, R"({"num_experts": 2})"),
              HasSubstr("down_proj: expected 2 experts, found BF16 [3, 8, 6]"));
}

TEST_F(ExpertsTest, Refusals) {
  EXPECT_THAT(error_of({counted("model.layers.0.mlp.gate_proj.weight", {4, 4})}, "{}"),
              HasSubstr("no routed experts"));
  EXPECT_EQ(kind_, ErrorKind::kUnsupported);
  EXPECT_THAT(error_of(per_expert({5}), R"({"num_hidden_layers": 5})"), HasSubstr("layers from 5 on"));
  auto missing = per_expert({0, 1});
  missing.erase(missing.begin() + 10);  // layer 1, expert 1, up
  EXPECT_THAT(error_of(missing, "{}"),
              HasSubstr("layer 1: expert 1 has no up projection under model.layers.1.mlp.experts"));
  EXPECT_THAT(error_of(per_expert({0}), R"({"num_experts": 3})"),
              HasSubstr("expert 2 has no gate projection"));
  EXPECT_THAT(error_of(per_expert({0}), R"({"num_experts": 1})"),
              HasSubstr("expert 1, but config has 1 experts"));
  EXPECT_THAT(
      error_of(per_expert({0}), R"({"hidden_size": 32})"),
      HasSubstr(
          "0.gate_proj: expected [10, 32] for the gate projection (hidden 32, inter 10), found [10, 24]"));
  auto shapes = per_expert({0});
  shapes[4] = counted(shapes[4].spec.name, {kInter, kHidden + 1});
  EXPECT_THAT(error_of(shapes, "{}"), HasSubstr("1.up_proj: expected [10, 24] for the up projection"));
}

// Sizes and numbers at the edge of what a header can say.
TEST_F(ExpertsTest, OddSizes) {
  auto empty = per_expert({0});
  for (Stored& tensor : empty) tensor = counted(tensor.spec.name, {0, kHidden});
  EXPECT_THAT(error_of(empty, "{}"), HasSubstr("0.gate_proj: expected at least one row"));
  const std::string stem = "model.layers.0.mlp.experts.";
  EXPECT_THAT(
      error_of({counted(stem + "gate_up_proj", {0, 4, 4}), counted(stem + "down_proj", {0, 4, 2})}, "{}"),
      HasSubstr("0 experts in layer 0"));
  EXPECT_THAT(error_of({counted(stem + "2147483647.gate_proj.weight", {1, 1})}, "{}"),
              HasSubstr("2147483648 experts in layer 0"));
  EXPECT_THAT(
      error_of({counted(stem + "gate_up_proj", {2, 4}), counted(stem + "down_proj", {2, 4, 2})}, "{}"),
      HasSubstr("gate_up_proj: expected 3 dimensions, found BF16 [2, 4]"));
  auto two = per_expert({0});
  two.push_back(counted(stem + "gate_up_proj", {2, 20, 24}));
  EXPECT_THAT(error_of(two, "{}"), HasSubstr("both fused and one by one"));
  auto names = per_expert({0});
  names.push_back(counted("layers.0.experts.0.w1.weight", {kInter, kHidden}));
  EXPECT_THAT(error_of(names, "{}"), HasSubstr("layer 0 has experts under two names"));
  auto extra = per_expert({0});
  extra.push_back(counted("mtp.layers.0.mlp.experts.0.gate_proj.weight", {3, 3}));
  const Checkpoint opened = checkpoint(extra, "{}");
  EXPECT_TRUE(open_experts(opened)->owns("mtp.layers.0.mlp.experts.0.gate_proj.weight"));
}

TEST_F(ExpertsTest, TypeAskedFor) {
  EXPECT_EQ(error_of(per_expert({0}), "{}", InputType::kBf16), "no error");
  EXPECT_THAT(error_of(per_expert({0}), "{}", InputType::kFp16),
              HasSubstr("input type fp16 asked for, the tensors are bf16 (BF16 [10, 24])"));
  auto mixed = per_expert({0});
  mixed[5] = counted(mixed[5].spec.name, {kHidden, kInter}, Dtype::kF16);
  EXPECT_EQ(error_of(mixed, "{}"), "no error");
  EXPECT_THAT(error_of(mixed, "{}", InputType::kBf16),
              HasSubstr("1.down_proj: input type bf16 asked for, the tensors are fp16"));
  EXPECT_EQ(input_type_named("fp8"), InputType::kFp8);
  EXPECT_THROW(input_type_named("fp9"), Error);
}

}  // namespace
}  // namespace kt::inline weights
