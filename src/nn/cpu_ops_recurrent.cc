// Operations of recurrent layers on the CPU, and gates: what a sequence left in its slot goes on token after token.
#include <cmath>

#include "base/checked.h"
#include "base/error.h"
#include "nn/cpu_ops_state.h"

namespace kt::inline nn {
namespace {

constexpr int kVectorColumns = 16;  // states of a head are as wide as a multiple of it

int64_t padded_columns(const DeltaShape& shape) { return round_up<int64_t>(shape.value_dim, kVectorColumns); }

int64_t column_of(const GroupedHeads& heads, int head, int64_t width) {
  return heads.from.first + head / heads.in_group * heads.stride + head % heads.in_group * width;
}

// As torch has it: of large numbers the number itself.
float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
float sigmoid_of(float x) { return 1 / (1 + std::exp(-x)); }

// One head's columns of a convolution in one sequence.
struct ConvolvedHead {
  const float* x;  // [tokens, x_stride]
  int64_t x_stride;
  float* past;  // [taps - 1, stride]: the inputs before
  float* y;     // [tokens, stride]
  const float* weights;
  int64_t stride;  // between rows of the past, of y and of the weights
  int tokens, taps, width;
};

void convolve_head(const RowKernels& kernels, const ConvolvedHead& head) {
  const int before = head.taps - 1;
  // Of the inputs, counted from the oldest that is remembered.
  const auto input = [&](int64_t i) -> const float* {
    return i < before ? head.past + i * head.stride : head.x + (i - before) * head.x_stride;
  };
  for (int t = 0; t < head.tokens; ++t) {
    const float* rows[kMostTaps];
    for (int j = 0; j < head.taps; ++j) rows[j] = input(t + j);
    kernels.convolve({.rows = rows,
                      .taps = head.taps,
                      .weights = head.weights,
                      .stride = head.stride,
                      .n = head.width,
                      .y = head.y + t * head.stride});
  }
  for (int i = 0; i < before; ++i)
    std::copy_n(input(head.tokens + i), head.width, head.past + i * head.stride);
}

}  // namespace

size_t short_convolution_bytes(int taps, int64_t columns) {
  return static_cast<size_t>(taps - 1) * static_cast<size_t>(columns) * sizeof(float);
}

size_t delta_rule_bytes(const DeltaShape& shape) {
  return static_cast<size_t>(shape.value_heads) * static_cast<size_t>(shape.key_dim) *
         static_cast<size_t>(padded_columns(shape)) * sizeof(float);
}

void CpuOps::gate_heads(const GateHeads& args) {
  if (measured_) return;
  const StepParts::Scope scope(timed(), part_.norm);
  const float* weights = values_or_null(args.norm);
  const int count = static_cast<int>(args.count);
  for_rows(step_.tokens, [&](int t) {
    float* row = at(args.x) + t * args.x.width;
    const float* gates = at(args.gates.from.rows) + t * args.gates.from.rows.width;
    for (int h = 0; h < args.heads; ++h) {
      float* head = row + h * args.count;
      if (weights) kernels_.rows->norm(head, weights, static_cast<float>(args.norm_eps), count, head);
      kernels_.rows->gate(head, gates + column_of(args.gates, h, args.count), count, args.kind);
    }
  });
}

template <typename Each>
void CpuOps::for_sequences(int heads, const Each& each) {
  const int64_t items = std::ssize(step_.sequences) * heads;
  const auto some = [&](const Worker& worker) {
    for (int64_t i = worker.index; i < items; i += pool_->threads())
      each(step_.sequences[static_cast<size_t>(i / heads)], static_cast<int>(i % heads));
  };
  pool_->run(some, &forecast_);
}

void CpuOps::convolve(const ShortConvolution& args) {
  const StepParts::Scope scope(timed(), part_.states);
  const int64_t columns = args.out.width;
  const size_t bytes = short_convolution_bytes(args.taps, columns);
  count({.bytes = 2.0 * static_cast<double>(bytes) * static_cast<double>(step_.sequences.size()),
         .integer_operations = 0,
         .float_operations = 2.0 * args.taps * static_cast<double>(columns) * step_.tokens});
  if (measured_) return;
  KT_CHECK(args.taps >= 1 && args.taps <= kMostTaps, "{} taps", args.taps);
  int heads = 0;
  for (const ShortConvolution::Part& part : args.parts) heads += part.count;
  const float* weights = values_of(*args.weights).data();
  for_sequences(heads, [&](const AttentionSequence& sequence, int head) {
    int64_t column = 0;  // of the outputs
    const ShortConvolution::Part* part = args.parts.data();
    for (; head >= part->count; ++part) {
      head -= part->count;
      column += part->count * part->width;
    }
    column += head * part->width;
    const Rows from = part->heads.from.rows;
    auto* past = reinterpret_cast<float*>(cache().state(args.state, sequence.slot));
    convolve_head(*kernels_.rows,
                  {.x = at(from) + sequence.first * from.width + column_of(part->heads, head, part->width),
                   .x_stride = from.width,
                   .past = past + column,
                   .y = at(args.out) + sequence.first * columns + column,
                   .weights = weights + column,
                   .stride = columns,
                   .tokens = sequence.count,
                   .taps = args.taps,
                   .width = static_cast<int>(part->width)});
  });
}

// Keys and queries of length one, and each head's numbers of the rule.
void CpuOps::prepare_delta(const DeltaRule& args, int token) {
  const DeltaShape& shape = args.shape;
  const int dim = shape.key_dim;
  float* q = at(args.qkv) + token * args.qkv.width;
  float* k = q + int64_t{shape.key_heads} * dim;
  const float* a = at(args.a.from.rows) + token * args.a.from.rows.width;
  const float* b = at(args.b.from.rows) + token * args.b.from.rows.width;
  auto* factors = reinterpret_cast<DeltaFactors*>(at(args.factors) + token * args.factors.width);
  // x / sqrt(sum x^2 + 1e-6) as a norm over `dim` numbers.
  const float eps = 1e-6f / static_cast<float>(dim);
  for (int h = 0; h < shape.key_heads; ++h) {
    kernels_.rows->norm(q + h * dim, query_lengths_.data(), eps, dim, q + h * dim);
    kernels_.rows->norm(k + h * dim, key_lengths_.data(), eps, dim, k + h * dim);
  }
  for (int h = 0; h < shape.value_heads; ++h) {
    const auto i = static_cast<size_t>(h);
    const int key = shape.key_of(h) * dim;
    const float step = softplus(a[column_of(args.a, h, 1)] + values_of(*args.steps)[i]);
    factors[h] = {.decay = std::exp(values_of(*args.rates)[i] * step),
                  .beta = sigmoid_of(b[column_of(args.b, h, 1)]),
                  .dot = kernels_.rows->dot(q + key, k + key, dim)};
  }
}

void CpuOps::delta_rule(const DeltaRule& args) {
  const StepParts::Scope scope(timed(), part_.states);
  const DeltaShape& shape = args.shape;
  const double numbers = static_cast<double>(shape.value_heads) * shape.key_dim * shape.value_dim;
  count({.bytes = 2.0 * sizeof(float) * numbers * static_cast<double>(step_.sequences.size()),
         .integer_operations = 0,
         .float_operations = 8.0 * numbers * step_.tokens});
  if (measured_) return;
  static_assert(sizeof(DeltaFactors) == 3 * sizeof(float));
  key_lengths_.assign(static_cast<size_t>(shape.key_dim), 1 / std::sqrt(static_cast<float>(shape.key_dim)));
  query_lengths_.assign(static_cast<size_t>(shape.key_dim), 1 / static_cast<float>(shape.key_dim));
  for_rows(step_.tokens, [&](int t) { prepare_delta(args, t); });
  const int64_t columns = padded_columns(shape), of_head = shape.key_dim * columns;
  const int pieces = static_cast<int>(ceil_div<int64_t>(columns, kDeltaColumns));
  for_sequences(shape.value_heads * pieces, [&](const AttentionSequence& sequence, int item) {
    const int head = item / pieces, first = item % pieces * kDeltaColumns;
    const float* row = at(args.qkv) + sequence.first * args.qkv.width;
    const float* q = row + shape.key_of(head) * shape.key_dim;
    const int64_t value = int64_t{head} * shape.value_dim + first;  // its first number
    const float* factors = at(args.factors) + sequence.first * args.factors.width + 3 * head;
    auto* state = reinterpret_cast<float*>(cache().state(args.state, sequence.slot));
    kernels_.rows->delta_rule({.state = state + head * of_head + int64_t{first} * shape.key_dim,
                               .rows = shape.key_dim,
                               .columns = static_cast<int>(std::min<int64_t>(columns - first, kDeltaColumns)),
                               .width = std::min(shape.value_dim - first, kDeltaColumns),
                               .tokens = sequence.count,
                               .q = q,
                               .k = q + int64_t{shape.key_heads} * shape.key_dim,
                               .v = row + 2 * int64_t{shape.key_heads} * shape.key_dim + value,
                               .stride = args.qkv.width,
                               .factors = reinterpret_cast<const DeltaFactors*>(factors),
                               .factor_stride = args.factors.width / 3,
                               .out = at(args.out) + sequence.first * args.out.width + value,
                               .out_stride = args.out.width});
  });
}

}  // namespace kt::inline nn
