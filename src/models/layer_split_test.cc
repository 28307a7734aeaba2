// Layers over several devices, of models small enough to count by hand.
#include "models/layer_split.h"

#include <gmock/gmock.h>

#include "base/testing/error_of.h"

namespace kt::inline models {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

constexpr uint64_t kSplitMiB = uint64_t{1} << 20;

// So many layers of 10 MiB, a cache of 2, four experts of 1 each but in the first; a head of 8, a workspace of 5.
PlacementSizes layers_alike(size_t layers) {
  PlacementSizes out{.model = "alike",
                     .layers = {},
                     .embedding = 50 * kSplitMiB,
                     .head = 8 * kSplitMiB,
                     .page_tokens = 64,
                     .workspace = 5 * kSplitMiB,
                     .host_workspace = kSplitMiB};
  out.layers.resize(layers, {.dense = 10 * kSplitMiB, .page = kSplitMiB, .page_int8 = kSplitMiB / 2});
  for (size_t i = 1; i < layers; ++i) {
    out.layers[i].experts = 4;
    out.layers[i].expert = {kSplitMiB};
  }
  return out;
}

PlacementWish on_cards(const std::vector<uint64_t>& free, const char* experts = "0") {
  PlacementWish out{.use = {.sequences = 1, .context = 128},
                    .experts = parse_expert_wish(experts, "gpu_experts")};
  for (size_t i = 0; i < free.size(); ++i)
    out.devices.push_back({.index = static_cast<int>(i), .name = "card", .free = free[i] * kSplitMiB});
  return out;
}

std::vector<int> devices_of_layers(const Placement& placed) {
  std::vector<int> out;
  for (const LayerPlacement& layer : placed.layers) {
    EXPECT_EQ(layer.cache.place, layer.dense.place);
    out.push_back(layer.dense.place == kHost ? kOnHost : layer.dense.place.index);
  }
  return out;
}

TEST(LayerSplit, SharesFollowMemory) {
  const PlacementSizes sizes = layers_alike(6);
  EXPECT_THAT(devices_of_layers(decide_placement(sizes, on_cards({1000, 1000}))),
              ElementsAre(0, 0, 0, 1, 1, 1));
  EXPECT_THAT(devices_of_layers(decide_placement(sizes, on_cards({1000, 500}))),
              ElementsAre(0, 0, 0, 0, 1, 1));
  EXPECT_THAT(devices_of_layers(decide_placement(sizes, on_cards({600, 600, 600}))),
              ElementsAre(0, 0, 1, 1, 2, 2));
}

TEST(LayerSplit, WhatIsTightGoesOneAfterTheOther) {
  // Room for 35.8, 36.8 and 21.6: even shares would have three layers of 12 on the first.
  EXPECT_THAT(devices_of_layers(decide_placement(layers_alike(6), on_cards({43, 44, 28}))),
              ElementsAre(0, 0, 1, 1, 1, 2));
  const std::string line = error_of([] { decide_placement(layers_alike(6), on_cards({57, 34})); });
  EXPECT_THAT(line, HasSubstr("GPU 1 (card): "));
  EXPECT_THAT(line, HasSubstr("too much; try "));
}

TEST(LayerSplit, EachDeviceHasItsOwnSums) {
  const PlacementSizes sizes = layers_alike(6);
  const Placement got = decide_placement(sizes, on_cards({1000, 1000}, "auto"));
  EXPECT_THAT(got.devices, SizeIs(2));
  const Place one{.kind = Place::Kind::kGpu, .index = 1};
  EXPECT_EQ(got.head.place, one);
  EXPECT_EQ(got.device_of(one), "cuda:1");
  EXPECT_EQ(got.device_of(kHost), "cpu");
  EXPECT_THAT(got.more_workspaces, ElementsAre(PlacedPart{one, 5 * kSplitMiB, "`gpu`"}));
  EXPECT_EQ(got.host_workspace.bytes, 2 * kSplitMiB);  // operations of each have theirs
  EXPECT_EQ(got.hot_experts(), 20);
  for (const LayerPlacement& layer : got.layers)
    if (layer.experts > 0) {
      EXPECT_EQ(layer.copies.place, layer.dense.place);
    }
  for (const PlaceBytes& at : bytes_by_place(got)) {
    if (at.place.kind != Place::Kind::kGpu) continue;
    EXPECT_EQ(at.bytes, (at.place == one ? 3 * 16 + 8 + 5 : 2 * 16 + 12 + 5) * kSplitMiB);
  }
  EXPECT_THAT(describe(got), HasSubstr("\nGPU 1 (card): 61.0 MiB of "));
}

// One card as two: shares are told apart though their number is one.
TEST(LayerSplit, OneCardTwice) {
  PlacementWish asked = on_cards({500, 500});
  asked.devices[1].index = 0;
  asked.devices[1].share = 1;
  const Placement got = decide_placement(layers_alike(4), asked);
  EXPECT_EQ(got.layers[0].dense.place.share, 0);
  EXPECT_EQ(got.layers[3].dense.place.share, 1);
  EXPECT_THAT(describe(got), HasSubstr("\nGPU 0 #2 (card): "));
}

TEST(LayerSplit, RulesSayWhereLayersAre) {
  PlacementWish asked = on_cards({1000, 1000}, "2");
  asked.layers_on = {kOnHost, 1, 0, kOnHost};
  const Placement got = decide_placement(layers_alike(6), asked);
  const std::vector<int> devices = devices_of_layers(got);
  EXPECT_THAT(std::vector<int>(devices.begin(), devices.begin() + 4), ElementsAre(kOnHost, 1, 0, kOnHost));
  EXPECT_GE(devices[4], 0);
  EXPECT_THAT(got.layers[3].hot, SizeIs(0));  // a layer on the host has no copies
  EXPECT_THAT(got.layers[1].hot, SizeIs(2));
  EXPECT_EQ(got.layers[3].cache.bytes, 2 * kSplitMiB);
  asked.head_on = kOnHost;
  EXPECT_EQ(decide_placement(layers_alike(6), asked).head.place, kHost);
  asked = on_cards({1000});
  asked.layers_on = {0, 0, 0, kOnHost, 0, 0};
  EXPECT_THAT(devices_of_layers(decide_placement(layers_alike(6), asked)),
              ElementsAre(0, 0, 0, kOnHost, 0, 0));
}

TEST(LayerSplit, RulesOfExpertsAreEachDevicesOwn) {
  PlacementWish asked = on_cards({1000, 1000}, "1");
  asked.ruled = {{.layers = {1, 4}, .ids = std::vector<int>{2, 3}, .decided_by = "rule 1", .place = "r:1"}};
  const Placement got = decide_placement(layers_alike(6), asked);
  EXPECT_THAT(got.layers[1].hot, ElementsAre(2, 3));
  EXPECT_THAT(got.layers[4].hot, ElementsAre(2, 3));
  EXPECT_THAT(got.layers[2].hot, ElementsAre(0));
  EXPECT_EQ(got.layers[4].copies.decided_by, "rule 1");
}

}  // namespace
}  // namespace kt::inline models
