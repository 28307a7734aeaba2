// Operations of GpuOps that multiply: linears, routers, experts on both sides, the head.
#include "base/error.h"
#include "nn/cpu_work.h"
#include "nn/gpu_experts.h"
#include "nn/gpu_ops_state.h"

namespace kt::inline nn {
namespace {

constexpr int kPostThreads = 512;
constexpr int kProductRows = 8;
// Row blocks of matrices that are multiplied with few rows, of which as many blocks run side by side as large GPUs have
// places for; of more a block takes two at once, and reads x once for both.
constexpr int64_t kSideBySide = 264;
constexpr int kLogitRows = 64;      // of the head at once
constexpr int kMeasuredChosen = 8;  // experts of a token, where the pool's speed is measured

// How a product of so many rows is launched.
struct ProductKernel {
  std::string name;
  int threads, rows, blocks;  // of a block: threads, rows of x, row blocks
  bool rounded;               // takes x in bf16
};

ProductKernel product_kernel(const GpuLinear& weights, int rows, int64_t all_blocks) {
  const char* const code = kernel_word(weights.packing.format.code);
  const int step = weights.packing.fragment.step_bytes;
  if (weights.rounds && rows > kFewRows)
    return {text("kt_product_many_{}_{}", code, step), kManyThreads, kTileRows, kTileColumns / kBlockRows,
            true};
  if (weights.rounds) {
    const int at_once = rows > 8 ? 16 : 8, blocks = all_blocks > kSideBySide ? 2 : 1;
    return {text("kt_product_few_{}_{}_{}_{}", code, step, at_once, blocks), kFewThreads, at_once, blocks,
            false};
  }
  const int at_once = rows == 1 ? 1 : kProductRows;
  return {text("kt_product_{}_{}_{}", code, step, at_once), kProductThreads, at_once, 1, false};
}

RouteArgs route_args(const ChooseExperts& args) {
  const RouterSpec& spec = *args.spec;
  return {.width = args.scores.width,
          .experts = static_cast<int>(args.router->n()),
          .top_k = args.top_k,
          .sigmoid = spec.score == RouterSpec::Score::kSigmoid,
          .softmax_of_chosen = spec.score_of_chosen,
          .normalise = spec.normalise,
          .groups = spec.groups,
          .top_groups = spec.top_groups,
          .group_top_two = spec.group_score == RouterSpec::GroupScore::kTopTwo,
          .normalise_floor = static_cast<float>(spec.normalise_floor),
          .normalise_least = static_cast<float>(spec.normalise_least),
          .scale = static_cast<float>(spec.scale)};
}

}  // namespace

// The product's x in bf16, with zeros where a tile of rows goes on behind the last.
const uint16_t* GpuOps::rounded(const Product& product, int rows) {
  const int width = product.weights.packing.k_pad;
  auto* const out = rounded_.as<uint16_t>();
  stream_->launch("kt_round_rows", round_up(rows, kTileRows), 1, kRowThreads,
                  RoundRowsArgs{.from = product.x,
                                .from_stride = product.x_stride,
                                .to = out,
                                .width = static_cast<int>(product.weights.k()),
                                .to_width = width,
                                .rows = rows});
  return out;
}

void GpuOps::multiply(int rows, std::span<const Product> products) {
  ProductsArgs args;
  ProductKernel kernel = {};
  const Product* last = nullptr;  // whose x is in `rounded_`
  int blocks = 0;
  int64_t all_blocks = 0;
  for (const Product& product : products) all_blocks += product.weights.packing.blocks;
  const auto launch = [&] {
    if (args.count > 0)
      stream_->launch(kernel.name, blocks, ceil_div(rows, kernel.rows), kernel.threads, args);
    args.count = blocks = 0;
  };
  for (const Product& product : products) {
    const Packing& packing = product.weights.packing;
    count(place(), matrix_work(packing.format, product.weights.stored,
                               2.0 * static_cast<double>(packing.n) * static_cast<double>(packing.k) * rows));
    if (measured_) continue;
    const ProductKernel mine = product_kernel(product.weights, rows, all_blocks);
    const bool fresh =
        mine.rounded && !(last && last->x == product.x && last->weights.k() == product.weights.k());
    // Who still reads what was rounded before goes first.
    if (args.count == kMostTogether || mine.name != kernel.name || fresh) launch();
    kernel = mine;
    args.first[args.count] = blocks;
    args.of[args.count++] = {.weights = product.weights.rows(),
                             .x = product.x,
                             .x_stride = product.x_stride,
                             .y = product.y,
                             .y_stride = product.y_stride,
                             .bias = product.weights.bias.as<const float>(),
                             .factors = product.factors,
                             .m = rows,
                             .rounded = !mine.rounded ? nullptr
                                        : fresh       ? rounded(product, rows)
                                                      : rounded_.as<const uint16_t>()};
    if (mine.rounded) last = &product;
    blocks += static_cast<int>(ceil_div(packing.blocks, mine.blocks));
  }
  launch();
}

void GpuOps::linear(std::span<const LinearUse> uses) {
  if (!measured_) flush();
  std::vector<Product> products;
  for (const LinearUse& use : uses)
    products.push_back({.weights = static_cast<const GpuLinear&>(*use.weights),
                        .x = measured_ ? nullptr : at(use.x),
                        .x_stride = use.x.rows.width,
                        .y = measured_ ? nullptr : at(use.y),
                        .y_stride = use.y.rows.width});
  multiply(step_.tokens, products);
  for (const LinearUse& use : uses)
    if (const LinearAdapter* adapter = use.weights->adapter(step_.adapter)) add_adapter(use, *adapter);
}

void GpuOps::add_adapter(const LinearUse& use, const LinearAdapter& adapter) {
  const auto& down = static_cast<const GpuLinear&>(*adapter.down);
  const auto& up = static_cast<const GpuLinear&>(*adapter.up);
  const int64_t rank = down.n(), n = up.n(), tokens = step_.tokens;
  if (measured_)
    measured_->workspace =
        std::max(measured_->workspace, static_cast<size_t>(tokens * (rank + n)) * sizeof(float));
  float* const low = measured_ ? nullptr : scratch(static_cast<size_t>(tokens * (rank + n)));
  float* const sum = measured_ ? nullptr : low + tokens * rank;
  multiply(step_.tokens, {.weights = down,
                          .x = measured_ ? nullptr : at(use.x),
                          .x_stride = use.x.rows.width,
                          .y = low,
                          .y_stride = rank});
  multiply(step_.tokens, {.weights = up, .x = low, .x_stride = rank, .y = sum, .y_stride = n});
  if (measured_) return;
  launch_norm({.x = at(use.y),
               .add = {{.rows = sum, .stride = n, .scale = adapter.scale}},
               .x_stride = use.y.rows.width,
               .width = static_cast<int>(n)});
}

void GpuOps::route(const ChooseExperts& args) {
  if (args.scales) refuse("scales of experts");
  const LinearUse use{.weights = args.router, .x = args.x, .y = args.scores};
  linear({&use, 1});
  if (measured_) return;
  RouteArgs how = route_args(args);
  KT_CHECK(how.experts <= kMostRouted && how.top_k <= kMostChosen, "{} of {} experts", how.top_k,
           how.experts);
  const auto* const correction = static_cast<const GpuVector*>(args.correction);
  how.scores = at(args.scores);
  how.correction = correction ? correction->data() : nullptr;
  how.ids = ids_at(args.ids);
  how.weights = at(args.weights);
  how.step = tables_.words();
  if (const auto* const forced = static_cast<const GpuVector*>(args.forced)) {
    how.forced = forced->data();
    how.forced_rounds = kForcedRounds;
    how.positions = tables_.places().positions;
  }
  stream_->launch("kt_route", step_.tokens, 1, 32, how);
}

void GpuOps::send_experts(const RunExperts& args) {
  if (measured_) return;
  flush();
  const auto& placed = static_cast<const GpuRoutedExperts&>(*args.experts);
  if (passing_ && placed.sent) return pass_experts(placed, args);
  want_chosen(args.top_k);
  const GpuExperts* const hot = placed.hot_for(step_.tokens);
  PostRowsArgs post = exchange_.post(tables_.words(), layer_, recording_ ? layer_ : 0);
  post.x = at(args.x);
  post.x_stride = args.x.width;
  post.width = placed.shape().hidden;
  post.ids = ids_at(args.ids);
  post.weights = at(args.weights);
  post.top_k = args.top_k;
  post.slots = hot ? hot->slots() : nullptr;
  post.always = recording_ ? 0 : 1;
  stream_->launch("kt_post_rows", step_.tokens, 1, kPostThreads, post);
  if (hot) run_hot(*hot, args);
}

GpuExperts::Call GpuOps::call_of(const RunExperts& args, int64_t mid_floats) {
  return {.tokens = step_.tokens,
          .top_k = args.top_k,
          .x = at(args.x),
          .x_stride = args.x.width,
          .ids = ids_at(args.ids),
          .weights = at(args.weights),
          .mid = scratch(static_cast<size_t>(mid_floats)),
          .out = at(args.out),
          .out_stride = args.out.width};
}

void GpuOps::run_hot(const GpuExperts& hot, const RunExperts& args) {
  const GpuExperts::Call call = call_of(args, hot.mid_floats(step_.tokens, args.top_k));
  if (step_.tokens > kMostHotTokens) return hot.run_many(*stream_, call);
  hot.run_in(*stream_, call);
  hot.run_out(*stream_, call);
}

// Tokens whose pairs are multiplied at once, so that their rows fit; the more, the fewer times weights are widened.
int GpuOps::round_of(const GpuRoutedExperts& placed, int tokens, int top_k) const {
  int round = kRoundTokens;
  const auto bytes = [&](int of) {
    return static_cast<size_t>(placed.hot.many_floats(of, top_k, placed.shape().experts, of)) * sizeof(float);
  };
  while (round < tokens && bytes(2 * round) <= options_.stream_bytes) round *= 2;
  return round;
}

int32_t* GpuOps::chosen_of(int layer, int top_k) const {
  return reinterpret_cast<int32_t*>(chosen_.data()) + int64_t{layer} * tables_.max_tokens() * top_k;
}

// Nothing of it waits for the host: all of the step is asked of the GPU at once.
void GpuOps::pass_experts(const GpuRoutedExperts& placed, const RunExperts& args) {
  const GpuExperts& kernels = placed.hot;
  const size_t ids = routed_.size() * static_cast<size_t>(tables_.max_tokens()) *
                     static_cast<size_t>(args.top_k) * sizeof(int32_t);
  if (chosen_.size() < ids) {
    end_passing();
    chosen_ = pinned_for(*options_.gpu, ids);
  }
  stream_->copy(chosen_of(layer_, args.top_k), ids_at(args.ids),
                static_cast<size_t>(step_.tokens) * static_cast<size_t>(args.top_k) * sizeof(int32_t));
  const int round = round_of(placed, step_.tokens, args.top_k);
  GpuExperts::Call call =
      call_of(args, kernels.many_floats(step_.tokens, args.top_k, placed.shape().experts, round));
  const auto run = [&](const GpuExperts::Copies& copies) {
    kernels.run_many(*stream_, call, copies, round);
    call.add = true;
  };
  if (kernels.count() > 0) run(kernels.held());
  sent_.take(static_cast<size_t>(layer_), *stream_, run);
}

// Of the first layer that is sent: its way over the link, and what the pool takes for tokens that go to experts by
// turns.
void GpuOps::measure_passing() {
  const size_t layer = sent_.first();
  const Experts& experts = routed_[layer]->experts();
  const auto& shape = experts.shape();
  const auto seconds = [](FunctionRef<void()> run) {
    const auto start = std::chrono::steady_clock::now();
    run();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto link = [&] {
    sent_.begin();
    sent_.want(layer, nullptr);
    sent_.take(layer, *stream_, [](const GpuExperts::Copies&) {});
    sent_.drain();
  };
  const auto host = [&](int tokens) {
    const int top_k = std::min(kMeasuredChosen, shape.experts);
    const auto pairs = static_cast<size_t>(tokens * top_k),
               numbers = static_cast<size_t>(tokens * shape.hidden);
    std::vector<int32_t> ids(pairs);
    for (size_t i = 0; i < pairs; ++i) ids[i] = static_cast<int32_t>(i % static_cast<size_t>(shape.experts));
    const std::vector<float> weights(pairs, 1.0f), x(numbers, 1.0f);
    std::vector<float> out(numbers);
    const ForwardArgs args{.tokens = tokens,
                           .top_k = top_k,
                           .input = x.data(),
                           .ids = ids.data(),
                           .weights = weights.data(),
                           .output = out.data()};
    experts.forward(args);
    return seconds([&] { experts.forward(args); });
  };
  link();
  const double passed = seconds(link);
  const int few = std::min(64, tables_.max_tokens()), many = std::min(256, tables_.max_tokens());
  const double least = host(few), more = host(many);
  const double token = many > few ? std::max((more - least) / (many - few), 1e-9) : 1e-9;
  const double from = few + (passed - least) / token;
  pass_from_ = static_cast<int>(std::clamp(from, kMostHotTokens + 1.0, 1e6));
}

void GpuOps::end_passing() {
  if (!passing_) return;
  wait();
  for (const HostTask& task : passed_) tell(task);
  passed_.clear();
}

void GpuOps::measure_experts(const RunExperts& args) {
  const auto& placed = static_cast<const GpuRoutedExperts&>(*args.experts);
  const Experts& experts = placed.experts();
  const bool passed = passes(step_.tokens) && placed.sent;
  const GpuExperts* const hot = passed ? &placed.hot : placed.hot_for(step_.tokens);
  const double hits = even_hits(experts.shape(), args.top_k, step_.tokens),
               slots = static_cast<double>(int64_t{step_.tokens} * args.top_k),
               share = passed ? 1
                       : hot  ? static_cast<double>(hot->count()) / experts.shape().experts
                              : 0;
  count(kHost, experts_work(experts, hits * (1 - share), slots * (1 - share)));
  if (!passed)
    measured_->on_host = std::max(measured_->on_host, experts.forward_bytes(step_.tokens, args.top_k));
  if (!hot) return;
  count(place(), experts_work(experts, hits * share, slots * share));
  const int64_t floats = passed ? hot->many_floats(step_.tokens, args.top_k, placed.shape().experts,
                                                   round_of(placed, step_.tokens, args.top_k))
                                : hot->mid_floats(step_.tokens, args.top_k);
  measured_->workspace = std::max(measured_->workspace, static_cast<size_t>(floats) * sizeof(float));
}

void GpuOps::experts(const RunExperts& args) {
  if (measured_) return measure_experts(args);
  flush();
  const auto& placed = static_cast<const GpuRoutedExperts&>(*args.experts);
  const SentExperts* const passed = passing_ ? placed.sent.get() : nullptr;
  const HostTask task{.experts = &placed.experts(),
                      .hot = placed.hot_for(step_.tokens),
                      .top_k = args.top_k,
                      .watch = args.watch,
                      .watched = args.watched,
                      .ids_of = recording_ || passed ? layer_ : 0,
                      .passed = passed};
  if (recording_)
    recording_->tasks.push_back(task);
  else if (task.passed)
    passed_.push_back(task);
  else
    serve_now(task);
  ++layer_;
  if (task.passed) return;
  fetching_ = {.out = args.out, .hot = task.hot != nullptr};
}

void GpuOps::mlp(const RunMlp& args) {
  if (!measured_) flush();
  const auto& mlp = static_cast<const GpuMlp&>(*args.mlp);
  float* const gate = measured_ ? nullptr : at(mlp.gate_rows);
  float* const up = measured_ ? nullptr : at(mlp.up_rows);
  const int64_t inter = mlp.sizes.inter;
  const float* const x = measured_ ? nullptr : at(args.x);
  const Product both[] = {
      {.weights = *mlp.gate, .x = x, .x_stride = args.x.width, .y = gate, .y_stride = inter},
      {.weights = *mlp.up, .x = x, .x_stride = args.x.width, .y = up, .y_stride = inter}};
  multiply(step_.tokens, both);
  if (!measured_)
    stream_->launch("kt_gate", ceil_div(inter * step_.tokens, kRowThreads), 1, kRowThreads,
                    GateArgs{.gate = gate,
                             .up = up,
                             .mid = gate,
                             .count = inter * step_.tokens,
                             .kind = static_cast<int>(mlp.activation.kind),
                             .limit = mlp.activation.limit,
                             .alpha = mlp.activation.alpha});
  multiply(step_.tokens, {.weights = *mlp.down,
                          .x = gate,
                          .x_stride = inter,
                          .y = measured_ ? nullptr : at(args.out),
                          .y_stride = args.out.width,
                          .factors = measured_ || args.factors.id < 0 ? nullptr : at(args.factors)});
}

void GpuOps::project(const PlacedLinear& weights, Rows x, int count, float cap) {
  if (cap > 0) refuse("caps of logits");
  if (!measured_) flush();
  const auto& head = static_cast<const GpuLinear&>(weights);
  if (recording_) count = step_.tokens;
  const auto at_once = static_cast<size_t>(std::min(count, kLogitRows));
  if (measured_)
    measured_->workspace =
        std::max(measured_->workspace, at_once * static_cast<size_t>(head.n()) * sizeof(float));
  float* const logits = measured_ ? nullptr : scratch(at_once * static_cast<size_t>(head.n()));
  for (int first = 0; first < count; first += kLogitRows) {
    const int rows = std::min(kLogitRows, count - first);
    multiply(rows, {.weights = head,
                    .x = measured_ ? nullptr : at(x) + first * x.width,
                    .x_stride = x.width,
                    .y = logits,
                    .y_stride = head.n()});
    if (measured_) continue;
    const size_t bytes = static_cast<size_t>(rows * head.n()) * sizeof(float);
    if (recording_) return keep_logits(logits, head.n(), bytes);
    stream_->copy(step_.logits + first * head.n(), logits, bytes);
    wait();
  }
}

}  // namespace kt::inline nn
