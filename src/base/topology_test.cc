#include "base/topology.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/error.h"

namespace kt::inline base {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string spec_error(std::string_view spec) {
  try {
    Topology::synthetic(spec);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInput);
    return e.what();
  }
  return "no error";
}

TEST(SyntheticTopology, LevelsMultiply) {
  const Topology t = Topology::synthetic("pack:2 numa:2 core:8 pu:2");
  ASSERT_EQ(t.nodes.size(), 4u);
  EXPECT_EQ(t.cores(), 32);
  EXPECT_EQ(t.pus(), 64);
  EXPECT_FALSE(t.real());
  EXPECT_THAT(t.nodes[0].cores[0], ElementsAre(0, 1));
  EXPECT_EQ(t.nodes[3].id, 3);
  EXPECT_THAT(t.nodes[3].cores[7], ElementsAre(62, 63));
}

TEST(SyntheticTopology, LevelsMayBeLeftOut) {
  const Topology one = Topology::synthetic("pack:2 core:3");
  ASSERT_EQ(one.nodes.size(), 1u);
  EXPECT_EQ(one.cores(), 6);
  EXPECT_EQ(one.pus(), 6);
  const Topology flat = Topology::synthetic("  numa:2\tpu:4 ");
  EXPECT_EQ(flat.nodes.size(), 2u);
  EXPECT_EQ(flat.cores(), 8);
  const Topology inside = Topology::synthetic("numa:3 pack:1 l3:2 core:2 pu:1");
  EXPECT_EQ(inside.nodes.size(), 3u);
  EXPECT_EQ(inside.cores(), 12);
  EXPECT_EQ(Topology::synthetic("pu:1").pus(), 1);
}

TEST(SyntheticTopology, NodesOfDifferentSizes) {
  const Topology t = Topology::synthetic("numa:3 core:4,2,1 pu:2");
  ASSERT_EQ(t.nodes.size(), 3u);
  EXPECT_EQ(t.nodes[0].cores.size(), 4u);
  EXPECT_EQ(t.nodes[1].cores.size(), 2u);
  EXPECT_EQ(t.nodes[2].cores.size(), 1u);
  EXPECT_THAT(t.nodes[1].cores[0], ElementsAre(8, 9));
  EXPECT_EQ(t.pus(), 14);
  const Topology mixed = Topology::synthetic("core:3 pu:2,1,1");  // performance and efficiency cores
  EXPECT_THAT(mixed.nodes[0].cores, ElementsAre(ElementsAre(0, 1), ElementsAre(2), ElementsAre(3)));
}

TEST(SyntheticTopology, ErrorsNameTheWord) {
  EXPECT_THAT(spec_error(""), HasSubstr("empty"));
  EXPECT_THAT(spec_error("numa:2 cpu:4"), HasSubstr("\"cpu:4\""));
  EXPECT_THAT(spec_error("numa"), HasSubstr("\"numa\""));
  EXPECT_THAT(spec_error("numa: core:1"), HasSubstr("\"numa:\""));
  EXPECT_THAT(spec_error("core:0"), HasSubstr("\"core:0\""));
  EXPECT_THAT(spec_error("core:-1"), HasSubstr("\"core:-1\""));
  EXPECT_THAT(spec_error("core:4x"), HasSubstr("\"core:4x\""));
  EXPECT_THAT(spec_error("core:4,"), HasSubstr("\"core:4,\""));
  EXPECT_THAT(spec_error("core:99999999999999999999"), HasSubstr("core:9999"));
  EXPECT_THAT(spec_error("core:2 numa:2"), HasSubstr("\"numa:2\" cannot stand inside \"core:2\""));
  EXPECT_THAT(spec_error("pu:2 core:2"), HasSubstr("cannot stand inside"));
  EXPECT_THAT(spec_error("pack:2 socket:2"), HasSubstr("\"socket:2\" repeats \"pack:2\""));
  EXPECT_THAT(spec_error("numa:3 core:1,2"), HasSubstr("2 counts for 3 parents"));
  EXPECT_THAT(spec_error("pack:60000 core:60000"), HasSubstr("\"core:60000\""));
}

TEST(CpuList, KernelFormat) {
  EXPECT_THAT(parse_cpu_list("0-2,8,10-11\n"), ElementsAre(0, 1, 2, 8, 10, 11));
  EXPECT_THAT(parse_cpu_list("5"), ElementsAre(5));
  EXPECT_THAT(parse_cpu_list(""), ElementsAre());
  EXPECT_THAT(parse_cpu_list("\n"), ElementsAre());
  EXPECT_THAT(parse_cpu_list("3,x"), ElementsAre(3));
  EXPECT_THAT(parse_cpu_list("0-99999999"), ElementsAre());
}

TEST(Topology, ThisMachine) {
  const Topology t = Topology::discover();
  EXPECT_TRUE(t.real());
  std::set<int> cpus;
  for (const Node& node : t.nodes) {
    EXPECT_FALSE(node.cores.empty());
    for (const auto& core : node.cores) {
      EXPECT_FALSE(core.empty());
      cpus.insert(core.begin(), core.end());
    }
  }
  const std::vector<int> allowed = allowed_cpus();
  EXPECT_EQ(cpus, std::set<int>(allowed.begin(), allowed.end()));
  EXPECT_EQ(t.pus(), static_cast<int>(allowed.size()));
}

// A folder that stands for /sys.
class Sysfs : public testing::Test {
 protected:
  Sysfs() {
    std::string name = (std::filesystem::temp_directory_path() / "kt_sysfs_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    root_ = name;
  }
  ~Sysfs() override { std::filesystem::remove_all(root_); }

  void put(const std::string& path, const std::string& content) {
    const std::filesystem::path full = root_ + "/devices/system/" + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << content << '\n';
  }

  std::string root_;
};

TEST_F(Sysfs, TwoNodesWithSiblingsAndAMemoryNode) {
  put("node/online", "0-2");
  put("node/node0/cpulist", "0-1,4-5");
  put("node/node0/meminfo", "Node 0 MemTotal:       1024 kB\nNode 0 MemFree: 1 kB");
  put("node/node1/cpulist", "2-3,6-7");
  put("node/node2/cpulist", "");
  for (int cpu = 0; cpu < 8; ++cpu)
    put(text("cpu/cpu{}/topology/core_cpus_list", cpu), text("{},{}", cpu % 4, cpu % 4 + 4));
  const Topology t = Topology::read_sysfs(root_, {0, 1, 2, 3, 4, 5, 6, 7});
  ASSERT_EQ(t.nodes.size(), 2u);
  EXPECT_THAT(t.nodes[0].cores, ElementsAre(ElementsAre(0, 4), ElementsAre(1, 5)));
  EXPECT_THAT(t.nodes[1].cores, ElementsAre(ElementsAre(2, 6), ElementsAre(3, 7)));
  EXPECT_EQ(t.nodes[0].memory, 1024u * 1024);
  EXPECT_FALSE(t.real());

  const Topology cut = Topology::read_sysfs(root_, {3, 6, 7});
  ASSERT_EQ(cut.nodes.size(), 1u);
  EXPECT_EQ(cut.nodes[0].id, 1);
  EXPECT_THAT(cut.nodes[0].cores, ElementsAre(ElementsAre(3, 7), ElementsAre(6)));
}

TEST_F(Sysfs, NothingThereIsOneNode) {
  const Topology t = Topology::read_sysfs(root_, {2, 5});
  ASSERT_EQ(t.nodes.size(), 1u);
  EXPECT_THAT(t.nodes[0].cores, ElementsAre(ElementsAre(2), ElementsAre(5)));
}

TEST_F(Sysfs, CpusOutsideEveryNodeAreKept) {
  put("node/online", "0");
  put("node/node0/cpulist", "0");
  put("cpu/cpu1/topology/thread_siblings_list", "1-2");
  const Topology t = Topology::read_sysfs(root_, {0, 1, 2});
  ASSERT_EQ(t.nodes.size(), 1u);
  EXPECT_EQ(t.pus(), 3);
}

}  // namespace
}  // namespace kt::inline base
