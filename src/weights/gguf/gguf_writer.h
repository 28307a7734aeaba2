// A new GGUF file of version 3 with tensors of f32: an adapter's. It appears whole or not at all.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/file.h"

namespace kt::inline weights {

struct GgufTensorSpec {
  std::string name;
  std::vector<int64_t> shape;  // outermost first; the file has it reversed
};
using GgufFields = std::vector<std::pair<std::string, std::variant<std::string, uint32_t, float>>>;

// Every value of every tensor must be written once before commit(). One thread at a time.
class GgufWriter {
 public:
  GgufWriter(std::string path, const GgufFields& fields, const std::vector<GgufTensorSpec>& tensors);
  void write(size_t tensor, uint64_t first,
             std::span<const float> values);  // from that value of the tensor on
  uint64_t size() const { return size_; }     // of the whole file
  void commit();                              // durable, then under its name

 private:
  std::vector<uint64_t> starts_, counts_;  // [tensors] offset in the file, values
  uint64_t size_ = 0, written_ = 0, wanted_ = 0;
  AtomicFile file_;
};

}  // namespace kt::inline weights
