#include "weights/lora/lora_file.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "text/json.h"
#include "weights/linears.h"
#include "weights/lora/lora_file_state.h"

namespace kt::inline weights {
namespace {

constexpr const char* kConfig = "adapter_config.json";
constexpr const char* kTensors = "adapter_model.safetensors";
constexpr const char* kRoutedExperts = "experts";
constexpr const char* kFusedExperts = "fused_expert_lora.safetensors";  // of experts, beside PEFT's own file

std::string_view cut_before(std::string_view text, std::string_view mark) {
  return text.substr(0, text.find(mark));
}

std::optional<int> number(std::string_view digits) {
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || value < 0) return {};
  return value;
}

std::optional<Projection> projection_named(std::string_view name) {
  constexpr std::array<std::tuple<std::string_view, Projection>, 6> kNames = {
      {{"gate_proj", Projection::kGate},
       {"w1", Projection::kGate},
       {"up_proj", Projection::kUp},
       {"w3", Projection::kUp},
       {"down_proj", Projection::kDown},
       {"w2", Projection::kDown}}};
  for (const auto& [known, projection] : kNames)
    if (known == name) return projection;
  return {};
}

// ".lora_A.weight", or with the adapter's name in it, as it stands in memory.
struct Ending {
  std::string_view module;
  char factor = 0;  // 'A' or 'B'
};
std::optional<Ending> ending_of(std::string_view tensor) {
  const size_t at = tensor.rfind(".lora_");
  if (at == std::string_view::npos || !tensor.ends_with(".weight")) return {};
  const std::string_view rest = tensor.substr(at + 6);
  if ((rest.front() != 'A' && rest.front() != 'B') || rest.size() < 2 || rest[1] != '.') return {};
  return Ending{tensor.substr(0, at), rest.front()};
}

void refuse_if(bool wrong, const std::string& file, std::string_view what) {
  if (wrong) fail_as(ErrorKind::kUnsupported, "{}: {}", file, what);
}

bool is_set(const Json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end() || found->is_null()) return false;
  if (found->is_boolean()) return found->get<bool>();
  return !(found->is_array() || found->is_object()) || !found->empty();
}

double number_in(const Json& config, const char* key, const std::string& file) {
  const auto found = config.find(key);
  if (found == config.end() || !found->is_number())
    fail("{}: expected a number as {}, found {}", file, key,
         found == config.end() ? std::string("none") : found->dump().substr(0, 60));
  return found->get<double>();
}

}  // namespace

// Names of layers are the same whatever a model stands inside of.
std::string_view from_layers(std::string_view module) {
  for (size_t at = module.find("layers."); at != std::string_view::npos; at = module.find("layers.", at + 1))
    if (at == 0 || module[at - 1] == '.') return module.substr(at);
  return module;
}

std::optional<LoraTarget> expert_target(std::string_view module) {
  constexpr std::string_view kExperts = ".experts";
  const size_t at = module.find(kExperts);
  if (!module.starts_with("layers.") || at == std::string_view::npos) return {};
  const std::optional<int> layer = number(cut_before(module.substr(7), "."));
  std::string_view rest = module.substr(at + kExperts.size());
  if (!layer || (!rest.empty() && rest.front() != '.')) return {};
  if (rest.empty() || rest == ".base_layer")
    return LoraTarget{.module = std::string(module), .layer = *layer};
  rest.remove_prefix(1);
  const size_t dot = rest.find('.');
  if (dot == std::string_view::npos) return {};
  const std::optional<int> expert = number(rest.substr(0, dot));
  const std::optional<Projection> projection = projection_named(rest.substr(dot + 1));
  if (!expert || !projection) return {};
  return LoraTarget{.layer = *layer, .expert = *expert, .projection = projection};
}

namespace {

// "layers.3.self_attn.q_proj", "3.q_proj".
bool has_number(std::string_view module) {
  while (!module.empty()) {
    const std::string_view part = cut_before(module, ".");
    if (number(part)) return true;
    module.remove_prefix(std::min(part.size() + 1, module.size()));
  }
  return false;
}

// Whether PEFT put factors on the named modules of all layers: names that are a pattern, or hold a layer, may leave
// some out.
bool targets_every_layer(const Json& config) {
  for (const char* key : {"layers_to_transform", "layers_pattern", "exclude_modules"})
    if (is_set(config, key)) return false;
  for (const char* key : {"target_modules", "target_parameters"}) {
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) continue;
    if (!found->is_array()) return false;
    for (const Json& name : *found)
      if (!name.is_string() || has_number(name.get<std::string>())) return false;
  }
  return true;
}

// "layers.3.self_attn.q_proj" -> "self_attn.q_proj"; "" for what is in no layer.
std::string_view inside_layer(std::string_view module) {
  const std::string_view from = from_layers(module);
  const size_t dot = from.find('.', 7);
  return from.starts_with("layers.") && dot != from.npos ? from.substr(dot + 1) : std::string_view();
}

}  // namespace

void LoraFile::State::open_folder() {
  namespace fs = std::filesystem;
  const std::string config = path + "/" + kConfig, tensors = path + "/" + kTensors;
  std::error_code none;
  if (!fs::exists(config, none)) fail("{}: no {}: not a folder that PEFT saved an adapter in", path, kConfig);
  if (!fs::exists(tensors, none)) fail("{}: no {}", path, kTensors);
  read_config(config);
  files.emplace_back(tensors);
  for (const Tensor& tensor : files.back().tensors()) add_peft(tensor, 0);
  const std::string experts = path + "/" + kFusedExperts;
  if (!fs::exists(experts, none)) return;
  files.emplace_back(experts);
  for (const Tensor& tensor : files.back().tensors()) add_fused(tensor, 1);
}

void LoraFile::State::read_config(const std::string& file) {
  const Json config = read_json(file);
  if (!config.is_object()) fail("{}: expected an object", file);
  const std::string kind = config.value("peft_type", Json("LORA")).dump();
  refuse_if(kind != "\"LORA\"", file, text("peft_type {}: only LORA adapters are read", kind));
  refuse_if(is_set(config, "use_dora"), file, "use_dora: adapters with DoRA are not read");
  refuse_if(is_set(config, "fan_in_fan_out"), file, "fan_in_fan_out: not read");
  refuse_if(is_set(config, "lora_bias"), file, "lora_bias: trained biases are not read");
  const Json bias = config.value("bias", Json("none"));
  refuse_if(bias != Json("none"), file, text("bias {}: trained biases are not read", bias.dump()));
  if (is_set(config, "modules_to_save"))
    refuse_if(
        true, file,
        text("modules_to_save {}: modules trained whole are not read", config["modules_to_save"].dump()));
  refuse_if(is_set(config, "layer_replication"), file, "layer_replication: not read");
  refuse_if(is_set(config, "trainable_token_indices"), file, "trainable_token_indices: not read");
  alpha = number_in(config, "lora_alpha", file);
  rank_stabilised = is_set(config, "use_rslora");
  every_layer = targets_every_layer(config);
  read_patterns(config, file);
}

void LoraFile::State::read_patterns(const Json& config, const std::string& file) {
  const auto found = config.find("alpha_pattern");
  if (found == config.end() || found->is_null()) return;
  if (!found->is_object()) fail("{}: expected an object as alpha_pattern", file);
  for (const auto& [pattern, value] : found->items())
    alphas.emplace_back(Regex("(?:.*\\.)?(?:" + pattern + ")$", RegexDialect::kPython),
                        number_in(*found, pattern.c_str(), file));
}

void LoraFile::State::add(const LoraTarget& target, char factor, const Tensor& tensor, std::string name,
                          int file) {
  LoraPair& pair = pairs[target];
  const Tensor*& to = factor == 'A' ? pair.a : pair.b;
  if (to) fail("{}: {} and {} are the same factor", path, to->name, tensor.name);
  to = &tensor;
  pair.name = std::move(name);
  pair.file = file;
}

void LoraFile::State::add_peft(const Tensor& tensor, int file) {
  const std::optional<Ending> ending = ending_of(tensor.name);
  if (!ending)
    fail_as(ErrorKind::kUnsupported, "{}: {}: neither lora_A nor lora_B of a matrix", path, tensor.name);
  std::string_view module = ending->module;
  constexpr std::string_view kRoot = "base_model.model.";
  if (module.starts_with(kRoot)) module.remove_prefix(kRoot.size());
  const std::string_view inside = from_layers(module);
  const LoraTarget target = expert_target(inside).value_or(LoraTarget{.module = std::string(inside)});
  add(target, ending->factor, tensor, std::string(module), file);
}

// "layers.3.experts.gate_lora_a" [experts, rank, in], "..._b" [experts, out, rank].
void LoraFile::State::add_fused(const Tensor& tensor, int file) {
  const std::string_view name = from_layers(tensor.name);
  const std::optional<int> layer =
      name.starts_with("layers.") ? number(cut_before(name.substr(7), ".")) : std::nullopt;
  const size_t dot = name.rfind('.');
  const std::string_view last = dot == std::string_view::npos ? name : name.substr(dot + 1);
  const size_t lora = last.find("_lora_");
  const auto projection = lora == std::string_view::npos
                              ? std::nullopt
                              : projection_named(std::string(last.substr(0, lora)) + "_proj");
  const std::string_view factor = lora == std::string_view::npos ? "" : last.substr(lora + 6);
  if (!layer || !projection || (factor != "a" && factor != "b"))
    fail("{}: {}: expected layers.N.experts.gate_lora_a and the like", path, tensor.name);
  add({.layer = *layer, .projection = projection}, factor == "a" ? 'A' : 'B', tensor, "", file);
}

double LoraFile::State::alpha_of(const LoraPair& pair, std::string_view parameter) const {
  const std::string name = pair.name + std::string(parameter);
  for (const auto& [pattern, value] : alphas)
    if (RegexSearch(pattern, name, kMostNameSteps).at_start()) return value;
  return alpha;
}

float LoraFile::State::scale_of(const LoraPair& pair, std::string_view parameter, int rank) const {
  const double of = alpha_of(pair, parameter);
  return static_cast<float>(rank_stabilised ? of / std::sqrt(static_cast<double>(rank)) : of / rank);
}

std::vector<float> LoraFile::State::values(const LoraPair&, const Tensor& tensor) const {
  taken.insert(&tensor);
  const LoraView all = flat_view_of(path, tensor);
  std::vector<float> out(static_cast<size_t>(all.columns));
  read_rows(all, 0, 1, out.data(), path + ": " + tensor.name);
  return out;
}

void LoraFile::State::wrong_shape(const Tensor& tensor, const std::string& expected) const {
  fail("{}: {}: expected {}, found {}", path, tensor.name, expected, describe(tensor));
}

// Null: it has none. One factor alone is an Error.
const LoraPair* LoraFile::State::find(const LoraTarget& target) const {
  const auto found = pairs.find(target);
  if (found == pairs.end()) return nullptr;
  const LoraPair& pair = found->second;
  if (!pair.a || !pair.b)
    fail("{}: {} stands alone: its other factor is missing", path, (pair.a ? pair.a : pair.b)->name);
  return &pair;
}

LowRankFactors LoraFile::State::matrix(const LoraPair& pair, std::string_view parameter, int64_t n,
                                       int64_t k) const {
  const std::vector<int64_t>& a = pair.a->shape;
  if (a.size() != 2 || a[0] < 1 || a[1] != k) wrong_shape(*pair.a, text("[rank, {}]", k));
  if (pair.b->shape != std::vector<int64_t>{n, a[0]}) wrong_shape(*pair.b, text("[{}, {}]", n, a[0]));
  const int rank = static_cast<int>(a[0]);
  return {.rank = rank,
          .scale = scale_of(pair, parameter, rank),
          .a = values(pair, *pair.a),
          .b = values(pair, *pair.b)};
}

// Whether a pair of PEFT's `target_parameters` is gate and up's (a [E * r, hidden], b [2 inter, r * E]) or down's.
bool LoraFile::State::is_fused(const LoraPair& pair, const ExpertSizes& sizes, bool gate_up) const {
  const int64_t in = gate_up ? sizes.hidden : sizes.inter,
                out = gate_up ? 2 * int64_t{sizes.inter} : sizes.hidden;
  return pair.a->shape.size() == 2 && pair.b->shape.size() == 2 && pair.a->shape[1] == in &&
         pair.b->shape[0] == out && pair.a->shape[0] == pair.b->shape[1] &&
         pair.a->shape[0] >= sizes.experts && pair.a->shape[0] % sizes.experts == 0;
}

// Rows of a are expert * rank + r, columns of b r * experts + expert.
LowRankFactors LoraFile::State::fused(const LoraPair& pair, const char* parameter, int count) const {
  const auto experts = static_cast<size_t>(count);
  const auto rank = static_cast<size_t>(pair.a->shape[0]) / experts,
             out = static_cast<size_t>(pair.b->shape[0]);
  LoraPair named = pair;
  constexpr std::string_view kInner = ".base_layer";
  while (named.name.ends_with(kInner)) named.name.resize(named.name.size() - kInner.size());
  LowRankFactors factors{.rank = static_cast<int>(rank),
                         .scale = scale_of(named, parameter, static_cast<int>(rank)),
                         .a = values(pair, *pair.a)};
  const std::vector<float> stored = values(pair, *pair.b);
  factors.b.resize(stored.size());
  for (size_t e = 0; e < experts; ++e)
    for (size_t o = 0; o < out; ++o)
      for (size_t r = 0; r < rank; ++r)
        factors.b[(e * out + o) * rank + r] = stored[o * rank * experts + r * experts + e];
  return factors;
}

// [experts, rank, in] and [experts, out, rank].
LowRankFactors LoraFile::State::stacked(const LoraPair& pair, int experts, int64_t n, int64_t k) const {
  const std::vector<int64_t>& a = pair.a->shape;
  if (a.size() != 3 || a[0] != experts || a[1] < 1 || a[2] != k)
    wrong_shape(*pair.a, text("[{}, rank, {}]", experts, k));
  if (pair.b->shape != std::vector<int64_t>{experts, n, a[1]})
    wrong_shape(*pair.b, text("[{}, {}, {}]", experts, n, a[1]));
  const int rank = static_cast<int>(a[1]);
  return {.rank = rank,
          .scale = scale_of(pair, "", rank),
          .a = values(pair, *pair.a),
          .b = values(pair, *pair.b)};
}

// Factors of single experts: those without any get zeros; all others have one rank and one scale.
LowRankFactors LoraFile::State::gathered(int layer, Projection projection, int experts, int64_t n,
                                         int64_t k) const {
  LowRankFactors all;
  for (int e = 0; e < experts; ++e) {
    const LoraPair* const pair = find({.layer = layer, .expert = e, .projection = projection});
    if (!pair) continue;
    LowRankFactors one = matrix(*pair, "", n, k);
    if (all.rank == 0) {
      all = {.rank = one.rank, .scale = one.scale};
      all.a.resize(static_cast<size_t>(experts) * one.a.size());
      all.b.resize(static_cast<size_t>(experts) * one.b.size());
    }
    if (one.rank != all.rank || one.scale != all.scale)
      fail_as(ErrorKind::kUnsupported,
              "{}: {}: rank {} and scale {}, where other experts of layer {} have {} and {}", path,
              pair->a->name, one.rank, one.scale, layer, all.rank, all.scale);
    std::ranges::copy(one.a, all.a.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(e) * one.a.size()));
    std::ranges::copy(one.b, all.b.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(e) * one.b.size()));
  }
  return all;
}

LowRankFactors LoraFile::State::projection_of(int layer, Projection projection, int experts, int64_t n,
                                              int64_t k) const {
  if (const LoraPair* pair = find({.layer = layer, .projection = projection}))
    return stacked(*pair, experts, n, k);
  return gathered(layer, projection, experts, n, k);
}

namespace {

// Factors of gate and of up as those of both together.
LowRankFactors joined(const LowRankFactors& gate, const LowRankFactors& up, const ExpertSizes& sizes) {
  if (gate.rank == 0 && up.rank == 0) return {};
  const auto experts = static_cast<size_t>(sizes.experts), hidden = static_cast<size_t>(sizes.hidden),
             inter = static_cast<size_t>(sizes.inter);
  const auto g = static_cast<size_t>(gate.rank), u = static_cast<size_t>(up.rank), rank = g + u;
  LowRankFactors out{.rank = static_cast<int>(rank), .scale = gate.rank ? gate.scale : up.scale};
  const float up_factor =
      up.rank ? up.scale / out.scale : 1;  // 1 but where patterns give them different alphas
  out.a.resize(experts * rank * hidden);
  out.b.resize(experts * 2 * inter * rank);
  for (size_t e = 0; e < experts; ++e) {
    float* a = out.a.data() + e * rank * hidden;
    if (g) std::copy_n(gate.a.data() + e * g * hidden, g * hidden, a);
    if (u) std::copy_n(up.a.data() + e * u * hidden, u * hidden, a + g * hidden);
    float* b = out.b.data() + e * 2 * inter * rank;
    for (size_t o = 0; o < inter; ++o) {
      for (size_t r = 0; r < g; ++r) b[o * rank + r] = gate.b[(e * inter + o) * g + r];
      for (size_t r = 0; r < u; ++r)
        b[(inter + o) * rank + g + r] = up_factor * up.b[(e * inter + o) * u + r];
    }
  }
  return out;
}

}  // namespace

LoraFile::LoraFile(const std::string& path, GgufFamilies families, const AttentionHeads& heads)
    : state_(std::make_unique<State>()) {
  state_->path = path;
  state_->heads = heads;
  std::error_code none;
  if (std::filesystem::is_directory(path, none))
    state_->open_folder();
  else if (path.ends_with(".gguf") && std::filesystem::exists(path, none))
    state_->open_gguf(families);
  else
    fail("{}: expected an adapter: a folder that PEFT saved, or a .gguf file", path);
  if (state_->pairs.empty()) fail("{}: an adapter without a tensor", path);
  for (const auto& [target, pair] : state_->pairs)
    if (target.layer >= 0 && target.expert < 0 && !target.module.empty())
      state_->fused_pairs[target.layer].push_back(&pair);
}

LoraFile::~LoraFile() = default;
LoraFile::LoraFile(LoraFile&&) noexcept = default;
const std::string& LoraFile::path() const { return state_->path; }

std::optional<LowRankFactors> LoraFile::linear(std::string_view module, int64_t n, int64_t k) const {
  const std::string inside(from_layers(module));
  if (const LoraPair* const pair = state_->find({.module = inside})) {
    LowRankFactors out = state_->matrix(*pair, "", n, k);
    state_->order_rows(inside, *pair, out);
    return out;
  }
  std::optional<LowRankFactors> joined = state_->joined_halves(inside, n, k);
  if (!joined) state_->lacking.push_back(inside);
  return joined;
}

std::optional<ExpertFactors> LoraFile::mlp(const std::array<std::string, 3>& modules, int hidden,
                                           int inter) const {
  const auto of = [&](const std::string& module, int64_t n, int64_t k) {
    return linear(module, n, k).value_or(LowRankFactors{});
  };
  const LowRankFactors gate = of(modules[0], inter, hidden), up = of(modules[1], inter, hidden);
  ExpertFactors out{.gate_up = joined(gate, up, {.experts = 1, .hidden = hidden, .inter = inter}),
                    .down = of(modules[2], hidden, inter)};
  if (out.gate_up.rank == 0 && out.down.rank == 0) return {};
  return out;
}

std::optional<ExpertFactors> LoraFile::experts(int layer, const ExpertSizes& sizes) const {
  const State& s = *state_;
  ExpertFactors out;
  for (const auto& [target, unused] : s.pairs) {
    if (target.layer != layer || target.expert >= 0 || target.module.empty()) continue;
    const LoraPair& pair = *s.find(target);
    if (s.is_fused(pair, sizes, true) && out.gate_up.rank == 0)
      out.gate_up = s.fused(pair, ".gate_up_proj", sizes.experts);
    else if (s.is_fused(pair, sizes, false) && out.down.rank == 0)
      out.down = s.fused(pair, ".down_proj", sizes.experts);
    else
      fail("{}: {} {} and {} {}: neither gate and up nor down of {} experts of {} x {}", s.path, pair.a->name,
           shape_text(pair.a->shape), pair.b->name, shape_text(pair.b->shape), sizes.experts, sizes.hidden,
           sizes.inter);
  }
  if (const LoraPair* both = s.find({.layer = layer}); both && out.gate_up.rank == 0)
    out.gate_up = s.stacked(*both, sizes.experts, 2 * int64_t{sizes.inter}, sizes.hidden);
  if (out.gate_up.rank == 0)
    out.gate_up =
        joined(s.projection_of(layer, Projection::kGate, sizes.experts, sizes.inter, sizes.hidden),
               s.projection_of(layer, Projection::kUp, sizes.experts, sizes.inter, sizes.hidden), sizes);
  if (out.down.rank == 0)
    out.down = s.projection_of(layer, Projection::kDown, sizes.experts, sizes.hidden, sizes.inter);
  if (out.gate_up.rank == 0 && out.down.rank == 0) {
    s.lacking.push_back(text("layers.{}.{}", layer, kRoutedExperts));
    return {};
  }
  return out;
}

// What some layers have and others lack: part of the file is gone, or it is another model's.
void LoraFile::State::check_layers() const {
  if (!every_layer) return;
  std::map<std::string_view, const Tensor*> had;  // by what stands behind the number of a layer
  for (const auto& [target, pair] : pairs)
    had.emplace(target.layer >= 0 ? std::string_view(kRoutedExperts) : inside_layer(target.module), pair.a);
  for (const std::string& module : lacking)
    if (const auto found = had.find(inside_layer(module)); found != had.end() && !found->first.empty())
      fail(
          "{}: no factors for {}, which other layers have ({} {}): part of the adapter is missing, or it is "
          "another model's",
          path, module, found->second->name, shape_text(found->second->shape));
}

void LoraFile::check_all_taken() const {
  std::vector<std::string> left;
  for (const auto& [target, pair] : state_->pairs)
    for (const Tensor* tensor : {pair.a, pair.b})
      if (tensor && !state_->taken.contains(tensor))
        left.push_back(tensor->name + " " + shape_text(tensor->shape));
  if (left.empty()) return state_->check_layers();
  fail("{}: {} of {} pairs of factors fit no matrix of this model: {}{}", state_->path, (left.size() + 1) / 2,
       state_->pairs.size(), left.front(), left.size() > 1 ? ", ..." : "");
}

}  // namespace kt::inline weights
