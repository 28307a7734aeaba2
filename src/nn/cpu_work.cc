#include "nn/cpu_work.h"

#include <algorithm>
#include <cmath>

namespace kt {

Amount matrix_work(const Format& format, double stored_bytes, double operations) {
  Amount work{.bytes = stored_bytes};
  (is_integer(format.code) ? work.integer_operations : work.float_operations) = operations;
  return work;
}

Amount linear_work(const Linear& linear, double rows) {
  return matrix_work(linear.format(), linear.stored_bytes(), 2.0 * linear.n() * linear.k() * rows);
}

Amount experts_work(const Experts& experts, double hit, double rows) {
  const double each = 2.0 * experts.shape().hidden * experts.shape().inter;
  const ExpertsOptions& formats = experts.options();
  Amount work = matrix_work(formats.gate, hit * experts.stored_bytes_per_expert(), each * rows);
  work += matrix_work(formats.up, 0, each * rows);
  work += matrix_work(formats.down, 0, each * rows);
  return work;
}

Amount attention_work(const KvShape& shape, int heads, int window, const AttentionSequence& sequence) {
  const double end = static_cast<double>(sequence.position) + sequence.count;
  const double width = window ? window : end;
  const double read = std::min(end, width + sequence.count - 1);
  const double seen =
      std::min(width, sequence.position + (sequence.count + 1) / 2.0);  // by a token, on average
  const size_t of_head = shape.block_bytes(shape.d) + (shape.shared ? 0 : shape.block_bytes(shape.dv));
  const double each = static_cast<double>(shape.heads) * static_cast<double>(of_head) / kPageTokens;
  return {.bytes = read * each,
          .integer_operations = 0,
          .float_operations = 2.0 * sequence.count * seen * heads * (shape.d + shape.dv)};
}

double even_hits(const ExpertsShape& shape, int top_k, int tokens) {
  return shape.experts * (1 - std::pow(1 - static_cast<double>(top_k) / shape.experts, tokens));
}

}  // namespace kt
