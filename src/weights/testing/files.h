// What tests of checkpoints share: small files of either kind, right or wrong, as strings.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "base/testing/temp_folder.h"

namespace kt::testing_files {

// A safetensors file of this header text and this much data.
inline std::string safetensors_file(std::string_view header, std::string_view data = {}) {
  return raw(uint64_t{header.size()}) + std::string(header) + std::string(data);
}

// GGUF bytes piece by piece, right or wrong.
class GgufBytes {
 public:
  explicit GgufBytes(uint64_t tensors = 0, uint64_t pairs = 0, uint32_t version = 3) {
    out_ = "GGUF" + raw(version) + raw(tensors) + raw(pairs);
  }
  static std::string string(std::string_view s) { return raw(uint64_t{s.size()}) + std::string(s); }

  template <typename T>
  GgufBytes& pair(std::string_view key, uint32_t type, T value) {
    out_ += string(key) + raw(type) + raw(value);
    return *this;
  }
  GgufBytes& pair(std::string_view key, std::string_view value) {
    out_ += string(key) + raw(uint32_t{8}) + string(value);
    return *this;
  }
  GgufBytes& number(std::string_view key, uint32_t value) { return pair(key, 4, value); }
  // Dimensions innermost first, as files have them.
  GgufBytes& tensor(std::string_view name, std::initializer_list<uint64_t> dimensions, uint32_t type,
                    uint64_t offset) {
    out_ += string(name) + raw(static_cast<uint32_t>(dimensions.size()));
    for (const uint64_t d : dimensions) out_ += raw(d);
    out_ += raw(type) + raw(offset);
    return *this;
  }
  GgufBytes& add(std::string_view bytes) {
    out_ += bytes;
    return *this;
  }
  GgufBytes& data(size_t bytes, size_t alignment = 32) {
    out_.resize((out_.size() + alignment - 1) / alignment * alignment);
    out_.append(bytes, 'd');
    return *this;
  }
  const std::string& str() const { return out_; }

 private:
  std::string out_;
};

}  // namespace kt::testing_files
