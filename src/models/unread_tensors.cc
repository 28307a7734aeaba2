#include "models/unread_tensors.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "base/utf8.h"
#include "weights/gguf/gguf_config.h"
#include "weights/linears.h"
#include "weights/stored_names.h"

namespace kt::inline models {
namespace {

constexpr size_t kMostNamed = 6;  // tensors in an error

constexpr const char *kFurtherTokens = "layers for further tokens",
                     *kSenses = "parts for images, sound or video",
                     *kTied = "a head where it is the embedding",
                     *kCacheScales = "scales of a cache in 8 bits", *kAngles = "angles that are computed",
                     *kZeroBiases = "biases of zero", *kIndexers = "indexers that nobody asks";

std::string of_tensors(size_t count) { return text("{} tensor{}", count, count == 1 ? "" : "s"); }

// The number of the layer that a name has after `prefix`, if it has one.
std::optional<int> layer_of(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  int layer = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  if (error != std::errc() || end == name.data() + name.size() || *end != '.') return std::nullopt;
  return layer;
}

bool has_any(std::string_view name, std::initializer_list<std::string_view> parts) {
  return std::ranges::any_of(parts, [&](std::string_view part) { return name.find(part) != name.npos; });
}

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> ends) {
  return std::ranges::any_of(ends, [&](std::string_view end) { return name.ends_with(end); });
}

// A bias of zeros, as exporters add to every matrix, changes nothing.
bool is_zero_bias(const Checkpoint& checkpoint, const Tensor& tensor) {
  if (!tensor.name.ends_with(".bias") || tensor.shape.size() != 1) return false;
  const Tensor* const named = checkpoint.find(tensor.name);
  if (named == nullptr || elements(named->shape) > (1 << 24)) return false;
  const std::vector<float> values = read_vector(checkpoint, tensor.name);
  return std::ranges::all_of(values, [](float value) { return value == 0; });
}

// Whether a layer of latent attention sees all keys, or those that another one chooses.
bool asks_nobody(const ModelSpec& spec, int layer) {
  const LayerSpec& of = spec.layers[static_cast<size_t>(layer)];
  return std::holds_alternative<MlaSpec>(of.mixer) && (!of.indexer() || of.indexer()->shared);
}

// Why a tensor may be left alone; null: nobody knows.
const char* why_idle(const Checkpoint& checkpoint, const ModelSpec& spec, const Tensor& tensor,
                     const std::string& root) {
  const std::string_view name = tensor.name;
  const int layers = static_cast<int>(spec.layers.size());
  for (const std::string& prefix : {stored_name(checkpoint, root + "layers."), std::string("blk.")})
    if (const auto layer = layer_of(name, prefix); layer && *layer >= layers) return kFurtherTokens;
  for (const std::string& prefix : {stored_name(checkpoint, root + "layers."), std::string("blk.")})
    if (const auto layer = layer_of(name, prefix);
        layer && has_any(name, {".indexer."}) && asks_nobody(spec, *layer))
      return kIndexers;
  if (name.starts_with("mtp.") || name.starts_with("mtp_") || has_any(name, {".mtp.", ".mtp_", ".nextn."}))
    return kFurtherTokens;
  if (has_any(name, {"visual.", "vision_", "vision.", "audio_", "multi_modal_projector.", "mm_projector."}))
    return kSenses;
  if (spec.tied_embeddings && (name == "output.weight" || name.ends_with("lm_head.weight"))) return kTied;
  if (ends_with_any(name, {".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale", ".attn_scale"}))
    return kCacheScales;
  if (ends_with_any(name, {"rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", ".attn_rot_embd"}))
    return kAngles;
  return is_zero_bias(checkpoint, tensor) ? kZeroBiases : nullptr;
}

}  // namespace

std::string IdleTensors::describe() const {
  if (count == 0) return "";
  std::string kinds;
  for (const std::string& one : why) kinds += (kinds.empty() ? "" : "; ") + one;
  return text("{} not used: {}", of_tensors(count), kinds);
}

IdleTensors idle_tensors(const Checkpoint& checkpoint, const ModelSpec& spec,
                         const std::set<std::string>& read, const ExpertSource* routed,
                         const std::string& root) {
  IdleTensors out;
  struct Kind {
    std::string first;
    size_t count = 0;
  };
  std::map<std::string_view, Kind> kinds;
  std::vector<std::string> unknown;
  for (const Tensor& tensor : checkpoint.tensors()) {
    if (read.contains(tensor.name)) continue;
    if (checkpoint.is_gguf() && is_gguf_config_tensor(tensor.name)) continue;
    if (routed ? routed->owns(tensor.name) : has_any(tensor.name, {".experts.", "_exps."})) continue;
    if (const char* why = why_idle(checkpoint, spec, tensor, root)) {
      ++out.count;
      Kind& kind = kinds[why];
      if (kind.count++ == 0) kind.first = printable(tensor.name);
    } else {
      unknown.push_back(tensor.name);
    }
  }
  if (!unknown.empty()) {
    std::string named;
    for (size_t i = 0; i < std::min(unknown.size(), kMostNamed); ++i)
      named += (i ? ", " : "") + std::string(printable(unknown[i]));
    fail("{}: {} that this kind of model has no use for: {}{}; what it computes without them would be wrong",
         checkpoint.path(), of_tensors(unknown.size()), named, unknown.size() > kMostNamed ? ", ..." : "");
  }
  for (const auto& [why, kind] : kinds)
    out.why.push_back(
        text("{} ({}{})", why, kind.first, kind.count > 1 ? text(" and {} more", kind.count - 1) : ""));
  return out;
}

}  // namespace kt::inline models
