// Weights in the memory of a GPU, as gpu_ops.cc makes and reads them: the CPU's packed bytes, copied. Not for other
// files.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "cuda/device.h"
#include "cuda/kernels/args.h"
#include "nn/linear.h"
#include "nn/ops.h"

namespace kt::inline nn {

// The bytes, and the GPU that has them; without one for plans, which ask sizes only.
struct GpuMemory {
  std::shared_ptr<const Gpu> gpu;
  GpuStream* stream = nullptr;

  // Copies and waits, so that the source may go.
  DeviceBuffer hold(const void* from, size_t bytes, std::string_view what) const {
    if (!gpu || bytes == 0) return {};
    DeviceBuffer out(gpu, bytes, what);
    stream->copy(out.at(), from, bytes);
    stream->wait();
    return out;
  }
};

// Whether kernels read the format: grids and NVFP4 none does.
inline bool gpu_reads(const Format& format) {
  return !is_grid(format.code) && !(format.code == Code::kE2m1 && format.span.k == 16);
}
inline void check_gpu_reads(const Format& format, std::string_view name) {
  if (gpu_reads(format)) return;
  fail_as(ErrorKind::kUnsupported,
          "{}: no kernel of the GPU reads {}: `gpu_experts` 0 leaves experts to the CPU, `linear_format` "
          "q4_k rounds other "
          "matrices as they are loaded, and `gpu` off computes everything where it is",
          name, name_of(format));
}

// The part of a kernel's name that says which code it reads.
inline const char* kernel_word(Code code) {
  constexpr auto kWords = std::to_array<std::pair<Code, const char*>>({{Code::kI8, "i8"},
                                                                       {Code::kU2, "u2"},
                                                                       {Code::kU3, "u3"},
                                                                       {Code::kU4, "u4"},
                                                                       {Code::kU5, "u5"},
                                                                       {Code::kU6, "u6"},
                                                                       {Code::kIq4, "iq4"},
                                                                       {Code::kE2m1, "e2m1"},
                                                                       {Code::kE4m3, "e4m3"},
                                                                       {Code::kBf16, "bf16"},
                                                                       {Code::kF16, "f16"},
                                                                       {Code::kF32, "f32"}});
  for (const auto& [known, word] : kWords)
    if (known == code) return word;
  fail_as(ErrorKind::kInternal, "no kernel reads code {}", static_cast<int>(code));
}

// What kernels are told of a packed matrix whose blocks lie at `blocks`.
inline PackedRows packed_rows(const Packing& packing, const uint8_t* blocks) {
  const Layout& layout = kLayouts[static_cast<size_t>(packing.layout)];
  const Header header = header_of(layout, packing.record_k / packing.span);
  return {.blocks = blocks,
          .block_bytes = static_cast<int64_t>(packing.block_bytes),
          .n = static_cast<int>(packing.n),
          .k = static_cast<int>(packing.k),
          .k_pad = packing.k_pad,
          .span = packing.span,
          .record_k = packing.record_k,
          .header_bytes = packing.header_bytes,
          .bias = packing.format.bias,
          .flip = packing.fragment.unsigned_bytes && packing.format.code == Code::kI8 ? 0x80 : 0,
          .scale = static_cast<int>(layout.scale),
          .min = static_cast<int>(layout.min),
          .supers = header.supers,
          .super_mins = header.super_mins,
          .scales = header.scales,
          .mins = header.mins,
          .record_divisor = divisor_of(packing.record_k / kChunk),
          .span_divisor = divisor_of(std::max(1, packing.span / kChunk))};
}

struct GpuVector final : PlacedVector {
  int64_t count;
  DeviceBuffer memory;

  GpuVector(const GpuMemory& in, std::span<const float> values)
      : count(std::ssize(values)), memory(in.hold(values.data(), values.size_bytes(), "a vector")) {}
  const float* data() const { return memory.as<const float>(); }
  int64_t size() const override { return count; }
  size_t packed_bytes() const override { return 0; }
  size_t packed_bytes(int) const override { return 0; }
  size_t plain_bytes() const override { return static_cast<size_t>(count) * sizeof(float); }
  double stored_bytes() const override { return 0; }
};

struct GpuLinear final : PlacedLinear {
  Packing packing;
  size_t bias_bytes;
  double stored;
  bool rounds = false;  // x to bf16
  DeviceBuffer blocks, bias;

  GpuLinear(const GpuMemory& in, const Linear& from, std::string_view name)
      : packing(from.packing()), bias_bytes(from.bias_bytes()), stored(from.stored_bytes()) {
    check_gpu_reads(packing.format, name);
    if (!in.gpu) return;
    blocks = DeviceBuffer(in.gpu, packing.bytes(), name);
    for (const Linear::Run& run : from.runs())
      in.stream->copy(blocks.at(static_cast<size_t>(run.first_block) * packing.block_bytes), run.bytes.data(),
                      run.bytes.size());
    in.stream->wait();
    bias = in.hold(from.bias().data(), bias_bytes, name);
  }
  // The same of blocks that are packed already.
  GpuLinear(const GpuMemory& in, const Packing& as, std::span<const std::byte> bytes, std::string_view name)
      : packing(as), bias_bytes(0), stored(0), blocks(in.hold(bytes.data(), bytes.size(), name)) {}
  int64_t n() const override { return packing.n; }
  int64_t k() const override { return packing.k; }
  size_t packed_bytes() const override { return packing.bytes(); }
  size_t packed_bytes(int) const override { return 0; }
  size_t device_bytes() const override { return packing.bytes(); }
  size_t plain_bytes() const override { return bias_bytes; }
  double stored_bytes() const override { return stored; }

  PackedRows rows() const { return packed_rows(packing, blocks.at()); }
};

// A gated MLP that every token visits.
struct GpuMlp final : PlacedExperts {
  ExpertsShape sizes;
  Activation activation;
  std::unique_ptr<GpuLinear> gate, up, down;
  Rows gate_rows, up_rows;  // [tokens, inter]

  const ExpertsShape& shape() const override { return sizes; }
  size_t packed_bytes() const override {
    return gate->packed_bytes() + up->packed_bytes() + down->packed_bytes();
  }
  size_t packed_bytes(int) const override { return 0; }
  size_t device_bytes() const override { return packed_bytes(); }
  size_t plain_bytes() const override { return 0; }  // as CpuExperts: who gave the biases counts them
  double stored_bytes() const override {
    return gate->stored_bytes() + up->stored_bytes() + down->stored_bytes();
  }
};

}  // namespace kt::inline nn
