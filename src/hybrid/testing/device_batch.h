// Batches in device memory, and models that defer, for tests of layers in streams.
#pragma once
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/signal.h"
#include "base/testing/error_of.h"
#include "cuda/testing/test_cuda.h"
#include "hybrid/testing/test_layer.h"

namespace kt::inline hybrid {

inline std::shared_ptr<CpuTeam> stream_team() { return CpuTeam::shared({.threads = 2}); }

// Those of graphs that are gone too; a real driver takes a moment to say so.
inline void release_all_buffers() {
  for (int i = 0; i < 60'000 && !release_buffers().empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// A batch in device memory with room for its result.
struct DeviceBatch {
  TestBatch host;
  DeviceArray<float> input, weights, output;
  DeviceArray<int64_t> ids;

  explicit DeviceBatch(const TestBatch& batch)
      : host(batch), input(batch.input), weights(batch.weights), output(batch.input.size()), ids(batch.ids) {}

  LayerCall call() const {
    LayerCall call = host.call();
    call.input = input.data();
    call.ids = ids.data();
    call.weights = weights.data();
    return call;
  }
  void submit(ExpertLayer& layer, CudaStream stream) const { layer.submit(call(), stream); }
  void sync(ExpertLayer& layer, CudaStream stream) const { layer.sync(output.data(), host.tokens, stream); }
  std::vector<float> run(ExpertLayer& layer, const TestStream& stream) const {
    submit(layer, stream);
    sync(layer, stream);
    return result(stream);
  }
  std::vector<float> result(const TestStream& stream) const {
    stream.wait();
    return output.read();
  }
};

// Calls of the driver by which a submit goes into a stream, as fail_next() takes them.
struct DriverCall {
  const char* entry;
  int skip;
};
inline std::vector<DriverCall> calls_of_a_submit() {
  if (cuda_driver()->posts()) return {{"cuLaunchKernel", 0}};
  return {{"cuMemcpyAsync", 0}, {"cuMemcpyAsync", 1}, {"cuMemcpyAsync", 2}, {"cuLaunchHostFunc", 0}};
}

// Keeps a stream from going on until it is opened.
class Gate {
 public:
  explicit Gate(CudaStream stream) {
    auto held = std::make_unique<std::shared_ptr<Signal>>(open_);
    cuda_driver()->call(&Gate::hold, held.get(), stream);
    static_cast<void>(held.release());
  }
  void open() { open_->set(); }

 private:
  // May run after the gate has ended: it was opened by then.
  static void hold(void* signal) noexcept {
    const std::unique_ptr<std::shared_ptr<Signal>> held(static_cast<std::shared_ptr<Signal>*>(signal));
    (*held)->wait();
  }

  std::shared_ptr<Signal> open_ = std::make_shared<Signal>();
};

// What three layers give, the first two deferring, the pairs cut by the reference split.
struct DeferringModel {
  std::vector<std::unique_ptr<ExpertLayer>> layers;
  std::vector<std::unique_ptr<DeviceBatch>> batches;

  explicit DeferringModel(int tokens) {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(test_layer(stream_team(), {.layer = i, .max_deferred = 3 - i}));
      batches.push_back(std::make_unique<DeviceBatch>(TestBatch(tokens, 20 + static_cast<unsigned>(i))));
    }
  }
  void change_inputs(unsigned seed) const {
    for (const auto& batch : batches) {
      batch->host.input = random_values(batch->host.input.size(), seed++);
      batch->input.write(batch->host.input);
    }
  }
  void enqueue(CudaStream stream) const {
    for (size_t i = 0; i < layers.size(); ++i) {
      batches[i]->submit(*layers[i], stream);
      batches[i]->sync(*layers[i], stream);
    }
  }
  void expect(const char* what) const {
    std::vector<float> carry(batches[0]->host.input.size());
    for (size_t i = 0; i < layers.size(); ++i) {
      const TestBatch& host = batches[i]->host;
      std::vector<int64_t> now(host.ids.size()), later(now);
      split_deferred(host.ids, host.weights, 4, layers[i]->options().max_deferred, 8, now, later);
      EXPECT_EQ(batches[i]->output.read(), sum_of(plain_forward(*layers[i], host, now), carry))
          << what << ", layer " << i;
      carry = plain_forward(*layers[i], host, later);
    }
  }
};

}  // namespace kt::inline hybrid
