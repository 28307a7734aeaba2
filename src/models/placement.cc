#include "models/placement.h"

#include <algorithm>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"
#include "models/layer_split.h"

namespace kt::inline models {
namespace {

// Of what is free, where nobody says how much may be taken: others on the card grow, and a driver rounds up.
constexpr uint64_t kSparePercent = 5;
constexpr uint64_t kGiB = uint64_t{1} << 30;

// What a GPU holds whatever experts are hot.
struct FixedBytes {
  uint64_t taken = 0, dense = 0, cache = 0, workspace = 0;
  uint64_t sum() const { return taken + dense + cache + workspace; }
};

int64_t pages_of(const PlacementSizes& sizes, const MemoryRequest& use) {
  return ceil_div(int64_t{use.context}, int64_t{sizes.page_tokens}) * use.sequences;
}

template <typename Of>
uint64_t sum_of_layers(const PlacementSizes& sizes, Of of) {
  uint64_t sum = 0;
  for (const PlacementSizes::Layer& layer : sizes.layers) sum += of(layer);
  return sum;
}

FixedBytes fixed_bytes(const PlacementSizes& sizes, const PlacementWish& wish, const DeviceMemory& device) {
  const auto pages = static_cast<uint64_t>(pages_of(sizes, wish.use));
  const auto sequences = static_cast<uint64_t>(wish.use.sequences);
  return {.taken = device.taken,
          .dense = sizes.head + sum_of_layers(sizes, [](const auto& layer) { return layer.dense; }),
          .cache = sum_of_layers(
              sizes, [&](const auto& layer) { return pages * layer.page + sequences * layer.state; }),
          .workspace = sizes.workspace};
}

std::string device_text(const DevicePlacement& device) {
  return device.name.empty() ? name_of(device.place) : text("{} ({})", name_of(device.place), device.name);
}

DevicePlacement allowed_on(const DeviceMemory& device, const PlacementWish& wish) {
  DevicePlacement out{.place = {.kind = Place::Kind::kGpu, .index = device.index, .share = device.share},
                      .name = device.name,
                      .free = device.free,
                      .taken = device.taken,
                      .allowed = wish.gpu_memory,
                      .decided_by = wish.gpu_memory_from};
  if (wish.gpu_memory > device.free + device.taken)
    fail_as(ErrorKind::kMemory, "{}: {} is {}, {} are free: {} too much", device_text(out), out.decided_by,
            human_bytes(wish.gpu_memory), human_bytes(device.free + device.taken),
            human_bytes(wish.gpu_memory - device.free - device.taken));
  if (wish.gpu_memory == 0) {
    out.allowed = device.taken + device.free / 100 * (100 - kSparePercent);
    out.decided_by = text("{} free less {} %", human_bytes(device.free), kSparePercent);
  }
  return out;
}

// The longest context whose cache fits beside everything else; 0: none does.
int64_t longest_context(const PlacementSizes& sizes, const PlacementWish& wish, const FixedBytes& fixed,
                        uint64_t allowed) {
  const auto sequences = static_cast<uint64_t>(wish.use.sequences);
  const uint64_t page = sum_of_layers(sizes, [](const auto& layer) { return layer.page; });
  const uint64_t other = fixed.sum() - fixed.cache +
                         sequences * sum_of_layers(sizes, [](const auto& layer) { return layer.state; });
  if (page == 0 || other >= allowed) return 0;
  return static_cast<int64_t>((allowed - other) / page / sequences) * sizes.page_tokens;
}

// "27.7 GiB": rounded up, for a person to type.
std::string at_least(uint64_t bytes) {
  const uint64_t unit = bytes < kGiB ? kGiB / 1024 : kGiB, tenths = ceil_div(bytes * 10, unit);
  return text("{}.{} {}", tenths / 10, tenths % 10, unit == kGiB ? "GiB" : "MiB");
}

// What would make room, with what each gives.
std::string advice(const PlacementSizes& sizes, const PlacementWish& wish, const FixedBytes& fixed,
                   const DevicePlacement& device) {
  std::vector<std::string> ways;
  const auto pages = static_cast<uint64_t>(pages_of(sizes, wish.use));
  const uint64_t narrower =
      pages * sum_of_layers(sizes, [](const auto& layer) { return layer.page - layer.page_int8; });
  if (narrower > 0) ways.push_back(text("`kv` int8 ({} less)", human_bytes(narrower)));
  if (wish.linears_as_stored) ways.push_back("`linear_format` int4_g64");
  const int64_t context = longest_context(sizes, wish, fixed, device.allowed);
  if (context > 0 && context < wish.use.context)
    ways.push_back(text("a context of at most {} tokens", context));
  if (wish.gpu_memory > 0 && fixed.sum() <= device.free + device.taken)
    ways.push_back(text("`gpu_memory` of {} or more", at_least(fixed.sum())));
  ways.push_back("`gpu` off");
  std::string out;
  for (size_t i = 0; i < ways.size(); ++i)
    out += (i == 0 ? "; try " : i + 1 < ways.size() ? ", " : " or ") + ways[i];
  return out;
}

void check_fixed(const PlacementSizes& sizes, const PlacementWish& wish, const FixedBytes& fixed,
                 const DevicePlacement& device) {
  const uint64_t needed = fixed.sum();
  if (needed <= device.allowed) return;
  fail_as(
      ErrorKind::kMemory,
      "{}: {} needed without any expert (dense parts {}, cache of {} tokens {}, workspace {}, driver {}), {} "
      "allowed ({}): {} too much{}",
      device_text(device), human_bytes(needed), human_bytes(fixed.dense),
      int64_t{wish.use.sequences} * wish.use.context, human_bytes(fixed.cache), human_bytes(fixed.workspace),
      human_bytes(fixed.taken), human_bytes(device.allowed), device.decided_by,
      human_bytes(needed - device.allowed), advice(sizes, wish, fixed, device));
}

// Experts whose copies are held, and of each layer who says so.
struct HotChoice {
  std::vector<ExpertOfLayer> experts = {};
  std::vector<std::string> decided_by = {};
};

// The first of the order, as many as fit.
size_t longest_that_fits(const PlacementSizes& sizes, const std::vector<ExpertOfLayer>& order,
                         uint64_t left) {
  size_t count = 0;
  for (const ExpertOfLayer& each : order) {
    const uint64_t bytes = sizes.layers[static_cast<size_t>(each.layer)].expert_bytes();
    if (bytes > left) break;
    left -= bytes;
    ++count;
  }
  return count;
}

class HotChooser {
 public:
  // Of the layers that are `mine`.
  HotChooser(const PlacementSizes& sizes, const PlacementWish& wish, uint64_t left,
             const DevicePlacement& device, const std::vector<bool>& mine)
      : sizes_(sizes), wish_(wish), device_(device), mine_(mine), left_(left) {
    out_.decided_by.resize(sizes.layers.size());
  }

  // What rules number comes first, then what fits where they say auto, then the flags' of the other layers.
  HotChoice choose() {
    std::vector<int> others;
    for (size_t i = 0; i < sizes_.layers.size(); ++i)
      if (mine_[i] && sizes_.layers[i].experts > 0 && !is_ruled(static_cast<int>(i)))
        others.push_back(static_cast<int>(i));
    for (const bool automatic : {false, true})
      for (const ExpertRule& rule : wish_.ruled)
        if ((!rule.ids && rule.wish.kind == ExpertWish::Kind::kAuto) == automatic) add_ruled(rule);
    if (!others.empty()) add_flags(others);
    return std::move(out_);
  }

 private:
  bool is_ruled(int layer) const {
    return std::ranges::any_of(wish_.ruled, [&](const ExpertRule& rule) {
      return std::ranges::find(rule.layers, layer) != rule.layers.end();
    });
  }

  // The experts of these layers in the strategy's order.
  std::vector<ExpertOfLayer> order_of(const std::vector<int>& layers, ExpertStrategy strategy,
                                      const ExpertStatistics* statistics) const {
    ExpertOrderInput input{.statistics = statistics, .seed = wish_.seed};
    for (const PlacementSizes::Layer& layer : sizes_.layers) input.experts.push_back(layer.experts);
    std::vector<ExpertOfLayer> out = expert_order(strategy, input);
    std::erase_if(out, [&](const ExpertOfLayer& each) {
      return std::ranges::find(layers, each.layer) == layers.end();
    });
    return out;
  }

  uint64_t bytes_of(const std::vector<ExpertOfLayer>& order, int64_t count) const {
    uint64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i)
      bytes += sizes_.layers[static_cast<size_t>(order[static_cast<size_t>(i)].layer)].expert_bytes();
    return bytes;
  }

  // "3072 experts are 27.0 GiB, 18.3 GiB of 24.0 GiB are left ...: 8.7 GiB too much; 2075 fit".
  std::string too_many(const std::vector<ExpertOfLayer>& order, int64_t wanted, int64_t fit) const {
    const uint64_t bytes = bytes_of(order, wanted);
    return text(
        "{} experts are {}, {} of {} are left beside dense parts, cache and workspace: {} too much; {} fit",
        wanted, human_bytes(bytes), human_bytes(left_), human_bytes(device_.allowed),
        human_bytes(bytes - left_), fit);
  }

  void take(std::vector<ExpertOfLayer> order, int64_t count, const std::vector<int>& layers,
            const std::string& decided_by) {
    left_ -= bytes_of(order, count);
    order.resize(static_cast<size_t>(count));
    out_.experts.insert(out_.experts.end(), order.begin(), order.end());
    for (const int layer : layers) out_.decided_by[static_cast<size_t>(layer)] = decided_by;
  }

  void add_ruled(const ExpertRule& rule) {
    const ExpertStatistics* const statistics = rule.statistics ? rule.statistics.get() : wish_.statistics;
    const ExpertStrategy strategy =
        rule.strategy.value_or(rule.statistics ? ExpertStrategy::kFrequency : strategy_of_flags());
    std::vector<ExpertOfLayer> order;
    if (rule.ids) {
      for (const int layer : rule.layers)
        for (const int expert : *rule.ids) order.push_back({layer, expert});
    } else {
      order = order_of(rule.layers, strategy, statistics);
    }
    const auto fit = static_cast<int64_t>(longest_that_fits(sizes_, order, left_));
    const int64_t all = std::ssize(order);
    const int64_t wanted = rule.ids ? all : rule.wish.total(std::ssize(rule.layers), all).value_or(fit);
    if (wanted > fit)
      fail_as(ErrorKind::kMemory, "{}: {}: experts of layers {}: {}", rule.place, device_text(device_),
              ranges_text(rule.layers), too_many(order, wanted, fit));
    take(std::move(order), wanted, rule.layers, rule.decided_by);
  }

  ExpertStrategy strategy_of_flags() const {
    return wish_.strategy.value_or(wish_.statistics ? ExpertStrategy::kFrequency : ExpertStrategy::kUniform);
  }

  void add_flags(const std::vector<int>& layers) {
    std::vector<ExpertOfLayer> order = order_of(layers, strategy_of_flags(), wish_.statistics);
    const auto fit = static_cast<int64_t>(longest_that_fits(sizes_, order, left_));
    const int64_t count = std::ssize(layers),
                  wanted = wish_.experts.total(count, std::ssize(order)).value_or(fit);
    if (wanted > fit)
      fail_as(ErrorKind::kMemory, "{}: `gpu_experts` {}: {}, {} a layer: try `gpu_experts` {} or auto",
              device_text(device_), text_of(wish_.experts), too_many(order, wanted, fit), fit / count,
              fit / count);
    take(std::move(order), wanted, layers,
         text("`gpu_experts` {}, {}", text_of(wish_.experts), name_of(strategy_of_flags())));
  }

  const PlacementSizes& sizes_;
  const PlacementWish& wish_;
  const DevicePlacement& device_;
  const std::vector<bool>& mine_;
  uint64_t left_;
  HotChoice out_;
};

LayerPlacement place_layer(const PlacementSizes& sizes, const PlacementWish& wish, int number,
                           const Place& gpu) {
  const PlacementSizes::Layer& layer = sizes.layers[static_cast<size_t>(number)];
  LayerPlacement out{.layer = number,
                     .dense = {gpu, layer.dense, "`gpu`"},
                     .cache = {gpu, static_cast<uint64_t>(pages_of(sizes, wish.use)) * layer.page, "`gpu`"},
                     .states = {gpu, static_cast<uint64_t>(wish.use.sequences) * layer.state, "`gpu`"},
                     .experts = layer.experts,
                     .expert_bytes = layer.expert_bytes()};
  if (layer.experts == 0) return out;
  for (const uint64_t piece : layer.expert)
    out.routed_of_node.push_back(piece * static_cast<uint64_t>(layer.experts));
  out.routed = {kHost, out.expert_bytes * static_cast<uint64_t>(layer.experts), "run by the CPU"};
  return out;
}

}  // namespace

uint64_t PlacementSizes::Layer::expert_bytes() const {
  return std::accumulate(expert.begin(), expert.end(), uint64_t{0});
}

int64_t Placement::hot_experts() const {
  int64_t sum = 0;
  for (const LayerPlacement& layer : layers) sum += std::ssize(layer.hot);
  return sum;
}

int64_t Placement::all_experts() const {
  int64_t sum = 0;
  for (const LayerPlacement& layer : layers) sum += layer.experts;
  return sum;
}

std::vector<std::vector<int>> Placement::hot() const {
  std::vector<std::vector<int>> out;
  for (const LayerPlacement& layer : layers) out.push_back(layer.hot);
  return out;
}

int Placement::routed_layers() const {
  return static_cast<int>(
      std::ranges::count_if(layers, [](const LayerPlacement& each) { return each.experts > 0; }));
}

namespace {

// Of the wish's first device, which has the layers that are `mine`; the others' dense parts have no bytes.
Placement decide_on_one(const PlacementSizes& sizes, const PlacementWish& wish,
                        const std::vector<bool>& mine) {
  const DevicePlacement device = allowed_on(wish.devices.front(), wish);
  const FixedBytes fixed = fixed_bytes(sizes, wish, wish.devices.front());
  check_fixed(sizes, wish, fixed, device);
  const HotChoice hot = HotChooser(sizes, wish, device.allowed - fixed.sum(), device, mine).choose();

  Placement out{.model = sizes.model,
                .sequences = wish.use.sequences,
                .context = wish.use.context,
                .pages = pages_of(sizes, wish.use),
                .page_tokens = sizes.page_tokens,
                .layers = {},
                .embedding = {kHost, sizes.embedding, "rows are read from the mapped file"},
                .head = {device.place, sizes.head, "`gpu`"},
                .workspace = {device.place, sizes.workspace, "`gpu`"},
                .host_workspace = {kHost, sizes.host_workspace, "run by the CPU"},
                .devices = {device}};
  for (size_t i = 0; i < sizes.layers.size(); ++i)
    out.layers.push_back(place_layer(sizes, wish, static_cast<int>(i), device.place));
  for (const ExpertOfLayer& each : hot.experts)
    out.layers[static_cast<size_t>(each.layer)].hot.push_back(each.expert);
  for (LayerPlacement& layer : out.layers) {
    if (layer.experts == 0) continue;
    std::ranges::sort(layer.hot);
    layer.copies = {device.place, layer.hot.size() * layer.expert_bytes,
                    hot.decided_by[static_cast<size_t>(layer.layer)]};
  }
  return out;
}

// What one device has of a model, as if there were nothing else.
PlacementSizes share_of(const PlacementSizes& sizes, const std::vector<bool>& mine, bool head) {
  PlacementSizes out = sizes;
  for (size_t i = 0; i < out.layers.size(); ++i)
    if (!mine[i])
      out.layers[i].dense = out.layers[i].page = out.layers[i].page_int8 = out.layers[i].state = 0;
  if (!head) out.head = 0;
  return out;
}

std::vector<bool> layers_of(const LayerSplit& split, int device) {
  std::vector<bool> out;
  for (const int at : split.layers) out.push_back(at == device);
  return out;
}

// One device's part of a wish: rules of experts are of its layers alone.
PlacementWish wish_of(const PlacementWish& wish, size_t device, const std::vector<bool>& mine) {
  PlacementWish out = wish;
  out.devices = {wish.devices[device]};
  for (ExpertRule& rule : out.ruled)
    std::erase_if(rule.layers, [&](int layer) { return !mine[static_cast<size_t>(layer)]; });
  std::erase_if(out.ruled, [](const ExpertRule& rule) { return rule.layers.empty(); });
  return out;
}

// Layers that no device has: they run and are kept where the experts are.
void put_on_host(LayerPlacement& layer) {
  for (PlacedPart* part : {&layer.dense, &layer.cache, &layer.states}) {
    part->place = kHost;
    part->decided_by = "`rules`";
  }
  layer.hot.clear();
  layer.copies = {};
}

Placement decide_on_several(const PlacementSizes& sizes, const PlacementWish& wish) {
  std::vector<DevicePlacement> devices;
  for (const DeviceMemory& device : wish.devices) devices.push_back(allowed_on(device, wish));
  const LayerSplit split = split_layers(sizes, wish, devices);
  std::vector<Placement> parts;
  for (size_t i = 0; i < devices.size(); ++i) {
    const int device = static_cast<int>(i);
    const std::vector<bool> mine = layers_of(split, device);
    PlacementSizes share = share_of(sizes, mine, split.head == device);
    if (std::ranges::find(mine, true) == mine.end() && split.head != device) share.workspace = 0;
    parts.push_back(decide_on_one(share, wish_of(wish, i, mine), mine));
  }
  Placement out = parts.front();
  out.devices = std::move(devices);
  const Place head = split.head == kOnHost ? kHost : out.devices[static_cast<size_t>(split.head)].place;
  out.head = {head, sizes.head, split.head == kOnHost ? "`rules`" : "`gpu`"};
  out.host_workspace.bytes = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0 && parts[i].workspace.bytes > 0) out.more_workspaces.push_back(parts[i].workspace);
    if (parts[i].workspace.bytes > 0) out.host_workspace.bytes += sizes.host_workspace;
  }
  const std::vector<bool> on_host = layers_of(split, kOnHost);
  if (std::ranges::find(on_host, true) != on_host.end() || split.head == kOnHost)
    out.more_workspaces.push_back({kHost, sizes.workspace + sizes.host_workspace, "run by the CPU"});
  for (size_t i = 0; i < out.layers.size(); ++i) {
    const int device = split.layers[i];
    if (device >= 0) {
      out.layers[i] = parts[static_cast<size_t>(device)].layers[i];
      continue;
    }
    out.layers[i] = place_layer(sizes, wish, static_cast<int>(i), kHost);
    put_on_host(out.layers[i]);
  }
  return out;
}

}  // namespace

std::string Placement::device_of(const Place& place) const {
  const auto found = std::ranges::find(devices, place, &DevicePlacement::place);
  return found == devices.end() ? "cpu" : text("cuda:{}", found - devices.begin());
}

Placement decide_placement(const PlacementSizes& sizes, const PlacementWish& wish) {
  if (wish.devices.empty()) fail("a placement on no GPU: one is needed at least");
  if (wish.use.sequences < 1 || wish.use.context < 1)
    fail("a placement for {} sequences of {} tokens", wish.use.sequences, wish.use.context);
  const auto elsewhere = [](int device) { return device != 0 && device != kUndecided; };
  if (wish.devices.size() == 1 && std::ranges::none_of(wish.layers_on, elsewhere) && !elsewhere(wish.head_on))
    return decide_on_one(sizes, wish, std::vector<bool>(sizes.layers.size(), true));
  return decide_on_several(sizes, wish);
}

std::vector<PlaceBytes> bytes_by_place(const Placement& placement) {
  std::vector<PlaceBytes> out;
  const auto add = [&](const Place& place, uint64_t bytes) {
    if (bytes == 0) return;
    const auto found = std::ranges::find(out, place, &PlaceBytes::place);
    (found != out.end() ? *found : out.emplace_back(PlaceBytes{.place = place})).bytes += bytes;
  };
  for (const DevicePlacement& device : placement.devices) add(device.place, device.taken);
  for (const LayerPlacement& layer : placement.layers) {
    for (const PlacedPart* part : {&layer.dense, &layer.cache, &layer.states, &layer.copies})
      add(part->place, part->bytes);
    for (size_t node = 0; node < layer.routed_of_node.size(); ++node)
      add({.kind = Place::Kind::kNode, .index = static_cast<int>(node)}, layer.routed_of_node[node]);
  }
  for (const PlacedPart* part : {&placement.head, &placement.workspace, &placement.host_workspace})
    add(part->place, part->bytes);
  for (const PlacedPart& part : placement.more_workspaces) add(part.place, part.bytes);
  return out;
}

}  // namespace kt::inline models
