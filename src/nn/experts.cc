// Shards, packing and checks. The forward is in experts_forward.cc.
#include "nn/experts.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"
#include "base/text.h"
#include "nn/experts_state.h"

namespace kt::inline nn {
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
  check_matrix(given(w.gate), options.gate, inter, hidden, expert, "gate");
  check_matrix(given(w.up), options.up, inter, hidden, expert, "up");
  check_matrix(given(w.down), options.down, hidden, inter, expert, "down");
}

Packing packing_of_piece(Packing packing, int64_t n) {
  packing.n = n;
  packing.blocks = ceil_div(n, kBlockRows);
  return packing;
}

// Where an expert's blocks stand on a node, and how many bytes they are.
void lay_out(Shard& shard) {
  StoredBlocks &gate = shard.gate, &up = shard.up, &down = shard.down;
  const size_t gate_block = gate.packing.block_bytes, up_block = up.packing.block_bytes;
  if (shard.paired) {
    gate.stride = up.stride = gate_block + up_block;
    up.first = gate_block;
  } else {
    gate.stride = gate_block;
    up.stride = up_block;
    up.first = gate.packing.bytes();
  }
  down.first = gate.packing.bytes() + up.packing.bytes();
  down.stride = down.packing.block_bytes;
  shard.expert_bytes = down.first + down.packing.bytes();
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
  s.kernels = options.kernels ? options.kernels : &kt::best_kernels();
  s.is_loaded.resize(shape.experts);
  check_shape(options.gate, shape.inter, shape.hidden, "gate");
  check_shape(options.up, shape.inter, shape.hidden, "up");
  check_shape(options.down, shape.hidden, shape.inter, "down");
  s.padding = padded_parts(options, shape.inter);
  const Format packed_down = s.padding.down(options.down);
  const int width = static_cast<int>(s.padding.width());
  const int rows = std::lcm(std::lcm(kBlockRows, options.gate.span.n), options.up.span.n),
            unit = std::lcm(rows, column_granularity(packed_down, width));
  for (const auto& [begin, end] : cut(width, unit, s.pool->nodes())) {
    Shard shard;
    shard.begin = begin;
    shard.end = end;
    if (!shard.empty()) {
      const Fragment& fragment = s.kernels->fragment;
      shard.gate.packing = packing_for(options.gate, end - begin, shape.hidden, fragment, "gate");
      shard.up.packing = packing_for(options.up, end - begin, shape.hidden, fragment, "up");
      shard.down.packing = packing_for(packed_down, shape.hidden, end - begin, fragment, "down");
      shard.paired = options.gate == options.up;
      lay_out(shard);
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
void Experts::State::pack_in(int expert, StoredBlocks Shard::* into, int64_t first, const MatrixView& piece) {
  for (Shard& shard : shards) {
    if (shard.empty()) continue;
    const StoredBlocks& blocks = shard.*into;
    const Packing packing = packing_of_piece(blocks.packing, piece.n);
    for (int64_t row = std::max<int64_t>(first, shard.begin);
         row < std::min<int64_t>(first + piece.n, shard.end); row += kBlockRows)
      pack_block(packing, piece, 0, (row - first) / kBlockRows,
                 shard.expert(expert) + blocks.at((row - shard.begin) / kBlockRows));
  }
}

void Experts::State::pack_down(int expert, int64_t first, const MatrixView& piece) {
  for (Shard& shard : shards) {
    if (shard.empty()) continue;
    const Packing packing = packing_of_piece(shard.down.packing, piece.n);
    for (int64_t b = 0; b < packing.blocks; ++b)
      pack_block(packing, piece, shard.begin, b,
                 shard.expert(expert) + shard.down.at(first / kBlockRows + b));
  }
}

void Experts::State::finish_load(int expert, const Biases& biases) {
  std::vector<float> wide_gate, wide_up;
  const float *gate = biases.gate, *up = biases.up;
  if (padding) {
    wide_gate = padding.wide_bias(gate);
    wide_up = padding.wide_bias(up);
    gate = gate ? wide_gate.data() : nullptr;
    up = up ? wide_up.data() : nullptr;
  }
  std::lock_guard lock(bias_mutex);
  for (Shard& shard : shards) {
    if (shard.empty()) continue;
    const int64_t count = shard.end - shard.begin;
    load_bias(shard.gate_bias, gate, shape.experts, expert, shard.width(), shard.begin, count);
    load_bias(shard.up_bias, up, shape.experts, expert, shard.width(), shard.begin, count);
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
  if (s.padding) {
    load(expert, ExpertRows{.gate = reader_of_rows(w.gate),
                            .up = reader_of_rows(w.up),
                            .down = reader_of_rows(w.down),
                            .gate_bias = w.gate_bias,
                            .up_bias = w.up_bias,
                            .down_bias = w.down_bias});
    return;
  }
  s.pack_in(expert, &Shard::gate, 0, w.gate);
  s.pack_in(expert, &Shard::up, 0, w.up);
  s.pack_down(expert, 0, w.down);
  s.finish_load(expert, {w.gate_bias, w.up_bias, w.down_bias});
}

void Experts::State::load_pieces(int expert, const ExpertRows& w, WalkPieces walk) {
  check_expert(w, shape, options, expert);
  const auto walk_in = [&](const RowReader& reader, StoredBlocks Shard::* into) {
    walk(padding ? padding.wide_rows(reader) : reader,
         [&](int64_t first, const MatrixView& piece) { pack_in(expert, into, first, piece); });
  };
  walk_in(w.gate, &Shard::gate);
  walk_in(w.up, &Shard::up);
  walk(padding ? padding.wide_columns(w.down) : w.down,
       [&](int64_t first, const MatrixView& piece) { pack_down(expert, first, piece); });
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
    if (shard.empty()) continue;
    std::memcpy(shard.expert(to), shard.expert(from), shard.expert_bytes);
    copy_bias(shard.gate_bias, shard.width());
    copy_bias(shard.up_bias, shard.width());
  }
  s.is_loaded[to] = 1;
}

int64_t Experts::read_block(int expert, ExpertPart part, int64_t block, Matrix& out) const {
  const State& s = *state_;
  const bool down = part == ExpertPart::kDown, up = part == ExpertPart::kUp;
  const int64_t n = down ? s.shape.hidden : s.shape.inter, k = down ? s.shape.inter : s.shape.hidden;
  const int64_t first = block * kBlockRows, rows = std::min<int64_t>(kBlockRows, n - first);
  if (!loaded(expert)) fail("expert {} is not loaded", expert);
  KT_CHECK(block >= 0 && rows > 0, "block {} of {} rows", block, n);
  Format format = down ? s.options.down : up ? s.options.up : s.options.gate;
  format.span.n = 1;
  if (!(out.format == format) || out.n != kBlockRows || out.k != k) out = Matrix(format, kBlockRows, k);
  if (!s.padding) {
    s.read_packed(expert, part, block, rows, out);
  } else if (down) {
    Matrix wide(s.padding.down(format), kBlockRows, s.padding.width());
    s.read_packed(expert, part, block, rows, wide);
    s.padding.narrow_columns(wide, rows, out);
  } else {
    Matrix wide(format, kBlockRows, k);
    int64_t read = -1;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = s.padding.at(first + row);
      if (at / kBlockRows != read) s.read_packed(expert, part, read = at / kBlockRows, kBlockRows, wide);
      PaddedParts::narrow_row(wide, at % kBlockRows, out, row);
    }
  }
  return rows;
}

void Experts::State::read_packed(int expert, ExpertPart part, int64_t block, int64_t rows,
                                 Matrix& out) const {
  const int64_t first = block * kBlockRows;
  for (const Shard& shard : shards) {
    if (shard.empty()) continue;
    if (part == ExpertPart::kDown) {
      unpack_block(shard.down.packing, shard.block(expert, shard.down, block), rows, shard.begin, out);
    } else if (first >= shard.begin && first < shard.end) {
      const StoredBlocks& blocks = part == ExpertPart::kUp ? shard.up : shard.gate;
      unpack_block(blocks.packing, shard.block(expert, blocks, (first - shard.begin) / kBlockRows), rows, 0,
                   out);
    }
  }
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
  const ExpertsOptions& formats = state_->options;
  return each * (stored_bits(formats.gate, inter, hidden) + stored_bits(formats.up, inter, hidden) +
                 stored_bits(formats.down, hidden, inter));
}

std::string Experts::describe_plan(int rows) const {
  std::string out;
  const auto plan = [&](const StoredBlocks& of) {
    return plan_for(*state_->kernels, of.packing, state_->options.precision, std::max(rows, 1)).describe();
  };
  for (const Shard& shard : state_->shards) {
    if (shard.empty()) continue;
    const std::string in = shard.paired ? text("gate and up {}", plan(shard.gate))
                                        : text("gate {}; up {}", plan(shard.gate), plan(shard.up));
    out += text("{}inter {}..{}: {}; down {}", out.empty() ? "" : "\n", shard.begin, shard.end, in,
                plan(shard.down));
  }
  return out;
}

}  // namespace kt::inline nn
