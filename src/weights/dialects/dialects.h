// From the tensors of one projection of one expert to StoredPlanes. One function for each family of dialects;
// which one applies is told by the suffixes and types that are there, never by a model's name.
#pragma once
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "weights/checkpoint.h"
#include "weights/dialects/plane_matrix.h"
#include "weights/experts.h"

namespace kt::inline weights {

// A tensor of the index: views into the checkpoint's own names.
struct ExpertTensor {
  int layer = 0, expert = -1;  // -1: all experts in one tensor
  uint8_t part = 0;            // NamedPart
  std::string_view suffix;
  const Tensor* tensor = nullptr;
};

// A tensor, or one expert's slice of a fused tensor with the expert dimension gone.
struct Slab {
  const Tensor* tensor = nullptr;
  std::span<const int64_t> shape;
  std::span<const std::byte> bytes;

  explicit operator bool() const { return tensor != nullptr; }
  const std::string& name() const { return tensor->name; }
  Dtype dtype() const { return tensor->dtype; }
};

// Which rows of what is stored are this projection.
enum class RowChoice : uint8_t { kAll, kFirstHalf, kSecondHalf, kEven, kOdd };

struct Module {
  std::string name;
  std::span<const ExpertTensor> tensors;
  int expert = -1;  // slice of fused tensors; -1: the tensors are this expert's own
  RowChoice rows = RowChoice::kAll;
  bool transposed = false;  // stored [k, n]
  const ModelConfig* config = nullptr;

  Slab find(std::initializer_list<std::string_view> suffixes) const;  // the first that is there
};

struct Reading {
  std::string_view dialect;
  InputType type = InputType::kAuto;  // the option that names it; kAuto: none does
  StoredPlanes planes;
};

// Headers only: suffixes, types and shapes checked, no byte of the tensors touched (but for weight_shape
// where the header leaves k open). Errors name the tensor.
Reading read_module(const Module& module);
// The same with what only the bytes tell: zero points, order of groups, weight_shape.
Reading read_module_bytes(const Module& module);
// [n] values of the module's bias, or nothing where it has none.
std::optional<std::vector<float>> read_bias(const Module& module);

Reading read_float(const Module& module, const Slab& weight);  // BF16, F16, F32, E4M3, I8 with float scales
Reading read_mxfp4(const Module& module, const Slab& codes, const Slab& scales);
Reading read_nvfp4(const Module& module, const Slab& codes, const Slab& scales);
Reading read_gguf(const Module& module, const Slab& weight);
Reading read_compressed(const Module& module);  // weight_packed of compressed-tensors
void settle_compressed(const Module& module, StoredPlanes& planes);
Reading read_qweight(const Module& module);  // GPTQ and AWQ
void settle_qweight(const Module& module, Reading& reading);

// Scale::kF32, kBf16 or kF16 for these types, or an Error naming the tensor.
Scale scale_kind(const Slab& scales);
// Error unless the slab has this shape.
void expect_shape(const Slab& slab, std::initializer_list<int64_t> shape);

}  // namespace kt::inline weights
