#include "base/error.h"
#include "base/utf8.h"
#include "text/regex_tree.h"

namespace kt::inline texts {
namespace {

constexpr size_t kMaxSteps = 10'000;

class RegexWriter {
 public:
  RegexWriter(std::string_view pattern, std::vector<RegexStep>& steps) : pattern_(pattern), steps_(steps) {}

  void write(const RegexNode& node) {
    switch (node.kind) {
      case RegexNode::Kind::kSequence:
        for (const RegexNode& part : node.parts) write(part);
        return;
      case RegexNode::Kind::kEither:
        return either(node);
      case RegexNode::Kind::kSet:
        add({.op = RegexStep::Op::kSet, .set = node.set});
        return;
      case RegexNode::Kind::kRepeat:
        return repeat(node);
      case RegexNode::Kind::kLook:
        return enclosed(node.parts[0], {.op = RegexStep::Op::kLook, .negative = node.negative});
      case RegexNode::Kind::kBehind:
        add({.op = RegexStep::Op::kBehind, .negative = node.negative, .set = node.set});
        return;
      case RegexNode::Kind::kAtomic:
        return enclosed(node.parts[0], {.op = RegexStep::Op::kAtomic});
      case RegexNode::Kind::kAssert:
        add({.op = RegexStep::Op::kAssert, .place = node.place});
        return;
    }
  }

  uint32_t add(const RegexStep& step) {
    if (steps_.size() >= kMaxSteps)
      fail("pattern \"{}\": compiles to more than {} steps", printable(pattern_), kMaxSteps);
    steps_.push_back(step);
    return here() - 1;
  }

 private:
  uint32_t here() const { return static_cast<uint32_t>(steps_.size()); }

  void enclosed(const RegexNode& body, const RegexStep& opening) {
    const uint32_t open = add(opening);
    write(body);
    add({.op = RegexStep::Op::kAccept});
    steps_[open].target = here();
  }

  void either(const RegexNode& node) {
    std::vector<uint32_t> jumps;
    for (size_t i = 0; i + 1 < node.parts.size(); ++i) {
      const uint32_t split = add({.op = RegexStep::Op::kSplit});
      steps_[split].target = here();
      write(node.parts[i]);
      jumps.push_back(add({.op = RegexStep::Op::kJump}));
      steps_[split].other = here();
    }
    write(node.parts.back());
    for (uint32_t jump : jumps) steps_[jump].target = here();
  }

  void repeat(const RegexNode& node) {
    const RegexNode& body = node.parts[0];
    const RegexNode* inner = &body;  // a group around one set changes nothing
    while (inner->kind == RegexNode::Kind::kSequence && inner->parts.size() == 1) inner = &inner->parts[0];
    if (inner->kind == RegexNode::Kind::kSet) {
      add({.op = RegexStep::Op::kLoop,
           .mode = node.mode,
           .set = inner->set,
           .min = node.min,
           .max = node.max});
      return;
    }
    if (node.mode == RegexStep::Mode::kPossessive) {
      RegexNode greedy = node;
      greedy.mode = RegexStep::Mode::kGreedy;
      return enclosed(greedy, {.op = RegexStep::Op::kAtomic});
    }
    for (uint32_t i = 0; i < node.min; ++i) write(body);
    std::vector<uint32_t> splits;
    const auto optional_body = [&] {
      splits.push_back(add({.op = RegexStep::Op::kSplit}));
      write(body);
    };
    if (node.max == kUnbounded) {
      const uint32_t top = here();
      optional_body();
      add({.op = RegexStep::Op::kJump, .target = top});
    } else {
      for (uint32_t i = node.min; i < node.max; ++i) optional_body();
    }
    for (uint32_t split : splits) {
      const bool lazy = node.mode == RegexStep::Mode::kLazy;
      steps_[split].target = lazy ? here() : split + 1;
      steps_[split].other = lazy ? split + 1 : here();
    }
  }

  std::string_view pattern_;
  std::vector<RegexStep>& steps_;
};

}  // namespace

std::vector<RegexStep> regex_steps(const RegexNode& tree, std::string_view pattern) {
  std::vector<RegexStep> steps;
  RegexWriter writer(pattern, steps);
  writer.write(tree);
  writer.add({.op = RegexStep::Op::kAccept});
  return steps;
}

}  // namespace kt::inline texts
