#include "bench/gpu_bench.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/text.h"
#include "bench/random_matrix.h"
#include "cuda/kernels/args.h"
#include "nn/gpu_ops.h"

namespace kt::inline bench {
namespace {

constexpr int kPeakThreads = 256, kPeakBlocks = 2;  // of a multiprocessor
constexpr double kReplayedSeconds = 4e-3;           // at least, if launched one by one
constexpr int kAnswerTokens = 64;                   // more are a prompt's

// The median of repeated calls; at least three.
double median_seconds(const MeasureFor& time, FunctionRef<void()> call) {
  call();
  std::vector<double> all;
  const double end = now_seconds() + time.seconds;
  while (all.size() < 3 || now_seconds() < end) all.push_back(seconds_of(call));
  return median(std::move(all));
}

}  // namespace

GpuBench::GpuBench(int number, std::shared_ptr<Pool> pool, size_t bytes, const MeasureFor& time)
    : gpu_(std::make_shared<Gpu>(number)),
      pool_(std::move(pool)),
      stream_(std::make_unique<GpuStream>(gpu_)),
      bytes_(bytes),
      time_(time) {
  const DeviceBuffer from(gpu_, bytes, "memory to copy"), to(gpu_, bytes, "memory to copy");
  const PinnedBuffer host = pinned_for(*gpu_, bytes);
  const double size = static_cast<double>(bytes);
  limits_.to_gpu = size / seconds_of_copy(from.at(), host.data());
  limits_.copied = 2 * size / seconds_of_copy(to.at(), from.at());
  limits_.to_host = size / seconds_of_copy(host.data(), to.at());
  limits_.operations = matrix_peak();
}

double GpuBench::seconds_of_copy(void* to, const void* from) const {
  return median_seconds(time_, [&] {
    stream_->copy(to, from, bytes_);
    stream_->wait();
  });
}

double GpuBench::matrix_peak() const {
  constexpr double kChains = 8, kInstruction = 2.0 * 16 * 8 * 16;
  const int64_t blocks = int64_t{gpu_->facts().multiprocessors} * kPeakBlocks;
  const DeviceBuffer out(gpu_, static_cast<size_t>(blocks * kPeakThreads) * sizeof(float), "sums");
  MatrixPeakArgs args{.out = out.as<float>(), .rounds = 1};
  const auto run = [&] {
    stream_->launch("kt_matrix_peak", blocks, 1, kPeakThreads, args);
    stream_->wait();
  };
  // Long enough that waiting does not count.
  run();
  while (args.rounds < (1 << 16) && seconds_of(run) < std::min(2e-3, time_.seconds)) args.rounds *= 2;
  const double seconds = median_seconds(time_, run);
  const auto warps = blocks * kPeakThreads / 32;
  return static_cast<double>(warps) * args.rounds * kChains * kInstruction / seconds;
}

// So many of them that what a call reads is not in a cache.
size_t GpuBench::copies_of(double bytes) const {
  return std::clamp<size_t>(static_cast<size_t>(static_cast<double>(bytes_) / 4 / bytes) + 1, 2, 64);
}

GpuFigure GpuBench::against_limit(Ops& ops, const StepRows& step, size_t calls,
                                  FunctionRef<void(size_t)> call) const {
  size_t loops = 1;
  const auto once_around = [&](const StepRows& rows) {
    const StepScope scope(ops, rows);
    ops.repeat([&] {
      for (size_t i = 0; i < loops * calls; ++i) call(i % calls);
    });
  };
  // Steps of answers are replayed as graphs, and so are these; so many launches that a step's beginning and end do not
  // count.
  if (step.alike) {
    StepRows launched = step;
    launched.alike = false;
    once_around(launched);
    const double seconds = seconds_of([&] { once_around(launched); });
    loops =
        std::clamp<size_t>(static_cast<size_t>(std::min(kReplayedSeconds, time_.seconds) / seconds), 1, 256);
  }
  const auto round = [&] { once_around(step); };
  round();  // what kernels there are is found out
  Work before = ops.work();
  round();
  Work once = ops.work();
  once -= before;
  const Amount amount = once.at(ops.place());
  const auto each = static_cast<double>(loops * calls);
  GpuFigure out{.seconds = median_seconds(time_, round) / each,
                .bytes = amount.bytes / each,
                .operations = (amount.integer_operations + amount.float_operations) / each};
  const double memory = out.bytes / limits_.copied, units = out.operations / limits_.operations;
  out.limit_seconds = std::max(memory, units);
  out.by_memory = memory >= units;
  return out;
}

GpuFigure GpuBench::product(const Format& format, int n, int k, int tokens) const {
  const auto ops = make_gpu_ops(pool_, {.number = gpu_->facts().number, .gpu = gpu_});
  const Matrix plain = random_matrix(format, n, k, 1);
  std::vector<std::unique_ptr<PlacedLinear>> linears;
  linears.push_back(ops->make_linear(plain.view(), Precision::kDefault, "linear"));
  while (linears.size() < copies_of(linears.front()->stored_bytes()))
    linears.push_back(ops->make_linear(plain.view(), Precision::kDefault, "linear"));
  const Rows x = ops->rows("x", k), y = ops->rows("y", n);
  ops->allocate(tokens);
  // Tokens of as many sequences, which nothing attends to.
  SequenceShape planes;
  planes.planes.push_back({.heads = 1, .d = 16, .dv = 16, .type = KvType::kBf16});
  const auto cache = ops->make_cache(planes, 1, 0);
  const int32_t page = 0;
  std::vector<AttentionSequence> sequences;
  for (int i = 0; i < tokens; ++i)
    sequences.push_back({.first = i, .count = 1, .position = 0, .pages = &page});
  const StepRows step{
      .sequences = sequences, .tokens = tokens, .cache = cache.get(), .alike = tokens <= kAnswerTokens};
  {
    const StepScope scope(*ops, step);
    std::vector<float> values(static_cast<size_t>(tokens) * static_cast<size_t>(k));
    RandomBits random(3);
    for (float& value : values) value = random_activation(random);
    ops->write(values, x);
  }
  return against_limit(*ops, step, linears.size(), [&](size_t i) {
    const LinearUse use{.weights = linears[i].get(), .x = x, .y = y};
    ops->linear({&use, 1});
  });
}

GpuFigure GpuBench::attention(const KvShape& shape, int heads, int context) const {
  const auto ops = make_gpu_ops(pool_, {.number = gpu_->facts().number, .gpu = gpu_});
  const int pages = (context + kPageTokens - 1) / kPageTokens;
  SequenceShape planes;
  planes.planes.assign(copies_of(static_cast<double>(shape.page_bytes()) * pages), shape);
  const auto cache = ops->make_cache(planes, pages, 0);
  const Rows q = ops->rows("q", int64_t{heads} * shape.d), out = ops->rows("out", int64_t{heads} * shape.dv);
  ops->allocate(1);
  std::vector<int32_t> table(static_cast<size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  const AttentionSequence sequence{.first = 0, .count = 1, .position = context - 1, .pages = table.data()};
  const StepRows step{.sequences = {&sequence, 1}, .tokens = 1, .cache = cache.get(), .alike = true};
  return against_limit(*ops, step, planes.planes.size(), [&](size_t i) {
    ops->attend({.plane = static_cast<int>(i), .q = q, .out = out, .heads = heads, .scale = 0.1f});
  });
}

}  // namespace kt::inline bench
