// How fast this machine can read and multiply, and the windows in which that is compared with work. All times
// are seconds of the steady clock; a window is one Pool::run from the caller's point of view.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/function_ref.h"
#include "base/memory.h"
#include "base/pool.h"
#include "kernels/table.h"
#include "nn/work.h"

namespace kt::inline bench {

double now_seconds();
double seconds_of(FunctionRef<void()> work);

// The value below which `share` of the values lie, between neighbours; 0 for none. median: share 0.5.
double quantile(std::vector<double> values, double share);
double median(std::vector<double> values);

// Bytes a bandwidth is measured over: far more than the last-level cache, at most a quarter of the free
// memory.
size_t read_buffer_bytes();

// Streams memory with every worker of a pool at once, each its own part of one block on its node.
class Reader {
 public:
  Reader(std::shared_ptr<Pool> pool, const Kernels& kernels, size_t bytes,
         HugePages huge = HugePages::kAdvise);

  // Seconds to read `bytes` in all, going on where the last window ended; more than size() reads some twice.
  double window(size_t bytes);
  size_t size() const { return part_ * static_cast<size_t>(pool_->threads()); }

 private:
  std::shared_ptr<Pool> pool_;
  const Kernels& kernels_;
  size_t part_ = 0;             // bytes of each worker
  std::vector<Buffer> nodes_;   // the parts of each node's workers
  std::vector<uint64_t> sums_;  // keeps the loads alive
  size_t at_ = 0;               // where the next window starts in each part
};

enum class Product { kS8, kBf16, kF32 };
const char* product_name(Product product);

// Multiplies with every worker at once, operands in L1.
class Multiplier {
 public:
  // Error(kUnsupported) if the ISA has no such product.
  Multiplier(std::shared_ptr<Pool> pool, const Kernels& kernels, Product product);

  // Operations per second over a window of about that length.
  double window(double seconds);
  Product product() const { return product_; }

 private:
  double run(int64_t rounds, double& operations);

  std::shared_ptr<Pool> pool_;
  double (*loop_)(int64_t, void*) noexcept = nullptr;
  Product product_;
  std::vector<Buffer> operands_;  // one per worker
  double rounds_per_second_ = 0;
};

// The product by which work in this format is judged: s8 for integer codes, bf16 for the others, f32 where
// the ISA has no bf16 product.
Product judging_product(const Kernels& kernels, const Format& format);
bool has_product(const Kernels& kernels, Product product);

// Time that a pool's workers spent runnable but not running, from the kernel's own account of each thread:
// what other processes took from us. A hypervisor's thefts do not show here.
class HostLoss {
 public:
  explicit HostLoss(std::shared_ptr<Pool> pool);
  ~HostLoss();
  HostLoss(const HostLoss&) = delete;
  HostLoss& operator=(const HostLoss&) = delete;

  bool known() const { return known_; }
  // The most seconds any worker lost since the last call (or construction). Costs one Pool::run.
  double since_last();

 private:
  struct alignas(64) Account {
    int file = -1;
    uint64_t waited = 0;  // nanoseconds
    uint64_t lost = 0;
  };
  std::shared_ptr<Pool> pool_;
  std::vector<Account> accounts_;  // one per worker
  bool known_ = true;
};
inline constexpr double kTolerableLoss =
    0.2e-3;  // seconds; a window in which a worker lost more does not count

struct Peak {
  double best = 0, median = 0;
};
struct Roofline {
  Peak read;              // bytes per second
  Peak s8, bf16, f32;     // operations per second; zero: no such product
  size_t read_bytes = 0;  // of the buffer
};
// A second or so of windows. `best` is the machine on its best behaviour, `median` what was there most of the
// time.
Roofline measure_roofline(const std::shared_ptr<Pool>& pool, const Kernels& kernels);
// The same in a few tenths of a second, over a smaller buffer, without the products no format is judged by:
// for a line beside other figures.
Roofline measure_quickly(const std::shared_ptr<Pool>& pool, const Kernels& kernels);
// Medians, by the products that judge integer and float codes.
Rates rates_of(const Roofline& roofline);

}  // namespace kt::inline bench
