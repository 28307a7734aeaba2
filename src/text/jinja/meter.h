// What one rendering may cost, and the account of it. Every operation on values charges here before it does
// work that grows with its input, so that a template cannot run away; every fault of a template is thrown
// here, with its line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace kt::inline texts {

struct TemplateBudget {
  int64_t steps = 2'000'000;        // expressions, statements, elements looked at
  size_t work_bytes = 256u << 20;   // bytes of text and lists read or made, in sum
  size_t output_bytes = 16u << 20;  // of the rendered prompt
  size_t value_bytes = 16u << 20;   // of one string or list
  int64_t range = 100'000;          // elements of one range()
  int depth = 600;                  // nested expressions, statements and macro calls
};

namespace jinja {

// Depth of lists in lists, of what a parser nests. Bounds every recursion over values, their destruction too.
inline constexpr int kMaxValueDepth = 100;
inline constexpr int kMaxNesting = 200;

class Meter {
 public:
  Meter(std::string_view name, const TemplateBudget& budget) : name_(name), budget_(budget) {}

  int line = 1;

  // Error(kInput) "chat template NAME line N: message", in one line.
  [[noreturn]] void fail(std::string_view message) const;
  template <typename First, typename... Args>
  [[noreturn]] void fail(TextPattern<1 + sizeof...(Args)> pattern, const First& first,
                         const Args&... args) const {
    fail(text(pattern, first, args...));
  }

  void step(int64_t count = 1) {
    steps_ += count;
    if (steps_ > budget_.steps) [[unlikely]]
      fail("more than {} steps", budget_.steps);
  }
  // `bytes` are about to be read or made.
  void work(size_t bytes) {
    if (bytes > budget_.work_bytes - work_) [[unlikely]]
      fail("more than {} of text and lists handled", human_bytes(budget_.work_bytes));
    work_ += bytes;
  }
  // One value of `bytes` is about to be made.
  void value(size_t bytes) {
    fits(bytes);
    work(bytes);
  }
  void fits(size_t bytes) const {
    if (bytes > budget_.value_bytes) [[unlikely]]
      fail("a value of {} is larger than {}", human_bytes(bytes), human_bytes(budget_.value_bytes));
  }
  const TemplateBudget& budget() const { return budget_; }

  // One level of the interpreter's recursion.
  class Level {
   public:
    explicit Level(Meter& meter) : meter_(meter) {
      if (++meter_.depth_ > meter_.budget_.depth) [[unlikely]] {
        --meter_.depth_;
        meter_.fail("nested deeper than {} levels", meter_.budget_.depth);
      }
    }
    ~Level() { --meter_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Meter& meter_;
  };

 private:
  std::string name_;
  TemplateBudget budget_;
  int64_t steps_ = 0;
  size_t work_ = 0;
  int depth_ = 0;
};

}  // namespace jinja
}  // namespace kt::inline texts
