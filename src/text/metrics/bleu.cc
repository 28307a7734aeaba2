#include "text/metrics/bleu.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/error.h"

namespace kt::inline texts {
namespace {

using Runs = std::unordered_map<std::string, int64_t>;

// Words have no spaces, so joined by them runs stay apart, of different lengths too.
Runs runs_of(const TextWords& words, size_t length) {
  Runs out;
  for (size_t at = 0; at + length <= words.size(); ++at) {
    std::string run = words[at];
    for (size_t next = 1; next < length; ++next) run.append(1, ' ').append(words[at + next]);
    ++out[run];
  }
  return out;
}

}  // namespace

BleuCounts& BleuCounts::operator+=(const BleuCounts& other) {
  for (size_t n = 0; n < kMostBleuOrder; ++n) {
    correct[n] += other.correct[n];
    total[n] += other.total[n];
  }
  predicted += other.predicted;
  wanted += other.wanted;
  return *this;
}

BleuCounts bleu_counts(const TextWords& predicted, const TextWords& wanted) {
  BleuCounts out{.predicted = static_cast<int64_t>(predicted.size()),
                 .wanted = static_cast<int64_t>(wanted.size())};
  for (size_t n = 0; n < kMostBleuOrder; ++n) {
    const Runs said = runs_of(predicted, n + 1), asked = runs_of(wanted, n + 1);
    for (const auto& [run, count] : said) {
      out.total[n] += count;
      if (const auto found = asked.find(run); found != asked.end())
        out.correct[n] += std::min(count, found->second);
    }
  }
  return out;
}

double bleu(const BleuCounts& counts, int order, BleuOrders orders) {
  KT_CHECK(order >= 1 && order <= kMostBleuOrder, "BLEU of runs of {} words", order);
  const auto most = static_cast<size_t>(order);
  if (std::all_of(counts.correct.begin(), counts.correct.begin() + order, [](int64_t n) { return n == 0; }))
    return 0;
  double sum = 0, smoothing = 1;
  size_t used = 0;
  for (; used < most && counts.total[used] > 0; ++used) {
    const auto total = static_cast<double>(counts.total[used]);
    if (counts.correct[used] == 0) smoothing *= 2;
    sum += std::log(counts.correct[used] == 0 ? 100 / (smoothing * total)
                                              : 100 * static_cast<double>(counts.correct[used]) / total);
  }
  if (used < most && orders == BleuOrders::kAll) return 0;
  const bool shorter = counts.predicted < counts.wanted;
  const double ratio = static_cast<double>(counts.wanted) / static_cast<double>(counts.predicted);
  return (shorter ? std::exp(1 - ratio) : 1) * std::exp(sum / static_cast<double>(used));
}

}  // namespace kt::inline texts
