#include "nn/gptq.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"
#include "formats/floats.h"
#include "kernels/gram.h"
#include "nn/cholesky.h"
#include "nn/reserve.h"
#include "nn/span_rounding.h"

namespace kt::inline nn {
namespace {

constexpr int64_t kRowsAtOnce = 256;
constexpr int kColumnsAtOnce = 128;     // of a product
constexpr int kFewColumns = 8;          // below this, loops of our own
constexpr int kStretch = 16;            // of a block: columns that take the ones before them one by one
constexpr double kLeastDamping = 1e-4;  // after none

std::vector<int> column_order(const Hessian& hessian, bool act_order) {
  std::vector<int> order(static_cast<size_t>(hessian.dims()));
  std::iota(order.begin(), order.end(), 0);
  if (act_order)
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return hessian.at(a, a) > hessian.at(b, b); });
  return order;
}

// H with both triangles, [n, n]: rows in any order are then read along rows of it. The mirrored half is
// written a line of 16 at a time, for 8 rows: rows a power of two apart share the few places of a set of L1.
Buffer whole(const Hessian& hessian) {
  constexpr int kLine = 16, kLines = 8;
  const int n = hessian.dims();
  Buffer out(Hessian::bytes(n));
  float* to = out.as<float>().data();
  const float* from = hessian.data();
  for (int64_t i = 0; i < n; ++i) std::copy_n(from + i * n, i + 1, to + i * n);
  for (int r = 0; r < n; r += kLine)
    for (int c = 0; c < std::min(r + kLine, n); c += kLines)
      for (int64_t j = c; j < std::min(c + kLines, n); ++j)
        for (int64_t i = std::max<int64_t>(r, j + 1); i < std::min(r + kLine, n); ++i)
          to[j * n + i] = from[i * n + j];
  return out;
}

// The lower triangle in that order, `added` on the diagonal; where that leaves nothing, for dead columns,
// `least` stands there.
void fill(const Hessian& hessian, std::span<const int> order, float added, float least, float* out) {
  const int n = hessian.dims();
  const Buffer full = whole(hessian);
  for (int i = 0; i < n; ++i, out += n) {
    const float* from = full.as<float>().data() + int64_t{order[static_cast<size_t>(i)]} * n;
    for (int j = 0; j <= i; ++j) out[j] = from[order[static_cast<size_t>(j)]];
    out[i] = out[i] + added == 0 ? least : out[i] + added;
  }
}

void check(const Hessian& hessian) {
  double sum = 0;
  for (int i = 0; i < hessian.dims(); ++i) {
    const float value = hessian.at(i, i);
    if (!is_finite(value) || value < 0) fail("gptq: the Hessian's diagonal {} is {}", i, value);
    sum += value;
  }
  if (sum == 0) fail("gptq: the Hessian of {} dimensions is zero: no inputs were seen", hessian.dims());
}

// Some rows of the matrix, 16 side by side in the order f32 weights are packed in (formats/layout.h): loops
// over rows are vectors', and the rounding errors are the operand of a product as they stand.
class RowsRounding {
 public:
  // In memory that grows as needed, for the next rows.
  RowsRounding(Matrix& out, const float* values, int64_t first, int64_t rows, const GptqFactor& factor,
               Buffer& memory);
  void run();

 private:
  float* now(int block, int step) { return now_ + (int64_t{block} * k_pad_ + step) * kBlockRows; }
  float* gone(int block, int step) { return gone_ + (int64_t{block} * k_pad_ + step) * kBlockRows; }
  void begin_span(int step);
  void begin_all();
  void push(int from, int to, int first, int last);
  void round(int step);

  const GptqFactor& factor_;
  SpanRounding spans_;
  int k_, k_pad_, blocks_;
  float* now_;   // [blocks, k_pad, 16] values with what earlier steps gave up
  float* gone_;  // [blocks, k_pad, 16] value; value - rounded after its step
  const GramKernels& products_ = gram_kernels(best_kernels());
  std::vector<float> sums_;     // [kColumnsAtOnce, 16 * blocks]
  std::vector<float> weight_;   // [k] of squared errors, by step
  std::vector<int> steps_;      // [k] of columns
  std::vector<uint8_t> codes_;  // [k, blocks, 16] by step
};

RowsRounding::RowsRounding(Matrix& out, const float* values, int64_t first, int64_t rows,
                           const GptqFactor& factor, Buffer& memory)
    : factor_(factor),
      spans_(out, first, rows, factor.options().packed_rule),
      k_(static_cast<int>(out.k)),
      k_pad_(round_up(k_, kChunk)),
      blocks_(static_cast<int>(ceil_div(rows, kBlockRows))),
      sums_(static_cast<size_t>(kColumnsAtOnce * blocks_ * kBlockRows)),
      steps_(static_cast<size_t>(k_)),
      codes_(static_cast<size_t>(int64_t{k_} * blocks_ * kBlockRows)) {
  const int64_t numbers = int64_t{blocks_} * k_pad_ * kBlockRows;
  grow(memory, static_cast<size_t>(numbers) * sizeof(float) * 2);
  now_ = memory.as<float>().data();
  gone_ = now_ + numbers;
  for (int b = 0; b < blocks_; ++b) {
    const int some = static_cast<int>(std::min<int64_t>(kBlockRows, rows - int64_t{b} * kBlockRows));
    const float* from = values + (first + int64_t{b} * kBlockRows) * k_;
    for (int c = 0; c < k_; ++c) {
      const int column = factor.order()[static_cast<size_t>(c)];
      float* to = now(b, c);
      for (int r = 0; r < kBlockRows; ++r) to[r] = r < some ? from[int64_t{r} * k_ + column] : 0.0f;
    }
    std::fill(now(b, k_), now(b, k_pad_), 0.0f);
  }
  std::copy_n(now_, numbers, gone_);
  for (int c = 0; c < k_; ++c) {
    steps_[static_cast<size_t>(factor.order()[static_cast<size_t>(c)])] = c;
    const float pivot = factor.lower()[int64_t{c} * k_ + c];
    weight_.push_back(pivot * pivot);
  }
}

ScaleSearch search_of(const GptqOptions& options) { return {options.scale_steps, options.least_scale}; }

// What the columns of a span would hold if none of them lost anything by rounding: what earlier columns gave
// up, made up for by all of them together.
void RowsRounding::begin_span(int step) {
  const int columns = std::min(spans_.step(), k_ - step);
  std::vector<float> ahead(static_cast<size_t>(blocks_ * columns * kBlockRows));
  std::vector<float> moved(static_cast<size_t>(columns * kBlockRows));  // value - ahead
  for (int b = 0; b < blocks_; ++b) {
    float* out = ahead.data() + b * columns * kBlockRows;
    for (int c = 0; c < columns; ++c, out += kBlockRows) {
      const float* lower = factor_.lower() + int64_t{step + c} * k_ + step;
      std::copy_n(now(b, step + c), kBlockRows, out);
      if (step == 0) continue;
      products_.add_lanes(lower, c, moved.data(), out, 0, 1);
      for (int r = 0; r < kBlockRows; ++r)
        moved[static_cast<size_t>(c * kBlockRows + r)] = gone(b, step + c)[r] - out[r];
    }
  }
  spans_.begin(step, ahead.data(), int64_t{columns} * kBlockRows, weight_.data() + step,
               search_of(factor_.options()));
}

// Scales of all spans from the values in their own order.
void RowsRounding::begin_all() {
  for (int begin = 0; begin < k_; begin += spans_.step()) {
    const int columns = std::min(spans_.step(), k_ - begin);
    std::vector<float> values(static_cast<size_t>(blocks_ * columns * kBlockRows)), weight;
    for (int c = 0; c < columns; ++c) {
      const int step = steps_[static_cast<size_t>(begin + c)];
      weight.push_back(weight_[static_cast<size_t>(step)]);
      for (int b = 0; b < blocks_; ++b)
        std::copy_n(now(b, step), kBlockRows, values.data() + (b * columns + c) * kBlockRows);
    }
    spans_.begin(begin, values.data(), int64_t{columns} * kBlockRows, weight.data(),
                 search_of(factor_.options()));
  }
}

// What steps [from, to) gave up, to the values of steps [first, last).
void RowsRounding::push(int from, int to, int first, int last) {
  if (from == to) return;
  if (last - first < kFewColumns) {
    for (int c = first; c < last; ++c)
      products_.add_lanes(factor_.lower() + int64_t{c} * k_ + from, to - from, gone(0, from), now(0, c),
                          int64_t{k_pad_} * kBlockRows, blocks_);
    return;
  }
  for (int c = first; c < last; c += kColumnsAtOnce) {
    const int columns = std::min(kColumnsAtOnce, last - c);
    const int64_t width = int64_t{blocks_} * kBlockRows;
    products_.product_f32({.a = factor_.lower() + int64_t{c} * k_ + from,
                           .a_stride = k_,
                           .m = columns,
                           .k = to - from,
                           .b = gone(0, from),
                           .b_stride = int64_t{k_pad_} * kBlockRows,
                           .blocks = blocks_,
                           .out = sums_.data(),
                           .out_stride = width});
    for (int b = 0; b < blocks_; ++b)
      for (int i = 0; i < columns; ++i) {
        float* to_values = now(b, c + i);
        const float* sum = sums_.data() + i * width + b * kBlockRows;
        for (int r = 0; r < kBlockRows; ++r) to_values[r] += sum[r];
      }
  }
}

void RowsRounding::round(int step) {
  spans_.round(factor_.order()[static_cast<size_t>(step)], now(0, step), gone(0, step),
               int64_t{k_pad_} * kBlockRows, codes_.data() + int64_t{step} * blocks_ * kBlockRows);
}

void RowsRounding::run() {
  const bool static_spans = factor_.options().act_order;
  if (static_spans) begin_all();
  // A span begins with a block; a block ends with a span or earlier.
  const int span = static_spans ? k_ : spans_.step();
  for (int begin = 0; begin < k_; begin += span) {
    const int end = std::min(begin + span, k_);
    push(0, begin, begin, end);
    if (!static_spans) begin_span(begin);
    for (int b0 = begin; b0 < end; b0 += factor_.options().block) {
      const int b1 = std::min(b0 + factor_.options().block, end);
      push(begin, b0, b0, b1);
      for (int s0 = b0; s0 < b1; s0 += kStretch) {
        const int s1 = std::min(s0 + kStretch, b1);
        push(b0, s0, s0, s1);
        for (int c = s0; c < s1; ++c) {
          push(s0, c, c, c + 1);
          round(c);
        }
      }
    }
  }
  spans_.store(codes_.data(), steps_);
}

}  // namespace

GptqFactor::GptqFactor(const Hessian& hessian, const GptqOptions& options)
    : options_(options),
      damping_(options.damping),
      order_(column_order(hessian, options.act_order)),
      lower_(Hessian::bytes(hessian.dims())) {
  if (options.block < 1 || !(options.damping >= 0))
    fail("gptq: blocks of {} columns, damping {}", options.block, options.damping);
  check(hessian);
  const double mean = hessian.mean_diagonal();
  const int n = hessian.dims();
  float* lower = lower_.as<float>().data();
  for (;; damping_ = damping_ > 0 ? damping_ * 10 : kLeastDamping) {
    if (damping_ > kMostDamping)
      fail("gptq: the Hessian of {} dimensions is not positive with a damping of {}", n, damping_ / 10);
    fill(hessian, order_, static_cast<float>(damping_ * mean), static_cast<float>(mean), lower);
    if (factor(lower, n, n)) break;
  }
  for (int c = 0; c < n; ++c) {
    float* row = lower + int64_t{c} * n;
    const float inverse = 1 / row[c];
    for (int i = 0; i < c; ++i) row[i] *= inverse;
  }
}

Matrix gptq(const Format& format, std::span<const float> values, int64_t n, int64_t k,
            const GptqFactor& factor) {
  check_shape(format, n, k, "gptq");
  if (std::ssize(values) != n * k)
    fail("gptq: expected {} values for [{}, {}], got {}", n * k, n, k, values.size());
  if (factor.dims() != k) fail("gptq: {} columns, but the Hessian has {} dimensions", k, factor.dims());
  for (size_t i = 0; i < values.size(); ++i)
    if (!is_finite(values[i]))
      fail("gptq: the value of row {}, column {} is not a finite number", static_cast<int64_t>(i) / k,
           static_cast<int64_t>(i) % k);
  Matrix out(format, n, k);
  Buffer memory;
  for (int64_t first = 0; first < n; first += kRowsAtOnce)
    RowsRounding(out, values.data(), first, std::min(kRowsAtOnce, n - first), factor, memory).run();
  return out;
}

double output_error(std::span<const float> values, const MatrixView& rounded, const Hessian& hessian) {
  const int64_t n = rounded.n, k = rounded.k;
  KT_CHECK(std::ssize(values) == n * k && hessian.dims() == k, "output_error: {} values, [{}, {}], H of {}",
           values.size(), n, k, hessian.dims());
  std::vector<float> error(values.size());
  dequantise(rounded, error);
  for (size_t i = 0; i < error.size(); ++i) error[i] = values[i] - error[i];
  double total = 0;
  for (int64_t r = 0; r < n; ++r) {
    const float* e = error.data() + r * k;
    for (int64_t i = 0; i < k; ++i) {
      const float* h = hessian.data() + i * k;
      double sum = 0;
      for (int64_t j = 0; j < i; ++j) sum += static_cast<double>(e[j]) * static_cast<double>(h[j]);
      total += static_cast<double>(e[i]) * (2 * sum + static_cast<double>(e[i]) * static_cast<double>(h[i]));
    }
  }
  return total;
}

}  // namespace kt::inline nn
