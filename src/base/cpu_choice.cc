#include "base/cpu_choice.h"

#include <algorithm>
#include <charconv>

#include "base/error.h"
#include "base/log.h"

namespace kt::inline base {
namespace {

constexpr int kHighestNode = 1 << 16;

// One number, or nothing where there is none; what follows it stays in `rest`.
bool take_node(std::string_view& rest, int& out) {
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), out);
  if (error != std::errc() || out < 0 || out > kHighestNode) return false;
  rest.remove_prefix(static_cast<size_t>(end - rest.data()));
  return true;
}

}  // namespace

PoolOptions fitted(PoolOptions options) {
  const int usable =
      options.topology.nodes.empty() ? static_cast<int>(allowed_cpus().size()) : options.topology.pus();
  const int most = std::max(usable, options.nodes);
  if (options.threads <= most) return options;
  log_once(LogLevel::kWarning, "{} threads were asked for, but {} cpus are usable: using {} threads",
           options.threads, usable, most);
  options.threads = most;
  return options;
}

std::vector<int> parse_node_ids(std::string_view list) {
  std::vector<int> out;
  std::string_view rest = list;
  const auto refuse = [&] { fail("'{}': expected numbers of NUMA nodes such as 0,2 or 0-3", list); };
  while (true) {
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    int first = 0;
    if (!take_node(rest, first)) refuse();
    int last = first;
    if (rest.starts_with('-')) {
      rest.remove_prefix(1);
      if (!take_node(rest, last) || last < first) refuse();
    }
    for (int id = first; id <= last; ++id) out.push_back(id);
    const bool parted = rest.starts_with(',') || rest.starts_with(' ');
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    if (rest.empty()) return out;
    if (!parted && !rest.starts_with(',')) refuse();
    if (rest.starts_with(',')) rest.remove_prefix(1);
  }
}

Topology chosen_nodes(const Topology& topology, const std::vector<int>& ids) {
  Topology out = topology;
  out.nodes.clear();
  for (const int id : ids) {
    if (std::ranges::find(out.nodes, id, &Node::id) != out.nodes.end()) continue;
    const auto found = std::ranges::find(topology.nodes, id, &Node::id);
    if (found == topology.nodes.end()) {
      std::string have;
      for (const Node& node : topology.nodes) have += text("{}{}", have.empty() ? "" : ", ", node.id);
      fail("there is no NUMA node {}; nodes: {}", id, have);
    }
    out.nodes.push_back(*found);
  }
  return out;
}

NodeChoice choose_nodes(const std::vector<std::string>& words, int pools, const Topology& topology) {
  std::vector<int> named;
  for (const std::string& word : words)
    for (const int id : parse_node_ids(word)) named.push_back(id);
  const auto count = static_cast<int>(named.size());
  if (pools > 0 && pools < count) fail("{} nodes are named for {} pools of threads", count, pools);
  NodeChoice out{.pools = pools > 0 ? pools : count};
  for (const Node& node : chosen_nodes(topology, named).nodes) out.ids.push_back(node.id);
  return out;
}

}  // namespace kt::inline base
