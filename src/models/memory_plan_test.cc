// Plans of the demo model against the model itself, and the arithmetic of limits.
#include "models/memory_plan.h"

#include <gmock/gmock.h>

#include <cmath>

#include "base/error.h"
#include "models/families.h"
#include "models/testing/relative_error.h"
#include "models/transformer.h"
#include "nn/cpu_ops.h"

namespace kt::inline models {
namespace {

using testing::HasSubstr;

std::shared_ptr<Pool> pool_of(int nodes) {
  return std::make_shared<Pool>(PoolOptions{.threads = nodes,
                                            .nodes = nodes,
                                            .topology = Topology::synthetic(text("numa:{} core:1", nodes)),
                                            .pin = false});
}

struct Demo {
  Checkpoint checkpoint{KT_DEMO_MODEL};
  ModelSpec spec = describe_model(checkpoint.config_json(), KT_DEMO_MODEL);
  Transformer model(TransformerOptions options, int nodes = 1) const {
    return {checkpoint, spec, make_cpu_ops(pool_of(nodes)), options};
  }
  Transformer sizes(TransformerOptions options = {}, int nodes = 1) const {
    return {checkpoint, spec, make_cpu_ops(pool_of(nodes), {.sizes_only = true}), options};
  }
};

std::vector<float> logits_of(Transformer& model) {
  const std::vector<int32_t> tokens = {5, 100, 900, 17, 3000, 42};
  const int32_t page = 0;
  KvCache cache(model.keeps(), 1);
  const SequenceInput input{.tokens = tokens, .pages = &page, .logits = SequenceInput::Logits::kAll};
  std::vector<float> logits(tokens.size() * static_cast<size_t>(model.spec().vocab));
  model.forward(cache, {&input, 1}, logits.data());
  return logits;
}

TEST(MemoryPlan, IsThatOfTheLoadedModel) {
  const Demo demo;
  const MemoryRequest request{.sequences = 2, .context = 200};
  for (const int nodes : {1, 2}) {
    const Transformer real = demo.model({}, nodes), sizes = demo.sizes({}, nodes);
    const MemoryPlan plan = real.memory_plan(request), planned = sizes.memory_plan(request);
    const PlaceMemory a = plan.host(), b = planned.host();
    EXPECT_EQ(a.experts, b.experts);
    EXPECT_EQ(a.linears, b.linears);
    EXPECT_EQ(a.vectors, b.vectors);
    EXPECT_EQ(a.workspace, b.workspace);
    EXPECT_EQ(a.loading, b.loading);
    EXPECT_EQ(plan.weights_of_node(), planned.weights_of_node());
    EXPECT_EQ(a.experts + a.linears, real.packed_bytes());
    uint64_t nodes_sum = 0;
    for (const uint64_t bytes : plan.weights_of_node()) nodes_sum += bytes;
    EXPECT_EQ(nodes_sum, real.packed_bytes());
    EXPECT_EQ(b.kv_cache, KvCache(real.keeps(), 8).bytes());  // 200 tokens are 4 pages
    EXPECT_EQ(real.stored_bytes(), sizes.stored_bytes());
  }
}

TEST(MemoryPlan, GrowsWithItsUse) {
  const Demo demo;
  const Transformer sizes = demo.sizes();
  const MemoryPlan one = sizes.memory_plan({.context = 64}), two = sizes.memory_plan({.context = 128}),
                   many = sizes.memory_plan({.sequences = 3, .context = 64});
  EXPECT_EQ(two.host().kv_cache, 2 * one.host().kv_cache);
  EXPECT_EQ(many.host().kv_cache, 3 * one.host().kv_cache);
  EXPECT_GT(many.host().workspace, one.host().workspace);
  EXPECT_EQ(one.weights(), many.weights());
  EXPECT_GE(one.peak(), one.running());
  EXPECT_THAT(largest_parts(one, 1), HasSubstr("MiB"));
}

TEST(MemoryPlan, ReadsNoValues) {
  const Demo demo;
  Transformer sizes = demo.sizes();
  EXPECT_THROW(logits_of(sizes), Error);
}

// Rounding weights to int8 changes each by 0.4 % of the largest of its row at most, about 1 % of its size as
// a relative error; over six layers of several products below 10 %, and not nothing.
TEST(LinearFormat, Int8IsCloseAndSmaller) {
  const Demo demo;
  Transformer stored = demo.model({.precision = Precision::kF32, .kv_type = KvType::kF32});
  const std::vector<float> expected = logits_of(stored);
  Transformer same = demo.model(
      {.precision = Precision::kF32, .kv_type = KvType::kF32, .linear_format = format_named("bf16")});
  EXPECT_EQ(logits_of(same), expected);
  Transformer rounded = demo.model(
      {.precision = Precision::kF32, .kv_type = KvType::kF32, .linear_format = format_named("int8")});
  const double error = relative_error(logits_of(rounded), expected);
  EXPECT_GT(error, 1e-4);
  EXPECT_LT(error, 0.1);
  const PlaceMemory before = stored.memory_plan({}).host(), after = rounded.memory_plan({}).host();
  EXPECT_EQ(after.experts, before.experts);
  EXPECT_LT(after.linears, before.linears * 3 / 4);
  EXPECT_LT(rounded.packed_bytes(), stored.packed_bytes());
}

TEST(LinearFormat, ShapesThatDoNotFitAreNamed) {
  const Demo demo;  // q_b has 128 columns
  try {
    demo.sizes({.linear_format = format_named("q4_k")});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    EXPECT_THAT(error.what(), HasSubstr("q_b_proj: q4_k needs a multiple of 256 columns, got [768, 128]"));
  }
}

TEST(Work, TheSlowerResourceLimits) {
  const Amount work{.bytes = 100, .integer_operations = 40, .float_operations = 30};
  Limit limit = limit_of(work, {.read_bytes = 10, .integer_operations = 20, .float_operations = 10});
  EXPECT_EQ(limit.seconds, 10);
  EXPECT_STREQ(limit.which, "memory");
  limit = limit_of(work, {.read_bytes = 100, .integer_operations = 20, .float_operations = 10});
  EXPECT_EQ(limit.seconds, 5);  // 40 / 20 + 30 / 10
  EXPECT_STREQ(limit.which, "multiply");
  EXPECT_EQ(limit_of(work, {.read_bytes = 10}).seconds, 10);
}

// Every term by hand, from the demo's config: hidden 256, 8 heads, ranks 128 and 64, nope 64, rope 32, v 64,
// one dense layer of 512, five of 16 experts of 128 with top 4 and a shared one, vocabulary 4096; all bf16.
TEST(Work, OfOneDecodedToken) {
  const Demo demo;
  const Transformer sizes = demo.sizes();
  const double attention = 128 * 256 + 8 * 96 * 128 + 96 * 256 + 256 * 8 * 64 + 8 * (64 + 64) * 64;
  const double dense = 6 * attention + 3.0 * 512 * 256 + 5 * (16 * 256 + 3.0 * 128 * 256) + 4096.0 * 256;
  const double experts = 5 * 4 * 3.0 * 128 * 256;
  const double keys = 6 * 100 * 96;
  const Amount work = sizes.decode_work(1, 100).total();
  // Kept by the checkpoint in f32: routers.
  EXPECT_NEAR(work.bytes, 2 * (dense + experts + keys), 5 * 16 * 256 * 2 + 1);
  EXPECT_EQ(work.integer_operations, 0);
  EXPECT_NEAR(work.float_operations, 2 * (dense + experts) + 6 * 2.0 * 100 * 8 * (96 + 64), 1);
  const Amount two = sizes.decode_work(2, 100).total();
  EXPECT_NEAR(two.float_operations, 2 * work.float_operations, 1);
  EXPECT_LT(two.bytes, 2 * work.bytes);
}

TEST(Work, IsCountedAsStepsRun) {
  const Demo demo;
  Transformer model = demo.model({});
  EXPECT_EQ(model.work().total().bytes, 0);
  const std::vector<int32_t> tokens = {5};
  const int32_t page = 0;
  KvCache cache(model.keeps(), 1);
  const SequenceInput input{.tokens = tokens, .pages = &page};
  std::vector<float> logits(static_cast<size_t>(model.spec().vocab));
  model.forward(cache, {&input, 1}, logits.data());
  const Amount expected = model.decode_work(1, 1).total();
  EXPECT_NEAR(model.work().total().bytes, expected.bytes, 1);
  EXPECT_NEAR(model.work().total().float_operations, expected.float_operations, 1);
  // Steps without logits count too, but for the head.
  const Work before = model.work();
  const SequenceInput silent{
      .tokens = tokens, .position = 1, .pages = &page, .logits = SequenceInput::Logits::kNone};
  model.forward(cache, {&silent, 1}, nullptr);
  Work more = model.work();
  more -= before;
  EXPECT_NEAR(more.total().bytes, model.decode_work(1, 2).total().bytes - 2.0 * 4096 * 256, 1);
}

}  // namespace
}  // namespace kt::inline models
