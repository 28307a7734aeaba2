// SHA-1, for the one thing that still needs it: git names small files of a repository by it. Tells damaged files from
// whole ones; no defence against who means to deceive.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kt::inline hub {

class Sha1 {
 public:
  void add(std::span<const std::byte> bytes);
  std::string hex();  // 40 lower-case digits; once, at the end

 private:
  void take_block(const std::byte* block);

  std::array<uint32_t, 5> state_ = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0};
  std::array<std::byte, 64> pending_{};
  uint64_t size_ = 0;
};

// What a git blob of this many bytes begins with: "blob 12\0"; its name is the sum of that and the bytes.
std::string git_blob_head(uint64_t bytes);

}  // namespace kt::inline hub
