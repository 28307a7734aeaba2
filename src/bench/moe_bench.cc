#include "bench/moe_bench.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/cpu.h"
#include "base/error.h"
#include "base/text.h"
#include "formats/floats.h"

namespace kt::inline bench {
namespace {

constexpr int kDistinctExperts = 2;  // packed from random weights; the others are copies
constexpr size_t kLeastWeights = 4'000'000'000;

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
struct MoeBuffers {
  MoeBuffers(const MoeModel& model, int tokens)
      : input(static_cast<size_t>(tokens) * static_cast<size_t>(model.setup().shape.hidden)),
        output(input.size()),
        weights(static_cast<size_t>(tokens) * static_cast<size_t>(model.setup().top_k),
                1.0f / static_cast<float>(model.setup().top_k)) {
    RandomBits random(3);
    for (bf16& x : input) x = to_bf16(random_activation(random));
  }
  std::vector<bf16> input, output;
  std::vector<float> weights;
};

void forward(const MoeModel& model, const MoeCall& call, MoeBuffers& buffers, int tokens) {
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

}  // namespace

MoeModel::MoeModel(const MoeSetup& setup, const Format& format) : setup_(setup), format_(format) {
  const auto workspace = std::make_shared<Workspace>();
  ExpertsOptions options;
  options.gate = options.up = options.down = format;
  options.precision = setup.precision;
  options.max_tokens = setup.max_tokens;
  options.kernels = setup.kernels;
  // Pages are taken when written, so what is free is asked before and counted here.
  const uint64_t free = available_memory() / 10 * 9;
  const auto [experts, hidden, inter] = setup.shape;
  // Before one is made: what is noted of each expert takes memory too.
  const double expert_bytes = 3.0 * hidden * inter * stored_bits(format, inter, hidden) / 8;
  check_available(
      expert_bytes * experts + 4.0 * setup.max_tokens * (static_cast<double>(hidden) + setup.top_k),
      text("{} experts of [{}, {}] in {} and a call of {} tokens", experts, inter, hidden, name_of(format),
           setup.max_tokens),
      "try fewer `experts` or `tokens`");
  layers_.emplace_back(setup.pool, workspace, setup.shape, options);
  const size_t each = layers_.front().packed_bytes();
  size_t layers = static_cast<size_t>(setup.layers);
  if (layers == 0) {
    const size_t wanted = std::max(kLeastWeights, 10 * cpu().l3);
    layers = std::clamp<size_t>((wanted + each - 1) / each, 1, std::max<size_t>(free / each, 1));
  }
  if (layers * each > free) {
    fail_as(ErrorKind::kMemory,
            "{} layers of {} experts in {} need {}, {} are available: try `layers` {} or fewer `experts`",
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
  for_each_item(*setup_.pool, plain.size(), [&](size_t i) {
    plain[i] =
        i % 3 == 2 ? random_matrix(format_, hidden, inter, i) : random_matrix(format_, inter, hidden, i);
  });
  for_each_item(*setup_.pool, layers_.size() * distinct, [&](size_t i) {
    const size_t e = i % distinct;
    layers_[i / distinct].load(static_cast<int>(e),
                               {plain[3 * e].view(), plain[3 * e + 1].view(), plain[3 * e + 2].view()});
  });
  const size_t copies = static_cast<size_t>(experts) - distinct;
  for_each_item(*setup_.pool, layers_.size() * copies, [&](size_t i) {
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

MoeFigures measure_moe(const MoeModel& model, Reader& reader, Routing routing, int tokens,
                       const MeasureFor& time) {
  const MoeSetup& setup = model.setup();
  const auto [experts, hidden, inter] = setup.shape;
  const std::vector<MoeCall> calls = deal_calls(setup.shape, setup.top_k, model.layers(), tokens, routing);
  const double operations = 2.0 * 3 * hidden * inter * tokens * setup.top_k;
  const double stored = model.layer(0).stored_bytes_per_expert();
  std::vector<LimitCall> limits;
  for (const MoeCall& call : calls) limits.push_back({stored * call.experts_hit, operations});
  MoeBuffers buffers(model, tokens);

  MoeFigures out{measure_against_limit({.pool = setup.pool,
                                        .kernels = setup.kernels,
                                        .product = judging_product(*setup.kernels, model.format()),
                                        .reader = &reader,
                                        .calls = limits,
                                        .time = time},
                                       [&](size_t i) { forward(model, calls[i], buffers, tokens); })};
  for (const size_t i : out.counted)
    out.experts_hit += static_cast<double>(calls[i].experts_hit) / static_cast<double>(out.counted.size());
  const double rows = tokens * setup.top_k / std::max(out.experts_hit, 1.0);
  out.plan = model.layer(0).describe_plan(static_cast<int>(std::lround(rows)));
  return out;
}

}  // namespace kt::inline bench
