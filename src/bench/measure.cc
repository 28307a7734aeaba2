#include "bench/measure.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/error.h"

namespace kt::inline bench {
namespace {

constexpr size_t kOperandBytes = 64 * 1024;
// As bytes 63, as bf16 and f32 about 0.75: neither denormal nor zero in any product.
constexpr int kOperandByte = 0x3F;
constexpr double kPeakWindow = 20e-3;

Peak peak_of(FunctionRef<double()> window, int windows) {
  window();  // wakes the workers, the pages and the clock
  std::vector<double> rates;
  for (int i = 0; i < windows; ++i) rates.push_back(window());
  return {quantile(rates, 1.0), median(rates)};
}

}  // namespace

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double seconds_of(FunctionRef<void()> work) {
  const double start = now_seconds();
  work();
  return now_seconds() - start;
}

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = share * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

size_t read_buffer_bytes() {
  const size_t wanted = std::max<size_t>(size_t{1} << 30, 8 * cpu().l3);
  return std::min<size_t>(wanted, available_memory() / 4);
}

Reader::Reader(std::shared_ptr<Pool> pool, const Kernels& kernels, size_t bytes, HugePages huge)
    : pool_(std::move(pool)), kernels_(kernels), sums_(static_cast<size_t>(pool_->threads()) * 8) {
  constexpr size_t kPage = 2 << 20;
  part_ = round_up(ceil_div(bytes, static_cast<size_t>(pool_->threads())), kPage);
  for (int node = 0; node < pool_->nodes(); ++node)
    nodes_.emplace_back(part_ * static_cast<size_t>(pool_->threads(node)),
                        BufferOptions{pool_->memory_node(node), huge});
  pool_->run([&](const Worker& w) {  // each touches its own pages first
    std::memset(nodes_[static_cast<size_t>(w.node)].data() + static_cast<size_t>(w.rank) * part_, 1, part_);
  });
}

// Workers claim pieces in order, as the layer's workers do: with equal shares fixed beforehand, one core that
// the host slows down would lower the limit for all.
double Reader::window(size_t bytes) {
  constexpr size_t kPiece = 128 << 10;
  const size_t each = ceil_div(bytes, static_cast<size_t>(pool_->threads()));  // of a worker's fair share
  std::vector<std::atomic<size_t>> next(nodes_.size());
  const double seconds = seconds_of([&] {
    pool_->run([&](const Worker& w) {
      const auto node = static_cast<size_t>(w.node);
      const size_t share = each * static_cast<size_t>(w.ranks), all = nodes_[node].size();
      uint64_t sum = 0;
      for (;;) {
        const size_t from = next[node].fetch_add(kPiece, std::memory_order_relaxed);
        if (from >= share) break;
        const size_t at = (at_ * static_cast<size_t>(w.ranks) + from) % all / kPiece * kPiece;
        sum ^= kernels_.read(nodes_[node].data() + at, std::min(kPiece, share - from));
      }
      sums_[static_cast<size_t>(w.index) * 8] += sum;
    });
  });
  at_ = (at_ + round_up(each, kPiece)) % part_;
  return seconds;
}

const char* product_name(Product product) {
  return product == Product::kS8 ? "s8" : product == Product::kBf16 ? "bf16" : "f32";
}

bool has_product(const Kernels& kernels, Product product) {
  return product == Product::kS8     ? kernels.peak_s8
         : product == Product::kBf16 ? kernels.peak_bf16
                                     : kernels.peak_f32;
}

Product judging_product(const Kernels& kernels, const Format& format) {
  if (is_integer(format.code)) return Product::kS8;
  return has_product(kernels, Product::kBf16) ? Product::kBf16 : Product::kF32;
}

Multiplier::Multiplier(std::shared_ptr<Pool> pool, const Kernels& kernels, Product product)
    : pool_(std::move(pool)), product_(product) {
  if (!has_product(kernels, product))
    fail_as(ErrorKind::kUnsupported, "ISA '{}' has no {} product", kernels.name, product_name(product));
  loop_ = product == Product::kS8     ? kernels.peak_s8
          : product == Product::kBf16 ? kernels.peak_bf16
                                      : kernels.peak_f32;
  for (int i = 0; i < pool_->threads(); ++i) operands_.emplace_back(kOperandBytes);
  double operations = 0;
  int64_t rounds = 1000;
  for (double seconds = 0; seconds < 2e-3; rounds *= 2) {
    seconds = run(rounds, operations);
    rounds_per_second_ = static_cast<double>(rounds) / seconds;
  }
}

double Multiplier::run(int64_t rounds, double& operations) {
  std::vector<double> done(operands_.size() * 8);
  // The loops leave their sums in the operands, which would be denormals or infinities the next time.
  for (Buffer& b : operands_) std::memset(b.data(), kOperandByte, b.size());
  const double seconds = seconds_of([&] {
    pool_->run([&](const Worker& w) {
      done[static_cast<size_t>(w.index) * 8] = loop_(rounds, operands_[static_cast<size_t>(w.index)].data());
    });
  });
  operations = 0;
  for (double d : done) operations += d;
  return seconds;
}

double Multiplier::window(double seconds) {
  double operations = 0;
  const int64_t rounds = std::max<int64_t>(1, std::llround(seconds * rounds_per_second_));
  const double took = run(rounds, operations);
  // What the constructor saw may have been a moment in which somebody else had the cores: windows would stay so short
  // that waking the workers is most of them.
  rounds_per_second_ = std::max(rounds_per_second_, static_cast<double>(rounds) / took);
  return operations / took;
}

HostLoss::HostLoss(std::shared_ptr<Pool> pool)
    : pool_(std::move(pool)), accounts_(static_cast<size_t>(pool_->threads())) {
  pool_->run([&](const Worker& w) {
    accounts_[static_cast<size_t>(w.index)].file =
        ::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  });
  for (const Account& a : accounts_) known_ = known_ && a.file >= 0;
  since_last();
}

HostLoss::~HostLoss() {
  for (const Account& a : accounts_)
    if (a.file >= 0) ::close(a.file);
}

double HostLoss::since_last() {
  if (!known_) return 0;
  pool_->run([&](const Worker& w) {
    Account& a = accounts_[static_cast<size_t>(w.index)];
    char line[96] = {};  // "<ns running> <ns waiting to run> <timeslices>"
    if (::pread(a.file, line, sizeof line - 1, 0) <= 0) return;
    const char* second = std::strchr(line, ' ');
    const uint64_t waited = second ? std::strtoull(second, nullptr, 10) : a.waited;
    a.lost = waited - a.waited;
    a.waited = waited;
  });
  uint64_t most = 0;
  for (const Account& a : accounts_) most = std::max(most, a.lost);
  return static_cast<double>(most) * 1e-9;
}

namespace {

struct Effort {
  size_t read_bytes, window_bytes;
  int read_windows, multiply_windows;
  double multiply_seconds;
  std::vector<Product> products;
};

Roofline measure(const std::shared_ptr<Pool>& pool, const Kernels& kernels, const Effort& effort) {
  Roofline out;
  {
    Reader reader(pool, kernels, effort.read_bytes);
    out.read_bytes = reader.size();
    const size_t bytes = std::min(reader.size(), effort.window_bytes);
    out.read =
        peak_of([&] { return static_cast<double>(bytes) / reader.window(bytes); }, effort.read_windows);
  }
  for (const Product product : effort.products) {
    if (!has_product(kernels, product)) continue;
    Multiplier multiplier(pool, kernels, product);
    (product == Product::kS8     ? out.s8
     : product == Product::kBf16 ? out.bf16
                                 : out.f32) =
        peak_of([&] { return multiplier.window(effort.multiply_seconds); }, effort.multiply_windows);
  }
  return out;
}

}  // namespace

Roofline measure_roofline(const std::shared_ptr<Pool>& pool, const Kernels& kernels) {
  return measure(pool, kernels,
                 {.read_bytes = read_buffer_bytes(),
                  .window_bytes = size_t{256} << 20,
                  .read_windows = 15,
                  .multiply_windows = 11,
                  .multiply_seconds = kPeakWindow,
                  .products = {Product::kS8, Product::kBf16, Product::kF32}});
}

Roofline measure_quickly(const std::shared_ptr<Pool>& pool, const Kernels& kernels) {
  const size_t wanted = std::max<size_t>(size_t{256} << 20, 4 * cpu().l3);
  const bool bf16 = has_product(kernels, Product::kBf16);
  return measure(pool, kernels,
                 {.read_bytes = std::min(wanted, read_buffer_bytes()),
                  .window_bytes = size_t{128} << 20,
                  .read_windows = 7,
                  .multiply_windows = 5,
                  .multiply_seconds = kPeakWindow / 2,
                  .products = {Product::kS8, bf16 ? Product::kBf16 : Product::kF32}});
}

Rates rates_of(const Roofline& r) {
  return {.read_bytes = r.read.median,
          .integer_operations = r.s8.median,
          .float_operations = r.bf16.best > 0 ? r.bf16.median : r.f32.median};
}

}  // namespace kt::inline bench
