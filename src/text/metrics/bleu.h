// BLEU: how many of the runs of one to four words that a text has also stand in another.
#pragma once
#include <array>
#include <cstdint>

#include "text/metrics/words.h"

namespace kt::inline texts {

inline constexpr int kMostBleuOrder = 4;

// What it is computed from; a corpus' are the sum of its texts'.
struct BleuCounts {
  std::array<int64_t, kMostBleuOrder> correct{},
      total{};                        // runs of 1, 2, 3, 4 words: in both, in the prediction
  int64_t predicted = 0, wanted = 0;  // words

  BleuCounts& operator+=(const BleuCounts& other);
};
BleuCounts bleu_counts(const TextWords& predicted, const TextWords& wanted);

// Runs longer than the prediction: they make the whole 0, as for a corpus; or count as not asked for, as for single
// texts.
enum class BleuOrders : uint8_t { kAll, kEffective };

// In [0, 100]: the geometric mean over runs of up to `order` words, in [1, 4], smaller for texts that are too short. A
// length without a match counts as half a match, the next such as a quarter (smoothing "exp"). As sacrebleu 2's BLEU.
double bleu(const BleuCounts& counts, int order, BleuOrders orders);

}  // namespace kt::inline texts
