// A pattern as a tree, between regex_compile.cc, which reads it, and regex_steps.cc, which makes steps of it.
#pragma once
#include <string_view>
#include <vector>

#include "text/regex.h"

namespace kt::inline texts {

struct RegexNode {
  enum class Kind { kSequence, kEither, kSet, kRepeat, kLook, kBehind, kAtomic, kAssert };
  Kind kind = Kind::kSequence;
  std::vector<RegexNode> parts = {};
  uint32_t set = 0;
  uint32_t min = 0, max = 0;
  RegexStep::Mode mode = RegexStep::Mode::kGreedy;
  RegexStep::Place place = RegexStep::Place::kTextBegin;
  bool negative = false;
};

// Error(kInput), naming the pattern, where there would be too many.
std::vector<RegexStep> regex_steps(const RegexNode& tree, std::string_view pattern);

}  // namespace kt::inline texts
