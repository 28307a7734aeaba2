// What Calibration rounds in a layer: attention's matrices, routed experts, the MLP that every token visits.
#include <algorithm>
#include <exception>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "engine/calibration/calibration.h"
#include "formats/floats.h"

namespace kt::inline engine {
namespace {

constexpr int64_t kPriorTokens = 8192;  // that stand for all of a layer's

}  // namespace

std::vector<Calibration::StageToRound> Calibration::stages_to_round(int layer) const {
  std::vector<StageToRound> out;
  const std::vector<Stage>& stages = walk_->stages(layer);
  for (size_t i = 0; i < stages.size(); ++i) {
    StageToRound mine{.number = i, .k = stages[i].k, .modules = {}};
    for (const Stage::Matrix& matrix : stages[i].matrices)
      if (targets_.linear(matrix.module)) mine.modules.push_back({matrix.module, matrix.n});
    if (!mine.modules.empty()) out.push_back(std::move(mine));
  }
  return out;
}

bool Calibration::dense_to_round(int layer) const {
  const std::optional<MlpModules>& mlp = walk_->mlp(layer);
  return mlp && std::ranges::any_of(mlp->modules,
                                    [&](const std::string& module) { return targets_.linear(module); });
}

bool Calibration::rounds(int layer) const {
  return moe(layer) || dense_to_round(layer) || !stages_to_round(layer).empty();
}

// One batch's rows as far as the stage's inputs. Samples that are not finite there take no part; attend()
// finds the same and says so.
void Calibration::visit(const Batch& batch, const StageToRound& stage, LinearRounder& rounder) {
  x_->read(batch.first, batch.tokens(), rows_.data());
  walk_->visit({.lengths = batch.lengths, .x = rows_.data()}, stage.number,
               [&](const float* x, int64_t stride) {
                 std::vector<int32_t> train, held_out;
                 int64_t begin = 0;
                 for (const int length : batch.lengths) {
                   const int64_t end = begin + length;
                   bool usable = is_alive(batch.first + begin);
                   for (int64_t row = begin; usable && row < end; ++row)
                     usable = std::all_of(x + row * stride, x + row * stride + stage.k,
                                          [](float value) { return is_finite(value); });
                   for (int64_t row = begin; usable && row < end; ++row) {
                     if (!is_held_out(batch.first + row)) {
                       train.push_back(static_cast<int32_t>(row));
                     } else if (is_trial_row(batch.first + row)) {
                       held_out.push_back(static_cast<int32_t>(row));
                     }
                   }
                   begin = end;
                 }
                 rounder.add(x, stride, train, held_out);
               });
}

// Stage by stage: what attention gives is what its rounded projections make of it.
void Calibration::round_attention(int layer, RoundedMatrices& into) {
  for (const StageToRound& stage : stages_to_round(layer)) {
    LinearRounder rounder(pool_, stage.k, options_.rounding);
    for (const Batch& batch : batches_) visit(batch, stage, rounder);
    for (const StageToRound::Module& module : stage.modules) {
      const std::unique_ptr<StoredMatrix> stored = walk_->stored(module.name);
      RoundedLinear rounded = rounder.round(*stored, targets_.spec_of(*stored));
      into.figures.linears.push_back({module.name, rounded.figures});
      into.matrices.emplace(module.name, std::move(rounded.matrix));
    }
    walk_->reload(stage.number);
  }
}

std::vector<RoutedRows> Calibration::rows_of(const MoeSpec& routes, bool held_out) const {
  std::vector<RoutedRows> out(static_cast<size_t>(experts()));
  const auto top_k = static_cast<size_t>(this->top_k());
  for (size_t row = 0; row < sample_of_.size(); ++row) {
    if (!is_alive(static_cast<int64_t>(row)) || is_held_out(static_cast<int64_t>(row)) != held_out) continue;
    for (size_t slot = row * top_k; slot < (row + 1) * top_k; ++slot) {
      if (ids_[slot] < 0 || ids_[slot] >= experts()) continue;
      RoutedRows& rows = out[static_cast<size_t>(ids_[slot])];
      rows.rows.push_back(static_cast<int32_t>(row));
      rows.weights.push_back(routes.weighs_inputs ? 1 : weights_[slot]);
      if (routes.weighs_inputs) rows.factors.push_back(weights_[slot]);
    }
  }
  return out;
}

std::vector<RoutedRows> Calibration::all_rows(int layer) {
  std::vector<RoutedRows> out(2);
  const bool gated = moe(layer) && moe(layer)->shared_gate;
  std::vector<float> factors(static_cast<size_t>(batch_tokens_), 1.0f);
  for (const Batch& batch : batches_) {
    const int tokens = batch.tokens();
    if (gated) {
      kept(batch, *normed_, normed_rows_);
      walk_->mlp_factors(tokens, normed_rows_.data(), factors.data());
    }
    for (int64_t row = 0; row < tokens; ++row) {
      if (!is_alive(batch.first + row)) continue;
      RoutedRows& rows = out[is_held_out(batch.first + row) ? 1 : 0];
      rows.rows.push_back(static_cast<int32_t>(batch.first + row));
      rows.weights.push_back(factors[static_cast<size_t>(row)]);
    }
  }
  return out;
}

Hessian Calibration::prior(const ActivationStore& store) {
  std::vector<int32_t> sample;
  for (size_t row = 0; row < sample_of_.size(); ++row)
    if (is_alive(static_cast<int64_t>(row)) && !is_held_out(static_cast<int64_t>(row)))
      sample.push_back(static_cast<int32_t>(row));
  const size_t step = std::max<size_t>(1, sample.size() / kPriorTokens);
  std::vector<int32_t> spread;
  for (size_t i = 0; i < sample.size(); i += step) spread.push_back(sample[i]);
  Hessian out(walk_->spec().hidden);
  Buffer scratch;
  for (size_t first = 0; first < spread.size(); first += static_cast<size_t>(batch_tokens_)) {
    const auto count = std::min(static_cast<size_t>(batch_tokens_), spread.size() - first);
    store.gather(std::span(spread).subspan(first, count), narrow_.data());
    out.add(*pool_, {.x = narrow_.data(), .type = Real::kBf16, .rows = static_cast<int64_t>(count)},
            &scratch);
  }
  return out;
}

OriginalExpert Calibration::original(int layer, int expert) const {
  OriginalExpert out;
  const PackedSpec spec = targets_.expert_spec(layer);
  for (const Projection projection : kProjections) {
    const auto p = static_cast<size_t>(projection);
    out.stored[p] = source_->at(layer, expert, projection);
    if (auto bias = source_->bias(layer, expert, projection)) out.bias[p] = std::move(*bias);
    out.spec[p] = spec;
    out.keep[p] = !targets_.expert(layer, expert, projection);
  }
  return out;
}

OriginalExpert Calibration::original(const MlpModules& dense) const {
  OriginalExpert out;
  for (size_t p = 0; p < 3; ++p) {
    out.stored[p] = walk_->stored(dense.modules[p]);
    out.spec[p] = targets_.spec_of(*out.stored[p]);
    out.keep[p] = !targets_.linear(dense.modules[p]);
  }
  return out;
}

// On as many threads as there is memory for; each takes one expert after the other.
void Calibration::round_experts(int layer, const LayerInputs& inputs, RoundedMatrices& into) {
  const MoeSpec& routes = *moe(layer);
  const std::vector<RoutedRows> train = rows_of(routes, false), held_out = rows_of(routes, true);
  std::vector<RoundedExpert> rounded(static_cast<size_t>(experts()));
  std::atomic<int> next{0}, finished{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work = [&] {
    try {
      const int threads = std::max(1, pool_->threads() / report_.lanes);
      ExpertRounder rounder(std::make_shared<Pool>(PoolOptions{.threads = threads, .nodes = 1, .pin = false}),
                            source_->hidden(), source_->inter(), options_.rounding);
      for (int e; (e = next++) < experts();) {
        const auto at = static_cast<size_t>(e);
        try {
          rounded[at] = rounder.round(original(layer, e), inputs, train[at], held_out[at]);
        } catch (const Error& fault) {
          fail_as(fault.kind(), "layer {}, expert {}: {}", layer, e, fault.what());
        }
        tell(layer, ++finished);
      }
    } catch (...) {
      next = experts();
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  };
  std::vector<std::thread> lanes;
  lanes.reserve(static_cast<size_t>(report_.lanes));
  try {
    while (static_cast<int>(lanes.size()) < report_.lanes) lanes.emplace_back(work);
  } catch (const std::system_error& fault) {
    KT_LOG(LogLevel::kWarning, "layer {}: {} of {} threads, no more could be started: {}", layer,
           lanes.size(), report_.lanes, fault.what());
  }
  if (lanes.empty()) work();
  for (std::thread& lane : lanes) lane.join();
  if (error) std::rethrow_exception(error);
  for (int e = 0; e < experts(); ++e) {
    RoundedExpert& expert = rounded[static_cast<size_t>(e)];
    into.figures.experts.push_back(expert.figures);
    for (const Projection projection : kProjections)
      if (Matrix& matrix = expert.matrices[static_cast<size_t>(projection)]; matrix.n > 0)
        into.matrices.emplace(source_->module_name(layer, e, projection), std::move(matrix));
  }
}

// The MLP that every token visits: an expert of its own, whose figures are its module's.
void Calibration::round_dense(int layer, const LayerInputs& inputs, RoundedMatrices& into) {
  const MlpModules& dense = walk_->mlp(layer).value();
  const std::vector<RoutedRows> rows = all_rows(layer);
  LayerInputs own = inputs;
  own.activation = dense.activation;
  RoundedExpert rounded = ExpertRounder(pool_, walk_->spec().hidden, dense.inter, options_.rounding)
                              .round(original(dense), own, rows[0], rows[1]);
  into.figures.linears.push_back({dense.modules[0].substr(0, dense.modules[0].rfind('.')), rounded.figures});
  for (size_t p = 0; p < 3; ++p)
    if (rounded.matrices[p].n > 0) into.matrices.emplace(dense.modules[p], std::move(rounded.matrices[p]));
}

void Calibration::round_mlps(int layer, RoundedMatrices& into) {
  const MoeSpec* routes = moe(layer);
  const bool dense = dense_to_round(layer);
  if (!routes && !dense) return;
  const Activation activation = routes ? routes->activation : Activation{};
  const auto inputs = [&](const ActivationStore& store, const Hessian& prior) {
    return LayerInputs{.inputs = &store, .prior = &prior, .activation = activation};
  };
  if (routes && routed_) {
    const Hessian of_routed = prior(*routed_);
    round_experts(layer, inputs(*routed_, of_routed), into);
    if (!dense) return;
  }
  const Hessian all = prior(*normed_);
  if (routes && !routed_) round_experts(layer, inputs(*normed_, all), into);
  if (dense) round_dense(layer, inputs(*normed_, all), into);
}

}  // namespace kt::inline engine
