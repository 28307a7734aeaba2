#include "base/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/cpu.h"
#include "base/sha256_blocks.h"

namespace kt::inline base {
namespace {

constexpr size_t kBlock = 64;

uint32_t big_endian(const std::byte* at) {
  return std::to_integer<uint32_t>(at[0]) << 24 | std::to_integer<uint32_t>(at[1]) << 16 |
         std::to_integer<uint32_t>(at[2]) << 8 | std::to_integer<uint32_t>(at[3]);
}

Sha256Blocks chosen() {
  static const Sha256Blocks blocks = cpu().sha256 ? sha256_instructions : sha256_portable;
  return blocks;
}

}  // namespace

void sha256_portable(uint32_t* state, const std::byte* blocks, size_t count) noexcept {
  using std::rotr;
  for (; count > 0; --count, blocks += kBlock) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = big_endian(blocks + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t s[8];
    std::memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; ++i) {
      const uint32_t sum1 = rotr(s[4], 6) ^ rotr(s[4], 11) ^ rotr(s[4], 25);
      const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
      const uint32_t first = s[7] + sum1 + choice + kSha256Rounds[i] + w[i];
      const uint32_t sum0 = rotr(s[0], 2) ^ rotr(s[0], 13) ^ rotr(s[0], 22);
      const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
      s[7] = s[6], s[6] = s[5], s[5] = s[4], s[4] = s[3] + first;
      s[3] = s[2], s[2] = s[1], s[1] = s[0], s[0] = first + sum0 + majority;
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
  }
}

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19},
      pending_{} {}

void Sha256::add(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const size_t waiting = size_ % kBlock;
  size_ += bytes.size();
  if (waiting > 0) {
    const size_t taken = std::min(kBlock - waiting, bytes.size());
    std::memcpy(pending_.data() + waiting, bytes.data(), taken);
    bytes = bytes.subspan(taken);
    if (waiting + taken < kBlock) return;
    chosen()(state_.data(), pending_.data(), 1);
  }
  const size_t whole = bytes.size() / kBlock;
  if (whole > 0) chosen()(state_.data(), bytes.data(), whole);
  bytes = bytes.subspan(whole * kBlock);
  if (!bytes.empty()) std::memcpy(pending_.data(), bytes.data(), bytes.size());
}

std::string Sha256::hex() {
  const uint64_t bits = size_ * 8;
  // One 1 bit, zeros, and the number of bits in the last 8 bytes of a block.
  std::array<std::byte, 2 * kBlock> end{};
  end[0] = std::byte{0x80};
  const size_t used = size_ % kBlock;
  const size_t padding = (used < kBlock - 8 ? kBlock : 2 * kBlock) - used;
  for (size_t i = 0; i < 8; ++i) end[padding - 1 - i] = static_cast<std::byte>(bits >> 8 * i & 0xff);
  add(std::span(end).first(padding));

  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const uint32_t word : state_)
    for (int shift = 28; shift >= 0; shift -= 4) out += kDigits[word >> shift & 15];
  return out;
}

}  // namespace kt::inline base
