// The class behind make_gpu_ops: what gpu_ops.cc (rows, norms, attention) and gpu_ops_products.cc (linears, routers,
// experts, the head) share. Not for other files.
#pragma once
#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/checked.h"
#include "nn/gpu_exchange.h"
#include "nn/gpu_experts.h"
#include "nn/gpu_ops.h"
#include "nn/gpu_step.h"
#include "nn/gpu_stream.h"
#include "nn/gpu_weights.h"

namespace kt::inline nn {

inline constexpr int kRowThreads = 256;  // of a block that takes a row
inline constexpr int kFewRows =
    16;  // of x, for which weights are read as they arrive; of more they are widened once for all

// Rows by name, in one piece of device memory.
class GpuRows {
 public:
  Rows rows(std::string_view name, int64_t width) {
    size_t i = 0;
    while (i < all_.size() && all_[i].name != name) ++i;
    if (i == all_.size()) all_.push_back({.name = std::string(name)});
    all_[i].width = std::max(all_[i].width, width);
    return {.id = static_cast<int>(i), .width = width};
  }
  int64_t floats(int64_t tokens) const {
    int64_t sum = 0;
    for (const Named& named : all_) sum += round_up(named.width * tokens, kAlignment);
    return sum;
  }
  void allocate(std::shared_ptr<const Gpu> gpu, int64_t tokens) {
    memory_ =
        DeviceBuffer(std::move(gpu), static_cast<size_t>(floats(tokens)) * sizeof(float), "rows of a step");
    int64_t at = 0;
    for (Named& named : all_) {
      named.at = at;
      at += round_up(named.width * tokens, kAlignment);
    }
  }
  float* at(Rows rows) const { return memory_.as<float>() + all_[static_cast<size_t>(rows.id)].at; }

 private:
  struct Named {
    std::string name;
    int64_t width = 0, at = 0;  // in floats
  };
  static constexpr int64_t kAlignment = 64;  // in floats
  std::vector<Named> all_;
  DeviceBuffer memory_;
};

class GpuOps final : public Ops {
 public:
  GpuOps(std::shared_ptr<Pool> pool, GpuOpsOptions options);

  Place place() const override { return {.kind = Place::Kind::kGpu, .index = options_.number}; }
  int nodes() const override { return pool_->nodes(); }
  bool sizes_only() const override { return options_.sizes_only; }
  bool runs_all() const override { return false; }

  std::unique_ptr<PlacedVector> make_vector(std::vector<float> values) override {
    return std::make_unique<GpuVector>(weights_, values);
  }
  std::unique_ptr<PlacedLinear> make_linear(const RowReader& weights, std::span<const float> bias,
                                            Precision precision, std::string_view name) override {
    return placed(Linear(*pool_, weights, bias, packed(), name), precision, name);
  }
  std::unique_ptr<PlacedLinear> make_linear(const MatrixView& weights, Precision precision,
                                            std::string_view name) override {
    return placed(Linear(*pool_, weights, {}, packed(), name), precision, name);
  }
  std::unique_ptr<PlacedExperts> make_experts(const ExpertsShape& shape, const ExpertsOptions& options,
                                              const ExpertsFill& fill, std::span<const int> hot) override;
  std::unique_ptr<PlacedExperts> make_mlp(const ExpertsShape& shape, const ExpertsOptions& options,
                                          const ExpertsFill& fill) override;
  void add_adapter(PlacedExperts& experts, ExpertLowRank gate_up, ExpertLowRank down) override;
  std::unique_ptr<SequenceCache> make_cache(const SequenceShape& shape, int pages, int slots) override;
  int make_rotation(const RopeSpec& spec) override { return tables_.rotation(spec); }
  Rows rows(std::string_view name, int64_t width) override { return memory_.rows(name, width); }
  void allocate(int max_tokens) override;
  size_t row_bytes(int max_tokens) const override;
  void spread(int64_t n, FunctionRef<void(int64_t)> work) override { host_->spread(n, work); }
  int loading_threads() const override { return host_->loading_threads(); }

  void begin(const StepRows& step) override;
  void end() noexcept override;
  void repeat(FunctionRef<void()> run) override;
  void embed(const RowTable& table, std::span<const int32_t> ids, Rows x) override;
  void norm(Rows x, const PlacedVector& weights, double eps, Rows y) override;
  void add(Rows x, Rows y) override;
  void add_norm(Rows x, Rows y, const PlacedVector& weights, double eps, Rows out) override;
  void linear(std::span<const LinearUse> uses) override;
  void rotate_write(const RotateWrite& args) override;
  void attend(const Attend& args) override;
  void copy_heads(const CopyHeads& args) override;
  void choose_keys(const ChooseKeys&) override { refuse("a choice of keys"); }
  void gate_heads(const GateHeads&) override { refuse("gates of heads"); }
  void convolve(const ShortConvolution&) override { refuse("short convolutions"); }
  void delta_rule(const DeltaRule&) override { refuse("the delta rule"); }
  void route(const ChooseExperts& args) override;
  void weigh_inputs(const WeighInputs&) override { refuse("weights of experts' inputs"); }
  void send_experts(const RunExperts& args) override;
  void experts(const RunExperts& args) override;
  void mlp(const RunMlp& args) override;
  void sigmoid(Rows x) override;
  void scale(Rows, float) override { refuse("numbers that multiply what a layer gives"); }
  void pick(Rows x, std::span<const int> tokens) override;
  void project(const PlacedLinear& weights, Rows x, int count, float cap) override;
  void write(std::span<const float> values, Rows x) override;
  void read(Rows x, std::span<float> values) override;
  void read_ids(Rows ids, std::span<int32_t> values) override;

  StepNeeds measure(const StepRows& step, const SequenceShape& shape, FunctionRef<void()> run) override;
  const Work& work() const override { return work_; }
  const std::vector<StepPart>& parts() const override { return parts_.all(); }

 private:
  // Models with such layers are refused by name before one is asked for (models/transformer.cc).
  [[noreturn]] static void refuse(std::string_view what) {
    fail_as(ErrorKind::kUnsupported, "{} do not run on a GPU yet", what);
  }
  // What measure() adds up.
  struct Measured {
    const SequenceShape* shape = nullptr;
    Work work;
    size_t on_host = 0, workspace = 0;
  };
  // A product of the first `rows` rows of x.
  struct Product {
    const GpuLinear& weights;
    const float* x;
    int64_t x_stride;
    float* y;
    int64_t y_stride;
    const float* factors = nullptr;
  };

  // A sum on its way into rows: kernels that norm them take it along.
  struct Pending {
    Rows x;  // of no name: there is none
    FetchedRows fetched;
    int addends = 0;
    Addend add[2];
    bool fresh = false;
  };
  // What experts() gave in name only so far: the next sum fetches it.
  struct Fetching {
    Rows out;
    bool hot = false;  // what the GPU's own experts gave is in `out`
  };
  // Pairs of tokens and experts, and how many different experts.
  struct PairShare {
    double pairs = 0, hits = 0;
  };
  struct PairShares {
    PairShare gpu, host;
  };
  // Routed experts of a layer, as the host runs them.
  struct HostTask {
    const Experts* experts;
    const GpuExperts* hot;  // null: none is on the GPU
    int top_k;
    RouteWatch* watch;
    size_t watched;
    int64_t ids_of;  // GpuExchange::ids()
    const SentExperts*
        passed;  // null: not those that pass through the GPU; else ids are chosen_of() the layer
  };
  struct RowRange {
    int first, count;
  };
  // Of the calls of a step that depend on where its tokens stand, for counting.
  struct Attended {
    int plane, heads, window;
  };
  // A step that is replayed: for as many rows, over that cache, and contexts up to that length.
  struct StepGraph {
    uint64_t cache = 0;
    int rows = 0, longest = 0;
    GpuGraph graph;
    std::vector<HostTask> tasks;  // by layer
    std::vector<Attended> attended;
    Work work;  // besides
    int64_t logit_width = 0;
  };
  // What grew while a graph was noted down; then its addresses are of no use.
  struct Wanted {
    size_t scratch = 0, logits = 0;
    int64_t chosen = 0;
  };

  LinearOptions packed() const { return {.sizes_only = options_.sizes_only}; }
  std::unique_ptr<GpuLinear> placed(const Linear& from, Precision precision, std::string_view name);
  float* at(Rows rows) const { return memory_.at(rows); }
  float* at(const Columns& columns) const { return at(columns.rows) + columns.first; }
  int32_t* ids_at(Rows rows) const { return reinterpret_cast<int32_t*>(at(rows)); }
  void count(const Place& place, const Amount& amount) {
    (measured_ ? measured_->work : recording_ ? recording_->work : work_).at(place) += amount;
  }
  void multiply(int rows, std::span<const Product> products);  // none reads what another gives
  void multiply(int rows, const Product& product) { multiply(rows, {&product, 1}); }
  const uint16_t* rounded(const Product& product, int rows);
  size_t rounded_bytes(int64_t tokens) const {
    return static_cast<size_t>(round_up(tokens, kTileRows) * widest_rounded_) * sizeof(uint16_t);
  }
  void add_adapter(const LinearUse& use, const LinearAdapter& adapter);
  float* passing(Rows x, int64_t floats);
  void send_rows(Rows x, float* from, int64_t floats);
  AttendRowsArgs attend_args(const Attend& args) const;
  int groups_of(int blocks, int window) const;
  int most_pages(int window) const;
  void attend_exactly(const Attend& args, const KvShape& shape);
  void attend_whole(const Attend& args, const KvShape& shape, const RowRange& rows);
  void attend_split(const Attend& args, const KvShape& shape, const RowRange& rows);
  RotateRowsArgs rotate_args(const RotateWrite& args, const HeadRows& heads, const float* growth) const;
  void measure_experts(const RunExperts& args);
  GpuExperts::Call call_of(const RunExperts& args, int64_t mid_floats);
  void run_hot(const GpuExperts& hot, const RunExperts& args);
  // Experts that pass through the GPU.
  bool passes(int tokens) const { return tokens >= pass_from_ && sent_.any(); }
  void measure_passing();
  int round_of(const GpuRoutedExperts& placed, int tokens, int top_k) const;
  int32_t* chosen_of(int layer, int top_k) const;
  void pass_experts(const GpuRoutedExperts& placed, const RunExperts& args);
  void end_passing();
  float* scratch(size_t floats);
  void wait();
  void flush();  // what is pending
  NormArgs take_pending();
  void launch_norm(const NormArgs& args);

  // gpu_ops_graph.cc
  bool replays(const StepRows& step) const;
  int rows_of_step() const;
  int longest() const;  // of the contexts of the step
  GpuExchange::Sizes exchange_sizes(int64_t tokens) const;
  void drop_graphs();
  void want_chosen(int top_k);
  void grow_exchange(int64_t top_k);
  bool grow();
  void keep_logits(const float* logits, int64_t width, size_t bytes);
  void record(StepGraph& graph, FunctionRef<void()> run);
  StepGraph& graph_of(FunctionRef<void()> run);
  int next_post();
  void serve(const StepGraph& graph);
  void serve_now(const HostTask& task);
  void run_task(const HostTask& task);
  const int32_t* ids_of(const HostTask& task) const;
  PairShares shares(const HostTask& task);
  void tell(const HostTask& task);

  const std::shared_ptr<Pool> pool_;
  const GpuOpsOptions options_;
  const std::unique_ptr<Ops> host_;          // loads, and holds routed experts
  const std::unique_ptr<GpuStream> stream_;  // null: sizes only
  const GpuMemory weights_;
  GpuRows memory_;
  GpuStep tables_;
  DeviceBuffer scratch_;            // of adapters and logits
  PinnedBuffer embedded_, logits_;  // what passes between host and GPU
  GpuExchange exchange_;
  DeviceBuffer rounded_;                           // x of a product in bf16
  int64_t widest_rounded_ = 0;                     // of its rows
  int64_t widest_hidden_ = 0, routed_layers_ = 0;  // of experts
  int64_t most_chosen_ = 0;                        // for a token
  std::vector<uint8_t> hit_;                       // [experts], scratch
  Pending pending_;
  Fetching fetching_;
  ExpertStream sent_;
  std::vector<const GpuRoutedExperts*> routed_;  // by layer
  int pass_from_ = std::numeric_limits<int>::max();
  bool passing_ = false;                            // experts of this step
  std::vector<HostTask> passed_;                    // of this step
  PinnedBuffer chosen_;                             // ids that its routers chose, layer by layer
  int layer_ = 0;                                   // of those that route, in this step
  std::vector<std::unique_ptr<StepGraph>> graphs_;  // the one used last is at the end
  int tables_version_ = 0;
  StepGraph* recording_ = nullptr;
  Wanted wanted_;
  bool replayed_ = false;  // this step
  int live_ = 0;           // tokens of it; step_.tokens counts rows
  StepRows step_;
  Measured* measured_ = nullptr;  // while measure() runs
  Work work_;
  StepParts parts_;
  const size_t experts_part_ = parts_.index("experts"), wait_part_ = parts_.index(kWaitingPart);
};

}  // namespace kt::inline nn
