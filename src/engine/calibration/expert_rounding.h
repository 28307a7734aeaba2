// One expert rounded with what it was really sent: second moments of its inputs, calibrated rounding of gate
// and up, then of down with what those give, and a trial on tokens that took no part. A dense MLP and a
// shared expert are experts that every token is sent to.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/calibration/activation_store.h"
#include "engine/calibration/matrix_rounding.h"
#include "formats/matrix.h"
#include "nn/gptq.h"
#include "nn/hessian.h"
#include "nn/linear.h"
#include "weights/dialects/compressed.h"
#include "weights/experts.h"

namespace kt::inline engine {

// Rows of the layer's activations that an expert was sent, and how much each counts there.
struct RoutedRows {
  std::vector<int32_t> rows;   // ascending
  std::vector<float> weights;  // [rows] routing weights
  // [rows] of what the expert reads, where routers weigh that (weights are 1 then); empty: all 1.
  std::vector<float> factors = {};
};

// What all experts of a layer share.
struct LayerInputs {
  const ActivationStore* inputs = nullptr;  // [tokens, hidden] bf16, after the norm
  const Hessian* prior = nullptr;           // of the inputs of all tokens
  Activation activation;
};

// gate, up and down as they are, by Projection.
struct OriginalExpert {
  std::unique_ptr<StoredMatrix> stored[3];
  std::vector<float> bias[3];  // [n] or empty
  PackedSpec spec[3];          // how each is rounded
  bool keep[3] = {};           // stays as it is
};

struct RoundedExpert {
  Matrix matrices[3];  // gate, up and down; empty: kept
  ExpertFigures figures;
};

// Works on one expert after the other with memory of its own; several may work at the same time. Results are
// the same for any number of the pool's threads.
class ExpertRounder {
 public:
  ExpertRounder(std::shared_ptr<Pool> pool, int64_t hidden, int64_t inter,
                const CalibrationDefaults& options);
  RoundedExpert round(const OriginalExpert& from, const LayerInputs& inputs, const RoutedRows& train,
                      const RoutedRows& held_out);
  // What one takes while it works, at most.
  static uint64_t bytes(int64_t hidden, int64_t inter);

 private:
  struct Mlp;  // gate, up and down as they are multiplied
  enum class Parts : uint8_t { kMiddle, kAll };
  // Of `rounded`, and of `from` where that is empty or null.
  Mlp make_mlp(const OriginalExpert& from, const RoundedExpert* rounded, Parts parts) const;
  Hessian input_moments(const LayerInputs& inputs, const RoutedRows& train);
  Hessian middle_moments(const Mlp& mlp, const LayerInputs& inputs, const RoutedRows& train);
  bool calibrate(const OriginalExpert& from, const LayerInputs& inputs, const RoutedRows& train,
                 RoundedExpert& out);
  void judge(const OriginalExpert& from, const LayerInputs& inputs, const RoutedRows& held_out,
             const RoundedExpert& rtn, const RoundedExpert& other, ExpertFigures& figures);
  // Calls use(first, count) with rows [first, first + count) of `rows` in narrow_, and in x_ as f32.
  template <typename Use>
  void for_chunks(const LayerInputs& inputs, const RoutedRows& rows, const Use& use);
  void middle(const Mlp& mlp, int rows, const Activation& activation);  // x_ to mid_
  void output(const Mlp& mlp, int rows, float* y);                      // mid_ to y

  std::shared_ptr<Pool> pool_;
  int64_t hidden_, inter_;
  CalibrationDefaults options_;
  LinearWork linears_;
  Buffer scratch_;
  int64_t inter_pad_;
  std::vector<uint16_t> narrow_;  // [chunk, hidden] bf16
  std::vector<float> x_, gate_, up_, both_, mid_, y_, other_y_;
};

}  // namespace kt::inline engine
