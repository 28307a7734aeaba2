#include "nn/gpu_ops.h"

#include "base/error.h"
#include "base/log.h"
#include "nn/cpu_ops.h"
#include "nn/cpu_work.h"
#include "nn/gpu_cache.h"
#include "nn/gpu_experts.h"
#include "nn/gpu_ops_state.h"

namespace kt::inline nn {
namespace {

constexpr int kHeadThreads = 64;
constexpr int kMostExchanged = 1024;  // tokens; in larger steps experts mostly pass through the GPU

}  // namespace

GpuOps::GpuOps(std::shared_ptr<Pool> pool, GpuOpsOptions options)
    : pool_(pool),
      options_(std::move(options)),
      host_(make_cpu_ops(std::move(pool), {.sizes_only = options_.sizes_only})),
      stream_(options_.gpu ? std::make_unique<GpuStream>(options_.gpu) : nullptr),
      weights_{options_.gpu, stream_.get()},
      sent_(options_.gpu, pool_, options_.stream_bytes) {
  KT_CHECK(options_.sizes_only == !options_.gpu, "operations on a GPU need one");
  // Until it is known from where on: plans count what such steps take.
  if (options_.stream_from == GpuOpsOptions::kMeasured) pass_from_ = kMostHotTokens + 1;
  if (options_.stream_from > 0) pass_from_ = std::max(options_.stream_from, kMostHotTokens + 1);
}

std::unique_ptr<GpuLinear> GpuOps::placed(const Linear& from, Precision precision, std::string_view name) {
  auto out = std::make_unique<GpuLinear>(weights_, from, name);
  out->rounds = precision != Precision::kF32 && out->packing.format.code != Code::kF32;
  if (out->rounds) widest_rounded_ = std::max<int64_t>(widest_rounded_, out->packing.k_pad);
  return out;
}

std::unique_ptr<PlacedExperts> GpuOps::make_experts(const ExpertsShape& shape, const ExpertsOptions& options,
                                                    const ExpertsFill& fill, std::span<const int> hot) {
  widest_hidden_ = std::max<int64_t>(widest_hidden_, shape.hidden);
  ++routed_layers_;
  auto out = std::make_unique<GpuRoutedExperts>(weights_, host_->make_experts(shape, options, fill, {}), hot,
                                                fill.name);
  if (options_.stream_from != 0) {
    const bool large = options_.stream_from > 0 || out->experts().packed_bytes() >= kLeastPassed;
    if (large && out->hot.takes_many() && out->hot.count() < shape.experts)
      out->sent = std::make_shared<const SentExperts>(options_.gpu, out->experts());
    if (out->sent && !out->sent->why().empty())
      log_once(LogLevel::kWarning,
               "prompts' experts are copied to page-locked memory before they pass to the GPU: {}",
               out->sent->why());
    sent_.add(out->sent.get());
    routed_.push_back(out.get());
  }
  return out;
}

std::unique_ptr<PlacedExperts> GpuOps::make_mlp(const ExpertsShape& shape, const ExpertsOptions& options,
                                                const ExpertsFill& fill) {
  if (options.activation.kind == ActivationKind::kRelu) refuse("experts with ReLU");
  auto out = std::make_unique<GpuMlp>();
  out->sizes = shape;
  out->activation = options.activation;
  out->gate_rows = memory_.rows("mlp gate", shape.inter);
  out->up_rows = memory_.rows("mlp up", shape.inter);
  fill.load(0, [&](const ExpertRows& from) {
    const auto bias = [](const float* values, int64_t n) {
      return values ? std::span(values, static_cast<size_t>(n)) : std::span<const float>();
    };
    const auto linear = [&](const RowReader& rows, std::span<const float> biases) {
      return placed(Linear(*pool_, rows, biases, packed(), fill.name), options.precision, fill.name);
    };
    out->gate = linear(from.gate, bias(from.gate_bias, shape.inter));
    out->up = linear(from.up, bias(from.up_bias, shape.inter));
    out->down = linear(from.down, bias(from.down_bias, shape.hidden));
  });
  return out;
}

void GpuOps::add_adapter(PlacedExperts& experts, ExpertLowRank gate_up, ExpertLowRank down) {
  if (gate_up.rank > 0 || down.rank > 0)
    fail_as(ErrorKind::kUnsupported, "adapters of experts do not run beside a GPU; on the CPU alone they do");
  experts.adapters.push_back(nullptr);
}

std::unique_ptr<SequenceCache> GpuOps::make_cache(const SequenceShape& shape, int pages, int slots) {
  for (const KvShape& plane : shape.planes)
    if (std::max(plane.d, plane.dv) > kMostColumns)
      fail_as(ErrorKind::kUnsupported, "heads of {} numbers: a GPU takes {} at most",
              std::max(plane.d, plane.dv), kMostColumns);
  return std::make_unique<GpuCache>(options_.gpu, shape, pages, slots);
}

size_t GpuOps::row_bytes(int max_tokens) const {
  return static_cast<size_t>(memory_.floats(max_tokens) + tables_.width() * max_tokens) * sizeof(float) +
         rounded_bytes(max_tokens) + (passes(max_tokens) ? sent_.bytes() : 0);
}

void GpuOps::allocate(int max_tokens) {
  drop_graphs();
  memory_.allocate(options_.gpu, max_tokens);
  rounded_ = DeviceBuffer(options_.gpu, rounded_bytes(max_tokens), "rounded rows of a step");
  tables_.allocate(options_.gpu, max_tokens);
  exchange_.allocate(options_.gpu, exchange_sizes(std::min(max_tokens, kMostExchanged)));
  if (!passes(max_tokens)) return;
  sent_.allocate();
  if (options_.stream_from == GpuOpsOptions::kMeasured) measure_passing();
}

void GpuOps::wait() {
  const StepParts::Scope scope(&parts_, wait_part_);
  stream_->wait();
}

void GpuOps::begin(const StepRows& step) {
  KT_CHECK(!options_.sizes_only, "a model without weights");
  KT_CHECK(step.tokens <= tables_.max_tokens(), "{} tokens, rows for {}", step.tokens, tables_.max_tokens());
  step_ = step;
  live_ = step.tokens;
  layer_ = 0;
  pending_ = {};
  fetching_ = {};
  stream_->wait();
  replayed_ = replays(step);
  passing_ = !replayed_ && passes(step.tokens);
  passed_.clear();
  if (!(passing_ && sent_.all()) && step.tokens > exchange_.sizes().tokens) {
    drop_graphs();
    exchange_.allocate(options_.gpu, exchange_sizes(tables_.max_tokens()));
  }
  if (passing_) {
    sent_.begin();
    for (size_t layer = 0; layer < routed_.size(); ++layer)
      if (sent_.sends(layer)) sent_.want(layer, routed_[layer]->hot.skip());
  }
  tables_.fill(step.sequences, step.tokens, rows_of_step(), exchange_.next_step());
  if (!replayed_) tables_.send(*stream_);
}

// Who asked for logits has waited already, and saw the error if there was one; the next step sees it otherwise.
void GpuOps::end() noexcept {
  try {
    stream_->wait();
    if (passing_) sent_.drain();
  } catch (...) {
    // as above
  }
}

// Page-locked, for so many and at least for the rows of a step.
float* GpuOps::passing(Rows x, int64_t floats) {
  const auto bytes = static_cast<size_t>(std::max(floats, tables_.max_tokens() * x.width)) * sizeof(float);
  if (embedded_.size() < bytes) {
    stream_->wait();
    embedded_ = pinned_for(*options_.gpu, bytes);
  }
  return reinterpret_cast<float*>(embedded_.data());
}

// `floats` of passing(), and zeros for the rows behind the step's last token.
void GpuOps::send_rows(Rows x, float* from, int64_t floats) {
  const int64_t behind = (rows_of_step() - live_) * x.width;
  std::fill_n(from + floats, behind, 0.0f);
  stream_->copy(at(x), from, static_cast<size_t>(floats + behind) * sizeof(float));
}

void GpuOps::embed(const RowTable& table, std::span<const int32_t> ids, Rows x) {
  if (measured_) return;
  float* const to = passing(x, 0);
  const auto read = [&](int64_t t) { table.read(ids[static_cast<size_t>(t)], to + t * x.width); };
  if (ids.size() == 1)
    read(0);
  else
    spread(std::ssize(ids), read);
  send_rows(x, to, std::ssize(ids) * x.width);
}

NormArgs GpuOps::take_pending() {
  NormArgs out{.x = at(pending_.x),
               .fetched = pending_.fetched,
               .x_stride = pending_.x.width,
               .width = static_cast<int>(pending_.x.width)};
  std::copy_n(pending_.add, pending_.addends, out.add);
  pending_ = {};
  return out;
}

void GpuOps::launch_norm(const NormArgs& args) {
  const int threads = std::clamp(static_cast<int>(round_up(ceil_div(args.width, 4), 32)), 32, 1024);
  stream_->launch("kt_norm", step_.tokens, 1, threads, args);
}

void GpuOps::flush() {
  if (pending_.x.id >= 0) launch_norm(take_pending());
  if (fetching_.out.id < 0) return;
  const Fetching fetching = std::exchange(fetching_, {});
  launch_norm(NormArgs{.x = at(fetching.out),
                       .fetched = exchange_.fetched(tables_.words(), layer_ - 1),
                       .x_stride = fetching.out.width,
                       .width = static_cast<int>(fetching.out.width),
                       .fresh = fetching.hot ? 0 : 1});
}

void GpuOps::norm(Rows x, const PlacedVector& weights, double eps, Rows y) {
  if (measured_) return;
  const auto& w = static_cast<const GpuVector&>(weights);
  const bool along = pending_.x.id == x.id && x.id >= 0 && x.width == w.size() && fetching_.out.id < 0;
  if (!along) flush();
  NormArgs args =
      along ? take_pending() : NormArgs{.x = at(x), .x_stride = x.width, .width = static_cast<int>(w.size())};
  args.weight = w.data();
  args.out = at(y);
  args.out_stride = y.width;
  args.eps = static_cast<float>(eps);
  launch_norm(args);
}

void GpuOps::add(Rows x, Rows y) {
  if (measured_) return;
  if (fetching_.out.id >= 0 && fetching_.out.id == y.id && pending_.x.id < 0) {
    pending_ = {.x = x, .fetched = exchange_.fetched(tables_.words(), layer_ - 1), .add = {}};
    if (!std::exchange(fetching_, {}).hot) return;
  }
  const bool along = pending_.x.id == x.id && fetching_.out.id < 0 && pending_.addends < 2;
  if (!along) {
    flush();
    pending_ = {.x = x, .fetched = {}, .add = {}};
  }
  pending_.add[pending_.addends++] = {.rows = at(y), .stride = y.width};
}

void GpuOps::add_norm(Rows x, Rows y, const PlacedVector& weights, double eps, Rows out) {
  add(x, y);
  norm(x, weights, eps, out);
}

// While a graph is noted down, what is too small grows afterwards, and then it is noted down again.
float* GpuOps::scratch(size_t floats) {
  if (recording_) {
    wanted_.scratch = std::max(wanted_.scratch, floats * sizeof(float));
  } else if (scratch_.size() < floats * sizeof(float)) {
    stream_->wait();
    drop_graphs();
    scratch_ = {};
    scratch_ = DeviceBuffer(options_.gpu, floats * sizeof(float), "scratch of a step");
  }
  return scratch_.as<float>();
}

RotateRowsArgs GpuOps::rotate_args(const RotateWrite& args, const HeadRows& heads,
                                   const float* growth) const {
  const auto* const norm = static_cast<const GpuVector*>(heads.norm);
  const RopeSpec& rope = tables_.rope(args.rotation).spec();
  return {.x = at(heads.rows),
          .width = heads.rows.width,
          .heads = heads.heads,
          .stride = heads.stride,
          .rotated = static_cast<int>(heads.rotated),
          .norm = norm ? norm->data() : nullptr,
          .norms = heads.norms,
          .norm_size = norm ? static_cast<int>(norm->size()) : 0,
          .eps = static_cast<float>(args.norm_eps),
          .half = rope.dims / 2,
          .interleaved = rope.interleaved ? 1 : 0,
          .cosines = tables_.cosines(args.rotation),
          .sines = tables_.sines(args.rotation),
          .growth = growth};
}

void GpuOps::rotate_write(const RotateWrite& args) {
  if (args.norm_last) refuse("norms behind the rotation");
  if (args.v_norm) refuse("norms of values");
  if (measured_) return;
  flush();
  const float* const growth = args.growth.beta != 0 ? tables_.growth(args.growth) : nullptr;
  if (!recording_ && !tables_.sent()) tables_.send(*stream_);
  const CachePlane plane = static_cast<const GpuCache&>(*step_.cache).plane(args.plane);
  const FinishHeadsArgs all{.q = rotate_args(args, args.q, growth),
                            .k = rotate_args(args, args.k, nullptr),
                            .write = {.plane = plane,
                                      .places = tables_.places(),
                                      .k = at(args.k.rows),
                                      .v = args.v.id >= 0 ? at(args.v) : nullptr,
                                      .k_width = args.k.rows.width,
                                      .v_width = args.v.width}};
  // Norms lie side by side from the row's beginning: each is a head's own where they are as wide as heads are apart.
  const auto by_head = [](const HeadRows& heads) {
    return !heads.norm ||
           (heads.norms == heads.heads && (heads.heads == 1 || heads.norm->size() == heads.stride));
  };
  if (by_head(args.q) && by_head(args.k) && plane.heads == args.k.heads)
    return stream_->launch("kt_finish_heads", args.q.heads + args.k.heads, step_.tokens, kHeadThreads, all);
  stream_->launch("kt_rotate", step_.tokens, 1, kRowThreads, all.q);
  stream_->launch("kt_rotate", step_.tokens, 1, kRowThreads, all.k);
  stream_->launch("kt_write_cache", plane.heads, step_.tokens, kHeadThreads, all.write);
}

void GpuOps::copy_heads(const CopyHeads& args) {
  if (measured_) return;
  flush();
  stream_->launch("kt_copy_heads", args.heads, step_.tokens, 64,
                  CopyHeadsArgs{.from = at(args.from),
                                .to = at(args.to),
                                .from_width = args.from.rows.width,
                                .to_width = args.to.rows.width,
                                .from_stride = args.from_stride,
                                .to_stride = args.to_stride,
                                .heads = args.heads,
                                .count = static_cast<int>(args.count)});
}

void GpuOps::sigmoid(Rows x) {
  if (measured_) return;
  flush();
  const int64_t all = x.width * step_.tokens;
  stream_->launch("kt_sigmoid", ceil_div(all, kRowThreads), 1, kRowThreads,
                  SigmoidArgs{.x = at(x), .count = all});
}

void GpuOps::pick(Rows x, std::span<const int> tokens) {
  if (measured_) return;
  flush();
  if (std::ssize(tokens) == live_) return;  // each is where it was
  // Rows that move and rows that are read overlap: through scratch.
  const size_t floats = tokens.size() * static_cast<size_t>(x.width);
  float* const all = scratch(floats + tokens.size());
  auto* const rows = reinterpret_cast<int32_t*>(all + floats);
  const std::vector<int32_t> wanted(tokens.begin(), tokens.end());
  stream_->copy(rows, wanted.data(), wanted.size() * sizeof(int32_t));
  stream_->launch("kt_pick", std::ssize(tokens), 1, kRowThreads,
                  PickArgs{.from = at(x), .to = all, .rows = rows, .width = x.width});
  stream_->copy(at(x), all, floats * sizeof(float));
}

void GpuOps::write(std::span<const float> values, Rows x) {
  flush();
  stream_->wait();  // for what was written before
  float* const from = passing(x, std::ssize(values));
  std::ranges::copy(values, from);
  send_rows(x, from, std::ssize(values));
}

void GpuOps::read(Rows x, std::span<float> values) {
  flush();
  const float* const to = passing(x, std::ssize(values));
  stream_->copy(embedded_.data(), at(x), values.size_bytes());
  wait();
  std::copy_n(to, values.size(), values.begin());
}

void GpuOps::read_ids(Rows ids, std::span<int32_t> values) {
  flush();
  stream_->copy(values.data(), ids_at(ids), values.size_bytes());
  wait();
}

StepNeeds GpuOps::measure(const StepRows& step, const SequenceShape& shape, FunctionRef<void()> run) {
  Measured measured{.shape = &shape, .work = {}};
  const StepRows before = std::exchange(step_, step);
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
  const size_t passing =
      static_cast<size_t>(step.tokens) * static_cast<size_t>(widest_hidden_) * sizeof(float);
  return {.work = std::move(measured.work),
          .workspace = measured.workspace,
          .on_host = measured.on_host + 3 * passing};
}

std::unique_ptr<Ops> make_gpu_ops(std::shared_ptr<Pool> pool, GpuOpsOptions options) {
  return std::make_unique<GpuOps>(std::move(pool), std::move(options));
}

}  // namespace kt::inline nn
