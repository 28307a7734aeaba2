// What workers will read first in the next operation of a step, so that they fetch it while they wait: for the slowest
// of them, and for work on single rows between operations. Steps are alike: what followed an operation in the last one
// follows it in this one. What experts read is known when they are chosen: the forecast is what linears behind them
// read, which the caches keep meanwhile. A wrong forecast costs some reading and changes no result.
#pragma once
#include <vector>

#include "nn/attention.h"
#include "nn/linear.h"

namespace kt::inline nn {

class StepForecast final : public Forecast {
 public:
  StepForecast(const Pool& pool, const LinearWork& linears, const AttentionWork& attention);

  // A step of these sequences, which outlive it.
  void begin(const KvCache* cache, std::span<const AttentionSequence> sequences);
  // The next operation, known by what it reads and how many rows, is about to run: forecasts are of the one behind it.
  const Forecast* enter(const void* reads, int rows, int plane = -1);
  // It ran; of attention, or of linears.
  void attended() { attended_ = true; }
  void multiplied();

  Ahead ahead(const Worker& worker) const noexcept override;

 private:
  struct Operation {
    const void* reads = nullptr;  // with `rows`, what it is
    int rows = 0;
    int plane = -1;             // of attention
    std::vector<Ahead> firsts;  // [workers] of linears, once they ran
  };
  const LinearWork& linears_;
  const AttentionWork& attention_;
  std::vector<Worker> workers_;
  std::vector<Operation> operations_;  // of the longest step so far, in order
  size_t next_ = 0;                    // behind the one that was entered last
  const Operation* known_next() const noexcept;
  const KvCache* cache_ = nullptr;
  std::span<const AttentionSequence> sequences_;
  bool attended_ = false;  // in this step: where attention begins is known
};

}  // namespace kt::inline nn
