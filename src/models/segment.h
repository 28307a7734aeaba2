// Consecutive layers of a model that run in one place: operations of their own, and with them rows, weights, planes of
// the cache and a step that is repeated. A Transformer is segments in a row; rows of x pass from one to the next.
#pragma once
#include <memory>
#include <vector>

#include "models/expert_counts.h"
#include "models/layer.h"
#include "models/memory_plan.h"
#include "models/placement.h"
#include "models/weight_loader.h"

namespace kt::inline models {

class Segment {
 public:
  // A layer, and where what it keeps begins within the segment.
  struct Placed {
    Layer layer;
    int plane = 0, state = 0;
    size_t routed = 0;  // which of the model's that route
  };

  // The checkpoint and the spec must outlive it.
  Segment(const Checkpoint& checkpoint, const ModelSpec& spec, std::shared_ptr<Ops> ops,
          const WeightOptions& options, const ExpertSource* routed, KvType kv);

  // Makes layers [first, first + count) of the model, once. `routing`: numbers of those before that route; its own come
  // behind them.
  void place(int first, int count, std::vector<int>& routing);

  Ops& ops() const { return *ops_; }
  WeightLoader& loader() { return loader_; }
  const WeightLoader& loader() const { return loader_; }
  std::vector<Placed>& layers() { return layers_; }
  const std::vector<Placed>& layers() const { return layers_; }
  const SequenceShape& keeps() const { return keeps_; }
  Rows x() const { return x_; }
  Rows normed() const { return normed_; }

  void run(ExpertCounts* counts) const;  // x to x
  // Where the model ends here: its last norm and head.
  void load_head();
  bool has_head() const { return head_ != nullptr; }
  void run_head(std::span<const int> wanted) const;  // of these rows

  void for_each(FunctionRef<void(const PlacedWeights&, FeedForward::Kind)> use) const;
  StepNeeds measure(std::span<const AttentionSequence> sequences, int tokens, int logit_rows) const;
  // What the head and the last norm take, and each layer: added to `out`.
  void add_sizes(PlacementSizes& out) const;

 private:
  size_t biases_of_an_expert() const;

  const ModelSpec& spec_;
  const KvType kv_;
  const std::shared_ptr<Ops> ops_;
  WeightLoader loader_;
  const Rows x_, normed_, out_;
  std::unique_ptr<PlacedVector> final_norm_;
  std::unique_ptr<PlacedLinear> head_;
  std::vector<Placed> layers_;
  SequenceShape keeps_;
};

// What several segments keep: one number of a page, or of a slot, is that in each.
class SegmentCaches final : public SequenceCache {
 public:
  // `parts`: by segment; null where it has no layers.
  SegmentCaches(const SequenceShape& shape, int pages, int slots,
                std::vector<std::unique_ptr<SequenceCache>> parts)
      : SequenceCache(shape, pages, slots), parts_(std::move(parts)) {}
  SequenceCache* part(size_t segment) const { return parts_[segment].get(); }
  size_t bytes() const override;
  void clear_slot(int slot) override;
  void copy_slot(int from, int to) override;

 private:
  std::vector<std::unique_ptr<SequenceCache>> parts_;
};

}  // namespace kt::inline models
