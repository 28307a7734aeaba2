// Layers whose gate and up have formats of their own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/isas.h"
#include "nn/testing/reference_layer.h"

namespace kt::inline nn {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Pair {
  const char *gate, *up, *down;
};
// Those of published recipes, and every kind of activations beside every other: s8 with sums over 16, 32 and
// all columns, bf16 or f32.
constexpr Pair kPairs[] = {
    {"q4_k", "q6_k", "q6_k"},      {"q6_k", "q4_k", "q5_k"}, {"q2_k", "q3_k", "q4_k"},
    {"q4_k", "q5_k", "q6_k"},      {"q8_0", "q4_0", "q5_1"}, {"iq4_xs", "q2_k", "q8_0"},
    {"int4", "int8", "int4_g32"},  {"int8", "q6_k", "int8"}, {"bf16", "q4_k", "q8_0"},
    {"int4_g128", "bf16", "bf16"}, {"fp8", "int4", "fp8"},   {"mxfp4", "fp8_row", "f32"},
    {"f32", "bf16", "fp16"},
};

LayerFormats formats_of(const Pair& pair) {
  return {format_named(pair.gate), format_named(pair.up), format_named(pair.down)};
}

std::string name_of(const Pair& pair) { return text("{}_{}_{}", pair.gate, pair.up, pair.down); }

class Mixed : public ::testing::TestWithParam<Pair> {};

// The rounding of activations that each projection takes, as in tolerance(); the coarsest holds for the
// whole.
double tolerance_of(const LayerFormats& f, Precision precision) {
  if (precision == Precision::kBf16) return tolerance(format_named("bf16"), precision);
  return std::max({tolerance(f.gate, precision), tolerance(f.up, precision), tolerance(f.down, precision)});
}

TEST_P(Mixed, MatchesDoubleReferenceOnEveryIsa) {
  const Layer layer({5, 256, 256}, formats_of(GetParam()), 1);
  for (const int tokens : {1, 4, 33}) {
    const Batch batch(tokens, 3, layer.shape, 2);
    const auto want = reference(layer, batch, {});
    for (const IsaStatus& isa : isas()) {
      if (isa.missing) continue;
      for (const Precision precision : {Precision::kDefault, Precision::kBf16, Precision::kF32}) {
        const Experts experts = make(layer, pool_of(2), {.precision = precision, .kernels = isa.table});
        EXPECT_LT(relative_error(run(experts, batch), want), tolerance_of(layer.formats, precision))
            << isa.table->name << ", " << tokens << " tokens, precision " << static_cast<int>(precision)
            << ", " << experts.describe_plan(tokens);
      }
    }
  }
}

TEST_P(Mixed, SameBitsForAnyThreadCount) {
  const Layer layer({4, 256, 512}, formats_of(GetParam()), 3);
  for (const int nodes : {1, 2})
    for (const int tokens : {1, 4, 33}) {
      const Batch batch(tokens, 3, layer.shape, 4);
      const auto want = run(make(layer, pool_of(2, nodes)), batch);
      for (const int threads : {nodes == 1 ? 1 : 2, 3, 5})
        EXPECT_EQ(run(make(layer, pool_of(threads, nodes)), batch), want)
            << threads << " threads, " << nodes << " nodes, " << tokens << " tokens";
    }
}

// What is asked of a layer is the mean of two that have one format for gate and up.
TEST_P(Mixed, SizesAreThoseOfTheParts) {
  const ExpertsShape shape{.experts = 4, .hidden = 512, .inter = 768};
  const LayerFormats f = formats_of(GetParam());
  const auto sized = [&](const Format& gate, const Format& up) {
    return Experts(pool_of(2, 2), std::make_shared<Workspace>(), shape,
                   {.gate = gate, .up = up, .down = f.down, .sizes_only = true});
  };
  const Experts mixed = sized(f.gate, f.up), gates = sized(f.gate, f.gate), ups = sized(f.up, f.up);
  EXPECT_EQ(2 * mixed.packed_bytes(), gates.packed_bytes() + ups.packed_bytes());
  EXPECT_EQ(2 * mixed.packed_bytes(1), gates.packed_bytes(1) + ups.packed_bytes(1));
  EXPECT_DOUBLE_EQ(2 * mixed.stored_bytes_per_expert(),
                   gates.stored_bytes_per_expert() + ups.stored_bytes_per_expert());
  EXPECT_THAT(mixed.describe_plan(3), AllOf(HasSubstr(": gate "), HasSubstr("; up "), HasSubstr("; down ")));
  EXPECT_THAT(gates.describe_plan(3), AllOf(HasSubstr(": gate and up "), HasSubstr("; down ")));
}

INSTANTIATE_TEST_SUITE_P(Formats, Mixed, ::testing::ValuesIn(kPairs),
                         [](const auto& info) { return name_of(info.param); });

// The same numbers under a name of their own for up: one scale for whole rows, said as a span of all columns;
// scales of 128 rows said row by row. Packed blocks are the same bytes, so that gate and up apart must give
// the bits of gate and up in pairs.
TEST(MixedExperts, ApartTheyGiveTheBitsOfPairs) {
  for (const char* name : {"int8", "int4", "fp8", "fp8_row"}) {
    const Layer layer({6, 256, 512}, format_named(name), 5, true);
    for (const int nodes : {1, 2})
      for (const Precision precision : {Precision::kDefault, Precision::kBf16, Precision::kF32})
        for (const int tokens : {1, 4, 33, 100}) {
          const Batch batch(tokens, 3, layer.shape, 6);
          const auto pool = pool_of(3, nodes);
          const Experts paired = make(layer, pool, {.precision = precision});
          Format other = layer.format;
          if (other.span.n > 1)
            other.span.n = 1;
          else
            other.span.k = layer.shape.hidden;
          Experts apart(pool, std::make_shared<Workspace>(), layer.shape,
                        {.gate = layer.format, .up = other, .down = layer.format, .precision = precision});
          for (int e = 0; e < layer.shape.experts; ++e) {
            Matrix up(other, layer.shape.inter, layer.shape.hidden);
            up.codes = layer.up[e].codes;
            if (layer.format.span.n > 1) {
              const size_t row = static_cast<size_t>(spans(other, up.k)) * sizeof(float);
              for (int64_t r = 0; r < up.n; ++r)
                std::copy_n(layer.up[e].scales.data() + static_cast<size_t>(r / layer.format.span.n) * row,
                            row, up.scales.data() + static_cast<size_t>(r) * row);
            } else {
              up.scales = layer.up[e].scales;
            }
            ExpertWeights weights = layer.weights(e);
            weights.up = up.view();
            apart.load(e, weights);
          }
          EXPECT_EQ(run(apart, batch), run(paired, batch))
              << name << ", " << nodes << " nodes, " << tokens << " tokens, precision "
              << static_cast<int>(precision);
        }
  }
}

// Many tokens for many experts: rows are quantised once for gate and once for up, and copied to groups of few
// rows each.
TEST(MixedExperts, TokensAreQuantisedOnceForEach) {
  const Layer layer({40, 256, 256}, formats_of({"q4_k", "q6_k", "int8"}), 7);
  const Batch batch(60, 2, layer.shape, 8);
  const auto got = run(make(layer, pool_of(3)), batch);
  EXPECT_LT(relative_error(got, reference(layer, batch, {})),
            tolerance_of(layer.formats, Precision::kDefault));
  // q4_k and q6_k are exact in integers for few rows: a token's result does not depend on the batch around it
  for (const int t : {0, 31, 59}) {
    Batch one(1, 2, layer.shape, 0);
    one.input.assign(batch.input.begin() + t * 256, batch.input.begin() + (t + 1) * 256);
    one.ids.assign(batch.ids.begin() + t * 2, batch.ids.begin() + t * 2 + 2);
    one.weights.assign(batch.weights.begin() + t * 2, batch.weights.begin() + t * 2 + 2);
    EXPECT_EQ(run(make(layer, pool_of(2)), one),
              std::vector<float>(got.begin() + t * 256, got.begin() + (t + 1) * 256));
  }
}

TEST(MixedExperts, OddSizesAndActivations) {
  const Activation kinds[] = {
      {}, {.limit = 0.5f}, {.limit = 7, .alpha = 1.702f}, {.kind = ActivationKind::kGeluTanh}};
  const Layer layer({3, 97, 75}, formats_of({"int4_g32", "bf16", "int8"}), 9, true);
  for (const int tokens : {1, 11})
    for (const Activation& f : kinds) {
      const Batch batch(tokens, 2, layer.shape, 10);
      const Experts experts = make(layer, pool_of(2), {.activation = f, .precision = Precision::kF32});
      EXPECT_LT(relative_error(run(experts, batch), reference(layer, batch, f)), 3e-6)
          << static_cast<int>(f.kind) << " " << f.alpha;
    }
}

TEST(MixedExperts, BlocksComeBackAsTheyWereLoadedAndCopied) {
  const Layer layer({3, 256, 330}, formats_of({"q4_k", "bf16", "int8"}), 11);
  for (const int nodes : {1, 3}) {
    Experts experts = make(layer, pool_of(nodes, nodes));
    experts.copy(2, 0);
    const auto check = [&](ExpertPart part, int expert, const Matrix& want) {
      Matrix got;
      for (int64_t first = 0; first < want.n; first += kBlockRows) {
        const int64_t rows = experts.read_block(expert, part, first / kBlockRows, got);
        ASSERT_EQ(rows, std::min<int64_t>(kBlockRows, want.n - first));
        const auto same = [&](const auto& ours, const auto& theirs) {
          const size_t bytes = theirs.size() / static_cast<size_t>(want.n);  // of a row
          return std::equal(ours.begin(), ours.begin() + static_cast<int64_t>(bytes) * rows,
                            theirs.begin() + static_cast<int64_t>(bytes) * first);
        };
        EXPECT_TRUE(same(got.codes, want.codes) && same(got.scales, want.scales) &&
                    same(got.mins, want.mins) && same(got.supers, want.supers) &&
                    same(got.super_mins, want.super_mins))
            << "expert " << expert << ", part " << static_cast<int>(part) << ", rows from " << first;
      }
    };
    for (const auto& [expert, from] : {std::pair(0, 2), {1, 1}, {2, 2}}) {
      check(ExpertPart::kGate, expert, layer.gate[from]);
      check(ExpertPart::kUp, expert, layer.up[from]);
      check(ExpertPart::kDown, expert, layer.down[from]);
    }
  }
}

TEST(MixedExperts, ForwardBytesAreKnownBefore) {
  const Layer layer({4, 256, 256}, formats_of({"q4_k", "q6_k", "bf16"}), 12);
  for (const int tokens : {1, 2, 64}) {
    const auto workspace = std::make_shared<Workspace>();
    Experts experts(pool_of(2), workspace, layer.shape,
                    {.gate = layer.formats.gate, .up = layer.formats.up, .down = layer.formats.down});
    for (int e = 0; e < 4; ++e) experts.load(e, layer.weights(e));
    Batch batch(tokens, 2, layer.shape, 6);
    for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = static_cast<int32_t>(i % 4);
    run(experts, batch);
    EXPECT_EQ(workspace->bytes(), experts.forward_bytes(tokens, 2)) << tokens;
  }
}

TEST(MixedExperts, NamesTheProjectionThatDoesNotFit) {
  const Layer layer({2, 256, 256}, formats_of({"q4_k", "q6_k", "q6_k"}), 13);
  Experts experts = make(layer, pool_of(1));
  ExpertWeights swapped = layer.weights(0);
  std::swap(swapped.gate, swapped.up);
  EXPECT_THAT(message_of([&] { experts.load(0, swapped); }),
              HasSubstr("expert 0 gate: expected format q4_k, got q6_k"));
  EXPECT_THAT(message_of([&] {
                Experts(
                    pool_of(1), std::make_shared<Workspace>(), {2, 64, 64},
                    {.gate = format_named("int8"), .up = format_named("q6_k"), .down = format_named("int8")});
              }),
              AllOf(HasSubstr("up"), HasSubstr("256")));
}

}  // namespace
}  // namespace kt::inline nn
