// Steps of GpuOps that are alike: noted down once as a graph, replayed for others, with this thread as the host's side
// of it.
#include <bit>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "nn/cpu_work.h"
#include "nn/gpu_cache.h"
#include "nn/gpu_ops_state.h"

namespace kt::inline nn {
namespace {

constexpr int kMostReplayed = 64;  // tokens
constexpr size_t kMostGraphs = 24;

int power_of_two(int least) { return static_cast<int>(std::bit_ceil(static_cast<unsigned>(least))); }

// KT_CUDA_GRAPHS=0: every step is launched kernel by kernel, for profilers and for comparing.
bool switched_off() {
  static const char* const value = std::getenv("KT_CUDA_GRAPHS");
  return value && std::string_view(value) == "0";
}

// Contexts up to which one graph serves: kernels over keys have as many blocks.
int longest_of_graph(int longest) {
  const int pages = power_of_two((longest + kPageTokens - 1) / kPageTokens);
  return kPageTokens * std::min(pages, kAttendGroups);
}

}  // namespace

bool GpuOps::replays(const StepRows& step) const {
  return options_.graphs && step.alike && step.cache && step.adapter < 0 && step.tokens <= kMostReplayed &&
         !options_.gpu->facts().shows_screen && !switched_off();
}

// Rows that kernels run over: a few behind the last token, so that there are few graphs.
int GpuOps::rows_of_step() const {
  return replayed_ ? std::min(power_of_two(live_), tables_.max_tokens()) : live_;
}

int GpuOps::longest() const {
  int longest = 0;
  for (const AttentionSequence& sequence : step_.sequences)
    longest = std::max(longest, sequence.position + sequence.count);
  return longest;
}

GpuExchange::Sizes GpuOps::exchange_sizes(int64_t tokens) const {
  return {.tokens = tokens,
          .width = widest_hidden_,
          .top_k = most_chosen_,
          .layers = routed_layers_,
          .step_tokens = std::min<int64_t>(kMostReplayed, tokens)};
}

void GpuOps::drop_graphs() { graphs_.clear(); }

// Ids of so many experts a token pass between the GPU and the host.
void GpuOps::want_chosen(int top_k) {
  if (recording_)
    wanted_.chosen = std::max<int64_t>(wanted_.chosen, top_k);
  else if (top_k > most_chosen_)
    grow_exchange(top_k);
}

void GpuOps::grow_exchange(int64_t top_k) {
  stream_->wait();
  drop_graphs();
  most_chosen_ = top_k;
  exchange_.allocate(options_.gpu, exchange_sizes(exchange_.sizes().tokens));
}

// Whether anything that a graph was noted down with had to grow.
bool GpuOps::grow() {
  const Wanted wanted = std::exchange(wanted_, {});
  if (wanted.scratch <= scratch_.size() && wanted.logits <= logits_.size() && wanted.chosen <= most_chosen_)
    return false;
  if (wanted.chosen > most_chosen_) grow_exchange(wanted.chosen);
  if (wanted.scratch > scratch_.size()) scratch(wanted.scratch / sizeof(float));
  if (wanted.logits > logits_.size()) {
    drop_graphs();
    logits_ = pinned_for(*options_.gpu, wanted.logits);
  }
  return true;
}

// Logits of a noted step go to page-locked memory, whose place does not change.
void GpuOps::keep_logits(const float* logits, int64_t width, size_t bytes) {
  recording_->logit_width = width;
  wanted_.logits = std::max(wanted_.logits, bytes);
  if (bytes <= logits_.size()) stream_->copy(logits_.data(), logits, bytes);
}

void GpuOps::record(StepGraph& graph, FunctionRef<void()> run) {
  do {
    graph.tasks.clear();
    graph.attended.clear();
    graph.work = {};
    layer_ = 0;
    stream_->begin_graph();
    recording_ = &graph;
    step_.tokens = graph.rows;
    const auto stop = [&] {
      recording_ = nullptr;
      step_.tokens = live_;
    };
    try {
      run();
      flush();
      stream_->launch("kt_end_step", 1, 1, 32, exchange_.end(tables_.words()));
    } catch (...) {
      stop();
      stream_->drop_graph();
      throw;
    }
    stop();
    graph.graph = stream_->end_graph();
  } while (grow());
}

GpuOps::StepGraph& GpuOps::graph_of(FunctionRef<void()> run) {
  const uint64_t cache = static_cast<const GpuCache&>(*step_.cache).serial();
  const int rows = rows_of_step(), most = longest_of_graph(longest());
  if (tables_version_ != tables_.version()) drop_graphs();
  tables_version_ = tables_.version();
  const auto same = [&](const auto& graph) {
    return graph->cache == cache && graph->rows == rows && graph->longest == most;
  };
  if (const auto found = std::ranges::find_if(graphs_, same); found != graphs_.end()) {
    std::rotate(found, found + 1, graphs_.end());
    return *graphs_.back();
  }
  auto graph = std::make_unique<StepGraph>();
  graph->cache = cache;
  graph->rows = rows;
  graph->longest = most;
  record(*graph, run);
  if (graphs_.size() >= kMostGraphs) graphs_.erase(graphs_.begin());
  graphs_.push_back(std::move(graph));
  return *graphs_.back();
}

void GpuOps::repeat(FunctionRef<void()> run) {
  if (!replayed_) {
    run();
    flush();
    return end_passing();
  }
  StepGraph& graph = graph_of(run);
  tables_.send(*stream_);
  stream_->launch(graph.graph);
  serve(graph);
  if (graph.logit_width > 0)
    std::memcpy(step_.logits, logits_.data(), static_cast<size_t>(live_ * graph.logit_width) * sizeof(float));
  work_ += graph.work;
  for (const Attended& attended : graph.attended)
    for (const AttentionSequence& sequence : step_.sequences)
      count(place(),
            attention_work(step_.cache->shape(attended.plane), attended.heads, {attended.window}, sequence));
  for (const HostTask& task : graph.tasks) tell(task);
}

const int32_t* GpuOps::ids_of(const HostTask& task) const {
  return task.passed ? chosen_of(static_cast<int>(task.ids_of), task.top_k) : exchange_.ids(task.ids_of);
}

GpuOps::PairShares GpuOps::shares(const HostTask& task) {
  const int32_t* const ids = ids_of(task);
  hit_.assign(static_cast<size_t>(task.experts->shape().experts), 0);
  PairShares out;
  for (int64_t i = 0; i < int64_t{live_} * task.top_k; ++i) {
    if (ids[i] < 0) continue;
    const auto id = static_cast<size_t>(ids[i]);
    const bool here = task.passed || (task.hot && task.hot->skip()[id]);
    PairShare& share = here ? out.gpu : out.host;
    ++share.pairs;
    share.hits += hit_[id] == 0;
    hit_[id] = 1;
  }
  return out;
}

// What routers chose, and the work of it.
void GpuOps::tell(const HostTask& task) {
  const PairShares all = shares(task);
  count(kHost, experts_work(*task.experts, all.host.hits, all.host.pairs));
  if (task.hot || task.passed) count(place(), experts_work(*task.experts, all.gpu.hits, all.gpu.pairs));
  if (task.watch) task.watch->on_device(static_cast<uint64_t>(all.gpu.pairs), exchange_.waited());
  if (task.watch)
    task.watch->chose(task.watched,
                      {ids_of(task), static_cast<size_t>(live_) * static_cast<size_t>(task.top_k)});
}

int GpuOps::next_post() {
  const StepParts::Scope scope(&parts_, wait_part_);
  return exchange_.wait(*stream_);
}

// The host's side of a replayed step, to its end. Whatever goes wrong here, kernels that wait for it are let go.
void GpuOps::serve(const StepGraph& graph) {
  try {
    for (;;) {
      const int layer = next_post();
      if (layer == kEndOfStep) break;
      KT_CHECK(layer < std::ssize(graph.tasks), "layer {} of {}", layer, graph.tasks.size());
      run_task(graph.tasks[static_cast<size_t>(layer)]);
      exchange_.answer(layer);
    }
  } catch (...) {
    exchange_.give_up();
    end();
    throw;
  }
  wait();
}

// Of a step that is not replayed: nothing waits for it yet.
void GpuOps::serve_now(const HostTask& task) {
  const int layer = next_post();
  KT_CHECK(layer == layer_, "layer {}, expected {}", layer, layer_);
  run_task(task);
  exchange_.answer(layer);
  tell(task);
}

void GpuOps::run_task(const HostTask& task) {
  const StepParts::Scope scope(&parts_, experts_part_);
  const auto start = std::chrono::steady_clock::now();
  const PairShare mine = shares(task).host;
  parts_.count(experts_work(*task.experts, mine.hits, mine.pairs));
  task.experts->forward({.tokens = live_,
                         .top_k = task.top_k,
                         .input = exchange_.rows(),
                         .ids = exchange_.ids(task.ids_of),
                         .weights = exchange_.weights(),
                         .output = exchange_.out(),
                         .skip = task.hot ? task.hot->skip() : nullptr});
  if (task.watch) task.watch->took(std::chrono::steady_clock::now() - start);
}

}  // namespace kt::inline nn
