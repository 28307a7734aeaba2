// Somebody at a terminal, for tests.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <string>

#include "terminal/prompts.h"

namespace kt::inline terminal {

// Answers as if typed, and what was shown.
class Typed {
 public:
  explicit Typed(std::string answers)
      : answers_(std::move(answers)),
        in_(fmemopen(answers_.data(), answers_.size(), "r")),
        out_(open_memstream(&shown_, &size_)),
        prompts(in_, out_) {}
  ~Typed() {
    std::fclose(in_);
    std::fclose(out_);
    std::free(shown_);
  }
  std::string shown() {
    std::fflush(out_);
    return {shown_, size_};
  }

 private:
  std::string answers_;
  char* shown_ = nullptr;
  size_t size_ = 0;
  std::FILE *in_, *out_;

 public:
  Prompts prompts;
};

}  // namespace kt::inline terminal
