// Low-rank factors beside the weights of experts: W' = W + scale * B A for gate|up and for down, as fine-tuning makes
// them. In f32, whatever the weights are.
#pragma once
#include "nn/expert_adapter.h"
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
};

// Keeps scale * A x of a row. Views: the factors, and the experts it is made for, outlive it. An Error if a rank is
// negative or one of two factors is null.
class LoraAdapter : public ExpertAdapter {
 public:
  LoraAdapter(const Experts& experts, const ExpertLora& lora);

  int kept_floats(Input input) const noexcept override;
  void read(const Rows& rows) const noexcept override;
  void add(const Tile& tile) const noexcept override;
  bool knows_padding() const noexcept override { return true; }

 private:
  const LowRank& factors(Input input) const { return input == Input::kTokens ? lora_.gate_up : lora_.down; }

  const Kernels& kernels_;
  ExpertsShape shape_;
  PaddedParts parts_;
  ExpertLora lora_;
};

}  // namespace kt::inline nn
