#include "engine/calibration/calibration.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <numeric>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/memory.h"
#include "formats/floats.h"
#include "nn/experts.h"
#include "nn/kv_cache.h"

namespace kt {
namespace {

// Stretches of tokens, every eighth of which takes no part but in the trial of what came out.
constexpr int64_t kHeldStretch = 32, kHeldEvery = 8;
constexpr int64_t kPriorTokens = 8192;  // that stand for all of a layer's
constexpr uint64_t kFixedMemory = uint64_t{96} << 20;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Weights of a layer but for its routed experts.
uint64_t dense_weights(const ModelSpec& spec, const LayerSpec& layer) {
  const auto u = [](int number) { return static_cast<uint64_t>(number); };
  const uint64_t h = u(spec.hidden);
  const uint64_t mlp = 3 * h * u(layer.moe ? spec.moe.shared_inter : layer.dense_inter) +
                       (layer.moe ? h * u(spec.moe.experts) : 0);
  if (!layer.mla) return mlp + h * u(spec.gqa.head_dim) * 2 * u(spec.gqa.heads + spec.gqa.kv_heads);
  const MlaSpec& mla = spec.mla;
  const uint64_t q = u(mla.heads) * u(mla.nope + mla.rope);
  return mlp + (mla.q_rank ? u(mla.q_rank) * (h + q) : h * q) + h * u(mla.kv_rank + mla.rope) +
         u(mla.kv_rank) * u(mla.heads) * u(mla.nope + mla.v) + u(mla.heads) * u(mla.v) * h;
}

// Keys and values of one token in one layer, bf16, padded.
uint64_t kv_token_bytes(const ModelSpec& spec, const LayerSpec& layer) {
  const KvShape shape =
      layer.mla
          ? KvShape{.layers = 1,
                    .heads = 1,
                    .d = spec.mla.kv_rank + spec.mla.rope,
                    .dv = spec.mla.kv_rank,
                    .shared = true}
          : KvShape{.layers = 1, .heads = spec.gqa.kv_heads, .d = spec.gqa.head_dim, .dv = spec.gqa.head_dim};
  return shape.page_bytes() / kPageTokens;
}

}  // namespace

int Calibration::Batch::tokens() const { return std::accumulate(lengths.begin(), lengths.end(), 0); }

ExpertFigures LayerFigures::total() const {
  ExpertFigures sum;
  for (const ExpertFigures& e : experts) {
    sum.tokens += e.tokens;
    sum.held_out += e.held_out;
    sum.signal += e.signal;
    sum.rtn_error += e.rtn_error;
    sum.error += e.error;
  }
  return sum;
}

Json CalibrationReport::json() const {
  Json out = {{"tokens", tokens}, {"held_out_tokens", held_out}, {"dropped_samples", dropped}};
  Json list = Json::array();
  for (const LayerFigures& layer : layers) {
    Json experts = Json::array();
    for (const ExpertFigures& e : layer.experts)
      experts.push_back({{"tokens", e.tokens},
                         {"held_out", e.held_out},
                         {"method", name_of(e.by)},
                         {"signal", e.signal},
                         {"rtn_error", e.rtn_error},
                         {"error", e.error},
                         {"damping", e.damping},
                         {"down_damping", e.down_damping}});
    const ExpertFigures total = layer.total();
    list.push_back({{"layer", layer.layer},
                    {"signal", total.signal},
                    {"rtn_error", total.rtn_error},
                    {"error", total.error},
                    {"ratio", total.rtn_error > 0 ? total.error / total.rtn_error : 1},
                    {"experts", std::move(experts)}});
  }
  out["layers"] = std::move(list);
  return out;
}

Calibration::Calibration(const Checkpoint& checkpoint, const ExpertSource& source, ModelSpec spec,
                         CalibrationText text, const PackedSpec& packed, CalibrationOptions options)
    : source_(source),
      text_(std::move(text)),
      packed_(packed),
      options_(std::move(options)),
      pool_(std::make_shared<Pool>(PoolOptions{.threads = options_.threads, .nodes = 1})) {
  batch_tokens_ = std::max(text_.max_length, 2048);
  make_batches();
  walk_ = std::make_unique<LayerWalk>(
      checkpoint, std::move(spec), pool_, &source,
      TransformerOptions{.precision = Precision::kBf16, .max_tokens = batch_tokens_});
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

// What a LayerWalk holds at the layer that takes the most of it: the open layer's weights and a cache for one
// batch, whose sequences end inside of pages.
uint64_t Calibration::walk_bytes() const {
  const ModelSpec& spec = walk_->spec();
  uint64_t rows = 0, most = 0;
  for (const Batch& batch : batches_)
    rows = std::max(rows, static_cast<uint64_t>(batch.tokens()) + kPageTokens * batch.lengths.size());
  for (const LayerSpec& layer : spec.layers)
    most = std::max(most,
                    dense_weights(spec, layer) * packed_.scale_bytes() + rows * kv_token_bytes(spec, layer));
  return most;
}

// How many experts are worked on together, and whether activations stay in memory.
void Calibration::plan_memory() {
  const auto h = static_cast<uint64_t>(source_.hidden()), i = static_cast<uint64_t>(source_.inter()),
             experts = static_cast<uint64_t>(source_.experts()), tokens = static_cast<uint64_t>(text_.tokens);
  const uint64_t available = own_memory() + available_memory();
  const bool limited = options_.max_memory > 0 && options_.max_memory < available;
  const uint64_t bound = limited ? options_.max_memory : available;
  // A layer's codes as they come out, and once more packed for running it.
  const uint64_t layer = experts * 3 * h * i * (packed_.bits == 4 ? 10 : 14) / 6 + walk_bytes();
  const uint64_t fixed = kFixedMemory + own_memory() + layer + static_cast<uint64_t>(batch_tokens_) * h * 40 +
                         tokens * static_cast<uint64_t>(walk_->spec().moe.top_k) * 16;
  const uint64_t each = ExpertRounder::bytes(source_.hidden(), source_.inter()), rows = tokens * h * 6;
  if (bound < fixed + each)
    fail_as(ErrorKind::kMemory, "calibration needs {} of memory for a layer and one expert's moments, {} {}",
            human_bytes(fixed + each), human_bytes(bound), limited ? "are allowed" : "are available");
  const auto lanes_in = [&](uint64_t bytes) {
    return bytes < fixed + each ? 0
                                : static_cast<int>(std::min<uint64_t>(
                                      (bytes - fixed) / each, static_cast<uint64_t>(pool_->threads())));
  };
  const int with_rows = bound > rows ? lanes_in(bound - rows) : 0;
  report_.on_disk = with_rows == 0 || 2 * with_rows < lanes_in(bound);
  report_.lanes = std::min(report_.on_disk ? lanes_in(bound) : with_rows, source_.experts());
}

void Calibration::tell(int layer, int experts_done) {
  if (!options_.progress) return;
  const std::lock_guard lock(progress_mutex_);
  progress_.layer = layer;
  progress_.experts_done = experts_done;
  progress_.experts = source_.experts();
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
      if (!dead_[batch.sample + s]) {
        dead_[batch.sample + s] = 1;
        report_.dropped.push_back(
            text("sample {}: activations of layer {} are not finite", batch.sample + s, layer));
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

void Calibration::attend(int layer, bool routes) {
  const int hidden = walk_->spec().hidden, top_k = walk_->spec().moe.top_k;
  walk_->open(layer);
  for (const Batch& batch : batches_) {
    const int tokens = batch.tokens();
    x_->read(batch.first, tokens, rows_.data());
    walk_->attend({.lengths = batch.lengths,
                   .x = rows_.data(),
                   .normed = normed_rows_.data(),
                   .ids = routes ? ids_.data() + batch.first * top_k : nullptr,
                   .weights = routes ? weights_.data() + batch.first * top_k : nullptr});
    drop_if_not_finite(batch, layer);
    if (!routes) walk_->add_dense(tokens, normed_rows_.data(), rows_.data());
    x_->write(batch.first, tokens, rows_.data());
    if (!routes) continue;
    const auto values = static_cast<size_t>(tokens) * static_cast<size_t>(hidden);
    for (size_t i = 0; i < values; ++i) narrow_[i] = to_bf16(normed_rows_[i]).bits;
    normed_->write(batch.first, tokens, narrow_.data());
  }
}

std::vector<RoutedRows> Calibration::rows_of(bool held_out) const {
  std::vector<RoutedRows> out(static_cast<size_t>(source_.experts()));
  const auto top_k = static_cast<size_t>(walk_->spec().moe.top_k);
  for (size_t row = 0; row < sample_of_.size(); ++row) {
    if (dead_[static_cast<size_t>(sample_of_[row])] || is_held_out(static_cast<int64_t>(row)) != held_out)
      continue;
    for (size_t slot = row * top_k; slot < (row + 1) * top_k; ++slot) {
      if (ids_[slot] < 0 || ids_[slot] >= source_.experts()) continue;
      RoutedRows& rows = out[static_cast<size_t>(ids_[slot])];
      rows.rows.push_back(static_cast<int32_t>(row));
      rows.weights.push_back(weights_[slot]);
    }
  }
  return out;
}

void Calibration::round_layer(int layer, const std::string& path, const std::string& settings) {
  const std::vector<RoutedRows> train = rows_of(false), held_out = rows_of(true);
  std::vector<int32_t> sample;
  for (size_t row = 0; row < sample_of_.size(); ++row)
    if (!dead_[static_cast<size_t>(sample_of_[row])] && !is_held_out(static_cast<int64_t>(row)))
      sample.push_back(static_cast<int32_t>(row));
  const size_t step = std::max<size_t>(1, sample.size() / kPriorTokens);
  std::vector<int32_t> spread;
  for (size_t i = 0; i < sample.size(); i += step) spread.push_back(sample[i]);
  Hessian prior(static_cast<int>(source_.hidden()));
  Buffer scratch;
  for (size_t first = 0; first < spread.size(); first += static_cast<size_t>(batch_tokens_)) {
    const auto count = std::min(static_cast<size_t>(batch_tokens_), spread.size() - first);
    normed_->gather(std::span(spread).subspan(first, count), narrow_.data());
    prior.add(*pool_, {.x = narrow_.data(), .type = Real::kBf16, .rows = static_cast<int64_t>(count)},
              &scratch);
  }
  const LayerInputs inputs{
      .inputs = normed_.get(), .prior = &prior, .activation = walk_->spec().moe.activation};
  std::vector<RoundedExpert> experts(static_cast<size_t>(source_.experts()));
  std::atomic<int> next{0}, finished{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work = [&] {
    try {
      const int threads = std::max(1, pool_->threads() / report_.lanes);
      ExpertRounder rounder(std::make_shared<Pool>(PoolOptions{.threads = threads, .nodes = 1, .pin = false}),
                            source_, packed_, options_.rounding);
      for (int e; (e = next++) < source_.experts();) {
        const auto at = static_cast<size_t>(e);
        try {
          experts[at] = rounder.round(layer, e, inputs, train[at], held_out[at]);
        } catch (const Error& fault) {
          fail_as(fault.kind(), "layer {}, expert {}: {}", layer, e, fault.what());
        }
        tell(layer, ++finished);
      }
    } catch (...) {
      next = source_.experts();
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
  save_rounded_layer(path, experts, settings);
}

// What the layer gives with its experts rounded.
void Calibration::apply(int layer) {
  const int hidden = walk_->spec().hidden, top_k = walk_->spec().moe.top_k;
  const Format format = packed_format(packed_);
  const RoundedLayer& rounded = *done_.at(layer);
  Experts experts(
      pool_, std::make_shared<Workspace>(),
      {.experts = source_.experts(), .hidden = hidden, .inter = static_cast<int>(source_.inter())},
      {.gate_up = RunnableView::format_of(format),
       .down = RunnableView::format_of(format),
       .activation = walk_->spec().moe.activation,
       .precision = Precision::kBf16,
       .max_tokens = batch_tokens_});
  run_items(*pool_, source_.experts(), [&](int64_t e) {
    const int expert = static_cast<int>(e);
    const Matrix gate = rounded.at(expert, Projection::kGate, format),
                 up = rounded.at(expert, Projection::kUp, format),
                 down = rounded.at(expert, Projection::kDown, format);
    const RunnableView gate_view(gate), up_view(up), down_view(down);
    std::optional<std::vector<float>> bias[3];
    for (const Projection projection : kProjections)
      bias[static_cast<size_t>(projection)] = source_.bias(layer, expert, projection);
    const auto at = [&](size_t p) { return bias[p] ? bias[p]->data() : nullptr; };
    experts.load(expert, ExpertWeights{.gate = gate_view.view(),
                                       .up = up_view.view(),
                                       .down = down_view.view(),
                                       .gate_bias = at(0),
                                       .up_bias = at(1),
                                       .down_bias = at(2)});
  });
  for (const Batch& batch : batches_) {
    const int tokens = batch.tokens();
    const auto values = static_cast<size_t>(tokens) * static_cast<size_t>(hidden);
    x_->read(batch.first, tokens, rows_.data());
    normed_->read(batch.first, tokens, narrow_.data());
    for (size_t i = 0; i < values; ++i) normed_rows_[i] = to_f32(bf16{narrow_[i]});
    experts.forward({.tokens = tokens,
                     .top_k = top_k,
                     .input = normed_rows_.data(),
                     .ids = ids_.data() + batch.first * top_k,
                     .weights = weights_.data() + batch.first * top_k,
                     .output = out_rows_.data()});
    for (size_t i = 0; i < values; ++i) rows_[i] += out_rows_[i];
    walk_->add_dense(tokens, normed_rows_.data(), rows_.data());
    x_->write(batch.first, tokens, rows_.data());
  }
}

void Calibration::run(const std::string& folder, const std::string& settings) {
  const ModelSpec& spec = walk_->spec();
  start_ = now();
  const auto hidden = static_cast<size_t>(spec.hidden), rows = static_cast<size_t>(batch_tokens_);
  const auto file = [&](const char* name) { return report_.on_disk ? folder + name : std::string(); };
  x_ = std::make_unique<ActivationStore>(text_.tokens, hidden * sizeof(float), file("/x"));
  normed_ = std::make_unique<ActivationStore>(text_.tokens, hidden * sizeof(bf16), file("/normed"));
  for (auto* buffer : {&rows_, &normed_rows_, &out_rows_}) buffer->resize(rows * hidden);
  narrow_.resize(rows * hidden);
  ids_.resize(static_cast<size_t>(text_.tokens) * static_cast<size_t>(spec.moe.top_k));
  weights_.resize(ids_.size());
  const std::vector<int> routed = source_.layers();
  progress_.layers = static_cast<int>(routed.size());
  embed();
  for (int layer = 0; layer <= routed.back(); ++layer) {
    const bool routes = spec.layers.at(static_cast<size_t>(layer)).moe;
    attend(layer, routes);
    if (!routes) continue;
    const std::string path = rounded_layer_path(folder, layer);
    std::unique_ptr<RoundedLayer> kept = kept_layer(path, settings);
    if (kept) {
      ++progress_.layers_kept;
    } else {
      tell(layer, 0);
      round_layer(layer, path, settings);
      kept = std::make_unique<RoundedLayer>(path);
    }
    done_[layer] = std::move(kept);
    report_.layers.push_back({layer, done_[layer]->figures()});
    if (layer < routed.back()) apply(layer);
    ++progress_.layers_done;
  }
  release();
}

// What only run() needs; the conversion that follows has use for the memory.
void Calibration::release() {
  options_.progress = {};
  x_.reset();
  normed_.reset();
  walk_.reset();
  for (auto* buffer : {&rows_, &normed_rows_, &out_rows_, &weights_}) *buffer = {};
  narrow_ = {};
  ids_ = {};
}

Matrix Calibration::rounded(int layer, int expert, Projection projection) const {
  return done_.at(layer)->at(expert, projection, packed_format(packed_));
}

}  // namespace kt
