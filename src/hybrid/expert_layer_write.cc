// Weights of a slot back out of memory, cut for tensor-parallel ranks: gate and up by rows, down by columns.
// Row blocks are unpacked and written by all workers; codes that a GPU reads as they are are moved, the
// others become bf16.
#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "formats/floats.h"
#include "hybrid/expert_layer_state.h"

namespace kt::inline hybrid {
namespace {

constexpr int64_t kBlocksOfItem = 4;

// What the buffers of a method hold.
struct BufferKind {
  std::string_view method;
  Code code;
  Scale scale;      // in memory
  int scale_bytes;  // in the buffers; e8m0 of 2 bytes is bf16
};
constexpr BufferKind kBf16Kind{"", Code::kBf16, Scale::kNone, 0};
constexpr BufferKind kKinds[] = {
    {"FP8", Code::kE4m3, Scale::kF32, 4},    {"FP8_PERCHANNEL", Code::kE4m3, Scale::kF32, 4},
    {"RAWINT4", Code::kU4, Scale::kBf16, 2}, {"MXFP8", Code::kE4m3, Scale::kE8m0, 1},
    {"MXFP4", Code::kE2m1, Scale::kE8m0, 2},
};

// How one expert is cut.
struct Cut {
  BufferKind kind;
  Format gate, up, down;
  int64_t hidden = 0, inter = 0;
  int ranks = 1;

  int64_t share() const { return inter / ranks; }  // of `inter`
  int64_t row_bytes(int64_t k) const { return k * code_bits(kind.code) / 8; }
  int64_t scale_row(const Format& format, int64_t k) const { return spans(format, k) * kind.scale_bytes; }
  int64_t scale_rows(const Format& format, int64_t n) const { return ceil_div<int64_t>(n, format.span.n); }
};

void check_cut(const Cut& cut, const ExpertLayerOptions& o) {
  const auto refuse = [&](std::string_view why) {
    fail("layer {}: method {}: an intermediate size of {} for {} ranks is {} each, {}", o.layer, o.method,
         cut.inter, cut.ranks, static_cast<double>(cut.inter) / cut.ranks, why);
  };
  if (cut.ranks != 1 && cut.ranks != 2 && cut.ranks != 4 && cut.ranks != 8)
    fail("layer {}: {} ranks, expected 1, 2, 4 or 8", o.layer, cut.ranks);
  if (cut.inter % cut.ranks != 0) refuse("expected a whole number");
  if (cut.kind.code == Code::kBf16) return;
  for (const Format& format : {cut.gate, cut.up, cut.down})
    if (format.code != cut.kind.code || format.scale != cut.kind.scale || format.min != Min::kNone)
      fail_as(ErrorKind::kUnsupported, "layer {}: method {} has no buffers for weights of format {}", o.layer,
              o.method, name_of(format));
  if (!(cut.gate == cut.up))  // one buffer holds the scales of both
    fail_as(ErrorKind::kUnsupported, "layer {}: method {} has no buffers for gate as {} and up as {}",
            o.layer, o.method, name_of(cut.gate), name_of(cut.up));
  for (const int step : {cut.gate.span.n, cut.down.span.k})
    if (step > 1 && cut.share() % step != 0) refuse(text("expected a multiple of {}", step));
  if (code_bits(cut.kind.code) == 4 && (cut.share() % 2 != 0 || cut.hidden % 2 != 0))
    refuse(text("two 4-bit codes share a byte, and hidden is {}", cut.hidden));
}

void write_nibbles(const uint8_t* codes, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count / 2; ++i)
    out[i] = static_cast<uint8_t>((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
}

void write_scales(const uint8_t* scales, const BufferKind& kind, int64_t count, std::byte* out) {
  if (kind.scale_bytes == scale_bytes(kind.scale)) {
    std::memcpy(out, scales, static_cast<size_t>(count * kind.scale_bytes));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const bf16 scale = to_bf16(e8m0_to_f32(scales[i]));  // exact
    std::memcpy(out + i * 2, &scale, sizeof scale);
  }
}

// A row block in plain order, and its codes as the buffers have them.
class Block {
 public:
  Block(const Cut& cut, const Experts& experts, int expert) : cut_(cut), experts_(experts), expert_(expert) {}

  void read(ExpertPart part, int64_t block) {
    rows_ = experts_.read_block(expert_, part, block, plain_);
    if (cut_.kind.code != Code::kBf16 || plain_.format.code == Code::kBf16) return;
    MatrixView view = plain_.view();
    view.n = rows_;
    wide_.resize(static_cast<size_t>(rows_ * plain_.k));
    dequantise(view, wide_);
  }
  int64_t rows() const { return rows_; }
  const Matrix& plain() const { return plain_; }

  // Columns [first, first + count) of a row.
  void write_codes(int64_t row, int64_t first, int64_t count, std::byte* out) const {
    const int64_t at = row * plain_.k + first;
    if (cut_.kind.code != plain_.format.code) {
      experts_.kernels().store(out, Real::kBf16, wide_.data() + at, static_cast<int>(count));
    } else if (code_bits(cut_.kind.code) == 4) {
      write_nibbles(plain_.codes.data() + at, count, reinterpret_cast<uint8_t*>(out));
    } else {
      const int size = code_bytes(cut_.kind.code);
      std::memcpy(out, plain_.codes.data() + at * size, static_cast<size_t>(count * size));
    }
  }
  void write_row_scales(int64_t row, int64_t first_span, int64_t count, std::byte* out) const {
    const int64_t at = (row * spans(plain_.format, plain_.k) + first_span) * scale_bytes(cut_.kind.scale);
    write_scales(plain_.scales.data() + at, cut_.kind, count, out);
  }

 private:
  const Cut& cut_;
  const Experts& experts_;
  int expert_;
  Matrix plain_;
  std::vector<float> wide_;
  int64_t rows_ = 0;
};

void write_in(const Cut& cut, Block& block, ExpertPart part, int64_t index,
              std::span<const ExpertBuffers> ranks) {
  block.read(part, index);
  const Format& format = part == ExpertPart::kUp ? cut.up : cut.gate;
  const int64_t half = part == ExpertPart::kUp ? 1 : 0;
  for (int64_t r = 0; r < block.rows(); ++r) {
    const int64_t row = index * kBlockRows + r, mine = row % cut.share();
    const ExpertBuffers& to = ranks[static_cast<size_t>(row / cut.share())];
    block.write_codes(
        r, 0, cut.hidden,
        static_cast<std::byte*>(to.w13) + (half * cut.share() + mine) * cut.row_bytes(cut.hidden));
    if (!cut.kind.scale_bytes || mine % format.span.n != 0) continue;
    const int64_t scale_row = half * cut.scale_rows(format, cut.share()) + mine / format.span.n;
    block.write_row_scales(
        r, 0, spans(format, cut.hidden),
        static_cast<std::byte*>(to.w13_scale) + scale_row * cut.scale_row(format, cut.hidden));
  }
}

void write_down(const Cut& cut, Block& block, int64_t index, std::span<const ExpertBuffers> ranks) {
  block.read(ExpertPart::kDown, index);
  const Format& format = cut.down;
  const int64_t count = spans(format, cut.share());
  for (int64_t r = 0; r < block.rows(); ++r) {
    const int64_t row = index * kBlockRows + r;
    for (int64_t rank = 0; rank < cut.ranks; ++rank) {
      const ExpertBuffers& to = ranks[static_cast<size_t>(rank)];
      const int64_t first = rank * cut.share();
      block.write_codes(r, first, cut.share(),
                        static_cast<std::byte*>(to.w2) + row * cut.row_bytes(cut.share()));
      if (!cut.kind.scale_bytes || row % format.span.n != 0) continue;
      block.write_row_scales(
          r, format.span.k ? first / format.span.k : 0, count,
          static_cast<std::byte*>(to.w2_scale) + row / format.span.n * cut.scale_row(format, cut.share()));
    }
  }
}

void write_expert(const Cut& cut, const Experts& experts, int expert, std::span<const ExpertBuffers> ranks,
                  Pool& pool) {
  const int64_t in_blocks = ceil_div<int64_t>(cut.inter, kBlockRows),
                down_blocks = ceil_div<int64_t>(cut.hidden, kBlockRows), all = 2 * in_blocks + down_blocks;
  run_items(pool, ceil_div(all, kBlocksOfItem), [&](int64_t item) {
    Block block(cut, experts, expert);
    for (int64_t i = item * kBlocksOfItem; i < std::min(all, (item + 1) * kBlocksOfItem); ++i) {
      if (i < in_blocks)
        write_in(cut, block, ExpertPart::kGate, i, ranks);
      else if (i < 2 * in_blocks)
        write_in(cut, block, ExpertPart::kUp, i - in_blocks, ranks);
      else
        write_down(cut, block, i - 2 * in_blocks, ranks);
    }
  });
}

// As loaded, or before that as values would be.
Cut cut_for(const ExpertLayerOptions& o, const WeightMethod& method, const std::optional<Experts>& experts,
            int ranks) {
  Cut cut{.kind = kBf16Kind, .hidden = o.shape.hidden, .inter = o.shape.inter, .ranks = ranks};
  for (const BufferKind& kind : kKinds)
    if (kind.method == method.name) cut.kind = kind;
  if (experts) {
    cut.gate = experts->options().gate;
    cut.up = experts->options().up;
    cut.down = experts->options().down;
  } else {
    const MethodFormats formats = formats_of(method, cut.hidden, cut.inter, o.group_size, o.zero_point);
    cut.gate = cut.up = formats.gate_up;
    cut.down = formats.down;
  }
  check_cut(cut, o);
  return cut;
}

Cut cut_of(const ExpertLayer::State& s, int ranks) {
  s.team->check_process();
  const std::shared_lock lock(s.in_use);
  return cut_for(s.options, *s.method, s.experts, ranks);
}

void check_buffers(const Cut& cut, std::span<const ExpertBuffers> ranks, int layer) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const ExpertBuffers& to = ranks[rank];
    const bool scales = cut.kind.scale_bytes > 0;
    const std::string_view missing = !to.w13                   ? "w13"
                                     : !to.w2                  ? "w2"
                                     : scales && !to.w13_scale ? "the scales of w13"
                                     : scales && !to.w2_scale  ? "the scales of w2"
                                                               : "";
    if (!missing.empty()) fail("layer {}: rank {}: a null address for {}", layer, rank, missing);
  }
}

void write_now(const ExpertLayer::State& s, int expert, std::span<const ExpertBuffers> ranks) {
  const std::shared_lock lock(s.in_use);
  const Cut cut = cut_for(s.options, *s.method, s.experts, static_cast<int>(ranks.size()));
  write_expert(cut, *s.experts, expert, ranks, *s.team->pool());
}

}  // namespace

void ExpertLayer::submit_write(int expert, std::span<const ExpertBuffers> ranks) {
  State& s = *state_;
  const ExpertLayerOptions& o = s.options;
  s.team->check_process();
  {
    const std::shared_lock lock(s.in_use);
    if (!s.experts) fail("layer {}: no weights are loaded", o.layer);
    if (expert < 0 || expert >= o.shape.experts)
      fail("layer {}: expert {}, expected 0 to {}", o.layer, expert, o.shape.experts - 1);
    check_buffers(cut_for(o, *s.method, s.experts, static_cast<int>(ranks.size())), ranks, o.layer);
  }
  if (s.team->inside()) return write_now(s, expert, ranks);
  const uint64_t ticket =
      s.team->submit([state = state_, expert, buffers = std::vector(ranks.begin(), ranks.end())] {
        try {
          write_now(*state, expert, buffers);
        } catch (...) {
          state->writes.keep(std::current_exception());
        }
      });
  uint64_t last = s.last_write;
  while (last < ticket && !s.last_write.compare_exchange_weak(last, ticket)) {
  }
}

void ExpertLayer::sync_write() {
  State& s = *state_;
  s.team->check_outside();
  s.team->wait(s.last_write);
  s.writes.rethrow();
}

size_t ExpertLayer::w13_bytes(int ranks) const {
  const Cut cut = cut_of(*state_, ranks);
  return static_cast<size_t>(2 * cut.share() * cut.row_bytes(cut.hidden));
}

size_t ExpertLayer::w13_scale_bytes(int ranks) const {
  const Cut cut = cut_of(*state_, ranks);
  return static_cast<size_t>(2 * cut.scale_rows(cut.gate, cut.share()) * cut.scale_row(cut.gate, cut.hidden));
}

size_t ExpertLayer::w2_bytes(int ranks) const {
  const Cut cut = cut_of(*state_, ranks);
  return static_cast<size_t>(cut.hidden * cut.row_bytes(cut.share()));
}

size_t ExpertLayer::w2_scale_bytes(int ranks) const {
  const Cut cut = cut_of(*state_, ranks);
  return static_cast<size_t>(cut.scale_rows(cut.down, cut.hidden) * cut.scale_row(cut.down, cut.share()));
}

}  // namespace kt::inline hybrid
