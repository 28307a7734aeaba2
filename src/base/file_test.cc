#include "base/file.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace kt::inline base {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

class Files : public testing::Test {
 protected:
  Files() {
    std::string name = (fs::temp_directory_path() / "kt_file_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    folder_ = name;
  }
  ~Files() override { fs::remove_all(folder_); }

  std::string at(const std::string& name) const { return folder_ + "/" + name; }
  size_t entries() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  std::string folder_;
};

std::string_view characters(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.size()};
}

template <typename F>
Error error_of(F&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  return Error(ErrorKind::kInternal, "no error");
}

TEST_F(Files, WriteThenMap) {
  write_atomically(at("a"), "hello");
  MappedFile file(at("a"));
  EXPECT_EQ(characters(file), "hello");
  EXPECT_EQ(file.path(), at("a"));
  MappedFile moved(std::move(file));
  EXPECT_EQ(characters(moved), "hello");
  EXPECT_TRUE(file.bytes().empty());  // NOLINT: the contract of a moved-from file
  moved = MappedFile(at("a"));
  EXPECT_EQ(characters(moved), "hello");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, EmptyFile) {
  write_atomically(at("empty"), "");
  EXPECT_TRUE(MappedFile(at("empty")).bytes().empty());
}

TEST_F(Files, MapErrorsNameThePath) {
  const Error missing = error_of([&] { MappedFile file(at("none")); });
  EXPECT_EQ(missing.kind(), ErrorKind::kInput);
  EXPECT_THAT(missing.what(), HasSubstr(at("none")));
  EXPECT_THAT(missing.what(), HasSubstr("No such file"));
  EXPECT_THAT(error_of([&] { MappedFile file(folder_); }).what(), HasSubstr("folder"));
  EXPECT_THAT(error_of([&] { MappedFile file("/dev/null"); }).what(), HasSubstr("regular"));
}

// Nobody opens the other end: a reader that waits for it never returns.
TEST_F(Files, WhatIsNoRegularFileIsRefusedAtOnce) {
  ASSERT_EQ(mkfifo(at("fifo").c_str(), 0600), 0);
  for (const auto& [path, found] :
       {std::pair(at("fifo"), "got a FIFO"), {folder_, "got a folder"}, {"/dev/zero", "got a device"}}) {
    const std::string wanted = text("{}: expected a regular file, {}", path, found);
    EXPECT_EQ(error_of([&] { open_regular(path); }).what(), wanted);
    EXPECT_EQ(error_of([&] { MappedFile file(path); }).what(), wanted);
    EXPECT_EQ(error_of([&] { read_file(path, 10); }).what(), wanted);
    EXPECT_EQ(read_small_file(path), std::nullopt);
  }
}

TEST_F(Files, WholeFilesAreBounded) {
  write_atomically(at("j"), std::string(10'000, 'y'));
  EXPECT_EQ(read_file(at("j"), 10'000).size(), 10'000u);
  EXPECT_EQ(error_of([&] { read_file(at("j"), 9'999); }).what(),
            at("j") + ": larger than 9999 bytes, the most that is read of it");
  std::ofstream(at("endless")).close();
  fs::resize_file(at("endless"), uintmax_t{1} << 40);
  EXPECT_EQ(read_small_file(at("endless")), std::nullopt);
}

TEST_F(Files, ALinkIsRefused) {
  refuse_link(at("none"));
  fs::create_symlink("nowhere", at("link"));
  EXPECT_THAT(error_of([&] { refuse_link(at("link")); }).what(), HasSubstr(at("link") + ": a symbolic link"));
  refuse_link(folder_);
}

TEST_F(Files, AppendsAddUp) {
  AtomicFile file(at("b"));
  file.append("one ");
  file.append(std::as_bytes(std::span("two", 3)));
  file.append("");
  EXPECT_EQ(file.size(), 7u);
  AtomicFile moved(std::move(file));
  moved.append("!");
  EXPECT_FALSE(fs::exists(at("b")));
  moved.commit();
  EXPECT_EQ(characters(MappedFile(at("b"))), "one two!");
  EXPECT_THROW(moved.append("more"), Error);
  EXPECT_THROW(moved.commit(), Error);
}

TEST_F(Files, WithoutCommitTheOldFileStays) {
  write_atomically(at("c"), "old");
  {
    AtomicFile file(at("c"));
    file.append("new");
    EXPECT_EQ(entries(), 2u);
  }
  EXPECT_EQ(characters(MappedFile(at("c"))), "old");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, AMappedOldVersionOutlivesItsReplacement) {
  write_atomically(at("d"), "old");
  const MappedFile old(at("d"));
  write_atomically(at("d"), "newer");
  EXPECT_EQ(characters(old), "old");
  EXPECT_EQ(characters(MappedFile(at("d"))), "newer");
}

TEST_F(Files, PermissionsAreKept) {
  write_atomically(at("e"), "1");
  ASSERT_EQ(chmod(at("e").c_str(), 0640), 0);
  write_atomically(at("e"), "2");
  struct stat facts{};
  ASSERT_EQ(stat(at("e").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0640u);
}

TEST_F(Files, TwoWritersOfOnePath) {
  AtomicFile first(at("f")), second(at("f"));
  first.append("first");
  second.append("second");
  second.commit();
  first.commit();
  EXPECT_EQ(characters(MappedFile(at("f"))), "first");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, FoldersThatCannotBeWritten) {
  // Places where not even the superuser can create a file.
  for (const std::string& path : {at("none/x"), std::string("/proc/self/x")}) {
    const Error e = error_of([&] { write_atomically(path, "x"); });
    EXPECT_EQ(e.kind(), ErrorKind::kInput) << e.what();
    EXPECT_THAT(e.what(), HasSubstr(path));
  }
  write_atomically(at("file"), "x");
  EXPECT_THAT(error_of([&] { write_atomically(at("file/x"), "x"); }).what(), HasSubstr("Not a directory"));
}

TEST_F(Files, AFolderIsNotReplaced) {
  fs::create_directory(at("g"));
  const Error e = error_of([&] { write_atomically(at("g"), "x"); });
  EXPECT_THAT(e.what(), HasSubstr("cannot replace"));
  EXPECT_TRUE(fs::is_directory(at("g")));
  EXPECT_EQ(entries(), 1u);
}

// Files of this process may not grow beyond a size, as if the disk were full.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    handler_ = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit small{.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  sighandler_t handler_;
};

TEST_F(Files, FullDiskKeepsTheOldFile) {
  write_atomically(at("h"), "old");
  const std::string big(100'000, 'x');
  Error e(ErrorKind::kInternal, "");
  {
    const FullDisk full(70'000);
    e = error_of([&] {
      AtomicFile file(at("h"));
      file.append("head");
      try {
        file.append(big);
      } catch (const Error&) {
        EXPECT_THROW(file.commit(), Error);
        throw;
      }
    });
  }
  EXPECT_EQ(e.kind(), ErrorKind::kMemory);
  EXPECT_THAT(e.what(), HasSubstr(at("h")));
  EXPECT_THAT(e.what(), HasSubstr("100004 bytes"));
  EXPECT_EQ(characters(MappedFile(at("h"))), "old");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, SmallFiles) {
  EXPECT_EQ(read_small_file(at("none")), std::nullopt);
  EXPECT_EQ(read_small_file(folder_), std::nullopt);
  write_atomically(at("i"), std::string(10'000, 'y'));
  EXPECT_EQ(read_small_file(at("i"))->size(), 10'000u);
  EXPECT_FALSE(read_small_file("/proc/self/status")->empty());
}

TEST_F(Files, PiecesInAnyOrder) {
  AtomicFile file(at("pieces"));
  file.reserve(6);
  file.write_at(3, std::as_bytes(std::span(std::string_view("def"))));
  file.write_at(0, std::as_bytes(std::span(std::string_view("abc"))));
  std::array<std::byte, 4> middle{};
  file.read_at(1, middle);
  EXPECT_EQ(std::memcmp(middle.data(), "bcde", 4), 0);
  EXPECT_EQ(error_of([&] { file.write_at(4, std::as_bytes(std::span(std::string_view("xyz")))); }).kind(),
            ErrorKind::kInternal);
  EXPECT_FALSE(fs::exists(at("pieces")));
  file.commit();
  EXPECT_EQ(characters(MappedFile(at("pieces"))), "abcdef");
}

TEST_F(Files, ReserveMoreThanTheDiskHas) {
  AtomicFile file(at("big"));
  const Error error = error_of([&] { file.reserve(uint64_t{1} << 55); });
  EXPECT_EQ(error.kind(), ErrorKind::kMemory) << error.what();
  EXPECT_THAT(error.what(), HasSubstr("36028797018963968"));
}

}  // namespace
}  // namespace kt::inline base
