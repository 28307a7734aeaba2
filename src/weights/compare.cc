#include "weights/compare.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <list>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "base/mapped_faults.h"
#include "base/pool.h"
#include "formats/floats.h"
#include "weights/checkpoint.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;

// Either kind of weights as tensors by name.
struct Side {
  std::optional<Checkpoint> checkpoint;
  std::list<MappedFile> files;
  std::vector<Tensor> tensors;
};

bool is_kt_folder(const std::string& path) {
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(path, code))
    if (entry.is_directory(code) && entry.path().filename().string().starts_with("_layer_")) return true;
  return false;
}

Side open_kt_folder(const std::string& path) {
  Side side;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    if (!entry.is_regular_file() || entry.path().extension() != ".kt") continue;
    const MappedFile& file = side.files.emplace_back(entry.path().string());
    Tensor tensor;
    tensor.name = fs::relative(entry.path(), path).generic_string();
    tensor.bytes = file.bytes();
    const bool scales = tensor.name.ends_with("_scale_.kt") && file.size() % 4 == 0;
    tensor.dtype = scales ? Dtype::kF32 : Dtype::kU8;
    tensor.shape = {static_cast<int64_t>(file.size() / (scales ? 4 : 1))};
    side.tensors.push_back(std::move(tensor));
  }
  std::ranges::sort(side.tensors, {}, &Tensor::name);
  return side;
}

Side open_side(const std::string& path, bool kt_folder) {
  if (kt_folder) return open_kt_folder(path);
  Side side;
  side.checkpoint.emplace(path);
  side.tensors.assign(side.checkpoint->tensors().begin(), side.checkpoint->tensors().end());
  return side;
}

bool is_comparable_float(Dtype dtype) {
  return dtype == Dtype::kBf16 || dtype == Dtype::kF16 || dtype == Dtype::kF32 || dtype == Dtype::kF64 ||
         dtype == Dtype::kE4m3;
}

template <class T>
T load(const std::byte* bytes, int64_t index) {
  T value;
  std::memcpy(&value, bytes + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

double value_of(Dtype dtype, const std::byte* bytes, int64_t index) {
  switch (dtype) {
    case Dtype::kBf16:
      return static_cast<double>(to_f32(load<bf16>(bytes, index)));
    case Dtype::kF16:
      return static_cast<double>(to_f32(load<f16>(bytes, index)));
    case Dtype::kF32:
      return static_cast<double>(load<float>(bytes, index));
    case Dtype::kE4m3:
      return static_cast<double>(e4m3_to_f32(load<uint8_t>(bytes, index)));
    default:
      return load<double>(bytes, index);
  }
}

void compare_floats(const Tensor& a, const Tensor& b, double tolerance, TensorDifference& out) {
  out.elements = elements(a.shape);
  out.floats = true;
  if (a.dtype == b.dtype && std::ranges::equal(a.bytes, b.bytes)) return;
  for (int64_t i = 0; i < out.elements; ++i) {
    const double x = value_of(a.dtype, a.bytes.data(), i), y = value_of(b.dtype, b.bytes.data(), i);
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    double difference = std::fabs(x - y);
    if (std::isnan(difference)) difference = std::numeric_limits<double>::infinity();
    out.largest = std::max(out.largest, difference);
    out.differing += difference > tolerance;
  }
}

void compare_bytes(const Tensor& a, const Tensor& b, TensorDifference& out) {
  out.elements = static_cast<int64_t>(std::min(a.bytes.size(), b.bytes.size()));
  if (std::memcmp(a.bytes.data(), b.bytes.data(), static_cast<size_t>(out.elements)) == 0) return;
  for (int64_t i = 0; i < out.elements; ++i)
    out.differing += a.bytes[static_cast<size_t>(i)] != b.bytes[static_cast<size_t>(i)];
}

// Nothing for equal tensors, but for `largest`.
TensorDifference compare_tensors(const Tensor& a, const Tensor& b, double tolerance) {
  TensorDifference out{.name = a.name, .a = describe(a), .b = describe(b)};
  const bool same_type = a.dtype == b.dtype && a.gguf_type == b.gguf_type;
  if (!same_type) out.kind = TensorDifference::Kind::kType;
  if (a.shape != b.shape) {
    out.kind = TensorDifference::Kind::kShape;
  } else if (is_comparable_float(a.dtype) && is_comparable_float(b.dtype)) {
    compare_floats(a, b, tolerance, out);
  } else if (same_type && !a.bytes.empty()) {
    compare_bytes(a, b, out);
  }
  return out;
}

struct Pair {
  const Tensor* a;
  const Tensor* b;
};

std::vector<Pair> pair_up(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  std::vector<Pair> pairs;
  auto left = a.begin();
  auto right = b.begin();
  while (left != a.end() || right != b.end()) {
    const bool take_a = right == b.end() || (left != a.end() && left->name <= right->name);
    const bool take_b = left == a.end() || (right != b.end() && right->name <= left->name);
    pairs.push_back({take_a ? &*left : nullptr, take_b ? &*right : nullptr});
    left += take_a;
    right += take_b;
  }
  return pairs;
}

TensorDifference compare_pair(const Pair& pair, double tolerance) {
  using Kind = TensorDifference::Kind;
  if (!pair.b) return {.kind = Kind::kOnlyA, .name = pair.a->name, .a = describe(*pair.a)};
  if (!pair.a) return {.kind = Kind::kOnlyB, .name = pair.b->name, .b = describe(*pair.b)};
  return compare_tensors(*pair.a, *pair.b, tolerance);
}

}  // namespace

Comparison compare_weights(const std::string& a, const std::string& b, double tolerance, int threads) try {
  if (!(tolerance >= 0)) fail("tolerance {}: expected a number of at least 0", tolerance);
  const bool kt_a = is_kt_folder(a), kt_b = is_kt_folder(b);
  if (kt_a != kt_b)
    fail("{} holds .kt files and {} does not: kt quant merge makes safetensors of them", kt_a ? a : b,
         kt_a ? b : a);
  const Side left = open_side(a, kt_a), right = open_side(b, kt_b);
  const std::vector<Pair> pairs = pair_up(left.tensors, right.tensors);

  std::vector<TensorDifference> found(pairs.size());
  std::atomic<size_t> next{0};
  Pool pool({.threads = threads});
  pool.run([&](const Worker&) {
    for (size_t i = next++; i < pairs.size(); i = next++) found[i] = compare_pair(pairs[i], tolerance);
  });
  check_mapped_files();

  Comparison out{.tensors_a = static_cast<int64_t>(left.tensors.size()),
                 .tensors_b = static_cast<int64_t>(right.tensors.size())};
  for (size_t i = 0; i < pairs.size(); ++i) {
    out.largest = std::max(out.largest, found[i].largest);
    if (found[i].elements > 0) out.bytes_compared += pairs[i].a->bytes.size() + pairs[i].b->bytes.size();
    if (found[i].kind == TensorDifference::Kind::kValues && found[i].differing == 0) {
      ++out.equal;
    } else {
      out.differences.push_back(std::move(found[i]));
    }
  }
  return out;
} catch (const fs::filesystem_error& error) {
  fail("{}: {}", error.path1().string(), error.code().message());
}

}  // namespace kt::inline weights
