#include "hub/part_file.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "base/testing/error_of.h"
#include "base/testing/temp_folder.h"
#include "hub/sha1.h"

namespace kt::inline hub {
namespace {

using ::testing::HasSubstr;
using testing_files::bytes_of;

std::string sha1_of(std::string_view content, size_t step) {
  Sha1 sum;
  for (size_t at = 0; at < content.size(); at += step) sum.add(bytes_of(content.substr(at, step)));
  return sum.hex();
}

TEST(Sha1, KnownSums) {
  EXPECT_EQ(sha1_of("", 1), "da39a3ee5e6b4b0d3255bfef95601890afd80709");
  EXPECT_EQ(sha1_of("abc", 1), "a9993e364706816aba3e25717850c26c9cd0d89d");
  EXPECT_EQ(sha1_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 7),
            "84983e441c3bd26ebaae4aa1f95129e5e54670f1");
  const std::string million(1'000'000, 'a');
  EXPECT_EQ(sha1_of(million, 997), "34aa973cd4c4daa4f61eeb2bdbad27316534016f");
}

TEST(PartFile, GoesOnWhereItWas) {
  const testing_files::TempFolder folder;
  const std::string path = folder.at("part");
  {
    PartFile part(path, 10, 4);
    EXPECT_EQ(part.pieces(), 3u);
    part.write(8, bytes_of("ij"));
    part.finish(2);
    part.write(0, bytes_of("ab"));  // and no finish
  }
  EXPECT_EQ(PartFile::bytes_there(path, 10, 4), 2u);
  PartFile part(path, 10, 4);
  EXPECT_FALSE(part.has(0));
  EXPECT_TRUE(part.has(2));
  part.write(0, bytes_of("abcd"));
  part.finish(0);
  part.write(4, bytes_of("efgh"));
  EXPECT_FALSE(part.is_whole());
  part.finish(1);
  EXPECT_TRUE(part.is_whole());
  EXPECT_EQ(wrong_bytes(path, {.size = 10,
                               .sha256 = "72399361da6a7754fec986dca5b7cbaf1c810a28ded4abaf56b2106d06cb78b0"}),
            "");
  EXPECT_THAT(wrong_bytes(path, {.size = 10, .git_sha1 = std::string(40, '0')}), HasSubstr("git sha1"));
  EXPECT_THAT(wrong_bytes(path, {.size = 11}), HasSubstr("expected 11 bytes, found 10"));
}

TEST(PartFile, ForgetsMapsOfOtherSizes) {
  const testing_files::TempFolder folder;
  const std::string path = folder.at("part");
  const auto finish_first = [&] {
    PartFile part(path, 10, 4);
    part.write(0, bytes_of("abcd"));
    part.finish(0);
  };
  finish_first();
  EXPECT_EQ(PartFile::bytes_there(path, 10, 5), 0u);
  EXPECT_EQ(PartFile::bytes_there(path, 11, 4), 0u);
  std::filesystem::resize_file(path, 3);
  EXPECT_FALSE(PartFile(path, 10, 4).has(0));
  finish_first();
  std::ofstream(path + ".map") << "kt download 1 10 4\n1";
  EXPECT_FALSE(PartFile(path, 10, 4).has(0));
}

TEST(PartFile, OfNothing) {
  const testing_files::TempFolder folder;
  PartFile part(folder.at("part"), 0, 4);
  EXPECT_TRUE(part.is_whole());
  EXPECT_EQ(wrong_bytes(part.path(), {.size = 0, .git_sha1 = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"}),
            "");
}

TEST(PartFile, FollowsNoLink) {
  const testing_files::TempFolder folder;
  std::ofstream(folder.at("victim")) << "precious";
  std::filesystem::create_symlink(folder.at("victim"), folder.at("part"));
  EXPECT_THAT(error_of([&] { PartFile(folder.at("part"), 4, 4); }), HasSubstr("cannot be written"));
}

}  // namespace
}  // namespace kt::inline hub
