#include "weights/linears.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"
#include "weights/dialects/dialects.h"
#include "weights/gguf/gguf_linears.h"
#include "weights/stored_names.h"

namespace kt::inline weights {
namespace {

// What a module's own tensors may be called; the first that is there holds its codes.
constexpr std::string_view kMain[] = {"weight_packed", "qweight", "weight"};
constexpr std::string_view kBeside[] = {
    "weight_scale_inv", "weight_scale",      "scale_inv", "scale",  "weight_shape", "g_idx",
    "weight_g_idx",     "weight_zero_point", "qzeros",    "scales", "input_scale",  "input_zero_point",
    "activation_scale", "weight_scale_2"};

using Named = std::vector<std::pair<std::string_view, const Tensor*>>;  // suffix, tensor

bool is_float(Dtype dtype) { return dtype == Dtype::kBf16 || dtype == Dtype::kF16 || dtype == Dtype::kF32; }

// Bytes with scales beside them are codes; without, they are a table or a mask and nobody's weights.
bool is_quantised(std::string_view suffix, const Tensor& main, size_t tensors) {
  if (suffix != "weight") return true;
  if (main.dtype == Dtype::kE4m3 || main.dtype == Dtype::kF4) return true;
  return (main.dtype == Dtype::kI8 || main.dtype == Dtype::kU8) && tensors > 1;
}

void add_linear(std::string_view module, const Named& named, std::vector<LinearModule>& out) {
  for (const std::string_view suffix : kMain) {
    const auto at = std::ranges::find(named, suffix, &Named::value_type::first);
    if (at == named.end()) continue;
    LinearModule linear;
    linear.module = module;
    linear.main = at->second;
    linear.quantised = is_quantised(suffix, *linear.main, named.size());
    if (linear.main->shape.size() != 2 || (!linear.quantised && !is_float(linear.main->dtype))) return;
    linear.tensors.push_back(linear.main);
    if (linear.quantised)
      for (const auto& [other, tensor] : named)
        if (tensor != linear.main) linear.tensors.push_back(tensor);
    out.push_back(std::move(linear));
    return;
  }
}

}  // namespace

uint64_t LinearModule::bytes() const {
  uint64_t sum = 0;
  for (const Tensor* tensor : tensors) sum += tensor->bytes.size();
  return sum;
}

std::vector<LinearModule> find_linears(const Checkpoint& checkpoint,
                                       const std::function<bool(std::string_view tensor)>& skip) {
  if (checkpoint.is_gguf()) return find_gguf_linears(checkpoint, skip);
  std::map<std::string_view, Named> modules;
  for (const Tensor& tensor : checkpoint.tensors()) {
    const std::string_view name = tensor.name;
    const size_t dot = name.rfind('.');
    if (dot == std::string_view::npos || skip(name)) continue;
    const std::string_view suffix = name.substr(dot + 1);
    if (std::ranges::find(kMain, suffix) != std::end(kMain) ||
        std::ranges::find(kBeside, suffix) != std::end(kBeside))
      modules[name.substr(0, dot)].emplace_back(suffix, &tensor);
  }
  std::vector<LinearModule> out;
  for (const auto& [module, named] : modules) add_linear(module, named, out);
  return out;
}

std::unique_ptr<StoredMatrix> open_linear(const Checkpoint& checkpoint, const LinearModule& linear) {
  if (checkpoint.is_gguf()) return open_gguf_linear(checkpoint, linear);
  std::vector<ExpertTensor> tensors;
  for (const Tensor* tensor : linear.tensors)
    tensors.push_back(
        {.suffix = std::string_view(tensor->name).substr(linear.module.size() + 1), .tensor = tensor});
  const Module module{.name = linear.module, .tensors = tensors, .config = &checkpoint.config()};
  return plane_matrix(linear.module, read_module_bytes(module).planes);
}

std::vector<float> read_vector(const Checkpoint& checkpoint, std::string_view name) {
  const Tensor& tensor = checkpoint.at(stored_name(checkpoint, name));
  if (checkpoint.is_gguf()) return read_gguf_vector(checkpoint, tensor, name);
  if (!is_float(tensor.dtype)) fail("{}: expected F32, F16 or BF16, found {}", tensor.name, describe(tensor));
  Tensor row = tensor;
  row.shape = {1, elements(tensor.shape)};
  std::vector<float> out(static_cast<size_t>(row.shape[1]));
  if (out.empty()) return out;
  const ExpertTensor tensors[] = {{.suffix = "weight", .tensor = &row}};
  const Module module{.name = tensor.name, .tensors = tensors, .config = &checkpoint.config()};
  plane_matrix(tensor.name, read_module_bytes(module).planes)->values(0, 1, out.data());
  return out;
}

}  // namespace kt::inline weights
