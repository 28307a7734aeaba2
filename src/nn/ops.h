// What layers are computed with: operations over named rows, and weights that lie where the operations run. A
// mixer or a feed-forward part is written in these calls once; a CPU and a GPU each implement them
// (cpu_ops.h). No addresses: what a name stands for is known to the Ops that gave it.
//
// Rows of a step are [tokens, width] floats, a row for each new token of all sequences. Operations run in the
// order they are called in; what one wrote, the next reads. Between begin() and end() only.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/function_ref.h"
#include "formats/matrix.h"
#include "kernels/plan.h"
#include "kernels/row_ops.h"
#include "nn/delta_shape.h"
#include "nn/experts.h"
#include "nn/fill_experts.h"
#include "nn/indexer.h"
#include "nn/kv_cache.h"
#include "nn/place.h"
#include "nn/rope.h"
#include "nn/router.h"
#include "nn/row_reader.h"
#include "nn/step_parts.h"
#include "nn/work.h"

namespace kt::inline nn {

// A name of rows. Two names of one `id` with different widths are the same memory, used in turn.
struct Rows {
  int id = -1;
  int64_t width = 0;
};

// The numbers of each row from column `first` on; how many is the operation's affair.
struct Columns {
  Rows rows;
  int64_t first = 0;
  Columns(Rows all) : rows(all) {}
  Columns(Rows from, int64_t column) : rows(from), first(column) {}
};

// Weights in the memory of a place. Made by an Ops and understood by it alone.
class PlacedWeights {
 public:
  virtual ~PlacedWeights() = default;
  virtual size_t packed_bytes() const = 0;
  virtual size_t packed_bytes(int node) const = 0;   // its share on a node of the host
  virtual size_t device_bytes() const { return 0; }  // its share on the device of an Ops that has one
  virtual size_t plain_bytes() const = 0;            // vectors, biases
  virtual double stored_bytes() const = 0;           // in the checkpoint's own bytes
};

class PlacedVector : public PlacedWeights {
 public:
  virtual int64_t size() const = 0;
};

class PlacedLinear;

// y += scale * up(down(x)): what an adapter (LoRA) adds to a linear.
struct LinearAdapter {
  std::unique_ptr<PlacedLinear> down, up;  // [rank, k], [n, rank]; null: nothing
  float scale = 1;
};

class PlacedLinear : public PlacedWeights {
 public:
  virtual int64_t n() const = 0;
  virtual int64_t k() const = 0;

  // By the numbers of the model's adapters; those past the end add nothing.
  std::vector<LinearAdapter> adapters;
  const LinearAdapter* adapter(int number) const {
    if (number < 0 || number >= std::ssize(adapters)) return nullptr;
    const LinearAdapter& one = adapters[static_cast<size_t>(number)];
    return one.down ? &one : nullptr;
  }
};

// Gated MLPs that tokens are sent to; one that every token visits is a layer's dense MLP or shared expert.
class PlacedExperts : public PlacedWeights {
 public:
  virtual const ExpertsShape& shape() const = 0;

  // As PlacedLinear's; null: nothing.
  std::vector<std::shared_ptr<const ExpertAdapter>> adapters;
  const ExpertAdapter* adapter(int number) const {
    return number < 0 || number >= std::ssize(adapters) ? nullptr
                                                        : adapters[static_cast<size_t>(number)].get();
  }
};

// What an adapter has for one product of all of a layer's experts, W' = W + scale * B A (nn/lora_adapter.h).
struct ExpertLowRank {
  int rank = 0;  // 0: nothing
  float scale = 1;
  std::vector<float> a, b;  // [experts, rank, in], [experts, out, rank]
};

// Rows of a table, found by number: the embedding.
struct RowTable {
  int64_t rows = 0, width = 0;
  std::function<void(int64_t row, float* to)> read = {};  // from several threads
};

// y = x W^T + b, and what the step's adapter adds. Uses of one call that read the same x share its quantised rows; none
// reads another's y.
struct LinearUse {
  const PlacedLinear* weights = nullptr;
  Columns x, y;
};

// Heads side by side in rows: head h begins at column h * stride.
struct HeadRows {
  Rows rows;
  int heads = 0;
  int64_t stride = 0;
  int64_t rotated = 0;  // where in a head the rotated numbers begin
  // An RMS norm before the rotation over norm->size() numbers at a time, `norms` times side by side from the
  // row's beginning; null: none. With a bias it also takes the mean away.
  const PlacedVector* norm = nullptr;
  int norms = 0;
  const PlacedVector* norm_bias = nullptr;
};

// New queries and keys are normed and rotated in place; keys and values go to their pages of the plane.
struct RotateWrite {
  int plane = 0;
  int rotation = 0;  // of make_rotation()
  double norm_eps = 0;
  bool norm_last = false;  // norms come behind the rotation
  HeadRows q, k;
  Rows v = {};  // none where the plane has no values of its own
  // An RMS norm of each head of values, in place, as many numbers as it has; null: none.
  const PlacedVector* v_norm = nullptr;
  QueryGrowth growth = {};  // of whole queries, after the rotation
};

// The keys that each token attends to, by an indexer: those with the best scores
//   sum over heads of weight * max(q . key, 0)
// over a plane of keys, as many as the budget; of equal scores the earlier ones. Tokens that see no more than those
// attend to all, and nothing is written for them. `seen`: seen_columns() wide.
struct ChooseKeys {
  int plane = 0;
  Rows q, weights;  // [tokens, heads * d], [tokens, heads]
  int heads = 0;
  int budget = 0;
  Rows seen;
};
constexpr int64_t seen_columns(int64_t context) {
  return seen_words(context) * static_cast<int64_t>(sizeof(uint64_t) / sizeof(float));
}

// Causal softmax attention over a plane (nn/attention.h).
struct Attend {
  int plane = 0;
  Rows q, out;
  int heads = 0;
  float scale = 1;
  int window = 0, chunk = 0;            // AttentionArgs'
  const PlacedVector* sinks = nullptr;  // [heads]
  Rows seen = {};                       // of choose_keys(), with its budget; none: all keys are seen
  int budget = 0;
  bool exact = false;  // queries and weights of keys stay f32: a model of Precision::kF32
};

// `count` numbers of every head, from columns head * stride on.
struct CopyHeads {
  Columns from, to;
  int64_t from_stride = 0, to_stride = 0;
  int heads = 0;
  int64_t count = 0;
};

// Heads in groups of as many: head h begins at column (h / in_group) * stride + (h % in_group) * width from `from` on,
// width being the numbers of one, which is the operation's affair.
struct GroupedHeads {
  Columns from;
  int64_t stride = 0;
  int in_group = 1;
};

// Every head of x, `count` numbers side by side, is normed where there are weights for it, and multiplied by what its
// gates give.
struct GateHeads {
  Rows x;
  int heads = 0;
  int64_t count = 0;
  const PlacedVector* norm = nullptr;  // [count], RMS; null: none
  double norm_eps = 0;
  GroupedHeads gates;
  GateKind kind = GateKind::kSigmoid;
};

// A causal convolution of each column over the last `taps` tokens of a sequence, and silu. The columns of `parts` come
// one part after the other, and so they are in `out`. What it remembers of a sequence, its last taps - 1 inputs, is the
// state of this number: short_convolution_bytes().
struct ShortConvolution {
  int state = 0;
  int taps = 0;                           // at most kMostTaps
  const PlacedVector* weights = nullptr;  // [taps, columns]
  struct Part {
    GroupedHeads heads;
    int count = 0;
    int64_t width = 0;  // of one
  };
  std::span<const Part> parts;
  Rows out;  // none of the parts' rows
};

// The gated delta rule (kernels/row_ops.h), token after token. What it remembers of a sequence, a matrix for each head
// of values, is the state of this number: delta_rule_bytes().
struct DeltaRule {
  int state = 0;
  DeltaShape shape;
  Rows qkv;  // [tokens, shape.width()]; q and k become vectors of length one in place, q over sqrt(key_dim)
  Rows factors;                         // [tokens, 3 value_heads], scratch
  GroupedHeads b;                       // one number a value head: beta = sigmoid(b)
  GroupedHeads a;                       // decay = e^(rates * softplus(a + steps))
  const PlacedVector* rates = nullptr;  // [value_heads], below 0
  const PlacedVector* steps = nullptr;  // [value_heads]
  Rows out;                             // [tokens, value_heads * value_dim]
};

// Of one sequence.
size_t short_convolution_bytes(int taps, int64_t columns);
size_t delta_rule_bytes(const DeltaShape& shape);

// Scores of a router, and the experts it chooses (nn/router.h).
struct ChooseExperts {
  const RouterSpec* spec = nullptr;
  const PlacedLinear* router = nullptr;
  const PlacedVector* correction = nullptr;  // null: none
  const PlacedVector* scales = nullptr;      // [experts] of the weights of each, behind all else; null: none
  int top_k = 0;
  Rows x, scores;     // scores: [tokens, experts]
  Rows ids, weights;  // [tokens, top_k]; ids are whole numbers
  // [kForcedRounds, top_k]: ids in place of those that are chosen, whose weights stay. Null: none.
  const PlacedVector* forced = nullptr;
};

// What experts read of a token whose weights are their inputs': each[t, s] = x[t] * weights[t, s], and then all weights
// are 1.
struct WeighInputs {
  int top_k = 0;
  Rows x, weights, each;  // each: [tokens, top_k * width of x]
};

// Told what routers chose and how long routed experts took, on the thread that runs the step.
class RouteWatch {
 public:
  virtual ~RouteWatch() = default;
  virtual void chose(size_t layer, std::span<const int32_t> ids) = 0;  // of all tokens of a step
  virtual void took(std::chrono::nanoseconds time) = 0;
  // Of a layer: pairs of tokens and experts that a device ran itself, and how long it waited for the host's.
  virtual void on_device(uint64_t pairs, std::chrono::nanoseconds waited) = 0;
};

// Experts that tokens were sent to.
struct RunExperts {
  const PlacedExperts* experts = nullptr;
  int top_k = 0;
  Rows x, ids, weights, out;
  bool input_each = false;      // x is WeighInputs::each
  RouteWatch* watch = nullptr;  // null: nobody; lives as long as the Ops
  size_t watched = 0;           // which layer that is to them
};

// A gated MLP that every token visits; `factors` [tokens, 1] multiply what it gives, where they are named.
struct RunMlp {
  const PlacedExperts* mlp = nullptr;
  Rows x, factors = {}, out;
};

// A step: new tokens of these sequences, with what the model keeps of them.
struct StepRows {
  std::span<const AttentionSequence> sequences;
  int tokens = 0;
  SequenceCache* cache = nullptr;  // of the same Ops
  float* logits = nullptr;         // [rows, n] of project(), in memory of the caller
  // One new token of each sequence, and logits of all: whatever the sequences, the same calls are made.
  bool alike = false;
  int adapter = -1;  // of all sequences: its number in PlacedLinear::adapters; -1: none
};

// What a step takes: the work of it, and memory beyond weights, rows and cache.
struct StepNeeds {
  Work work;
  size_t workspace = 0;  // where the operations run
  size_t on_host = 0;    // besides, of those that a device leaves to the host
};

class Ops {
 public:
  virtual ~Ops() = default;
  virtual Place place() const = 0;
  virtual int nodes() const = 0;        // of the host, whose shares packed_bytes(node) tells
  virtual bool sizes_only() const = 0;  // weights are laid out but not read, and nothing runs but measure()
  // Whether what ModelSpec::host_only() names can run here.
  virtual bool runs_all() const = 0;

  // Weights. Errors name `name`.
  virtual std::unique_ptr<PlacedVector> make_vector(std::vector<float> values) = 0;
  // Read in pieces on all threads that load; the bias is [n] or empty.
  virtual std::unique_ptr<PlacedLinear> make_linear(const RowReader& weights, std::span<const float> bias,
                                                    Precision precision, std::string_view name) = 0;
  // A small matrix that is there as a whole; from inside spread() too.
  virtual std::unique_ptr<PlacedLinear> make_linear(const MatrixView& weights, Precision precision,
                                                    std::string_view name) = 0;
  // All of them in the host's memory; copies of those named `hot`, whose ids ascend, are held and run by the device of
  // an Ops that has one.
  virtual std::unique_ptr<PlacedExperts> make_experts(const ExpertsShape& shape,
                                                      const ExpertsOptions& options, const ExpertsFill& fill,
                                                      std::span<const int> hot) = 0;
  // One that every token visits: for mlp(), as the others are for experts().
  virtual std::unique_ptr<PlacedExperts> make_mlp(const ExpertsShape& shape, const ExpertsOptions& options,
                                                  const ExpertsFill& fill) = 0;
  // The next of their adapters, of gate and up (gate's rows of b first) and of down. Error(kUnsupported) where experts
  // with adapters do not run.
  virtual void add_adapter(PlacedExperts& experts, ExpertLowRank gate_up, ExpertLowRank down) = 0;
  // Error(kMemory) with the numbers if pages and slots do not fit.
  virtual std::unique_ptr<SequenceCache> make_cache(const SequenceShape& shape, int pages, int slots) = 0;
  // A kind of rotation; its sines and cosines are computed once a step.
  virtual int make_rotation(const RopeSpec& spec) = 0;
  // Rows by name. Of several widths asked for under one name memory has the largest.
  virtual Rows rows(std::string_view name, int64_t width) = 0;
  // Memory for all rows asked for so far; before the first step.
  virtual void allocate(int max_tokens) = 0;
  // Calls work(i) for i in [0, n) on the threads that load weights, the first error stops all and is thrown.
  virtual void spread(int64_t n, FunctionRef<void(int64_t)> work) = 0;
  virtual int loading_threads() const = 0;

  virtual void begin(const StepRows& step) = 0;
  virtual void end() noexcept = 0;
  // The calls of a step behind embed(). Where steps are alike an Ops may note down what one of them asks of a device
  // and ask for the same again at others, without calling `run`.
  virtual void repeat(FunctionRef<void()> run) = 0;
  // x[i] = table[ids[i]], for all tokens.
  virtual void embed(const RowTable& table, std::span<const int32_t> ids, Rows x) = 0;
  virtual void norm(Rows x, const PlacedVector& weights, double eps, Rows y) = 0;  // y may be x
  virtual void add(Rows x, Rows y) = 0;                                            // x += y
  // x += y; out = norm(x).
  virtual void add_norm(Rows x, Rows y, const PlacedVector& weights, double eps, Rows out) = 0;
  virtual void linear(std::span<const LinearUse> uses) = 0;
  virtual void rotate_write(const RotateWrite& args) = 0;
  virtual void choose_keys(const ChooseKeys& args) = 0;
  virtual void attend(const Attend& args) = 0;
  virtual void copy_heads(const CopyHeads& args) = 0;
  virtual void gate_heads(const GateHeads& args) = 0;
  virtual void convolve(const ShortConvolution& args) = 0;
  virtual void delta_rule(const DeltaRule& args) = 0;
  virtual void route(const ChooseExperts& args) = 0;
  virtual void weigh_inputs(const WeighInputs& args) = 0;
  // The experts' rows are there, and what is called before experts() does not change them: where another place runs
  // experts, it begins.
  virtual void send_experts(const RunExperts& args) = 0;
  virtual void experts(const RunExperts& args) = 0;  // the same that were sent
  virtual void mlp(const RunMlp& args) = 0;
  virtual void sigmoid(Rows x) = 0;              // in place
  virtual void scale(Rows x, float factor) = 0;  // x *= factor
  // Rows whose numbers are `tokens` (ascending) move to the front: x[i] = x[tokens[i]].
  virtual void pick(Rows x, std::span<const int> tokens) = 0;
  // The first `count` rows through a linear, to StepRows::logits. With a cap above 0 a logit l becomes
  // cap tanh(l / cap).
  virtual void project(const PlacedLinear& weights, Rows x, int count, float cap) = 0;
  // Between rows and memory of the caller, [tokens, width].
  virtual void write(std::span<const float> values, Rows x) = 0;
  virtual void read(Rows x, std::span<float> values) = 0;
  virtual void read_ids(Rows ids, std::span<int32_t> values) = 0;  // of route()

  // What the operations that `run` calls would take for such a step over planes of these shapes. Nothing is
  // computed, no rows and no cache are needed, and tokens go to experts as if routing were even. Not beside a
  // step.
  virtual StepNeeds measure(const StepRows& step, const SequenceShape& shape, FunctionRef<void()> run) = 0;
  virtual size_t row_bytes(int max_tokens) const = 0;  // of all rows asked for so far
  // Of all steps so far, and where their time went.
  virtual const Work& work() const = 0;
  virtual const std::vector<StepPart>& parts() const = 0;
};

// A step from here to the end of the scope.
class StepScope {
 public:
  StepScope(Ops& ops, const StepRows& step) : ops_(ops) { ops_.begin(step); }
  ~StepScope() { ops_.end(); }
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;

 private:
  Ops& ops_;
};

}  // namespace kt::inline nn
