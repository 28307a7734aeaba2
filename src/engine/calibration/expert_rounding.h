// One expert rounded with what it was really sent: second moments of its inputs, calibrated rounding of gate
// and up, then of down with what those give, and a trial on tokens that took no part.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "engine/calibration/activation_store.h"
#include "formats/matrix.h"
#include "nn/gptq.h"
#include "nn/hessian.h"
#include "nn/linear.h"
#include "weights/compressed.h"
#include "weights/experts.h"

namespace kt {

// Rows of the layer's activations that an expert was sent, and how much each counts there.
struct RoutedRows {
  std::vector<int32_t> rows;   // ascending
  std::vector<float> weights;  // [rows] routing weights
};

// What all experts of a layer share.
struct LayerInputs {
  const ActivationStore* inputs = nullptr;  // [tokens, hidden] bf16, after the norm
  const Hessian* prior = nullptr;           // of the inputs of all tokens
  Activation activation;
};

enum class RoundedBy : uint8_t { kGptq, kNoTokens, kFewTokens, kNotBetter, kSingular };
std::string_view name_of(RoundedBy by);  // "gptq", "rtn: no tokens", ...

// Squared errors are sums over held-out rows of (weight * |output - original's output|)^2; all 0 where the
// original's own outputs are not finite.
struct ExpertFigures {
  RoundedBy by = RoundedBy::kGptq;
  int64_t tokens = 0, held_out = 0;
  double signal = 0, rtn_error = 0, error = 0;  // error: of what was chosen
  double damping = 0, down_damping = 0;         // that worked; 0 where nothing was factored
};

struct RoundedExpert {
  Matrix gate, up, down;
  ExpertFigures figures;
};

// A matrix to compute with, where its own format may have no kernel: 8-bit codes get f32 scales, of the same
// values. The matrix must outlive it.
class RunnableView {
 public:
  explicit RunnableView(const Matrix& matrix);
  RunnableView(const RunnableView&) = delete;
  const MatrixView& view() const { return view_; }
  static Format format_of(Format format);

 private:
  std::vector<float> scales_;
  MatrixView view_;
};

// Works on one expert after the other with memory of its own; several may work at the same time.
class ExpertRounder {
 public:
  ExpertRounder(std::shared_ptr<Pool> pool, const ExpertSource& source, const PackedSpec& spec,
                const CalibrationDefaults& options);
  RoundedExpert round(int layer, int expert, const LayerInputs& inputs, const RoutedRows& train,
                      const RoutedRows& held_out);
  // What one takes while it works, at most.
  static uint64_t bytes(int64_t hidden, int64_t inter);

 private:
  struct Mlp;  // gate, up and down as they are multiplied
  struct Original;
  Mlp make_mlp(const Original& from, const Matrix& gate, const Matrix& up, const Matrix* down) const;
  Hessian input_moments(const LayerInputs& inputs, const RoutedRows& train);
  Hessian middle_moments(const Mlp& mlp, const LayerInputs& inputs, const RoutedRows& train);
  bool calibrate(const Original& from, const LayerInputs& inputs, const RoutedRows& train,
                 RoundedExpert& out);
  void judge(const Original& from, const LayerInputs& inputs, const RoutedRows& held_out,
             const RoundedExpert& rtn, const RoundedExpert& other, ExpertFigures& figures);
  // Calls use(first, count) with x_ holding rows [first, first + count) of `rows` as f32.
  template <typename Use>
  void for_chunks(const LayerInputs& inputs, std::span<const int32_t> rows, const Use& use);
  void middle(const Mlp& mlp, int rows, const Activation& activation);  // x_ to mid_
  void output(const Mlp& mlp, int rows, float* y);                      // mid_ to y

  std::shared_ptr<Pool> pool_;
  const ExpertSource& source_;
  PackedSpec spec_;
  CalibrationDefaults options_;
  LinearWork linears_;
  Buffer scratch_;
  int64_t inter_pad_;
  std::vector<uint16_t> narrow_;  // [chunk, hidden] bf16
  std::vector<float> x_, gate_, up_, both_, mid_, y_, other_y_;
};

}  // namespace kt
