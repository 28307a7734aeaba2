// What users ask of threads and NUMA nodes, fitted to the machine there is: for every door alike.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/pool.h"
#include "base/topology.h"

namespace kt::inline base {

// Launch lines are made for larger machines, and more threads than there are cpus only get in each other's
// way: the options with no more threads than the topology (empty: this machine) has cpus, or than there are
// nodes. A log line says so.
PoolOptions fitted(PoolOptions options);

// "0,2", "0-3" or "0 1": numbers of nodes in the order given, repeated ones too. Error saying what was
// expected.
std::vector<int> parse_node_ids(std::string_view list);

// Nodes by their numbers, and how many pools of threads share them.
struct NodeChoice {
  std::vector<int> ids;  // each once
  int pools = 0;
};
// Of these words together; `pools` is 0 for as many as ids were named: one that is named twice has two. Error for
// words that are no numbers, numbers that no node has, and fewer pools than were named.
NodeChoice choose_nodes(const std::vector<std::string>& words, int pools, const Topology& topology);

// The nodes of those numbers, each once, in the order of the first mention. Error naming the number that no
// node has and those that there are.
Topology chosen_nodes(const Topology& topology, const std::vector<int>& ids);

}  // namespace kt::inline base
