// Training calls of several threads at once: with the thread sanitizer, and to the bit.
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "hybrid/expert_layer.h"
#include "hybrid/testing/test_layer.h"

namespace kt::inline hybrid {
namespace {

constexpr int kRank = 3;
constexpr int kSteps = 6;

// Everything that a forward and its backward give.
struct TrainStep {
  std::vector<float> output, input, weights, a1, b1, a2, b2;
  bool operator==(const TrainStep&) const = default;
};

struct TrainInputs {
  TestBatch batch;
  std::vector<float> a1, b1, a2, b2, dout;

  TrainInputs(int tokens, unsigned seed) : batch(tokens, seed) {
    const auto [experts, hidden, inter] = kTestShape;
    const auto draw = [&](int64_t rows, int64_t columns) {
      return random_values(static_cast<size_t>(rows * columns), ++seed, 0.2f);
    };
    a1 = draw(experts * kRank, hidden);
    b1 = draw(experts * 2 * inter, kRank);
    a2 = draw(experts * kRank, inter);
    b2 = draw(experts * hidden, kRank);
    dout = draw(tokens, hidden);
  }

  TrainStep step(ExpertLayer& layer, bool keep) const {
    const ExpertLora lora{.gate_up = {kRank, 0.5f, a1.data(), b1.data()},
                          .down = {kRank, 0.5f, a2.data(), b2.data()}};
    TrainStep out;
    const auto make_room = [](std::vector<float>& to, const std::vector<float>& like) {
      to.resize(like.size());
    };
    make_room(out.output, dout);
    make_room(out.input, dout);
    make_room(out.weights, batch.weights);
    make_room(out.a1, a1);
    make_room(out.b1, b1);
    make_room(out.a2, a2);
    make_room(out.b2, b2);
    SavedCall saved;
    layer.train_forward(batch.call(), out.output.data(), lora, keep ? &saved : nullptr);
    layer.train_backward(batch.call(), lora,
                         {.saved = keep ? &saved : nullptr,
                          .output_grad = dout.data(),
                          .output_grad_type = Real::kF32,
                          .input_grad = out.input.data(),
                          .weights_grad = out.weights.data(),
                          .lora_grads = {out.a1.data(), out.b1.data(), out.a2.data(), out.b2.data()}});
    return out;
  }
};

// Two threads, each with a layer of its own and then both with one, on the same workers and the same workspace.
TEST(ExpertLayerTrain, TwoThreadsHaveTheBitsOfOne) {
  const auto team = CpuTeam::shared({.threads = 2});
  const std::array layers = {test_layer(team, {.layer = 0}), test_layer(team, {.layer = 1})};
  const std::array inputs = {TrainInputs(5, 30), TrainInputs(23, 60)};
  for (const bool same_layer : {false, true}) {
    std::array<TrainStep, 2> want;
    for (size_t i = 0; i < 2; ++i) want[i] = inputs[i].step(*layers[same_layer ? 0 : i], true);
    std::array<int, 2> differ = {};
    const auto train = [&](size_t i) {
      for (int s = 0; s < kSteps; ++s)
        differ[i] += !(inputs[i].step(*layers[same_layer ? 0 : i], s % 2 == 0) == want[i]);
    };
    std::thread other(train, 1);
    train(0);
    other.join();
    EXPECT_EQ(differ[0], 0) << same_layer;
    EXPECT_EQ(differ[1], 0) << same_layer;
    EXPECT_NE(want[0].a1, std::vector<float>(want[0].a1.size())) << "something is trained";
  }
}

}  // namespace
}  // namespace kt::inline hybrid
