// For tests: a small MoE checkpoint made of random numbers, a folder that goes away, and the simplest driver
// of a conversion plan.
#pragma once
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/file.h"
#include "formats/floats.h"
#include "weights/experts.h"
#include "weights/plans/conversion.h"

namespace kt::inline weights {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kt-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) ADD_FAILURE() << "no temporary folder";
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct TinyModel {
  int hidden = 256, inter = 128, experts = 2;
  int layers = 3;  // the first is dense; one more (MTP) follows the last
  Dtype dtype = Dtype::kBf16;
};

// Values of a stored tensor, drawn from its name: the same in every run.
inline std::vector<float> tiny_values(const std::string& name, int64_t count) {
  std::seed_seq seed(name.begin(), name.end());
  std::mt19937 random(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out)
    value = (static_cast<float>(random() >> 8) / 16777216.0f - 0.5f) * (random() % 64 == 0 ? 0.5f : 0.05f);
  return out;
}

inline std::string tiny_expert(int layer, int expert, const std::string& projection) {
  return "model.layers." + std::to_string(layer) + ".mlp.experts." + std::to_string(expert) + "." +
         projection + "_proj.weight";
}

// Writes model.safetensors, config.json, tokenizer.json and some code into the folder.
inline void write_tiny_model(const TinyModel& model, const std::string& folder) {
  std::filesystem::create_directories(folder);
  std::vector<TensorSpec> specs;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    specs.push_back({name, model.dtype, std::move(shape)});
  };
  add("model.embed_tokens.weight", {64, model.hidden});
  add("lm_head.weight", {64, model.hidden});
  for (int layer = 0; layer <= model.layers; ++layer) {
    add("model.layers." + std::to_string(layer) + ".input_layernorm.weight", {model.hidden});
    for (int expert = 0; layer > 0 && expert < model.experts; ++expert) {
      add(tiny_expert(layer, expert, "gate"), {model.inter, model.hidden});
      add(tiny_expert(layer, expert, "up"), {model.inter, model.hidden});
      add(tiny_expert(layer, expert, "down"), {model.hidden, model.inter});
    }
  }
  SafetensorsWriter writer(folder + "/model.safetensors", specs, {});
  for (size_t i = 0; i < specs.size(); ++i) {
    const std::vector<float> values = tiny_values(specs[i].name, elements(specs[i].shape));
    if (model.dtype == Dtype::kF32) {
      writer.write(i, 0, std::as_bytes(std::span(values)));
      continue;
    }
    std::vector<bf16> narrow;
    for (const float value : values) narrow.push_back(to_bf16(value));
    writer.write(i, 0, std::as_bytes(std::span(narrow)));
  }
  writer.commit();
  const Json config = {{"model_type", "deepseek_v3"},
                       {"architectures", {"DeepseekV3ForCausalLM"}},
                       {"hidden_size", model.hidden},
                       {"intermediate_size", 4 * model.inter},
                       {"moe_intermediate_size", model.inter},
                       {"n_routed_experts", model.experts},
                       {"num_experts_per_tok", 1},
                       {"num_hidden_layers", model.layers},
                       {"first_k_dense_replace", 1},
                       {"num_nextn_predict_layers", 1},
                       {"torch_dtype", "bfloat16"}};
  write_atomically(folder + "/config.json", config.dump(1));
  write_atomically(folder + "/tokenizer.json", std::string_view("{}"));
  write_atomically(folder + "/modeling_tiny.py", std::string_view("raise SystemExit\n"));
}

// Runs every piece in order; every byte of every tensor must be written exactly once.
class MemoryOutput final : public ShardOutput {
 public:
  explicit MemoryOutput(const std::vector<TensorSpec>& specs) : written_(specs.size()) {
    for (const TensorSpec& spec : specs) tensors.emplace_back(byte_count(spec));
  }
  void write(size_t tensor, uint64_t offset, std::span<const std::byte> bytes) override {
    ASSERT_LT(tensor, tensors.size());
    ASSERT_LE(offset + bytes.size(), tensors[tensor].size());
    std::ranges::copy(bytes, tensors[tensor].begin() + static_cast<int64_t>(offset));
    const bool fresh = written_[tensor].emplace(offset, bytes.size()).second;
    ASSERT_TRUE(fresh) << "tensor " << tensor << " byte " << offset;
  }
  void check_complete() const {
    for (size_t i = 0; i < written_.size(); ++i) {
      uint64_t end = 0;
      for (const auto& [offset, bytes] : written_[i]) {
        ASSERT_EQ(offset, end) << "tensor " << i;
        end += bytes;
      }
      ASSERT_EQ(end, tensors[i].size()) << "tensor " << i;
    }
  }

  std::vector<std::vector<std::byte>> tensors;

 private:
  std::vector<std::map<uint64_t, uint64_t>> written_;  // bytes by offset
};

// Runs the plan into its output folder; returns what the pieces reported, shard by shard.
inline std::vector<PieceReport> run_tiny_plan(const ConversionPlan& plan) {
  std::filesystem::create_directories(plan.output);
  std::vector<PieceReport> reports;
  Scratch scratch;
  for (const ShardPlan& shard : plan.shards) {
    MemoryOutput out(shard.tensors);
    PieceReport sum;
    for (const Piece& piece : shard.pieces) {
      PieceReport report;
      piece.run(out, scratch, report);
      sum.gate.add(report.gate);
      sum.up.add(report.up);
      sum.down.add(report.down);
      sum.output.add(report.output);
    }
    out.check_complete();
    reports.push_back(sum);
    if (shard.folder) {
      for (size_t i = 0; i < shard.tensors.size(); ++i) {
        const std::filesystem::path path = std::filesystem::path(plan.output) / shard.tensors[i].name;
        std::filesystem::create_directories(path.parent_path());
        // Not durable, unlike what the driver does: a test has no power cut to fear.
        std::ofstream(path, std::ios::binary)
            .write(reinterpret_cast<const char*>(out.tensors[i].data()), std::ssize(out.tensors[i]));
      }
      continue;
    }
    SafetensorsWriter writer(plan.output + "/" + shard.file, shard.tensors, shard.metadata);
    for (size_t i = 0; i < shard.tensors.size(); ++i) writer.write(i, 0, out.tensors[i]);
    writer.commit();
  }
  for (const SideFile& file : plan.side_files) {
    const std::string to = plan.output + "/" + file.name;
    if (file.from.empty())
      write_atomically(to, file.text);
    else
      std::filesystem::copy_file(file.from, to);
  }
  plan.check_source();
  return reports;
}

}  // namespace kt::inline weights
