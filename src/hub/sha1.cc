#include "hub/sha1.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kt::inline hub {

void Sha1::take_block(const std::byte* block) {
  std::array<uint32_t, 80> w;
  for (size_t i = 0; i < 16; ++i) {
    w[i] = 0;
    for (size_t j = 0; j < 4; ++j) w[i] = w[i] << 8 | std::to_integer<uint32_t>(block[4 * i + j]);
  }
  for (size_t i = 16; i < 80; ++i) w[i] = std::rotl(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
  auto [a, b, c, d, e] = state_;
  for (size_t i = 0; i < 80; ++i) {
    const uint32_t f = i < 20              ? (b & c) | (~b & d)
                       : i < 40 || i >= 60 ? b ^ c ^ d
                                           : (b & c) | (b & d) | (c & d);
    const uint32_t k = i < 20 ? 0x5a827999 : i < 40 ? 0x6ed9eba1 : i < 60 ? 0x8f1bbcdc : 0xca62c1d6;
    const uint32_t next = std::rotl(a, 5) + f + e + k + w[i];
    e = d;
    d = c;
    c = std::rotl(b, 30);
    b = a;
    a = next;
  }
  state_ = {state_[0] + a, state_[1] + b, state_[2] + c, state_[3] + d, state_[4] + e};
}

void Sha1::add(std::span<const std::byte> bytes) {
  size_t filled = size_ % 64;
  size_ += bytes.size();
  while (!bytes.empty()) {
    const size_t part = std::min(64 - filled, bytes.size());
    std::memcpy(pending_.data() + filled, bytes.data(), part);
    bytes = bytes.subspan(part);
    filled += part;
    if (filled < 64) return;
    take_block(pending_.data());
    filled = 0;
  }
}

std::string Sha1::hex() {
  const uint64_t bits = size_ * 8;
  const std::byte one{0x80}, zero{0};
  add({&one, 1});
  while (size_ % 64 != 56) add({&zero, 1});
  std::array<std::byte, 8> length;
  for (size_t i = 0; i < 8; ++i) length[i] = std::byte(bits >> (56 - 8 * i));
  add(length);
  std::string out;
  for (const uint32_t word : state_)
    for (int shift = 28; shift >= 0; shift -= 4) out += "0123456789abcdef"[word >> shift & 15];
  return out;
}

std::string git_blob_head(uint64_t bytes) {
  std::string out = "blob " + std::to_string(bytes);
  out += '\0';
  return out;
}

}  // namespace kt::inline hub
