// A named tensor of a checkpoint file, seen where it lies: type, shape and bytes. No arithmetic on the
// values.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline weights {

enum class Dtype : uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF16,
  kBf16,
  kF32,
  kF64,
  kE4m3,
  kE5m2,
  kE8m0,
  kF4,    // two e2m1 in a byte, low nibble first
  kGguf,  // blocks of the GGUF type Tensor::gguf_type
};

// "BF16", "F8_E4M3": as safetensors spells it; nothing for a name it does not know. kGguf has no such name.
std::optional<Dtype> dtype_named(std::string_view name);
std::string_view name_of(Dtype dtype);
int dtype_bits(Dtype dtype);  // 4 for kF4, 0 for kGguf

// Bytes of a tensor's name; readers refuse longer ones, and what every message and pattern may have to hold
// stays small. The longest known are below 150.
constexpr size_t kMostTensorName = 1024;

struct Tensor {
  std::string name;
  Dtype dtype = Dtype::kU8;
  uint32_t gguf_type = 0;            // the number in the file, with kGguf; may be a type we cannot decode
  std::vector<int64_t> shape;        // outermost first; empty for a scalar
  std::span<const std::byte> bytes;  // exactly the shape's bytes; alignment is the file's affair
  int file = 0;                      // index into Checkpoint::files()
};

int64_t elements(std::span<const int64_t> shape);        // the product; 1 for a scalar. Overflow is an Error
std::string shape_text(std::span<const int64_t> shape);  // "[2048, 7168]"
std::string describe(const Tensor& tensor);              // "BF16 [2048, 7168]", "Q4_K [128, 768, 2048]"

}  // namespace kt::inline weights
