#include "base/cpu_choice.h"

#include <gmock/gmock.h>

#include "base/error.h"
#include "base/log.h"
#include "base/testing/error_of.h"
#include "base/testing/temp_folder.h"

namespace kt::inline base {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// The lines that are logged while it lives.
class LoggedLines {
 public:
  LoggedLines() {
    set_log_sink([this](LogLevel, std::string_view line) { lines.emplace_back(line); });
  }
  ~LoggedLines() { set_log_sink({}); }
  std::vector<std::string> lines;
};

TEST(CpuChoice, ThreadsAreCutToTheCpusWithALine) {
  const Topology four = Topology::synthetic("numa:2 core:1 pu:2");
  LoggedLines log;
  EXPECT_EQ(fitted({.threads = 4, .topology = four}).threads, 4);
  EXPECT_EQ(fitted({.threads = 0, .topology = four}).threads, 0);
  EXPECT_THAT(log.lines, IsEmpty());
  EXPECT_EQ(fitted({.threads = 6401, .topology = four}).threads, 4);
  EXPECT_THAT(log.lines, ElementsAre("6401 threads were asked for, but 4 cpus are usable: using 4 threads"));
  EXPECT_EQ(fitted({.threads = 6401, .nodes = 6, .topology = four}).threads, 6);  // a pool has a thread
  const auto here = static_cast<int>(allowed_cpus().size());
  EXPECT_EQ(fitted({.threads = 100000}).threads, here);
  EXPECT_EQ(Pool(fitted({.threads = 100000})).threads(), here);
}

TEST(CpuChoice, NumbersOfNodes) {
  EXPECT_THAT(parse_node_ids("0"), ElementsAre(0));
  EXPECT_THAT(parse_node_ids("0,2"), ElementsAre(0, 2));
  EXPECT_THAT(parse_node_ids("2, 0"), ElementsAre(2, 0));
  EXPECT_THAT(parse_node_ids(" 0  1 "), ElementsAre(0, 1));
  EXPECT_THAT(parse_node_ids("0-2,5"), ElementsAre(0, 1, 2, 5));
  for (const char* const bad : {"", " ", "a", "0,", ",0", "0,,1", "0-", "2-1", "-1", "0x1", "0;1", "1.5",
                                "99999999999", "0-99999999"})
    EXPECT_THAT(error_of([&] { parse_node_ids(bad); }),
                HasSubstr(text("'{}': expected numbers of NUMA nodes such as 0,2 or 0-3", bad)));
}

// A machine whose second node has memory only.
class NodesOfATree : public testing::Test {
 protected:
  NodesOfATree() {
    put("node/online", "0-2");
    put("node/node0/cpulist", "0-1");
    put("node/node1/cpulist", "");
    put("node/node2/cpulist", "2-5");
    topology_ = Topology::read_sysfs(folder_.path(), {0, 1, 2, 3, 4, 5});
  }
  void put(const std::string& path, const std::string& content) const {
    folder_.put("devices/system/" + path, content + "\n");
  }

  testing_files::TempFolder folder_;
  Topology topology_;
};

TEST_F(NodesOfATree, AreChosenByTheirNumbers) {
  const NodeChoice both = choose_nodes({"2,0"}, 0, topology_), second = choose_nodes({"2"}, 0, topology_);
  EXPECT_THAT(both.ids, ElementsAre(2, 0));
  EXPECT_EQ(both.pools, 2);
  const Pool two(PoolOptions{.nodes = 2, .topology = chosen_nodes(topology_, both.ids)});
  EXPECT_THAT(two.cpus(0), ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(two.cpus(1), ElementsAre(0, 1));
  const Pool one(PoolOptions{.nodes = 1, .topology = chosen_nodes(topology_, second.ids)});
  EXPECT_EQ(one.nodes(), 1);
  EXPECT_THAT(one.cpus(0), ElementsAre(2, 3, 4, 5));
}

TEST_F(NodesOfATree, ANodeNamedTwiceHasTwoPools) {
  const NodeChoice choice = choose_nodes({"0", "2", "2", "0"}, 0, topology_);
  EXPECT_THAT(choice.ids, ElementsAre(0, 2));
  EXPECT_EQ(choice.pools, 4);
  const Pool pool(PoolOptions{.nodes = choice.pools, .topology = chosen_nodes(topology_, choice.ids)});
  EXPECT_THAT(pool.cpus(1), ElementsAre(2, 4));
  EXPECT_EQ(choose_nodes({"2"}, 3, topology_).pools, 3);
}

TEST_F(NodesOfATree, BadListsSayWhatThereIs) {
  EXPECT_EQ(error_of([&] { choose_nodes({"0,1"}, 0, topology_); }), "there is no NUMA node 1; nodes: 0, 2");
  EXPECT_EQ(error_of([&] { choose_nodes({"7"}, 0, topology_); }), "there is no NUMA node 7; nodes: 0, 2");
  EXPECT_EQ(error_of([&] { choose_nodes({"0,2"}, 1, topology_); }),
            "2 nodes are named for 1 pools of threads");
}

}  // namespace
}  // namespace kt::inline base
