#include "models/weight_loader.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "formats/matrix.h"
#include "models/load_experts.h"
#include "weights/stored_names.h"

namespace kt::inline models {

WeightLoader::WeightLoader(const Checkpoint& checkpoint, const ModelSpec& spec, Ops& ops,
                           WeightOptions options, const ExpertSource* routed)
    : checkpoint_(checkpoint), spec_(spec), ops_(ops), options_(std::move(options)) {
  for (LinearModule& module :
       find_linears(checkpoint, [&](std::string_view name) { return routed && routed->owns(name); })) {
    std::string name = module.module;
    modules_.emplace(std::move(name), std::move(module));
  }
  find_root();
}

// Models inside larger ones keep their names behind another prefix.
void WeightLoader::find_root() {
  for (const char* candidate : {"model.", "language_model.model.", "model.language_model.", ""}) {
    root_ = candidate;
    if (!checkpoint_.find(stored_name(checkpoint_, rooted(spec_.embedding) + ".weight"))) continue;
    // Beside converted experts a "model." may have gone from the embedding's name: layers tell.
    if (!checkpoint_.has_kt_experts() || has_layers()) return;
  }
  root_ = "model.";
  checkpoint_.at(stored_name(checkpoint_, spec_.embedding + ".weight"));  // says that it is missing
}

bool WeightLoader::has_layers() const {
  const std::string first = linear_name(checkpoint_, in_layer(0, ""));
  const auto found = modules_.lower_bound(first);
  return found != modules_.end() && found->first.starts_with(first);
}

const LinearModule* WeightLoader::find_module(const std::string& module) const {
  const auto found = modules_.find(linear_name(checkpoint_, module));
  return found == modules_.end() ? nullptr : &found->second;
}

std::string WeightLoader::rooted(const std::string& name) const {
  return name.starts_with("model.") ? root_ + name.substr(6) : name;
}

std::string WeightLoader::in_layer(int layer, const std::string& name) const {
  return text("{}.{}.{}", rooted(spec_.prefix), layer, name);
}

// The head stands beside "model.", within a larger model too.
std::string WeightLoader::head() const {
  if (spec_.tied_embeddings) return rooted(spec_.embedding);
  const std::string within = "language_model." + spec_.head;
  return find_module(within) ? within : spec_.head;
}

std::vector<float> WeightLoader::floats(const std::string& tensor, int64_t size) const {
  const std::string stored = stored_name(checkpoint_, tensor);
  read_.insert(stored);
  const auto check = [&](int64_t found) {
    if (found != size)
      fail("{}: expected {} floats, found {}", stored, size, describe(checkpoint_.at(stored)));
  };
  if (ops_.sizes_only()) {
    check(elements(checkpoint_.at(stored).shape));
    return std::vector<float>(static_cast<size_t>(size));
  }
  std::vector<float> values = read_vector(checkpoint_, tensor);
  check(static_cast<int64_t>(values.size()));
  return values;
}

std::unique_ptr<PlacedVector> WeightLoader::vector(const std::string& tensor, int64_t size,
                                                   double factor) const {
  std::vector<float> values = floats(tensor, size);
  if (factor != 1)
    for (float& value : values) value = static_cast<float>(value * factor);
  return ops_.make_vector(std::move(values));
}

float WeightLoader::number(const std::string& tensor) const { return floats(tensor, 1).front(); }

void WeightLoader::embed(const StoredMatrix& embedding, int64_t token, float* to) const {
  embedding.values(token, 1, to);
  if (spec_.embedding_scale == 1) return;
  const auto factor = static_cast<float>(spec_.embedding_scale);
  for (int64_t i = 0; i < embedding.k; ++i) to[i] *= factor;
}

std::unique_ptr<PlacedVector> WeightLoader::norm(const std::string& module, int64_t size) const {
  std::vector<float> values = floats(module + ".weight", size);
  if (spec_.norms_add_one && !checkpoint_.is_gguf())  // such files have the sums
    for (float& value : values) value += 1;
  return ops_.make_vector(std::move(values));
}

std::unique_ptr<PlacedVector> WeightLoader::decay_rates(const std::string& tensor, int64_t size) const {
  std::vector<float> values = floats(tensor, size);
  if (!checkpoint_.is_gguf())  // such files have the rates
    for (float& value : values) value = -std::exp(value);
  return ops_.make_vector(std::move(values));
}

std::unique_ptr<PlacedVector> WeightLoader::taps(const std::string& module, int64_t channels,
                                                 int64_t taps) const {
  std::vector<float> stored;
  if (find_module(module)) {
    const std::unique_ptr<StoredMatrix> matrix = this->stored(module);
    if (matrix->n != channels || matrix->k != taps)
      fail("{}: expected [{}, {}], found [{}, {}]", matrix->name, channels, taps, matrix->n, matrix->k);
    stored.resize(static_cast<size_t>(channels * taps));
    if (!ops_.sizes_only()) matrix->values(0, channels, stored.data());
  } else {
    stored = floats(module + ".weight", channels * taps);
  }
  std::vector<float> values(stored.size());
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < taps; ++j)
      values[static_cast<size_t>(j * channels + c)] = stored[static_cast<size_t>(c * taps + j)];
  return ops_.make_vector(std::move(values));
}

std::unique_ptr<StoredMatrix> WeightLoader::stored(const std::string& module) const {
  const LinearModule* const found = find_module(module);
  KT_CHECK(found, "{}: no module {}", checkpoint_.path(), module);
  for (const Tensor* tensor : found->tensors) read_.insert(tensor->name);
  return open_linear(checkpoint_, *found);
}

std::unique_ptr<StoredMatrix> WeightLoader::matrix(const std::string& module, int64_t n, int64_t k) const {
  const LinearModule* const found = find_module(module);
  if (found == nullptr) {
    const Tensor& tensor = checkpoint_.at(stored_name(checkpoint_, module + ".weight"));
    fail("{}: expected a matrix, found {}", tensor.name, describe(tensor));
  }
  for (const Tensor* tensor : found->tensors) read_.insert(tensor->name);
  std::unique_ptr<StoredMatrix> opened = open_linear(checkpoint_, *found);
  if (opened->n != n || opened->k != k)
    fail("{}: expected [{}, {}], found [{}, {}]", opened->name, n, k, opened->n, opened->k);
  const MatrixRounding& rounding = options_.linear_rounding;
  return rounding ? rounding(std::move(opened), module) : std::move(opened);
}

std::optional<Format> WeightLoader::format_of(const std::string& module) const {
  const LinearFormats& formats = options_.linear_formats;
  if (formats.empty()) return options_.linear_format;
  const bool inside = module.starts_with(root_) && module != head();
  const auto found = formats.find(inside             ? "model." + module.substr(root_.size())
                                  : module == head() ? spec_.head
                                                     : module);
  return found == formats.end() ? options_.linear_format : std::optional(found->second);
}

// In the format asked for, for matrices whose rounding a user may choose.
std::unique_ptr<StoredMatrix> WeightLoader::dense_matrix(const std::string& module, int64_t n,
                                                         int64_t k) const {
  std::unique_ptr<StoredMatrix> stored = matrix(module, n, k);
  const std::optional<Format> format = format_of(module);
  return format && !(stored->format == *format) ? requantised(std::move(stored), *format) : std::move(stored);
}

void WeightLoader::will_take(size_t bytes) { loading_bytes_ = std::max(loading_bytes_, bytes); }

std::unique_ptr<PlacedLinear> WeightLoader::packed(const StoredMatrix& stored, const std::string& module,
                                                   bool bias, Precision precision) {
  const std::vector<float> biases = bias ? floats(module + ".bias", stored.n) : std::vector<float>{};
  const StoredMatrix* const alone[] = {&stored};
  will_take(kt::loading_bytes(alone));
  std::unique_ptr<PlacedLinear> linear = ops_.make_linear(reader_of(stored), biases, precision, module);
  adapt(*linear, module);
  return linear;
}

// Adapters know a head by its own name, also where its weights are the embedding's.
std::string WeightLoader::adapted_name(const std::string& module) const {
  return spec_.tied_embeddings && module == head() ? spec_.head : module;
}

std::vector<LowRankFactors> WeightLoader::adapters(const std::string& module, int64_t n, int64_t k) const {
  std::vector<LowRankFactors> out;
  for (const auto& adapter : options_.adapters)
    out.push_back(adapter->linear(adapted_name(module), n, k).value_or(LowRankFactors{}));
  return out;
}

LinearAdapter WeightLoader::low_rank(const LowRankFactors& factors, int64_t n, int64_t k,
                                     std::string_view name) const {
  if (factors.rank == 0) return {};
  const auto make = [&](const std::vector<float>& values, int64_t rows, int64_t columns) {
    return ops_.make_linear(quantise(format_named("f32"), values, rows, columns).view(), Precision::kF32,
                            name);
  };
  return {.down = make(factors.a, factors.rank, k),
          .up = make(factors.b, n, factors.rank),
          .scale = factors.scale};
}

void WeightLoader::adapt(PlacedLinear& linear, const std::string& module) const {
  for (const LowRankFactors& factors : adapters(module, linear.n(), linear.k()))
    linear.adapters.push_back(low_rank(factors, linear.n(), linear.k(), module));
}

std::unique_ptr<PlacedLinear> WeightLoader::linear(const std::string& module, int64_t n, int64_t k,
                                                   bool bias) {
  return packed(*dense_matrix(module, n, k), module, bias, options_.precision);
}

std::unique_ptr<PlacedLinear> WeightLoader::exact_linear(const std::string& module, int64_t n, int64_t k,
                                                         bool bias) {
  return packed(*matrix(module, n, k), module, bias, Precision::kF32);
}

void WeightLoader::adapt(PlacedExperts& experts, FindFactors find) const {
  const auto taken = [](LowRankFactors& factors) {
    return ExpertLowRank{
        .rank = factors.rank, .scale = factors.scale, .a = std::move(factors.a), .b = std::move(factors.b)};
  };
  for (const auto& adapter : options_.adapters) {
    ExpertFactors factors = find(*adapter).value_or(ExpertFactors{});
    ops_.add_adapter(experts, taken(factors.gate_up), taken(factors.down));
  }
}

// As the only expert of a layer.
std::unique_ptr<PlacedExperts> WeightLoader::mlp(const MlpModules& of) {
  const int64_t hidden = spec_.hidden;
  const auto& [gate, up, down] = of.modules;
  const auto g = dense_matrix(gate, of.inter, hidden), u = dense_matrix(up, of.inter, hidden),
             d = dense_matrix(down, hidden, of.inter);
  const StoredMatrix* const together[] = {g.get(), u.get(), d.get()};
  will_take(kt::loading_bytes(together));
  std::vector<float> gate_bias, up_bias, down_bias;
  if (of.bias) {
    gate_bias = floats(gate + ".bias", of.inter);
    up_bias = floats(up + ".bias", of.inter);
    down_bias = floats(down + ".bias", hidden);
    expert_bias_bytes_ += static_cast<size_t>(2 * of.inter + hidden) * sizeof(float);
  }
  const auto data = [](const std::vector<float>& bias) { return bias.empty() ? nullptr : bias.data(); };
  const auto load = [&](int, FunctionRef<void(const ExpertRows&)> use) {
    use({.gate = reader_of(*g),
         .up = reader_of(*u),
         .down = reader_of(*d),
         .gate_bias = data(gate_bias),
         .up_bias = data(up_bias),
         .down_bias = data(down_bias)});
  };
  auto mlp = ops_.make_mlp({.experts = 1, .hidden = spec_.hidden, .inter = of.inter},
                           {.gate = g->format,
                            .up = u->format,
                            .down = d->format,
                            .activation = of.activation,
                            .precision = options_.precision,
                            .max_tokens = options_.max_tokens},
                           {.name = gate, .experts = 1, .load = load, .together = true});
  adapt(*mlp, [&](const LoraFile& adapter) { return adapter.mlp(of.modules, spec_.hidden, of.inter); });
  return mlp;
}

// What reading a layer's experts takes, and biases, which are not packed with them.
void WeightLoader::count_experts(const ExpertSource& source, int layer) {
  const auto gate = source.at(layer, 0, Projection::kGate), up = source.at(layer, 0, Projection::kUp),
             down = source.at(layer, 0, Projection::kDown);
  const StoredMatrix* const together[] = {gate.get(), up.get(), down.get()};
  will_take(kt::loading_bytes(together));
  int64_t floats = 0;
  for (const Projection projection : kProjections)
    if (source.bias(layer, 0, projection))
      floats += projection == Projection::kDown ? source.hidden() : source.inter();
  expert_bias_bytes_ += static_cast<size_t>(source.experts() * floats) * sizeof(float);
}

std::unique_ptr<PlacedExperts> WeightLoader::experts(const ExpertSource& source, int layer,
                                                     const MoeSpec& moe) {
  if (source.experts() != moe.experts || source.hidden() != spec_.hidden || source.inter() != moe.inter)
    fail("{}: the config has {} experts of {} x {}, the weights {} of {} x {}", checkpoint_.path(),
         moe.experts, spec_.hidden, moe.inter, source.experts(), source.hidden(), source.inter());
  count_experts(source, layer);
  const auto number = static_cast<size_t>(layer);
  const std::span<const int> hot =
      number < options_.hot.size() ? std::span<const int>(options_.hot[number]) : std::span<const int>();
  auto experts = ops_.make_experts(
      experts_shape(source),
      experts_options(
          source, layer,
          {.activation = moe.activation, .precision = options_.precision, .max_tokens = options_.max_tokens}),
      fill_of(source, layer, ops_.loading_threads()), hot);
  const ExpertSizes sizes{.experts = moe.experts, .hidden = spec_.hidden, .inter = moe.inter};
  adapt(*experts, [&](const LoraFile& adapter) { return adapter.experts(layer, sizes); });
  return experts;
}

}  // namespace kt::inline models
