#include "hybrid/layer_model.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace kt::inline hybrid {
namespace {

using Seat = std::unique_ptr<LayerSeat>;

Seat seat(int layer, const char* path = "models/a", int hidden = 64, const char* name = "") {
  return std::make_unique<LayerSeat>(name, path, hidden, layer);
}

TEST(LayerModel, LayersInAnyOrderAreOfOneModel) {
  const Seat third = seat(3), first = seat(1), second = seat(2);
  EXPECT_EQ(third->model(), first->model());
  EXPECT_EQ(second->model(), first->model());
}

TEST(LayerModel, ANumberThatIsTakenBeginsAnother) {
  const Seat a0 = seat(0), a1 = seat(1), b0 = seat(0), b1 = seat(1), b2 = seat(2);
  EXPECT_EQ(a0->model(), a1->model());
  EXPECT_EQ(b0->model(), b1->model());
  EXPECT_EQ(b0->model(), b2->model());
  EXPECT_NE(a0->model(), b0->model());
}

TEST(LayerModel, PathsAndSizesAreApart) {
  const Seat a = seat(0), path = seat(1, "models/b"), hidden = seat(1, "models/a", 128), same = seat(1);
  EXPECT_NE(a->model(), path->model());
  EXPECT_NE(a->model(), hidden->model());
  EXPECT_EQ(a->model(), same->model());
}

TEST(LayerModel, ALayerThatEndedIsReplaced) {
  const Seat first = seat(0);
  Seat second = seat(1);
  second.reset();
  EXPECT_EQ(seat(1)->model(), first->model());
}

TEST(LayerModel, AModelThatEndedIsNotComeBackTo) {
  const uint64_t old = seat(0)->model();
  EXPECT_NE(seat(0)->model(), old);
}

// The end of an older model leaves the newer one alone.
TEST(LayerModel, OlderModelsMayEndWhileANewerOneIsMade) {
  std::vector<Seat> old;
  for (int i = 0; i < 3; ++i) old.push_back(seat(i));
  const Seat b0 = seat(0);
  old.clear();
  const Seat b1 = seat(1);
  EXPECT_EQ(b0->model(), b1->model());
}

TEST(LayerModel, NamesTellModelsMadeByTurns) {
  const Seat a0 = seat(0, "p", 64, "a"), b0 = seat(0, "p", 64, "b"), a1 = seat(1, "p", 64, "a"),
             b1 = seat(1, "other", 64, "b"), again = seat(0, "p", 64, "a");
  EXPECT_EQ(a0->model(), a1->model());
  EXPECT_EQ(b0->model(), b1->model());
  EXPECT_NE(a0->model(), b0->model());
  EXPECT_EQ(again->model(), a0->model());
}

}  // namespace
}  // namespace kt::inline hybrid
