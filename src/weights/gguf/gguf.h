// The GGUF file format, versions 2 and 3, read only: metadata and tensors of one file of a model. Trusts
// nothing.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "weights/tensor.h"

namespace kt::inline weights {

// An array keeps its elements as they are in the file; element i of a string array is found by walking, once.
struct GgufArray {
  uint32_t element_type = 0;  // GGUF value type number
  uint64_t count = 0;
  std::span<const std::byte>
      bytes;  // numbers: count * size, unaligned. Strings: length (u64), characters, ...
  bool is_strings() const;
  std::vector<std::string_view> strings() const;  // of a string array; Error for any other
  // Element i where the elements are whole numbers of 64 bits with a sign; nothing otherwise. i < count.
  std::optional<int64_t> whole(uint64_t i) const;
  std::optional<bool> flag(
      uint64_t i) const;  // where elements are flags, or whole numbers and this one is 0 or 1
};
using GgufValue = std::variant<bool, uint64_t, int64_t, double, std::string_view, GgufArray>;

struct GgufHeader {
  std::string name;  // of the file, for errors
  uint32_t version = 0;
  std::map<std::string, GgufValue, std::less<>> metadata;  // views into `file`
  std::vector<Tensor> tensors;                             // shape outermost first (the file has it reversed)
};

// Error(kInput) naming `name` and the numbers for anything formats.md section 5 forbids. A tensor of a type
// whose block size nobody knows is an Error too; a known type that formats/ cannot decode is listed with its
// bytes.
GgufHeader parse_gguf(std::span<const std::byte> file, std::string_view name);

// "Q4_K" for a number, "type 77" for an unknown one.
std::string gguf_type_text(uint32_t number);

}  // namespace kt::inline weights
