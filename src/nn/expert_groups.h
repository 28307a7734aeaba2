// The work of a layer of experts, whatever is computed: which rows go to which expert, the items that a
// node's workers claim, who waits for whom, and where things lie in a node's memory. It does not know what an
// item computes: the forward is one direction over it, and stages mean what their list's owner says.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/checked.h"
#include "base/memory.h"
#include "base/signal.h"

namespace kt::inline nn {

// Rows that one expert gets.
struct ExpertGroup {
  int expert = 0, m = 0;  // m >= 1 rows
  int first = 0;          // into ExpertRouting::token and ExpertRouting::weight
};

// Which rows go to which expert; the same on all nodes, made once a call and read by all workers.
struct ExpertRouting {
  std::vector<ExpertGroup> groups;  // in expert order; experts without rows have none
  std::vector<int32_t> token;       // [rows], by group, rising within one
  std::vector<float> weight;        // [rows]
  std::vector<int32_t> pair;        // [rows] where the row stands in RoutedSlots: token * top_k + slot
  std::vector<int32_t> count, at;   // scratch, [experts]

  const int32_t* tokens_of(const ExpertGroup& group) const { return token.data() + group.first; }
};

// What routers gave, as callers hold it; exactly one of ids and ids64.
struct RoutedSlots {
  int tokens = 0, top_k = 0;
  const int32_t* ids = nullptr;    // [tokens, top_k]; below 0 or past the experts: skipped
  const int64_t* ids64 = nullptr;  // the same
  const float* weights = nullptr;  // [tokens, top_k]
  const uint8_t* skip = nullptr;   // [experts] or null; nonzero: skipped
};

// Groups the slots into `routing`, which keeps its memory. An Error if a row goes to an expert that is not
// loaded ([experts], nonzero: it is).
void route(const RoutedSlots& slots, std::span<const uint8_t> loaded, ExpertRouting& routing);
// Groups of rows spread evenly, for plans: the first experts get one more where they do not divide. Tokens
// are not told apart and there are no weights.
ExpertRouting even_routing(int experts, int tokens, int top_k);

// [begin, begin + count) of what a stage is cut along, for one group.
struct WorkItem {
  int stage = 0;
  int group = 0;  // 0 in stages that serve all groups at once
  int begin = 0, count = 0;
};

// The items of one call on one node, which its workers claim in the order of the list.
//
// Waiting. A stage of a group is done when all its items are; what they wrote is then visible to whoever
// wait()s for it. There is no barrier: a worker that runs out of items of one stage goes on with the next.
// No deadlock: an item may wait only for stages whose items all stand before its own in the list. Items are
// claimed in that order, and a worker computes what it claimed before it claims again; so of all claimed
// items that are not done, the first in the list waits for nothing, and its worker is at work on it. That
// holds for any number of workers, one too, and for workers that come late or never.
//
// The caller lists and starts; workers only run(), wait() and ask. Lists keep their memory from call to call.
class WorkList {
 public:
  // Forgets all items. Stages are numbered from 0, groups too.
  void clear(int stages, int groups);
  void add(const WorkItem& item);
  // [0, size) in items of `step`, the last one shorter.
  void add_pieces(int stage, int group, int size, int step);
  // After the last add(), before the first run(). A stage of a group without items is done from the start.
  void start();

  // On each worker: computes items until none is left to claim.
  template <typename Compute>
  void run(Compute&& compute) noexcept {
    for (;;) {
      const int i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= static_cast<int>(items_.size())) return;
      const WorkItem& item = items_[static_cast<size_t>(i)];
      compute(item);
      Progress& stage = progress(item.stage, item.group);
      if (stage.left.arrive()) stage.done.set();
    }
  }

  // For `item`, of this list, which is being computed.
  void wait(const WorkItem& item, int stage, int group) const noexcept {
    KT_DCHECK(progress(stage, group).last < &item - items_.data(),
              "an item of stage {} waits for stage {}, which is listed after it", item.stage, stage);
    progress(stage, group).done.wait();
  }
  bool done(int stage, int group) const noexcept { return progress(stage, group).done.is_set(); }

  std::span<const WorkItem> items() const { return items_; }

 private:
  struct Progress {
    int listed = 0, last = -1;  // items, and the place of the last one
    Countdown left{1};
    Signal done;
  };
  Progress& progress(int stage, int group) const noexcept {
    return progress_[static_cast<size_t>(group) * stages_ + static_cast<size_t>(stage)];
  }

  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::vector<WorkItem> items_;
  std::unique_ptr<Progress[]> progress_;  // [groups, stages]
  size_t stages_ = 0, used_ = 0, capacity_ = 0;
};

// How many row blocks an item takes, out of `all` of its stage.
struct ItemSize {
  int64_t all = 0;
  size_t block_bytes = 0;  // of weights, of all groups that an item visits
  int workers = 1;
  int panel_blocks = 0;   // few rows: 0, and items stream well; many rows: at most this many
  int stream_blocks = 1;  // few rows: at most this many
};
// As many as stream well or as panel_blocks says, as long as every worker gets a few items; an even number
// unless it is 1.
int blocks_of_item(const ItemSize& size);

// One node's memory, laid out before there is any: clear(), take() what is needed, then allocate() and at().
// Places are offsets, so that a plan of bytes() costs no memory. It grows to the largest layout seen; what
// was in it is lost when it grows.
class NodeMemory {
 public:
  void clear();
  size_t take(size_t bytes);                         // 64-byte aligned
  void take_for_workers(int workers, size_t bytes);  // once; each on pages of its own
  size_t bytes() const { return taken_; }            // of the layout
  size_t held() const { return memory_.size(); }
  void allocate(int memory_node);
  std::byte* at(size_t place) { return memory_.data() + place; }
  std::byte* of_worker(int rank) {
    return memory_.data() + workers_at_ + static_cast<size_t>(rank) * worker_bytes_;
  }

 private:
  Buffer memory_;
  size_t taken_ = 0, workers_at_ = 0, worker_bytes_ = 0;
};

}  // namespace kt::inline nn
