#include "models/decided_placement.h"

#include <algorithm>

#include "base/text.h"
#include "formats/known_formats.h"

namespace kt::inline models {
namespace {

bool holds_something(const ModelModule& module) {
  using enum ModuleKind;
  return module.kind != kModel && module.kind != kDecoder && module.kind != kList && module.kind != kRotary &&
         module.kind != kExpert;
}

// Whether a rule leaves such a matrix alone unless it is told to round again.
bool would_stay(const Format& stored, const Format& wanted, int64_t n, int64_t k) {
  return stored_bits(stored, n, k) < kLeastRoundedBits ||
         (wanted == format_named("fp8") && stored.code == wanted.code);
}

void add_formats(const ModelModule& module, const PlacedModule& placed, DecidedModule& out) {
  for (size_t m = 0; m < placed.rounded.size(); ++m) {
    const std::optional<Format>& wanted = placed.rounded[m];
    out.formats.push_back(wanted ? name_of(*wanted) : "stored");
    if (!wanted || m >= module.formats.size()) continue;
    const bool down = m == 2;
    if (would_stay(module.formats[m], *wanted, down ? module.k : module.n, down ? module.n : module.k))
      out.rounds_again = true;
  }
}

// Layers whose GPU has the same copies for one reason.
OrderedJson copies_json(const Placement& placement) {
  OrderedJson out = OrderedJson::array();
  for (const LayerPlacement& layer : placement.layers) {
    if (layer.experts == 0) continue;
    OrderedJson* const last = out.empty() ? nullptr : &out.back();
    if (last && (*last)["experts"] == OrderedJson(layer.hot) &&
        (*last)["device"] == placement.device_of(layer.copies.place) &&
        (*last)["decided_by"] == layer.copies.decided_by) {
      (*last)["layers"].push_back(layer.layer);
      (*last)["bytes"] = (*last)["bytes"].get<uint64_t>() + layer.copies.bytes;
      continue;
    }
    out.push_back({{"layers", OrderedJson::array({layer.layer})},
                   {"device", placement.device_of(layer.copies.place)},
                   {"experts", layer.hot},
                   {"of", layer.experts},
                   {"bytes", layer.copies.bytes},
                   {"decided_by", layer.copies.decided_by}});
  }
  return out;
}

OrderedJson devices_json(const Placement& placement) {
  OrderedJson out = OrderedJson::array();
  const std::vector<PlaceBytes> all = bytes_by_place(placement);
  for (const DevicePlacement& device : placement.devices) {
    const auto found = std::ranges::find(all, device.place, &PlaceBytes::place);
    out.push_back({{"device", text("cuda:{}", out.size())},
                   {"name", text("{} ({})", name_of(device.place), device.name)},
                   {"bytes", found == all.end() ? 0 : found->bytes},
                   {"allowed", device.allowed},
                   {"free", device.free},
                   {"decided_by", device.decided_by}});
  }
  return out;
}

// "cuda:0, cuda:1, cpu": where layers keep what they keep.
std::string cache_devices(const Placement& placement) {
  std::vector<std::string> found;
  for (const LayerPlacement& layer : placement.layers)
    if (const std::string device = placement.device_of(layer.cache.place);
        std::ranges::find(found, device) == found.end())
      found.push_back(device);
  std::string out;
  for (const std::string& device : found) out += (out.empty() ? "" : ", ") + device;
  return out;
}

}  // namespace

DecidedPlacement decided(const PlacedRules& by_rules, const Placement* beside_gpu) {
  const PlacedRules placed = beside_gpu ? with_devices(by_rules, *beside_gpu) : by_rules;
  DecidedPlacement out{.family = placed.tree.family, .beside_gpu = beside_gpu != nullptr};
  for (size_t i = 0; i < placed.modules.size(); ++i) {
    const ModelModule& module = placed.tree.modules[i];
    if (!holds_something(module)) continue;
    const std::string& device = placed.modules[i].device;
    DecidedModule& one = out.modules.emplace_back(
        DecidedModule{.name = module.name, .kind = module.kind, .layer = module.layer});
    one.device = device.empty() ? "cpu" : device;
    add_formats(module, placed.modules[i], one);
    if (module.kind == ModuleKind::kExperts && beside_gpu)
      one.on_gpu = beside_gpu->layers[static_cast<size_t>(module.layer)].hot;
  }
  return out;
}

OrderedJson json_of(const PlacedRules& by_rules, const Placement* beside_gpu, const PlannedCache& cache) {
  const PlacedRules placed = beside_gpu ? with_devices(by_rules, *beside_gpu) : by_rules;
  OrderedJson parts = json_of(placed, beside_gpu != nullptr);
  OrderedJson out = {
      {"family", placed.tree.family},
      {"rules", placed.file.rules.empty() ? OrderedJson(nullptr) : OrderedJson(placed.file.name)},
      {"parts", std::move(parts["parts"])},
      {"bytes", std::move(parts["bytes"])},
      {"cache",
       {{"sequences", cache.sequences},
        {"context", cache.context},
        {"device", beside_gpu ? cache_devices(*beside_gpu) : "cpu"},
        {"bytes", cache.bytes}}},
      {"copies", beside_gpu ? copies_json(*beside_gpu) : OrderedJson::array()},
      {"prefill_threshold", 0},
      {"devices", beside_gpu ? devices_json(*beside_gpu) : OrderedJson::array()},
      {"idle", std::move(parts["idle"])},
      {"notes", std::move(parts["notes"])}};
  return out;
}

}  // namespace kt::inline models
