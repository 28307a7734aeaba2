#include "weights/kt/kt_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "weights/kt/kt_arrays.h"
#include "weights/kt/kt_names.h"
#include "weights/testing/tiny_model.h"

namespace kt::inline weights {
namespace {

// Columns [first, first + count) of an f32 matrix, as a stored part sees them.
std::vector<float> columns(const std::vector<float>& values, int64_t n, int64_t k, int64_t first,
                           int64_t count) {
  std::vector<float> out;
  for (int64_t row = 0; row < n; ++row)
    out.insert(out.end(), values.begin() + row * k + first, values.begin() + row * k + first + count);
  return out;
}

std::vector<float> bf16_values(const std::string& name, int64_t count) {
  std::vector<float> out = tiny_values(name, count);
  for (float& value : out) value = to_f32(to_bf16(value));
  return out;
}

// The projection as it must come back: gate and up per row, down per row and part, by formats/.
Matrix expected(const TinyModel& model, int bits, int parts, int layer, int expert, Projection projection) {
  const bool down = projection == Projection::kDown;
  const int64_t n = down ? model.hidden : model.inter, k = down ? model.inter : model.hidden;
  const std::vector<float> values =
      bf16_values(tiny_expert(layer, expert, std::string(name_of(projection))), n * k);
  const Format format = format_named(bits == 4 ? "int4" : "int8");
  if (!down || parts == 1) return quantise(format, values, n, k);
  Format cut = format;
  cut.span.k = static_cast<int>(k / parts);
  Matrix out(cut, n, k);
  for (int part = 0; part < parts; ++part) {
    const Matrix one = quantise(format, columns(values, n, k, part * cut.span.k, cut.span.k), n, cut.span.k);
    for (int64_t row = 0; row < n; ++row) {
      std::memcpy(out.codes.data() + row * k + part * cut.span.k, one.codes.data() + row * cut.span.k,
                  static_cast<size_t>(cut.span.k));
      std::memcpy(out.scales.data() + (row * parts + part) * 4, one.scales.data() + row * 4, 4);
    }
  }
  return out;
}

void expect_experts(const ExpertSource& source, const TinyModel& model, int bits, int parts) {
  EXPECT_EQ(source.layers(), (std::vector<int>{1, 2}));
  ASSERT_EQ(source.experts(), model.experts);
  ASSERT_EQ(source.hidden(), model.hidden);
  ASSERT_EQ(source.inter(), model.inter);
  for (const int layer : source.layers()) {
    for (int expert = 0; expert < model.experts; ++expert) {
      for (const Projection projection : kProjections) {
        const Matrix want = expected(model, bits, parts, layer, expert, projection);
        const auto stored = source.at(layer, expert, projection);
        const Matrix got = stored->matrix();
        ASSERT_EQ(got.format, want.format);
        ASSERT_EQ(got.codes, want.codes) << stored->name;
        ASSERT_EQ(got.scales, want.scales) << stored->name;
        const int64_t first = want.n / 3, count = want.n / 2;
        const Matrix some = stored->rows(first, count);
        EXPECT_TRUE(std::equal(some.codes.begin(), some.codes.end(), want.codes.begin() + first * want.k));
      }
    }
  }
}

struct Case {
  TinyModel model;
  int bits, parts;
  bool merge;
};

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const TinyModel& model : {TinyModel{}, TinyModel{.hidden = 100, .inter = 70},
                                 TinyModel{.hidden = 3840, .inter = 160, .experts = 1},
                                 TinyModel{.hidden = 64, .inter = 32, .dtype = Dtype::kF32}})
    for (const int bits : {4, 8})
      for (const int parts : {1, 2})
        for (const bool merge : {true, false}) out.push_back({model, bits, parts, merge});
  return out;
}

TEST(KtPlan, ComesBackAsTheSameCodes) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(testing::Message() << c.model.hidden << " x " << c.model.inter << ", int" << c.bits << ", "
                                    << c.parts << " parts, merge " << c.merge);
    const TemporaryFolder folder;
    write_tiny_model(c.model, folder / "in");
    const Checkpoint checkpoint(folder / "in");
    const auto source = open_experts(checkpoint);
    const ConversionPlan plan = plan_kt_weights(
        checkpoint, *source,
        {.output = folder / "out", .bits = c.bits, .parts = c.parts, .merge = c.merge, .tool = "kt test"});
    run_tiny_plan(plan);
    EXPECT_TRUE(is_kt_weights(folder / "out"));
    EXPECT_FALSE(is_kt_weights(folder / "in"));
    expect_experts(*open_kt_weights(folder / "out"), c.model, c.bits, c.parts);
    // Without a config the metadata or kt_weights.json say the same.
    std::filesystem::remove(folder / "out/config.json");
    expect_experts(*open_kt_weights(folder / "out"), c.model, c.bits, c.parts);
  }
}

TEST(KtPlan, OtherTensorsAndSideFiles) {
  const TemporaryFolder folder;
  write_tiny_model({}, folder / "in");
  const Checkpoint checkpoint(folder / "in");
  const auto source = open_experts(checkpoint);
  const ConversionPlan plan = plan_kt_weights(checkpoint, *source, {.output = folder / "out", .tool = "t"});
  ASSERT_EQ(plan.shards.size(), 3u);
  EXPECT_EQ(plan.shards[0].file, "model-00001-of-00003.safetensors");
  EXPECT_EQ(plan.shards[2].file, "model-00003-of-00003.safetensors");
  EXPECT_EQ(plan.shards[0].layer, 1);
  EXPECT_EQ(plan.shards[2].layer, -1);
  EXPECT_EQ(plan.shards[0].tensors[0].name, "blk.1.ffn_gate_exps.0.numa.0.weight");
  EXPECT_EQ(plan.shards[0].metadata.at("kt.layout"), "amx-int4");
  EXPECT_EQ(plan.shards[0].metadata.at("kt.source"), "bf16");
  run_tiny_plan(plan);
  const Checkpoint written(folder / "out");
  for (const char* name : {"embed_tokens.weight", "lm_head.weight", "blk.0.input_layernorm.weight",
                           "blk.3.input_layernorm.weight"}) {
    const std::string old = std::string(name) == "lm_head.weight" ? name
                            : std::string(name).starts_with("blk.")
                                ? "model.layers." + std::string(name).substr(4)
                                : "model." + std::string(name);
    const auto got = written.at(name).bytes, want = checkpoint.at(old).bytes;
    EXPECT_TRUE(std::ranges::equal(got, want)) << name;
  }
  EXPECT_EQ(written.find("blk.3.mlp.experts.0.up_proj.weight"), nullptr) << "MTP experts are left out";
  std::vector<std::string> names;
  for (const SideFile& file : plan.side_files) names.push_back(file.name);
  EXPECT_THAT(names, testing::ElementsAre("config.json", "tokenizer.json"));
}

TEST(KtPlan, MergeEqualsDirectConversion) {
  for (const bool backward : {false, true}) {
    for (const TinyModel& model : {TinyModel{}, TinyModel{.hidden = 100, .inter = 70}}) {
      const TemporaryFolder folder;
      write_tiny_model(model, folder / "in");
      const Checkpoint checkpoint(folder / "in");
      const auto source = open_experts(checkpoint);
      KtPlanOptions options{.output = folder / "direct", .parts = 2, .backward = backward, .tool = "kt test"};
      const ConversionPlan direct = plan_kt_weights(checkpoint, *source, options);
      run_tiny_plan(direct);
      options.output = folder / "folder";
      options.merge = false;
      run_tiny_plan(plan_kt_weights(checkpoint, *source, options));
      run_tiny_plan(plan_merge({.folder = folder / "folder",
                                .original = folder / "in",
                                .output = folder / "merged",
                                .tool = "another tool"}));
      for (const ShardPlan& shard : direct.shards) {
        const MappedFile want(folder / ("direct/" + shard.file)), got(folder / ("merged/" + shard.file));
        EXPECT_TRUE(std::ranges::equal(want.bytes(), got.bytes())) << shard.file;
      }
      const ConversionPlan few = plan_merge({.folder = folder / "folder",
                                             .original = folder / "in",
                                             .output = folder / "few",
                                             .max_tensors = 5,
                                             .tool = "t"});
      for (const ShardPlan& shard : few.shards) EXPECT_LE(shard.tensors.size(), 5u);
      run_tiny_plan(few);
      const Checkpoint a(folder / "direct"), b(folder / "few");
      ASSERT_EQ(a.tensors().size(), b.tensors().size());
      for (const Tensor& tensor : a.tensors())
        EXPECT_TRUE(std::ranges::equal(tensor.bytes, b.at(tensor.name).bytes)) << tensor.name;
    }
  }
}

// Backward copies are the transposed parts, quantised by their own rows.
TEST(KtPlan, BackwardCopies) {
  const TinyModel model{.hidden = 160, .inter = 128, .experts = 1};
  const TemporaryFolder folder;
  write_tiny_model(model, folder / "in");
  const Checkpoint checkpoint(folder / "in");
  const auto source = open_experts(checkpoint);
  const ConversionPlan plan = plan_kt_weights(
      checkpoint, *source, {.output = folder / "out", .bits = 8, .parts = 2, .backward = true, .tool = "t"});
  run_tiny_plan(plan);
  const Checkpoint written(folder / "out");
  KtModel kt;
  kt.bits = 8;
  kt.hidden = model.hidden;
  kt.inter = model.inter;
  kt.parts = 2;
  for (const Projection projection : kProjections) {
    const bool down = projection == Projection::kDown;
    const int64_t n = down ? model.hidden : model.inter, k = down ? model.inter : model.hidden;
    const std::vector<float> values = bf16_values(tiny_expert(1, 0, std::string(name_of(projection))), n * k);
    std::vector<float> transposed(values.size());
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < k; ++j)
        transposed[static_cast<size_t>(j * n + i)] = values[static_cast<size_t>(i * k + j)];
    for (int part = 0; part < 2; ++part) {
      KtName name{.layer = 1, .projection = projection, .backward = true, .part = part};
      const KtShape shape = kt_part_shape(kt, name);
      EXPECT_EQ(shape.n, down ? model.inter / 2 : model.hidden);
      EXPECT_EQ(shape.k, down ? model.hidden : model.inter / 2);
      const std::vector<float> slice = down ? std::vector(transposed.begin() + part * shape.n * shape.k,
                                                          transposed.begin() + (part + 1) * shape.n * shape.k)
                                            : columns(transposed, k, n, part * shape.k, shape.k);
      const Matrix want = quantise(format_named("int8"), slice, shape.n, shape.k);
      std::vector<uint8_t> codes(static_cast<size_t>(shape.n * shape.k));
      kt_unpack_rows(shape, written.at(kt_tensor_name(name)).bytes, 0, shape.n, codes.data(), shape.k);
      EXPECT_EQ(codes, want.codes) << kt_tensor_name(name);
      name.scale = true;
      const auto scales = written.at(kt_tensor_name(name)).bytes;
      EXPECT_EQ(std::memcmp(scales.data(), want.scales.data(), want.scales.size()), 0);
    }
  }
  expect_experts(*open_kt_weights(folder / "out"), model, 8, 2);
}

TEST(KtPlan, ReportsErrors) {
  const TemporaryFolder folder;
  write_tiny_model({}, folder / "in");
  const Checkpoint checkpoint(folder / "in");
  const auto source = open_experts(checkpoint);
  const auto run = [&](int bits, int parts, const std::string& out) {
    return run_tiny_plan(plan_kt_weights(
        checkpoint, *source,
        {.output = folder / out, .bits = bits, .parts = parts, .report = true, .tool = "t"}))[0];
  };
  const PieceReport four = run(4, 1, "4"), again = run(4, 1, "4b"), eight = run(8, 2, "8");
  EXPECT_EQ(four.output.noise, again.output.noise);
  EXPECT_EQ(four.output.weights, 2 * 256 * 8);  // experts, outputs, inputs
  EXPECT_EQ(four.gate.weights, 2 * 256 * 128);
  // Uniform weights with rows that reach ten times as far: int4's step is 1/7 of the reach, int8's 1/127.
  EXPECT_GT(four.gate.relative(), 0.05);
  EXPECT_LT(eight.gate.relative(), 0.03);
  EXPECT_GT(eight.down.relative(), 0.0005);
  EXPECT_GT(four.output.relative(), four.gate.relative() / 2);
  EXPECT_LT(eight.output.relative(), four.output.relative() / 8);
  EXPECT_GT(eight.output.relative(), 0);
}

TEST(KtPlan, RefusesPartsThatDoNotDivide) {
  const TemporaryFolder folder;
  write_tiny_model({.inter = 96}, folder / "in");
  const Checkpoint checkpoint(folder / "in");
  const auto source = open_experts(checkpoint);
  EXPECT_EQ(error_of([&] {
              plan_kt_weights(checkpoint, *source, {.output = folder / "out", .parts = 5, .tool = "t"});
            }),
            "5 parts do not divide an intermediate size of 96: 1, 2, 3, 4, 6, 8, 12, 16 would");
}

TEST(KtPlan, SettingsTellRunsApart) {
  const TemporaryFolder folder;
  write_tiny_model({}, folder / "in");
  const Checkpoint checkpoint(folder / "in");
  const auto source = open_experts(checkpoint);
  const auto settings = [&](const KtPlanOptions& options) {
    return plan_kt_weights(checkpoint, *source, options).settings;
  };
  const Json first = settings({.output = "a", .tool = "t"});
  EXPECT_EQ(first, settings({.output = "b", .report = true, .tool = "t"}));
  EXPECT_NE(first, settings({.output = "a", .bits = 8, .tool = "t"}));
  EXPECT_NE(first, settings({.output = "a", .parts = 2, .tool = "t"}));
  EXPECT_NE(first, settings({.output = "a", .rounding = Rounding::kDirect, .tool = "t"}));
  EXPECT_NE(first, settings({.output = "a", .backward = true, .tool = "t"}));
  EXPECT_NE(first, settings({.output = "a", .merge = false, .tool = "t"}));
  EXPECT_NE(first, settings({.output = "a", .tool = "u"}));
}

TEST(KtPlan, NamesOfOtherTensors) {
  EXPECT_EQ(kt_other_name("model.layers.3.mlp.gate.weight"), "blk.3.mlp.gate.weight");
  EXPECT_EQ(kt_other_name("model.norm.weight"), "norm.weight");
  EXPECT_EQ(kt_other_name("lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(kt_other_name("language_model.model.layers.1.x"), "language_model.blk.1.x");
  EXPECT_EQ(kt_other_name("model.visual.x"), "visual.x");
}

// What the established converter wrote for two experts of layer 1.
TEST(KtPlan, EqualsTheEstablishedFiles) {
  const std::string fixtures = KT_FIXTURES "/kt-weights";
  const Checkpoint checkpoint(KT_DEMO_MODEL);
  const auto source = open_experts(checkpoint);
  for (const int bits : {4, 8}) {
    const TemporaryFolder folder;
    ConversionPlan plan =
        plan_kt_weights(checkpoint, *source, {.output = folder / "out", .bits = bits, .tool = "t"});
    ASSERT_EQ(plan.shards[0].layer, 1);
    MemoryOutput out(plan.shards[0].tensors);
    Scratch scratch;
    PieceReport report;
    for (size_t i = 0; i < 2; ++i) plan.shards[0].pieces[i].run(out, scratch, report);
    const Checkpoint fixture(fixtures + (bits == 4 ? "/int4" : "/int8") + "-layer1-experts01.safetensors");
    ASSERT_EQ(fixture.tensors().size(), 12u);
    size_t compared = 0;
    for (size_t i = 0; i < plan.shards[0].tensors.size(); ++i) {
      const Tensor* want = fixture.find(plan.shards[0].tensors[i].name);
      if (want == nullptr) continue;
      ++compared;
      EXPECT_TRUE(std::ranges::equal(out.tensors[i], want->bytes)) << want->name;
    }
    EXPECT_EQ(compared, 12u);
  }
  const ConversionPlan files =
      plan_kt_weights(checkpoint, *source, {.output = "/nowhere", .merge = false, .tool = "t"});
  MemoryOutput out(files.shards[0].tensors);
  Scratch scratch;
  PieceReport report;
  for (size_t i = 0; i < 2; ++i) files.shards[0].pieces[i].run(out, scratch, report);
  for (size_t i = 0; i < 12; ++i) {
    const MappedFile want(fixtures + "/folder/" + files.shards[0].tensors[i].name);
    EXPECT_TRUE(std::ranges::equal(out.tensors[i], want.bytes())) << want.path();
  }
}

}  // namespace
}  // namespace kt::inline weights
