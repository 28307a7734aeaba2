// Work against the machine's limit, as docs/benchmarks.md defines it: calls that read bytes and multiply, the
// limit measured in windows between them, the figure the median ratio. What the calls compute is their
// owner's business.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "bench/measure.h"

namespace kt::inline bench {

// Bytes the calls of a benchmark rotate over at least, so that no cache holds the next call's.
size_t rotation_bytes();

// How many blocks of `each` bytes hold `wanted` bytes: at least one, at most what nine tenths of the free
// memory take.
size_t blocks_that_fit(size_t wanted, size_t each);
// Error(kMemory) "<what> need 3.0 TiB, 1.2 GiB are available: <advice>" where nine tenths of what is free are
// less. In double: sizes may be any that the flags allow.
void check_available(double bytes, std::string_view what, std::string_view advice);

// All items, claimed one by one by the pool's workers: to fill what the calls rotate over.
void for_each_item(Pool& pool, size_t items, FunctionRef<void(size_t)> work);

// What one call must do at least. Bytes are those that have to come from memory.
struct LimitCall {
  double bytes = 0, operations = 0;
};

struct MeasureFor {
  double seconds = 1;  // longer when windows are discarded, and at least three calls
  int iterations = 0;  // so many calls instead; 0: by time
  int warmup = 1;      // calls before the clock starts; at least one, to grow memory
};

struct LimitBench {
  std::shared_ptr<Pool> pool;  // of the work; limits are measured with the same workers
  const Kernels* kernels = nullptr;
  Product product = Product::kS8;    // by which operations are judged
  Reader* reader = nullptr;          // of the same pool
  std::span<const LimitCall> calls;  // not empty; repeated in this order
  MeasureFor time;
};

struct LimitFigures {
  double seconds = 0, best_seconds = 0;  // of a call: the median window, and the shortest
  double bytes = 0, operations = 0;      // of the median call
  double limit_seconds = 0;              // median
  bool memory_bound = false;
  double read_rate = 0, multiply_rate = 0;  // medians, per second
  Product product = Product::kS8;
  double fraction = 0, best_fraction = 0, p90_fraction = 0;  // p90: nine windows in ten did at least this
  int windows = 0, discarded = 0;
  bool noisy = false;           // too few windows were left undisturbed, so all of them count
  std::vector<size_t> counted;  // the calls of the windows that count, by index
};

// `run` makes the call of that index; the last ones run before the clock starts.
LimitFigures measure_against_limit(const LimitBench& bench, FunctionRef<void(size_t)> run);

// Calls of several kinds that take turns: call i is of kind i % kinds, and there is a whole number of turns. Figures of
// each kind, all of one run and of as many windows; bench.time counts turns where it counts calls.
std::vector<LimitFigures> measure_in_turns(const LimitBench& bench, size_t kinds,
                                           FunctionRef<void(size_t)> run);

}  // namespace kt::inline bench
