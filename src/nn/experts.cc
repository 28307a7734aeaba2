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

// One of an expert's matrices, as it came.
struct Given {
  const Format& format;
  int64_t n, k;
};

void check_matrix(const Given& w, const Format& format, int64_t n, int64_t k, int expert,
                  const char* projection) {
  if (w.n != n || w.k != k)
    fail("expert {} {}: expected [{}, {}], got [{}, {}]", expert, projection, n, k, w.n, w.k);
  if (!(w.format == format))
    fail("expert {} {}: expected format {}, got {}", expert, projection, name_of(format), name_of(w.format));
}

void check_complete(const MatrixView& w, int expert, const char* projection) {
  const Format& format = w.format;
  const bool complete = w.codes && (w.scales || format.scale == Scale::kNone) &&
                        (w.mins || format.min == Min::kNone) && (w.supers || format.scale != Scale::kS8F16) &&
                        (w.super_mins || format.min != Min::kS8F16);
  if (!complete)
    fail("expert {} {}: codes, scales or mins of format {} are missing", expert, projection, name_of(format));
}

template <typename Weights>
void check_expert(const Weights& w, const ExpertsShape& shape, const ExpertsOptions& options, int expert) {
  const auto [experts, hidden, inter] = shape;
  if (expert < 0 || expert >= experts) fail("expert {}: expected 0 to {}", expert, experts - 1);
  KT_CHECK(!options.sizes_only, "experts without memory");
  const auto given = [](const auto& m) { return Given{m.format, m.n, m.k}; };
  check_matrix(given(w.gate), options.gate_up, inter, hidden, expert, "gate");
  check_matrix(given(w.up), options.gate_up, inter, hidden, expert, "up");
  check_matrix(given(w.down), options.down, hidden, inter, expert, "down");
}

Packing packing_of_piece(Packing packing, int64_t n) {
  packing.n = n;
  packing.blocks = ceil_div(n, kBlockRows);
  return packing;
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
      const size_t bytes =
          checked_mul(shard.expert_bytes, static_cast<size_t>(shape.experts), "packed experts");
      const int node = s.pool->memory_node(static_cast<int>(s.shards.size()));
      if (!options.sizes_only) shard.memory = Buffer(bytes, {.node = node, .huge = options.huge});
    }
    s.shards.push_back(std::move(shard));
  }
}

Experts::~Experts() = default;
Experts::Experts(Experts&&) noexcept = default;

// Shards begin with a row block of the matrix: every block of a piece lies in one of them.
void Experts::State::pack_in(int expert, Half half, int64_t first, const MatrixView& piece) {
  for (Shard& shard : shards) {
    if (shard.begin == shard.end) continue;
    const Packing packing = packing_of_piece(shard.gate_up, piece.n);
    std::byte* to = shard.memory.data() + static_cast<size_t>(expert) * shard.expert_bytes +
                    (half == Half::kUp ? packing.block_bytes : 0);
    for (int64_t row = std::max<int64_t>(first, shard.begin);
         row < std::min<int64_t>(first + piece.n, shard.end); row += kBlockRows)
      pack_block(packing, piece, 0, (row - first) / kBlockRows,
                 to + static_cast<size_t>((row - shard.begin) / kBlockRows) * shard.pair_bytes);
  }
}

void Experts::State::pack_down(int expert, int64_t first, const MatrixView& piece) {
  for (Shard& shard : shards) {
    if (shard.begin == shard.end) continue;
    const Packing packing = packing_of_piece(shard.down, piece.n);
    std::byte* to =
        shard.memory.data() + static_cast<size_t>(expert) * shard.expert_bytes + shard.gate_up_bytes;
    for (int64_t b = 0; b < packing.blocks; ++b)
      pack_block(packing, piece, shard.begin, b,
                 to + static_cast<size_t>(first / kBlockRows + b) * packing.block_bytes);
  }
}

void Experts::State::finish_load(int expert, const Biases& biases) {
  std::lock_guard lock(bias_mutex);
  for (Shard& shard : shards) {
    if (shard.begin == shard.end) continue;
    const int64_t count = shard.end - shard.begin, width = shard.gate_up.blocks * kBlockRows;
    load_bias(shard.gate_bias, biases.gate, shape.experts, expert, width, shard.begin, count);
    load_bias(shard.up_bias, biases.up, shape.experts, expert, width, shard.begin, count);
  }
  load_bias(down_bias, biases.down, shape.experts, expert, shape.hidden, 0, shape.hidden);
  is_loaded[expert] = 1;
}

void Experts::load(int expert, const ExpertWeights& w) {
  State& s = *state_;
  check_expert(w, s.shape, s.options, expert);
  check_complete(w.gate, expert, "gate");
  check_complete(w.up, expert, "up");
  check_complete(w.down, expert, "down");
  s.pack_in(expert, State::Half::kGate, 0, w.gate);
  s.pack_in(expert, State::Half::kUp, 0, w.up);
  s.pack_down(expert, 0, w.down);
  s.finish_load(expert, {w.gate_bias, w.up_bias, w.down_bias});
}

void Experts::State::load_pieces(int expert, const ExpertRows& w, WalkPieces walk) {
  check_expert(w, shape, options, expert);
  walk(w.gate, [&](int64_t first, const MatrixView& piece) { pack_in(expert, Half::kGate, first, piece); });
  walk(w.up, [&](int64_t first, const MatrixView& piece) { pack_in(expert, Half::kUp, first, piece); });
  walk(w.down, [&](int64_t first, const MatrixView& piece) { pack_down(expert, first, piece); });
  finish_load(expert, {w.gate_bias, w.up_bias, w.down_bias});
}

void Experts::load(int expert, const ExpertRows& w) {
  state_->load_pieces(expert, w,
                      [](const RowReader& reader, UsePiece use) { for_pieces(reader, 0, reader.n, use); });
}

void Experts::load_together(int expert, const ExpertRows& w) {
  state_->load_pieces(expert, w,
                      [&](const RowReader& reader, UsePiece use) { for_pieces(*state_->pool, reader, use); });
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

int64_t Experts::read_block(int expert, ExpertPart part, int64_t block, Matrix& out) const {
  const State& s = *state_;
  const bool down = part == ExpertPart::kDown;
  const int64_t n = down ? s.shape.hidden : s.shape.inter, k = down ? s.shape.inter : s.shape.hidden;
  const int64_t first = block * kBlockRows, rows = std::min<int64_t>(kBlockRows, n - first);
  if (!loaded(expert)) fail("expert {} is not loaded", expert);
  KT_CHECK(block >= 0 && rows > 0, "block {} of {} rows", block, n);
  Format format = down ? s.options.down : s.options.gate_up;
  format.span.n = 1;
  if (!(out.format == format) || out.n != kBlockRows || out.k != k) out = Matrix(format, kBlockRows, k);
  for (const Shard& shard : s.shards) {
    if (shard.begin == shard.end) continue;
    const std::byte* from = shard.expert(expert);
    if (down) {
      from += shard.gate_up_bytes + static_cast<size_t>(block) * shard.down.block_bytes;
      unpack_block(shard.down, from, rows, shard.begin, out);
    } else if (first >= shard.begin && first < shard.end) {
      from += static_cast<size_t>((first - shard.begin) / kBlockRows) * shard.pair_bytes;
      unpack_block(shard.gate_up, from + (part == ExpertPart::kUp ? shard.gate_up.block_bytes : 0), rows, 0,
                   out);
    }
  }
  return rows;
}

const ExpertsShape& Experts::shape() const { return state_->shape; }
const ExpertsOptions& Experts::options() const { return state_->options; }
const Kernels& Experts::kernels() const { return *state_->kernels; }
bool Experts::loaded(int expert) const {
  return expert >= 0 && expert < state_->shape.experts && state_->is_loaded[expert];
}

size_t Experts::packed_bytes(int node) const {
  return state_->shards[static_cast<size_t>(node)].expert_bytes * static_cast<size_t>(state_->shape.experts);
}

size_t Experts::packed_bytes() const {
  size_t bytes = 0;
  for (size_t node = 0; node < state_->shards.size(); ++node) bytes += packed_bytes(static_cast<int>(node));
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
