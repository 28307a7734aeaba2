#include "engine/calibration/calibration.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/log.h"
#include "base/memory.h"
#include "engine/calibration/layer_experts.h"
#include "formats/floats.h"
#include "nn/cpu_ops.h"

namespace kt::inline engine {
namespace {

// Stretches of tokens, every eighth of which takes no part but in the trial of what came out.
constexpr int64_t kHeldStretch = 32, kHeldEvery = 8;
constexpr uint64_t kFixedMemory = uint64_t{96} << 20;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int Calibration::Batch::tokens() const { return std::accumulate(lengths.begin(), lengths.end(), 0); }

namespace {

Json to_json(const ExpertFigures& f) {
  return {{"tokens", f.tokens},
          {"held_out", f.held_out},
          {"method", name_of(f.by)},
          {"signal", f.signal},
          {"rtn_error", f.rtn_error},
          {"gptq_error", f.gptq_error ? Json(*f.gptq_error) : Json()},
          {"error", f.error},
          {"damping", f.damping},
          {"down_damping", f.down_damping}};
}

}  // namespace

Json CalibrationReport::json() const {
  Json out = {{"tokens", tokens}, {"held_out_tokens", held_out}, {"dropped_samples", dropped}};
  Json list = Json::array();
  for (const LayerFigures& layer : layers) {
    Json experts = Json::array(), linears = Json::array();
    for (const ExpertFigures& e : layer.experts) experts.push_back(to_json(e));
    for (const LinearFigures& linear : layer.linears) {
      linears.push_back(to_json(linear.figures));
      linears.back()["module"] = linear.module;
    }
    const ExpertFigures total = layer.total();
    list.push_back({{"layer", layer.layer},
                    {"signal", total.signal},
                    {"rtn_error", total.rtn_error},
                    {"error", total.error},
                    {"ratio", total.rtn_error > 0 ? total.error / total.rtn_error : 1},
                    {"experts", std::move(experts)}});
    if (!linears.empty()) list.back()["linears"] = std::move(linears);
  }
  out["layers"] = std::move(list);
  return out;
}

Calibration::Calibration(const Checkpoint& checkpoint, const ExpertSource* source, ModelSpec spec,
                         CalibrationText text, const CompressedTargets& targets, CalibrationOptions options)
    : source_(source),
      text_(std::move(text)),
      targets_(targets),
      options_(std::move(options)),
      pool_(std::make_shared<Pool>(PoolOptions{.threads = options_.threads, .nodes = 1})) {
  batch_tokens_ = std::max(text_.max_length, 2048);
  make_batches();
  walk_ =
      std::make_unique<LayerWalk>(checkpoint, std::move(spec), make_cpu_ops(pool_), source,
                                  WeightOptions{.precision = Precision::kBf16, .max_tokens = batch_tokens_});
  report_.tokens = text_.tokens;
  plan_memory();
}

void Calibration::make_batches() {
  int64_t first = 0;
  for (size_t i = 0; i < text_.samples.size(); ++i) {
    const int length = static_cast<int>(text_.samples[i].size());
    if (batches_.empty() || batches_.back().tokens() + length > batch_tokens_)
      batches_.push_back({.first = first, .lengths = {}, .sample = i});
    batches_.back().lengths.push_back(length);
    sample_of_.insert(sample_of_.end(), static_cast<size_t>(length), static_cast<int>(i));
    first += length;
  }
  dead_.assign(text_.samples.size(), 0);
  for (int64_t row = 0; row < first; ++row) report_.held_out += is_held_out(row) ? 1 : 0;
}

bool Calibration::is_held_out(int64_t row) const { return row / kHeldStretch % kHeldEvery == kHeldEvery - 1; }

bool Calibration::is_trial_row(int64_t row) const {
  const int64_t number = row / (kHeldStretch * kHeldEvery) * kHeldStretch + row % kHeldStretch;
  return number % std::max<int64_t>(1, report_.held_out / kTrialTokens) == 0;
}

// What a LayerWalk holds at the layer that takes the most of it: the open layer's weights and a cache for one
// batch, whose sequences end inside of pages.
uint64_t Calibration::walk_bytes() const {
  const ModelSpec& spec = walk_->spec();
  const uint64_t each =
      targets_.spec_of(*walk_->stored(walk_->stages(0).front().matrices.front().module)).scale_bytes();
  uint64_t rows = 0, most = 0;
  for (const Batch& batch : batches_)
    rows = std::max(rows, static_cast<uint64_t>(batch.tokens()) + kPageTokens * batch.lengths.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    // As they are stored; where they are rounded, their codes too, and once more packed.
    const int layer = static_cast<int>(i);
    const bool more = dense_to_round(layer) || !stages_to_round(layer).empty();
    const SequenceShape keeps = walk_->keeps(layer);
    most = std::max(most, walk_->weights(layer) * (each + (more ? 2 : 0)) +
                              rows * (keeps.page_bytes() / kPageTokens + keeps.slot_bytes()));
  }
  return most;
}

// The expert or matrix that takes the most while it is rounded, of those that no other is worked on beside.
Calibration::RoundingNeed Calibration::rounding_need() const {
  RoundingNeed most;
  const auto add = [&](uint64_t bytes, const std::string& what) {
    if (bytes > most.bytes) most = {bytes, what};
  };
  for (int layer = 0; layer < static_cast<int>(walk_->spec().layers.size()); ++layer) {
    for (const StageToRound& stage : stages_to_round(layer))
      for (const StageToRound::Module& module : stage.modules)
        add(LinearRounder::bytes(module.n, stage.k, std::min(report_.held_out, 2 * kTrialTokens)),
            module.name);
    if (dense_to_round(layer)) {
      const MlpModules& mlp = *walk_->mlp(layer);
      add(ExpertRounder::bytes(walk_->spec().hidden, mlp.inter), mlp.modules[2]);
    }
  }
  return most;
}

// A layer's experts, where they take the most: codes as they come out, and once more packed for running them.
// Matrices that --ignore leaves run as they are stored; gate and up of which one is rounded, in f32.
uint64_t Calibration::expert_bytes() const {
  if (!source_) return 0;
  const uint64_t each = static_cast<uint64_t>(source_->hidden()) * static_cast<uint64_t>(source_->inter()),
                 rounded = each * (targets_.spec().bits == 4 ? 10 : 14) / 6;
  uint64_t most = 0;
  for (const int layer : source_->layers()) {
    const uint64_t kept = each * static_cast<uint64_t>(targets_.expert_spec(layer).scale_bytes());
    uint64_t sum = 0;
    for (int e = 0; e < source_->experts(); ++e) {
      bool round[3];
      for (const Projection projection : kProjections) {
        const auto p = static_cast<size_t>(projection);
        round[p] = targets_.expert(layer, e, projection);
        sum += round[p] ? rounded : kept;
      }
      if (round[0] != round[1]) sum += 2 * each * sizeof(float);
    }
    most = std::max(most, sum);
  }
  return most;
}

// How many experts are worked on together, and whether activations stay in memory.
void Calibration::plan_memory() {
  const ModelSpec& spec = walk_->spec();
  const auto h = static_cast<uint64_t>(spec.hidden), tokens = static_cast<uint64_t>(text_.tokens);
  const uint64_t available = own_memory() + available_memory();
  const bool limited = options_.max_memory > 0 && options_.max_memory < available;
  const uint64_t bound = limited ? options_.max_memory : available;
  const uint64_t layer = expert_bytes() + walk_bytes();
  const bool weighs = spec.moe() && spec.moe()->weighs_inputs;
  const bool apart = spec.moe() && spec.moe()->apart;
  const uint64_t of_row = 40 + (apart ? 4 : 0) + (weighs ? 4 * static_cast<uint64_t>(top_k()) : 0);
  const uint64_t fixed = kFixedMemory + own_memory() + layer +
                         static_cast<uint64_t>(batch_tokens_) * h * of_row +
                         tokens * static_cast<uint64_t>(top_k()) * 16;
  const RoundingNeed alone = rounding_need();
  const uint64_t each = source_ ? ExpertRounder::bytes(spec.hidden, spec.moe()->inter) : 0,
                 least = fixed + std::max(each, alone.bytes), rows = tokens * h * (apart ? 8 : 6);
  if (bound < least)
    fail_as(ErrorKind::kMemory, "calibration needs {} of memory for a layer and the moments of {}, {} {}",
            human_bytes(least), each >= alone.bytes ? "one expert" : alone.what, human_bytes(bound),
            limited ? "are allowed" : "are available");
  const auto lanes_in = [&](uint64_t bytes) {
    if (bytes < least) return 0;
    return each == 0 ? 1
                     : static_cast<int>(std::min<uint64_t>((bytes - fixed) / each,
                                                           static_cast<uint64_t>(pool_->threads())));
  };
  const int with_rows = bound > rows ? lanes_in(bound - rows) : 0;
  report_.on_disk = with_rows == 0 || 2 * with_rows < lanes_in(bound);
  report_.lanes = std::min(report_.on_disk ? lanes_in(bound) : with_rows, std::max(experts(), 1));
}

void Calibration::tell(int layer, int experts_done) {
  if (!options_.progress) return;
  const std::lock_guard lock(progress_mutex_);
  progress_.layer = layer;
  progress_.experts_done = experts_done;
  progress_.experts = experts();
  progress_.seconds = now() - start_;
  options_.progress(progress_);
}

void Calibration::embed() {
  for (const Batch& batch : batches_) {
    int64_t at = 0;
    for (size_t s = 0; s < batch.lengths.size(); ++s) {
      walk_->embed(text_.samples[batch.sample + s], rows_.data() + at * walk_->spec().hidden);
      at += batch.lengths[s];
    }
    x_->write(batch.first, batch.tokens(), rows_.data());
  }
}

// Samples that the model itself cannot compute take no further part: zeros go on in their place.
void Calibration::drop_if_not_finite(const Batch& batch, int layer) {
  const auto hidden = static_cast<size_t>(walk_->spec().hidden);
  size_t at = 0;
  for (size_t s = 0; s < batch.lengths.size(); ++s) {
    const size_t count = static_cast<size_t>(batch.lengths[s]) * hidden;
    const auto finite = [](float value) { return is_finite(value); };
    const std::span<float> mine = std::span(normed_rows_).subspan(at, count);
    if (!std::all_of(mine.begin(), mine.end(), finite)) {
      std::fill(mine.begin(), mine.end(), 0.0f);
      std::fill_n(rows_.begin() + static_cast<int64_t>(at), count, 0.0f);
      if (!routed_rows_.empty()) std::fill_n(routed_rows_.begin() + static_cast<int64_t>(at), count, 0.0f);
      if (!dead_[batch.sample + s]) {
        dead_[batch.sample + s] = 1;
        report_.dropped.push_back(
            text("{}: activations of layer {} are not finite", text_.places[batch.sample + s], layer));
        KT_LOG(LogLevel::kWarning, "{}; it takes no further part", report_.dropped.back());
      }
    }
    at += count;
  }
  if (std::all_of(dead_.begin(), dead_.end(), [](uint8_t dead) { return dead != 0; }))
    fail(
        "layer {}: no sample's activations are finite; the weights of this model, or of a layer before, are "
        "damaged",
        layer);
}

// A matrix of the open layer as it was rounded; null: it was not.
std::unique_ptr<StoredMatrix> Calibration::replaced(int layer, const std::string& module) const {
  if (const auto found = pending_.matrices.find(module); found != pending_.matrices.end())
    return runnable(found->second, module);
  const auto done = done_.find(layer);
  if (done == done_.end() || !done->second) return nullptr;
  const std::optional<Matrix> matrix = done->second->at(module, targets_.spec());
  return matrix ? runnable(*matrix, module) : nullptr;
}

void Calibration::attend(int layer) {
  const int top_k = this->top_k();
  const bool routes = moe(layer) != nullptr, goes_on = routes || dense_to_round(layer);
  for (const Batch& batch : batches_) {
    const int tokens = batch.tokens();
    x_->read(batch.first, tokens, rows_.data());
    walk_->mix({.lengths = batch.lengths,
                .x = rows_.data(),
                .normed = normed_rows_.data(),
                .routed = routed_rows_.empty() ? nullptr : routed_rows_.data(),
                .ids = routes ? ids_.data() + batch.first * top_k : nullptr,
                .weights = routes ? weights_.data() + batch.first * top_k : nullptr});
    drop_if_not_finite(batch, layer);
    if (!goes_on) walk_->finish(tokens, normed_rows_.data(), nullptr, rows_.data());
    x_->write(batch.first, tokens, rows_.data());
    if (!goes_on) continue;
    keep(batch, normed_rows_, *normed_);
    if (routes && routed_) keep(batch, routed_rows_, *routed_);
  }
}

void Calibration::keep(const Batch& batch, std::span<const float> rows, ActivationStore& store) {
  const auto values = static_cast<size_t>(batch.tokens()) * static_cast<size_t>(walk_->spec().hidden);
  for (size_t i = 0; i < values; ++i) narrow_[i] = to_bf16(rows[i]).bits;
  store.write(batch.first, batch.tokens(), narrow_.data());
}

void Calibration::kept(const Batch& batch, const ActivationStore& store, std::vector<float>& rows) {
  const auto values = static_cast<size_t>(batch.tokens()) * static_cast<size_t>(walk_->spec().hidden);
  store.read(batch.first, batch.tokens(), narrow_.data());
  for (size_t i = 0; i < values; ++i) rows[i] = to_f32(bf16{narrow_[i]});
}

// What each expert of the batch's tokens reads: normed rows by weights of this layer's routers.
void Calibration::weigh_inputs(const Batch& batch) {
  const auto hidden = static_cast<size_t>(walk_->spec().hidden), top_k = static_cast<size_t>(this->top_k());
  const size_t slots = static_cast<size_t>(batch.tokens()) * top_k;
  weighed_rows_.resize(slots * hidden);
  ones_.resize(slots, 1.0f);
  const float* const weights = weights_.data() + batch.first * this->top_k();
  for (size_t slot = 0; slot < slots; ++slot)
    for (size_t i = 0; i < hidden; ++i)
      weighed_rows_[slot * hidden + i] = normed_rows_[slot / top_k * hidden + i] * weights[slot];
}

// What the layer gives with its matrices rounded.
void Calibration::apply(int layer) {
  const int top_k = this->top_k();
  std::optional<LayerExperts> experts;
  if (const MoeSpec* of = moe(layer))
    experts.emplace(
        pool_, *source_, *done_.at(layer), targets_.expert_spec(layer),
        ExpertsOptions{
            .activation = of->activation, .precision = Precision::kBf16, .max_tokens = batch_tokens_});
  std::vector<float> more;
  for (const Batch& batch : batches_) {
    const int tokens = batch.tokens();
    x_->read(batch.first, tokens, rows_.data());
    kept(batch, *normed_, normed_rows_);
    if (experts) {
      if (routed_) kept(batch, *routed_, routed_rows_);
      const std::vector<float>& input = routed_ ? routed_rows_ : normed_rows_;
      const bool each = moe(layer)->weighs_inputs;
      if (each) weigh_inputs(batch);
      experts->forward({.tokens = tokens,
                        .top_k = top_k,
                        .input = each ? weighed_rows_.data() : input.data(),
                        .ids = ids_.data() + batch.first * top_k,
                        .weights = each ? ones_.data() : weights_.data() + batch.first * top_k,
                        .output = out_rows_.data(),
                        .input_each = each},
                       more);
    }
    walk_->finish(tokens, normed_rows_.data(), experts ? out_rows_.data() : nullptr, rows_.data());
    x_->write(batch.first, tokens, rows_.data());
  }
}

void Calibration::prepare(const std::string& folder) {
  const ModelSpec& spec = walk_->spec();
  const auto hidden = static_cast<size_t>(spec.hidden), rows = static_cast<size_t>(batch_tokens_);
  const auto file = [&](const char* name) { return report_.on_disk ? folder + name : std::string(); };
  x_ = std::make_unique<ActivationStore>(text_.tokens, hidden * sizeof(float), file("/x"));
  normed_ = std::make_unique<ActivationStore>(text_.tokens, hidden * sizeof(bf16), file("/normed"));
  for (auto* buffer : {&rows_, &normed_rows_, &out_rows_}) buffer->resize(rows * hidden);
  if (const MoeSpec* of = spec.moe(); of && of->apart) {
    routed_ = std::make_unique<ActivationStore>(text_.tokens, hidden * sizeof(bf16), file("/routed"));
    routed_rows_.resize(rows * hidden);
  }
  narrow_.resize(rows * hidden);
  ids_.resize(static_cast<size_t>(text_.tokens) * static_cast<size_t>(top_k()));
  weights_.resize(ids_.size());
}

void Calibration::run(const std::string& folder, const std::string& settings) {
  start_ = now();
  prepare(folder);
  int last = -1;
  for (int layer = 0; layer < static_cast<int>(walk_->spec().layers.size()); ++layer)
    if (rounds(layer)) {
      last = layer;
      ++progress_.layers;
    }
  embed();
  for (int layer = 0; layer <= last; ++layer) {
    const bool works = rounds(layer);
    const std::string path = rounded_layer_path(folder, layer);
    if (works) done_[layer] = kept_layer(path, settings);
    const bool kept = works && done_[layer];
    walk_->open(layer, [this, layer](std::unique_ptr<StoredMatrix> stored, std::string_view module) {
      std::unique_ptr<StoredMatrix> rounded = replaced(layer, std::string(module));
      return rounded ? std::move(rounded) : std::move(stored);
    });
    if (works && !kept) {
      tell(layer, 0);
      pending_.figures.layer = layer;
      round_attention(layer, pending_);
    }
    attend(layer);
    if (!works) continue;
    if (!kept) {
      round_mlps(layer, pending_);
      save_rounded_layer(path, pending_, settings);
      done_[layer] = std::make_unique<RoundedLayer>(path);
      pending_ = {};
      if (layer < last && dense_to_round(layer)) walk_->reload_mlp();
    }
    progress_.layers_kept += kept ? 1 : 0;
    report_.layers.push_back(done_[layer]->figures());
    if (layer < last) apply(layer);
    ++progress_.layers_done;
  }
  release();
}

// What only run() needs; the conversion that follows has use for the memory.
void Calibration::release() {
  options_.progress = {};
  x_.reset();
  normed_.reset();
  routed_.reset();
  walk_.reset();
  for (auto* buffer : {&rows_, &normed_rows_, &routed_rows_, &out_rows_, &weighed_rows_, &ones_, &weights_})
    *buffer = {};
  narrow_ = {};
  ids_ = {};
}

std::optional<Matrix> Calibration::rounded(const std::string& module) const {
  for (const auto& [layer, done] : done_)
    if (std::optional<Matrix> matrix = done->at(module, targets_.spec())) return matrix;
  KT_LOG(LogLevel::kWarning, "{}: no layer that the engine runs has it; rounded to nearest", module);
  return std::nullopt;
}

}  // namespace kt::inline engine
