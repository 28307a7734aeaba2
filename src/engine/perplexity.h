// How well logits predict a text: perplexity, and the divergence between two models. Runs no model: logits
// come from functions.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/function_ref.h"
#include "base/pool.h"
#include "text/tokenizer/tokenizer.h"

namespace kt::inline engine {

// Logits [count, vocabulary] of window[first, first + count), each given the window's tokens up to it. Called
// for rising rows without gaps; first == 0 begins a new window. The view is valid until the next call.
using WindowLogits =
    FunctionRef<std::span<const float>(std::span<const TokenId> window, size_t first, size_t count)>;

struct PerplexityOptions {
  size_t context = 1024;   // inputs, and targets, of a window
  size_t most_tokens = 0;  // targets in all, rounded down to windows; 0: all of the text
  size_t chunk = 256;      // rows asked for at once
  // After each window, e.g. for progress; false: stop here, with the figures so far.
  std::optional<FunctionRef<bool(size_t windows_done, size_t windows)>> on_window = {};
};

struct Perplexity {
  size_t tokens = 0;      // targets
  double nll = 0;         // sum of -log p(target), natural
  double perplexity = 0;  // exp(nll / tokens)
};
struct Divergence {
  Perplexity model, reference;
  double kl = 0;        // mean over tokens of KL(reference || model), in nats
  double kl_most = 0;   // the highest of one token
  double same_top = 0;  // fraction of tokens for which both have the same most probable one
};

// Windows of `context` inputs and the targets one further, without overlap: inputs [w * context, (w + 1) *
// context). A last window that is not full is left out, except that a text shorter than one window is one.
// All sums are in double, in the order of the tokens, so that threads make no difference. Error(kInput) for
// fewer than two tokens, a context, chunk or most_tokens that leaves no window, NaN logits (with their
// place) and rows of the wrong length or with targets outside of them. `pool` may be null.
Perplexity measure_perplexity(std::span<const TokenId> tokens, WindowLogits logits,
                              const PerplexityOptions& options, Pool* pool = nullptr);
Divergence measure_divergence(std::span<const TokenId> tokens, WindowLogits reference, WindowLogits model,
                              const PerplexityOptions& options, Pool* pool = nullptr);

}  // namespace kt::inline engine
