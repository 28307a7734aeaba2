#include "models/layer_split.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/checked.h"

namespace kt::inline models {
namespace {

class Splitter {
 public:
  Splitter(const PlacementSizes& sizes, const PlacementWish& wish,
           const std::vector<DevicePlacement>& allowed)
      : sizes_(sizes), wish_(wish), said_(wish.layers_on) {
    said_.resize(sizes.layers.size(), kUndecided);
    for (const DevicePlacement& device : allowed) {
      const uint64_t gone = device.taken + sizes.workspace;
      room_.push_back(device.allowed - std::min(device.allowed, gone));
    }
    for (size_t i = 0; i < said_.size(); ++i)
      if (said_[i] >= 0) take(said_[i], fixed(i));
    if (wish.head_on >= 0) take(wish.head_on, sizes.head);
  }

  LayerSplit split() {
    for (const bool with_experts : {true, false})
      if (const auto found = by_shares(with_experts); found && fits(*found)) return finished(*found);
    return finished(one_after_the_other());
  }

 private:
  // Where the layer is run: its weights but routed experts, and what it keeps.
  uint64_t fixed(size_t layer) const {
    const PlacementSizes::Layer& at = sizes_.layers[layer];
    const auto pages =
        static_cast<uint64_t>(ceil_div(int64_t{wish_.use.context}, int64_t{sizes_.page_tokens})) *
        static_cast<uint64_t>(wish_.use.sequences);
    return at.dense + pages * at.page + static_cast<uint64_t>(wish_.use.sequences) * at.state;
  }
  uint64_t with_copies(size_t layer) const {
    const PlacementSizes::Layer& at = sizes_.layers[layer];
    const int64_t most = at.experts;
    const int64_t copies = std::min(most, wish_.experts.total(1, most).value_or(most));
    return fixed(layer) + static_cast<uint64_t>(copies) * at.expert_bytes();
  }
  void take(int device, uint64_t bytes) {
    uint64_t& room = room_[static_cast<size_t>(device)];
    room -= std::min(room, bytes);
  }
  bool head_is_open() const { return wish_.head_on == kUndecided; }

  // Of layers that nobody decided; the others as they are.
  std::optional<std::vector<int>> by_shares(bool with_experts) const {
    std::vector<int> out = said_;
    const auto size_of = [&](size_t layer) {
      return static_cast<double>(with_experts ? with_copies(layer) : fixed(layer));
    };
    double all = head_is_open() ? static_cast<double>(sizes_.head) : 0;
    for (size_t i = 0; i < out.size(); ++i)
      if (out[i] == kUndecided) all += size_of(i);
    const auto room = std::accumulate(room_.begin(), room_.end(), 0.0);
    if (room <= 0) return {};
    double passed = 0, until = static_cast<double>(room_.front()) / room * all;
    size_t device = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i] != kUndecided) continue;
      while (passed + size_of(i) / 2 > until && device + 1 < room_.size())
        until += static_cast<double>(room_[++device]) / room * all;
      out[i] = static_cast<int>(device);
      passed += size_of(i);
    }
    return out;
  }

  bool fits(const std::vector<int>& layers) const {
    std::vector<uint64_t> used(room_.size());
    for (size_t i = 0; i < layers.size(); ++i)
      if (said_[i] == kUndecided) used[static_cast<size_t>(layers[i])] += fixed(i);
    if (head_is_open() && layers.back() >= 0) used[static_cast<size_t>(layers.back())] += sizes_.head;
    for (size_t i = 0; i < used.size(); ++i)
      if (used[i] > room_[i]) return false;
    return true;
  }

  std::vector<int> one_after_the_other() const {
    std::vector<int> out = said_;
    size_t device = 0;
    uint64_t used = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i] != kUndecided) continue;
      const uint64_t more = fixed(i) + (head_is_open() && i + 1 == out.size() ? sizes_.head : 0);
      if (used + more > room_[device] && device + 1 < room_.size()) {
        ++device;
        used = 0;
      }
      used += more;
      out[i] = static_cast<int>(device);
    }
    return out;
  }

  LayerSplit finished(std::vector<int> layers) const {
    const int last = layers.back();
    return {.layers = std::move(layers), .head = head_is_open() ? last : wish_.head_on};
  }

  const PlacementSizes& sizes_;
  const PlacementWish& wish_;
  std::vector<int> said_;
  std::vector<uint64_t> room_;  // of each device, beside what is decided
};

}  // namespace

LayerSplit split_layers(const PlacementSizes& sizes, const PlacementWish& wish,
                        const std::vector<DevicePlacement>& allowed) {
  return Splitter(sizes, wish, allowed).split();
}

}  // namespace kt::inline models
