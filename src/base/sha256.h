// SHA-256, with the CPU's own instructions where it has them. For checksums of files; nothing secret goes
// through here.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kt::inline base {

class Sha256 {
 public:
  Sha256();
  void add(std::span<const std::byte> bytes);
  std::string hex();  // 64 lower-case digits; once, at the end

 private:
  std::array<uint32_t, 8> state_;
  std::array<std::byte, 64> pending_;
  uint64_t size_ = 0;
};

}  // namespace kt::inline base
