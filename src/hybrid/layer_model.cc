#include "hybrid/layer_model.h"

#include <map>
#include <memory>
#include <mutex>

#include "base/fork_mutex.h"
#include "base/text.h"

namespace kt::inline hybrid {
namespace {

// The model that was begun last under a key; it goes with its last layer.
struct NewestModel {
  uint64_t number = 0;
  std::map<int, int> layers = {};  // living ones of each number: more than one only in a model with a name
};

// Never destroyed: layers may outlive static objects.
struct Models {
  ForkMutex mutex{ForkLock::kLayerModels};
  std::map<std::string, NewestModel> newest;
  uint64_t last = 0;
};

Models& models() {
  static Models& all = *std::make_unique<Models>().release();
  return all;
}

[[maybe_unused]] const Models& made_early = models();

}  // namespace

LayerSlot::LayerSlot(const std::string& name, const std::string& path, int hidden, int layer)
    : key_(name.empty() ? text("path {} {}", hidden, path) : "name " + name), layer_(layer) {
  Models& all = models();
  const std::lock_guard lock(all.mutex);
  NewestModel& newest = all.newest[key_];
  if (newest.number == 0 || (name.empty() && newest.layers.contains(layer))) newest = {.number = ++all.last};
  ++newest.layers[layer];
  model_ = newest.number;
}

void LayerSlot::leave() noexcept {
  Models& all = models();
  const std::lock_guard lock(all.mutex);
  if (!held_) return;
  held_ = false;
  const auto newest = all.newest.find(key_);
  if (newest == all.newest.end() || newest->second.number != model_) return;
  const auto mine = newest->second.layers.find(layer_);
  if (--mine->second == 0) newest->second.layers.erase(mine);
  if (newest->second.layers.empty()) all.newest.erase(newest);
}

}  // namespace kt::inline hybrid
