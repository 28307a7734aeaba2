// A Placement as a table and as JSON.
#include <algorithm>
#include <functional>

#include "base/text.h"
#include "models/placement.h"
#include "terminal/report.h"

namespace kt::inline models {
namespace {

// Layers whose part lies in one place for one reason.
struct PartRow {
  std::vector<int> layers;
  PlacedPart part;
};

std::vector<PartRow> rows_of(const Placement& placement, PlacedPart LayerPlacement::* of) {
  std::vector<PartRow> out;
  for (const LayerPlacement& layer : placement.layers) {
    const PlacedPart& part = layer.*of;
    if (part.bytes == 0) continue;
    const auto same = [&](const PartRow& row) {
      return row.part.place == part.place && row.part.decided_by == part.decided_by;
    };
    auto found = std::ranges::find_if(out, same);
    if (found == out.end())
      found = out.insert(out.end(), {.layers = {}, .part = {part.place, 0, part.decided_by}});
    found->layers.push_back(layer.layer);
    found->part.bytes += part.bytes;
  }
  return out;
}

// ", 12 to 13 of 256 a layer" of the layers of a row.
std::string hot_counts(const Placement& placement, const PartRow& row) {
  size_t least = SIZE_MAX, most = 0;
  int experts = 0;
  for (const int layer : row.layers) {
    const LayerPlacement& at = placement.layers[static_cast<size_t>(layer)];
    least = std::min(least, at.hot.size());
    most = std::max(most, at.hot.size());
    experts = std::max(experts, at.experts);
  }
  return least == most ? text(": {} of {} a layer", most, experts)
                       : text(": {} to {} of {} a layer", least, most, experts);
}

void add_layer_parts(Table& table, const Placement& placement, const char* name,
                     PlacedPart LayerPlacement::* of,
                     const std::function<std::string(const PartRow&)>& more = {}) {
  for (const PartRow& row : rows_of(placement, of))
    table.add({name, ranges_text(row.layers), name_of(row.part.place),
               row.part.decided_by + (more ? more(row) : ""), human_bytes(row.part.bytes)});
}

void add_part(Table& table, const char* name, const PlacedPart& part) {
  if (part.bytes > 0) table.add({name, "-", name_of(part.place), part.decided_by, human_bytes(part.bytes)});
}

OrderedJson part_json(const PlacedPart& part) {
  return {{"place", name_of(part.place)}, {"bytes", part.bytes}, {"decided_by", part.decided_by}};
}

OrderedJson layer_json(const LayerPlacement& layer) {
  OrderedJson out = {
      {"layer", layer.layer}, {"dense", part_json(layer.dense)}, {"cache", part_json(layer.cache)}};
  if (layer.states.bytes > 0) out["states"] = part_json(layer.states);
  if (layer.experts == 0) return out;
  out["experts"] = part_json(layer.routed);
  out["experts"]["count"] = layer.experts;
  out["experts"]["bytes_each"] = layer.expert_bytes;
  out["experts"]["bytes_of_node"] = layer.routed_of_node;
  out["hot"] = part_json(layer.copies);
  out["hot"]["experts"] = layer.hot;
  return out;
}

}  // namespace

std::string ranges_text(const std::vector<int>& numbers) {
  std::string out;
  for (size_t i = 0, end = 0; i < numbers.size(); i = end) {
    for (end = i + 1; end < numbers.size() && numbers[end] == numbers[end - 1] + 1;) ++end;
    out += text("{}{}", out.empty() ? "" : ", ", numbers[i]);
    if (end - i > 1) out += text("-{}", numbers[end - 1]);
  }
  return out.empty() ? "-" : out;
}

std::string describe(const Placement& placement) {
  const auto pages = [&](const PartRow&) {
    return text(": {} of {} tokens", counted(placement.pages, "page"), placement.page_tokens);
  };
  const auto hot = [&](const PartRow& row) { return hot_counts(placement, row); };
  Table table({"part", "layers", "place", "decided by", "bytes"}, 4);
  add_part(table, "embedding", placement.embedding);
  add_layer_parts(table, placement, "dense parts", &LayerPlacement::dense);
  add_layer_parts(table, placement, "KV cache", &LayerPlacement::cache, pages);
  add_layer_parts(table, placement, "states", &LayerPlacement::states);
  add_layer_parts(table, placement, "routed experts", &LayerPlacement::routed);
  add_layer_parts(table, placement, "  hot copies", &LayerPlacement::copies, hot);
  add_part(table, "head", placement.head);
  add_part(table, "workspace", placement.workspace);
  for (const PlacedPart& part : placement.more_workspaces) add_part(table, "workspace", part);
  add_part(table, "workspace", placement.host_workspace);
  for (const DevicePlacement& device : placement.devices)
    add_part(table, "driver", {device.place, device.taken, "context and kernels"});
  std::string out = text("placement of {}, {}, {} of {} tokens\n", placement.model,
                         counted(std::ssize(placement.layers), "layer"),
                         counted(placement.sequences, "sequence"), placement.context);
  out += table.str();
  for (const PlaceBytes& at : bytes_by_place(placement)) {
    const auto device = std::ranges::find(placement.devices, at.place, &DevicePlacement::place);
    const bool named = device != placement.devices.end() && !device->name.empty();
    out +=
        text("{}{}: {}", name_of(at.place), named ? text(" ({})", device->name) : "", human_bytes(at.bytes));
    if (device != placement.devices.end())
      out += text(" of {} ({})", human_bytes(device->allowed), device->decided_by);
    out += "\n";
  }
  return out;
}

OrderedJson json_of(const Placement& placement) {
  OrderedJson out = {{"model", placement.model},
                     {"sequences", placement.sequences},
                     {"context", placement.context},
                     {"pages", placement.pages},
                     {"page_tokens", placement.page_tokens}};
  out["devices"] = OrderedJson::array();
  for (const DevicePlacement& device : placement.devices)
    out["devices"].push_back({{"place", name_of(device.place)},
                              {"name", device.name},
                              {"free", device.free},
                              {"taken", device.taken},
                              {"allowed", device.allowed},
                              {"decided_by", device.decided_by}});
  out["bytes"] = OrderedJson::object();
  for (const PlaceBytes& at : bytes_by_place(placement)) out["bytes"][name_of(at.place)] = at.bytes;
  out["embedding"] = part_json(placement.embedding);
  out["head"] = part_json(placement.head);
  out["workspace"] = part_json(placement.workspace);
  out["host_workspace"] = part_json(placement.host_workspace);
  if (!placement.more_workspaces.empty()) {
    out["more_workspaces"] = OrderedJson::array();
    for (const PlacedPart& part : placement.more_workspaces)
      out["more_workspaces"].push_back(part_json(part));
  }
  out["layers"] = OrderedJson::array();
  for (const LayerPlacement& layer : placement.layers) out["layers"].push_back(layer_json(layer));
  return out;
}

}  // namespace kt::inline models
