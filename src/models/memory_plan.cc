#include "models/memory_plan.h"

#include <algorithm>
#include <functional>

#include "base/text.h"

namespace kt::inline models {

PlaceMemory& PlaceMemory::operator+=(const PlaceMemory& other) {
  experts += other.experts;
  linears += other.linears;
  vectors += other.vectors;
  kv_cache += other.kv_cache;
  workspace += other.workspace;
  loading += other.loading;
  return *this;
}

PlaceMemory& MemoryPlan::at(const Place& place) {
  const auto found = std::ranges::find(places, place, &PlaceMemory::place);
  return found != places.end() ? *found : places.emplace_back(PlaceMemory{.place = place});
}

PlaceMemory MemoryPlan::host() const {
  PlaceMemory sum{.place = kHost};
  for (const PlaceMemory& each : places)
    if (each.place.kind == Place::Kind::kNode) sum += each;
  return sum;
}

uint64_t MemoryPlan::running() const {
  const PlaceMemory all = host();
  return all.weights() + all.kv_cache + all.workspace;
}

uint64_t MemoryPlan::peak() const { return std::max(host().weights() + host().loading, running()); }

std::vector<uint64_t> MemoryPlan::weights_of_node() const {
  std::vector<uint64_t> out;
  for (const PlaceMemory& each : places)
    if (each.place.kind == Place::Kind::kNode && each.place.index >= 0) {
      out.resize(std::max(out.size(), static_cast<size_t>(each.place.index) + 1));
      out[static_cast<size_t>(each.place.index)] = each.experts + each.linears;
    }
  return out;
}

std::string largest_parts(const MemoryPlan& plan, int most) {
  struct Part {
    const char* name;
    uint64_t bytes;
  };
  const PlaceMemory all = plan.host();
  std::vector<Part> parts = {{"experts", all.experts},
                             {"dense weights", all.linears + all.vectors},
                             {"KV cache", all.kv_cache},
                             {"workspace", all.workspace},
                             {"loading", all.loading}};
  std::ranges::sort(parts, std::greater{}, &Part::bytes);
  std::string out;
  for (int i = 0; i < most; ++i) {
    const Part& part = parts[static_cast<size_t>(i)];
    if (part.bytes) out += text("{}{} {}", out.empty() ? "" : ", ", part.name, human_bytes(part.bytes));
  }
  return out;
}

}  // namespace kt::inline models
