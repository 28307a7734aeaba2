// Experts that pass through a GPU in batches, beside their definition in double: whatever the size of batches, whatever
// is held there besides, page-locked or not. On the test driver, or on a GPU with KT_TEST_REAL_CUDA=1.
#include "nn/gpu_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "cuda/testing/test_cuda.h"
#include "nn/testing/reference_layer.h"

namespace kt::inline nn {
namespace {

// Operands are bf16: x, weights and what is between the products, each within 2^-9 of its size.
constexpr double kPassedBound = 4e-3;
constexpr int kTokens = kMostHotTokens + 9, kTopK = 3;

struct PassedLayer {
  Layer layer;
  Experts experts;
  GpuExperts kernels;
  SentExperts sent;
  Batch batch;

  PassedLayer(const GpuMemory& memory, std::shared_ptr<Pool> pool, const ExpertsShape& shape,
              const Format& format, std::span<const int> hot, unsigned seed)
      : layer(shape, format, seed, /*biases=*/seed % 2 == 1),
        experts(make(layer, std::move(pool))),
        kernels(memory, experts, hot, "layer"),
        sent(memory.gpu, experts),
        batch(kTokens, kTopK, shape, seed + 1) {}
};

struct PassedLayers {
  std::shared_ptr<Gpu> gpu = std::make_shared<Gpu>(0);
  GpuStream compute{gpu};
  GpuMemory memory{gpu, &compute};
  std::shared_ptr<Pool> pool;
  std::vector<std::unique_ptr<PassedLayer>> layers;
  std::unique_ptr<ExpertStream> stream;

  PassedLayers(const ExpertsShape& shape, std::string_view format, std::span<const int> hot, size_t bytes,
               int nodes = 1)
      : pool(pool_of(2, nodes)), stream(std::make_unique<ExpertStream>(gpu, pool, bytes)) {
    for (unsigned seed = 1; seed <= 2; ++seed) {
      layers.push_back(std::make_unique<PassedLayer>(memory, pool, shape, format_named(format), hot, seed));
      stream->add(&layers.back()->sent);
    }
    stream->allocate();
  }

  // What each layer gives, and of how many batches.
  struct Result {
    std::vector<std::vector<float>> rows;
    int batches = 0;
  };
  Result step() {
    Result out;
    const auto hold = [&](const auto& values) {
      return memory.hold(values.data(), values.size() * sizeof(values[0]), "rows");
    };
    stream->begin();
    for (size_t i = 0; i < layers.size(); ++i) stream->want(i, layers[i]->kernels.skip());
    for (size_t i = 0; i < layers.size(); ++i) {
      const PassedLayer& at = *layers[i];
      const auto& shape = at.layer.shape;
      const auto floats =
          static_cast<size_t>(at.kernels.many_floats(kTokens, kTopK, shape.experts, kRoundTokens));
      const DeviceBuffer x = hold(at.batch.input), ids = hold(at.batch.ids), weights = hold(at.batch.weights),
                         mid(gpu, floats * sizeof(float), "mid");
      std::vector<float> rows(static_cast<size_t>(kTokens * shape.hidden), std::nanf(""));
      const DeviceBuffer to = hold(rows);
      GpuExperts::Call call{.tokens = kTokens,
                            .top_k = kTopK,
                            .x = x.as<const float>(),
                            .x_stride = shape.hidden,
                            .ids = ids.as<const int32_t>(),
                            .weights = weights.as<const float>(),
                            .mid = mid.as<float>(),
                            .out = to.as<float>(),
                            .out_stride = shape.hidden};
      const auto run = [&](const GpuExperts::Copies& copies) {
        at.kernels.run_many(compute, call, copies, kRoundTokens);
        call.add = true;
      };
      if (at.kernels.count() > 0) run(at.kernels.held());
      stream->take(i, compute, [&](const GpuExperts::Copies& copies) {
        ++out.batches;
        run(copies);
      });
      compute.copy(rows.data(), to.at(), rows.size() * sizeof(float));
      compute.wait();
      out.rows.push_back(std::move(rows));
    }
    stream->drain();
    return out;
  }
  void expect_right() {
    std::vector<std::vector<float>> before;
    for (int round = 0; round < 2; ++round) {
      const Result got = step();
      for (size_t i = 0; i < layers.size(); ++i)
        EXPECT_LT(relative_error(got.rows[i], reference(layers[i]->layer, layers[i]->batch, {})),
                  kPassedBound)
            << "layer " << i << ", step " << round;
      if (round > 0) {
        EXPECT_EQ(got.rows, before);
      }
      before = got.rows;
    }
  }
};

TEST(GpuStream, BatchesOfAnySize) {
  const ExpertsShape shape{.experts = 5, .hidden = 32, .inter = 64};
  for (const auto& [format, experts, batches] :
       {std::tuple("bf16", 1, 10), std::tuple("int4_g32", 2, 6), std::tuple("q8_0", 5, 2)}) {
    const size_t one = PassedLayers(shape, format, {}, 0).layers[0]->sent.expert_bytes();
    PassedLayers layers(shape, format, {}, 4 * (static_cast<size_t>(experts) * one + 4 * 256));
    EXPECT_EQ(layers.step().batches, batches) << format;
    layers.expect_right();
  }
}

TEST(GpuStream, BesideThoseThatAreThere) {
  const ExpertsShape shape{.experts = 7, .hidden = 32, .inter = 64};
  for (const std::vector<int>& hot : {std::vector<int>{2, 3, 6}, {0, 1, 2, 3, 4, 5}}) {
    PassedLayers layers(shape, "q4_0", hot, 0);
    const size_t one = layers.layers[0]->sent.expert_bytes() + layers.layers[1]->sent.expert_bytes();
    layers.expect_right();
    EXPECT_EQ(layers.stream->sent_bytes(), 2 * one * (7 - hot.size()));  // of two steps
  }
}

TEST(GpuStream, OnePieceForEachNode) {
  PassedLayers layers({.experts = 3, .hidden = 32, .inter = 64}, "int4_g32", {}, 0, /*nodes=*/2);
  EXPECT_GE(layers.layers[0]->sent.parts().size(), 2);
  layers.expect_right();
}

TEST(GpuStream, LocksLargeBuffersWhereTheyLie) {
  const ExpertsShape shape{.experts = 41, .hidden = 64, .inter = 96};
  {
    PassedLayers layers(shape, "bf16", {}, 1 << 20);
    for (const auto& layer : layers.layers) {
      EXPECT_TRUE(layer->sent.locked());
      EXPECT_EQ(layer->sent.why(), "");
    }
    layers.expect_right();
  }
  if (kTestCuda.real()) return;
  kTestCuda.fail_next("cuMemHostRegister_v2", 801);
  PassedLayers layers(shape, "bf16", {}, 1 << 20);
  EXPECT_FALSE(layers.layers[0]->sent.locked());
  EXPECT_THAT(layers.layers[0]->sent.why(), testing::ContainsRegex("page-lock [0-9.]+ MiB of memory"));
  EXPECT_TRUE(layers.layers[1]->sent.locked());
  layers.expect_right();
}

}  // namespace
}  // namespace kt::inline nn
