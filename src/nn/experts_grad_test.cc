// Gradients of a layer of experts, every table and format against a loop in double precision.
#include "nn/experts_grad.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/known_formats.h"
#include "kernels/testing/emulated_tiles.h"
#include "kernels/testing/tables.h"
#include "nn/testing/reference_grad.h"

namespace kt::inline nn {
namespace {

using ::testing::HasSubstr;

// f32 sums of some hundred products of numbers with relative errors of 2^-24 each; bf16 rounds every operand, 2^-9 at
// most and 1.1e-3 on average, of up to four products in a row.
constexpr double kF32 = 5e-6, kBf16 = 6e-3;

double norm(const Doubles& v) {
  double sum = 0;
  for (const double x : v) sum += x * x;
  return std::sqrt(sum);
}

// Relative to the larger of what is wanted and `least`.
double error(const std::vector<float>& got, const Doubles& want, double least = 0) {
  double sum = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    sum += (got[i] - want[i]) * (got[i] - want[i]);
  }
  const double size = std::max(norm(want), least);
  return size > 0 ? std::sqrt(sum) / size : std::sqrt(sum);
}

// `few`: sums over columns that make some gradients are so few that the error of one of them may be most of the whole.
void expect_near(const Grads& got, const ReferenceGrads& want, double bar, const std::string& what,
                 bool few = false) {
  const Point& d = want.grads;
  const UsualSizes& size = want.sizes;
  const double of_few = few ? 2 * bar : bar;
  EXPECT_LT(error(got.output, want.output), bar) << what << ", output";
  EXPECT_LT(error(got.input, d.input), bar) << what << ", input";
  EXPECT_LT(error(got.weights, d.weights, size.weights), of_few) << what << ", weights";
  EXPECT_LT(error(got.a1, d.a1, size.a1), of_few) << what << ", A of gate and up";
  EXPECT_LT(error(got.b1, d.b1, size.b1), of_few) << what << ", B of gate and up";
  EXPECT_LT(error(got.a2, d.a2, size.a2), of_few) << what << ", A of down";
  EXPECT_LT(error(got.b2, d.b2, size.b2), of_few) << what << ", B of down";
}

// `rows` tokens that all go to expert 0, and each to another one or nowhere.
Batch rows_batch(int rows, const ExpertsShape& shape, unsigned seed) {
  Batch batch(rows, 2, shape, seed);
  for (int t = 0; t < rows; ++t) {
    batch.ids[2 * t] = 0;
    batch.ids[2 * t + 1] = t % (shape.experts + 1) == shape.experts ? -1 : t % shape.experts;
  }
  return batch;
}

class EveryFormatBack : public ::testing::TestWithParam<NamedFormat> {};

// Odd sizes where the format has no super-blocks, and several spans of columns.
ExpertsShape shape_for(const Format& format) {
  if (format.span.super_k) return {3, 256, 512};
  return {3, 97, 331};
}

TEST_P(EveryFormatBack, MatchesDoubleReferenceOnEveryIsa) {
  const Format& format = GetParam().format;
  const Layer layer(shape_for(format), format, 1);
  constexpr int kRows[] = {1, 2, 5, 33, 128}, kRanks[] = {3, 16, 1, 8, 64};
  for (int i = 0; i < 5; ++i)
    for (int j = 0; j < 5; ++j) {
      if (i != j && !full_tests()) continue;
      const Batch batch = rows_batch(kRows[i], layer.shape, 2);
      const RandomLora lora(layer.shape, kRanks[j], 3);
      const auto dout = random_grad(batch, layer.shape, 4);
      const auto want = ReferenceLayer(layer, batch, lora, {}).grads(dout);
      for (const Kernels* table : tables_under_test())
        for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
          const Experts experts = make(layer, pool_of(2), {.precision = precision, .kernels = table});
          const bool f32 = precision == Precision::kF32;
          expect_near(
              TrainCall{experts, batch, lora, dout}.run(), want, f32 ? kF32 : kBf16,
              text("{}, {} rows, rank {}, {}", table->name, kRows[i], kRanks[j], f32 ? "f32" : "bf16"),
              kRows[i] * kRanks[j] < 32);
        }
    }
}

// The same in bf16 with a tile unit, whatever this CPU has: factors of groups of many rows go through it too, those of
// few rows are in f32.
TEST(ExpertsGrad, WithATileUnit) {
  const Kernels* table = emulated_tiles();
  if (!table) GTEST_SKIP() << "a cross build: no emulated tile unit";
  for (const char* name : {"bf16", "int4_g32", "q4_k"}) {
    const Format& format = format_named(name);
    const Layer layer(shape_for(format), format, 60, true);
    for (const auto& [rows, rank] : {std::pair{3, 8}, {48, 3}, {48, 8}, {60, 70}, {128, 16}}) {
      const Batch batch = rows_batch(rows, layer.shape, 61);
      const RandomLora lora(layer.shape, rank, 62);
      const auto dout = random_grad(batch, layer.shape, 63);
      const auto want = ReferenceLayer(layer, batch, lora, {}).grads(dout);
      for (const int nodes : {1, 2}) {
        const Experts experts =
            make(layer, pool_of(nodes + 1, nodes), {.precision = Precision::kBf16, .kernels = table});
        TrainCall call{experts, batch, lora, dout};
        const Grads kept = call.run();
        expect_near(kept, want, kBf16, text("{}, {} rows, rank {}, {} nodes", name, rows, rank, nodes));
        call.keep = false;
        EXPECT_EQ(call.run(), kept) << name << rows;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, EveryFormatBack, ::testing::ValuesIn(kFormats.begin(), kFormats.end()),
                         [](const auto& info) { return std::string(info.param.name); });

const Activation kActivations[] = {{},
                                   {.limit = 0.5f},
                                   {.limit = 0.7f, .alpha = 1.702f},
                                   {.alpha = 1.702f},
                                   {.kind = ActivationKind::kGeluTanh},
                                   {.kind = ActivationKind::kGeluErf},
                                   {.kind = ActivationKind::kRelu}};

// The formulas of the reference itself: along random directions of everything that has a gradient.
TEST(ReferenceGrad, IsWhatFiniteDifferencesGive) {
  const Layer layer({3, 13, 11}, format_named("f32"), 5, true);
  Batch batch(6, 2, layer.shape, 6);
  batch.ids[3] = -1;
  const RandomLora lora(layer.shape, 3, 7);
  const auto dout = random_grad(batch, layer.shape, 8);
  std::mt19937 random(9);
  std::normal_distribution<double> normal;
  for (const Activation& f : kActivations) {
    ReferenceLayer reference(layer, batch, lora, f);
    ReferenceGrads grads = reference.grads(dout);
    for (int direction = 0; direction < 7; ++direction) {
      Point ahead = reference.at, behind = reference.at;
      double slope = 0;
      constexpr double kStep = 1e-6;
      for (size_t part = 0; part < 6; ++part) {
        if (direction < 6 && static_cast<int>(part) != direction) continue;  // each alone, then all together
        for (size_t i = 0; i < ahead.all()[part]->size(); ++i) {
          const double d = normal(random);
          (*ahead.all()[part])[i] += kStep * d;
          (*behind.all()[part])[i] -= kStep * d;
          slope += d * (*grads.grads.all()[part])[i];
        }
      }
      const double got = (reference.loss(ahead, dout) - reference.loss(behind, dout)) / (2 * kStep);
      // the loss is about 0.1, kept to 2^-53 of it, and divided by the step: 1e-11
      EXPECT_NEAR(got, slope, 2e-8 * std::max(1.0, std::fabs(slope)))
          << direction << " " << f.limit << " " << f.alpha;
    }
  }
}

TEST(ExpertsGrad, ActivationsAndBiases) {
  for (const char* name : {"f32", "int4_g32"}) {
    const Layer layer({3, 97, 75}, format_named(name), 10, true);
    const Batch batch(11, 2, layer.shape, 11);
    const RandomLora lora(layer.shape, 5, 12);
    const auto dout = random_grad(batch, layer.shape, 13);
    for (const Activation& f : kActivations) {
      const auto want = ReferenceLayer(layer, batch, lora, f).grads(dout);
      for (const Kernels* table : tables_under_test()) {
        const Experts experts =
            make(layer, pool_of(2), {.activation = f, .precision = Precision::kF32, .kernels = table});
        expect_near(TrainCall{experts, batch, lora, dout}.run(), want, kF32,
                    text("{} {} {}", table->name, f.limit, f.alpha));
      }
    }
  }
}

// Weights and inputs that put gate and up on the limit itself: the gradient passes, as torch's clamp lets it.
TEST(ExpertsGrad, AtTheClampGradientsPass) {
  constexpr int kSize = 16;
  Layer layer({1, kSize, kSize}, format_named("f32"), 14);
  std::vector<float> eye(kSize * kSize);
  for (int i = 0; i < kSize; ++i) eye[i * kSize + i] = 1;
  layer.gate[0] = layer.up[0] = layer.down[0] = quantise(layer.format, eye, kSize, kSize);
  Batch batch(1, 1, layer.shape, 15);
  for (int i = 0; i < kSize; ++i)
    batch.input[i] = i % 4 == 0 ? 0.5f : i % 4 == 1 ? -0.5f : i % 4 == 2 ? 0.625f : -0.625f;
  const RandomLora none(layer.shape, 0, 0);
  const std::vector<float> dout(kSize, 1.0f);
  const Activation f{.limit = 0.5f};
  const Experts experts = make(layer, pool_of(1), {.activation = f, .precision = Precision::kF32});
  const Grads got = TrainCall{experts, batch, none, dout}.run();
  const auto want = ReferenceLayer(layer, batch, none, f).grads(dout);
  EXPECT_LT(error(got.input, want.grads.input), kF32);
  EXPECT_GT(got.input[0], 0.1f);  // both pass
  EXPECT_NE(got.input[1], 0.0f);  // gate passes below, up at the limit
  EXPECT_EQ(got.input[2], 0.0f);  // neither
  EXPECT_NE(got.input[3], 0.0f);  // gate alone
}

LayerFormats three_formats(const char* gate, const char* up, const char* down) {
  return {format_named(gate), format_named(up), format_named(down)};
}

// Long rows of several blocks of K, groups of more rows than a product takes at once, gate and up of two formats.
TEST(ExpertsGrad, LargeGroupsAndMixedFormats) {
  for (const LayerFormats& f :
       {three_formats("int8", "int8", "int8"), three_formats("int4_g32", "bf16", "q8_0")}) {
    const Layer layer({2, 640, 300}, f, 16, true);
    Batch batch(700, 1, layer.shape, 17);
    for (int t = 0; t < 690; ++t) batch.ids[t] = 1;
    const RandomLora lora(layer.shape, 4, 18);
    const auto dout = random_grad(batch, layer.shape, 19);
    const auto want = ReferenceLayer(layer, batch, lora, {}).grads(dout);
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      const Experts experts = make(layer, pool_of(2), {.precision = precision});
      expect_near(TrainCall{experts, batch, lora, dout}.run(), want,
                  precision == Precision::kF32 ? kF32 : kBf16, "large");
    }
  }
}

TEST(ExpertsGrad, SameBitsForAnyThreadCount) {
  for (const LayerFormats& f :
       {three_formats("int4", "int4", "int4"), three_formats("q4_k", "q6_k", "q8_0")}) {
    const Layer layer({4, 256, 768}, f, 20, true);
    const Batch batch(70, 2, layer.shape, 21);
    const RandomLora lora(layer.shape, 5, 22);
    const auto dout = random_grad(batch, layer.shape, 23);
    const auto exact = ReferenceLayer(layer, batch, lora, {}).grads(dout);
    for (const int nodes : {1, 2, 3})
      for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
        const auto got = [&](int threads) {
          const Experts experts = make(layer, pool_of(threads, nodes), {.precision = precision});
          return TrainCall{experts, batch, lora, dout}.run();
        };
        const Grads want = got(nodes);
        expect_near(want, exact, precision == Precision::kF32 ? kF32 : kBf16, text("{} nodes", nodes));
        for (const int threads : {nodes + 1, 5}) EXPECT_EQ(got(threads), want) << threads << " on " << nodes;
      }
  }
}

TEST(ExpertsGrad, SavedAndComputedAgainGiveTheSameBits) {
  for (const LayerFormats& f : {three_formats("int8", "int8", "int8"), three_formats("bf16", "int4", "bf16")})
    for (const Precision precision :
         {Precision::kF32, Precision::kBf16, Precision::kDefault, Precision::kInt8}) {
      const Layer layer({3, 128, 96}, f, 24, true);
      const Batch batch(40, 2, layer.shape, 25);
      const RandomLora lora(layer.shape, 4, 26);
      const auto dout = random_grad(batch, layer.shape, 27);
      const Experts experts = make(layer, pool_of(2), {.precision = precision});
      TrainCall call{experts, batch, lora, dout};
      const Grads kept = call.run();
      call.keep = false;
      EXPECT_EQ(call.run(), kept) << static_cast<int>(precision);
    }
}

TEST(ExpertsGrad, ForwardGivesTheBitsOfThePlainOne) {
  for (const LayerFormats& f :
       {three_formats("int8", "int8", "int8"), three_formats("q4_k", "q6_k", "q6_k")}) {
    const Layer layer({3, 256, 256}, f, 28, true);
    const RandomLora lora(layer.shape, 6, 29), none(layer.shape, 0, 0);
    for (const Precision precision : {Precision::kF32, Precision::kBf16, Precision::kInt8})
      for (const int tokens : {1, 9, 70}) {
        const Batch batch(tokens, 2, layer.shape, 30);
        const auto dout = random_grad(batch, layer.shape, 31);
        const Experts experts = make(layer, pool_of(2), {.precision = precision});
        EXPECT_EQ((TrainCall{experts, batch, none, dout}.run().output), run(experts, batch));
        const LoraAdapter adapter(experts, lora.view(), precision != Precision::kF32);
        std::vector<float> out(batch.input.size());
        ForwardArgs args = batch.args(out.data());
        args.adapter = &adapter;
        experts.forward(args);
        EXPECT_EQ((TrainCall{experts, batch, lora, dout}.run().output), out);
      }
  }
}

TEST(ExpertsGrad, GradientsOfFactorsAreAddedTo) {
  const Layer layer({3, 64, 80}, format_named("int8"), 32);
  const Batch batch(9, 2, layer.shape, 33);
  const RandomLora lora(layer.shape, 3, 34);
  const auto dout = random_grad(batch, layer.shape, 35);
  const Experts experts = make(layer, pool_of(2), {.precision = Precision::kF32});
  TrainCall call{experts, batch, lora, dout};
  const Grads from_zero = call.run();
  call.before = 2;
  const Grads from_two = call.run();
  EXPECT_EQ(from_two.input, from_zero.input);
  EXPECT_EQ(from_two.weights, from_zero.weights);
  const auto added = [](const std::vector<float>& sum, const std::vector<float>& part) {
    for (size_t i = 0; i < sum.size(); ++i)
      if (sum[i] != part[i] + 2) return false;
    return true;
  };
  EXPECT_TRUE(added(from_two.a1, from_zero.a1) && added(from_two.b1, from_zero.b1));
  EXPECT_TRUE(added(from_two.a2, from_zero.a2) && added(from_two.b2, from_zero.b2));
}

TEST(ExpertsGrad, MaskedAndForeignExpertsAndTokensWithoutAny) {
  const Layer layer({4, 64, 64}, format_named("int8"), 36, true);
  Batch batch(6, 2, layer.shape, 37);
  batch.ids = {-1, 0, 4, 99, 1, 2, -7, std::numeric_limits<int32_t>::max(), 3, 3, 0, 1};
  const RandomLora lora(layer.shape, 2, 38);
  const auto dout = random_grad(batch, layer.shape, 39);
  const Experts experts = make(layer, pool_of(2), {.precision = Precision::kF32});
  for (const std::vector<uint8_t>& skip : {std::vector<uint8_t>{0, 0, 0, 0}, {0, 1, 0, 1}, {1, 1, 1, 1}})
    for (const bool keep : {true, false}) {
      const auto want = ReferenceLayer(layer, batch, lora, {}, skip.data()).grads(dout);
      const Grads got = TrainCall{experts, batch, lora, dout, skip.data(), keep}.run();
      expect_near(got, want, kF32, text("{}{}", skip[0], skip[1]));
      for (const int token : {1, 3})
        for (int h = 0; h < 64; ++h) EXPECT_EQ(got.input[token * 64 + h], 0.0f);
      EXPECT_EQ(got.weights[0], 0.0f);
      EXPECT_EQ(got.weights[3], 0.0f);
    }
  const Batch nobody(0, 2, layer.shape, 40);
  TrainCall{experts, nobody, lora, {}}.run();
}

// What is not wanted is not written, and one half of the factors alone is right too.
TEST(ExpertsGrad, AnyPartOfTheGradientsAndOfTheFactors) {
  const Layer layer({2, 80, 48}, format_named("int8"), 41, true);
  const Batch batch(9, 2, layer.shape, 42);
  const auto dout = random_grad(batch, layer.shape, 43);
  const Experts experts = make(layer, pool_of(2), {.precision = Precision::kF32});
  const ExpertsGrad grad(experts);
  RandomLora lora(layer.shape, 3, 44);
  for (const bool up : {true, false}) {
    RandomLora half = lora;
    std::ranges::fill(up ? half.a2 : half.a1, 0.0f);  // the reference without that part
    std::ranges::fill(up ? half.b2 : half.b1, 0.0f);
    const auto want = ReferenceLayer(layer, batch, half, {}).grads(dout);
    ExpertLora view = lora.view();
    (up ? view.down : view.gate_up) = {};
    std::vector<float> out(batch.input.size()), a(up ? lora.a1.size() : lora.a2.size()), input(out.size());
    ForwardArgs call = batch.args(out.data());
    SavedCall saved;
    grad.forward({.call = call, .lora = view, .keep = &saved});
    TrainBackwardArgs back{.call = call, .lora = view, .saved = &saved, .output_grad = dout.data()};
    back.lora_grads = up ? ExpertLoraGrads{.gate_up_a = a.data()} : ExpertLoraGrads{.down_a = a.data()};
    grad.backward(back);
    EXPECT_LT(error(a, up ? want.grads.a1 : want.grads.a2), kF32);
    back.lora_grads = {};
    back.input_grad = input.data();
    grad.backward(back);
    EXPECT_LT(error(input, want.grads.input), kF32);
    EXPECT_LT(error(out, want.output), kF32);
  }
}

TEST(ExpertsGrad, ElementTypesStridesAndWideIds) {
  const Layer layer({3, 80, 48}, format_named("bf16"), 45);
  const Batch batch(7, 2, layer.shape, 46);
  const RandomLora lora(layer.shape, 4, 47);
  const auto dout = random_grad(batch, layer.shape, 48);
  const Experts experts = make(layer, pool_of(2), {.precision = Precision::kF32});
  const Grads want = TrainCall{experts, batch, lora, dout}.run();
  const std::vector<int64_t> ids(batch.ids.begin(), batch.ids.end());
  constexpr int kStride = 83;
  std::vector<uint16_t> in(7 * kStride, 0x7fff), back_in(7 * kStride, 0x7fff);
  for (const Real type : {Real::kBf16, Real::kF16}) {
    for (int t = 0; t < 7; ++t)
      for (int h = 0; h < 80; ++h) {
        const auto bits = [&](float x) { return type == Real::kBf16 ? to_bf16(x).bits : to_f16(x).bits; };
        in[t * kStride + h] = bits(batch.input[t * 80 + h]);
        back_in[t * kStride + h] = bits(dout[t * 80 + h]);
      }
    Grads got = want;
    for (auto* v : {&got.a1, &got.b1, &got.a2, &got.b2}) std::ranges::fill(*v, 0.0f);
    ForwardArgs call = batch.args(got.output.data());
    call.ids = nullptr;
    call.ids64 = ids.data();
    call.input = in.data();
    call.input_type = type;
    call.input_stride = kStride;
    const ExpertsGrad grad(experts);
    grad.forward({.call = call, .lora = lora.view()});
    grad.backward({.call = call,
                   .lora = lora.view(),
                   .output_grad = back_in.data(),
                   .output_grad_type = type,
                   .output_grad_stride = kStride,
                   .input_grad = got.input.data(),
                   .weights_grad = got.weights.data(),
                   .lora_grads = {got.a1.data(), got.b1.data(), got.a2.data(), got.b2.data()}});
    if (type == Real::kBf16) {
      EXPECT_EQ(got, want);  // the same numbers
    } else {                 // f16 has 11 bits, but the smallest gradients are denormal there
      const auto wide = [](const std::vector<float>& v) { return Doubles(v.begin(), v.end()); };
      EXPECT_LT(error(got.input, wide(want.input)), 1e-3);
      EXPECT_LT(error(got.b2, wide(want.b2)), 1e-3);
      EXPECT_LT(error(got.a1, wide(want.a1)), 1e-3);
    }
  }
}

// Parts of down that are filled up to whole chunks (padded_parts.h): factors and their gradients know nothing of it.
TEST(ExpertsGrad, PaddedParts) {
  LayerFormats f = three_formats("int8", "int8", "int8");
  f.down.span.k = 88;
  const Layer layer({3, 96, 3 * 88 - 8}, f, 49, true);
  const Batch batch(20, 2, layer.shape, 50);
  const RandomLora lora(layer.shape, 3, 51);
  const auto dout = random_grad(batch, layer.shape, 52);
  const auto want = ReferenceLayer(layer, batch, lora, {}).grads(dout);
  for (const int nodes : {1, 2})
    for (const bool keep : {true, false}) {
      const Experts experts = make(layer, pool_of(2, nodes), {.precision = Precision::kF32});
      expect_near(TrainCall{experts, batch, lora, dout, nullptr, keep}.run(), want, kF32,
                  text("{} nodes", nodes));
    }
}

TEST(ExpertsGrad, MemoryIsKnownBeforeAndUsedAgain) {
  const ExpertsShape shape{4, 256, 128};
  const Layer layer(shape, format_named("int8"), 53);
  const auto workspace = std::make_shared<Workspace>();
  Experts experts(pool_of(2), workspace, shape,
                  {.gate = layer.format, .up = layer.format, .down = layer.format});
  for (int e = 0; e < 4; ++e) experts.load(e, layer.weights(e));
  Batch batch(64, 2, shape, 54);
  for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = static_cast<int32_t>(i % 4);
  const RandomLora lora(shape, 4, 55);
  const auto dout = random_grad(batch, shape, 56);
  const ExpertsGrad grad(experts);
  std::vector<float> out(batch.input.size());
  const ForwardArgs call = batch.args(out.data());
  size_t held = 0;
  {
    SavedCall saved;
    EXPECT_TRUE(saved.empty());
    grad.forward({.call = call, .lora = lora.view(), .keep = &saved});
    EXPECT_EQ(saved.bytes(), grad.kept_bytes(64, 2));
    held = workspace->bytes();
    grad.backward({.call = call,
                   .lora = lora.view(),
                   .saved = &saved,
                   .output_grad = dout.data(),
                   .input_grad = out.data()});
    EXPECT_EQ(workspace->bytes() - held, grad.backward_bytes(64, 2, lora.view()));
    held = workspace->bytes();
  }
  const size_t with_kept = workspace->bytes();
  EXPECT_GT(with_kept, held);
  TrainCall{experts, batch, lora, dout}.run();
  EXPECT_EQ(workspace->bytes(), with_kept) << "what was given back is kept in";
}

TEST(ExpertsGrad, BadInputIsNamed) {
  const Layer layer({2, 64, 128}, format_named("int8"), 57), other({2, 64, 64}, format_named("int8"), 58);
  const Experts experts = make(layer, pool_of(1), {.max_tokens = 4}), others = make(other, pool_of(1));
  const Batch batch(4, 2, layer.shape, 59);
  const RandomLora lora(layer.shape, 2, 60);
  std::vector<float> out(64 * 8), dout(64 * 8);
  const ExpertsGrad grad(experts);
  SavedCall saved, foreign;
  grad.forward({.call = batch.args(out.data()), .keep = &saved});
  ExpertsGrad(others).forward({.call = batch.args(out.data()), .keep = &foreign});
  const auto with = [&](auto change) {
    TrainBackwardArgs args{.call = batch.args(nullptr), .saved = &saved, .output_grad = dout.data()};
    change(args);
    return message_of([&] { grad.backward(args); });
  };
  EXPECT_EQ(with([](TrainBackwardArgs&) {}), "no error");
  EXPECT_THAT(with([](TrainBackwardArgs& a) { a.output_grad = nullptr; }), HasSubstr("output_grad is null"));
  EXPECT_THAT(with([](TrainBackwardArgs& a) { a.output_grad_stride = 63; }),
              HasSubstr("output_grad stride 63"));
  EXPECT_THAT(with([](TrainBackwardArgs& a) { a.call.tokens = 3; }), HasSubstr("3 tokens of 2 experts each"));
  EXPECT_THAT(with([](TrainBackwardArgs& a) { a.call.tokens = 5; }),
              HasSubstr("backward: 5 tokens, expected 0 to 4"));
  EXPECT_THAT(with([](TrainBackwardArgs& a) { a.call.input = nullptr; }),
              HasSubstr("backward: input is null"));
  EXPECT_THAT(with([&](TrainBackwardArgs& a) { a.saved = &foreign; }), HasSubstr("of another layer"));
  EXPECT_THAT(with([&](TrainBackwardArgs& a) { a.lora.down = {.rank = -1}; }),
              HasSubstr("LoRA of down: rank -1"));
  EXPECT_THAT(with([&](TrainBackwardArgs& a) { a.lora.down = {.rank = 2, .a = lora.a2.data()}; }),
              HasSubstr("LoRA of down: B is null"));
}

}  // namespace
}  // namespace kt::inline nn
