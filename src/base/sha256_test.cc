#include "base/sha256.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "base/cpu.h"
#include "base/sha256_blocks.h"

namespace kt::inline base {
namespace {

std::string hex_of(std::string_view characters) {
  Sha256 sha;
  sha.add(std::as_bytes(std::span(characters)));
  return sha.hex();
}

// Examples of FIPS 180-4 and of NIST's validation set.
TEST(Sha256, KnownDigests) {
  EXPECT_EQ(hex_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(
      hex_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqr"
             "smnopqrstnopqrstu"),
      "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(hex_of(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesOfAnySizeGiveTheSameDigest) {
  std::string data(1000, '\0');
  std::mt19937 random(1);
  for (char& c : data) c = static_cast<char>(random());
  for (size_t size = 0; size <= 200; ++size) {
    const std::string whole = hex_of(data.substr(0, size));
    for (const size_t piece : {1, 7, 63, 64, 65, 130}) {
      Sha256 sha;
      for (size_t at = 0; at < size; at += piece)
        sha.add(std::as_bytes(std::span(data)).subspan(at, std::min(piece, size - at)));
      EXPECT_EQ(sha.hex(), whole) << size << " bytes in pieces of " << piece;
    }
  }
}

TEST(Sha256, InstructionsAgreeWithPortable) {
  if (!cpu().sha256) GTEST_SKIP() << "the CPU has no SHA-256 instructions";
  std::mt19937 random(2);
  for (size_t count = 0; count <= 17; ++count) {
    std::vector<std::byte> data(64 * count + 3);
    for (std::byte& b : data) b = static_cast<std::byte>(random());
    uint32_t a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = b[i] = random();
    sha256_portable(a, data.data() + 3, count);  // unaligned on purpose
    sha256_instructions(b, data.data() + 3, count);
    EXPECT_EQ(std::memcmp(a, b, sizeof a), 0) << count << " blocks";
  }
}

}  // namespace
}  // namespace kt::inline base
