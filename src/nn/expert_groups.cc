#include "nn/expert_groups.h"

#include <algorithm>

#include "base/error.h"
#include "nn/reserve.h"

namespace kt::inline nn {
namespace {

constexpr size_t kItemBytes =
    128 << 10;  // weights of a decode item: long enough to stream, 15 us of a core's share

}  // namespace

void route(const RoutedSlots& slots, std::span<const uint8_t> loaded, ExpertRouting& r) {
  const int experts = static_cast<int>(loaded.size());
  const int64_t all = int64_t{slots.tokens} * slots.top_k;
  const auto expert_of = [&](int64_t i) -> int {
    const int64_t id = slots.ids ? slots.ids[i] : slots.ids64[i];
    return id < 0 || id >= experts || (slots.skip && slots.skip[id]) ? -1 : static_cast<int>(id);
  };
  r.count.assign(loaded.size(), 0);
  for (int64_t i = 0; i < all; ++i)
    if (const int e = expert_of(i); e >= 0) ++r.count[e];
  r.groups.clear();
  r.at.resize(loaded.size());
  int rows = 0;
  for (int e = 0; e < experts; ++e) {
    r.at[e] = rows;
    if (!r.count[e]) continue;
    if (!loaded[e]) fail("forward: a token is routed to expert {}, which is not loaded", e);
    r.groups.push_back({e, r.count[e], rows});
    rows += r.count[e];
  }
  r.token.resize(rows);
  r.weight.resize(rows);
  r.pair.resize(rows);
  for (int64_t i = 0; i < all; ++i)
    if (const int e = expert_of(i); e >= 0) {
      const int row = r.at[e]++;
      r.token[row] = static_cast<int32_t>(i / slots.top_k);
      r.weight[row] = slots.weights[i];
      r.pair[row] = static_cast<int32_t>(i);
    }
}

ExpertRouting even_routing(int experts, int tokens, int top_k) {
  ExpertRouting routing;
  const int rows = tokens * top_k, hit = std::min(experts, rows);
  for (int e = 0, first = 0; e < hit; ++e) {
    const int m = rows / hit + (e < rows % hit ? 1 : 0);
    routing.groups.push_back({.expert = e, .m = m, .first = first});
    first += m;
  }
  routing.token.resize(static_cast<size_t>(rows));
  return routing;
}

void WorkList::clear(int stages, int groups) {
  items_.clear();
  stages_ = static_cast<size_t>(stages);
  used_ = stages_ * static_cast<size_t>(groups);
  if (capacity_ < used_) {
    progress_ = std::make_unique<Progress[]>(used_);
    capacity_ = used_;
  }
  for (size_t i = 0; i < used_; ++i) {
    progress_[i].listed = 0;
    progress_[i].last = -1;
  }
}

void WorkList::add(const WorkItem& item) {
  Progress& stage = progress(item.stage, item.group);
  ++stage.listed;
  stage.last = static_cast<int>(items_.size());
  items_.push_back(item);
}

void WorkList::add_pieces(int stage, int group, int size, int step) {
  for (int at = 0; at < size; at += step) add({stage, group, at, std::min(step, size - at)});
}

void WorkList::start() {
  for (size_t i = 0; i < used_; ++i) {
    progress_[i].left.reset(progress_[i].listed);
    progress_[i].done.reset();
    if (progress_[i].listed == 0) progress_[i].done.set();
  }
  next_.store(0, std::memory_order_relaxed);
}

int blocks_of_item(const ItemSize& size) {
  const int64_t most =
      size.panel_blocks
          ? size.panel_blocks
          : std::clamp<int64_t>(static_cast<int64_t>(kItemBytes / size.block_bytes), 1, size.stream_blocks);
  const int64_t least = size.panel_blocks ? 2 : 1, items_each = size.panel_blocks ? 2 : 4;
  const int64_t blocks =
      std::clamp<int64_t>(size.all / (items_each * size.workers), least, std::max(most, least));
  return static_cast<int>(blocks > 1 ? blocks - blocks % 2 : blocks);
}

void NodeMemory::clear() { taken_ = workers_at_ = worker_bytes_ = 0; }

size_t NodeMemory::take(size_t bytes) {
  const size_t here = taken_;
  taken_ += round_up(bytes, size_t{64});
  return here;
}

void NodeMemory::take_for_workers(int workers, size_t bytes) {
  worker_bytes_ = round_up(bytes, size_t{4096}) + 4096;
  workers_at_ = take(worker_bytes_ * static_cast<size_t>(workers));
}

void NodeMemory::allocate(int memory_node) { grow(memory_, taken_, {.node = memory_node}); }

}  // namespace kt::inline nn
