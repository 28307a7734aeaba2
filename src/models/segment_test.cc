// The demo model with its layers in several places, all of them CPUs: bit for bit the model in one.
#include "models/segment.h"

#include <gmock/gmock.h>

#include "base/error.h"
#include "models/families.h"
#include "models/transformer.h"
#include "nn/cpu_ops.h"

namespace kt::inline models {
namespace {

struct SplitDemo {
  Checkpoint checkpoint{KT_DEMO_MODEL};
  ModelSpec spec = describe_model(checkpoint.config_json(), KT_DEMO_MODEL);
  std::shared_ptr<Pool> pool = std::make_shared<Pool>(PoolOptions{.threads = 2});

  Transformer in_places(const std::vector<int>& layers, bool sizes_only = false) const {
    std::vector<PlacedLayers> places;
    for (const int count : layers) places.push_back({make_cpu_ops(pool, {.sizes_only = sizes_only}), count});
    return {checkpoint, spec, std::move(places), {.max_tokens = 96}};
  }
};

// Two prompts, one in pieces, then answers of both side by side; only some rows have logits.
std::vector<float> answers_of(Transformer& model) {
  const auto cache = model.make_cache(4);
  const std::vector<std::vector<int32_t>> pages = {{2, 0}, {3, 1}};
  std::vector<std::vector<int32_t>> texts(2);
  for (int i = 0; i < 80; ++i) texts[0].push_back((i * 37 + 11) % 4000);
  for (int i = 0; i < 9; ++i) texts[1].push_back((i * 13 + 7) % 4000);
  using Logits = SequenceInput::Logits;
  std::vector<float> out;
  const auto step = [&](const std::vector<SequenceInput>& inputs) {
    const auto rows = static_cast<size_t>(Transformer::logit_rows(inputs));
    out.resize(out.size() + rows * static_cast<size_t>(model.spec().vocab));
    model.forward(*cache, inputs, out.data() + out.size() - rows * static_cast<size_t>(model.spec().vocab));
  };
  const auto piece = [&](size_t who, int from, int count, Logits logits) {
    return SequenceInput{
        .tokens = std::span(texts[who]).subspan(static_cast<size_t>(from), static_cast<size_t>(count)),
        .position = from,
        .pages = pages[who].data(),
        .logits = logits};
  };
  step({piece(0, 0, 40, Logits::kNone)});
  step({piece(0, 40, 35, Logits::kLast), piece(1, 0, 6, Logits::kAll)});
  for (int i = 0; i < 3; ++i) step({piece(0, 75 + i, 1, Logits::kLast), piece(1, 6 + i, 1, Logits::kLast)});
  return out;
}

TEST(Segments, GiveTheBitsOfOnePlace) {
  const SplitDemo demo;
  Transformer whole = demo.in_places({6});
  const std::vector<float> expected = answers_of(whole);
  for (const std::vector<int>& layers :
       {std::vector<int>{3, 3}, {1, 5}, {2, 1, 3}, {1, 1, 1, 1, 1, 1}, {6, 0}, {4, 0, 2, 0}}) {
    Transformer model = demo.in_places(layers);
    EXPECT_EQ(answers_of(model), expected);
    EXPECT_EQ(model.expert_counts()->snapshot(), whole.expert_counts()->snapshot());
    EXPECT_EQ(model.packed_bytes(), whole.packed_bytes());
    EXPECT_EQ(model.keeps(), whole.keeps());
  }
}

TEST(Segments, AddUpWhatTheyDo) {
  const SplitDemo demo;
  Transformer whole = demo.in_places({6}), model = demo.in_places({2, 1, 3});
  answers_of(whole);
  answers_of(model);
  EXPECT_DOUBLE_EQ(model.work().total().bytes, whole.work().total().bytes);
  EXPECT_EQ(model.work().places.size(), 1u);
  const Work one = whole.decode_work(3, 50), split = model.decode_work(3, 50);
  EXPECT_DOUBLE_EQ(split.total().bytes, one.total().bytes);
  EXPECT_GT(one.total().bytes, 0);
  for (const StepPart& part : model.parts()) {
    const auto same = std::ranges::find(whole.parts(), part.name, &StepPart::name);
    ASSERT_NE(same, whole.parts().end()) << part.name;
    if (part.name == "angles") continue;  // each place computes its own
    EXPECT_EQ(part.calls, same->calls) << part.name;
    EXPECT_DOUBLE_EQ(part.amount.bytes, same->amount.bytes) << part.name;
  }
}

TEST(Segments, ArePlannedWithWhatEachTakes) {
  const SplitDemo demo;
  const MemoryRequest use{.sequences = 2, .context = 200};
  const Transformer whole = demo.in_places({6}, true), split = demo.in_places({2, 4}, true),
                    real = demo.in_places({2, 4});
  const PlaceMemory one = whole.memory_plan(use).host(), two = split.memory_plan(use).host(),
                    loaded = real.memory_plan(use).host();
  EXPECT_EQ(two.weights(), one.weights());
  EXPECT_EQ(two.kv_cache, one.kv_cache);
  EXPECT_EQ(two.loading, one.loading);
  EXPECT_GT(two.workspace, one.workspace);  // rows of each
  EXPECT_EQ(two.workspace, loaded.workspace);
  EXPECT_EQ(real.make_cache(5)->bytes(), whole.keeps().page_bytes() * 5);
}

TEST(Segments, HaveEveryLayerOnce) {
  const SplitDemo demo;
  EXPECT_THROW(demo.in_places({3, 2}, true), Error);
  EXPECT_THROW(demo.in_places({}, true), Error);
}

}  // namespace
}  // namespace kt::inline models
