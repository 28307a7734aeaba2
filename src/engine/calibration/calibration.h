// Calibrated rounding of a model's matrices, layer by layer: every layer sees what the layers before it
// really give, rounded ones included, and so does every step within a layer: attention's inputs, what it
// gives, experts and MLPs. Which matrices take part is CompressedTargets' business. One layer's weights are
// in memory at a time; activations go to disk past a bound. Finished layers are kept in a folder, so that a
// run that was interrupted goes on where it was.
//
// The interfaces leave room for a GPU: moments and factors are made in ExpertRounder and LinearRounder and
// nowhere else.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/calibration/calibration_text.h"
#include "engine/calibration/linear_rounding.h"
#include "engine/calibration/rounded_layer.h"
#include "models/layer_walk.h"
#include "text/json.h"
#include "weights/plans/compressed_targets.h"

namespace kt::inline engine {

struct CalibrationProgress {
  int layers_done = 0, layers = 0;  // with something to round
  int layer = 0;                    // the one at work, by its number in the model
  int experts_done = 0, experts = 0;
  int layers_kept = 0;  // of layers_done, from an earlier run
  double seconds = 0;
};

struct CalibrationOptions {
  CalibrationDefaults rounding;
  int threads = 0;
  uint64_t max_memory = 0;                                        // 0: what the machine has
  std::function<void(const CalibrationProgress&)> progress = {};  // from any thread, one at a time
};

// What every expert saw and what rounding cost it.
struct CalibrationReport {
  std::vector<LayerFigures> layers;
  int64_t tokens = 0, held_out = 0;
  std::vector<std::string> dropped;  // samples whose activations were not finite: places and layers
  int lanes = 0;                     // experts rounded at the same time
  bool on_disk = false;              // activations
  Json json() const;                 // the same for the same bytes: no times, nothing of this machine
};

inline constexpr int64_t kTrialTokens = 4096;  // held out, that matrices of attention are tried with

class Calibration {
 public:
  // Checkpoint, source (null: no routed experts) and targets must outlive this. Errors: a bound on memory
  // below what one expert or matrix needs (kMemory).
  Calibration(const Checkpoint& checkpoint, const ExpertSource* source, ModelSpec spec, CalibrationText text,
              const CompressedTargets& targets, CalibrationOptions options);

  // Rounds every layer that `folder` does not hold yet, made with the same `settings`, any words that name
  // them. Once.
  void run(const std::string& folder, const std::string& settings);
  // After run(), any thread.
  // Nothing for a matrix that it has no place for.
  std::optional<Matrix> rounded(const std::string& module) const;
  const CalibrationReport& report() const { return report_; }

 private:
  struct Batch {
    int64_t first = 0;         // row of its first token
    std::vector<int> lengths;  // of its samples
    size_t sample = 0;         // number of the first of them
    int tokens() const;
  };
  int experts() const { return source_ ? source_->experts() : 0; }
  const MoeSpec* moe(int layer) const { return walk_->spec().layers[static_cast<size_t>(layer)].moe(); }
  int top_k() const { return walk_->spec().moe() ? walk_->spec().moe()->top_k : 0; }
  // What of a layer takes part.
  struct StageToRound {
    size_t number = 0;  // of the mixer's stages
    int64_t k = 0;
    struct Module {
      std::string name;
      int64_t n = 0;
    };
    std::vector<Module> modules;
  };
  std::vector<StageToRound> stages_to_round(int layer) const;
  bool dense_to_round(int layer) const;
  bool rounds(int layer) const;
  struct RoundingNeed {
    uint64_t bytes = 0;
    std::string what;
  };
  RoundingNeed rounding_need() const;
  uint64_t expert_bytes() const;
  void plan_memory();
  uint64_t walk_bytes() const;
  void make_batches();
  void prepare(const std::string& folder);
  void embed();
  std::unique_ptr<StoredMatrix> replaced(int layer, const std::string& module) const;
  void attend(int layer);
  void drop_if_not_finite(const Batch& batch, int layer);
  void round_attention(int layer, RoundedMatrices& into);
  void visit(const Batch& batch, const StageToRound& stage, LinearRounder& rounder);
  void round_mlps(int layer, RoundedMatrices& into);
  void round_experts(int layer, const LayerInputs& inputs, RoundedMatrices& into);
  void round_dense(int layer, const LayerInputs& inputs, RoundedMatrices& into);
  OriginalExpert original(int layer, int expert) const;
  OriginalExpert original(const MlpModules& dense) const;
  Hessian prior(const ActivationStore& store);
  std::vector<RoutedRows> rows_of(const MoeSpec& routes, bool held_out) const;  // [experts]
  std::vector<RoutedRows> all_rows(int layer);  // {train, held out}, of the open layer's dense MLP
  void weigh_inputs(const Batch& batch);
  // Rows of a batch to a store of bf16, and back.
  void keep(const Batch& batch, std::span<const float> rows, ActivationStore& store);
  void kept(const Batch& batch, const ActivationStore& store, std::vector<float>& rows);
  void apply(int layer);
  void tell(int layer, int experts_done);
  void release();
  bool is_held_out(int64_t row) const;
  bool is_trial_row(int64_t row) const;  // of those held out: at most about 2 * kTrialTokens, evenly spread
  bool is_alive(int64_t row) const {
    return !dead_[static_cast<size_t>(sample_of_[static_cast<size_t>(row)])];
  }

  const ExpertSource* source_;
  CalibrationText text_;
  const CompressedTargets& targets_;
  CalibrationOptions options_;
  std::shared_ptr<Pool> pool_;
  std::unique_ptr<LayerWalk> walk_;
  int batch_tokens_ = 0;
  std::vector<Batch> batches_;
  std::vector<int> sample_of_;  // [tokens]
  std::vector<uint8_t> dead_;   // [samples]
  std::string folder_;
  std::unique_ptr<ActivationStore> x_, normed_;  // [tokens, hidden] f32 and bf16
  std::unique_ptr<ActivationStore> routed_;      // as normed_, what routed experts read; null: the same
  std::vector<int32_t> ids_;                     // [tokens, top_k]
  std::vector<float> weights_;
  std::vector<float> rows_, normed_rows_, out_rows_;  // of one batch
  std::vector<float> routed_rows_;                    // of one batch; empty: normed_rows_ are
  std::vector<float> weighed_rows_, ones_;  // [tokens, top_k, hidden] and [tokens, top_k] of one batch
  std::vector<uint16_t> narrow_;
  std::map<int, std::unique_ptr<RoundedLayer>> done_;
  RoundedMatrices pending_;  // of the layer at work
  CalibrationReport report_;
  std::mutex progress_mutex_;
  CalibrationProgress progress_;
  double start_ = 0;
};

}  // namespace kt::inline engine
