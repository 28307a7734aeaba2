#include "base/memory.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace kt::inline base {
namespace {

using testing::HasSubstr;

bool aligned(const Buffer& buffer, size_t to) { return reinterpret_cast<uintptr_t>(buffer.data()) % to == 0; }

TEST(Buffer, ZeroedAlignedAndWritable) {
  for (const size_t bytes : {1, 63, 64, 65, 4096, 100'003, 1 << 20, (2 << 20) - 1, 2 << 20, (4 << 20) + 17}) {
    for (const HugePages huge : {HugePages::kNone, HugePages::kAdvise}) {
      Buffer buffer(bytes, {.huge = huge});
      ASSERT_EQ(buffer.size(), bytes);
      const bool big = huge == HugePages::kAdvise && bytes >= size_t{2} << 20;
      EXPECT_TRUE(aligned(buffer, big ? size_t{2} << 20 : 64));
      const auto all = buffer.bytes();
      EXPECT_TRUE(std::all_of(all.begin(), all.end(), [](std::byte b) { return b == std::byte{0}; }));
      std::fill(all.begin(), all.end(), std::byte{0xa5});
    }
  }
}

TEST(Buffer, Empty) {
  Buffer none, zero(0);
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(zero.data(), nullptr);
  EXPECT_TRUE(zero.as<float>().empty());
}

TEST(Buffer, AsElements) {
  Buffer buffer(4 * 10 + 3);
  EXPECT_EQ(buffer.as<float>().size(), 10u);
  buffer.as<uint32_t>()[9] = 0x01010101;
  const Buffer& view = buffer;
  EXPECT_EQ(view.as<uint8_t>()[39], 1);
}

TEST(Buffer, MovesKeepTheBytesInPlace) {
  for (const size_t bytes : {100, 3 << 20}) {
    Buffer a(bytes);
    std::byte* const at = a.data();
    at[bytes - 1] = std::byte{7};
    Buffer b(std::move(a));
    EXPECT_EQ(b.data(), at);
    EXPECT_EQ(a.data(), nullptr);  // NOLINT: what a moved-from buffer is, is the contract here
    EXPECT_EQ(a.size(), 0u);
    Buffer c(50);
    c = std::move(b);
    EXPECT_EQ(c.data()[bytes - 1], std::byte{7});
    Buffer& same = c;
    c = std::move(same);
    EXPECT_EQ(c.data(), at);
    a = Buffer(10);
    EXPECT_EQ(a.size(), 10u);
  }
}

TEST(Buffer, BindsToANodeOrSaysWhyNot) {
  std::string said;
  set_log_sink([&](LogLevel, std::string_view line) { said = line; });
  Buffer here(1 << 20, {.node = 0});
  here.data()[0] = std::byte{1};
  said.clear();
  Buffer nowhere(1 << 20, {.node = 777});
  nowhere.data()[0] = std::byte{1};
  set_log_sink({});
  EXPECT_THAT(said, HasSubstr("node 777"));
}

void expect_memory_error(size_t bytes, HugePages huge) {
  try {
    Buffer buffer(bytes, {.huge = huge});
    FAIL() << bytes;
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kMemory);
    EXPECT_THAT(e.what(), HasSubstr(text("{} bytes", bytes)));
    EXPECT_THAT(e.what(), HasSubstr("available"));
  }
}

TEST(Buffer, TooMuchIsAnErrorWithNumbers) {
  for (const HugePages huge : {HugePages::kNone, HugePages::kAdvise, HugePages::kRequire}) {
    expect_memory_error(size_t{1} << 60, huge);
    expect_memory_error(std::numeric_limits<size_t>::max(), huge);
  }
}

TEST(Buffer, RequiredHugePagesAreGivenOrRefused) {
  try {
    Buffer buffer(1000, {.huge = HugePages::kRequire});
    buffer.data()[999] = std::byte{1};
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kMemory);
    EXPECT_THAT(e.what(), HasSubstr("huge pages"));
  }
}

TEST(Memory, ThisMachine) {
  EXPECT_GT(available_memory(), 0u);
  EXPECT_LE(available_memory(), total_memory());
  EXPECT_THAT(huge_page_mode(), testing::AnyOf("always", "madvise", "never", "unknown"));
}

// A folder that stands for "/".
class MemoryFiles : public testing::Test {
 protected:
  MemoryFiles() {
    std::string name = (std::filesystem::temp_directory_path() / "kt_memory_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    root_ = name;
    put("/proc/meminfo", "MemTotal:       2000 kB\nMemFree:  5 kB\nMemAvailable:   1000 kB");
  }
  ~MemoryFiles() override { std::filesystem::remove_all(root_); }

  void put(const std::string& path, const std::string& content) {
    const std::filesystem::path full = root_ + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << content << '\n';
  }

  std::string root_;
};

TEST_F(MemoryFiles, NoCgroup) {
  EXPECT_EQ(available_memory(root_), 1000u << 10);
  EXPECT_EQ(total_memory(root_), 2000u << 10);
}

TEST_F(MemoryFiles, TheTightestAncestorBinds) {
  put("/proc/self/cgroup", "0::/a/b");
  put("/sys/fs/cgroup/a/b/memory.max", "max");
  put("/sys/fs/cgroup/a/memory.max", "500000");
  put("/sys/fs/cgroup/a/memory.current", "400000");
  put("/sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 100000\nactive_file 50000");
  EXPECT_EQ(total_memory(root_), 500000u);
  EXPECT_EQ(available_memory(root_), 250000u);
}

TEST_F(MemoryFiles, FirstVersionInsideAContainer) {
  put("/proc/self/cgroup", "5:cpu,memory:/docker/12\n1:name=x:/");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "300000");
  put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "400000");  // over, for a moment
  EXPECT_EQ(total_memory(root_), 300000u);
  EXPECT_EQ(available_memory(root_), 0u);
}

TEST_F(MemoryFiles, OwnMemory) {
  EXPECT_EQ(own_memory(root_), 0u);
  put("/proc/self/status", "Name:\tkt\nVmRSS:\t  900 kB\nRssAnon:\t  300 kB\nRssFile:\t  600 kB");
  EXPECT_EQ(own_memory(root_), 300u << 10);
}

TEST(Memory, OwnMemoryGrowsWithWhatIsTouched) {
  const uint64_t before = own_memory();
  Buffer buffer(size_t{64} << 20);
  std::memset(buffer.data(), 1, buffer.size());
  EXPECT_GE(own_memory(), before + (uint64_t{63} << 20));
}

TEST_F(MemoryFiles, HugePageMode) {
  EXPECT_EQ(huge_page_mode(root_), "unknown");
  put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
  EXPECT_EQ(huge_page_mode(root_), "madvise");
}

}  // namespace
}  // namespace kt::inline base
