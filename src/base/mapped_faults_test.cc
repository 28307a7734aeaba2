#include "base/mapped_faults.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/pool.h"
#include "base/testing/temp_folder.h"

namespace kt::inline base {
namespace {

using testing_files::TempFolder;

const auto kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// A file of eight pages of 'x'.
std::string eight_pages(const TempFolder& folder, std::string_view name) {
  return folder.put(name, std::string(8 * kPage, 'x'));
}

std::string complaint() { return broken_mapping().value_or("none"); }

TEST(MappedFaults, AFileThatShrinksIsZerosAndAComplaint) {
  const TempFolder folder;
  const std::string path = eight_pages(folder, "a");
  {
    MappedFile first(path);
    check_mapped_files();
    std::filesystem::resize_file(path, kPage);
    check_mapped_files();  // nothing was read yet
    EXPECT_EQ(first.bytes()[kPage - 1], std::byte{'x'});
    EXPECT_EQ(first.bytes()[3 * kPage + 7], std::byte{0});
    EXPECT_EQ(complaint(),
              text("{}: nothing at byte {} of {} any more: it shrank, or its disk failed, while it "
                   "was read",
                   path, 3 * kPage + 7, 8 * kPage));
    EXPECT_EQ(first.bytes()[2 * kPage], std::byte{0});
    const MappedFile moved(std::move(first));
    EXPECT_THAT(complaint(), testing::HasSubstr(text("byte {} of", 2 * kPage)));
    EXPECT_THROW(check_mapped_files(), Error);
    EXPECT_EQ(moved.bytes()[0], std::byte{'x'});
  }
  check_mapped_files();  // of a file that nobody maps any more only this is left
  EXPECT_THAT(first_broken_mapping().value_or(""), testing::HasSubstr(path));
  const MappedFile again(path);
  EXPECT_TRUE(std::ranges::all_of(again.bytes(), [](std::byte b) { return b == std::byte{'x'}; }));
  check_mapped_files();
}

// Workers took no signal at all once, and a SIGBUS that is blocked ends the process.
TEST(MappedFaults, InEveryThreadOfAPool) {
  const TempFolder folder;
  const std::string path = eight_pages(folder, "b");
  const MappedFile file(path);
  std::filesystem::resize_file(path, 0);
  Pool pool({.threads = 2});
  std::atomic<int> sum = 0;
  pool.run([&](const Worker& worker) {
    if (worker.index == 1)
      for (const std::byte b : file.bytes()) sum += static_cast<int>(b);
  });
  EXPECT_EQ(sum, 0);
  EXPECT_THAT(complaint(), testing::StartsWith(path + ": nothing at byte 0 of "));
}

TEST(MappedFaults, WritingFromOne) {
  const TempFolder folder;
  const std::string path = eight_pages(folder, "c");
  const MappedFile file(path);
  std::filesystem::resize_file(path, 0);
  AtomicFile out(folder.at("out")), other(folder.at("other"));
  out.append(file.bytes());
  other.reserve(8 * kPage);
  other.write_at(0, file.bytes());
  EXPECT_THAT(complaint(), testing::StartsWith(path + ": nothing at byte 0 of "));
}

TEST(MappedFaults, ManyFilesComeAndGo) {
  const TempFolder folder;
  const std::string path = eight_pages(folder, "d"), other = eight_pages(folder, "e");
  for (int round = 0; round < 3; ++round) {
    std::vector<MappedFile> files;
    for (int i = 0; i < 50; ++i) files.emplace_back(i == 30 ? other : path);
    std::filesystem::resize_file(other, kPage);
    EXPECT_EQ(files[30].bytes()[7 * kPage], std::byte{0});
    EXPECT_THAT(complaint(), testing::StartsWith(other + ": "));
    files.erase(files.begin() + 30);
    EXPECT_EQ(complaint(), "none");
    std::filesystem::resize_file(other, 8 * kPage);
  }
}

// What is no mapping of ours is none of our business.
TEST(MappedFaultsDeathTest, AnyOtherFaultEndsTheProcessAsBefore) {
  const TempFolder folder;
  const std::string path = eight_pages(folder, "f");
  const auto touch_another = [&] {
    const MappedFile file(path);
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const auto* at =
        static_cast<const volatile char*>(mmap(nullptr, 16 * kPage, PROT_READ, MAP_SHARED, fd, 0));
    (void)at[12 * kPage];
  };
  EXPECT_EXIT(touch_another(), testing::KilledBySignal(SIGBUS), "");
  EXPECT_EXIT(
      {
        const MappedFile file(path);
        std::raise(SIGBUS);
      },
      testing::KilledBySignal(SIGBUS), "");
}

}  // namespace
}  // namespace kt::inline base
