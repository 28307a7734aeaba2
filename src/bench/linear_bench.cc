#include "bench/linear_bench.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "base/text.h"
#include "bench/random_matrix.h"

namespace kt::inline bench {

LinearBench::LinearBench(const LinearSetup& setup, const Format& format) : setup_(setup), format_(format) {
  check_shape(format, setup.n, setup.k, "linear");
  check_available(2.0 * setup.n * setup.k * stored_bits(format, setup.n, setup.k) / 8,  // plain and packed
                  text("two of [{}, {}] in {}", setup.n, setup.k, name_of(format)),
                  "try smaller `outputs` or `inputs`");
  const Matrix plain = random_matrix(format, setup.n, setup.k, 1);
  const auto packed = [&] {
    return Linear(*setup.pool, plain.view(), {}, {.precision = setup.precision, .kernels = setup.kernels},
                  "linear");
  };
  linears_.push_back(packed());
  const size_t each = linears_.front().packed_bytes();
  const uint64_t free = available_memory() / 10 * 9;
  const size_t copies =
      setup.copies ? static_cast<size_t>(setup.copies) : blocks_that_fit(rotation_bytes(), each);
  if (checked_mul(copies, each, "linear") > free)
    fail_as(ErrorKind::kMemory, "{} copies of [{}, {}] in {} need {}, {} are available: try `copies` {}",
            copies, setup.n, setup.k, name_of(format), human_bytes(copies * each), human_bytes(free),
            std::max<size_t>(free / each, 1));
  linears_.resize(copies);
  for_each_item(*setup_.pool, copies - 1, [&](size_t i) { linears_[i + 1] = packed(); });
}

double LinearBench::packed_bytes_ratio() const {
  return static_cast<double>(linears_.front().packed_bytes()) / linears_.front().stored_bytes();
}

LimitFigures LinearBench::measure(Reader& reader, int tokens, const MeasureFor& time) const {
  check_available(4.0 * tokens * (static_cast<double>(setup_.k) + setup_.n),
                  text("rows of {} tokens", tokens), "try fewer `tokens`");
  std::vector<float> x(static_cast<size_t>(tokens) * static_cast<size_t>(setup_.k)),
      y(static_cast<size_t>(tokens) * static_cast<size_t>(setup_.n));
  RandomBits random(3);
  for (float& value : x) value = random_activation(random);
  LinearWork work(setup_.pool);
  const LimitCall each{.bytes = linears_.front().stored_bytes(),
                       .operations = 2.0 * setup_.n * setup_.k * tokens};
  const std::vector<LimitCall> calls(linears_.size(), each);
  return measure_against_limit(
      {.pool = setup_.pool,
       .kernels = setup_.kernels,
       .product = judging_product(*setup_.kernels, format_),
       .reader = &reader,
       .calls = calls,
       .time = time},
      [&](size_t i) {
        const LinearCall call{
            .linear = &linears_[i], .x = x.data(), .x_stride = setup_.k, .y = y.data(), .y_stride = setup_.n};
        work.run(tokens, {&call, 1});
      });
}

}  // namespace kt::inline bench
