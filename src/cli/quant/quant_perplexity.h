// What a calibrated conversion cost a text: perplexity of the original, of the same experts rounded to
// nearest, and of what was written, and how far the two are from the original. Round to nearest is done while
// the model is loaded; the measuring is kt perplexity's.
#pragma once
#include <string>
#include <vector>

#include "cli/quant/quant.h"
#include "engine/loaded_model.h"
#include "weights/plans/compressed_targets.h"

namespace kt::inline cli {

struct PerplexityRequest {
  std::string file;       // .jsonl, or documents between <|endoftext|>; empty: nothing is measured
  size_t tokens = 24576;  // to predict at most
};

class QuantPerplexity {
 public:
  // Everything that can be wrong is an Error now, before a conversion that may take hours: a file that is
  // missing or has fewer than kLeastPerplexityTokens tokens, tokens outside of the vocabulary, an output that
  // cannot be run, and memory that does not hold two models at once. `model` is the original's; checkpoint
  // and source (null: no experts) must outlive this.
  QuantPerplexity(const PerplexityRequest& request, const DescribedModel& model, const Checkpoint& checkpoint,
                  const ExpertSource* source, const CompressedPlanOptions& options, const RunFlags& run);
  QuantPerplexity(const QuantPerplexity&) = delete;

  // After the conversion: {"tokens", "context", "acts", "text", "original", "rtn", "gptq"}, the last three
  // with what kt perplexity says of a model. The same for any number of threads.
  Json measure() const;

 private:
  ModelOptions model_options() const;
  MemoryRequest use() const { return {.context = static_cast<int>(context_)}; }
  void check_mixtures(const ExpertSource& source) const;
  void check_memory() const;

  std::string model_, file_;
  CompressedPlanOptions options_;
  CompressedTargets targets_;
  std::vector<TokenId> tokens_;
  size_t most_tokens_, context_;
  std::string digest_;
  int threads_ = 0;
  uint64_t max_memory_ = 0;
  bool quiet_;
};
inline constexpr size_t kLeastPerplexityTokens = 256;

// measure()'s figures as a table on standard output.
void print_perplexities(const Json& measured, const std::string& file);

}  // namespace kt::inline cli
