// What cached keys and values are: numbers of one type in blocks of 64 tokens. How a block is ordered is the business
// of those who read it (kernels/attention.h on a CPU, cuda/kernels on a GPU).
#pragma once
#include <cstdint>

namespace kt::inline formats {

enum class KvType : uint8_t { kF32, kBf16, kS8 };  // kS8: a scale for each key
constexpr int kv_bytes(KvType type) { return type == KvType::kF32 ? 4 : type == KvType::kBf16 ? 2 : 1; }

inline constexpr int kKvBlock = 64;    // keys that lie together
inline constexpr int kKvColumns = 32;  // d and dv are padded to multiples of this, with zeros

}  // namespace kt::inline formats
