// One Mixture-of-Experts layer on the CPU:
//
//   out[t] = sum over slots s of weight[t, s] * down( f( gate(in[t]), up(in[t]) ) )     with expert ids[t, s]
//
// for routed ids and weights that the caller computed. Which bytes the weights are, which CPU multiplies them
// and how many NUMA nodes share the work are values chosen at construction.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/memory.h"
#include "base/pool.h"
#include "formats/matrix.h"
#include "kernels/plan.h"
#include "nn/row_reader.h"

namespace kt::inline nn {

struct ExpertsShape {
  int experts = 0, hidden = 0, inter = 0;
};

struct ExpertsOptions {
  Format gate = {}, up = {}, down = {};  // each its own; gate and up of one format are faster
  Activation activation = {};
  Precision precision = Precision::kDefault;
  int max_tokens = 4096;             // of one forward; more is an Error
  const Kernels* kernels = nullptr;  // null: best_kernels()
  HugePages huge = HugePages::kAdvise;
  bool sizes_only = false;  // no memory: for plans, which ask bytes and neither load nor run it
};

enum class ExpertPart : uint8_t { kGate, kUp, kDown };

// Plain weights of one expert: gate and up [inter, hidden], down [hidden, inter]; biases may be null.
struct ExpertWeights {
  MatrixView gate, up, down;
  const float* gate_bias = nullptr;  // [inter]
  const float* up_bias = nullptr;    // [inter]
  const float* down_bias = nullptr;  // [hidden]
};

// The same, read in pieces while they are packed.
struct ExpertRows {
  RowReader gate, up, down;
  const float* gate_bias = nullptr;
  const float* up_bias = nullptr;
  const float* down_bias = nullptr;
};

class ExpertAdapter;  // nn/expert_adapter.h

struct ForwardArgs {
  int tokens = 0, top_k = 0;
  const void* input = nullptr;  // [tokens, hidden]; with input_each [tokens, top_k, hidden]
  Real input_type = Real::kF32;
  int64_t input_stride = 0;        // elements; 0: hidden
  const int32_t* ids = nullptr;    // [tokens, top_k]; ids < 0 or >= experts are skipped
  const int64_t* ids64 = nullptr;  // the same, if the caller has these; exactly one of the two
  const float* weights = nullptr;  // [tokens, top_k]
  void* output = nullptr;          // [tokens, hidden]; tokens without experts become zeros
  Real output_type = Real::kF32;
  int64_t output_stride = 0;  // elements; 0: hidden
  const uint8_t* skip =
      nullptr;  // [experts], nonzero: expert is computed elsewhere; null: none. Read at each call
  const ExpertAdapter* adapter = nullptr;  // adds to the products of this call; null costs nothing
  bool input_each = false;         // every slot of a token has a row of its own: what its expert reads
  const Forecast* then = nullptr;  // what workers fetch when they are done (Pool::run)
};

// Memory that forwards need while they run; layers that never run at the same time share one.
class Workspace {
 public:
  struct State;
  Workspace();
  ~Workspace();
  size_t bytes() const;  // held now; grows to the largest forward seen

 private:
  friend class Experts;
  friend class ExpertsGrad;
  std::unique_ptr<State> state_;
};

// Weights are cut along `inter` into one shard per node of the pool. Results are bitwise the same for any
// number of threads at a fixed number of nodes. load() may run on several threads for different experts;
// forward() calls on one Workspace are serialised.
class Experts {
 public:
  Experts(std::shared_ptr<Pool> pool, std::shared_ptr<Workspace> workspace, ExpertsShape shape,
          ExpertsOptions options);
  ~Experts();
  Experts(Experts&&) noexcept;

  // Packs one expert. Errors name expert and projection, what was expected and what came.
  void load(int expert, const ExpertWeights& weights);
  void load(int expert, const ExpertRows& weights);
  // The same on all workers of the pool, for layers of few experts.
  void load_together(int expert, const ExpertRows& weights);
  // Rows [16 * block, 16 * block + the result) of a loaded expert's matrix, all columns, into the first rows
  // of `out`: as they were loaded, but with the scale of each row apart (span.n = 1). `out` is made anew
  // unless it has 16 rows of that format. Any thread.
  int64_t read_block(int expert, ExpertPart part, int64_t block, Matrix& out) const;
  // Makes expert `to` a copy of the loaded expert `from`.
  void copy(int from, int to);
  void forward(const ForwardArgs& args) const;

  const ExpertsShape& shape() const;
  const ExpertsOptions& options() const;
  const Kernels& kernels() const;
  size_t packed_bytes() const;          // of all experts
  size_t packed_bytes(int node) const;  // of its share of all experts
  // What a forward takes of the workspace when its rows are spread evenly over the experts.
  size_t forward_bytes(int tokens, int top_k, const ExpertAdapter* adapter = nullptr) const;
  double stored_bytes_per_expert() const;  // in the checkpoint's own bytes
  bool loaded(int expert) const;
  // The route each expert of a call with this many rows takes, for reports: "few, s8 activations, ...".
  std::string describe_plan(int rows) const;

  // What lies where (experts_state.h), for those who copy packed experts elsewhere.
  struct State;
  const State& state() const { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline nn
