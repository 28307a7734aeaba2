// The perplexity of loaded models, and how far one is from another: engine/perplexity.h with logits from
// their runners and tokens from a file.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "engine/loaded_model.h"
#include "engine/perplexity.h"

namespace kt::inline engine {

// The first `most` tokens of a file: of .jsonl (and .json) the samples that calibration makes of its rows, of
// others the documents between separators (DocumentTokens). `end` follows each. Errors: as calibration's.
std::vector<TokenId> file_tokens(const DescribedModel& model, const std::string& path, TokenId end,
                                 std::string_view separator = "<|endoftext|>", size_t most = SIZE_MAX);

struct MeasureOptions {
  PerplexityOptions windows;  // chunk is lowered to what the models take at once; on_window is set by `show`
  int threads = 0;            // for sums over the vocabulary
  std::function<void(size_t windows_done, size_t windows)> show = {};
};

// Of `model`, with its last adapter where it has any, and where `reference` is not null what lies between the two.
// Error(kInput) for a window longer than a model's context, and as measure_perplexity.
Divergence measure_models(std::span<const TokenId> tokens, LoadedModel& model, LoadedModel* reference,
                          const MeasureOptions& options);

}  // namespace kt::inline engine
