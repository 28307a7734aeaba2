// How well a model predicts a text, and how far another version of it is from that: for judging a
// quantisation.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loaded_model.h"

namespace kt {

struct PerplexityOptions {
  int context = 1024;                       // inputs of a window; windows do not overlap
  int max_tokens = 0;                       // predictions at most; 0: the whole text
  std::string separator = "<|endoftext|>";  // between documents
};

struct PerplexityResult {
  int64_t tokens = 0;  // predicted
  double nll = 0;      // sum of -ln p
  double kl = 0;       // sum over tokens of KL(other || this), where another model was given
  double perplexity() const;
  double mean_kl() const;
};

// Each document alone, newlines at both ends stripped, followed by the token that ends documents;
// concatenated.
std::vector<int32_t> document_tokens(const Tokenizer& tokenizer, std::string_view text,
                                     std::string_view separator);

// Windows of `context` inputs and as many targets, one token further; each starts without a past. `other`, if
// not null, must have the same vocabulary: its logits are the reference of the KL figure. `progress` gets
// predicted tokens so far and all.
PerplexityResult measure_perplexity(LoadedModel& model, LoadedModel* other,
                                    const std::vector<int32_t>& tokens, const PerplexityOptions& options,
                                    const std::function<void(int64_t, int64_t)>& progress = {});

}  // namespace kt
