#include "bench/gptq_bench.h"

#include "base/error.h"
#include "base/text.h"
#include "bench/random_matrix.h"

namespace kt::inline bench {
namespace {

constexpr size_t kReadBuffer = size_t{64} << 20;

// bf16 of either sign, from 1 to 2.
uint16_t random_half(RandomBits& random) { return static_cast<uint16_t>(0x3F80 + (random.next() & 0x807F)); }

}  // namespace

struct GptqBench::Expert {
  Expert(const GptqSetup& setup, uint64_t seed)
      : options(CalibrationDefaults().gptq), inputs(setup.shape.hidden), middles(setup.shape.inter) {
    options.packed_rule = true;
    RandomBits random(seed);
    const auto rows = static_cast<size_t>(setup.rows), hidden = static_cast<size_t>(setup.shape.hidden),
               inter = static_cast<size_t>(setup.shape.inter);
    x.resize(rows * hidden);
    for (uint16_t& value : x) value = random_half(random);
    mid.resize(rows * inter);
    for (float& value : mid) value = static_cast<float>(random.uniform() - 0.5);
    weights.resize(rows);
    for (float& value : weights) value = static_cast<float>(random.uniform());
    values.resize(hidden * inter);
    for (float& value : values) value = static_cast<float>(random.uniform() - 0.5) * 0.1f;
  }
  void add_inputs() {
    inputs.add({.x = x.data(), .type = Real::kBf16, .rows = static_cast<int64_t>(weights.size())}, &scratch);
  }
  void add_middles() {
    middles.add({.x = mid.data(),
                 .type = Real::kF32,
                 .rows = static_cast<int64_t>(weights.size()),
                 .weight = weights.data()},
                &scratch);
  }

  GptqOptions options;
  Hessian inputs, middles;
  std::unique_ptr<GptqFactor> of_inputs, of_middles;
  std::vector<uint16_t> x;          // [rows, hidden] bf16
  std::vector<float> mid, weights;  // [rows, inter], [rows]
  std::vector<float> values;        // [inter, hidden], or the other way round
  Buffer scratch;
};

GptqBench::GptqBench(const GptqSetup& setup) : setup_(setup) {
  const auto h = static_cast<uint64_t>(setup.shape.hidden), i = static_cast<uint64_t>(setup.shape.inter);
  const uint64_t each = static_cast<uint64_t>(setup.rows) * (h * 2 + i * 4) + 16 * (h * h + i * i) +
                        h * i * 8 + (uint64_t{64} << 20);
  const uint64_t needed = each * static_cast<uint64_t>(setup.pool->threads()), there = available_memory();
  if (needed > there)
    fail_as(ErrorKind::kMemory, "{} experts at once need {}, {} are available: fewer `threads` or `rows`",
            setup.pool->threads(), human_bytes(needed), human_bytes(there));
  experts_.resize(static_cast<size_t>(setup.pool->threads()));
  setup_.pool->run([&](const Worker& worker) {
    experts_[static_cast<size_t>(worker.index)] =
        std::make_unique<Expert>(setup_, static_cast<uint64_t>(worker.index) + 1);
  });
  reader_ = std::make_unique<Reader>(setup_.pool, *setup_.kernels, kReadBuffer);
}

GptqBench::~GptqBench() = default;

GptqPart GptqBench::measure(GptqPart part, Product product, LimitCall call, FunctionRef<void(Expert&)> work) {
  call.bytes *= setup_.pool->threads();
  call.operations *= setup_.pool->threads();
  const LimitBench bench{.pool = setup_.pool,
                         .kernels = setup_.kernels,
                         .product = product,
                         .reader = reader_.get(),
                         .calls = {&call, 1},
                         .time = {.seconds = setup_.seconds}};
  part.figures = measure_against_limit(bench, [&](size_t) {
    setup_.pool->run([&](const Worker& worker) { work(*experts_[static_cast<size_t>(worker.index)]); });
  });
  return part;
}

std::vector<GptqPart> GptqBench::measure() {
  const double h = setup_.shape.hidden, i = setup_.shape.inter, rows = static_cast<double>(setup_.rows);
  const Product matrix = has_product(*setup_.kernels, Product::kBf16) ? Product::kBf16 : Product::kF32;
  const double updates = setup_.shape.rows() / rows;
  std::vector<GptqPart> out;
  out.push_back(measure({"moments of inputs", "moments", updates}, matrix, {rows * h * 2, rows * h * (h + 1)},
                        [](Expert& e) { e.add_inputs(); }));
  out.push_back(measure({"moments of middles", "moments", updates}, matrix,
                        {rows * i * 4, rows * i * (i + 1)}, [](Expert& e) { e.add_middles(); }));
  out.push_back(measure({"factor of inputs", "rounding"}, Product::kF32, {h * h * 2, h * h * h / 3},
                        [](Expert& e) { e.of_inputs = std::make_unique<GptqFactor>(e.inputs, e.options); }));
  out.push_back(
      measure({"factor of middles", "rounding"}, Product::kF32, {i * i * 2, i * i * i / 3},
              [](Expert& e) { e.of_middles = std::make_unique<GptqFactor>(e.middles, e.options); }));
  const int hidden = setup_.shape.hidden, inter = setup_.shape.inter;
  const Format& format = setup_.format;
  const auto gate_and_up = [&](Expert& e) {
    for (int matrices = 0; matrices < 2; ++matrices) gptq(format, e.values, inter, hidden, *e.of_inputs);
  };
  out.push_back(measure({"rounding gate and up", "rounding"}, Product::kF32, {2 * i * h * 4, 2 * i * h * h},
                        gate_and_up));
  out.push_back(measure({"rounding down", "rounding"}, Product::kF32, {i * h * 4, h * i * i},
                        [&](Expert& e) { gptq(format, e.values, hidden, inter, *e.of_middles); }));
  return out;
}

GptqLayer layer_of(const GptqSetup& setup, const std::vector<GptqPart>& parts) {
  GptqLayer out;
  // Workers take an expert each: the measured call is as many experts' as there are workers.
  const double rounds = static_cast<double>(setup.shape.experts) / setup.pool->threads();
  for (const GptqPart& part : parts) {
    const bool moments = std::string_view(part.floor) == "moments";
    const double times = rounds * part.times, least = part.figures.operations / part.figures.multiply_rate;
    (moments ? out.moments : out.rounding) += times * part.figures.seconds;
    (moments ? out.moments_floor : out.rounding_floor) += times * least;
  }
  return out;
}

}  // namespace kt::inline bench
