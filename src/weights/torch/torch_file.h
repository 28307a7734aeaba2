// Tensors of a file that torch.save wrote: a tensor alone, or a dict of them. Read as data (pickle.h), whoever made
// the file; for small tables that other programs leave, not for checkpoints.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weights/tensor.h"

namespace kt::inline weights {

// Element [i, j] lies at storage[offset + i * strides[0] + j * strides[1]]; all of them lie in the storage. Strides of
// 0 let few bytes stand for any number of elements.
struct TorchTensor {
  Dtype dtype = Dtype::kU8;
  std::vector<int64_t> shape, strides;
  int64_t offset = 0;
  std::span<const std::byte> storage;  // a view into the file
};

struct TorchFile {
  std::optional<TorchTensor> alone;                          // the file is a tensor
  std::vector<std::pair<std::string, TorchTensor>> tensors;  // of a dict, in its order
  std::vector<std::string> others;                           // names of the dict's other values
};

bool looks_like_torch_file(std::span<const std::byte> file);  // of this version or of one before 1.6

// Error(kInput) in one line that begins with `name`: truncated or damaged, or what only Python can read, with the
// line that makes JSON of it.
TorchFile parse_torch_file(std::span<const std::byte> file, std::string_view name);

}  // namespace kt::inline weights
