// Placements of a model small enough to count by hand, and of the demo; refusals with their numbers; what is printed.
#include "models/placement.h"

#include <gmock/gmock.h>

#include <numeric>

#include "base/testing/error_of.h"
#include "models/families.h"
#include "models/transformer.h"
#include "nn/cpu_ops.h"
#include "nn/gpu_ops.h"

namespace kt::inline models {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr Place kGpu0{.kind = Place::Kind::kGpu, .index = 0};
constexpr Place kNode0{.kind = Place::Kind::kNode, .index = 0},
    kNode1{.kind = Place::Kind::kNode, .index = 1};

// A dense layer and two of four experts on two nodes; those of the last are larger. On the GPU, whatever is hot: 10
// taken, 3 x 20 and 15 dense, 2 pages of 3 x 2, states of 1, 30 of workspace: 128 MiB.
PlacementSizes small() {
  PlacementSizes out{.model = "small",
                     .layers = {},
                     .embedding = 50 * kMiB,
                     .head = 15 * kMiB,
                     .page_tokens = 64,
                     .workspace = 30 * kMiB,
                     .host_workspace = 7 * kMiB};
  out.layers.resize(3, {.dense = 20 * kMiB, .page = 2 * kMiB, .page_int8 = kMiB});
  out.layers[0].state = kMiB;
  out.layers[1].experts = out.layers[2].experts = 4;
  out.layers[1].expert = {3 * kMiB, 2 * kMiB};
  out.layers[2].expert = {4 * kMiB, 4 * kMiB};
  return out;
}

PlacementWish wish(uint64_t gpu_memory, const char* experts = "auto") {
  return {.devices = {{.index = 0, .name = "card", .free = 300 * kMiB, .taken = 10 * kMiB}},
          .gpu_memory = gpu_memory,
          .use = {.sequences = 1, .context = 100},
          .experts = parse_expert_wish(experts, "gpu_experts")};
}

std::vector<std::vector<int>> hot_of(const Placement& placement) {
  std::vector<std::vector<int>> out;
  for (const LayerPlacement& layer : placement.layers) out.push_back(layer.hot);
  return out;
}

std::string refusal(const PlacementSizes& sizes, const PlacementWish& asked,
                    ErrorKind kind = ErrorKind::kMemory) {
  try {
    decide_placement(sizes, asked);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    return error.what();
  }
  return "no error";
}

TEST(Placement, EveryPartIsSomewhere) {
  const Placement got = decide_placement(small(), wish(155 * kMiB));
  EXPECT_EQ(got.pages, 2);
  EXPECT_EQ(hot_of(got), (std::vector<std::vector<int>>{{}, {0, 1}, {0, 1}}));  // 5 + 8 + 5 + 8 of 27
  EXPECT_EQ(got.hot_experts(), 4);
  EXPECT_EQ(got.all_experts(), 8);
  EXPECT_EQ(got.hot(), hot_of(got));
  EXPECT_EQ(got.routed_layers(), 2);
  EXPECT_THAT(bytes_by_place(got),
              ElementsAre(PlaceBytes{kGpu0, 154 * kMiB}, PlaceBytes{kNode0, (4 * 3 + 4 * 4) * kMiB},
                          PlaceBytes{kNode1, (4 * 2 + 4 * 4) * kMiB}, PlaceBytes{kHost, 7 * kMiB}));
  EXPECT_EQ(got.layers[2].copies.bytes, 16 * kMiB);
  EXPECT_EQ(got.layers[2].routed.bytes, 32 * kMiB);  // copies are beside them
  EXPECT_EQ(got.layers[0].states.bytes, kMiB);
  EXPECT_EQ(got.embedding.place, kHost);
  EXPECT_EQ(got, decide_placement(small(), wish(155 * kMiB)));
}

TEST(Placement, AsManyExpertsAsFit) {
  const auto count = [](uint64_t mib) { return decide_placement(small(), wish(mib * kMiB)).hot_experts(); };
  EXPECT_EQ(count(128), 0);
  EXPECT_EQ(count(132), 0);
  EXPECT_EQ(count(133), 1);
  EXPECT_EQ(count(140), 1);
  EXPECT_EQ(count(141), 2);
  EXPECT_EQ(count(128 + 52), 8);
  EXPECT_EQ(count(300), 8);
}

TEST(Placement, FreeMemoryLessFivePercentIsWhatThereIs) {
  PlacementWish asked = wish(0);
  asked.devices[0].free = 142 * kMiB;  // 10 taken, 134.9 allowed of them
  const Placement got = decide_placement(small(), asked);
  EXPECT_EQ(got.devices[0].allowed, 10 * kMiB + 142 * kMiB / 100 * 95);
  EXPECT_EQ(got.devices[0].decided_by, "142.0 MiB free less 5 %");
  EXPECT_EQ(got.hot_experts(), 2);  // 118 and 13 of 134.9
}

TEST(Placement, StrategiesSayWhichExperts) {
  const PlacementSizes sizes = small();
  PlacementWish asked = wish(200 * kMiB, "1");
  EXPECT_EQ(hot_of(decide_placement(sizes, asked)), (std::vector<std::vector<int>>{{}, {0}, {0}}));
  asked.strategy = ExpertStrategy::kFrontLoading;
  EXPECT_EQ(hot_of(decide_placement(sizes, asked)), (std::vector<std::vector<int>>{{}, {0, 1}, {}}));
  asked.strategy = ExpertStrategy::kRandom;
  const std::vector<std::vector<int>> random = hot_of(decide_placement(sizes, asked));
  EXPECT_EQ(random[1].size() + random[2].size(), 2u);
  asked.seed = 7;
  EXPECT_NE(hot_of(decide_placement(sizes, asked)), random);
  const ExpertStatistics counts{.layers = 3, .experts = 4, .counts = {9, 9, 9, 9, 1, 2, 3, 4, 0, 0, 5, 0}};
  asked = wish(200 * kMiB, "25%");
  asked.statistics = &counts;  // frequency, where nothing else is asked for
  EXPECT_EQ(hot_of(decide_placement(sizes, asked)), (std::vector<std::vector<int>>{{}, {3}, {2}}));
  asked.strategy = ExpertStrategy::kFrequency;
  asked.statistics = nullptr;
  EXPECT_THAT(refusal(sizes, asked, ErrorKind::kInput), HasSubstr("`expert_statistics`"));
}

TEST(Placement, AModelWithoutExpertsHasNoneHot) {
  PlacementSizes dense = small();
  for (PlacementSizes::Layer& layer : dense.layers) {
    layer.experts = 0;
    layer.expert.clear();
  }
  for (const char* experts : {"auto", "8", "50%"})
    EXPECT_EQ(decide_placement(dense, wish(130 * kMiB, experts)).hot_experts(), 0);
}

TEST(Placement, WhatDoesNotFitIsRefusedWithNumbers) {
  EXPECT_EQ(refusal(small(), wish(100 * kMiB)),
            "GPU 0 (card): 128.0 MiB needed without any expert (dense parts 75.0 MiB, cache of 100 tokens "
            "13.0 MiB, "
            "workspace 30.0 MiB, driver 10.0 MiB), 100.0 MiB allowed (`gpu_memory`): 28.0 MiB too much; try "
            "`kv` int8 "
            "(6.0 MiB less), `linear_format` int4_g64, `gpu_memory` of 128.0 MiB or more or `gpu` off");
  PlacementWish narrow = wish(124 * kMiB);
  narrow.linears_as_stored = false;
  EXPECT_THAT(
      refusal(small(), narrow),
      HasSubstr(
          ": 4.0 MiB too much; try `kv` int8 (6.0 MiB less), a context of at most 64 tokens, `gpu_memory`"));
  PlacementSizes least = small();
  for (PlacementSizes::Layer& layer : least.layers) layer.page_int8 = layer.page;
  narrow.gpu_memory = 0;
  narrow.devices[0].free = 100 * kMiB;
  narrow.devices[0].name = "";
  const std::string line = refusal(least, narrow);
  EXPECT_THAT(line, HasSubstr("GPU 0: 128.0 MiB needed"));
  EXPECT_THAT(line, HasSubstr("105.0 MiB allowed (100.0 MiB free less 5 %): 23.0 MiB too much"));
  EXPECT_TRUE(line.ends_with("too much; try `gpu` off")) << line;
  EXPECT_EQ(refusal(small(), wish(400 * kMiB)),
            "GPU 0 (card): `gpu_memory` is 400.0 MiB, 310.0 MiB are free: 90.0 MiB too much");
}

// Who says how much may be taken is named.
TEST(Placement, AShareOfTheCardIsNamedAsIt) {
  PlacementWish asked = wish(400 * kMiB);
  asked.gpu_memory_from = "`mem_fraction_static` 0.8";
  EXPECT_EQ(refusal(small(), asked),
            "GPU 0 (card): `mem_fraction_static` 0.8 is 400.0 MiB, 310.0 MiB are free: 90.0 MiB too much");
  asked.gpu_memory = 200 * kMiB;
  EXPECT_EQ(decide_placement(small(), asked).devices[0].decided_by, "`mem_fraction_static` 0.8");
}

TEST(Placement, MoreExpertsThanFitAreRefusedWithNumbers) {
  EXPECT_EQ(refusal(small(), wish(155 * kMiB, "3")),
            "GPU 0 (card): `gpu_experts` 3 a layer: 6 experts are 39.0 MiB, 27.0 MiB of 155.0 MiB are left "
            "beside dense "
            "parts, cache and workspace: 12.0 MiB too much; 4 fit, 2 a layer: try `gpu_experts` 2 or auto");
  EXPECT_THAT(refusal(small(), wish(155 * kMiB, "100%")),
              HasSubstr("`gpu_experts` 100%: 8 experts are 52.0 MiB"));
  EXPECT_EQ(refusal(small(), wish(155 * kMiB, "2")), "no error");
}

TEST(Placement, WhatIsNoWish) {
  PlacementWish none = wish(0);
  none.devices.clear();
  EXPECT_EQ(refusal(small(), none, ErrorKind::kInput), "a placement on no GPU: one is needed at least");
  PlacementWish empty = wish(0);
  empty.use.context = 0;
  EXPECT_EQ(refusal(small(), empty, ErrorKind::kInput), "a placement for 1 sequences of 0 tokens");
}

TEST(Placement, IsPrinted) {
  EXPECT_EQ(describe(decide_placement(small(), wish(146 * kMiB))),
            "placement of small, 3 layers, 1 sequence of 100 tokens\n"
            "part            layers  place  decided by                                           bytes\n"
            "embedding       -       host   rows are read from the mapped file                50.0 MiB\n"
            "dense parts     0-2     GPU 0  `gpu`                                             60.0 MiB\n"
            "KV cache        0-2     GPU 0  `gpu`: 2 pages of 64 tokens                       12.0 MiB\n"
            "states          0       GPU 0  `gpu`                                              1.0 MiB\n"
            "routed experts  1-2     host   run by the CPU                                    52.0 MiB\n"
            "  hot copies    1-2     GPU 0  `gpu_experts` auto, uniform: 1 to 2 of 4 a layer  18.0 MiB\n"
            "head            -       GPU 0  `gpu`                                             15.0 MiB\n"
            "workspace       -       GPU 0  `gpu`                                             30.0 MiB\n"
            "workspace       -       host   run by the CPU                                     7.0 MiB\n"
            "driver          -       GPU 0  context and kernels                               10.0 MiB\n"
            "GPU 0 (card): 146.0 MiB of 146.0 MiB (`gpu_memory`)\n"
            "node 0: 28.0 MiB\n"
            "node 1: 24.0 MiB\n"
            "host: 7.0 MiB\n");
}

TEST(Placement, IsWrittenAsJson) {
  const OrderedJson got = json_of(decide_placement(small(), wish(146 * kMiB)));
  EXPECT_EQ(got["bytes"].dump(), text("{{\"GPU 0\":{},\"node 0\":{},\"node 1\":{},\"host\":{}}}", 146 * kMiB,
                                      28 * kMiB, 24 * kMiB, 7 * kMiB));
  EXPECT_EQ(got["devices"][0]["allowed"], 146 * kMiB);
  EXPECT_EQ(got["layers"].size(), 3u);
  EXPECT_FALSE(got["layers"][0].contains("hot"));
  EXPECT_EQ(
      got["layers"][1].dump(),
      R"({"layer":1,"dense":{"place":"GPU 0","bytes":20971520,"decided_by":"`gpu`"},)"
      R"("cache":{"place":"GPU 0","bytes":4194304,"decided_by":"`gpu`"},)"
      R"("experts":{"place":"host","bytes":20971520,"decided_by":"run by the CPU","count":4,)"
      R"("bytes_each":5242880,"bytes_of_node":[12582912,8388608]},)"
      R"("hot":{"place":"GPU 0","bytes":10485760,"decided_by":"`gpu_experts` auto, uniform","experts":[0,1]}})");
  const OrderedJson none = json_of(decide_placement(small(), wish(128 * kMiB)));
  EXPECT_EQ(none["layers"][1]["hot"].dump(),
            R"({"place":"GPU 0","bytes":0,"decided_by":"`gpu_experts` auto, uniform","experts":[]})");
}

// Layers that have nothing in common with their neighbours are listed, not spanned.
TEST(Placement, LayersOfARowAreListed) {
  PlacementSizes sizes = small();
  sizes.layers.insert(sizes.layers.begin() + 2, 2, sizes.layers[0]);
  EXPECT_THAT(describe(decide_placement(sizes, wish(0))), HasSubstr("routed experts  1, 4 "));
}

// The parts add up to what the same model's memory plan says, on one node and on two.
TEST(PlacementSizes, AreThoseOfTheMemoryPlan) {
  const Checkpoint checkpoint(KT_DEMO_MODEL);
  for (const int nodes : {1, 2}) {
    const auto pool =
        std::make_shared<Pool>(PoolOptions{.threads = nodes,
                                           .nodes = nodes,
                                           .topology = Topology::synthetic(text("numa:{} core:1", nodes)),
                                           .pin = false});
    const Transformer model(checkpoint, describe_model(checkpoint.config_json(), KT_DEMO_MODEL),
                            make_cpu_ops(pool, {.sizes_only = true}), {});
    const MemoryRequest use{.sequences = 2, .context = 200};
    const MemoryPlan plan = model.memory_plan(use);
    const PlacementSizes sizes = model.placement_sizes(use);
    uint64_t dense = sizes.head, cache = 0;
    std::vector<uint64_t> experts(static_cast<size_t>(nodes));
    for (const PlacementSizes::Layer& layer : sizes.layers) {
      dense += layer.dense;
      cache += 8 * layer.page + 2 * layer.state;  // 200 tokens are 4 pages
      EXPECT_LT(layer.page_int8, layer.page);
      if (layer.experts == 0) continue;
      ASSERT_EQ(layer.expert.size(), experts.size());
      for (size_t node = 0; node < experts.size(); ++node)
        experts[node] += layer.expert[node] * static_cast<uint64_t>(layer.experts);
    }
    const PlaceMemory host = plan.host();
    EXPECT_EQ(dense, host.linears + host.vectors);
    EXPECT_EQ(cache, host.kv_cache);
    EXPECT_EQ(std::accumulate(experts.begin(), experts.end(), uint64_t{0}), host.experts);
    EXPECT_EQ(sizes.workspace + sizes.host_workspace, host.workspace);
    EXPECT_EQ(sizes.embedding, plan.embedding);
    EXPECT_EQ(sizes.model, "deepseek_v3");
    EXPECT_EQ(sizes.layers[0].experts, 0);
    EXPECT_EQ(sizes.layers[5].experts, 16);
    EXPECT_GT(experts.back(), 0u);
  }
}

// What the operations of a GPU ask for is in the placement, on the card and beside it, each byte once.
TEST(PlacementSizes, OfAGpuAreThoseOfTheMemoryPlanToo) {
  const Checkpoint checkpoint(KT_DEMO_MODEL);
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 1, .nodes = 1, .pin = false});
  const Transformer model(checkpoint, describe_model(checkpoint.config_json(), KT_DEMO_MODEL),
                          make_gpu_ops(pool, {.sizes_only = true}), {});
  const MemoryRequest use{.sequences = 3, .context = 1000};
  MemoryPlan plan = model.memory_plan(use);
  const PlacementSizes sizes = model.placement_sizes(use);
  PlacementWish asked{.devices = {{.free = 4096 * kMiB, .taken = 7 * kMiB}},
                      .use = use,
                      .experts = parse_expert_wish("3", "gpu_experts")};
  const Placement got = decide_placement(sizes, asked);
  uint64_t copies = 0;
  for (const LayerPlacement& layer : got.layers) copies += layer.copies.bytes;
  EXPECT_EQ(got.hot_experts(), 3 * got.routed_layers());
  EXPECT_EQ(copies, static_cast<uint64_t>(got.hot_experts()) * got.layers.back().expert_bytes);
  const PlaceMemory on_gpu = plan.at(kGpu0), host = plan.host();
  EXPECT_GT(sizes.workspace, 0u);
  EXPECT_THAT(bytes_by_place(got), testing::UnorderedElementsAre(
                                       PlaceBytes{kGpu0, 7 * kMiB + copies + on_gpu.weights() +
                                                             on_gpu.kv_cache + on_gpu.workspace},
                                       PlaceBytes{kNode0, host.experts}, PlaceBytes{kHost, host.workspace}));

  // A model that is built with the placement holds its copies, layer by layer.
  const Transformer placed(checkpoint, describe_model(checkpoint.config_json(), KT_DEMO_MODEL),
                           make_gpu_ops(pool, {.sizes_only = true}), {.hot = got.hot()});
  EXPECT_EQ(placed.memory_plan(use).at(kGpu0).weights(), on_gpu.weights() + copies);
  EXPECT_EQ(placed.memory_plan(use).host().experts, host.experts);
}

}  // namespace
}  // namespace kt::inline models
