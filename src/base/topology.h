// Which CPUs this process may use and how they are grouped: NUMA nodes of cores of PUs (hardware threads). A
// value; it pins nothing and binds nothing.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline base {

struct Node {
  int id = 0;                                // the operating system's number of the node
  std::vector<std::vector<int>> cores = {};  // each core: the numbers of its PUs (cpus), ascending
  uint64_t memory = 0;                       // bytes of RAM on the node, 0 when unknown
};

struct Topology {
  std::vector<Node> nodes;  // nodes that have at least one usable cpu, ascending by id
  bool from_machine = false;

  int cores() const;  // over all nodes
  int pus() const;

  // False for a synthetic topology, and for a hand-made one: its cpu and node numbers mean nothing to the
  // operating system, so workers are not pinned and memory is not bound.
  bool real() const { return from_machine; }

  // This machine, cut to the calling thread's affinity mask (which the kernel keeps inside the cgroup's
  // cpuset). Reads sysfs; where that says nothing, one node with every allowed cpu as a core. Never empty,
  // never throws for an odd machine.
  static Topology discover();

  // discover() over another sysfs tree (`root` is what stands for "/sys") and another set of allowed cpus.
  // The result counts as synthetic; for tests and for looking at another machine's tree.
  static Topology read_sysfs(const std::string& root, const std::vector<int>& allowed);

  // A machine made up from words "<level>:<count>", outermost first: "pack:2 numa:2 core:8 pu:2" is 4 nodes
  // of 8 cores of 2 PUs. Levels: pack (package, socket), numa (numanode, node), group, die, l3, l2, core, pu;
  // each at most once, numa before core before pu. Without numa there is one node, without core each PU is a
  // core, without pu a core has one. A count may be a list, one entry for each parent: "numa:3 core:8,4,1"
  // has nodes of different sizes. PUs are numbered in order. Anything else is an Error(kInput) that names the
  // word.
  static Topology synthetic(std::string_view spec);
};

// The cpus the calling thread may run on, ascending; never empty.
std::vector<int> allowed_cpus();

// "0-3,8" as cpu numbers, the kernel's list format; stops at the first thing that is not one.
std::vector<int> parse_cpu_list(std::string_view list);

}  // namespace kt::inline base
