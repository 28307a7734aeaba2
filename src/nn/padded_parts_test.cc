// Layers whose down has a scale for any number of columns.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/isas.h"
#include "nn/expert_adapter.h"
#include "nn/testing/reference_layer.h"

namespace kt::inline nn {
namespace {

struct Parts {
  const char* format;
  int inter, part;
};

// As `kt quant --numa-nodes` cuts 176, 352, 96 and 75; the last part may be shorter.
constexpr Parts kParts[] = {{"int8", 176, 88}, {"int8", 176, 44},  {"int4", 176, 22},
                            {"int8", 176, 16}, {"int4", 352, 176}, {"int8", 96, 48},
                            {"int4", 75, 25},  {"int4", 75, 1},    {"int8", 100, 33}};

Layer layer_of(const Parts& parts, bool biases = true) {
  const Format format = format_named(parts.format);
  Format down = format;
  down.span.k = parts.part;
  return Layer({4, 97, parts.inter}, LayerFormats{format, format, down}, 1, biases);
}

class PaddedExperts : public ::testing::TestWithParam<Parts> {};

TEST_P(PaddedExperts, MatchesDoubleReferenceOnEveryIsa) {
  const Layer layer = layer_of(GetParam());
  for (const Activation& f : {Activation{}, Activation{.limit = 7, .alpha = 1.702f}})
    for (const int tokens : {1, 4, 33}) {
      const Batch batch(tokens, 3, layer.shape, 2);
      const auto want = reference(layer, batch, f);
      for (const IsaStatus& isa : isas()) {
        if (isa.missing) continue;
        for (const int nodes : {1, 3})
          for (const Precision precision : {Precision::kDefault, Precision::kF32}) {
            const Experts experts = make(layer, pool_of(3, nodes),
                                         {.activation = f, .precision = precision, .kernels = isa.table});
            EXPECT_LT(relative_error(run(experts, batch), want), tolerance(layer.format, precision))
                << isa.table->name << ", " << tokens << " tokens, " << nodes << " nodes";
          }
      }
    }
}

TEST_P(PaddedExperts, BlocksComeBackAsTheyWereLoaded) {
  const Layer layer = layer_of(GetParam());
  for (const int nodes : {1, 3}) {
    const Experts experts = make(layer, pool_of(nodes, nodes));
    const auto check = [&](ExpertPart part, const Matrix& want) {
      Matrix got;
      for (int64_t first = 0; first < want.n; first += kBlockRows) {
        const int64_t rows = experts.read_block(2, part, first / kBlockRows, got);
        ASSERT_EQ(rows, std::min<int64_t>(kBlockRows, want.n - first));
        const auto same = [&](const auto& ours, const auto& theirs) {
          const auto bytes = std::ssize(theirs) / want.n;  // of a row
          return std::equal(ours.begin(), ours.begin() + bytes * rows, theirs.begin() + bytes * first);
        };
        EXPECT_TRUE(same(got.codes, want.codes) && same(got.scales, want.scales)) << "rows from " << first;
      }
    };
    check(ExpertPart::kGate, layer.gate[2]);
    check(ExpertPart::kUp, layer.up[2]);
    check(ExpertPart::kDown, layer.down[2]);
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, PaddedExperts, ::testing::ValuesIn(kParts), [](const auto& info) {
  return text("{}_{}_{}", info.param.format, info.param.inter, info.param.part);
});

struct NothingToAdd final : ExpertAdapter {
  int kept_floats(Input) const noexcept override { return 0; }
  void read(const Rows&) const noexcept override {}
  void add(const Tile&) const noexcept override {}
};

// An adapter would be told columns that are not those of its matrices.
TEST(PaddedParts, TakeNoAdapter) {
  const Layer layer = layer_of({"int8", 176, 88}, false);
  const Experts experts = make(layer, pool_of(1));
  const Batch batch(2, 2, layer.shape, 3);
  std::vector<float> out(2 * 97);
  const NothingToAdd adapter;
  ForwardArgs args = batch.args(out.data());
  args.adapter = &adapter;
  EXPECT_THAT(message_of([&] { experts.forward(args); }), ::testing::HasSubstr("88 columns"));
}

}  // namespace
}  // namespace kt::inline nn
