#include "nn/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "formats/known_formats.h"
#include "nn/testing/reference_layer.h"

namespace kt::inline nn {
namespace {

using ::testing::HasSubstr;

class EveryFormat : public ::testing::TestWithParam<NamedFormat> {};

TEST_P(EveryFormat, MatchesDoubleReference) {
  const Layer layer({5, 256, 256}, GetParam().format, 1);
  for (const int tokens : {1, 3, 30}) {
    const Batch batch(tokens, 3, layer.shape, 2);
    const auto want = reference(layer, batch, {});
    for (const Precision precision : {Precision::kDefault, Precision::kBf16, Precision::kF32}) {
      const Experts experts = make(layer, pool_of(2), {.precision = precision});
      EXPECT_LT(relative_error(run(experts, batch), want),
                tolerance(precision == Precision::kBf16 ? format_named("bf16") : layer.format, precision))
          << tokens << " tokens, precision " << static_cast<int>(precision) << ", "
          << experts.describe_plan(tokens);
    }
  }
}

TEST_P(EveryFormat, SameBitsForAnyThreadCount) {
  const Layer layer({4, 256, 512}, GetParam().format, 3);
  for (const int nodes : {1, 2}) {
    for (const int tokens : {1, 9, 70}) {
      const Batch batch(tokens, 2, layer.shape, 4);
      const auto want = run(make(layer, pool_of(2, nodes)), batch);
      for (const int threads : {nodes == 1 ? 1 : 2, 3, 5})
        EXPECT_EQ(run(make(layer, pool_of(threads, nodes)), batch), want)
            << threads << " threads, " << nodes << " nodes";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, EveryFormat, ::testing::ValuesIn(kFormats.begin(), kFormats.end()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Experts, OddSizesAndActivations) {
  const Activation kinds[] = {{},
                              {.limit = 0.5f},
                              {.limit = 7, .alpha = 1.702f},
                              {.kind = ActivationKind::kGeluTanh},
                              {.kind = ActivationKind::kGeluErf},
                              {.kind = ActivationKind::kRelu}};
  const Layer layer({3, 97, 75}, format_named("int4_g32"), 5, true);
  const Batch batch(11, 2, layer.shape, 6);
  for (const Activation& f : kinds) {
    const Experts experts = make(layer, pool_of(2), {.activation = f, .precision = Precision::kF32});
    EXPECT_LT(relative_error(run(experts, batch), reference(layer, batch, f)), 3e-6)
        << static_cast<int>(f.kind) << " " << f.alpha;
  }
}

// Every slot reads a row of its own: as many tokens with one slot each, added up.
TEST(Experts, RowsOfEachSlot) {
  const Layer layer({4, 96, 80}, format_named("int8"), 15);
  for (const int tokens : {1, 5, 70}) {
    const Batch slots(3 * tokens, 1, layer.shape, 16);
    const Experts experts = make(layer, pool_of(2), {.precision = Precision::kF32});
    const std::vector<float> apart = run(experts, slots);
    std::vector<float> out(static_cast<size_t>(tokens) * 96), want(out.size());
    for (size_t i = 0; i < apart.size(); ++i) want[i / 288 * 96 + i % 96] += apart[i];
    ForwardArgs args = slots.args(out.data());
    args.tokens = tokens;
    args.top_k = 3;
    args.input_each = true;
    experts.forward(args);
    for (size_t i = 0; i < out.size(); ++i)
      ASSERT_NEAR(out[i], want[i], 1e-5 * std::fabs(want[i]) + 1e-5) << i;
  }
}

TEST(Experts, ShardsForAnyNodeCount) {
  for (const char* name : {"int8", "int4", "bf16", "fp8", "q4_k", "int4_g128"}) {
    const Layer layer({3, 256, 1280}, format_named(name), 7, true);
    const Batch batch(5, 2, layer.shape, 8);
    const auto want = reference(layer, batch, {});
    for (const int nodes : {1, 2, 3, 4, 7}) {  // 7: more nodes than spans of some formats
      const Experts experts = make(layer, pool_of(nodes + 1, nodes), {.precision = Precision::kF32});
      EXPECT_LT(relative_error(run(experts, batch), want), 3e-6) << name << " on " << nodes << " nodes";
      EXPECT_LT(relative_error(run(make(layer, pool_of(nodes, nodes)), batch), want),
                tolerance(layer.format, Precision::kDefault));
    }
  }
}

TEST(Experts, SyntheticTopologies) {
  const Layer layer({2, 128, 256}, format_named("int8"), 9);
  const Batch batch(4, 2, layer.shape, 10);
  const auto want = reference(layer, batch, {});
  for (const char* spec : {"pack:2 numa:2 core:2 pu:2", "numa:3 core:1", "numa:1 core:4 pu:1"}) {
    const Topology topology = Topology::synthetic(spec);
    const int nodes = static_cast<int>(topology.nodes.size());
    const auto pool =
        std::make_shared<Pool>(PoolOptions{.threads = nodes, .nodes = nodes, .topology = topology});
    EXPECT_LT(relative_error(run(make(layer, pool), batch), want), 0.03) << spec;
  }
}

TEST(Experts, SkipsMaskedAndForeignExperts) {
  const Layer layer({4, 64, 64}, format_named("int8"), 11);
  Batch batch(6, 2, layer.shape, 12);
  batch.ids = {-1, 0, 4, 99, 1, 2, -7, std::numeric_limits<int32_t>::max(), 3, 3, 0, 1};
  const Experts experts = make(layer, pool_of(2), {.precision = Precision::kF32});
  const auto out = run(experts, batch);
  EXPECT_LT(relative_error(out, reference(layer, batch, {})), 2e-6);
  for (const int token : {1, 3})
    for (int h = 0; h < 64; ++h) EXPECT_EQ(out[token * 64 + h], 0.0f);
  std::vector<uint8_t> skip = {0, 1, 0, 1};
  EXPECT_LT(relative_error(run(experts, batch, skip.data()), reference(layer, batch, {}, skip.data())), 2e-6);
  skip = {1, 1, 1, 1};  // the mask may change between calls
  for (const float x : run(experts, batch, skip.data())) EXPECT_EQ(x, 0.0f);
  EXPECT_EQ(run(experts, batch), out);
}

TEST(Experts, ElementTypesAndStrides) {
  const Layer layer({3, 80, 48}, format_named("bf16"), 13);
  const Batch batch(7, 2, layer.shape, 14);
  const Experts experts = make(layer, pool_of(2), {.precision = Precision::kF32});
  const auto want = run(experts, batch);
  const int stride = 83;
  std::vector<uint16_t> in(7 * stride, 0x7fff), out(7 * stride, 0x1234);
  for (const Real type : {Real::kBf16, Real::kF16}) {
    for (int t = 0; t < 7; ++t)
      for (int h = 0; h < 80; ++h) {
        const float x = batch.input[t * 80 + h];
        in[t * stride + h] = type == Real::kBf16 ? to_bf16(x).bits : to_f16(x).bits;
      }
    ForwardArgs args = batch.args(out.data());
    std::vector<int64_t> ids(batch.ids.begin(), batch.ids.end());
    args.ids = nullptr;
    args.ids64 = ids.data();
    args.input = in.data();
    args.input_type = args.output_type = type;
    args.input_stride = args.output_stride = stride;
    experts.forward(args);
    for (int t = 0; t < 7; ++t) {
      for (int h = 0; h < 80; ++h) {
        const uint16_t bits = out[t * stride + h];
        const float got = type == Real::kBf16 ? to_f32(bf16{bits}) : to_f32(f16{bits});
        // bf16 inputs are the same numbers; f16 keeps 11 bits of numbers that have 8
        EXPECT_NEAR(got, want[t * 80 + h],
                    std::fabs(want[t * 80 + h]) * (type == Real::kBf16 ? 0x1p-8 : 0x1p-11) + 1e-6);
      }
      EXPECT_EQ(out[t * stride + 80], 0x1234) << "wrote past the row";
    }
  }
}

TEST(Experts, TokenCounts) {
  const Layer layer({8, 64, 64}, format_named("int4"), 15);
  const Experts experts = make(layer, pool_of(2), {.max_tokens = 600});
  run(experts, Batch(0, 2, layer.shape, 16));
  const Batch many(600, 2, layer.shape, 17);
  const auto all = run(experts, many);
  EXPECT_LT(relative_error(all, reference(layer, many, {})), 0.03);
  // A token's result does not depend on the batch around it, but for a tile unit, which rounds tokens otherwise
  // where they are many.
  const Kernels& best = best_kernels();
  const bool same = best.many_spans[packing_for(layer.format, 64, 64, best.fragment, "w").layout];
  for (const int t : {0, 299, 599}) {
    Batch one(1, 2, layer.shape, 0);
    one.input.assign(many.input.begin() + t * 64, many.input.begin() + (t + 1) * 64);
    one.ids.assign(many.ids.begin() + t * 2, many.ids.begin() + t * 2 + 2);
    one.weights.assign(many.weights.begin() + t * 2, many.weights.begin() + t * 2 + 2);
    const std::vector<float> alone = run(experts, one),
                             among(all.begin() + t * 64, all.begin() + (t + 1) * 64);
    if (same)
      EXPECT_EQ(alone, among);
    else
      EXPECT_LT(relative_error(alone, std::vector<double>(among.begin(), among.end())), 0.03);
  }
}

TEST(Experts, ManyInstancesShareAWorkspaceAndAPool) {
  const auto pool = pool_of(2);
  const auto space = std::make_shared<Workspace>();
  const Layer a({3, 64, 128}, format_named("int8"), 18), b({2, 192, 64}, format_named("q8_0"), 19);
  const auto build = [&](const Layer& layer) {
    ExpertsOptions options;
    options.gate = options.up = options.down = layer.format;
    Experts e(pool, space, layer.shape, options);
    for (int i = 0; i < layer.shape.experts; ++i) e.load(i, layer.weights(i));
    return e;
  };
  const Experts one = build(a), two = build(b);
  const Batch x(3, 2, a.shape, 20), y(50, 1, b.shape, 21);
  const auto want_x = run(one, x), want_y = run(two, y);
  const auto loop = [&](const Experts& e, const Batch& batch, const std::vector<float>& want, bool& same) {
    same = true;
    for (int i = 0; i < 50; ++i) same = same && run(e, batch) == want;
  };
  bool same_x = false, same_y = false;
  std::thread other([&] { loop(one, x, want_x, same_x); });
  loop(two, y, want_y, same_y);
  other.join();
  EXPECT_TRUE(same_x);
  EXPECT_TRUE(same_y);
}

RowReader reader_of(const Matrix& whole) {
  return {.format = whole.format, .n = whole.n, .k = whole.k, .rows = [&whole](int64_t first, int64_t count) {
            std::vector<float> values(static_cast<size_t>(whole.n * whole.k));
            dequantise(whole.view(), values);
            return quantise(whole.format,
                            std::span(values).subspan(static_cast<size_t>(first * whole.k),
                                                      static_cast<size_t>(count * whole.k)),
                            count, whole.k);
          }};
}

// bf16 comes back from its values to the bit, so a reader can be made of them. Rows of several pieces, a last
// block that is not full, and one, two and three nodes.
TEST(Experts, LoadedInPiecesTheyAreTheSame) {
  const Layer layer({.experts = 2, .hidden = 1000, .inter = 330}, format_named("bf16"), 5, true);
  const Batch batch(3, 2, layer.shape, 6);
  for (const int nodes : {1, 2, 3}) {
    const auto pool = std::make_shared<Pool>(PoolOptions{
        .threads = nodes, .nodes = nodes, .topology = Topology::synthetic("numa:3 core:1"), .pin = false});
    const ExpertsOptions options{.gate = layer.format, .up = layer.format, .down = layer.format};
    const auto workspace = std::make_shared<Workspace>();
    Experts whole(pool, workspace, layer.shape, options), pieces(pool, workspace, layer.shape, options),
        together(pool, workspace, layer.shape, options);
    for (int e = 0; e < 2; ++e) {
      const ExpertWeights w = layer.weights(e);
      const ExpertRows rows{.gate = reader_of(layer.gate[e]),
                            .up = reader_of(layer.up[e]),
                            .down = reader_of(layer.down[e]),
                            .gate_bias = w.gate_bias,
                            .up_bias = w.up_bias,
                            .down_bias = w.down_bias};
      whole.load(e, w);
      pieces.load(e, rows);
      together.load_together(e, rows);
    }
    std::vector<float> y(3 * 1000), z(y.size()), t(y.size());
    whole.forward(batch.args(y.data()));
    pieces.forward(batch.args(z.data()));
    together.forward(batch.args(t.data()));
    EXPECT_EQ(y, z) << nodes;
    EXPECT_EQ(y, t) << nodes;
  }
}

// What a plan says is what a forward takes when its rows are as even; and a plan needs no memory.
TEST(Experts, ForwardBytesAreKnownBefore) {
  const ExpertsShape shape{.experts = 4, .hidden = 256, .inter = 128};
  const Layer layer(shape, format_named("int8"), 5);
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2, .pin = false});
  ExpertsOptions options{.gate = layer.format, .up = layer.format, .down = layer.format};
  for (const int tokens : {1, 2, 64}) {
    const auto workspace = std::make_shared<Workspace>();
    Experts experts(pool, workspace, shape, options);
    for (int e = 0; e < 4; ++e) experts.load(e, layer.weights(e));
    options.sizes_only = true;
    const Experts sizes(pool, std::make_shared<Workspace>(), shape, options);
    options.sizes_only = false;
    EXPECT_EQ(sizes.packed_bytes(), experts.packed_bytes());
    Batch batch(tokens, 2, shape, 6);
    for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = static_cast<int32_t>(i % 4);
    std::vector<float> out(static_cast<size_t>(tokens) * 256);
    experts.forward(batch.args(out.data()));
    EXPECT_EQ(workspace->bytes(), sizes.forward_bytes(tokens, 2)) << tokens;
    EXPECT_THROW(sizes.forward(batch.args(out.data())), Error);
  }
}

TEST(Experts, BadInputIsNamed) {
  const Layer layer({2, 64, 128}, format_named("int8"), 22);
  Experts experts = make(layer, pool_of(1), {.max_tokens = 4});
  std::vector<float> out(64 * 8);
  Batch batch(4, 2, layer.shape, 23);
  const auto with = [&](auto change) {
    ForwardArgs args = batch.args(out.data());
    change(args);
    return message_of([&] { experts.forward(args); });
  };
  EXPECT_THAT(with([](ForwardArgs& a) { a.tokens = 5; }), HasSubstr("5 tokens, expected 0 to 4"));
  EXPECT_THAT(with([](ForwardArgs& a) { a.tokens = -1; }), HasSubstr("-1 tokens"));
  EXPECT_THAT(with([](ForwardArgs& a) { a.top_k = 0; }), HasSubstr("top_k is 0"));
  EXPECT_THAT(with([](ForwardArgs& a) { a.input = nullptr; }), HasSubstr("input is null"));
  EXPECT_THAT(with([](ForwardArgs& a) { a.weights = nullptr; }), HasSubstr("weights is null"));
  EXPECT_THAT(with([](ForwardArgs& a) { a.ids = nullptr; }), HasSubstr("exactly one of ids"));
  EXPECT_THAT(with([](ForwardArgs& a) { a.output_stride = 63; }),
              HasSubstr("output stride 63 is below hidden 64"));
  EXPECT_THAT(with([&](ForwardArgs& a) { a.output = reinterpret_cast<std::byte*>(out.data()) + 2; }),
              HasSubstr("output is not aligned to 4"));
  EXPECT_EQ(with([](ForwardArgs&) {}), "no error");

  ExpertWeights w = layer.weights(0);
  EXPECT_THAT(message_of([&] { experts.load(2, w); }), HasSubstr("expert 2: expected 0 to 1"));
  w.down = w.gate;
  EXPECT_THAT(message_of([&] { experts.load(0, w); }),
              HasSubstr("expert 0 down: expected [64, 128], got [128, 64]"));
  const Matrix other = quantise(format_named("bf16"), std::vector<float>(64 * 128), 128, 64);
  w = layer.weights(0);
  w.up = other.view();
  EXPECT_THAT(message_of([&] { experts.load(0, w); }),
              HasSubstr("expert 0 up: expected format int8, got bf16"));
  w = layer.weights(0);
  w.gate.scales = nullptr;
  EXPECT_THAT(message_of([&] { experts.load(0, w); }), HasSubstr("missing"));
  ExpertsOptions options;
  options.gate = options.up = options.down = format_named("q4_k");
  EXPECT_THAT(message_of([&] { Experts(pool_of(1), std::make_shared<Workspace>(), {2, 64, 128}, options); }),
              HasSubstr("256"));
  options.gate = options.up = options.down = format_named("int8");
  EXPECT_THAT(message_of([&] { Experts(pool_of(1), std::make_shared<Workspace>(), {0, 64, 128}, options); }),
              HasSubstr("0 experts"));
  const Experts empty(pool_of(1), std::make_shared<Workspace>(), {2, 64, 128}, options);
  EXPECT_THAT(message_of([&] { empty.forward(batch.args(out.data())); }), HasSubstr("not loaded"));
}

}  // namespace
}  // namespace kt::inline nn
