// Low-rank factors beside the weights of experts: W' = W + scale * B A for gate|up and for down, as fine-tuning makes
// them. In f32, whatever the weights are, but for wide factors and groups of kBf16Rows and more where training asks for
// bf16 operands.
#pragma once
#include "nn/expert_adapter.h"
#include "nn/factor_products.h"
#include "nn/padded_parts.h"

namespace kt::inline nn {

// The factors of one product of all experts. Contiguous f32; null a: none.
struct LowRank {
  int rank = 0;
  float scale = 1;
  const float* a = nullptr;  // [experts, rank, in]
  const float* b = nullptr;  // [experts, out, rank]
  bool empty() const { return rank == 0 || !a; }
};
struct ExpertLora {
  // in: hidden; out: 2 * inter, gate's rows first. Different A of gate and up are blocks of twice the rank.
  LowRank gate_up;
  LowRank down;  // in: inter; out: hidden
  bool empty() const { return gate_up.empty() && down.empty(); }
  // Whether rounding operands to bf16 pays: narrower factors cost little in f32 and are sums of too few numbers.
  bool wide() const {
    const auto is = [](const LowRank& f) { return f.empty() || f.rank >= FactorProducts::kBf16Rank; };
    return !empty() && is(gate_up) && is(down);
  }
};

// Keeps scale * A x of a row, in bf16 in the order in which products take it. Views: the factors, and the experts it is
// made for, outlive it. An Error if a rank is negative or one of two factors is null. Operands are rounded to bf16 only
// where `bf16` asks and the CPU multiplies that.
class LoraAdapter : public ExpertAdapter {
 public:
  LoraAdapter(const Experts& experts, const ExpertLora& lora, bool bf16 = false);

  int kept_floats(Input input) const noexcept override;
  size_t scratch_bytes() const noexcept override;
  bool reads_apart() const noexcept override { return products_.bf16(); }
  void read(const Rows& rows) const noexcept override;
  void add(const Tile& tile) const noexcept override;
  bool knows_padding() const noexcept override { return true; }
  // What read() keeps, as [count, rank] of f32.
  void read_floats(const Rows& rows) const noexcept;

 private:
  bool takes_bf16(int m) const { return products_.bf16() && m >= FactorProducts::kBf16Rows; }
  float* read_bf16(const Rows& rows, const LowRank& f) const noexcept;
  void read_f32(const Rows& rows, const LowRank& f) const noexcept;
  void add_bf16(const Tile& tile, const LowRank& f) const noexcept;

  const LowRank& factors(Input input) const { return input == Input::kTokens ? lora_.gate_up : lora_.down; }

  const Kernels& kernels_;
  ExpertsShape shape_;
  PaddedParts parts_;
  ExpertLora lora_;
  FactorProducts products_;
};

}  // namespace kt::inline nn
