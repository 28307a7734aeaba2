#include "nn/cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"
#include "nn/cpu_ops_state.h"
#include "nn/cpu_work.h"
#include "nn/kv_write.h"
#include "nn/lora_adapter.h"

namespace kt::inline nn {

std::unique_ptr<PlacedExperts> CpuOps::make_experts(const ExpertsShape& shape, const ExpertsOptions& options,
                                                    const ExpertsFill& fill, std::span<const int>) {
  ExpertsOptions mine = options;
  mine.kernels = &kernels_;
  mine.sizes_only = options_.sizes_only;
  auto out = std::make_unique<CpuExperts>(Experts(pool_, workspace_, shape, mine));
  if (!options_.sizes_only) fill_experts(*pool_, fill, out->experts);
  return out;
}

namespace {

// An adapter and the factors it reads.
struct HeldLora {
  ExpertLowRank gate_up, down;
  LoraAdapter adapter;

  HeldLora(const Experts& experts, ExpertLowRank first, ExpertLowRank second)
      : gate_up(std::move(first)), down(std::move(second)), adapter(experts, {view(gate_up), view(down)}) {}
  static LowRank view(const ExpertLowRank& of) {
    if (of.rank == 0) return {};
    return {.rank = of.rank, .scale = of.scale, .a = of.a.data(), .b = of.b.data()};
  }
};

}  // namespace

void CpuOps::add_adapter(PlacedExperts& experts, ExpertLowRank gate_up, ExpertLowRank down) {
  if (gate_up.rank == 0 && down.rank == 0) return experts.adapters.push_back(nullptr);
  const auto held =
      std::make_shared<const HeldLora>(experts_of(experts), std::move(gate_up), std::move(down));
  experts.adapters.emplace_back(held, &held->adapter);
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
  for (size_t i = 0; i < uses.size(); ++i) adapt(*uses[i].weights, step_.tokens, calls_[i]);
}

// Adds to y what adapters of the linear of `call` give for its x: the step's, or, where memory is measured, each.
void CpuOps::adapt(const PlacedLinear& weights, int rows, const LinearCall& call) {
  if (const LinearAdapter* adapter = weights.adapter(step_.adapter)) return add_adapter(*adapter, rows, call);
  if (!measured_) return;
  for (const LinearAdapter& adapter : weights.adapters)
    if (adapter.down) measure_adapter(adapter, rows);
}

void CpuOps::add_adapter(const LinearAdapter& adapter, int rows, const LinearCall& call) {
  const int64_t rank = adapter.down->n(), n = adapter.up->n();
  adapted_.resize(static_cast<size_t>(rows * (rank + n)));
  float *low = adapted_.data(), *sum = low + rows * rank;
  const LinearCall down{.linear = &linear_of(*adapter.down),
                        .x = call.x,
                        .x_stride = call.x_stride,
                        .y = low,
                        .y_stride = rank},
      up{.linear = &linear_of(*adapter.up), .x = low, .x_stride = rank, .y = sum, .y_stride = n};
  run_linears(rows, {&down, 1});
  run_linears(rows, {&up, 1});
  for_rows(rows, [&](int t) {
    kernels_.add_scaled(call.y + t * call.y_stride, sum + t * n, adapter.scale, static_cast<int>(n));
  });
}

void CpuOps::measure_adapter(const LinearAdapter& adapter, int rows) {
  const int64_t rank = adapter.down->n(), n = adapter.up->n();
  measured_->adapted = std::max(measured_->adapted, static_cast<size_t>(rows * (rank + n)) * sizeof(float));
}

void CpuOps::rotate(const HeadRows& heads, const RotateWrite& args, int token) {
  float* row = at(heads.rows) + token * heads.rows.width;
  const auto norm = [&] {
    if (!heads.norm) return;
    const std::vector<float>& w = values_of(*heads.norm);
    const int size = static_cast<int>(w.size());
    const float* bias = values_or_null(heads.norm_bias);
    const auto eps = static_cast<float>(args.norm_eps);
    for (int i = 0; i < heads.norms; ++i) {
      float* at = row + i * size;
      if (bias)
        kernels_.rows->layer_norm(at, w.data(), bias, eps, size, at);
      else
        kernels_.rows->norm(at, w.data(), eps, size, at);
    }
  };
  if (!args.norm_last) norm();
  rotations_[static_cast<size_t>(args.rotation)].rotate(*kernels_.rows, token, row + heads.rotated,
                                                        heads.heads, heads.stride);
  if (args.norm_last) norm();
}

void CpuOps::norm_values(const RotateWrite& args, int token) {
  const std::vector<float>& w = values_of(*args.v_norm);
  const auto size = static_cast<int64_t>(w.size());
  float* const row = at(args.v) + token * args.v.width;
  for (int64_t first = 0; first < args.v.width; first += size)
    kernels_.rows->norm(row + first, w.data(), static_cast<float>(args.norm_eps), static_cast<int>(size),
                        row + first);
}

void CpuOps::rotate_write(const RotateWrite& args) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.rotation);
  for_rows(step_.tokens, [&](int t) {
    rotate(args.q, args, t);
    rotate(args.k, args, t);
    if (args.v_norm) norm_values(args, t);
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

void CpuOps::choose_keys(const ChooseKeys& args) {
  const StepParts::Scope scope(timed(), part_.indexer);
  const KvShape& shape = plane(args.plane);
  int longest = 0;
  for (const AttentionSequence& sequence : step_.sequences) {
    count(indexer_work(shape, args.heads, args.budget, sequence));
    longest = std::max(longest, sequence.position + sequence.count);
  }
  if (measured_) {
    measured_->indexer =
        std::max(measured_->indexer, indexer_.bytes_for(shape, args.heads, step_.tokens, longest));
    return;
  }
  KT_CHECK(args.seen.width >= seen_columns(longest), "words of {} keys, {} are seen", args.seen.width * 32,
           longest);
  indexer_.run(cache(), {.plane = args.plane,
                         .sequences = step_.sequences,
                         .q = at(args.q),
                         .q_stride = args.q.width,
                         .weights = at(args.weights),
                         .weight_stride = args.weights.width,
                         .heads = args.heads,
                         .budget = args.budget,
                         .seen = words_at(args.seen),
                         .seen_stride = args.seen.width / 2});
}

void CpuOps::attend(const Attend& args) {
  const StepParts::Scope scope(timed(), part_.attention);
  const KvShape& shape = plane(args.plane);
  int longest = 0;
  for (const AttentionSequence& sequence : step_.sequences) {
    count(args.budget > 0 ? chosen_attention_work(shape, args.heads, args.budget, sequence)
                          : attention_work(shape, args.heads, {args.window, args.chunk}, sequence));
    longest = std::max(longest, sequence.position + sequence.count);
  }
  if (measured_) {
    const size_t bytes = attention_.bytes_for(shape, args.heads, static_cast<int>(step_.sequences.size()),
                                              longest, args.budget);
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
                  .chunk = args.chunk,
                  .sinks = values_or_null(args.sinks),
                  .out = at(args.out),
                  .out_stride = args.out.width,
                  .seen = args.budget > 0 ? words_at(args.seen) : nullptr,
                  .seen_stride = args.seen.width / 2,
                  .budget = args.budget},
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
  const float *correction = values_or_null(args.correction), *scales = values_or_null(args.scales);
  for_rows(step_.tokens, [&](int t) {
    int32_t* const ids = ids_at(args.ids) + int64_t{t} * args.top_k;
    float* const weights = at(args.weights) + int64_t{t} * args.top_k;
    choose_experts(*kernels_.rows, *args.spec, experts, args.top_k, at(args.scores) + t * args.scores.width,
                   correction, ids, weights);
    for (int i = 0; scales && i < args.top_k; ++i) weights[i] *= scales[ids[i]];
  });
  if (args.forced) force_ids(step_.sequences, values_or_null(args.forced), args.top_k, ids_at(args.ids));
}

void CpuOps::weigh_inputs(const WeighInputs& args) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.router);
  const int64_t width = args.x.width;
  for_rows(step_.tokens, [&](int t) {
    const float* const x = at(args.x) + t * width;
    float *to = at(args.each) + t * args.each.width, *weights = at(args.weights) + t * args.weights.width;
    for (int s = 0; s < args.top_k; ++s, to += width) {
      for (int64_t i = 0; i < width; ++i) to[i] = x[i] * weights[s];
      weights[s] = 1;
    }
  });
}

void CpuOps::experts(const RunExperts& args) {
  const StepParts::Scope scope(timed(), part_.experts);
  const Experts& experts = experts_of(*args.experts);
  const int64_t slots = int64_t{step_.tokens} * args.top_k;
  if (measured_) {
    const double hits = even_hits(experts.shape(), args.top_k, step_.tokens);
    count(experts_work(experts, hits, static_cast<double>(slots)));
    return measure_forward(*args.experts, args.top_k);
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
                   .adapter = args.experts->adapter(step_.adapter),
                   .input_each = args.input_each,
                   .then = forecast_.enter(&experts, step_.tokens)});
  if (args.watch) args.watch->took(std::chrono::steady_clock::now() - start);
}

void CpuOps::mlp(const RunMlp& args) {
  const StepParts::Scope scope(timed(), part_.mlp);
  const Experts& mlp = experts_of(*args.mlp);
  count(experts_work(mlp, 1, step_.tokens));
  if (measured_) {
    return measure_forward(*args.mlp, 1);
  }
  mlp.forward({.tokens = step_.tokens,
               .top_k = 1,
               .input = at(args.x),
               .ids = zeros_.data(),
               .weights = args.factors.id >= 0 ? at(args.factors) : ones_.data(),
               .output = at(args.out),
               .adapter = args.mlp->adapter(step_.adapter),
               .then = forecast_.enter(&mlp, step_.tokens)});
}

// With whatever adapter takes the most.
void CpuOps::measure_forward(const PlacedExperts& placed, int top_k) {
  const Experts& experts = experts_of(placed);
  size_t bytes = experts.forward_bytes(step_.tokens, top_k);
  for (const auto& adapter : placed.adapters)
    if (adapter) bytes = std::max(bytes, experts.forward_bytes(step_.tokens, top_k, adapter.get()));
  measured_->experts = std::max(measured_->experts, bytes);
}

void CpuOps::sigmoid(Rows x) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.norm);
  for_rows(step_.tokens,
           [&](int t) { kernels_.rows->sigmoid(at(x) + t * x.width, static_cast<int>(x.width)); });
}

void CpuOps::scale(Rows x, float factor) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.norm);
  for_rows(step_.tokens, [&](int t) {
    float* const row = at(x) + t * x.width;
    for (int64_t i = 0; i < x.width; ++i) row[i] *= factor;
  });
}

void CpuOps::pick(Rows x, std::span<const int> tokens) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.copies);
  for (size_t i = 0; i < tokens.size(); ++i)
    std::copy_n(at(x) + tokens[i] * x.width, x.width, at(x) + static_cast<int64_t>(i) * x.width);
}

// tanh(z) = 2 sigmoid(2 z) - 1, which is off by an ulp of the cap at most.
void CpuOps::cap_logits(int rows, int64_t width, float cap) {
  constexpr int64_t kPiece = 4096;  // numbers that one worker caps at a time
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  const auto item = [&](int64_t i) {
    const int64_t first = i % pieces * kPiece, count = std::min(kPiece, width - first);
    float* const logits = step_.logits + i / pieces * width + first;
    for (int64_t j = 0; j < count; ++j) logits[j] *= 2 / cap;
    kernels_.rows->sigmoid(logits, static_cast<int>(count));
    for (int64_t j = 0; j < count; ++j) logits[j] = cap * (2 * logits[j] - 1);
  };
  for_rows(static_cast<int>(rows * pieces), item);
}

void CpuOps::project(const PlacedLinear& weights, Rows x, int count, float cap) {
  const StepParts::Scope scope(timed(), part_.head);
  const LinearCall call{.linear = &linear_of(weights),
                        .x = measured_ ? nullptr : at(x),
                        .x_stride = x.width,
                        .y = step_.logits,
                        .y_stride = weights.n()};
  run_linears(count, {&call, 1});
  adapt(weights, count, call);
  if (cap > 0 && !measured_) cap_logits(count, weights.n(), cap);
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
  return {.work = std::move(measured.work),
          .workspace = measured.experts + measured.linears.rows + measured.linears.workers +
                       measured.attention + measured.indexer + measured.adapted};
}

std::unique_ptr<Ops> make_cpu_ops(std::shared_ptr<Pool> pool, CpuOpsOptions options) {
  return std::make_unique<CpuOps>(std::move(pool), options);
}

}  // namespace kt::inline nn
