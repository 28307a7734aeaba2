// CpuOps, which cpu_ops.cc and cpu_ops_recurrent.cc implement: nobody else includes this.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "nn/attention.h"
#include "nn/cpu_ops.h"
#include "nn/cpu_weights.h"
#include "nn/linear.h"
#include "nn/reserve.h"
#include "nn/row_memory.h"
#include "nn/step_forecast.h"

namespace kt::inline nn {

class CpuOps final : public Ops {
 public:
  CpuOps(std::shared_ptr<Pool> pool, CpuOpsOptions options)
      : pool_(std::move(pool)),
        options_(options),
        kernels_(best_kernels()),
        workspace_(std::make_shared<Workspace>()),
        linears_(pool_),
        attention_(pool_, kernels_),
        indexer_(pool_, kernels_),
        forecast_(*pool_, linears_, attention_) {}

  Place place() const override { return kHost; }
  int nodes() const override { return pool_->nodes(); }
  bool sizes_only() const override { return options_.sizes_only; }
  bool runs_all() const override { return true; }

  std::unique_ptr<PlacedVector> make_vector(std::vector<float> values) override {
    return std::make_unique<CpuVector>(std::move(values));
  }
  std::unique_ptr<PlacedLinear> make_linear(const RowReader& weights, std::span<const float> bias,
                                            Precision precision, std::string_view name) override {
    return std::make_unique<CpuLinear>(Linear(*pool_, weights, bias, linear_options(precision), name), name);
  }
  std::unique_ptr<PlacedLinear> make_linear(const MatrixView& weights, Precision precision,
                                            std::string_view name) override {
    const Pool& pool = *pool_;
    return std::make_unique<CpuLinear>(Linear(pool, weights, {}, linear_options(precision), name), name);
  }
  std::unique_ptr<PlacedExperts> make_experts(const ExpertsShape& shape, const ExpertsOptions& options,
                                              const ExpertsFill& fill, std::span<const int>) override;
  std::unique_ptr<PlacedExperts> make_mlp(const ExpertsShape& shape, const ExpertsOptions& options,
                                          const ExpertsFill& fill) override {
    return make_experts(shape, options, fill, {});
  }
  void add_adapter(PlacedExperts& experts, ExpertLowRank gate_up, ExpertLowRank down) override;
  std::unique_ptr<SequenceCache> make_cache(const SequenceShape& shape, int pages, int slots) override {
    return std::make_unique<KvCache>(shape, pages, slots);
  }
  int make_rotation(const RopeSpec& spec) override;
  Rows rows(std::string_view name, int64_t width) override { return memory_.rows(name, width); }
  void allocate(int max_tokens) override;
  size_t row_bytes(int max_tokens) const override;
  void spread(int64_t n, FunctionRef<void(int64_t)> work) override { run_items(*pool_, n, work); }
  int loading_threads() const override { return pool_->threads(); }

  void begin(const StepRows& step) override;
  void end() noexcept override { burst_.reset(); }
  void repeat(FunctionRef<void()> run) override { run(); }
  void embed(const RowTable& table, std::span<const int32_t> ids, Rows x) override;
  void norm(Rows x, const PlacedVector& weights, double eps, Rows y) override;
  void add(Rows x, Rows y) override;
  void add_norm(Rows x, Rows y, const PlacedVector& weights, double eps, Rows out) override;
  void linear(std::span<const LinearUse> uses) override;
  void rotate_write(const RotateWrite& args) override;
  void choose_keys(const ChooseKeys& args) override;
  void attend(const Attend& args) override;
  void copy_heads(const CopyHeads& args) override;
  void gate_heads(const GateHeads& args) override;
  void convolve(const ShortConvolution& args) override;
  void delta_rule(const DeltaRule& args) override;
  void route(const ChooseExperts& args) override;
  void weigh_inputs(const WeighInputs& args) override;
  void send_experts(const RunExperts&) override {}
  void experts(const RunExperts& args) override;
  void mlp(const RunMlp& args) override;
  void sigmoid(Rows x) override;
  void scale(Rows x, float factor) override;
  void pick(Rows x, std::span<const int> tokens) override;
  void project(const PlacedLinear& weights, Rows x, int count, float cap) override;
  void write(std::span<const float> values, Rows x) override { std::ranges::copy(values, at(x)); }
  void read(Rows x, std::span<float> values) override { std::copy_n(at(x), values.size(), values.begin()); }
  void read_ids(Rows ids, std::span<int32_t> values) override {
    std::copy_n(ids_at(ids), values.size(), values.begin());
  }

  StepNeeds measure(const StepRows& step, const SequenceShape& shape, FunctionRef<void()> run) override;
  const Work& work() const override { return work_; }
  const std::vector<StepPart>& parts() const override { return parts_.all(); }

 private:
  // Below this many tokens, work on single rows is not worth waking the others.
  static constexpr int kRowsAtOnce = 4;
  // What measure() adds up.
  struct Measured {
    const SequenceShape* shape = nullptr;
    Work work;
    LinearWork::Bytes linears;
    size_t experts = 0, attention = 0, indexer = 0, adapted = 0;
  };

  LinearOptions linear_options(Precision precision) const {
    return {.precision = precision, .kernels = &kernels_, .sizes_only = options_.sizes_only};
  }
  const KvShape& plane(int number) const {
    return measured_ ? measured_->shape->planes[static_cast<size_t>(number)] : cache().shape(number);
  }
  KvCache& cache() const { return static_cast<KvCache&>(*step_.cache); }
  float* at(Rows rows) const { return reinterpret_cast<float*>(memory_.at(rows)); }
  float* at(const Columns& columns) const { return at(columns.rows) + columns.first; }
  int32_t* ids_at(Rows rows) const { return reinterpret_cast<int32_t*>(memory_.at(rows)); }
  uint64_t* words_at(Rows rows) const { return reinterpret_cast<uint64_t*>(memory_.at(rows)); }

  // Calls work(row) for rows [0, n), on all workers where there are enough.
  template <typename EachRow>
  void for_rows(int n, const EachRow& each) {
    if (n < kRowsAtOnce) {
      for (int i = 0; i < n; ++i) each(i);
      return;
    }
    const auto some = [&](const Worker& worker) {
      for (int i = worker.index; i < n; i += pool_->threads()) each(i);
    };
    pool_->run(some, &forecast_);
  }

  // Calls each(sequence, head) for as many heads of every sequence of the step, on all workers.
  template <typename Each>
  void for_sequences(int heads, const Each& each);
  void prepare_delta(const DeltaRule& args, int token);

  void count(const Amount& amount) {
    (measured_ ? measured_->work : work_).at(kHost) += amount;
    if (!measured_) parts_.count(amount);
  }
  StepParts* timed() { return measured_ ? nullptr : &parts_; }
  size_t part_of(std::span<const LinearUse> uses);
  void run_linears(int rows, std::span<const LinearCall> calls);
  void adapt(const PlacedLinear& weights, int rows, const LinearCall& call);
  void add_adapter(const LinearAdapter& adapter, int rows, const LinearCall& call);
  void measure_adapter(const LinearAdapter& adapter, int rows);
  void measure_forward(const PlacedExperts& placed, int top_k);
  void cap_logits(int rows, int64_t width, float cap);
  void rotate(const HeadRows& heads, const RotateWrite& args, int token);
  void norm_values(const RotateWrite& args, int token);

  std::shared_ptr<Pool> pool_;
  const CpuOpsOptions options_;
  const Kernels& kernels_;
  std::shared_ptr<Workspace> workspace_;
  LinearWork linears_;
  AttentionWork attention_;
  IndexerWork indexer_;
  StepForecast forecast_;
  RowMemory memory_;
  std::vector<Rotation> rotations_;
  std::vector<float> ones_;                         // [tokens]
  std::vector<int32_t> zeros_;                      // [tokens]
  std::vector<int> positions_;                      // [tokens]
  std::vector<uint8_t> hit_;                        // [experts], scratch
  std::vector<float> key_lengths_, query_lengths_;  // [key_dim] of the delta rule, all equal
  std::vector<LinearCall> calls_;
  std::vector<float> names_;    // [linears of a call]
  std::vector<float> adapted_;  // scratch of adapters
  StepRows step_;
  std::optional<Pool::Burst> burst_;
  Measured* measured_ = nullptr;  // while measure() runs
  Work work_;
  StepParts parts_;
  const struct {
    size_t begin, embedding, norm, rotation, indexer, attention, states, copies, router, experts, mlp, head;
  } part_ = {.begin = parts_.index("angles"),
             .embedding = parts_.index("embedding"),
             .norm = parts_.index("norms and sums"),
             .rotation = parts_.index("rotation and cache"),
             .indexer = parts_.index("choice of keys"),
             .attention = parts_.index("attention"),
             .states = parts_.index("states"),
             .copies = parts_.index("copies"),
             .router = parts_.index("router"),
             .experts = parts_.index("experts"),
             .mlp = parts_.index("mlp"),
             .head = parts_.index("head")};
};

}  // namespace kt::inline nn
