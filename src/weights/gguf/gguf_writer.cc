#include "weights/gguf/gguf_writer.h"

#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "weights/tensor.h"

namespace kt::inline weights {
namespace {

// Numbers of the file format: kinds of values, the type of tensors, and what data begin at a multiple of.
constexpr uint32_t kFileVersion = 3, kU32Value = 4, kF32Value = 6, kStringValue = 8, kF32Tensor = 0;
constexpr uint64_t kDataAlignment = 32;

template <typename T>
void put_number(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void put_string(std::string& out, const std::string& string) {
  put_number(out, static_cast<uint64_t>(string.size()));
  out += string;
}

void put_field(std::string& out, const GgufFields::value_type& field) {
  put_string(out, field.first);
  if (const auto* const string = std::get_if<std::string>(&field.second)) {
    put_number(out, kStringValue);
    put_string(out, *string);
  } else if (const auto* const whole = std::get_if<uint32_t>(&field.second)) {
    put_number(out, kU32Value);
    put_number(out, *whole);
  } else {
    put_number(out, kF32Value);
    put_number(out, std::get<float>(field.second));
  }
}

uint64_t aligned(uint64_t at) { return (at + kDataAlignment - 1) / kDataAlignment * kDataAlignment; }

}  // namespace

GgufWriter::GgufWriter(std::string path, const GgufFields& fields, const std::vector<GgufTensorSpec>& tensors)
    : file_(std::move(path)) {
  std::string head = "GGUF";
  put_number(head, kFileVersion);
  put_number(head, static_cast<uint64_t>(tensors.size()));
  put_number(head, static_cast<uint64_t>(fields.size()));
  for (const auto& field : fields) put_field(head, field);
  uint64_t at = 0;
  for (const GgufTensorSpec& tensor : tensors) {
    put_string(head, tensor.name);
    put_number(head, static_cast<uint32_t>(tensor.shape.size()));
    for (auto size = tensor.shape.rbegin(); size != tensor.shape.rend(); ++size)
      put_number(head, static_cast<uint64_t>(*size));
    put_number(head, kF32Tensor);
    put_number(head, at);
    starts_.push_back(at);
    counts_.push_back(static_cast<uint64_t>(elements(tensor.shape)));
    wanted_ += counts_.back();
    at = aligned(checked_add(at, checked_mul(counts_.back(), uint64_t{4}, tensor.name), tensor.name));
  }
  const uint64_t data = aligned(head.size());
  head.resize(data);
  for (uint64_t& start : starts_) start += data;
  size_ = data + at;
  file_.reserve(size_);
  file_.write_at(0, std::as_bytes(std::span(head)));
}

void GgufWriter::write(size_t tensor, uint64_t first, std::span<const float> values) {
  KT_CHECK(tensor < starts_.size() && first <= counts_[tensor] && values.size() <= counts_[tensor] - first,
           "{}: {} values at {} of tensor {}", file_.path(), values.size(), first, tensor);
  file_.write_at(starts_[tensor] + first * 4, std::as_bytes(values));
  written_ += values.size();
}

void GgufWriter::commit() {
  KT_CHECK(written_ == wanted_, "{}: {} of {} values were written", file_.path(), written_, wanted_);
  file_.commit();
}

}  // namespace kt::inline weights
