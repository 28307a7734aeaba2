// What operations read and multiply (work.h).
#pragma once
#include "nn/attention.h"
#include "nn/experts.h"
#include "nn/linear.h"
#include "nn/work.h"

namespace kt::inline nn {

Amount matrix_work(const Format& format, double stored_bytes, double operations);
Amount linear_work(const Linear& linear, double rows);
// `hit` experts get `rows` rows in all.
Amount experts_work(const Experts& experts, double hit, double rows);
// Keys and values of every position that some new token sees, once; products of each token with what it sees.
struct AttentionReach {
  int window = 0, chunk = 0;  // AttentionArgs'
};
Amount attention_work(const KvShape& shape, int heads, const AttentionReach& of,
                      const AttentionSequence& sequence);
// With a budget: those of chosen keys for each token, as if nobody else chose them.
Amount chosen_attention_work(const KvShape& shape, int heads, int budget, const AttentionSequence& sequence);
// Keys of an indexer's plane that some token chooses among, once; their products.
Amount indexer_work(const KvShape& shape, int heads, int budget, const AttentionSequence& sequence);
// How many experts so many tokens hit when routing is even.
double even_hits(const ExpertsShape& shape, int top_k, int tokens);

}  // namespace kt::inline nn
