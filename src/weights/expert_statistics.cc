#include "weights/expert_statistics.h"

#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/file.h"
#include "formats/floats.h"
#include "text/json.h"
#include "text/shown.h"
#include "weights/torch/torch_file.h"

namespace kt::inline weights {
namespace {

constexpr std::string_view kCountsKey = "logical_count";
// SGLang's recorder keeps up to a thousand steps of 61 layers with 256 experts, 15.6 million numbers.
constexpr int64_t kMostCounts = 1 << 24;
constexpr size_t kMostBytes = size_t{1} << 30;
constexpr JsonLimits kStatisticsJson{.bytes = size_t{256} << 20, .depth = 16, .values = size_t{1} << 24};

// A table in a file: its shape, and the number of any element.
class CountTable {
 public:
  CountTable(std::vector<int64_t> shape, std::string_view name) : shape_(std::move(shape)), name_(name) {
    const size_t rank = shape_.size();
    if (rank != 2 && rank != 3)
      fail("{}: expected {} [layers, experts] or [steps, layers, experts], has shape {}", name_, kCountsKey,
           shape_text(shape_));
    int64_t all = 1;
    for (const int64_t size : shape_)
      if (size < 1 || __builtin_mul_overflow(all, size, &all) || all > kMostCounts)
        fail("{}: {} of shape {}: expected 1 to {} counts", name_, kCountsKey, shape_text(shape_),
             kMostCounts);
  }
  virtual ~CountTable() = default;

  ExpertStatistics summed() const {
    const int64_t experts = shape_.back(), layers = shape_[shape_.size() - 2];
    const int64_t steps = shape_.size() == 3 ? shape_[0] : 1;
    ExpertStatistics out{.layers = static_cast<int>(layers),
                         .experts = static_cast<int>(experts),
                         .counts = std::vector<int64_t>(static_cast<size_t>(layers * experts))};
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t i = 0; i < layers * experts; ++i) {
        int64_t& sum = out.counts[static_cast<size_t>(i)];
        if (__builtin_add_overflow(sum, count_at(step * layers * experts + i), &sum))
          fail("{}: the counts of expert {} of layer {} add up to more than {}", name_, i % experts,
               i / experts, INT64_MAX);
      }
    return out;
  }

 protected:
  virtual int64_t count_at(int64_t i) const = 0;  // in the order of the shape

  int64_t checked(int64_t value, int64_t i) const {
    if (value < 0) not_a_count(i, text("{}", value));
    return value;
  }
  int64_t checked(uint64_t value, int64_t i) const {
    if (value > INT64_MAX) not_a_count(i, text("{}", value));
    return static_cast<int64_t>(value);
  }
  int64_t checked(double value, int64_t i) const {
    if (!(value >= 0 && value < 0x1p63)) not_a_count(i, text("{}", value));
    if (value != std::floor(value))
      fail("{}: {}{}: counts are whole numbers, this is {}", name_, kCountsKey, place_of(i), value);
    return static_cast<int64_t>(value);
  }
  [[noreturn]] void not_a_count(int64_t i, std::string_view found) const {
    fail("{}: {}{}: expected a count up to {}, has {}", name_, kCountsKey, place_of(i), INT64_MAX, found);
  }

  const std::vector<int64_t> shape_;
  const std::string_view name_;

 private:
  // "[1, 0, 7]" of the i-th element.
  std::string place_of(int64_t i) const {
    std::vector<int64_t> place(shape_.size());
    for (size_t d = shape_.size(); d-- > 0; i /= shape_[d]) place[d] = i % shape_[d];
    return shape_text(place);
  }
};

class TensorCounts final : public CountTable {
 public:
  TensorCounts(const TorchTensor& tensor, std::string_view name)
      : CountTable(tensor.shape, name), tensor_(tensor) {}

 private:
  int64_t count_at(int64_t i) const override {
    int64_t at = tensor_.offset, rest = i;
    for (size_t d = shape_.size(); d-- > 0; rest /= shape_[d]) at += rest % shape_[d] * tensor_.strides[d];
    switch (tensor_.dtype) {
      case Dtype::kBool:
      case Dtype::kU8:
        return value<uint8_t>(at);
      case Dtype::kI8:
        return checked(int64_t{value<int8_t>(at)}, i);
      case Dtype::kU16:
        return value<uint16_t>(at);
      case Dtype::kI16:
        return checked(int64_t{value<int16_t>(at)}, i);
      case Dtype::kU32:
        return value<uint32_t>(at);
      case Dtype::kI32:
        return checked(int64_t{value<int32_t>(at)}, i);
      case Dtype::kU64:
        return checked(value<uint64_t>(at), i);
      case Dtype::kI64:
        return checked(value<int64_t>(at), i);
      case Dtype::kF16:
        return checked(double{to_f32(value<f16>(at))}, i);
      case Dtype::kBf16:
        return checked(double{to_f32(value<bf16>(at))}, i);
      case Dtype::kF32:
        return checked(double{value<float>(at)}, i);
      case Dtype::kF64:
        return checked(value<double>(at), i);
      default:
        fail("{}: counts of type {}", name_, name_of(tensor_.dtype));
    }
  }

  template <typename T>
  T value(int64_t at) const {
    T out;
    std::memcpy(&out, tensor_.storage.data() + static_cast<size_t>(at) * sizeof(T), sizeof(T));
    return out;
  }

  const TorchTensor& tensor_;
};

class JsonCounts final : public CountTable {
 public:
  JsonCounts(const Json& table, std::string_view name) : CountTable(shape_of(table), name) {
    values_.reserve(static_cast<size_t>(elements(shape_)));
    flatten(table, 0);
  }

 private:
  // Of what stands first everywhere; flatten() finds where others differ.
  static std::vector<int64_t> shape_of(const Json& table) {
    std::vector<int64_t> out;
    for (const Json* at = &table; at->is_array(); at = &at->front()) {
      out.push_back(static_cast<int64_t>(at->size()));
      if (at->empty()) break;
    }
    return out;
  }

  void flatten(const Json& value, size_t depth) {
    if (depth == shape_.size()) {
      values_.push_back(&value);
      return;
    }
    if (!value.is_array() || std::ssize(value) != shape_[depth])
      fail("{}: no table: before count {} stands {}, expected a list of {}", name_, values_.size(),
           value.is_array() ? text("a list of {}", value.size()) : shown(value.dump()), shape_[depth]);
    for (const Json& each : value) flatten(each, depth + 1);
  }

  int64_t count_at(int64_t i) const override {
    const Json& value = *values_[static_cast<size_t>(i)];
    if (value.is_number_unsigned()) return checked(value.get<uint64_t>(), i);
    if (value.is_number_integer()) return checked(value.get<int64_t>(), i);
    if (value.is_number_float()) return checked(value.get<double>(), i);
    not_a_count(i, shown(value.dump()));
  }

  std::vector<const Json*> values_;
};

std::string no_counts(std::string_view name, std::span<const std::string> keys) {
  return text("{}: no {}; the file has {}", name, kCountsKey,
              keys.empty() ? std::string("no keys") : shown_list(keys, 8));
}

ExpertStatistics from_torch(std::span<const std::byte> file, std::string_view name) {
  const TorchFile found = parse_torch_file(file, name);
  if (found.alone) return TensorCounts(*found.alone, name).summed();
  std::vector<std::string> keys = found.others;
  for (const auto& [key, tensor] : found.tensors) {
    if (key == kCountsKey) return TensorCounts(tensor, name).summed();
    keys.push_back(key);
  }
  fail("{}", no_counts(name, keys));
}

ExpertStatistics from_json(std::string_view file, std::string_view name) {
  const Json found = parse_json(file, name, kStatisticsJson);
  if (!found.is_object()) return JsonCounts(found, name).summed();
  const auto counts = found.find(kCountsKey);
  if (counts != found.end()) return JsonCounts(*counts, name).summed();
  std::vector<std::string> keys;
  for (const auto& [key, value] : found.items()) keys.push_back(key);
  fail("{}", no_counts(name, keys));
}

}  // namespace

ExpertStatistics parse_expert_statistics(std::span<const std::byte> file, std::string_view name) {
  if (file.size() > kMostBytes)
    fail("{}: {} of statistics, at most {} are read", name, human_bytes(file.size()),
         human_bytes(kMostBytes));
  if (looks_like_torch_file(file)) return from_torch(file, name);
  return from_json({reinterpret_cast<const char*>(file.data()), file.size()}, name);
}

ExpertStatistics read_expert_statistics(const std::string& path) {
  const MappedFile file(path);
  return parse_expert_statistics(file.bytes(), path);
}

}  // namespace kt::inline weights
