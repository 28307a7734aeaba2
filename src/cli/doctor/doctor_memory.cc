// kt doctor on memory: how much, who limits it, and on which NUMA nodes it is.
#include <algorithm>
#include <filesystem>

#include "base/memory.h"
#include "base/text.h"
#include "cli/doctor/doctor.h"
#include "terminal/language.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

constexpr uint64_t kLeast = uint64_t{256} << 20;  // below this not even the demo model and a server fit

void look_at_swap(Diagnosis& d, const std::string& info, uint64_t total) {
  const uint64_t swap = number_in(info, "SwapTotal", 0) << 10, unused = number_in(info, "SwapFree", 0) << 10;
  d.facts["memory"]["swap_bytes"] = swap;
  d.facts["memory"]["swap_used_bytes"] = swap - std::min(swap, unused);
  if (swap == 0) {
    d.findings.push_back({tr_later("swap"), tr_now("none")});
    return;
  }
  const uint64_t used = swap - std::min(swap, unused);
  Finding f{tr_later("swap"), text(tr("{} of {} used"), human_bytes(used), human_bytes(swap))};
  if (used > total / 10) {
    f.level = Level::kWarning;
    f.cost = tr_now("weights that were swapped out come back from disk, a page at a time");
    f.fix = tr_now("stop other programs, then: sudo swapoff -a && sudo swapon -a");
  }
  d.findings.push_back(f);
}

void look_at_overcommit(Diagnosis& d, const Machine& machine, const std::string& info) {
  const std::string mode = machine.content_of("/proc/sys/vm/overcommit_memory");
  d.facts["memory"]["overcommit"] = mode;
  if (mode != "2") return;
  const uint64_t limit = number_in(info, "CommitLimit", 0) << 10;
  const uint64_t promised = number_in(info, "Committed_AS", 0) << 10;
  d.findings.push_back({tr_later("overcommit"),
                        text(tr("strict (vm.overcommit_memory=2): {} of {} are promised already"),
                             human_bytes(promised), human_bytes(limit)),
                        Level::kWarning,
                        text(tr("packed weights above {} are refused, whatever is free"),
                             human_bytes(limit - std::min(limit, promised))),
                        "sudo sysctl vm.overcommit_memory=0"});
}

void look_at_reserved_pages(Diagnosis& d, const std::string& info, uint64_t total) {
  const uint64_t reserved =
      number_in(info, "HugePages_Free", 0) * (number_in(info, "Hugepagesize", 2048) << 10);
  d.facts["memory"]["reserved_huge_page_bytes"] = reserved;
  if (reserved <= total / 20) return;
  d.findings.push_back(
      {tr_later("reserved"),
       text(tr("{} lie in the pool of reserved huge pages, unused"), human_bytes(reserved)), Level::kWarning,
       text(tr("kt uses transparent huge pages; {} are lost to models"), human_bytes(reserved)),
       "sudo sysctl vm.nr_hugepages=0"});
}

struct NodeMemory {
  int id = 0, cpus = 0;
  uint64_t total = 0, unused = 0;
};

std::vector<NodeMemory> read_nodes(const Machine& machine) {
  std::vector<NodeMemory> nodes;
  const std::string folder = "/sys/devices/system/node";
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(machine.root + folder, none)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("node") || name.find_first_not_of("0123456789", 4) != std::string::npos) continue;
    const std::string info = machine.content_of(folder + "/" + name + "/meminfo");
    nodes.push_back({.id = static_cast<int>(leading_number(std::string_view(name).substr(4)).value_or(0)),
                     .cpus = static_cast<int>(
                         parse_cpu_list(machine.content_of(folder + "/" + name + "/cpulist")).size()),
                     .total = number_in(info, "MemTotal", 0) << 10,
                     .unused = number_in(info, "MemFree", 0) << 10});
  }
  std::sort(nodes.begin(), nodes.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return nodes;
}

// Every expert is cut into one slice a node, so the node with the least memory decides.
Finding balance_finding(const std::vector<NodeMemory>& nodes) {
  Finding f{tr_later("numa"), text(tr("{} nodes:"), nodes.size())};
  uint64_t least = UINT64_MAX, most = 0;
  std::string without;
  for (const NodeMemory& node : nodes) {
    f.found +=
        text(tr("{} node {} {} ({} free), {}"), &node == &nodes.front() ? "" : ";", node.id,
             human_bytes(node.total), human_bytes(node.unused), tr_counted(node.cpus, "{} PU", "{} PUs"));
    if (node.cpus == 0) continue;  // memory on a card: nothing is placed there
    least = std::min(least, node.total);
    most = std::max(most, node.total);
    if (node.total == 0) without += text("{}{}", without.empty() ? "" : ", ", node.id);
  }
  if (!without.empty()) {
    f.level = Level::kWarning;
    f.cost = text(tr("node {} has cores but no memory: they read every weight from another node"), without);
    f.fix = text(tr("put memory modules into that socket, or leave it out: numactl --cpunodebind=N kt ..."));
  } else if (least < most / 2) {
    f.level = Level::kWarning;
    f.cost =
        text(tr("each node holds the same share of a model: above {} on a node the rest is read from others"),
             human_bytes(least));
    f.fix = tr_now("spread the memory modules evenly over the sockets; numactl --hardware shows them");
  }
  return f;
}

}  // namespace

void look_at_memory(Diagnosis& d, const Machine& machine) {
  const uint64_t total = total_memory(machine.root), available = available_memory(machine.root);
  const std::string info = machine.content_of("/proc/meminfo");
  const uint64_t installed = number_in(info, "MemTotal", total >> 10) << 10;
  Finding f{tr_later("memory"), text(tr("{} of {} available"), human_bytes(available), human_bytes(total))};
  if (available < kLeast) {
    f.level = Level::kBad;
    f.cost = tr_now("hardly any model loads");
    f.fix = tr_now("stop other programs, see: ps aux --sort=-rss | head");
  } else if (available < total / 4) {
    f.level = Level::kWarning;
    f.cost = text(tr("models above {} do not fit"), human_bytes(available));
    f.fix = tr_now("stop other programs, see: ps aux --sort=-rss | head");
  }
  d.findings.push_back(f);
  d.facts["memory"] = {
      {"total_bytes", total}, {"available_bytes", available}, {"installed_bytes", installed}};
  if (total < installed) {
    d.findings.push_back(
        {tr_later("memory limit"),
         text(tr("a cgroup allows {} of the machine's {}"), human_bytes(total), human_bytes(installed)),
         Level::kWarning, text(tr("models above {} do not fit"), human_bytes(total)),
         text(tr("start the container with --memory={}g, or: sudo systemctl set-property UNIT "
                 "MemoryMax=infinity"),
              installed >> 30)});
  }
  look_at_swap(d, info, total);
  look_at_overcommit(d, machine, info);
  look_at_reserved_pages(d, info, total);
}

void look_at_numa(Diagnosis& d, const Machine& machine) {
  const std::vector<NodeMemory> nodes = read_nodes(machine);
  const std::string balancing = machine.content_of("/proc/sys/kernel/numa_balancing");
  auto facts = nlohmann::ordered_json::array();
  for (const NodeMemory& node : nodes)
    facts.push_back(
        {{"node", node.id}, {"pus", node.cpus}, {"total_bytes", node.total}, {"free_bytes", node.unused}});
  d.facts["numa"] = {{"nodes", facts}, {"balancing", balancing}};
  if (nodes.size() < 2) {
    d.findings.push_back({tr_later("numa"), tr_now("one node: all memory is equally near")});
    return;
  }
  d.findings.push_back(balance_finding(nodes));
  if (!balancing.empty() && balancing != "0") {
    d.findings.push_back(
        {tr_later("numa"), text(tr("automatic balancing is on (kernel.numa_balancing={})"), balancing),
         Level::kWarning,
         tr_now("kt places weights itself; the kernel takes faults on them to watch who reads, and may "
                "move them away"),
         "sudo sysctl kernel.numa_balancing=0"});
  }
}

}  // namespace kt::inline cli
