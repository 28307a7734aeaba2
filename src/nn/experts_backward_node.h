// One node's share of an ExpertsGrad::backward: its slice of `inter`, all groups. Not for other files than those of
// the backward.
//
//   stage     items                 waits for
//   pack      group, rows           -                  rows of the output's gradient in the kernels' order; what
//                                                      factors make of these and of the input
//   middle    group, kSpan columns  pack of the group  through W_down^T, the activation, and into the order of the
//                                                      next product; sums of a span for what is summed over columns
//   sums      group                 middle             those sums over the spans
//   factors   group                 sums               gradients of A of gate|up and of B of down; where one node
//                                                      has all of `inter`, else after the nodes' sums
//   input     kChunk columns        sums of each group through W_gate_up^T, added up over all groups in order
//
// Spans and chunks are of one size, whoever works on them: no bit depends on the number of threads.
#pragma once
#include "kernels/transpose.h"
#include "nn/expert_groups.h"
#include "nn/experts_grad.h"
#include "nn/experts_state.h"

namespace kt::inline nn {

// What a node keeps from call to call, whichever layer runs.
struct BackwardNode {
  // Rows of a product over a transposed panel: how, and where they lie in the node's memory.
  struct Product {
    Plan plan;
    Acts acts;
    size_t at = 0;
  };
  struct Part {
    Product down;     // rows of the output's gradient
    Product gate_up;  // [dg|du], in the order of Shard::both()
  };
  WorkList list;
  NodeMemory memory;
  std::vector<Part> parts;  // [groups]
};

// Made, laid out and prepared by the calling thread, run by the node's workers. Views only: what Setting points to
// outlives it.
class NodeBackward {
 public:
  struct Setting {
    const Experts::State* experts = nullptr;
    const Shard* shard = nullptr;
    bool first = true;  // of the nodes: adds what comes of down's bias
    const TrainBackwardArgs* args = nullptr;
    const LoraAdapter* adapter = nullptr;    // of the factors in args
    const ExpertRouting* routing = nullptr;  // with one group at least
    const std::byte* kept = nullptr;         // [rows, shard.both()]
    Real kept_type = Real::kBf16;
    BackwardNode* node = nullptr;
    int workers = 1;
    bool direct = true;  // this node has all of `inter`: results are written here, otherwise left for finish
  };
  explicit NodeBackward(const Setting& setting);

  // Lists the items and lays out the node's memory; returns its bytes and takes none.
  size_t lay_out();
  // After lay_out(): takes the memory, and workers may run.
  void prepare(int memory_node);
  void run(int rank) noexcept;

  // What is left for the nodes together, of rows in the order of the routing; null where nobody asked.
  struct Sums {
    float* input = nullptr;    // [tokens, hidden]
    float* weights = nullptr;  // [rows]
    float* t = nullptr;        // [rows, padded rank]: dT
    float* td = nullptr;       // [rows, padded rank]: s2 w td
    int64_t t_width = 0, td_width = 0;
  };
  Sums sums() const;
  // Gradients of A of gate|up and of B of down for one group, from dT and td of all nodes.
  void add_factors(int group) const noexcept;

 private:
  using Product = BackwardNode::Product;
  enum Stage : int { kPack, kMiddle, kSums, kFactors, kInput, kStages };

  // Columns [column, column + 64) of the node's slice: of `inter`, [first, first + count); what is left is padding.
  struct Columns {
    int column = 0;
    int64_t first = 0;
    int count = 0;
  };
  // Rows [first, first + count) of a group.
  struct Rows {
    const ExpertGroup& group;
    int first = 0, count = 0;
    int64_t at() const { return group.first + first; }  // in the routing
  };
  // A worker's memory: each [bytes] at its place.
  struct Places {
    size_t multiply = 0, panel = 0, tile = 0, mid = 0, both = 0, more = 0, turned = 0, y = 0;
  };
  struct Factors {            // of gate|up or of down, for this node
    int rank = 0, width = 0;  // width: the rank in whole blocks
    size_t read_at = 0, weighted_at = 0, sums_at = 0;
    float* read = nullptr;      // [rows, rank]: s1 A1 x; of down: [rows, width], s2 dO B2
    float* weighted = nullptr;  // of down: [rows, width], w s2 dO B2
    float* sums = nullptr;      // [spans, rows, width]: of dT or td; the first becomes their sum
  };

  void plan_groups();
  void list_items();
  void lay_out_worker();

  void pack(const WorkItem& item, std::byte* mine) noexcept;
  void read_output_grad(const WorkItem& item, std::byte* mine) noexcept;
  void middle(const WorkItem& item, std::byte* mine) noexcept;
  void middle_rows(const Rows& rows, const Columns& columns, const WorkItem& item, std::byte* mine) noexcept;
  void turn_middle(const ExpertGroup& group, const Columns& columns, std::byte* mine) noexcept;
  void add_middle_factors(const Rows& rows, const Columns& columns, int span, std::byte* mine) noexcept;
  void pack_both(const Rows& rows, const Columns& columns, const Product& to, std::byte* mine) noexcept;
  void sum_spans(const WorkItem& item) noexcept;
  void input(const WorkItem& item, std::byte* mine) noexcept;
  void transpose_gate_up(const ExpertGroup& group, int first, std::byte* panel) noexcept;

  // In the tile of [dg|du], whose blocks stand as those of Shard::both().
  int64_t tile_up_at() const { return shard_.paired ? kBlockRows : kChunk; }
  Columns columns_at(int column) const;
  int spans() const;

  const Experts::State& state_;
  const Kernels& kernels_;
  const BackKernels& back_;
  const ExpertsShape& shape_;
  const Shard& shard_;
  const TrainBackwardArgs& args_;
  const LoraAdapter& adapter_;
  const ExpertRouting& routing_;
  const std::byte* kept_;
  Real kept_type_;
  WorkList& list_;
  NodeMemory& memory_;
  std::vector<BackwardNode::Part>& parts_;
  int workers_;
  bool first_, direct_;

  Packing plain_down_, plain_gate_up_;  // of four row blocks of the transposed panels
  void (*transpose_)(const TransposeArgs&) noexcept = nullptr;
  Factors gate_up_, down_;
  size_t weights_at_ = 0, input_at_ = 0;
  float* weights_ = nullptr;  // [1 + spans, rows]: of down's bias, then of each span
  float* input_ = nullptr;    // [tokens, hidden] where not direct
  size_t multiply_bytes_ = 0;
  Places places_;
};

}  // namespace kt::inline nn
