// Where bytes lie and who works on them: a NUMA node of the host, a GPU, the link between host and a GPU. Plans,
// work and weights are told apart by it.
#pragma once
#include <cstdint>
#include <string>

namespace kt::inline nn {

struct Place {
  enum class Kind : uint8_t { kNode, kGpu, kLink } kind = Kind::kNode;
  int index = -1;  // of nodes, -1: the host as a whole, wherever the operating system put it
  int share = 0;   // of a GPU that is used as several: which of them
  bool operator==(const Place&) const = default;
};

inline constexpr Place kHost{};

std::string name_of(const Place& place);  // "host", "node 0", "GPU 1", "GPU 1 #2", "link 1"

}  // namespace kt::inline nn
