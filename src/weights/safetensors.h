// The safetensors file format, both ways. Reading trusts nothing; writing fills tensors in any order from any
// thread and lets the file appear whole or not at all.
#pragma once
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "weights/tensor.h"

namespace kt::inline weights {

using Metadata = std::map<std::string, std::string>;  // the `__metadata__` of a file

struct SafetensorsHeader {
  std::vector<Tensor> tensors;  // in the order of their bytes; views into `file`
  Metadata metadata;
};

// Error(kInput) naming `name`, the tensor and the numbers, unless: the header is at most 100 MB, starts with
// '{', has no duplicate keys; every dtype is known, every shape's bytes fit 64 bits and equal the offsets'
// difference; offsets leave no hole, no overlap, and end at the end of the file.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view name);

struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kU8;
  std::vector<int64_t> shape;
};
size_t byte_count(const TensorSpec& spec);

// The header bytes for these tensors in this order: length, JSON, spaces up to a multiple of 64.
std::string safetensors_header(const std::vector<TensorSpec>& tensors, const Metadata& metadata);

// A new safetensors file. write() may be called from several threads; every byte of every tensor must be
// written once before commit().
class SafetensorsWriter {
 public:
  SafetensorsWriter(std::string path, std::vector<TensorSpec> tensors, const Metadata& metadata);
  void write(size_t tensor, uint64_t offset, std::span<const std::byte> bytes);
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  uint64_t size() const { return size_; }  // of the whole file
  // sha256 of the whole file as 64 hex digits; reads it back from the page cache.
  std::string digest();
  void commit();  // durable, then under its name

 private:
  std::vector<TensorSpec> tensors_;
  std::vector<uint64_t> starts_;  // [tensors] offset of each in the file
  uint64_t size_ = 0;
  uint64_t written_ = 0;  // bytes so far, by all threads
  AtomicFile file_;
};

}  // namespace kt::inline weights
