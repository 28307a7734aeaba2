// Copies of some of a layer's routed experts in the memory of a GPU, and what they give: the CPU's packed bytes as they
// are, one piece for each NUMA node that has a slice of every expert, and biases. Tokens find them by ids in device
// memory: the host launches the same for any choice of a router, so that a graph can hold the launches.
#pragma once
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "nn/cpu_weights.h"
#include "nn/gpu_weights.h"

namespace kt::inline nn {

// Steps of at most as many tokens, in which answers are made, take a pair of a token and an expert at a time: each
// reads the expert from the GPU's caches again, and few share one. Larger ones, prompts, sort pairs by expert and round
// to bf16; where precision does not allow that they leave all experts to the CPU.
inline constexpr int kMostHotTokens = 64;
inline constexpr int kRoundTokens =
    512;  // of a prompt at once, where there are few copies: scratch is for as many

class GpuExperts {
 public:
  // Of loaded experts, ids ascending. Errors name `name`. Without a GPU sizes only.
  GpuExperts(const GpuMemory& in, const Experts& from, std::span<const int> hot, std::string_view name);

  // Copies as kernels find them: those of a piece side by side, in the order of their slots, and so their biases.
  struct Piece {
    const uint8_t* blocks = nullptr;
    const float *gate_bias = nullptr, *up_bias = nullptr;  // [slots, width]; null: none
  };
  struct Copies {
    const int32_t* slots = nullptr;  // [experts], on the device; negative: no copy
    int count = 0;                   // at most
    std::vector<Piece> pieces;
    const float* down_bias = nullptr;  // [slots, hidden]; null: none
  };

  int count() const { return held_.count; }
  size_t bytes() const;                                 // packed, of all copies
  const uint8_t* skip() const { return skip_.data(); }  // [experts], of ForwardArgs
  const int32_t* slots() const { return held_.slots; }  // Copies'
  const Copies& held() const { return held_; }

  // Rows of a step on the device. Strides are in floats.
  struct Call {
    int tokens = 0, top_k = 0;
    const float* x = nullptr;
    int64_t x_stride = 0;
    const int32_t* ids = nullptr;    // [tokens, top_k]; below 0 or past the experts: skipped
    const float* weights = nullptr;  // [tokens, top_k]
    float* mid = nullptr;            // mid_floats(), from the first call to the end of the second
    float* out = nullptr;
    int64_t out_stride = 0;
    bool add =
        false;  // to what is in `out`, where the experts of the CPU may have been before; else to zeros
  };
  int64_t mid_floats(int tokens, int top_k) const;
  bool takes(int tokens) const { return count() > 0 && (tokens <= kMostHotTokens || rounds_); }
  // Whether run_many() may have copies of any of the layer's experts.
  bool takes_many() const { return rounds_; }
  // Steps of at most kMostHotTokens: up to the activation, then the sums: what the CPU does may come between the two.
  void run_in(GpuStream& stream, const Call& call) const;
  void run_out(GpuStream& stream, const Call& call) const;
  // Larger ones, `round` tokens at a time: with the copies that are held, or with those that are somewhere just now.
  void run_many(GpuStream& stream, const Call& call) const { run_many(stream, call, held_, kRoundTokens); }
  void run_many(GpuStream& stream, const Call& call, const Copies& copies, int round) const;
  int64_t many_floats(int tokens, int top_k, int copies, int round) const;  // of Call::mid

 private:
  // A node's slice of every expert.
  struct Slice {
    Packing gate, up, down;
    size_t gate_first = 0, up_first = 0, down_first = 0;  // in an expert's bytes
    size_t gate_stride = 0, up_stride = 0;                // of row blocks
    bool paired = true;
    size_t expert_bytes = 0;
    int64_t width = 0;
  };
  ChosenExperts chosen(const Call& call, const Copies& copies) const;
  GateSpec gate_spec() const;
  void launch_in(GpuStream& stream, const Call& call, size_t slice, float* mid) const;
  void hold(const GpuMemory& in, const Experts& from, std::span<const int> hot, std::string_view what);

  // gpu_experts_many.cc
  struct PairProduct;
  struct Round;
  Round round_at(uintptr_t at, int64_t pairs, int copies) const;
  static PackedRows rows_of(const Packing& packing, const uint8_t* blocks, size_t first, size_t stride);
  void multiply_pairs(GpuStream& stream, const Round& round, const Slice& slice, const uint8_t* blocks,
                      std::span<const PairProduct> products) const;
  void run_slice(GpuStream& stream, const Call& call, const Round& round, const Copies& copies,
                 size_t slice) const;

  int experts_ = 0;
  bool rounds_ = false;  // rows to bf16, in formats that kernels read
  Activation activation_;
  std::vector<Slice> slices_;
  std::vector<uint8_t> skip_;
  Copies held_;
  std::vector<DeviceBuffer> memory_;  // what held_ points to
};

class SentExperts;

// All routed experts of a layer in the host's memory, with the copies of some.
struct GpuRoutedExperts final : PlacedExperts {
  std::unique_ptr<PlacedExperts> host;
  GpuExperts hot;
  std::shared_ptr<const SentExperts> sent;  // null: those without a copy never leave the host

  GpuRoutedExperts(const GpuMemory& in, std::unique_ptr<PlacedExperts> from, std::span<const int> ids,
                   std::string_view name)
      : host(std::move(from)), hot(in, experts_of(*host), ids, name) {}
  const Experts& experts() const { return experts_of(*host); }
  // Those that a step of so many tokens uses; null: none.
  const GpuExperts* hot_for(int tokens) const { return hot.takes(tokens) ? &hot : nullptr; }
  const ExpertsShape& shape() const override { return host->shape(); }
  size_t packed_bytes() const override { return host->packed_bytes() + hot.bytes(); }
  size_t packed_bytes(int node) const override { return host->packed_bytes(node); }
  size_t device_bytes() const override { return hot.bytes(); }
  size_t plain_bytes() const override { return host->plain_bytes(); }
  double stored_bytes() const override { return host->stored_bytes(); }
};

}  // namespace kt::inline nn
