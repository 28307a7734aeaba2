#include "nn/cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "base/error.h"
#include "nn/attention.h"
#include "nn/cpu_weights.h"
#include "nn/cpu_work.h"
#include "nn/kv_write.h"
#include "nn/linear.h"
#include "nn/reserve.h"
#include "nn/row_memory.h"
#include "nn/step_forecast.h"

namespace kt {
namespace {

constexpr int kRowsAtOnce = 4;  // below this many tokens, work on single rows is not worth waking the others

// What measure() adds up.
struct Measured {
  const SequenceShape* shape = nullptr;
  Work work;
  LinearWork::Bytes linears;
  size_t experts = 0, attention = 0;
};

class CpuOps final : public Ops {
 public:
  CpuOps(std::shared_ptr<Pool> pool, CpuOpsOptions options)
      : pool_(std::move(pool)),
        options_(options),
        kernels_(kernels()),
        workspace_(std::make_shared<Workspace>()),
        linears_(pool_),
        attention_(pool_, kernels_),
        forecast_(*pool_, linears_, attention_) {}

  Place place() const override { return kHost; }
  int nodes() const override { return pool_->nodes(); }
  bool sizes_only() const override { return options_.sizes_only; }

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
  void attend(const Attend& args) override;
  void copy_heads(const CopyHeads& args) override;
  void route(const ChooseExperts& args) override;
  void send_experts(const RunExperts&) override {}
  void experts(const RunExperts& args) override;
  void mlp(const RunMlp& args) override;
  void sigmoid(Rows x) override;
  void pick(Rows x, std::span<const int> tokens) override;
  void project(const PlacedLinear& weights, Rows x, int count) override;
  void write(std::span<const float> values, Rows x) override { std::ranges::copy(values, at(x)); }
  void read(Rows x, std::span<float> values) override { std::copy_n(at(x), values.size(), values.begin()); }
  void read_ids(Rows ids, std::span<int32_t> values) override {
    std::copy_n(ids_at(ids), values.size(), values.begin());
  }

  StepNeeds measure(const StepRows& step, const SequenceShape& shape, FunctionRef<void()> run) override;
  const Work& work() const override { return work_; }
  const std::vector<StepPart>& parts() const override { return parts_.all(); }

 private:
  LinearOptions linear_options(Precision precision) const {
    return {.precision = precision, .kernels = &kernels_, .sizes_only = options_.sizes_only};
  }
  KvCache& cache() const { return static_cast<KvCache&>(*step_.cache); }
  float* at(Rows rows) const { return reinterpret_cast<float*>(memory_.at(rows)); }
  float* at(const Columns& columns) const { return at(columns.rows) + columns.first; }
  int32_t* ids_at(Rows rows) const { return reinterpret_cast<int32_t*>(memory_.at(rows)); }

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

  void count(const Amount& amount) {
    (measured_ ? measured_->work : work_).at(kHost) += amount;
    if (!measured_) parts_.count(amount);
  }
  StepParts* timed() { return measured_ ? nullptr : &parts_; }
  size_t part_of(std::span<const LinearUse> uses);
  void run_linears(int rows, std::span<const LinearCall> calls);
  void add_adapter(const LinearUse& use);
  void rotate(const HeadRows& heads, const Rotation& rotation, double eps, int token);

  std::shared_ptr<Pool> pool_;
  const CpuOpsOptions options_;
  const Kernels& kernels_;
  std::shared_ptr<Workspace> workspace_;
  LinearWork linears_;
  AttentionWork attention_;
  StepForecast forecast_;
  RowMemory memory_;
  std::vector<Rotation> rotations_;
  std::vector<float> ones_;     // [tokens]
  std::vector<int32_t> zeros_;  // [tokens]
  std::vector<int> positions_;  // [tokens]
  std::vector<uint8_t> hit_;    // [experts], scratch
  std::vector<LinearCall> calls_;
  std::vector<float> names_;    // [linears of a call]
  std::vector<float> adapted_;  // scratch of adapters
  StepRows step_;
  std::optional<Pool::Burst> burst_;
  Measured* measured_ = nullptr;  // while measure() runs
  Work work_;
  StepParts parts_;
  const struct {
    size_t begin, embedding, norm, rotation, attention, copies, router, experts, mlp, head;
  } part_ = {.begin = parts_.index("angles"),
             .embedding = parts_.index("embedding"),
             .norm = parts_.index("norms and sums"),
             .rotation = parts_.index("rotation and cache"),
             .attention = parts_.index("attention"),
             .copies = parts_.index("copies"),
             .router = parts_.index("router"),
             .experts = parts_.index("experts"),
             .mlp = parts_.index("mlp"),
             .head = parts_.index("head")};
};

std::unique_ptr<PlacedExperts> CpuOps::make_experts(const ExpertsShape& shape, const ExpertsOptions& options,
                                                    const ExpertsFill& fill, std::span<const int>) {
  ExpertsOptions mine = options;
  mine.kernels = &kernels_;
  mine.sizes_only = options_.sizes_only;
  auto out = std::make_unique<CpuExperts>(Experts(pool_, workspace_, shape, mine));
  if (!options_.sizes_only) fill_experts(*pool_, fill, out->experts);
  return out;
}

int CpuOps::make_rotation(const RopeSpec& spec) {
  for (size_t i = 0; i < rotations_.size(); ++i)
    if (rotations_[i].spec() == spec) return static_cast<int>(i);
  rotations_.emplace_back(spec);
  return static_cast<int>(rotations_.size()) - 1;
}

size_t CpuOps::row_bytes(int max_tokens) const {
  int64_t width = 3 + memory_.width();  // ones, zeros, positions
  for (const Rotation& rotation : rotations_) width += 2 * rotation.half();
  return static_cast<size_t>(width * max_tokens) * sizeof(float);
}

void CpuOps::allocate(int max_tokens) {
  const auto tokens = static_cast<size_t>(max_tokens);
  memory_.allocate(tokens);
  for (Rotation& rotation : rotations_) rotation.allocate(tokens);
  ones_.assign(tokens, 1.0f);
  zeros_.assign(tokens, 0);
  positions_.resize(tokens);
}

void CpuOps::begin(const StepRows& step) {
  const StepParts::Scope scope(timed(), part_.begin);
  KT_CHECK(!options_.sizes_only, "a model without weights");
  KT_CHECK(step.tokens <= static_cast<int>(ones_.size()), "{} tokens, rows for {}", step.tokens,
           ones_.size());
  step_ = step;
  burst_.emplace(*pool_);
  forecast_.begin(static_cast<const KvCache*>(step.cache), step.sequences);
  for (const AttentionSequence& sequence : step.sequences)
    for (int t = 0; t < sequence.count; ++t)
      positions_[static_cast<size_t>(sequence.first + t)] = sequence.position + t;
  for_rows(step.tokens, [&](int t) {
    for (Rotation& rotation : rotations_) rotation.place(t, positions_[static_cast<size_t>(t)]);
  });
}

void CpuOps::embed(const RowTable& table, std::span<const int32_t> ids, Rows x) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.embedding);
  for_rows(static_cast<int>(ids.size()),
           [&](int t) { table.read(ids[static_cast<size_t>(t)], at(x) + int64_t{t} * x.width); });
}

void CpuOps::norm(Rows x, const PlacedVector& weights, double eps, Rows y) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.norm);
  const std::vector<float>& w = values_of(weights);
  for_rows(step_.tokens, [&](int t) {
    kernels_.rows->norm(at(x) + t * x.width, w.data(), static_cast<float>(eps), static_cast<int>(w.size()),
                        at(y) + t * y.width);
  });
}

void CpuOps::add(Rows x, Rows y) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.norm);
  for_rows(step_.tokens, [&](int t) {
    kernels_.add_scaled(at(x) + t * x.width, at(y) + t * y.width, 1.0f, static_cast<int>(x.width));
  });
}

void CpuOps::add_norm(Rows x, Rows y, const PlacedVector& weights, double eps, Rows out) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.norm);
  const std::vector<float>& w = values_of(weights);
  for_rows(step_.tokens, [&](int t) {
    float* row = at(x) + t * x.width;
    kernels_.add_scaled(row, at(y) + t * y.width, 1.0f, static_cast<int>(x.width));
    kernels_.rows->norm(row, w.data(), static_cast<float>(eps), static_cast<int>(w.size()),
                        at(out) + t * out.width);
  });
}

// Steps of linears, and what they take.
void CpuOps::run_linears(int rows, std::span<const LinearCall> calls) {
  for (const LinearCall& call : calls) count(linear_work(*call.linear, rows));
  if (!measured_) {
    linears_.run(rows, calls, forecast_.enter(calls.front().linear, rows));
    return forecast_.multiplied();
  }
  const LinearWork::Bytes bytes = linears_.bytes_for(rows, calls);
  measured_->linears.rows = std::max(measured_->linears.rows, bytes.rows);
  measured_->linears.workers = std::max(measured_->linears.workers, bytes.workers);
}

// A call of linears is one part, by the names of all of them.
size_t CpuOps::part_of(std::span<const LinearUse> uses) {
  const auto& first = static_cast<const CpuLinear&>(*uses.front().weights);
  if (!first.part) first.part = parts_.index(names_of(uses));
  return *first.part;
}

void CpuOps::linear(std::span<const LinearUse> uses) {
  const StepParts::Scope scope(timed(), part_of(uses));
  calls_.clear();
  names_.resize(uses.size());
  // Where rows have no memory, what is read together is told by its name.
  const auto place_of = [&](const Columns& x) -> const float* {
    if (!measured_) return at(x);
    const auto same = [&](const LinearUse& use) {
      return use.x.rows.id == x.rows.id && use.x.first == x.first;
    };
    return names_.data() + (std::ranges::find_if(uses, same) - uses.begin());
  };
  for (const LinearUse& use : uses) {
    calls_.push_back({.linear = &linear_of(*use.weights),
                      .x = place_of(use.x),
                      .x_stride = use.x.rows.width,
                      .y = measured_ ? nullptr : at(use.y),
                      .y_stride = use.y.rows.width});
  }
  run_linears(step_.tokens, calls_);
  for (const LinearUse& use : uses)
    if (use.adapter) add_adapter(use);
}

void CpuOps::add_adapter(const LinearUse& use) {
  const Adapter& adapter = *use.adapter;
  const int64_t rank = adapter.down->n(), n = adapter.up->n(), tokens = step_.tokens;
  adapted_.resize(static_cast<size_t>(tokens * (rank + n)));
  float *low = adapted_.data(), *sum = low + tokens * rank;
  const LinearCall down{.linear = &linear_of(*adapter.down),
                        .x = measured_ ? low : at(use.x),
                        .x_stride = use.x.rows.width,
                        .y = low,
                        .y_stride = rank},
      up{.linear = &linear_of(*adapter.up), .x = low, .x_stride = rank, .y = sum, .y_stride = n};
  run_linears(step_.tokens, {&down, 1});
  run_linears(step_.tokens, {&up, 1});
  if (measured_) return;
  for_rows(step_.tokens, [&](int t) {
    kernels_.add_scaled(at(use.y) + t * use.y.rows.width, sum + t * n, adapter.scale, static_cast<int>(n));
  });
}

void CpuOps::rotate(const HeadRows& heads, const Rotation& rotation, double eps, int token) {
  float* row = at(heads.rows) + token * heads.rows.width;
  if (heads.norm) {
    const std::vector<float>& w = values_of(*heads.norm);
    const int size = static_cast<int>(w.size());
    for (int i = 0; i < heads.norms; ++i)
      kernels_.rows->norm(row + i * size, w.data(), static_cast<float>(eps), size, row + i * size);
  }
  rotation.turn(*kernels_.rows, token, row + heads.rotated, heads.heads, heads.stride);
}

void CpuOps::rotate_write(const RotateWrite& args) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.rotation);
  const Rotation& rotation = rotations_[static_cast<size_t>(args.rotation)];
  for_rows(step_.tokens, [&](int t) {
    rotate(args.q, rotation, args.norm_eps, t);
    rotate(args.k, rotation, args.norm_eps, t);
    const float factor = args.growth.factor(positions_[static_cast<size_t>(t)]);
    if (factor == 1) return;
    float* row = at(args.q.rows) + t * args.q.rows.width;
    for (int64_t i = 0; i < args.q.heads * args.q.stride; ++i) row[i] *= factor;
  });
  write_cache(cache(), *pool_, kernels_,
              {.plane = args.plane,
               .sequences = step_.sequences,
               .k = at(args.k.rows),
               .v = args.v.id >= 0 ? at(args.v) : nullptr,
               .k_stride = args.k.rows.width,
               .v_stride = args.v.width});
}

void CpuOps::attend(const Attend& args) {
  const StepParts::Scope scope(timed(), part_.attention);
  const KvShape& shape =
      measured_ ? measured_->shape->planes[static_cast<size_t>(args.plane)] : cache().shape(args.plane);
  int longest = 0;
  for (const AttentionSequence& sequence : step_.sequences) {
    count(attention_work(shape, args.heads, args.window, sequence));
    longest = std::max(longest, sequence.position + sequence.count);
  }
  if (measured_) {
    const size_t bytes =
        attention_.bytes_for(shape, args.heads, static_cast<int>(step_.sequences.size()), longest);
    measured_->attention = std::max(measured_->attention, bytes);
    return;
  }
  attention_.run(cache(),
                 {.plane = args.plane,
                  .sequences = step_.sequences,
                  .q = at(args.q),
                  .q_stride = args.q.width,
                  .heads = args.heads,
                  .scale = args.scale,
                  .window = args.window,
                  .sinks = values_or_null(args.sinks),
                  .out = at(args.out),
                  .out_stride = args.out.width},
                 forecast_.enter(&cache(), step_.tokens, args.plane));
  forecast_.attended();
}

void CpuOps::copy_heads(const CopyHeads& args) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.copies);
  for_rows(step_.tokens, [&](int t) {
    const float* from = at(args.from) + t * args.from.rows.width;
    float* to = at(args.to) + t * args.to.rows.width;
    for (int h = 0; h < args.heads; ++h)
      std::copy_n(from + h * args.from_stride, args.count, to + h * args.to_stride);
  });
}

void CpuOps::route(const ChooseExperts& args) {
  const StepParts::Scope scope(timed(), part_.router);
  const LinearUse use{.weights = args.router, .x = args.x, .y = args.scores};
  linear({&use, 1});
  if (measured_) return;
  const int experts = static_cast<int>(args.router->n());
  const float* correction = values_or_null(args.correction);
  for_rows(step_.tokens, [&](int t) {
    choose_experts(*kernels_.rows, *args.spec, experts, args.top_k, at(args.scores) + t * args.scores.width,
                   correction, ids_at(args.ids) + int64_t{t} * args.top_k,
                   at(args.weights) + int64_t{t} * args.top_k);
  });
  if (args.forced) force_ids(step_.sequences, values_or_null(args.forced), args.top_k, ids_at(args.ids));
}

void CpuOps::experts(const RunExperts& args) {
  const StepParts::Scope scope(timed(), part_.experts);
  const Experts& experts = experts_of(*args.experts);
  const int64_t slots = int64_t{step_.tokens} * args.top_k;
  if (measured_) {
    const double hits = even_hits(experts.shape(), args.top_k, step_.tokens);
    count(experts_work(experts, hits, static_cast<double>(slots)));
    measured_->experts = std::max(measured_->experts, experts.forward_bytes(step_.tokens, args.top_k));
    return;
  }
  const int32_t* ids = ids_at(args.ids);
  if (args.watch) args.watch->chose(args.watched, {ids, static_cast<size_t>(slots)});
  const auto start = std::chrono::steady_clock::now();
  hit_.assign(static_cast<size_t>(experts.shape().experts), 0);
  for (int64_t i = 0; i < slots; ++i)
    if (ids[i] >= 0) hit_[static_cast<size_t>(ids[i])] = 1;
  const auto hits = static_cast<double>(std::count(hit_.begin(), hit_.end(), 1));
  count(experts_work(experts, hits, static_cast<double>(slots)));
  experts.forward({.tokens = step_.tokens,
                   .top_k = args.top_k,
                   .input = at(args.x),
                   .ids = ids,
                   .weights = at(args.weights),
                   .output = at(args.out),
                   .then = forecast_.enter(&experts, step_.tokens)});
  if (args.watch) args.watch->took(std::chrono::steady_clock::now() - start);
}

void CpuOps::mlp(const RunMlp& args) {
  const StepParts::Scope scope(timed(), part_.mlp);
  const Experts& mlp = experts_of(*args.mlp);
  count(experts_work(mlp, 1, step_.tokens));
  if (measured_) {
    measured_->experts = std::max(measured_->experts, mlp.forward_bytes(step_.tokens, 1));
    return;
  }
  mlp.forward({.tokens = step_.tokens,
               .top_k = 1,
               .input = at(args.x),
               .ids = zeros_.data(),
               .weights = args.factors.id >= 0 ? at(args.factors) : ones_.data(),
               .output = at(args.out),
               .then = forecast_.enter(&mlp, step_.tokens)});
}

void CpuOps::sigmoid(Rows x) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.norm);
  for_rows(step_.tokens,
           [&](int t) { kernels_.rows->sigmoid(at(x) + t * x.width, static_cast<int>(x.width)); });
}

void CpuOps::pick(Rows x, std::span<const int> tokens) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.copies);
  for (size_t i = 0; i < tokens.size(); ++i)
    std::copy_n(at(x) + tokens[i] * x.width, x.width, at(x) + static_cast<int64_t>(i) * x.width);
}

void CpuOps::project(const PlacedLinear& weights, Rows x, int count) {
  const StepParts::Scope scope(timed(), part_.head);
  const LinearCall call{.linear = &linear_of(weights),
                        .x = measured_ ? nullptr : at(x),
                        .x_stride = x.width,
                        .y = step_.logits,
                        .y_stride = weights.n()};
  run_linears(count, {&call, 1});
}

StepNeeds CpuOps::measure(const StepRows& step, const SequenceShape& shape, FunctionRef<void()> run) {
  Measured measured{.shape = &shape, .work = {}, .linears = {}};
  const StepRows before = step_;
  step_ = step;
  measured_ = &measured;
  const auto restore = [&] {
    measured_ = nullptr;
    step_ = before;
  };
  try {
    run();
  } catch (...) {
    restore();
    throw;
  }
  restore();
  return {
      .work = std::move(measured.work),
      .workspace = measured.experts + measured.linears.rows + measured.linears.workers + measured.attention};
}

}  // namespace

std::unique_ptr<Ops> make_cpu_ops(std::shared_ptr<Pool> pool, CpuOpsOptions options) {
  return std::make_unique<CpuOps>(std::move(pool), options);
}

}  // namespace kt
