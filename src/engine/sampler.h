// From one row of logits to the next token of one sequence. Knows nothing of text, batches or models.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/constraint.h"
#include "text/tokenizer/bpe.h"

namespace kt::inline engine {

// The filters apply in this order: a constraint's mask, penalties, temperature, top-k, top-p, min-p; the
// defaults leave all of them out.
struct SamplingOptions {
  double temperature = 1;         // >= 0; 0: the highest logit, the lowest id among equals
  int top_k = 0;                  // the k highest logits and what equals the last of them; 0 or -1: all
  double top_p = 1;               // (0, 1]: the fewest most probable tokens that hold this probability
  double min_p = 0;               // [0, 1]: not below this fraction of the highest probability
  double repetition_penalty = 1;  // > 0: logits of tokens in prompt or output are divided by it, negative
                                  // ones multiplied
  double presence_penalty = 0;    // [-2, 2]: subtracted once for a token in the output
  double frequency_penalty = 0;   // [-2, 2]: subtracted for every time it is there
  // Added to these tokens' logits before all else, each in [-100, 100].
  std::vector<std::pair<TokenId, double>> logit_bias = {};
  uint64_t seed = 0;
  std::optional<int> logprobs = {};  // report the chosen token's and those of so many best ones, [0, 1000]

  bool operator==(const SamplingOptions&) const = default;
};

// Error(kInput) "top_p: expected a number in (0, 1], got 1.5".
void check_sampling(const SamplingOptions& options);

struct TokenLogprob {
  TokenId id = 0;
  double logprob = 0;
};
struct SampledToken {
  TokenId id = 0;
  // Only where asked for. Log-softmax of what the model said: before masks, penalties, temperature and filters, as
  // vLLM reports by default.
  std::optional<double> logprob = {};
  std::vector<TokenLogprob> top = {};  // most probable first, lower ids first among equals
};

// A token that was not chosen but given, with its logprob and those of so many best ones. Error as highest_logit.
SampledToken scored_token(std::span<const float> logits, TokenId id, int top);

// Number `index` of the stream of `seed`, in [0, 1) with 53 bits: a function, without state, of integers
// only, so that it is the same on every machine.
double uniform(uint64_t seed, uint64_t index);

// Draws one token from logits. Which draw of the stream is used depends on the number of tokens picked
// before, nothing else.
class Sampler {
 public:
  // The prompt counts for the repetition penalty. Error as check_sampling.
  explicit Sampler(const SamplingOptions& options, std::span<const TokenId> prompt = {});

  // The next token; later calls count it as output. `logits` [vocabulary] are scratch afterwards. -inf is a
  // token that cannot come. Error(kInput) in one line, and nothing picked, if a logit is NaN or +inf, or all
  // are -inf. O(vocabulary), but that top-p sorts logits that lie closer together than 0.03 temperatures.
  // A constraint masks the logits once log-probabilities are taken, so these stay what the model said; a
  // token that stays keeps its logit, so that costs nothing. What it throws comes out, and nothing is picked.
  // The caller tells it what was chosen.
  SampledToken pick(std::span<float> logits, TokenConstraint* constraint = nullptr);

  uint64_t picked() const { return picked_; }

 private:
  struct Candidate {
    TokenId id = 0;
    double scaled = 0;  // logit below the highest, divided by the temperature
    double weight = 0;  // probability relative to the most probable token's
  };
  void penalise(std::span<float> logits) const;
  TokenId draw(std::span<const float> logits, float highest);
  void collect(std::span<const float> logits, float highest);
  void keep_top_p();

  SamplingOptions options_;
  std::unordered_map<TokenId, uint32_t> output_counts_;  // 0: only in the prompt
  bool penalises_;
  uint64_t picked_ = 0;
  std::vector<Candidate> candidates_;
  std::vector<float> scratch_;
};

// Log of the sum of exp(logits), in double. The logits are finite or -inf, the highest is given and finite.
double log_sum_exp(std::span<const float> logits, float highest);
// The highest logit. Error(kInput) "logits: NaN for token 7 of 4096" for NaN, +inf, or if all are -inf.
float highest_logit(std::span<const float> logits);

}  // namespace kt::inline engine
