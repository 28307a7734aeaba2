// ROUGE: how much of a wanted text's words, or pairs of words, or longest common order of words, a prediction has.
#pragma once
#include "text/metrics/words.h"

namespace kt::inline texts {

// Each in [0, 1]; zeros where nothing is alike.
struct RougeScore {
  double precision = 0, recall = 0, f1 = 0;
};

// Runs of `length` words, 1 or more; as rouge-score's rougeN.
RougeScore rouge_n(const TextWords& predicted, const TextWords& wanted, size_t length);
// The longest sequence of words that both have, with others between; as rougeL. Takes predicted x wanted steps.
RougeScore rouge_l(const TextWords& predicted, const TextWords& wanted);

}  // namespace kt::inline texts
