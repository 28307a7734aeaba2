// The MoE forward, written once: group rows by expert -> quantise each expert's rows -> gate|up for a slice
// of rows and the activation while both are in cache -> quantise again -> down for a slice of columns, added
// up over the experts. Here: what a call is checked for, and its nodes together; what one node computes is in
// experts_forward_node.cc.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "nn/experts_forward_node.h"
#include "nn/reserve.h"

namespace kt {

struct Workspace::State {
  std::mutex mutex;
  ExpertRouting routing;
  std::vector<std::unique_ptr<ForwardNode>> nodes;
};

Workspace::Workspace() : state_(std::make_unique<State>()) {}
Workspace::~Workspace() = default;
size_t Workspace::bytes() const {
  std::lock_guard lock(state_->mutex);
  size_t sum = 0;
  for (const auto& node : state_->nodes) sum += node->memory.held();
  return sum;
}

namespace {

template <class T>
void check_pointer(const T* p, size_t alignment, const char* name) {
  if (!p) fail("forward: {} is null", name);
  if (reinterpret_cast<uintptr_t>(p) % alignment)
    fail("forward: {} is not aligned to {} bytes", name, alignment);
}

void check(const ExpertsShape& shape, const ExpertsOptions& options, const ForwardArgs& a) {
  if (a.tokens < 0 || a.tokens > options.max_tokens)
    fail("forward: {} tokens, expected 0 to {} (max_tokens)", a.tokens, options.max_tokens);
  if (a.top_k < 1) fail("forward: top_k is {}, expected at least 1", a.top_k);
  if (a.tokens == 0) return;
  if (!a.ids == !a.ids64) fail("forward: exactly one of ids and ids64 is needed");
  check_pointer(a.input, bytes_of(a.input_type), "input");
  check_pointer(a.output, bytes_of(a.output_type), "output");
  check_pointer(a.weights, 4, "weights");
  if (a.ids) check_pointer(a.ids, 4, "ids");
  if (a.ids64) check_pointer(a.ids64, 8, "ids64");
  if (a.input_stride && a.input_stride < shape.hidden)
    fail("forward: input stride {} is below hidden {}", a.input_stride, shape.hidden);
  if (a.output_stride && a.output_stride < shape.hidden)
    fail("forward: output stride {} is below hidden {}", a.output_stride, shape.hidden);
}

bool on_one_node(const std::vector<Shard>& shards) {
  return std::count_if(shards.begin(), shards.end(), [](const Shard& s) { return !s.empty(); }) == 1;
}

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
                     .direct = on_one_node(s.shards)});
    bytes += with_reserve(job.lay_out());
  }
  return bytes;
}

void Experts::forward(const ForwardArgs& args) const {
  const State& s = *state_;
  KT_CHECK(!s.options.sizes_only, "experts without memory");
  check(s.shape, s.options, args);
  if (args.adapter && s.padding)  // it would be told columns of what is packed
    fail("forward: no adapter can be added to experts whose down has a scale for every {} columns",
         s.padding.part);
  if (args.tokens == 0) return;
  Workspace::State& space = *s.workspace->state_;
  std::lock_guard lock(space.mutex);
  route({args.tokens, args.top_k, args.ids, args.ids64, args.weights, args.skip}, s.is_loaded, space.routing);
  if (space.routing.groups.empty()) return store_zeros(s.shape, args);

  const int nodes = s.pool->nodes();
  while (static_cast<int>(space.nodes.size()) < nodes) space.nodes.push_back(std::make_unique<ForwardNode>());
  std::vector<NodeForward> jobs;  // of nodes that have a shard
  std::vector<int> job_of(nodes, -1);
  const bool direct = on_one_node(s.shards);
  for (int n = 0; n < nodes; ++n) {
    if (s.shards[n].empty()) continue;
    job_of[n] = static_cast<int>(jobs.size());
    jobs.emplace_back(NodeForward::Setting{.kernels = s.kernels,
                                           .shape = &s.shape,
                                           .options = &s.options,
                                           .shard = &s.shards[n],
                                           .down_bias = jobs.empty() ? &s.down_bias : nullptr,
                                           .args = &args,
                                           .routing = &space.routing,
                                           .node = space.nodes[n].get(),
                                           .workers = s.pool->threads(n),
                                           .direct = direct});
    jobs.back().lay_out();
    jobs.back().prepare(s.pool->memory_node(n));
  }
  s.pool->run(
      [&](const Worker& w) {
        if (job_of[w.node] >= 0) jobs[job_of[w.node]].run(w.rank);
      },
      args.then);
  if (!direct) add_nodes(jobs, *s.kernels, s.shape, args, *s.pool);
}

}  // namespace kt
