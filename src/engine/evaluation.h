// Questions whose answers are known, many at once: what the model says, what it thinks of the known answer, and which
// of several letters it would choose. Knows nothing of rows, texts that are compared or files.
#pragma once
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/scheduler.h"

namespace kt::inline engine {

struct EvaluationCase {
  std::vector<TokenId> prompt;  // the question, at least a token
  // The same conversation with its answer, and the first token that counts: at least 1. Empty: nothing is scored.
  std::vector<TokenId> whole = {};
  size_t answer_begins = 1;
  std::vector<TokenId> choices =
      {};  // all different; the first token of an answer, by its meaning; empty: no choice
};

struct EvaluationAnswer {
  size_t index = 0;  // of the case
  std::string text;  // empty where nothing was generated
  int tokens = 0;    // generated, with the one that ends
  bool cut = false;  // by max_tokens or the context
  double nll = 0;    // of the known answer's tokens, summed, in nats
  int64_t scored = 0;
  std::optional<size_t> choice = {};  // the index of the one with the highest logit behind the prompt
};

struct EvaluationOptions {
  bool generate = true;
  int max_tokens = 1024;
  int longest = 0;                // above 0: a prompt and its answer together have at most so many tokens
  SamplingOptions sampling = {};  // the seed of a case is this one's and its index
  std::vector<TokenId> end_tokens = {};
  int adapter = -1;
  int sequences = 8;  // at once
  int step_tokens = 512;
};

// Calls `on_answer` for each case when all about it is known, in the order in which that happens. Once `stop` is true
// it returns soon, without those that are not whole. Error of the model's: of the first request that had one.
void evaluate(StepModel& model, const Tokenizer& tokenizer, const std::vector<EvaluationCase>& cases,
              const EvaluationOptions& options, const std::function<void(EvaluationAnswer)>& on_answer,
              const std::atomic<bool>& stop);

}  // namespace kt::inline engine
