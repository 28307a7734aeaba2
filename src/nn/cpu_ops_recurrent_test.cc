// Convolutions, the delta rule and gates over steps of several sequences: against plain loops, and the same bits
// whoever else is in the step, wherever a sequence is cut and however many threads there are.
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "base/testing/random_values.h"
#include "nn/cpu_ops.h"

namespace kt::inline nn {
namespace {

constexpr int kTaps = 4;
constexpr DeltaShape kShape{.key_heads = 3, .value_heads = 6, .key_dim = 24, .value_dim = 40};
constexpr int kTogether = 2;                         // heads of values to one of keys
constexpr int kGroup = 2 * 24 + 2 * kTogether * 40;  // q | k | values | gates of a key head
constexpr int kIn = 3 * kGroup, kOut = 6 * 40, kColumns = 2 * 3 * 24 + 6 * 40;

std::vector<float> part_of(const std::vector<float>& x, int64_t first, int64_t count) {
  return {x.begin() + first, x.begin() + first + count};
}

// A mixer's calls, with weights of its own.
class DeltaLayer {
 public:
  DeltaLayer(int threads, bool in_turns, int max_tokens)
      : ops_(make_cpu_ops(std::make_shared<Pool>(PoolOptions{.threads = threads, .pin = false}))),
        shape_(kShape),
        taps_(ops_->make_vector(random_values(kTaps * kColumns, 1))),
        rates_(ops_->make_vector({-0.01f, -0.1f, -0.5f, -1, -4, -0.05f})),
        steps_(ops_->make_vector(random_values(6, 2))),
        norm_(ops_->make_vector(random_values(40, 3))),
        joined_(ops_->rows("joined", kIn)),
        numbers_(ops_->rows("numbers", 12)),
        mixed_(ops_->rows("mixed", kColumns)),
        factors_(ops_->rows("factors", 18)),
        heads_(ops_->rows("heads", kOut)),
        cache_({.planes = {}, .states = {short_convolution_bytes(kTaps, kColumns), delta_rule_bytes(kShape)}},
               1, 4) {
    shape_.in_turns = in_turns;
    ops_->allocate(max_tokens);
    for (int slot = 0; slot < 4; ++slot) cache_.clear_slot(slot);
  }

  struct Piece {
    int slot, count;
  };
  // New tokens of sequences, whose inputs stand one after the other.
  std::vector<float> run(const std::vector<Piece>& pieces, const std::vector<float>& joined,
                         const std::vector<float>& numbers) {
    std::vector<AttentionSequence> sequences;
    int tokens = 0;
    for (const Piece& piece : pieces) {
      sequences.push_back({.first = tokens, .count = piece.count, .slot = piece.slot});
      tokens += piece.count;
    }
    const StepScope scope(*ops_, {.sequences = sequences, .tokens = tokens, .cache = &cache_});
    ops_->write(joined, joined_);
    ops_->write(numbers, numbers_);
    const auto values = [&](int64_t at) {
      return GroupedHeads{.from = {joined_, at}, .stride = kGroup, .in_group = kTogether};
    };
    const ShortConvolution::Part parts[] = {
        {.heads = {.from = joined_, .stride = kGroup}, .count = 3, .width = 24},
        {.heads = {.from = {joined_, 24}, .stride = kGroup}, .count = 3, .width = 24},
        {.heads = values(48), .count = 6, .width = 40}};
    ops_->convolve({.state = 0, .taps = kTaps, .weights = taps_.get(), .parts = parts, .out = mixed_});
    ops_->delta_rule({.state = 1,
                      .shape = shape_,
                      .qkv = mixed_,
                      .factors = factors_,
                      .b = {.from = numbers_, .stride = 4, .in_group = 2},
                      .a = {.from = {numbers_, 2}, .stride = 4, .in_group = 2},
                      .rates = rates_.get(),
                      .steps = steps_.get(),
                      .out = heads_});
    ops_->gate_heads({.x = heads_,
                      .heads = 6,
                      .count = 40,
                      .norm = norm_.get(),
                      .norm_eps = 1e-6,
                      .gates = values(48 + kTogether * 40),
                      .kind = GateKind::kSilu});
    std::vector<float> out(static_cast<size_t>(tokens) * kOut);
    ops_->read(heads_, out);
    return out;
  }
  void copy(int from, int to) { cache_.copy_slot(from, to); }
  const Work& work() const { return ops_->work(); }

 private:
  std::unique_ptr<Ops> ops_;
  DeltaShape shape_;
  std::unique_ptr<PlacedVector> taps_, rates_, steps_, norm_;
  Rows joined_, numbers_, mixed_, factors_, heads_;
  KvCache cache_;
};

// What the layer gives for one sequence, in double and as the formulas have it.
std::vector<double> plain(const std::vector<float>& x, const std::vector<float>& numbers, bool in_turns) {
  const int tokens = static_cast<int>(x.size()) / kIn;
  const std::vector<float> taps = random_values(kTaps * kColumns, 1), steps = random_values(6, 2),
                           norm = random_values(40, 3);
  const double rates[] = {-0.01f, -0.1f, -0.5f, -1, -4, -0.05f};
  const auto input = [&](int t, int at) -> double {
    return t < 0 ? 0 : x[static_cast<size_t>(t * kIn + at)];
  };
  // Column `at` of the inputs, which is number `channel` of the convolution.
  const auto mixed = [&](int t, int at, int channel) {
    double sum = 0;
    for (int j = 0; j < kTaps; ++j)
      sum += input(t - kTaps + 1 + j, at) * taps[static_cast<size_t>(j * kColumns + channel)];
    return sum / (1 + std::exp(-sum));
  };
  std::vector<double> out(static_cast<size_t>(tokens) * kOut);
  for (int h = 0; h < 6; ++h) {
    const int group = h / kTogether, key = in_turns ? h % 3 : group;
    std::vector<double> s(24 * 40);
    for (int t = 0; t < tokens; ++t) {
      double q[24], k[24], q_sum = 1e-6, k_sum = 1e-6;
      for (int i = 0; i < 24; ++i) {
        q[i] = mixed(t, key * kGroup + i, key * 24 + i);
        k[i] = mixed(t, key * kGroup + 24 + i, 72 + key * 24 + i);
        q_sum += q[i] * q[i];
        k_sum += k[i] * k[i];
      }
      for (int i = 0; i < 24; ++i) q[i] /= std::sqrt(q_sum * 24), k[i] /= std::sqrt(k_sum);
      const size_t at = static_cast<size_t>(t * 12 + group * 4 + h % kTogether);
      const double beta = 1 / (1 + std::exp(-double{numbers[at]}));
      const double decay =
          std::exp(rates[h] * std::log1p(std::exp(double{numbers[at + 2]} + steps[static_cast<size_t>(h)])));
      double o[40], square = 0;
      for (int c = 0; c < 40; ++c) {
        const int in_group = h % kTogether * 40 + c;
        double seen = 0;
        for (int i = 0; i < 24; ++i) seen += (s[static_cast<size_t>(i * 40 + c)] *= decay) * k[i];
        const double d = beta * (mixed(t, group * kGroup + 48 + in_group, 144 + h * 40 + c) - seen);
        o[c] = 0;
        for (int i = 0; i < 24; ++i) o[c] += (s[static_cast<size_t>(i * 40 + c)] += k[i] * d) * q[i];
        square += o[c] * o[c];
      }
      for (int c = 0; c < 40; ++c) {
        const double z = input(t, group * kGroup + 48 + kTogether * 40 + h % kTogether * 40 + c);
        out[static_cast<size_t>(t * kOut + h * 40 + c)] =
            o[c] / std::sqrt(square / 40 + 1e-6) * norm[static_cast<size_t>(c)] * z / (1 + std::exp(-z));
      }
    }
  }
  return out;
}

TEST(CpuOpsRecurrent, AgreesWithTheFormulas) {
  constexpr int kTokens = 30;
  const std::vector<float> x = random_values(kTokens * kIn, 5), numbers = random_values(kTokens * 12, 6);
  for (const bool in_turns : {false, true}) {
    DeltaLayer layer(2, in_turns, kTokens);
    const std::vector<float> got = layer.run({{.slot = 2, .count = kTokens}}, x, numbers);
    const std::vector<double> want = plain(x, numbers, in_turns);
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-4) << i;
  }
}

TEST(CpuOpsRecurrent, TheSameBitsForAnyCutBatchAndThreads) {
  constexpr int kTokens = 40, kOther = 7;
  const std::vector<float> x = random_values(kTokens * kIn, 7), numbers = random_values(kTokens * 12, 8),
                           other = random_values(kOther * kIn, 9), beside = random_values(kOther * 12, 10);
  DeltaLayer alone(1, false, 64);
  const std::vector<float> whole = alone.run({{.slot = 0, .count = kTokens}}, x, numbers);
  for (const int threads : {1, 2, 3})
    for (const int cut : {1, 2, 3, 17, 39}) {
      DeltaLayer layer(threads, false, 64);
      // The other sequence before it in the first step, behind it in the second.
      std::vector<float> first_x = other, first_numbers = beside;
      const auto append = [](std::vector<float>& to, const std::vector<float>& more) {
        to.insert(to.end(), more.begin(), more.end());
      };
      append(first_x, part_of(x, 0, cut * kIn));
      append(first_numbers, part_of(numbers, 0, cut * 12));
      std::vector<float> got =
          layer.run({{.slot = 1, .count = kOther}, {.slot = 3, .count = cut}}, first_x, first_numbers);
      got.erase(got.begin(), got.begin() + kOther * kOut);
      layer.copy(3, 0);  // as from a snapshot
      std::vector<float> rest_x = part_of(x, cut * kIn, (kTokens - cut) * kIn),
                         rest_numbers = part_of(numbers, cut * 12, (kTokens - cut) * 12);
      append(rest_x, other);
      append(rest_numbers, beside);
      std::vector<float> rest = layer.run({{.slot = 0, .count = kTokens - cut}, {.slot = 1, .count = kOther}},
                                          rest_x, rest_numbers);
      rest.resize(rest.size() - kOther * kOut);
      append(got, rest);
      EXPECT_EQ(got, whole) << threads << " threads, cut at " << cut;
    }
}

TEST(CpuOpsRecurrent, StatesAreReadAndWritten) {
  DeltaLayer layer(1, false, 4);
  layer.run({{.slot = 0, .count = 2}}, random_values(2 * kIn, 5), random_values(2 * 12, 6));
  const double state = 6 * 24 * 40 * 4.0, past = 3 * kColumns * 4.0;
  EXPECT_EQ(layer.work().total().bytes, 2 * (state + past));
  EXPECT_EQ(layer.work().total().float_operations, 2 * (8.0 * 6 * 24 * 40 + 2.0 * kTaps * kColumns));
}

}  // namespace
}  // namespace kt::inline nn
