// One node's share of an ExpertsGrad::backward: its slice of `inter`, all groups. Not for other files than those of
// the backward.
//
//   stage     items                 waits for
//   pack      group, rows           -                  rows of the output's gradient in the kernels' order
//   read      group, rows           pack of the group  what B of down makes of these, as their further columns; what A
//                                                      of gate|up makes of the input
//   middle    group, kSpan columns  read of the group  through W_down^T, the activation, and into the order of the
//                                                      next product; sums of a span for what is summed over columns
//   sums      group                 middle             those sums over the spans; dT as further columns of [dg|du]
//   factors   group                 sums               gradients of A of gate|up and of B of down; where one node
//                                                      has all of `inter`, else after the nodes' sums
//   input     columns               sums of each group through W_gate_up^T, added up over all groups in order
//
// For groups of many rows columns of LoRA's A are further rows of K of the transposed panels, in bf16: what factors add
// costs no pass of its own. Groups of few get it in f32.
// Spans are of one size, whoever works on them, and a column of a product does not depend on those beside it: no bit
// depends on the number of threads.
#pragma once
#include "kernels/transpose.h"
#include "nn/expert_groups.h"
#include "nn/experts_grad.h"
#include "nn/experts_state.h"
#include "nn/factor_products.h"

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
  // `mine`: a worker's memory, whosever.
  void add_factors(int group, std::byte* mine) const noexcept;
  std::byte* of_worker(int rank) const { return memory_.of_worker(rank); }

 private:
  using Product = BackwardNode::Product;
  enum Stage : int { kPack, kRead, kMiddle, kSums, kFactors, kInput, kStages };

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
    size_t multiply = 0, panel = 0, tile = 0, mid = 0, both = 0, more = 0, turned = 0,
           y = 0;  // of one worker
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
  void list_input();
  int wide_columns(int m) const;
  bool takes_bf16(int m) const { return factors_bf16_ && m >= FactorProducts::kBf16Rows; }
  const FactorProducts& products(int m) const { return takes_bf16(m) ? bf16_ : f32_; }
  void lay_out_worker();

  void pack(const WorkItem& item) noexcept;
  void read(const WorkItem& item, std::byte* mine) noexcept;
  void read_output_grad(const WorkItem& item, std::byte* mine) noexcept;
  void middle(const WorkItem& item, std::byte* mine) noexcept;
  void fill_down_panel(const ExpertGroup& group, int column, int chunks, std::byte* panel) noexcept;
  // Of the product's rows, the columns of one chunk: [rows, ld].
  struct Tile {
    float *grad = nullptr, *mid = nullptr;
    int ld = 0;
  };
  void middle_rows(const Rows& rows, const Columns& columns, const Tile& tile, int span,
                   std::byte* mine) noexcept;
  void turn_middle(const ExpertGroup& group, const Columns& columns, std::byte* turned) noexcept;
  // What A makes of rows of factors [rows, width], added to a tile; in bf16 it is part of the product.
  struct Added {
    const Factors* factors = nullptr;
    const float* from = nullptr;
    FactorProducts::Turn turn;  // of A, less where it goes
  };
  void add_factor(const Rows& rows, const Added& what, float* tile, int ld, std::byte* mine) noexcept;
  void add_middle_factors(const Rows& rows, const Columns& columns, const Tile& tile, int span,
                          std::byte* mine) noexcept;
  void pack_both(const Rows& rows, const Columns& columns, const Product& to, std::byte* mine) noexcept;
  void sum_spans(const WorkItem& item) noexcept;
  void pack_factor(const Rows& rows, const float* from, const Factors& f, const Product& to,
                   int column) noexcept;
  void input(const WorkItem& item, std::byte* mine) noexcept;
  void fill_gate_up_panel(const ExpertGroup& group, const WorkItem& columns, std::byte* panel) noexcept;
  // Row blocks of one projection, `stride` apart, by chunks of columns from `first` on, to K from row `row` on of four
  // row blocks of a panel for each chunk.
  struct Stored {
    int64_t stride = 0;
    int blocks = 0, first = 0, chunks = 0, row = 0;
  };
  void transpose(const ExpertGroup& group, const StoredBlocks& of, const Stored& from, const Packing& panel,
                 std::byte* out) noexcept;

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

  Packing plain_down_, plain_gate_up_;  // of the transposed panels, A's columns behind the others
  int down_k_ = 0, both_k_ = 0;         // where these begin
  FactorProducts bf16_, f32_;           // of low-rank factors, for groups of many rows and of few
  bool factors_bf16_ = false;           // whether there are any of the first kind
  void (*transpose_)(const TransposeArgs&) noexcept = nullptr;
  Factors gate_up_, down_;
  size_t weights_at_ = 0, input_at_ = 0;
  float* weights_ = nullptr;  // [1 + spans, rows]: of down's bias, then of each span
  float* input_ = nullptr;    // [tokens, hidden] where not direct
  size_t multiply_bytes_ = 0;
  int widest_ = 0;  // columns of an input item
  Places places_;
};

}  // namespace kt::inline nn
