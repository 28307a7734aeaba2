// What a training call is checked for, what is kept between two calls, and the nodes of a backward together; what one
// node computes is in experts_backward_node.cc.
#include "nn/experts_grad.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/error.h"
#include "nn/experts_workspace.h"
#include "nn/reserve.h"

namespace kt::inline nn {

struct SavedCall::State {
  const Experts::State* of = nullptr;
  int tokens = 0, top_k = 0;
  ExpertRouting routing;
  Real type = Real::kBf16;
  std::vector<Buffer> rows;       // of each node: [rows, Shard::both()]
  std::vector<int> memory_nodes;  // where these lie
  std::shared_ptr<KeptMemory> memory;

  ~State() {
    for (size_t n = 0; n < rows.size(); ++n)
      if (!rows[n].empty()) memory->give(std::move(rows[n]), memory_nodes[n]);
  }
  void take(const Experts::State& experts);
};

SavedCall::SavedCall() = default;
SavedCall::~SavedCall() = default;
SavedCall::SavedCall(SavedCall&&) noexcept = default;
SavedCall& SavedCall::operator=(SavedCall&&) noexcept = default;
bool SavedCall::empty() const { return !state_; }
size_t SavedCall::bytes() const {
  if (!state_) return 0;
  size_t sum = state_->routing.token.size() * 3 * sizeof(int32_t);
  for (const Buffer& buffer : state_->rows) sum += buffer.size();
  return sum;
}

// The rows' memory, as `routing` has them.
void SavedCall::State::take(const Experts::State& experts) {
  for (int n = 0; n < experts.pool->nodes(); ++n) {
    const size_t bytes =
        experts.shards[n].empty()
            ? 0
            : routing.token.size() * static_cast<size_t>(experts.shards[n].both()) * bytes_of(type);
    memory_nodes.push_back(experts.pool->memory_node(n));
    rows.push_back(bytes ? memory->take(bytes, memory_nodes.back()) : Buffer());
  }
}

namespace {

std::vector<NodeForward::Keep> keeps_of(SavedCall::State& saved) {
  std::vector<NodeForward::Keep> out;
  for (Buffer& rows : saved.rows) out.push_back({.rows = rows.data(), .type = saved.type});
  return out;
}

void check_backward(const Experts::State& experts, const TrainBackwardArgs& args,
                    const SavedCall::State* saved) {
  const ForwardArgs& call = args.call;
  check_call(experts, call, "backward");
  if (saved && saved->of != &experts) fail("backward: what was saved is of another layer");
  if (saved && (saved->tokens != call.tokens || saved->top_k != call.top_k))
    fail("backward: {} tokens of {} experts each, but the forward that was saved had {} of {}", call.tokens,
         call.top_k, saved->tokens, saved->top_k);
  if (call.tokens == 0) return;
  if (!args.output_grad) fail("backward: output_grad is null");
  if (reinterpret_cast<uintptr_t>(args.output_grad) % bytes_of(args.output_grad_type))
    fail("backward: output_grad is not aligned to {} bytes", bytes_of(args.output_grad_type));
  if (args.output_grad_stride && args.output_grad_stride < experts.shape.hidden)
    fail("backward: output_grad stride {} is below hidden {}", args.output_grad_stride, experts.shape.hidden);
}

// The nodes of a backward.
class Backward {
 public:
  Backward(const Experts::State& experts, const TrainBackwardArgs& args, const LoraAdapter& adapter,
           const ExpertRouting& routing)
      : experts_(experts), args_(args), adapter_(adapter), routing_(routing), direct_(on_one_node(experts)) {}

  // Bytes of all nodes; takes none. `node(n)` keeps what node n has, `kept` are its rows.
  template <typename NodeOf>
  size_t lay_out(Real kept_type, const std::vector<Buffer>* kept, NodeOf node) {
    size_t bytes = 0;
    job_of_.assign(static_cast<size_t>(experts_.pool->nodes()), -1);
    for (int n = 0; n < experts_.pool->nodes(); ++n) {
      if (experts_.shards[n].empty()) continue;
      job_of_[n] = static_cast<int>(jobs_.size());
      jobs_.emplace_back(NodeBackward::Setting{.experts = &experts_,
                                               .shard = &experts_.shards[n],
                                               .first = jobs_.empty(),
                                               .args = &args_,
                                               .adapter = &adapter_,
                                               .routing = &routing_,
                                               .kept = kept ? (*kept)[n].data() : nullptr,
                                               .kept_type = kept_type,
                                               .node = node(n),
                                               .workers = experts_.pool->threads(n),
                                               .direct = direct_});
      bytes += with_reserve(jobs_.back().lay_out());
    }
    return bytes;
  }

  void run() {
    for (int n = 0; n < experts_.pool->nodes(); ++n)
      if (job_of_[n] >= 0) jobs_[job_of_[n]].prepare(experts_.pool->memory_node(n));
    experts_.pool->run([&](const Worker& w) {
      if (job_of_[w.node] >= 0) jobs_[job_of_[w.node]].run(w.rank);
    });
    if (direct_) return;
    experts_.pool->run([&](const Worker& w) { add_tokens(w); });
    std::atomic<int> next = 0;
    experts_.pool->run([&](const Worker& w) {
      if (job_of_[w.node] < 0) return;
      std::byte* const mine = jobs_[job_of_[w.node]].of_worker(w.rank);
      for (int g = next++; g < static_cast<int>(routing_.groups.size()); g = next++) add_group(g, mine);
    });
  }

 private:
  // dX: sums over the nodes, in their order.
  void add_tokens(const Worker& w) const {
    if (!args_.input_grad) return;
    const int hidden = experts_.shape.hidden;
    for (int t = w.index; t < args_.call.tokens; t += experts_.pool->threads()) {
      float* const out = args_.input_grad + int64_t{t} * hidden;
      std::copy_n(jobs_[0].sums().input + int64_t{t} * hidden, hidden, out);
      for (size_t j = 1; j < jobs_.size(); ++j)
        experts_.kernels->add_scaled(out, jobs_[j].sums().input + int64_t{t} * hidden, 1.0f, hidden);
    }
  }

  // The same of what factors and routing weights get: in the first node's memory, then where it belongs.
  void add_group(int g, std::byte* mine) const {
    const ExpertGroup& group = routing_.groups[g];
    const NodeBackward::Sums to = jobs_[0].sums();
    for (size_t j = 1; j < jobs_.size(); ++j) {
      const NodeBackward::Sums from = jobs_[j].sums();
      const auto add = [&](float* sum, const float* more, int64_t width) {
        experts_.kernels->add_scaled(sum + group.first * width, more + group.first * width, 1.0f,
                                     static_cast<int>(group.m * width));
      };
      add(to.t, from.t, to.t_width);
      add(to.td, from.td, to.td_width);
      add(to.weights, from.weights, 1);
    }
    jobs_[0].add_factors(g, mine);
    for (int i = group.first; i < group.first + group.m && args_.weights_grad; ++i)
      args_.weights_grad[routing_.pair[i]] = to.weights[i];
  }

  const Experts::State& experts_;
  const TrainBackwardArgs& args_;
  const LoraAdapter& adapter_;
  const ExpertRouting& routing_;
  bool direct_;
  std::vector<NodeBackward> jobs_;  // of nodes that have a shard
  std::vector<int> job_of_;
};

}  // namespace

ExpertsGrad::ExpertsGrad(const Experts& experts) : experts_(experts) {}

Precision ExpertsGrad::precision() const {
  const Precision given = experts_.options().precision;
  return given == Precision::kDefault ? Precision::kBf16 : given;
}

Real ExpertsGrad::kept_type() const { return precision() == Precision::kF32 ? Real::kF32 : Real::kBf16; }

// Of the rows that the workspace's routing has.
void ExpertsGrad::keep(SavedCall& saved, const ForwardArgs& call) const {
  const Experts::State& s = experts_.state();
  Workspace::State& space = *s.workspace->state_;
  saved.state_.reset();
  auto state = std::make_unique<SavedCall::State>();
  state->of = &s;
  state->tokens = call.tokens;
  state->top_k = call.top_k;
  state->routing.groups = space.routing.groups;
  state->routing.token = space.routing.token;
  state->routing.weight = space.routing.weight;
  state->routing.pair = space.routing.pair;
  state->type = kept_type();
  state->memory = space.kept;
  state->take(s);
  saved.state_ = std::move(state);
}

void ExpertsGrad::forward(const TrainForwardArgs& args) const {
  const Experts::State& s = experts_.state();
  check_call(s, args.call, "forward");
  check_output(s, args.call, "forward");
  if (args.call.adapter) fail("forward: factors are given as such, not as an adapter");
  const LoraAdapter adapter(experts_, args.lora, kept_type() == Real::kBf16);
  ForwardArgs call = args.call;
  call.adapter = args.lora.empty() ? nullptr : &adapter;
  Workspace::State& space = *s.workspace->state_;
  const std::lock_guard lock(space.mutex);
  route({call.tokens, call.top_k, call.ids, call.ids64, call.weights, call.skip}, s.is_loaded, space.routing);
  ForwardRun run{.args = &call, .precision = precision()};
  if (args.keep) {
    keep(*args.keep, call);
    run.keep = keeps_of(*args.keep->state_);
  }
  run_forward(s, space, run);
}

void ExpertsGrad::backward(const TrainBackwardArgs& args) const {
  const Experts::State& s = experts_.state();
  const ForwardArgs& call = args.call;
  const SavedCall::State* saved = args.saved ? args.saved->state_.get() : nullptr;
  check_backward(s, args, saved);
  const LoraAdapter adapter(experts_, args.lora, kept_type() == Real::kBf16);
  if (call.tokens == 0) return;
  Workspace::State& space = *s.workspace->state_;
  const std::lock_guard lock(space.mutex);
  SavedCall again;
  if (!saved) {
    route({call.tokens, call.top_k, call.ids, call.ids64, call.weights, call.skip}, s.is_loaded,
          space.routing);
    keep(again, call);
    saved = again.state_.get();
    ForwardArgs forward = call;
    forward.adapter = args.lora.empty() ? nullptr : &adapter;
    forward.then = nullptr;
    run_forward(
        s, space,
        {.args = &forward, .precision = precision(), .keep = keeps_of(*again.state_), .keeps_only = true});
  }
  if (args.weights_grad) std::fill_n(args.weights_grad, int64_t{call.tokens} * call.top_k, 0.0f);
  if (saved->routing.groups.empty()) {
    if (args.input_grad) std::fill_n(args.input_grad, int64_t{call.tokens} * s.shape.hidden, 0.0f);
    return;
  }
  Backward backward(s, args, adapter, saved->routing);
  while (std::ssize(space.backward) < s.pool->nodes())
    space.backward.push_back(std::make_unique<BackwardNode>());
  backward.lay_out(saved->type, &saved->rows, [&](int n) { return space.backward[n].get(); });
  backward.run();
}

size_t ExpertsGrad::kept_bytes(int tokens, int top_k) const {
  const size_t rows = static_cast<size_t>(tokens) * static_cast<size_t>(top_k);
  size_t bytes = rows * 3 * sizeof(int32_t);
  for (const Shard& shard : experts_.state().shards)
    if (!shard.empty()) bytes += rows * static_cast<size_t>(shard.both()) * bytes_of(kept_type());
  return bytes;
}

size_t ExpertsGrad::backward_bytes(int tokens, int top_k, const ExpertLora& lora) const {
  const Experts::State& s = experts_.state();
  const ExpertRouting routing = even_routing(s.shape.experts, tokens, top_k);
  if (routing.groups.empty()) return 0;
  float wanted = 0;  // never written
  const TrainBackwardArgs args{
      .call = {.tokens = tokens, .top_k = top_k}, .lora = lora, .input_grad = &wanted};
  const LoraAdapter adapter(experts_, lora, kept_type() == Real::kBf16);
  std::vector<BackwardNode> nodes(static_cast<size_t>(s.pool->nodes()));
  Backward backward(s, args, adapter, routing);
  return backward.lay_out(kept_type(), nullptr, [&](int n) { return &nodes[n]; });
}

}  // namespace kt::inline nn
