// sysfs is read directly rather than through hwloc: it is hwloc's own source on Linux, a fake tree tests it,
// and a cross build needs no library.
#include "base/topology.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/file.h"

namespace kt::inline base {

int Topology::cores() const {
  size_t n = 0;
  for (const Node& node : nodes) n += node.cores.size();
  return static_cast<int>(n);
}

int Topology::pus() const {
  size_t n = 0;
  for (const Node& node : nodes)
    for (const auto& core : node.cores) n += core.size();
  return static_cast<int>(n);
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  // The kernel refuses a mask smaller than its own (EINVAL), so grow until it fits.
  for (size_t words = 16; words <= 4096; words *= 2) {
    std::vector<unsigned long> mask(words);
    const size_t bytes = words * sizeof(unsigned long);
    if (sched_getaffinity(0, bytes, reinterpret_cast<cpu_set_t*>(mask.data())) != 0) {
      if (errno == EINVAL) continue;
      break;
    }
    for (size_t i = 0; i < bytes * 8; ++i)
      if (CPU_ISSET_S(i, bytes, reinterpret_cast<cpu_set_t*>(mask.data())))
        cpus.push_back(static_cast<int>(i));
    break;
  }
  if (cpus.empty()) {
    const int n = std::max(1u, std::thread::hardware_concurrency());
    for (int i = 0; i < n; ++i) cpus.push_back(i);
  }
  return cpus;
}

std::vector<int> parse_cpu_list(std::string_view list) {
  constexpr int kMostCpus = 1 << 16;
  std::vector<int> cpus;
  const char* at = list.data();
  const char* const end = at + list.size();
  for (;;) {
    int first = 0;
    auto got = std::from_chars(at, end, first);
    if (got.ec != std::errc() || first < 0) return cpus;
    int last = first;
    if (got.ptr != end && *got.ptr == '-') {
      got = std::from_chars(got.ptr + 1, end, last);
      if (got.ec != std::errc()) return cpus;
    }
    if (last >= kMostCpus) return cpus;
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    if (got.ptr == end || *got.ptr != ',') return cpus;
    at = got.ptr + 1;
  }
}

namespace {

// The cpus that are in both ascending lists.
std::vector<int> common(const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<int> out;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(out));
  return out;
}

std::vector<int> read_cpu_list(const std::string& path) {
  std::vector<int> cpus = parse_cpu_list(read_small_file(path).value_or(""));
  std::sort(cpus.begin(), cpus.end());
  return cpus;
}

// Groups cpus by the core they are threads of; ascending by the core's first cpu.
std::vector<std::vector<int>> cores_of(const std::string& root, const std::vector<int>& cpus) {
  std::map<int, std::vector<int>> cores;  // by the lowest cpu of the core, allowed or not
  for (const int cpu : cpus) {
    const std::string folder = text("{}/devices/system/cpu/cpu{}/topology/", root, cpu);
    std::vector<int> siblings = read_cpu_list(folder + "core_cpus_list");
    if (siblings.empty()) siblings = read_cpu_list(folder + "thread_siblings_list");  // before Linux 5.3
    cores[siblings.empty() ? cpu : siblings.front()].push_back(cpu);
  }
  std::vector<std::vector<int>> out;
  for (auto& [first, core] : cores) out.push_back(std::move(core));
  std::sort(out.begin(), out.end());
  return out;
}

// "Node 0 MemTotal:  131841532 kB" of a node's meminfo, in bytes; 0 when unknown.
uint64_t memory_of(const std::string& folder) {
  const std::string info = read_small_file(folder + "meminfo").value_or("");
  const size_t key = info.find("MemTotal:");
  if (key == std::string::npos) return 0;
  const size_t digits = info.find_first_of("0123456789", key);
  if (digits == std::string::npos) return 0;
  uint64_t kib = 0;
  std::from_chars(info.data() + digits, info.data() + info.size(), kib);
  return kib << 10;
}

}  // namespace

Topology Topology::read_sysfs(const std::string& root, const std::vector<int>& allowed) {
  std::vector<int> left = allowed;
  std::sort(left.begin(), left.end());
  left.erase(std::unique(left.begin(), left.end()), left.end());
  Topology out;
  for (const int id : read_cpu_list(root + "/devices/system/node/online")) {
    const std::string folder = text("{}/devices/system/node/node{}/", root, id);
    const std::vector<int> cpus = common(read_cpu_list(folder + "cpulist"), left);
    if (cpus.empty()) continue;  // memory only, or not ours
    out.nodes.push_back({.id = id, .cores = cores_of(root, cpus), .memory = memory_of(folder)});
    std::vector<int> rest;
    std::set_difference(left.begin(), left.end(), cpus.begin(), cpus.end(), std::back_inserter(rest));
    left = std::move(rest);
  }
  if (left.empty()) return out;
  // Cpus that no node claims: a kernel without NUMA, or a container that hides sysfs.
  auto cores = cores_of(root, left);
  if (out.nodes.empty()) out.nodes.push_back({});
  Node& home = out.nodes.front();
  home.cores.insert(home.cores.end(), cores.begin(), cores.end());
  return out;
}

Topology Topology::discover() {
  Topology out = read_sysfs("/sys", allowed_cpus());
  out.from_machine = true;
  return out;
}

namespace {

enum class Level { kGroup, kNuma, kCore, kPu };

struct Word {
  std::string_view word;  // as written, for errors
  Level level;
  std::string_view name;    // canonical, to find a level given twice
  std::vector<int> counts;  // one for all parents, or one for each
};

constexpr int kMostObjects = 1 << 16;  // more is a typing error, not a machine

Word parse_word(std::string_view word) {
  struct Name {
    std::string_view written, name;
    Level level;
  };
  static constexpr Name kNames[] = {
      {"pack", "pack", Level::kGroup},    {"package", "pack", Level::kGroup},
      {"socket", "pack", Level::kGroup},  {"numa", "numa", Level::kNuma},
      {"numanode", "numa", Level::kNuma}, {"node", "numa", Level::kNuma},
      {"group", "group", Level::kGroup},  {"die", "die", Level::kGroup},
      {"l3", "l3", Level::kGroup},        {"l2", "l2", Level::kGroup},
      {"core", "core", Level::kCore},     {"pu", "pu", Level::kPu},
  };
  const size_t colon = word.find(':');
  if (colon == std::string_view::npos) fail("topology: expected <level>:<count>, got \"{}\"", word);
  const std::string_view level = word.substr(0, colon);
  const auto* known =
      std::find_if(std::begin(kNames), std::end(kNames), [&](const Name& n) { return n.written == level; });
  if (known == std::end(kNames))
    fail("topology: unknown level in \"{}\"; known are pack, numa, group, die, l3, l2, core, pu", word);

  Word out{.word = word, .level = known->level, .name = known->name, .counts = {}};
  const char* at = word.data() + colon + 1;
  const char* const end = word.data() + word.size();
  for (;; ++at) {
    int count = 0;
    const auto got = std::from_chars(at, end, count);
    if (got.ec != std::errc() || count < 1 || count > kMostObjects || (got.ptr != end && *got.ptr != ','))
      fail("topology: expected counts from 1 to {} in \"{}\"", kMostObjects, word);
    out.counts.push_back(count);
    at = got.ptr;
    if (at == end) return out;
  }
}

std::vector<Word> parse_words(std::string_view spec) {
  constexpr std::string_view kSpace = " \t\n";
  std::vector<Word> words;
  for (size_t at = spec.find_first_not_of(kSpace); at != std::string_view::npos;) {
    const size_t end = std::min(spec.find_first_of(kSpace, at), spec.size());
    words.push_back(parse_word(spec.substr(at, end - at)));
    at = spec.find_first_not_of(kSpace, end);
  }
  if (words.empty()) fail("topology: the description is empty; expected e.g. \"numa:2 core:4 pu:2\"");
  for (size_t i = 0; i < words.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (words[j].name == words[i].name)
        fail("topology: \"{}\" repeats \"{}\"", words[i].word, words[j].word);
      if (words[j].level > words[i].level && words[j].level != Level::kNuma)
        fail("topology: \"{}\" cannot stand inside \"{}\"", words[i].word, words[j].word);
    }
  }
  return words;
}

// An object of the tree under construction: which node and which core it is in; -1 while above them.
struct Place {
  int node = -1, core = -1;
};

// The children of all places at the next level, in order.
std::vector<Place> expand(const std::vector<Place>& parents, const Word& word) {
  if (word.counts.size() != 1 && word.counts.size() != parents.size())
    fail("topology: \"{}\" lists {} counts for {} parents", word.word, word.counts.size(), parents.size());
  std::vector<Place> children;
  for (size_t i = 0; i < parents.size(); ++i) {
    const int count = word.counts.size() == 1 ? word.counts[0] : word.counts[i];
    if (children.size() + static_cast<size_t>(count) > kMostObjects)
      fail("topology: more than {} objects at \"{}\"", kMostObjects, word.word);
    children.insert(children.end(), static_cast<size_t>(count), parents[i]);
  }
  for (size_t i = 0; i < children.size(); ++i) {
    if (word.level == Level::kNuma) children[i].node = static_cast<int>(i);
    if (word.level == Level::kCore) children[i].core = static_cast<int>(i);
  }
  return children;
}

}  // namespace

Topology Topology::synthetic(std::string_view spec) {
  std::vector<Place> places(1);
  for (const Word& word : parse_words(spec)) places = expand(places, word);
  Topology out;
  int core = -1;
  for (size_t pu = 0; pu < places.size(); ++pu) {
    const int node = std::max(places[pu].node, 0);
    if (node == static_cast<int>(out.nodes.size()))
      out.nodes.push_back({.id = node, .cores = {}, .memory = 0});
    Node& home = out.nodes.back();
    const bool same_core = !home.cores.empty() && places[pu].core >= 0 && places[pu].core == core;
    if (!same_core) home.cores.emplace_back();
    home.cores.back().push_back(static_cast<int>(pu));
    core = places[pu].core;
  }
  return out;
}

}  // namespace kt::inline base
