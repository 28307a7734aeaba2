// What of a model lies where, beside GPUs: a value made from sizes alone, before any byte is read. describe ->
// decide -> load: PlacementSizes say what there is, PlacementWish what was asked for, and the loader, estimates and
// reports read the Placement and nothing else. Every part has a place, its bytes and who decided. No weights, no
// device.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/expert_order.h"
#include "models/memory_plan.h"
#include "nn/place.h"
#include "text/json.h"

namespace kt::inline models {

// Bytes of a model's parts, as its packings have them; Transformer::placement_sizes() gives them.
struct PlacementSizes {
  struct Layer {
    uint64_t dense = 0;              // mixer, norms, router, MLP or shared expert
    uint64_t page = 0;               // a page of keys and values
    uint64_t page_int8 = 0;          // the same in the smallest precision
    uint64_t state = 0;              // of one sequence
    int experts = 0;                 // routed; 0: a dense layer
    std::vector<uint64_t> expert{};  // of one, by the nodes of the host that hold pieces of it

    uint64_t expert_bytes() const;
  };
  std::string model;  // for reports
  std::vector<Layer> layers;
  uint64_t embedding = 0;       // in the file: rows are read from where it is mapped
  uint64_t head = 0;            // and the last norm
  int page_tokens = 64;         // of a page
  uint64_t workspace = 0;       // rows and logits of a step, where the dense parts run
  uint64_t host_workspace = 0;  // scratch of the workers that run experts
};

// A GPU as it is now.
struct DeviceMemory {
  int index = 0;
  int share = 0;          // Place's, of a GPU that is named several times: `free` is this one's share
  std::string name = {};  // "NVIDIA H200"
  uint64_t free = 0;      // for this process to take
  uint64_t taken = 0;     // by this process already: the driver's context and kernels; not part of `free`
};

inline constexpr int kOnHost = -1, kUndecided = -2;

struct PlacementWish {
  std::vector<DeviceMemory> devices = {};  // one at least; layers go to them in this order
  // By layer, what rules say: one of the devices, kOnHost, or kUndecided, as those behind the end are. With several
  // devices memory decides the rest, and the head goes with the last layer.
  std::vector<int> layers_on = {};
  int head_on = kUndecided;
  // All that the process may take of each device, what is taken included, and who says so; 0: free less 5 %.
  uint64_t gpu_memory = 0;
  std::string gpu_memory_from = "`gpu_memory`";
  MemoryRequest use = {};  // sequences and their context
  ExpertWish experts = {};
  // None: by frequency where there are statistics, else uniform.
  std::optional<ExpertStrategy> strategy = {};
  const ExpertStatistics* statistics = nullptr;
  std::vector<ExpertRule> ruled = {};  // win over `experts` and `strategy` in the layers that they name
  uint32_t seed = kPlacementSeed;
  bool linears_as_stored = true;  // no `linear_format` was asked for: a refusal may name it
};

struct PlacedPart {
  Place place = kHost;
  uint64_t bytes = 0;
  std::string decided_by = {};  // an option in backticks, or the reason
  bool operator==(const PlacedPart&) const = default;
};

struct LayerPlacement {
  int layer = 0;
  PlacedPart dense, cache, states;
  // Routed experts: all of them in the host's memory, and copies of the hot ones, whose ids ascend.
  int experts = 0;
  uint64_t expert_bytes = 0;  // of each
  PlacedPart routed;
  std::vector<uint64_t> routed_of_node = {};
  PlacedPart copies;
  std::vector<int> hot = {};
  bool operator==(const LayerPlacement&) const = default;
};

struct DevicePlacement {
  Place place;
  std::string name;
  uint64_t free = 0, taken = 0;
  uint64_t allowed = 0;    // `taken` included
  std::string decided_by;  // what `allowed` is
  bool operator==(const DevicePlacement&) const = default;
};

struct Placement {
  std::string model;
  int sequences = 0, context = 0;  // that the cache holds at once
  int64_t pages = 0;               // of the cache, for all sequences
  int page_tokens = 0;
  std::vector<LayerPlacement> layers;
  PlacedPart embedding, head, workspace, host_workspace;
  std::vector<PlacedPart> more_workspaces = {};  // of the devices behind the first, and of layers on the host
  std::vector<DevicePlacement> devices;          // what the process has taken of them is a part of its own
  bool operator==(const Placement&) const = default;

  int64_t hot_experts() const;  // of all layers
  int64_t all_experts() const;
  std::vector<std::vector<int>> hot() const;  // layer by layer, as TransformerOptions take them
  int routed_layers() const;
  // "cuda:1", by the order of devices; "cpu" of the host.
  std::string device_of(const Place& place) const;
};

// Error(kMemory) in one line: what does not fit, by how much, and what to try. Error(kInput): statistics of another
// model, no device.
Placement decide_placement(const PlacementSizes& sizes, const PlacementWish& wish);

// Bytes of every NUMA node, of the host where no node is meant, and of every GPU, each once; a mapped embedding is in
// none of them.
struct PlaceBytes {
  Place place;
  uint64_t bytes = 0;
  bool operator==(const PlaceBytes&) const = default;
};
std::vector<PlaceBytes> bytes_by_place(const Placement& placement);

// "0-2, 5, 7-60" of ascending numbers; "-" of none.
std::string ranges_text(const std::vector<int>& numbers);

// For people: a table of parts, ranges of layers in one line, then a line for each place.
std::string describe(const Placement& placement);
OrderedJson json_of(const Placement& placement);  // the whole value

}  // namespace kt::inline models
