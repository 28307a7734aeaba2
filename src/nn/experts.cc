// Shards, packing and checks. The forward is in experts_forward.cc.
#include "nn/experts.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"
#include "base/text.h"
#include "nn/experts_state.h"

namespace kt {
namespace {

// Cuts [0, inter) into `nodes` slices of whole units, as even as they get; later slices may be empty.
std::vector<std::pair<int, int>> cut(int inter, int unit, int nodes) {
  std::vector<std::pair<int, int>> out;
  const int64_t units = ceil_div(int64_t{inter}, unit);
  for (int i = 0; i < nodes; ++i) {
    const auto at = [&](int64_t n) {
      return static_cast<int>(std::min<int64_t>(inter, units * n / nodes * unit));
    };
    out.emplace_back(at(i), at(i + 1));
  }
  return out;
}

MatrixView rows_of(const MatrixView& w, int64_t begin, int64_t count) {
  MatrixView v = w;
  v.n = count;
  const int64_t s = spans(w.format, w.k), u = supers(w.format, w.k);
  v.codes += begin * w.k * code_bytes(w.format.code);
  if (v.scales) v.scales += begin / w.format.span.n * s * scale_bytes(w.format.scale);
  if (v.mins) v.mins += begin * s * min_bytes(w.format.min);
  if (v.supers) v.supers += begin * u * 2;
  if (v.super_mins) v.super_mins += begin * u * 2;
  return v;
}

void check_matrix(const MatrixView& w, const Format& format, int64_t n, int64_t k, int expert,
                  const char* projection) {
  if (w.n != n || w.k != k)
    fail("expert {} {}: expected [{}, {}], got [{}, {}]", expert, projection, n, k, w.n, w.k);
  if (!(w.format == format))
    fail("expert {} {}: expected format {}, got {}", expert, projection, name_of(format), name_of(w.format));
  const bool complete = w.codes && (w.scales || format.scale == Scale::kNone) &&
                        (w.mins || format.min == Min::kNone) && (w.supers || format.scale != Scale::kS8F16) &&
                        (w.super_mins || format.min != Min::kS8F16);
  if (!complete)
    fail("expert {} {}: codes, scales or mins of format {} are missing", expert, projection, name_of(format));
}

void load_bias(std::vector<float>& all, const float* from, int experts, int expert, int64_t width,
               int64_t begin, int64_t count) {
  if (!from) return;
  if (all.empty())
    all.resize(checked_mul(static_cast<size_t>(experts), static_cast<size_t>(width), "biases"));
  std::copy_n(from + begin, count, all.begin() + expert * width);
}

}  // namespace

Experts::Experts(std::shared_ptr<Pool> pool, std::shared_ptr<Workspace> workspace, ExpertsShape shape,
                 ExpertsOptions options)
    : state_(std::make_unique<State>()) {
  if (!pool || !workspace) fail("experts: a pool and a workspace are needed");
  if (shape.experts < 1 || shape.hidden < 1 || shape.inter < 1)
    fail("experts: expected positive sizes, got {} experts, hidden {}, inter {}", shape.experts, shape.hidden,
         shape.inter);
  if (options.max_tokens < 1) fail("experts: max_tokens is {}, expected at least 1", options.max_tokens);
  State& s = *state_;
  s.pool = std::move(pool);
  s.workspace = std::move(workspace);
  s.shape = shape;
  s.options = options;
  s.kernels = options.kernels ? options.kernels : &kt::kernels();
  s.is_loaded.resize(shape.experts);
  check_shape(options.gate_up, shape.inter, shape.hidden, "gate and up");
  check_shape(options.down, shape.hidden, shape.inter, "down");
  const int unit =
      std::lcm(std::lcm(kBlockRows, options.gate_up.span.n), column_granularity(options.down, shape.inter));
  for (const auto& [begin, end] : cut(shape.inter, unit, s.pool->nodes())) {
    Shard shard;
    shard.begin = begin;
    shard.end = end;
    if (begin < end) {
      shard.gate_up =
          packing_for(options.gate_up, end - begin, shape.hidden, s.kernels->fragment, "gate and up");
      shard.down = packing_for(options.down, shape.hidden, end - begin, s.kernels->fragment, "down");
      shard.pair_bytes = 2 * shard.gate_up.block_bytes;
      shard.gate_up_bytes = shard.gate_up.blocks * shard.pair_bytes;
      shard.expert_bytes = shard.gate_up_bytes + shard.down.bytes();
      const int node = s.pool->memory_node(static_cast<int>(s.shards.size()));
      shard.memory =
          Buffer(checked_mul(shard.expert_bytes, static_cast<size_t>(shape.experts), "packed experts"),
                 {.node = node, .huge = options.huge});
    }
    s.shards.push_back(std::move(shard));
  }
}

Experts::~Experts() = default;
Experts::Experts(Experts&&) noexcept = default;

void Experts::load(int expert, const ExpertWeights& w) {
  State& s = *state_;
  const auto [experts, hidden, inter] = s.shape;
  if (expert < 0 || expert >= experts) fail("expert {}: expected 0 to {}", expert, experts - 1);
  check_matrix(w.gate, s.options.gate_up, inter, hidden, expert, "gate");
  check_matrix(w.up, s.options.gate_up, inter, hidden, expert, "up");
  check_matrix(w.down, s.options.down, hidden, inter, expert, "down");
  for (Shard& shard : s.shards) {
    if (shard.begin == shard.end) continue;
    std::byte* to = shard.memory.data() + expert * shard.expert_bytes;
    const int64_t count = shard.end - shard.begin, width = shard.gate_up.blocks * kBlockRows;
    const MatrixView gate = rows_of(w.gate, shard.begin, count), up = rows_of(w.up, shard.begin, count);
    for (int64_t b = 0; b < shard.gate_up.blocks; ++b) {
      pack_block(shard.gate_up, gate, 0, b, to + b * shard.pair_bytes);
      pack_block(shard.gate_up, up, 0, b, to + b * shard.pair_bytes + shard.gate_up.block_bytes);
    }
    for (int64_t b = 0; b < shard.down.blocks; ++b)
      pack_block(shard.down, w.down, shard.begin, b, to + shard.gate_up_bytes + b * shard.down.block_bytes);
    std::lock_guard lock(s.bias_mutex);
    load_bias(shard.gate_bias, w.gate_bias, experts, expert, width, shard.begin, count);
    load_bias(shard.up_bias, w.up_bias, experts, expert, width, shard.begin, count);
  }
  std::lock_guard lock(s.bias_mutex);
  load_bias(s.down_bias, w.down_bias, experts, expert, hidden, 0, hidden);
  s.is_loaded[expert] = 1;
}

void Experts::copy(int from, int to) {
  State& s = *state_;
  for (int e : {from, to})
    if (e < 0 || e >= s.shape.experts) fail("expert {}: expected 0 to {}", e, s.shape.experts - 1);
  if (!s.is_loaded[from]) fail("expert {} is not loaded", from);
  if (from == to) return;
  const auto copy_bias = [&](std::vector<float>& all, int64_t width) {
    if (!all.empty()) std::copy_n(all.begin() + from * width, width, all.begin() + to * width);
  };
  copy_bias(s.down_bias, s.shape.hidden);
  for (Shard& shard : s.shards) {
    if (shard.begin == shard.end) continue;
    std::memcpy(shard.memory.data() + to * shard.expert_bytes, shard.expert(from), shard.expert_bytes);
    copy_bias(shard.gate_bias, shard.gate_up.blocks * kBlockRows);
    copy_bias(shard.up_bias, shard.gate_up.blocks * kBlockRows);
  }
  s.is_loaded[to] = 1;
}

const ExpertsShape& Experts::shape() const { return state_->shape; }
const ExpertsOptions& Experts::options() const { return state_->options; }
const Kernels& Experts::kernels() const { return *state_->kernels; }
bool Experts::loaded(int expert) const {
  return expert >= 0 && expert < state_->shape.experts && state_->is_loaded[expert];
}

size_t Experts::packed_bytes() const {
  size_t bytes = 0;
  for (const Shard& shard : state_->shards) bytes += shard.memory.size();
  return bytes;
}

double Experts::stored_bytes_per_expert() const {
  const auto [experts, hidden, inter] = state_->shape;
  const double each = static_cast<double>(hidden) * inter / 8;
  return each * (2 * stored_bits(state_->options.gate_up, inter, hidden) +
                 stored_bits(state_->options.down, hidden, inter));
}

std::string Experts::describe_plan(int rows) const {
  std::string out;
  for (const Shard& shard : state_->shards) {
    if (shard.begin == shard.end) continue;
    const Plan in = plan_for(*state_->kernels, shard.gate_up, state_->options.precision, std::max(rows, 1));
    const Plan down = plan_for(*state_->kernels, shard.down, state_->options.precision, std::max(rows, 1));
    out += text("{}inter {}..{}: gate and up {}; down {}", out.empty() ? "" : "\n", shard.begin, shard.end,
                in.describe(), down.describe());
  }
  return out;
}

}  // namespace kt
