#include "cli/moe_bench.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/cpu.h"
#include "base/error.h"
#include "base/text.h"
#include "formats/floats.h"

namespace kt {
namespace {

constexpr int kDistinctExperts = 2;  // packed from random weights; the others are copies
constexpr size_t kLeastWeights = 4'000'000'000;
constexpr int kLeastWindows = 3, kEnoughWindows = 9;
constexpr double kPatience = 3;           // times the asked seconds, while too few windows were undisturbed
constexpr double kToleratedShare = 0.01;  // of a long window that may be lost to the host
constexpr double kBrokenLimit = 1.5;      // times slower than the median limit window
constexpr double kLongestPeakWindow = 20e-3;

// All items, claimed one by one by the pool's workers.
void for_each(Pool& pool, size_t items, FunctionRef<void(size_t)> work) {
  std::atomic<size_t> next{0};
  pool.run([&](const Worker&) {
    for (size_t i = next++; i < items; i = next++) work(i);
  });
}

void shuffle(std::vector<int>& items, RandomBits& random) {
  for (size_t i = items.size(); i > 1; --i)
    std::swap(items[i - 1], items[random.below(static_cast<uint32_t>(i))]);
}

std::vector<int> shuffled(int count, RandomBits& random) {
  std::vector<int> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), 0);
  shuffle(out, random);
  return out;
}

// Cuts a shuffled deck of every layer's experts into hands of top_k, then shuffles the hands of all layers
// together.
std::vector<MoeCall> deal_deck(const ExpertsShape& shape, int top_k, int layers, RandomBits& random) {
  std::vector<MoeCall> hands;
  for (int layer = 0; layer < layers; ++layer) {
    const std::vector<int> deck = shuffled(shape.experts, random);
    for (int at = 0; at + top_k <= shape.experts; at += top_k)
      hands.push_back({layer, top_k, {deck.begin() + at, deck.begin() + at + top_k}});
  }
  for (size_t i = hands.size(); i > 1; --i)
    std::swap(hands[i - 1], hands[random.below(static_cast<uint32_t>(i))]);
  return hands;
}

// An expert of a popularity order: place p is chosen with probability proportional to 1 / (p + 1).
class ZipfDraw {
 public:
  explicit ZipfDraw(int experts) : below_(static_cast<size_t>(experts)) {
    double sum = 0;
    for (size_t i = 0; i < below_.size(); ++i) below_[i] = sum += 1.0 / static_cast<double>(i + 1);
  }
  size_t operator()(RandomBits& random) const {
    const auto at = std::upper_bound(below_.begin(), below_.end(), random.uniform() * below_.back());
    return std::min<size_t>(static_cast<size_t>(at - below_.begin()), below_.size() - 1);
  }

 private:
  std::vector<double> below_;
};

void draw_ids(MoeCall& call, const ExpertsShape& shape, int top_k, int tokens, const ZipfDraw* zipf,
              const std::vector<int>& order, RandomBits& random) {
  std::vector<uint8_t> hit(static_cast<size_t>(shape.experts));
  for (int t = 0; t < tokens; ++t) {
    const size_t first = call.ids.size();
    while (call.ids.size() < first + static_cast<size_t>(top_k)) {
      const size_t place = zipf ? (*zipf)(random) : random.below(static_cast<uint32_t>(shape.experts));
      const int id = order[place];
      if (std::find(call.ids.begin() + static_cast<ptrdiff_t>(first), call.ids.end(), id) != call.ids.end())
        continue;
      call.ids.push_back(id);
      hit[static_cast<size_t>(id)] = 1;
    }
  }
  call.experts_hit = static_cast<int>(std::count(hit.begin(), hit.end(), 1));
}

// The buffers of a call, made once.
struct CallBuffers {
  CallBuffers(const MoeModel& model, int tokens)
      : input(static_cast<size_t>(tokens) * static_cast<size_t>(model.setup().shape.hidden)),
        output(input.size()),
        weights(static_cast<size_t>(tokens) * static_cast<size_t>(model.setup().top_k),
                1.0f / static_cast<float>(model.setup().top_k)) {
    RandomBits random(3);
    for (bf16& x : input) x = to_bf16(static_cast<float>(2 * random.uniform() - 1));
  }
  std::vector<bf16> input, output;
  std::vector<float> weights;
};

void forward(const MoeModel& model, const MoeCall& call, CallBuffers& buffers, int tokens) {
  model.layer(call.layer)
      .forward({.tokens = tokens,
                .top_k = model.setup().top_k,
                .input = buffers.input.data(),
                .input_type = Real::kBf16,
                .ids = call.ids.data(),
                .weights = buffers.weights.data(),
                .output = buffers.output.data(),
                .output_type = Real::kBf16});
}

struct Window {
  double seconds, bytes, operations, experts_hit;
  double rate;  // of the alternating limit window: bytes or operations per second
  bool undisturbed;
};

MoeFigures summary(const std::vector<Window>& all, bool memory_bound,
                   const std::vector<double>& other_rates) {
  // A limit window that a hypervisor took time from shows in no account, and would flatter us.
  std::vector<double> all_rates;
  for (const Window& w : all) all_rates.push_back(w.rate);
  const double least_rate = median(all_rates) / kBrokenLimit;
  std::vector<Window> kept;
  for (const Window& w : all)
    if (w.undisturbed && w.rate >= least_rate) kept.push_back(w);
  MoeFigures out;
  out.windows = static_cast<int>(all.size());
  out.discarded = static_cast<int>(all.size() - kept.size());
  if (static_cast<int>(kept.size()) < kLeastWindows) {
    out.noisy = true;
    kept = all;
  }
  const double other = median(other_rates);
  std::vector<double> seconds, bytes, operations, limits, fractions, rates;
  int bound_by_memory = 0;
  for (const Window& w : kept) {
    const double read = w.bytes / (memory_bound ? w.rate : other),
                 multiply = w.operations / (memory_bound ? other : w.rate);
    const double limit = std::max(read, multiply);
    bound_by_memory += read >= multiply;
    seconds.push_back(w.seconds);
    bytes.push_back(w.bytes);
    operations.push_back(w.operations);
    rates.push_back(w.rate);
    limits.push_back(limit);
    fractions.push_back(limit / w.seconds);
    out.experts_hit += w.experts_hit / static_cast<double>(kept.size());
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

MoeModel::MoeModel(const MoeSetup& setup, const Format& format) : setup_(setup), format_(format) {
  const auto workspace = std::make_shared<Workspace>();
  ExpertsOptions options;
  options.gate_up = options.down = format;
  options.precision = setup.precision;
  options.max_tokens = setup.max_tokens;
  options.kernels = setup.kernels;
  // Pages are taken when written, so what is free is asked before and counted here.
  const uint64_t free = available_memory() / 10 * 9;
  layers_.emplace_back(setup.pool, workspace, setup.shape, options);
  const size_t each = layers_.front().packed_bytes();
  size_t layers = static_cast<size_t>(setup.layers);
  if (layers == 0) {
    const size_t wanted = std::max(kLeastWeights, 10 * cpu().l3);
    layers = std::clamp<size_t>((wanted + each - 1) / each, 1, std::max<size_t>(free / each, 1));
  }
  if (layers * each > free) {
    fail_as(ErrorKind::kMemory,
            "{} layers of {} experts in {} need {}, {} are available: try --layers {} or fewer --experts",
            layers, setup.shape.experts, name_of(format), human_bytes(layers * each), human_bytes(free),
            std::max<size_t>(free / each, 1));
  }
  while (layers_.size() < layers) layers_.emplace_back(setup.pool, workspace, setup.shape, options);
  fill();
}

void MoeModel::fill() {
  const auto [experts, hidden, inter] = setup_.shape;
  const size_t distinct = static_cast<size_t>(std::min(kDistinctExperts, experts));
  std::vector<Matrix> plain(3 * distinct);  // gate, up, down of each
  for_each(*setup_.pool, plain.size(), [&](size_t i) {
    plain[i] =
        i % 3 == 2 ? random_matrix(format_, hidden, inter, i) : random_matrix(format_, inter, hidden, i);
  });
  for_each(*setup_.pool, layers_.size() * distinct, [&](size_t i) {
    const size_t e = i % distinct;
    layers_[i / distinct].load(static_cast<int>(e),
                               {plain[3 * e].view(), plain[3 * e + 1].view(), plain[3 * e + 2].view()});
  });
  const size_t copies = static_cast<size_t>(experts) - distinct;
  for_each(*setup_.pool, layers_.size() * copies, [&](size_t i) {
    const int to = static_cast<int>(distinct + i % copies);
    layers_[i / copies].copy(to % static_cast<int>(distinct), to);
  });
}

double MoeModel::packed_bytes_ratio() const {
  const Experts& one = layers_.front();
  return static_cast<double>(one.packed_bytes()) / (one.stored_bytes_per_expert() * one.shape().experts);
}

std::vector<MoeCall> deal_calls(const ExpertsShape& shape, int top_k, int layers, int tokens,
                                Routing routing) {
  RandomBits random(4);
  if (tokens == 1 && routing == Routing::kUniform) return deal_deck(shape, top_k, layers, random);
  constexpr int kLeastCalls = 32;
  const ZipfDraw zipf(shape.experts);
  std::vector<std::vector<int>> orders;
  for (int layer = 0; layer < layers; ++layer) orders.push_back(shuffled(shape.experts, random));
  const int rounds = (kLeastCalls + layers - 1) / layers;
  std::vector<MoeCall> calls;
  for (int i = 0; i < rounds * layers; ++i) {
    MoeCall call;
    call.layer = i % layers;
    draw_ids(call, shape, top_k, tokens, routing == Routing::kZipf ? &zipf : nullptr,
             orders[static_cast<size_t>(call.layer)], random);
    calls.push_back(std::move(call));
  }
  return calls;
}

MoeFigures measure_moe(const MoeModel& model, Reader& reader, Routing routing, int tokens, double seconds) {
  const MoeSetup& setup = model.setup();
  const auto [experts, hidden, inter] = setup.shape;
  const std::vector<MoeCall> calls = deal_calls(setup.shape, setup.top_k, model.layers(), tokens, routing);
  const double operations = 2.0 * 3 * hidden * inter * tokens * setup.top_k;
  const double stored = model.layer(0).stored_bytes_per_expert();
  const auto bytes_of = [&](const MoeCall& call) { return stored * call.experts_hit; };
  Multiplier multiplier(setup.pool, *setup.kernels, judging_product(*setup.kernels, model.format()));
  HostLoss loss(setup.pool);
  CallBuffers buffers(model, tokens);

  const auto read_rate = [&](double bytes) { return bytes / reader.window(static_cast<size_t>(bytes)); };
  const auto multiply_rate = [&](double rate) {
    return multiplier.window(std::min(operations / rate, kLongestPeakWindow));
  };
  multiplier.window(kLongestPeakWindow);
  const double peak = multiplier.window(kLongestPeakWindow);
  read_rate(bytes_of(calls.front()));
  forward(model, calls.back(), buffers, tokens);  // grows the workspace
  const bool memory_bound = bytes_of(calls.front()) / read_rate(bytes_of(calls.front())) >= operations / peak;
  // The limit that does not bind is looked at now and then; the one that does, before every call.
  const auto other_rate = [&](double bytes) {
    return memory_bound ? multiplier.window(5e-3) : read_rate(bytes);
  };

  std::vector<Window> windows;
  std::vector<double> other_rates{other_rate(bytes_of(calls.front()))};
  const double start = now_seconds();
  int undisturbed = 0;
  double next_look = start + seconds / 2;
  for (size_t i = 0;; i = (i + 1) % calls.size()) {
    const double elapsed = now_seconds() - start;
    const bool enough = undisturbed >= kEnoughWindows || elapsed >= kPatience * seconds;
    if (elapsed >= seconds && enough && static_cast<int>(windows.size()) >= kLeastWindows) break;
    const MoeCall& call = calls[i];
    if (now_seconds() >= next_look) {
      other_rates.push_back(other_rate(bytes_of(call)));
      next_look += seconds / 2;
    }
    loss.since_last();
    const double rate = memory_bound ? read_rate(bytes_of(call)) : multiply_rate(peak);
    const double lost_before = loss.since_last();
    const double took = seconds_of([&] { forward(model, call, buffers, tokens); });
    const double lost = std::max(lost_before, loss.since_last());
    const bool counts = lost <= std::max(kTolerableLoss, kToleratedShare * took);
    undisturbed += counts;
    windows.push_back(
        {took, bytes_of(call), operations, static_cast<double>(call.experts_hit), rate, counts});
  }
  other_rates.push_back(other_rate(bytes_of(calls.front())));
  MoeFigures out = summary(windows, memory_bound, other_rates);
  out.product = multiplier.product();
  const double rows = tokens * setup.top_k / std::max(out.experts_hit, 1.0);
  out.plan = model.layer(0).describe_plan(static_cast<int>(std::lround(rows)));
  return out;
}

}  // namespace kt
