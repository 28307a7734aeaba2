// plan_compressed and plan_dequant on a small fp8 model with a dense layer, a layer of experts and a
// multi-token-prediction layer, run through the real driver.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "formats/floats.h"
#include "weights/dialects/compressed.h"
#include "weights/linears.h"
#include "weights/plans/compressed_plan.h"
#include "weights/plans/compressed_targets.h"
#include "weights/plans/dequant_plan.h"
#include "weights/safetensors.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::HasSubstr;

ConversionOptions on_threads(int threads) {
  ConversionOptions options;
  options.threads = threads;
  return options;
}

constexpr int64_t kHidden = 128, kInter = 64;

class Plans : public testing::Test {
 protected:
  Plans() : root_(testing::TempDir() + "kt_plans_" + std::to_string(getpid())), model_(root_ + "/model") {
    fs::create_directories(model_);
    add("lm_head.weight", Dtype::kBf16, {16, kHidden});
    add_fp8("model.layers.0.self_attn.q_proj", kHidden, kHidden);
    add_fp8("model.layers.0.mlp.up_proj", kInter, kHidden);
    add("model.layers.0.input_layernorm.weight", Dtype::kBf16, {kHidden});
    write_file("model-00001-of-00002.safetensors");
    for (const int layer : {1, 2}) {  // 2: multi-token prediction
      add("model.layers." + std::to_string(layer) + ".mlp.gate.weight", Dtype::kBf16, {2, kHidden});
      for (const int expert : {0, 1}) {
        const std::string stem = text("model.layers.{}.mlp.experts.{}.", layer, expert);
        add_fp8(stem + "gate_proj", kInter, kHidden);
        add_fp8(stem + "up_proj", kInter, kHidden);
        add_fp8(stem + "down_proj", kHidden, kInter);
      }
    }
    write_file("model-00002-of-00002.safetensors");
    write_atomically(model_ + "/tokenizer.json", std::string_view("{}"));
    write_atomically(model_ + "/config.json", std::string_view(R"({
      "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
      "num_hidden_layers": 2, "hidden_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 2,
      "num_experts_per_tok": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
      "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})"));
  }
  ~Plans() override { fs::remove_all(root_); }

  void add(const std::string& name, Dtype dtype, const std::vector<int64_t>& shape) {
    std::vector<std::byte> bytes(byte_count({name, dtype, shape}));
    for (size_t i = 0; i < bytes.size(); ++i) {
      state_ = state_ * 1664525 + 1013904223;
      // Fp8 codes stay below the NaN at 0x7F; as bf16 these are ordinary numbers.
      bytes[i] = static_cast<std::byte>(((state_ >> 24) & 0x80) | ((state_ >> 16) % 0x60));
    }
    if (dtype == Dtype::kF32) {
      const float scale = 0.001f * static_cast<float>(1 + state_ % 100);
      std::memcpy(bytes.data(), &scale, 4);
    }
    specs_.push_back({name, dtype, shape});
    data_.push_back(std::move(bytes));
  }
  void add_fp8(const std::string& module, int64_t n, int64_t k) {
    add(module + ".weight", Dtype::kE4m3, {n, k});
    add(module + ".weight_scale_inv", Dtype::kF32, {1, 1});
  }
  void write_file(const std::string& name) {
    SafetensorsWriter file(model_ + "/" + name, specs_, {});
    for (size_t i = 0; i < specs_.size(); ++i) file.write(i, 0, data_[i]);
    file.commit();
    specs_.clear();
    data_.clear();
  }

  // What a fp8 module stands for, rounded to bf16.
  static std::vector<float> values(const Checkpoint& source, const std::string& module) {
    float scale;
    std::memcpy(&scale, source.at(module + ".weight_scale_inv").bytes.data(), 4);
    std::vector<float> out;
    for (const std::byte code : source.at(module + ".weight").bytes)
      out.push_back(to_f32(to_bf16(e4m3_to_f32(static_cast<uint8_t>(code)) * scale)));
    return out;
  }
  static std::vector<float> bf16_values(const Tensor& tensor) {
    EXPECT_EQ(tensor.dtype, Dtype::kBf16) << tensor.name;
    std::vector<float> out;
    for (size_t i = 0; i + 1 < tensor.bytes.size(); i += 2) {
      bf16 value;
      std::memcpy(&value, tensor.bytes.data() + i, 2);
      out.push_back(to_f32(value));
    }
    return out;
  }

  std::string root_, model_;
  std::vector<TensorSpec> specs_;
  std::vector<std::vector<std::byte>> data_;
  uint32_t state_ = 1;
};

TEST_F(Plans, CompressedExpertsOfAnFp8Model) {
  const Checkpoint source(model_);
  const auto experts = open_experts(source);
  const std::string out = root_ + "/out";
  run_conversion(plan_compressed(source, experts.get(), {.output = out, .bits = 4, .group_size = 32}),
                 on_threads(2));
  const Checkpoint result(out);
  for (const char* part : {"0.gate_proj", "1.down_proj"}) {
    const std::string module = std::string("model.layers.1.mlp.experts.") + part;
    const int64_t n = std::string(part).ends_with("down_proj") ? kHidden : kInter, k = kHidden + kInter - n;
    const PackedSpec spec{4, 32, Dtype::kBf16};
    std::vector<uint32_t> words(static_cast<size_t>(n * spec.words(k)));
    std::vector<std::byte> scales(static_cast<size_t>(n * spec.groups(k) * 2));
    WeightError error;
    quantise_packed_rows(spec, n, k, values(source, module).data(), k, words.data(), scales.data(), error,
                         "w");
    const Tensor& packed = result.at(module + ".weight_packed");
    EXPECT_TRUE(std::ranges::equal(packed.bytes, std::as_bytes(std::span(words)))) << module;
    EXPECT_TRUE(std::ranges::equal(result.at(module + ".weight_scale").bytes, scales)) << module;
    EXPECT_EQ(packed.dtype, Dtype::kI32);
    EXPECT_EQ(packed.shape, (std::vector<int64_t>{n, k / 8}));
    const int64_t shape[] = {n, k};
    EXPECT_TRUE(
        std::ranges::equal(result.at(module + ".weight_shape").bytes, std::as_bytes(std::span(shape))));
  }
  // One quantisation only: what else was fp8, multi-token prediction included, is bf16 without scales.
  for (const char* module : {"model.layers.0.self_attn.q_proj", "model.layers.2.mlp.experts.1.down_proj"})
    EXPECT_EQ(bf16_values(result.at(std::string(module) + ".weight")), values(source, module)) << module;
  for (const Tensor& tensor : result.tensors()) EXPECT_FALSE(tensor.name.ends_with("_inv")) << tensor.name;
  EXPECT_EQ(result.files().size(), 2u);
  EXPECT_TRUE(fs::exists(out + "/tokenizer.json"));
  const Json& config = result.config_json().at("quantization_config");
  EXPECT_EQ(config.at("quant_method"), "compressed-tensors");
  EXPECT_EQ(config.at("config_groups").at("group_0").at("weights").at("group_size"), 32);
  EXPECT_THAT(config.at("ignore").get<std::vector<std::string>>(), Contains(R"(re:.*layers\.2\..*)"));
}

TEST_F(Plans, CompressedAllLinearsButIgnoredOnes) {
  const Checkpoint source(model_);
  const auto experts = open_experts(source);
  const std::string out = root_ + "/out";
  run_conversion(plan_compressed(source, experts.get(),
                                 {.output = out,
                                  .bits = 8,
                                  .group_size = -1,
                                  .all_linears = true,
                                  .ignore = {"layers.1.mlp.experts.1.up_proj"}}),
                 on_threads(1));
  const Checkpoint result(out);
  EXPECT_EQ(result.at("model.layers.0.self_attn.q_proj.weight_scale").shape,
            (std::vector<int64_t>{kHidden, 1}));
  EXPECT_TRUE(result.find("model.layers.0.mlp.up_proj.weight_packed"));
  EXPECT_TRUE(result.find("model.layers.1.mlp.gate.weight"));
  EXPECT_TRUE(result.find("model.layers.2.mlp.experts.0.up_proj.weight"));
  const std::string kept = "model.layers.1.mlp.experts.1.up_proj";
  EXPECT_EQ(bf16_values(result.at(kept + ".weight")), values(source, kept));
  EXPECT_FALSE(result.find(kept + ".weight_packed"));
  EXPECT_THAT(result.config_json().at("quantization_config").at("ignore").get<std::vector<std::string>>(),
              Contains(kept));
}

// Rounding while a model is read gives what a conversion writes and its reader finds, matrix by matrix.
TEST_F(Plans, RoundingWhileReadingIsWhatIsWritten) {
  const Checkpoint source(model_);
  const auto experts = open_experts(source);
  const std::string kept = "layers.1.mlp.experts.1.up_proj";
  for (const auto& [bits, group] : {std::pair(4, 32), {4, 64}, {8, 32}, {8, 64}, {8, -1}}) {
    const std::string out = root_ + text("/out-{}-{}", bits, group);
    const CompressedPlanOptions options{
        .output = out, .bits = bits, .group_size = group, .all_linears = true, .ignore = {kept}};
    run_conversion(plan_compressed(source, experts.get(), options), on_threads(1));
    const CompressedTargets targets(source, experts.get(), options);
    const ModelRounding rounding = packed_rounding(targets);
    const Checkpoint result(out);
    const auto expect_same = [&](const StoredMatrix& read, const StoredMatrix& rounded, int64_t first) {
      const int64_t count = read.n - first;
      if (rounded.name.find(kept) == std::string::npos) {
        const Matrix want = read.rows(first, count), got = rounded.rows(first, count);
        EXPECT_EQ(got.format, want.format) << rounded.name;
        EXPECT_EQ(got.codes, want.codes) << rounded.name;
        EXPECT_EQ(got.scales, want.scales) << rounded.name;
      } else {
        EXPECT_EQ(rounded.format.code, Code::kE4m3);  // as stored
      }
    };
    const auto written = open_experts(result);
    const auto rounded = requantised(*experts, rounding.experts, "rounded");
    for (const int expert : {0, 1})
      for (const Projection projection : kProjections)
        expect_same(*written->at(1, expert, projection), *rounded->at(1, expert, projection), expert * 16);
    int linears = 0;
    const auto stored = find_linears(source, [&](std::string_view name) { return experts->owns(name); });
    for (const LinearModule& module :
         find_linears(result, [&](std::string_view name) { return written->owns(name); })) {
      const auto from = std::find_if(stored.begin(), stored.end(), [&](const LinearModule& other) {
        return other.module == module.module;
      });
      ASSERT_NE(from, stored.end()) << module.module;
      const auto read = rounding.linears(open_linear(source, *from), module.module);
      EXPECT_EQ(!(read->format == open_linear(source, *from)->format), module.quantised) << module.module;
      if (!module.quantised) continue;
      expect_same(*open_linear(result, module), *read, 0);
      ++linears;
    }
    EXPECT_EQ(linears, 2);
  }
}

TEST_F(Plans, CompressedRefusesGroupsThatDoNotDivide) {
  const Checkpoint source(model_);
  const auto experts = open_experts(source);
  try {
    plan_compressed(source, experts.get(), {.output = root_ + "/out", .bits = 4, .group_size = 128});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("experts.0.down_proj: group size 128 does not divide its 64 columns"));
  }
  EXPECT_THROW(plan_compressed(source, experts.get(), {.output = root_ + "/out", .ignore = {"experts"}}),
               Error);
}

TEST_F(Plans, DequantKeepsFilesAndDropsScales) {
  const Checkpoint source(model_);
  const std::string out = root_ + "/out";
  run_conversion(plan_dequant(source, {.output = out}), on_threads(2));
  const Checkpoint result(out);
  size_t scales = 0;
  for (const Tensor& tensor : source.tensors()) {
    if (tensor.name.ends_with("_scale_inv")) {
      ++scales;
      continue;
    }
    const Tensor& now = result.at(tensor.name);
    EXPECT_EQ(now.shape, tensor.shape);
    EXPECT_EQ(fs::path(result.files()[static_cast<size_t>(now.file)]).filename(),
              fs::path(source.files()[static_cast<size_t>(tensor.file)]).filename());
    if (tensor.dtype == Dtype::kE4m3)
      EXPECT_EQ(bf16_values(now), values(source, tensor.name.substr(0, tensor.name.rfind('.'))));
    else
      EXPECT_TRUE(std::ranges::equal(now.bytes, tensor.bytes)) << tensor.name;
  }
  EXPECT_EQ(result.tensors().size() + scales, source.tensors().size());
  EXPECT_FALSE(result.config_json().contains("quantization_config"));
  EXPECT_EQ(result.config_json().at("num_hidden_layers"), 2);
  EXPECT_THROW(plan_dequant(result, {.output = root_ + "/again"}), Error);  // nothing quantised
}

TEST_F(Plans, DequantOfSomeFiles) {
  const Checkpoint source(model_);
  const std::string out = root_ + "/out";
  run_conversion(plan_dequant(source, {.output = out, .files = {"model-00001-of-00002.safetensors"}}),
                 on_threads(1));
  EXPECT_TRUE(fs::exists(out + "/model-00001-of-00002.safetensors"));
  EXPECT_FALSE(fs::exists(out + "/model-00002-of-00002.safetensors"));
  EXPECT_FALSE(fs::exists(out + "/model.safetensors.index.json"));
  try {
    plan_dequant(source, {.output = out, .files = {"other.safetensors"}});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("other.safetensors: not a file of"));
  }
}

TEST_F(Plans, DequantTransposesFusedBlocks) {
  // Two experts of [4, 64]: codes 0..7 of e2m1 in the low nibbles, 2 in the high ones, scales 2^(row).
  const std::string stem = "model.layers.0.mlp.experts.gate_up_proj";
  std::vector<std::byte> blocks(2 * 4 * 2 * 16), scales(2 * 4 * 2);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<std::byte>(0x20 | i % 8);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<std::byte>(127 + i / 2 % 4);
  const std::string folder = root_ + "/fused", out = root_ + "/out";
  fs::create_directories(folder);
  SafetensorsWriter file(
      folder + "/model.safetensors",
      {{stem + "_blocks", Dtype::kU8, {2, 4, 2, 16}}, {stem + "_scales", Dtype::kU8, {2, 4, 2}}}, {});
  file.write(0, 0, blocks);
  file.write(1, 0, scales);
  file.commit();
  const Checkpoint source(folder);
  run_conversion(plan_dequant(source, {.output = out}), on_threads(1));
  const Checkpoint result(out);
  const Tensor& now = result.at(stem);
  EXPECT_EQ(now.shape, (std::vector<int64_t>{2, 64, 4}));
  const std::vector<float> values = bf16_values(now);
  constexpr float kCodes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (size_t expert = 0; expert < 2; ++expert)
    for (size_t column = 0; column < 64; ++column)
      for (size_t row = 0; row < 4; ++row)
        EXPECT_EQ(values[(expert * 64 + column) * 4 + row],
                  (column % 2 == 0 ? kCodes[column / 2 % 8] : 1.0f) * static_cast<float>(1 << row));
}

}  // namespace
}  // namespace kt::inline weights
