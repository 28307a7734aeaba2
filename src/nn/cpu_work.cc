#include "nn/cpu_work.h"

#include <algorithm>
#include <cmath>

namespace kt::inline nn {

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

namespace {

struct Seen {
  double keys, by_each;  // by all tokens together, and by one on average
};

Seen seen_in_window(int window, const AttentionSequence& of) {
  const double end = static_cast<double>(of.position) + of.count, width = window ? window : end;
  return {std::min(end, width + of.count - 1), std::min(width, of.position + (of.count + 1) / 2.0)};
}

// A chunk is a text of its own; its keys are read from where the first new token's begins.
Seen seen_in_chunks(int chunk, const AttentionSequence& of) {
  const int end = of.position + of.count, begin = of.position / chunk * chunk;
  double products = 0;
  for (int at = of.position; at < end;) {
    const int first = at / chunk * chunk, last = std::min(end, first + chunk);
    products += (last - at) * (at - first + (last - at + 1) / 2.0);
    at = last;
  }
  return {static_cast<double>(end - begin), of.count > 0 ? products / of.count : 0};
}

// Of a position: what its key and its value have in a page.
double position_bytes(const KvShape& shape) {
  const size_t of_head = shape.block_bytes(shape.d) + (shape.has_values() ? shape.block_bytes(shape.dv) : 0);
  return static_cast<double>(shape.heads) * static_cast<double>(of_head) / kPageTokens;
}

// The first tokens of a sequence's new ones, which see every key.
AttentionSequence before_choice(int budget, const AttentionSequence& sequence) {
  AttentionSequence out = sequence;
  out.count = std::clamp(budget - sequence.position, 0, sequence.count);
  return out;
}

}  // namespace

Amount chosen_attention_work(const KvShape& shape, int heads, int budget, const AttentionSequence& sequence) {
  const AttentionSequence all = before_choice(budget, sequence);
  const double choosing = sequence.count - all.count;
  Amount work = all.count > 0 ? attention_work(shape, heads, {}, all) : Amount{};
  work += {.bytes = choosing * budget * position_bytes(shape),
           .integer_operations = 0,
           .float_operations = 2.0 * choosing * budget * heads * (shape.d + shape.dv)};
  return work;
}

Amount indexer_work(const KvShape& shape, int heads, int budget, const AttentionSequence& sequence) {
  AttentionSequence choosing = sequence;
  choosing.count -= before_choice(budget, sequence).count;
  choosing.position = sequence.position + sequence.count - choosing.count;
  return choosing.count > 0 ? attention_work(shape, heads, {}, choosing) : Amount{};
}

Amount attention_work(const KvShape& shape, int heads, const AttentionReach& of,
                      const AttentionSequence& sequence) {
  const Seen seen = of.chunk > 0 ? seen_in_chunks(of.chunk, sequence) : seen_in_window(of.window, sequence);
  return {.bytes = seen.keys * position_bytes(shape),
          .integer_operations = 0,
          .float_operations = 2.0 * sequence.count * seen.by_each * heads * (shape.d + shape.dv)};
}

double even_hits(const ExpertsShape& shape, int top_k, int tokens) {
  return shape.experts * (1 - std::pow(1 - static_cast<double>(top_k) / shape.experts, tokens));
}

}  // namespace kt::inline nn
