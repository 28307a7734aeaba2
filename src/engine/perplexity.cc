#include "engine/perplexity.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "engine/sampler.h"

namespace kt::inline engine {

namespace {

struct Windows {
  size_t count = 0, length = 0;
};

Windows windows_of(size_t tokens, const PerplexityOptions& options) {
  if (tokens < 2) fail("perplexity: expected at least 2 tokens of text, got {}", tokens);
  if (options.context == 0) fail("context: expected at least 1, got 0");
  if (options.chunk == 0) fail("chunk: expected at least 1, got 0");
  size_t targets = tokens - 1;
  if (options.most_tokens > 0) targets = std::min(targets, options.most_tokens);
  if (targets < options.context) return {1, targets};
  return {targets / options.context, options.context};
}

// What one position says.
struct Row {
  double nll = 0, reference_nll = 0, kl = 0;
  bool same_top = false;
};

struct RowLogits {
  std::span<const float> logits;
  float highest = 0;
  double log_sum = 0;

  explicit RowLogits(std::span<const float> row)
      : logits(row), highest(highest_logit(row)), log_sum(log_sum_exp(row, highest)) {}
  double nll(TokenId target) const { return log_sum - logits[static_cast<size_t>(target)]; }
  auto top() const { return std::ranges::find(logits, highest) - logits.begin(); }
};

// KL(reference || model). A token that the reference excludes adds nothing.
double divergence(const RowLogits& reference, const RowLogits& model) {
  double sum = 0;
  for (size_t i = 0; i < reference.logits.size(); ++i) {
    const double log_p = reference.logits[i] - reference.log_sum;
    const double p = std::exp(log_p);
    if (p > 0) sum += p * (log_p - (model.logits[i] - model.log_sum));
  }
  return std::max(sum, 0.0);  // rounding
}

// The rows of one chunk from one function, of equal length.
std::span<const float> checked_rows(std::span<const float> logits, size_t rows, size_t& vocabulary) {
  if (vocabulary == 0) vocabulary = logits.size() / rows;
  if (logits.empty() || logits.size() != rows * vocabulary)
    fail("perplexity: expected logits for {} rows of {}, got {} numbers", rows, vocabulary, logits.size());
  return logits;
}

// Calls each(row) for all rows, on all workers of the pool if there is one.
void for_rows(Pool* pool, size_t rows, FunctionRef<void(size_t)> each) {
  if (!pool) {
    for (size_t row = 0; row < rows; ++row) each(row);
    return;
  }
  const auto step = static_cast<size_t>(pool->threads());
  pool->run([&](const Worker& worker) {
    for (auto row = static_cast<size_t>(worker.index); row < rows; row += step) each(row);
  });
}

// The one loop over windows; `reference` may be null.
Divergence measure(std::span<const TokenId> tokens, WindowLogits model, const WindowLogits* reference,
                   const PerplexityOptions& options, Pool* pool) {
  const Windows windows = windows_of(tokens.size(), options);
  Divergence result;
  size_t same_top = 0, vocabulary = 0;
  std::vector<Row> rows;
  for (size_t w = 0; w < windows.count; ++w) {
    const auto inputs = tokens.subspan(w * windows.length, windows.length);
    const auto targets = tokens.subspan(w * windows.length + 1, windows.length);
    for (size_t first = 0; first < windows.length; first += options.chunk) {
      const size_t count = std::min(options.chunk, windows.length - first);
      std::span<const float> expected;
      if (reference) expected = checked_rows((*reference)(inputs, first, count), count, vocabulary);
      const auto logits = checked_rows(model(inputs, first, count), count, vocabulary);
      rows.assign(count, {});
      for_rows(pool, count, [&](size_t r) {
        const TokenId target = targets[first + r];
        const size_t place = w * windows.length + first + r;
        if (target < 0 || static_cast<size_t>(target) >= vocabulary)
          fail("perplexity: token {} at {} is outside the vocabulary of {}", target, place + 1, vocabulary);
        try {
          const RowLogits here(logits.subspan(r * vocabulary, vocabulary));
          rows[r].nll = here.nll(target);
          if (!reference) return;
          const RowLogits there(expected.subspan(r * vocabulary, vocabulary));
          rows[r].reference_nll = there.nll(target);
          rows[r].kl = divergence(there, here);
          rows[r].same_top = here.top() == there.top();
        } catch (const Error& error) {
          fail("perplexity: after token {}: {}", place, error.what());
        }
      });
      for (const Row& row : rows) {
        result.model.nll += row.nll;
        result.reference.nll += row.reference_nll;
        result.kl += row.kl;
        result.kl_most = std::max(result.kl_most, row.kl);
        same_top += row.same_top;
      }
      result.model.tokens += count;
    }
    if (options.on_window && !(*options.on_window)(w + 1, windows.count)) break;
  }
  const auto total = static_cast<double>(result.model.tokens);
  result.reference.tokens = result.model.tokens;
  for (Perplexity* p : {&result.model, &result.reference}) p->perplexity = std::exp(p->nll / total);
  result.kl /= total;
  result.same_top = static_cast<double>(same_top) / total;
  return result;
}

}  // namespace

Perplexity measure_perplexity(std::span<const TokenId> tokens, WindowLogits logits,
                              const PerplexityOptions& options, Pool* pool) {
  return measure(tokens, logits, nullptr, options, pool).model;
}

Divergence measure_divergence(std::span<const TokenId> tokens, WindowLogits reference, WindowLogits model,
                              const PerplexityOptions& options, Pool* pool) {
  return measure(tokens, model, &reference, options, pool);
}

}  // namespace kt::inline engine
