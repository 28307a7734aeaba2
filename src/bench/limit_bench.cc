#include "bench/limit_bench.h"

#include <algorithm>
#include <atomic>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/error.h"

namespace kt::inline bench {
namespace {

constexpr size_t kLeastRotation = 1'000'000'000;
constexpr size_t kLeastWindows = 3;
constexpr int kEnoughWindows = 9;
constexpr double kPatience = 3;           // times the asked seconds, while too few windows were undisturbed
constexpr double kToleratedShare = 0.01;  // of a long window that may be lost to the host
constexpr double kBrokenLimit = 1.5;      // times slower than the median limit window
constexpr double kLongestPeakWindow = 20e-3;

struct Window {
  size_t call;
  double seconds;
  double rate;  // of the alternating limit window: bytes or operations per second
  bool undisturbed;
};

// The two limits of one benchmark, and which of them binds.
class Limits {
 public:
  explicit Limits(const LimitBench& bench)
      : reader_(*bench.reader), multiplier_(bench.pool, *bench.kernels, bench.product) {
    const LimitCall& first = bench.calls.front();
    multiplier_.window(kLongestPeakWindow);
    peak_ = multiplier_.window(kLongestPeakWindow);
    read_rate(first);
    memory_bound_ = first.bytes / read_rate(first) >= first.operations / peak_;
  }

  bool memory_bound() const { return memory_bound_; }
  // Of the limit that binds, in a window of about the call's length.
  double binding_rate(const LimitCall& call) {
    if (memory_bound_) return read_rate(call);
    return multiplier_.window(std::min(call.operations / peak_, kLongestPeakWindow));
  }
  double other_rate(const LimitCall& call) {
    return memory_bound_ ? multiplier_.window(5e-3) : read_rate(call);
  }

 private:
  double read_rate(const LimitCall& call) {
    return call.bytes / reader_.window(static_cast<size_t>(call.bytes));
  }

  Reader& reader_;
  Multiplier multiplier_;
  double peak_ = 0;
  bool memory_bound_ = false;
};

// The windows that count: undisturbed, and beside a limit window that a hypervisor took no time from. That
// shows in no account, and would flatter us.
std::vector<Window> kept_windows(const std::vector<Window>& all) {
  std::vector<double> rates;
  for (const Window& w : all) rates.push_back(w.rate);
  const double least_rate = median(rates) / kBrokenLimit;
  std::vector<Window> kept;
  for (const Window& w : all)
    if (w.undisturbed && w.rate >= least_rate) kept.push_back(w);
  return kept;
}

LimitFigures summary(const LimitBench& bench, const std::vector<Window>& all, bool memory_bound,
                     const std::vector<double>& other_rates) {
  std::vector<Window> kept = kept_windows(all);
  LimitFigures out;
  out.product = bench.product;
  out.windows = static_cast<int>(all.size());
  out.discarded = static_cast<int>(all.size() - kept.size());
  if (kept.size() < kLeastWindows) {
    out.noisy = true;
    kept = all;
  }
  const double other = median(other_rates);
  std::vector<double> seconds, bytes, operations, limits, fractions, rates;
  int bound_by_memory = 0;
  for (const Window& w : kept) {
    const LimitCall& call = bench.calls[w.call];
    const double read = call.bytes / (memory_bound ? w.rate : other),
                 multiply = call.operations / (memory_bound ? other : w.rate);
    const double limit = std::max(read, multiply);
    bound_by_memory += read >= multiply;
    seconds.push_back(w.seconds);
    bytes.push_back(call.bytes);
    operations.push_back(call.operations);
    rates.push_back(w.rate);
    limits.push_back(limit);
    fractions.push_back(limit / w.seconds);
    out.counted.push_back(w.call);
  }
  out.seconds = median(seconds);
  out.best_seconds = quantile(seconds, 0);
  out.bytes = median(bytes);
  out.operations = median(operations);
  out.limit_seconds = median(limits);
  out.memory_bound = 2 * bound_by_memory >= static_cast<int>(kept.size());
  out.fraction = median(fractions);
  out.best_fraction = quantile(fractions, 1);
  out.p90_fraction = quantile(fractions, 0.1);
  out.read_rate = memory_bound ? median(rates) : other;
  out.multiply_rate = memory_bound ? other : median(rates);
  return out;
}

}  // namespace

size_t rotation_bytes() { return std::max(kLeastRotation, 2 * cpu().l3); }

void check_available(double bytes, std::string_view what, std::string_view advice) {
  const uint64_t free = available_memory() / 10 * 9;
  if (bytes <= static_cast<double>(free)) return;
  constexpr double kMostShown = 1e19;  // below 2^64
  fail_as(ErrorKind::kMemory, "{} need {}, {} are available: {}", what,
          human_bytes(static_cast<uint64_t>(std::min(bytes, kMostShown))), human_bytes(free), advice);
}

size_t blocks_that_fit(size_t wanted, size_t each) {
  const uint64_t free = available_memory() / 10 * 9;
  return std::clamp<size_t>(ceil_div(wanted, each), 1, std::max<size_t>(free / each, 1));
}

void for_each_item(Pool& pool, size_t items, FunctionRef<void(size_t)> work) {
  std::atomic<size_t> next{0};
  pool.run([&](const Worker&) {
    for (size_t i = next++; i < items; i = next++) work(i);
  });
}

LimitFigures measure_against_limit(const LimitBench& bench, FunctionRef<void(size_t)> run) {
  return measure_in_turns(bench, 1, run).front();
}

std::vector<LimitFigures> measure_in_turns(const LimitBench& bench, size_t kinds,
                                           FunctionRef<void(size_t)> run) {
  const size_t count = bench.calls.size();
  KT_CHECK(count && count % kinds == 0 && bench.reader && bench.kernels, "{} calls of {} kinds", count,
           kinds);
  Limits limits(bench);
  HostLoss loss(bench.pool);
  const size_t warmup = static_cast<size_t>(std::max(bench.time.warmup, 1)) * kinds;
  for (size_t i = warmup; i > 0; --i) run((count - 1) - (i - 1) % count);

  std::vector<std::vector<Window>> windows(kinds);
  // The limit that does not bind is looked at now and then; the one that does, before every call.
  std::vector<double> other_rates{limits.other_rate(bench.calls.front())};
  const double start = now_seconds(), seconds = bench.time.seconds;
  const auto wanted = static_cast<size_t>(bench.time.iterations);
  std::vector<int> undisturbed(kinds, 0);
  double next_look = start + seconds / 2;
  for (size_t i = 0;; i = (i + 1) % count) {
    if (i % kinds == 0) {
      const size_t turns = windows.back().size();
      const double elapsed = now_seconds() - start;
      const bool enough = std::ranges::min(undisturbed) >= kEnoughWindows || elapsed >= kPatience * seconds;
      const bool by_time = elapsed >= seconds && enough && turns >= kLeastWindows;
      if (wanted > 0 ? turns >= wanted : by_time) break;
    }
    const LimitCall& call = bench.calls[i];
    if (now_seconds() >= next_look) {
      other_rates.push_back(limits.other_rate(call));
      next_look += seconds / 2;
    }
    loss.since_last();
    const double rate = limits.binding_rate(call);
    const double lost_before = loss.since_last();
    const double took = seconds_of([&] { run(i); });
    const double lost = std::max(lost_before, loss.since_last());
    const bool counts = lost <= std::max(kTolerableLoss, kToleratedShare * took);
    undisturbed[i % kinds] += counts;
    windows[i % kinds].push_back({i, took, rate, counts});
  }
  other_rates.push_back(limits.other_rate(bench.calls.front()));
  std::vector<LimitFigures> out;
  for (const std::vector<Window>& kind : windows)
    out.push_back(summary(bench, kind, limits.memory_bound(), other_rates));
  return out;
}

}  // namespace kt::inline bench
