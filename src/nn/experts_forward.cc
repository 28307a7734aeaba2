// The MoE forward, written once: group rows by expert -> quantise each expert's rows -> gate|up for a slice
// of rows and the activation while both are in cache -> quantise again -> down for a slice of columns, added
// up over the experts. Here: what a call is checked for, and its nodes together; what one node computes is in
// experts_forward_node.cc.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "nn/experts_workspace.h"
#include "nn/reserve.h"

namespace kt::inline nn {

Workspace::Workspace() : state_(std::make_unique<State>()) {}
Workspace::~Workspace() = default;
size_t Workspace::bytes() const {
  std::lock_guard lock(state_->mutex);
  size_t sum = state_->kept->bytes();
  for (const auto& node : state_->nodes) sum += node->memory.held();
  for (const auto& node : state_->backward) sum += node->memory.held();
  return sum;
}

namespace {

template <class T>
void check_pointer(const T* p, size_t alignment, std::string_view call, const char* name) {
  if (!p) fail("{}: {} is null", call, name);
  if (reinterpret_cast<uintptr_t>(p) % alignment)
    fail("{}: {} is not aligned to {} bytes", call, name, alignment);
}

}  // namespace

void check_call(const Experts::State& experts, const ForwardArgs& a, std::string_view call) {
  const ExpertsShape& shape = experts.shape;
  const int most = experts.options.max_tokens;
  KT_CHECK(!experts.options.sizes_only, "experts without memory");
  if (a.tokens < 0 || a.tokens > most)
    fail("{}: {} tokens, expected 0 to {} (max_tokens)", call, a.tokens, most);
  if (a.top_k < 1) fail("{}: top_k is {}, expected at least 1", call, a.top_k);
  if (a.tokens == 0) return;
  if (!a.ids == !a.ids64) fail("{}: exactly one of ids and ids64 is needed", call);
  check_pointer(a.input, bytes_of(a.input_type), call, "input");
  check_pointer(a.weights, 4, call, "weights");
  if (a.ids) check_pointer(a.ids, 4, call, "ids");
  if (a.ids64) check_pointer(a.ids64, 8, call, "ids64");
  if (a.input_stride && a.input_stride < shape.hidden)
    fail("{}: input stride {} is below hidden {}", call, a.input_stride, shape.hidden);
}

void check_output(const Experts::State& experts, const ForwardArgs& a, std::string_view call) {
  if (a.tokens == 0) return;
  check_pointer(a.output, bytes_of(a.output_type), call, "output");
  if (a.output_stride && a.output_stride < experts.shape.hidden)
    fail("{}: output stride {} is below hidden {}", call, a.output_stride, experts.shape.hidden);
}

bool on_one_node(const Experts::State& experts) {
  return std::ranges::count_if(experts.shards, [](const Shard& s) { return !s.empty(); }) == 1;
}

namespace {

std::byte* output_row(const ExpertsShape& shape, const ForwardArgs& a, int token) {
  const int64_t stride = a.output_stride ? a.output_stride : shape.hidden;
  return static_cast<std::byte*>(a.output) + token * stride * static_cast<int64_t>(bytes_of(a.output_type));
}

void store_zeros(const ExpertsShape& shape, const ForwardArgs& a) {
  for (int t = 0; t < a.tokens; ++t)
    std::memset(output_row(shape, a, t), 0, shape.hidden * bytes_of(a.output_type));
}

// Sum of the nodes' partial outputs, in node order.
void add_nodes(const std::vector<NodeForward>& jobs, const Kernels& kernels, const ExpertsShape& shape,
               const ForwardArgs& args, Pool& pool) {
  pool.run([&](const Worker& w) {
    const int all = pool.threads();
    std::vector<float> sum(shape.hidden);
    for (int t = w.index; t < args.tokens; t += all) {
      const auto part = [&](const NodeForward& job) { return job.partial() + int64_t{t} * shape.hidden; };
      std::copy_n(part(jobs[0]), shape.hidden, sum.begin());
      for (size_t j = 1; j < jobs.size(); ++j)
        kernels.add_scaled(sum.data(), part(jobs[j]), 1.0f, shape.hidden);
      kernels.store(output_row(shape, args, t), args.output_type, sum.data(), shape.hidden);
    }
  });
}

}  // namespace

size_t Experts::forward_bytes(int tokens, int top_k, const ExpertAdapter* adapter) const {
  const State& s = *state_;
  const ExpertRouting routing = even_routing(s.shape.experts, tokens, top_k);
  const ForwardArgs args{.tokens = tokens, .top_k = top_k, .adapter = adapter};
  if (routing.groups.empty()) return 0;
  size_t bytes = 0;
  for (int n = 0; n < s.pool->nodes(); ++n) {
    if (s.shards[n].empty()) continue;
    ForwardNode node;
    NodeForward job({.kernels = s.kernels,
                     .shape = &s.shape,
                     .options = &s.options,
                     .shard = &s.shards[n],
                     .args = &args,
                     .routing = &routing,
                     .node = &node,
                     .workers = s.pool->threads(n),
                     .direct = on_one_node(s)});
    bytes += with_reserve(job.lay_out());
  }
  return bytes;
}

void run_forward(const Experts::State& s, Workspace::State& space, const ForwardRun& run) {
  if (space.routing.groups.empty()) {
    if (!run.keeps_only) store_zeros(s.shape, *run.args);
    return;
  }
  const int nodes = s.pool->nodes();
  ExpertsOptions options = s.options;
  options.precision = run.precision;
  while (static_cast<int>(space.nodes.size()) < nodes) space.nodes.push_back(std::make_unique<ForwardNode>());
  std::vector<NodeForward> jobs;  // of nodes that have a shard
  std::vector<int> job_of(nodes, -1);
  const bool direct = on_one_node(s);
  for (int n = 0; n < nodes; ++n) {
    if (s.shards[n].empty()) continue;
    job_of[n] = static_cast<int>(jobs.size());
    jobs.emplace_back(NodeForward::Setting{.kernels = s.kernels,
                                           .shape = &s.shape,
                                           .options = &options,
                                           .shard = &s.shards[n],
                                           .down_bias = jobs.empty() ? &s.down_bias : nullptr,
                                           .args = run.args,
                                           .routing = &space.routing,
                                           .node = space.nodes[n].get(),
                                           .workers = s.pool->threads(n),
                                           .direct = direct,
                                           .keep = run.keep.empty() ? NodeForward::Keep{} : run.keep[n],
                                           .keeps_only = run.keeps_only});
    jobs.back().lay_out();
    jobs.back().prepare(s.pool->memory_node(n));
  }
  s.pool->run(
      [&](const Worker& w) {
        if (job_of[w.node] >= 0) jobs[job_of[w.node]].run(w.rank);
      },
      run.args->then);
  if (!direct && !run.keeps_only) add_nodes(jobs, *s.kernels, s.shape, *run.args, *s.pool);
}

void Experts::forward(const ForwardArgs& args) const {
  const State& s = *state_;
  check_call(s, args, "forward");
  check_output(s, args, "forward");
  if (args.adapter && s.padding && !args.adapter->knows_padding())
    fail("forward: this adapter cannot be added to experts whose down has a scale for every {} columns",
         s.padding.part);
  if (args.tokens == 0) return;
  Workspace::State& space = *s.workspace->state_;
  std::lock_guard lock(space.mutex);
  route({args.tokens, args.top_k, args.ids, args.ids64, args.weights, args.skip}, s.is_loaded, space.routing);
  run_forward(s, space, {.args = &args, .precision = s.options.precision});
}

}  // namespace kt::inline nn
