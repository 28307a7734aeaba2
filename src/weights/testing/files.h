// What tests of readers share: a folder that goes away, the message of an Error, small files as strings.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/testing/error_of.h"

namespace kt::testing_files {

class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "kt_weights_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string at(std::string_view name) const { return path_ + "/" + std::string(name); }
  // Writes a file, and the folders above it.
  std::string put(std::string_view name, std::string_view characters) const {
    const std::string path = at(name);
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << characters;
    return path;
  }

 private:
  std::string path_;
};

inline std::span<const std::byte> bytes_of(std::string_view characters) {
  return std::as_bytes(std::span(characters));
}

template <typename T>
std::string raw(T value) {
  std::string out(sizeof value, '\0');
  std::memcpy(out.data(), &value, sizeof value);
  return out;
}

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
