// One node's share of an Experts::forward: its slice of `inter`, all groups. Not for other files than
// experts_forward.cc.
//
//   stage     items            waits for
//   tokens    rows             -                        with many tokens: each quantised once
//   pack      group, rows      tokens                   rows of a group, quantised, in the kernels' order
//   read      group, rows      pack of the group        what an adapter keeps of them, where it reads apart
//   gate_up   group, pairs     pack, read of the group  products, and the activation while both are in cache
//   requant   group, rows      gate_up of the group     quantised again
//   read_mid  group, rows      requant of the group     as read
//   down      columns          requant of each group,   products, added up over all groups in order
//                              read_mid
//
// Stages are listed in this order, each for all groups (expert_groups.h: no barrier, no deadlock). Down items
// own their output columns and add experts in order, so the result does not depend on who did what.
#pragma once
#include "nn/expert_adapter.h"
#include "nn/expert_groups.h"
#include "nn/experts_state.h"

namespace kt::inline nn {

// What a node keeps from call to call, whichever layer runs.
struct ForwardNode {
  // A multiplication of a group: how, with which rows, and where these lie in the node's memory.
  struct Product {
    Plan plan;
    Acts acts;
    size_t at = 0;
  };
  struct Part {
    Product gate, up, down;
    bool one_input = true;  // gate and up read the same quantised rows
    float* mid = nullptr;   // [m, shard.width()]
    size_t mid_at = 0;
    float *kept_tokens = nullptr, *kept_mid = nullptr;  // [m, floats that an adapter keeps]
    size_t kept_tokens_at = 0, kept_mid_at = 0;
  };
  WorkList list;
  NodeMemory memory;
  std::vector<Part> parts;  // [groups]
};

// Made, laid out and prepared by the calling thread, run by the node's workers. Views only: what Setting
// points to outlives it.
class NodeForward {
 public:
  // Gate and up of each routed row before biases and activation, in the order of Shard::both(): what a backward needs.
  struct Keep {
    std::byte* rows = nullptr;  // null: not wanted
    Real type = Real::kBf16;
  };
  struct Setting {
    const Kernels* kernels = nullptr;
    const ExpertsShape* shape = nullptr;
    const ExpertsOptions* options = nullptr;
    const Shard* shard = nullptr;
    const std::vector<float>* down_bias = nullptr;  // null on all nodes but the first
    const ForwardArgs* args = nullptr;
    const ExpertRouting* routing = nullptr;  // with one group at least
    ForwardNode* node = nullptr;
    int workers = 1;
    bool direct = true;  // output is written here; otherwise to partial()
    Keep keep = {};
    bool keeps_only = false;  // ends where gate and up are kept: no output
  };
  explicit NodeForward(const Setting& setting);

  // Lists the items and lays out the node's memory; returns its bytes and takes none.
  size_t lay_out();
  // After lay_out(): takes the memory, and workers may run.
  void prepare(int memory_node);
  void run(int rank) noexcept;

  const float* partial() const { return partial_; }  // [tokens, hidden], or null where output is direct

 private:
  using Product = ForwardNode::Product;
  enum Stage : int { kTokens, kPack, kRead, kGateUp, kRequant, kReadMid, kDown, kStages };

  void plan_groups();
  void list_items();
  void list_gate_up(int group);
  void list_down();
  // Input rows quantised once for all groups, in plain order; no rows: groups do it themselves.
  struct SharedTokens {
    ActShape shape;
    Acts acts;
    size_t at = 0;
  };
  ActShape shared_shape(Product ForwardNode::Part::* of) const;

  void pack_tokens(const WorkItem& item) noexcept;
  void pack(const WorkItem& item, std::byte* mine) noexcept;
  void pack_rows(const WorkItem& item, const SharedTokens& tokens, const Acts& acts) noexcept;
  void gate_up(const WorkItem& item, std::byte* mine) noexcept;
  void multiply_gate_up(const WorkItem& item, float* tile, int64_t ld, std::byte* scratch) noexcept;
  void activate_apart(ActivateArgs args, float* row) noexcept;
  void keep(const WorkItem& item, const float* tile, int64_t ld) noexcept;
  void requant(const WorkItem& item, std::byte* mine) noexcept;
  void fetch_down(const WorkItem& item, int group) const noexcept;
  void down(const WorkItem& item, std::byte* mine) noexcept;
  void add_group(const WorkItem& item, int group, const float* tile, float* y) noexcept;
  void store(const WorkItem& item, const float* y) noexcept;

  size_t kept_bytes(ExpertAdapter::Input input, int m) const;
  bool reads_apart() const { return args_.adapter && args_.adapter->reads_apart(); }
  void list_reads(Stage stage, ExpertAdapter::Input input);
  // An adapter's scratch is what products have between calls.
  void let_read(const WorkItem& item, ExpertAdapter::Input input, std::byte* scratch) noexcept;
  void let_add(const WorkItem& item, float* tile, int64_t ld, std::byte* scratch) noexcept;  // to gate and up
  void let_add_down(const WorkItem& item, int group, float* tile, std::byte* scratch) noexcept;

  // Which rows of the input a group reads.
  const int32_t* inputs_of(const ExpertGroup& group) const {
    return (args_.input_each ? routing_.pair : routing_.token).data() + group.first;
  }
  int64_t input_stride() const { return args_.input_stride ? args_.input_stride : shape_.hidden; }

  const Kernels& kernels_;
  const ExpertsShape& shape_;
  const ExpertsOptions& options_;
  const Shard& shard_;
  const ForwardArgs& args_;
  const ExpertRouting& routing_;
  WorkList& list_;
  NodeMemory& memory_;
  std::vector<ForwardNode::Part>& parts_;
  const std::vector<float>* down_bias_;
  int workers_;
  bool direct_;
  Keep keep_;
  bool keeps_only_;

  SharedTokens gate_tokens_, up_tokens_;  // up's: for groups where it reads others than gate
  float* partial_ = nullptr;
  int down_blocks_ = 1;  // of an item
  int down_tail_ = 1;    // of an item among the last
  size_t widest_ = 1;    // row blocks of the widest multiply
  size_t most_rows_ = 0;
  size_t multiply_bytes_ = 0, tile_bytes_ = 0;  // the beginnings of a worker's memory
  size_t partial_at_ = 0;
};

}  // namespace kt::inline nn
