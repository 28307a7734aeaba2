// Memory of a step on the CPU: rows by name, and the angles of each kind of rotation at the step's positions.
#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "nn/ops.h"
#include "nn/rope.h"

namespace kt::inline nn {

// Floats, or ids where a router wrote them. Rows of one name share their memory, as wide as the widest.
class RowMemory {
 public:
  Rows rows(std::string_view name, int64_t width) {
    size_t i = 0;
    while (i < all_.size() && all_[i].name != name) ++i;
    if (i == all_.size()) all_.push_back({.name = std::string(name), .width = 0, .bytes = {}});
    all_[i].width = std::max(all_[i].width, width);
    return {.id = static_cast<int>(i), .width = width};
  }
  int64_t width() const {  // of all together
    int64_t sum = 0;
    for (const Named& named : all_) sum += named.width;
    return sum;
  }
  void allocate(size_t tokens) {
    for (Named& named : all_)
      named.bytes = std::make_unique<std::byte[]>(tokens * static_cast<size_t>(named.width) * sizeof(float));
  }
  std::byte* at(Rows rows) const { return all_[static_cast<size_t>(rows.id)].bytes.get(); }

 private:
  struct Named {
    std::string name;
    int64_t width = 0;
    std::unique_ptr<std::byte[]> bytes;
  };
  std::vector<Named> all_;
};

class Rotation {
 public:
  explicit Rotation(const RopeSpec& spec) : rope_(spec) {}
  const RopeSpec& spec() const { return rope_.spec(); }
  int64_t half() const { return rope_.spec().dims / 2; }

  void allocate(size_t tokens) {
    cosines_.resize(tokens * static_cast<size_t>(half()));
    sines_.resize(cosines_.size());
  }
  // Token `token` of the step stands at this position of its text.
  void place(int token, int position) {
    rope_.angles(position, cosines_.data() + token * half(), sines_.data() + token * half());
  }
  // Rotates `heads` heads, `stride` numbers apart.
  void rotate(const RowKernels& rows, int token, float* x, int heads, int64_t stride) const {
    rope_.rotate(rows, x, heads, stride, cosines_.data() + token * half(), sines_.data() + token * half());
  }

 private:
  Rope rope_;
  std::vector<float> cosines_, sines_;  // [tokens, dims / 2]
};

}  // namespace kt::inline nn
