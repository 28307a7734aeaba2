// Where the time of steps goes, operation by operation, as the caller of an Ops sees it: waiting for workers is
// part of it.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "nn/work.h"

namespace kt::inline nn {

// The CPU waiting for a GPU.
inline constexpr std::string_view kWaitingPart = "waiting for the GPU";

struct StepPart {
  std::string name;  // "experts", "q_proj k_proj v_proj"
  uint64_t calls = 0;
  double seconds = 0;
  Amount amount = {};  // what it must at least read and multiply
};

class StepParts {
 public:
  // Of a name, new or known.
  size_t index(std::string_view name);
  const std::vector<StepPart>& all() const { return parts_; }
  // What an operation takes is counted with the part that runs.
  void count(const Amount& amount) {
    if (running_) parts_[at_].amount += amount;
  }

  // One operation, to the end of the scope. Inside another it is that one's; of no parts it is nobody's.
  class Scope {
   public:
    Scope(StepParts* parts, size_t index);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    StepParts* parts_;  // null inside another
    std::chrono::steady_clock::time_point start_;
  };

 private:
  std::vector<StepPart> parts_;
  size_t at_ = 0;  // while running_
  bool running_ = false;
};

// What happened since `before`, which is of the same parts, some perhaps not seen yet.
std::vector<StepPart> parts_since(const std::vector<StepPart>& before, std::vector<StepPart> now);

}  // namespace kt::inline nn
