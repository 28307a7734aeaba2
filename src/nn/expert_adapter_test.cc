#include "nn/expert_adapter.h"

#include <gtest/gtest.h>

#include <atomic>

#include "nn/testing/reference_layer.h"

namespace kt::inline nn {
namespace {

using Input = ExpertAdapter::Input;

float element(const std::byte* row, Real type, int64_t i) {
  if (type == Real::kF32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
  return type == Real::kBf16 ? to_f32(bf16{bits}) : to_f32(f16{bits});
}

// y += B (A x) on gate, up and down of every second expert, by the definition; ranks of their own.
class Lora : public ExpertAdapter {
 public:
  Lora(const ExpertsShape& shape, unsigned seed) : shape_(shape) {
    std::mt19937 random(seed);
    for (int p = 0; p < 3; ++p) {
      const int k = p == 2 ? shape.inter : shape.hidden, n = p == 2 ? shape.hidden : shape.inter;
      const auto values = [&](int rows, int columns) {
        std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(columns)));
        std::vector<float> out(static_cast<size_t>(shape.experts) * rows * columns);
        for (float& x : out) x = normal(random);
        return out;
      };
      a_[p] = values(kRank[p], k);
      b_[p] = values(n, kRank[p]);
    }
  }

  int kept_floats(Input input) const noexcept override {
    return input == Input::kTokens ? kRank[0] + kRank[1] : kRank[2];
  }

  void read(const Rows& rows) const noexcept override {
    if (!adapts(rows.expert)) return;
    float* kept = rows.kept + int64_t{rows.first} * kept_floats(rows.input);
    for (int i = 0; i < rows.count; ++i)
      for (const int p : rows.input == Input::kTokens ? std::vector{0, 1} : std::vector{2})
        for (int r = 0; r < kRank[p]; ++r) {
          const int k = p == 2 ? shape_.inter : shape_.hidden;
          const float* a = a_[p].data() + (int64_t{rows.expert} * kRank[p] + r) * k + rows.column;
          double sum = 0;
          for (int c = 0; c < rows.columns; ++c) sum += double{a[c]} * element(rows.row(i), rows.type, c);
          *kept++ = static_cast<float>(sum);
        }
  }

  void add(const Tile& tile) const noexcept override {
    if (!adapts(tile.expert)) return;
    const int p = static_cast<int>(tile.part), n = p == 2 ? shape_.hidden : shape_.inter;
    const int floats = kept_floats(p == 2 ? Input::kActivated : Input::kTokens);
    for (int i = 0; i < tile.m; ++i)
      for (int c = 0; c < tile.columns; ++c) {
        const float* kept = tile.kept + i * floats + (p == 1 ? kRank[0] : 0);
        const float* b = b_[p].data() + (int64_t{tile.expert} * n + tile.column + c) * kRank[p];
        double sum = 0;
        for (int r = 0; r < kRank[p]; ++r) sum += double{b[r]} * kept[r];
        tile.at(i, c / 16)[c % 16] += static_cast<float>(sum);
      }
  }

  // W + B A: the same in one matrix.
  ChangeWeights dense() const {
    return [this](int expert, std::vector<float>& gate, std::vector<float>& up, std::vector<float>& down) {
      if (!adapts(expert)) return;
      std::vector<float>* all[] = {&gate, &up, &down};
      for (int p = 0; p < 3; ++p) {
        const int k = p == 2 ? shape_.inter : shape_.hidden, n = p == 2 ? shape_.hidden : shape_.inter;
        for (int64_t i = 0; i < n; ++i)
          for (int64_t j = 0; j < k; ++j) {
            double sum = 0;
            for (int64_t r = 0; r < kRank[p]; ++r)
              sum += double{b_[p][(expert * int64_t{n} + i) * kRank[p] + r]} *
                     a_[p][(expert * int64_t{kRank[p]} + r) * k + j];
            (*all[p])[i * k + j] += static_cast<float>(sum);
          }
      }
    };
  }

 private:
  static constexpr int kRank[] = {3, 5, 2};
  static bool adapts(int expert) { return expert % 2 == 0; }
  ExpertsShape shape_;
  std::vector<float> a_[3], b_[3];  // [experts, rank, k], [experts, n, rank]
};

std::vector<float> run(const Experts& experts, const Batch& batch, const ExpertAdapter& adapter) {
  std::vector<float> out(static_cast<size_t>(batch.tokens) * experts.shape().hidden, std::nanf(""));
  ForwardArgs args = batch.args(out.data());
  args.adapter = &adapter;
  experts.forward(args);
  return out;
}

LayerFormats formats(const char* gate, const char* up, const char* down) {
  return {format_named(gate), format_named(up), format_named(down)};
}

TEST(ExpertAdapter, LoraIsWhatDenseWeightsGive) {
  for (const LayerFormats& f : {formats("int8", "int8", "int8"), formats("f32", "f32", "f32"),
                                formats("q4_k", "bf16", "q8_0"), formats("q4_k", "q6_k", "q6_k")}) {
    const Layer layer({5, 256, 512}, f, 1);
    const Lora lora(layer.shape, 2);
    for (const int tokens : {1, 4, 33, 100}) {
      const Batch batch(tokens, 2, layer.shape, 3);
      const auto want = reference(layer, batch, {}, nullptr, lora.dense());
      EXPECT_GT(relative_error(run(make(layer, pool_of(1), {.precision = Precision::kF32}), batch), want),
                0.1)
          << "the adapter makes no difference";
      for (const int nodes : {1, 2, 3}) {
        // f32 throughout, and what an adapter keeps and adds is rounded to f32 once more
        const Experts exact = make(layer, pool_of(nodes, nodes), {.precision = Precision::kF32}),
                      rounded = make(layer, pool_of(nodes, nodes));
        const auto got = run(exact, batch, lora), quantised = run(rounded, batch, lora);
        EXPECT_LT(relative_error(got, want), 3e-6) << tokens << " tokens, " << nodes << " nodes";
        EXPECT_LT(relative_error(quantised, want), 0.03) << tokens << " tokens, " << nodes << " nodes";
        for (const int threads : {nodes + 1, nodes + 4}) {
          const auto pool = pool_of(threads, nodes);
          EXPECT_EQ(run(make(layer, pool, {.precision = Precision::kF32}), batch, lora), got) << threads;
          EXPECT_EQ(run(make(layer, pool), batch, lora), quantised) << threads;
        }
      }
    }
  }
}

TEST(ExpertAdapter, OddSizesBiasesAndElementTypes) {
  const Layer layer({3, 97, 75}, formats("int4_g32", "int4_g32", "int8"), 4, true);
  const Lora lora(layer.shape, 5);
  const Batch batch(11, 2, layer.shape, 6);
  const Activation f{.limit = 7, .alpha = 1.702f};
  const Experts experts = make(layer, pool_of(2), {.activation = f, .precision = Precision::kF32});
  const auto got = run(experts, batch, lora);
  EXPECT_LT(relative_error(got, reference(layer, batch, f, nullptr, lora.dense())), 3e-6);
  // bf16 rows that are not next to each other hold the same numbers
  const int stride = 101;
  std::vector<uint16_t> input(11 * stride, 0x7fff);
  for (int t = 0; t < 11; ++t)
    for (int h = 0; h < 97; ++h) input[t * stride + h] = to_bf16(batch.input[t * 97 + h]).bits;
  std::vector<float> narrow(got.size());
  ForwardArgs args = batch.args(narrow.data());
  args.input = input.data();
  args.input_type = Real::kBf16;
  args.input_stride = stride;
  args.adapter = &lora;
  experts.forward(args);
  EXPECT_EQ(narrow, got);
}

// Counts what it is given, and finds in add() what read() kept of every row.
class Counter : public ExpertAdapter {
 public:
  explicit Counter(const Batch& batch, const ExpertsShape& shape)
      : shape_(shape), width_(std::max(shape.hidden, shape.inter)) {
    for (auto& all : counts_)
      all = std::vector<std::atomic<int>>(static_cast<size_t>(shape.experts) * batch.tokens * width_);
    tokens_ = batch.tokens;
  }
  int kept_floats(Input) const noexcept override { return 1; }
  void read(const Rows& rows) const noexcept override {
    const bool tokens = rows.input == Input::kTokens;
    for (int i = 0; i < rows.count; ++i) {
      rows.kept[rows.first + i] = static_cast<float>(rows.tokens[i] + 1) * (tokens ? 1 : -1);
      for (int c = 0; c < rows.columns; ++c)
        ++at(tokens ? 3 : 4, rows.expert, rows.tokens[i], rows.column + c);
    }
  }
  void add(const Tile& tile) const noexcept override {
    const bool down = tile.part == ExpertPart::kDown;
    for (int i = 0; i < tile.m; ++i) {
      if (tile.kept[i] != static_cast<float>(tile.tokens[i] + 1) * (down ? -1 : 1)) ++wrong_;
      for (int c = 0; c < tile.columns; ++c)
        ++at(static_cast<int>(tile.part), tile.expert, tile.tokens[i], tile.column + c);
    }
  }
  // gate, up and down that were added to, tokens and activated rows that were read
  int count(int what, int expert, int token, int column) const { return at(what, expert, token, column); }
  int wrong() const { return wrong_; }

 private:
  std::atomic<int>& at(int what, int expert, int token, int column) const {
    return counts_[what][(static_cast<size_t>(expert) * tokens_ + token) * width_ + column];
  }
  ExpertsShape shape_;
  int width_, tokens_ = 0;
  mutable std::vector<std::atomic<int>> counts_[5];
  mutable std::atomic<int> wrong_ = 0;
};

TEST(ExpertAdapter, EverySumIsGivenOnceWithWhatWasKept) {
  for (const LayerFormats& f : {formats("int8", "int8", "int8"), formats("int8", "bf16", "int4")}) {
    const Layer layer({6, 80, 1000}, f, 7);
    for (const int tokens : {1, 50})
      for (const int nodes : {1, 2}) {
        const Batch batch(tokens, 3, layer.shape, 8);
        const Counter counter(batch, layer.shape);
        const Experts experts = make(layer, pool_of(3, nodes));
        EXPECT_EQ(run(experts, batch, counter), run(experts, batch)) << "nothing was added";
        EXPECT_EQ(counter.wrong(), 0);
        for (int e = 0; e < layer.shape.experts; ++e)
          for (int t = 0; t < tokens; ++t) {
            const int slots =
                static_cast<int>(std::count(batch.ids.begin() + t * 3, batch.ids.begin() + (t + 1) * 3, e));
            const auto all_are = [&](int what, int columns, int want) {
              for (int c = 0; c < columns; ++c)
                if (counter.count(what, e, t, c) != want) return false;
              return true;
            };
            EXPECT_TRUE(all_are(0, 1000, slots) && all_are(1, 1000, slots) && all_are(4, 1000, slots));
            // each node adds its part of down, and reads tokens itself
            EXPECT_TRUE(all_are(2, 80, nodes * slots) && all_are(3, 80, nodes * slots));
          }
      }
  }
}

TEST(ExpertAdapter, WhatIsKeptIsPartOfThePlan) {
  const Layer layer({4, 256, 128}, format_named("int8"), 9);
  const Lora lora(layer.shape, 10);
  for (const int tokens : {1, 64}) {
    const auto workspace = std::make_shared<Workspace>();
    Experts experts(pool_of(2), workspace, layer.shape,
                    {.gate = layer.format, .up = layer.format, .down = layer.format});
    for (int e = 0; e < 4; ++e) experts.load(e, layer.weights(e));
    Batch batch(tokens, 2, layer.shape, 11);
    for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = static_cast<int32_t>(i % 4);
    run(experts, batch, lora);
    EXPECT_EQ(workspace->bytes(), experts.forward_bytes(tokens, 2, &lora));
    EXPECT_LT(experts.forward_bytes(tokens, 2), experts.forward_bytes(tokens, 2, &lora));
  }
}

}  // namespace
}  // namespace kt::inline nn
