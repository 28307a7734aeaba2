#include "weights/kt/kt_expert.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>

#include "base/checked.h"
#include "base/error.h"
#include "base/function_ref.h"
#include "formats/floats.h"
#include "weights/plans/output_probe.h"

namespace kt::inline weights {
namespace {

// A matrix [n, k] that is read by rows and cut into parts: into slabs of rows, or into slices of columns.
struct Whole {
  int64_t n = 0, k = 0;
  int slabs = 1, slices = 1;  // one of them is the number of parts, the other 1
  int64_t block = 0;          // rows read at once, a multiple of kKtRowGroup
  FunctionRef<void(int64_t first, int64_t count, float* out)> read;
  KtShape part_shape(int bits) const { return kt_shape(bits, n / slabs, k / slices); }
};

int64_t block_rows(int64_t rows_at_once, int64_t n) {
  return round_up(std::clamp<int64_t>(rows_at_once, 16, std::max<int64_t>(n, 16)), kKtRowGroup);
}

// To the nearest bf16, as f32. NaN stays NaN, so that whoever quantises can refuse it.
void round_to_bf16(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
    values[i] = std::bit_cast<float>((bits & 0x7FFFFFFF) > 0x7F800000 ? bits : rounded);
  }
}

void check_matrix(const StoredMatrix& matrix, int64_t n, int64_t k) {
  if (matrix.n != n || matrix.k != k)
    fail("{}: expected [{}, {}], the source has [{}, {}]", matrix.name, n, k, matrix.n, matrix.k);
}

// The converter of one projection; buffers are the worker's.
class Writer {
 public:
  Writer(const KtExpertJob& job, ShardOutput& out, Scratch& scratch)
      : job_(job), out_(out), scratch_(scratch) {
    if (job.report) probe_.emplace(job.model.hidden, job.model.inter);
  }

  void write(Projection projection, WeightError& error);
  std::optional<OutputProbe>& probe() { return probe_; }

 private:
  void write_parts(const Whole& whole, Projection projection, bool backward, WeightError& error,
                   std::string_view name);
  void quantise_block(const Whole& whole, const KtShape& shape, int64_t row, int64_t count,
                      WeightError& error, std::string_view name);
  void probe_block(const Whole& whole, const KtShape& shape, Projection projection, int64_t whole_row,
                   int64_t row, int64_t count);
  size_t tensor_of(Projection projection, bool backward, int part) const;
  std::span<std::byte> packed_of(const KtShape& shape, int slice) {
    return std::span(scratch_.packed)
        .subspan(shape.weight_bytes * static_cast<size_t>(slice), shape.weight_bytes);
  }
  std::span<float> scales_of(const KtShape& shape, int slice) {
    const auto count = static_cast<size_t>(shape.n_pad);
    return std::span(scratch_.scales).subspan(count * static_cast<size_t>(slice), count);
  }

  const KtExpertJob& job_;
  ShardOutput& out_;
  Scratch& scratch_;
  std::optional<OutputProbe> probe_;
  std::vector<uint8_t> codes_;  // [block, k of a part], for the probe
};

size_t Writer::tensor_of(Projection projection, bool backward, int part) const {
  const int copies = job_.model.backward ? 2 : 1;
  const int matrix = static_cast<int>(projection) * copies + (backward ? 1 : 0);
  return job_.first_tensor + 2 * static_cast<size_t>(matrix * job_.model.parts + part);
}

void Writer::quantise_block(const Whole& whole, const KtShape& shape, int64_t row, int64_t count,
                            WeightError& error, std::string_view name) {
  for (int slice = 0; slice < whole.slices; ++slice) {
    kt_quantise_rows(shape, job_.rounding, row, count, scratch_.values.data() + slice * shape.k, whole.k,
                     packed_of(shape, slice), scales_of(shape, slice), error, name);
  }
}

void Writer::probe_block(const Whole& whole, const KtShape& shape, Projection projection, int64_t whole_row,
                         int64_t row, int64_t count) {
  float* stored = scratch_.values.data() + whole.block * whole.k;
  codes_.resize(static_cast<size_t>(whole.block * shape.k));
  const int bias = shape.bits == 4 ? 8 : 0;
  for (int slice = 0; slice < whole.slices; ++slice) {
    kt_unpack_rows(shape, packed_of(shape, slice), row, count, codes_.data(), shape.k);
    for (int64_t i = 0; i < count; ++i) {
      const float scale = scales_of(shape, slice)[static_cast<size_t>(row + i)] * (shape.bits == 4 ? 16 : 1);
      const uint8_t* codes = codes_.data() + i * shape.k;
      float* to = stored + i * whole.k + slice * shape.k;
      for (int64_t j = 0; j < shape.k; ++j) {
        const int code = shape.bits == 4 ? codes[j] : static_cast<int8_t>(codes[j]);
        to[j] = static_cast<float>(code - bias) * scale;
      }
    }
  }
  probe_->add_rows(projection, whole_row, count, scratch_.values.data(), stored);
}

void Writer::write_parts(const Whole& whole, Projection projection, bool backward, WeightError& error,
                         std::string_view name) {
  const KtShape shape = whole.part_shape(job_.model.bits);
  const bool probing = probe_ && !backward;
  const auto grow = [](auto& buffer, int64_t size) {
    if (std::ssize(buffer) < size) buffer.resize(static_cast<size_t>(size));
  };
  grow(scratch_.values, whole.block * whole.k * (probing ? 2 : 1));
  grow(scratch_.packed, static_cast<int64_t>(shape.weight_bytes) * whole.slices);
  grow(scratch_.scales, shape.n_pad * whole.slices);
  for (int slab = 0; slab < whole.slabs; ++slab) {
    for (int64_t row = 0; row < shape.n; row += whole.block) {
      const int64_t count = std::min(whole.block, shape.n - row);
      const int64_t whole_row = slab * shape.n + row;
      whole.read(whole_row, count, scratch_.values.data());
      quantise_block(whole, shape, row, count, error, name);
      if (probing) probe_block(whole, shape, projection, whole_row, row, count);
    }
    for (int slice = 0; slice < whole.slices; ++slice) {
      const size_t tensor = tensor_of(projection, backward, slab + slice);
      out_.write(tensor, 0, packed_of(shape, slice));
      out_.write(tensor + 1, 0, std::as_bytes(scales_of(shape, slice)));
    }
  }
}

void Writer::write(Projection projection, WeightError& error) {
  const bool down = projection == Projection::kDown;
  const int parts = job_.model.parts;
  const int64_t n = down ? job_.model.hidden : job_.model.inter;
  const int64_t k = down ? job_.model.inter : job_.model.hidden;
  const std::unique_ptr<StoredMatrix> matrix = job_.source->at(job_.layer, job_.expert, projection);
  check_matrix(*matrix, n, k);
  const bool exact = matrix->format.code == Code::kBf16;
  const bool keep = job_.model.backward;
  if (keep) scratch_.more.resize(static_cast<size_t>(n * k) * sizeof(bf16));
  // bf16 [k, n]: exact, because that is what all values were rounded to.
  const auto transposed = [&](int64_t row, int64_t column) {
    return scratch_.more.data() + (row * n + column) * static_cast<int64_t>(sizeof(bf16));
  };
  const auto read = [&](int64_t first, int64_t count, float* out) {
    matrix->values(first, count, out);
    if (!exact) round_to_bf16(out, count * k);
    for (int64_t j = 0; keep && j < k; ++j) {
      for (int64_t i = 0; i < count; ++i) {
        const auto bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(out[i * k + j]) >> 16);
        std::memcpy(transposed(j, first + i), &bits, sizeof bits);
      }
    }
  };
  write_parts({.n = n,
               .k = k,
               .slabs = down ? 1 : parts,
               .slices = down ? parts : 1,
               .block = block_rows(matrix->rows_at_once(), n),
               .read = read},
              projection, false, error, matrix->name);
  if (!keep) return;
  const auto read_back = [&](int64_t first, int64_t count, float* out) {
    for (int64_t i = 0; i < count * n; ++i) {
      uint16_t bits;
      std::memcpy(&bits, transposed(first, i), sizeof bits);
      out[i] = to_f32(bf16{bits});
    }
  };
  WeightError ignored;
  write_parts({.n = k,
               .k = n,
               .slabs = down ? parts : 1,
               .slices = down ? 1 : parts,
               .block = block_rows(0, k),
               .read = read_back},
              projection, true, ignored, matrix->name);
}

}  // namespace

uint64_t kt_expert_scratch(const KtExpertJob& job) {
  const KtModel& model = job.model;
  const auto hidden = static_cast<uint64_t>(model.hidden), inter = static_cast<uint64_t>(model.inter);
  uint64_t values = 0, packed = 0, scales = 0;
  for (const Projection projection : kProjections) {
    const bool down = projection == Projection::kDown;
    const auto matrix = job.source->at(job.layer, job.expert, projection);
    const auto block = static_cast<uint64_t>(block_rows(matrix->rows_at_once(), matrix->n));
    values = std::max(values, block * static_cast<uint64_t>(matrix->k));
    for (const bool backward : {false, true}) {
      if (backward && !model.backward) continue;
      const KtShape shape = kt_part_shape(model, {.projection = projection, .backward = backward});
      const uint64_t at_once = down != backward ? static_cast<uint64_t>(model.parts) : 1;
      packed = std::max(packed, shape.weight_bytes * at_once);
      scales = std::max(scales, shape.scale_bytes * at_once);
      if (backward) values = std::max(values, 16 * (down ? hidden : inter));
    }
  }
  // A source may hold its own codes of a block, and the probe a second block and its codes.
  uint64_t out = values * sizeof(float) * (job.report ? 3 : 2) + packed + scales;
  if (model.backward) out += hidden * inter * sizeof(bf16);
  if (job.report) out += values + OutputProbe::kInputs * sizeof(float) * (3 * hidden + 4 * inter);
  return out;
}

void kt_write_expert(const KtExpertJob& job, ShardOutput& out, Scratch& scratch, PieceReport& report) {
  Writer writer(job, out, scratch);
  writer.write(Projection::kGate, report.gate);
  writer.write(Projection::kUp, report.up);
  writer.write(Projection::kDown, report.down);
  if (writer.probe()) report.output = writer.probe()->error();
}

}  // namespace kt::inline weights
