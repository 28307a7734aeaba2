#include "hybrid/layer_model.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace kt::inline hybrid {
namespace {

using Slot = std::unique_ptr<LayerSlot>;

Slot slot(int layer, const char* path = "models/a", int hidden = 64, const char* name = "") {
  return std::make_unique<LayerSlot>(name, path, hidden, layer);
}

TEST(LayerModel, LayersInAnyOrderAreOfOneModel) {
  const Slot third = slot(3), first = slot(1), second = slot(2);
  EXPECT_EQ(third->model(), first->model());
  EXPECT_EQ(second->model(), first->model());
}

TEST(LayerModel, ANumberThatIsTakenBeginsAnother) {
  const Slot a0 = slot(0), a1 = slot(1), b0 = slot(0), b1 = slot(1), b2 = slot(2);
  EXPECT_EQ(a0->model(), a1->model());
  EXPECT_EQ(b0->model(), b1->model());
  EXPECT_EQ(b0->model(), b2->model());
  EXPECT_NE(a0->model(), b0->model());
}

TEST(LayerModel, PathsAndSizesAreApart) {
  const Slot a = slot(0), path = slot(1, "models/b"), hidden = slot(1, "models/a", 128), same = slot(1);
  EXPECT_NE(a->model(), path->model());
  EXPECT_NE(a->model(), hidden->model());
  EXPECT_EQ(a->model(), same->model());
}

TEST(LayerModel, ALayerThatEndedIsReplaced) {
  const Slot first = slot(0);
  Slot second = slot(1);
  second.reset();
  EXPECT_EQ(slot(1)->model(), first->model());
}

TEST(LayerModel, AModelThatEndedIsNotComeBackTo) {
  const uint64_t old = slot(0)->model();
  EXPECT_NE(slot(0)->model(), old);
}

// The end of an older model leaves the newer one alone.
TEST(LayerModel, OlderModelsMayEndWhileANewerOneIsMade) {
  std::vector<Slot> old;
  for (int i = 0; i < 3; ++i) old.push_back(slot(i));
  const Slot b0 = slot(0);
  old.clear();
  const Slot b1 = slot(1);
  EXPECT_EQ(b0->model(), b1->model());
}

TEST(LayerModel, NamesTellModelsMadeByTurns) {
  const Slot a0 = slot(0, "p", 64, "a"), b0 = slot(0, "p", 64, "b"), a1 = slot(1, "p", 64, "a"),
             b1 = slot(1, "other", 64, "b"), again = slot(0, "p", 64, "a");
  EXPECT_EQ(a0->model(), a1->model());
  EXPECT_EQ(b0->model(), b1->model());
  EXPECT_NE(a0->model(), b0->model());
  EXPECT_EQ(again->model(), a0->model());
}

}  // namespace
}  // namespace kt::inline hybrid
