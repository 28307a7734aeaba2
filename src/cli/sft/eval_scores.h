// What predictions are worth: likeness to the known answers, letters that were right, and how probable the known
// answers were.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/json.h"
#include "text/metrics/words.h"

namespace kt::inline cli {

// A row with its answers.
struct Prediction {
  std::string prompt, label;
  std::optional<std::string> predict = {};  // none: nothing was generated
  // Of multiple choice: the letter that was chosen, the label being the right one.
  std::string choice = {};
  double nll = 0;  // of the known answer's tokens, in nats
  int64_t tokens = 0;

  bool right() const;        // the letter
  OrderedJson json() const;  // as it stands in generated_predictions.jsonl
};

// Those of a .jsonl that this program or LLaMA-Factory wrote: "predict" and "label", perhaps "prompt" and "choice".
// Error naming file and line.
std::vector<Prediction> read_predictions(const std::string& path);

struct ScoreOptions {
  std::string words =
      "auto";  // "13a", "zh"; "auto": zh where half of the labels or more have a Chinese character
  Stemming stemming = Stemming::kNone;  // of ROUGE, with 13a
};

// Named as LLaMA-Factory names them, {"predict_bleu-4": 12.3, ...}, in the order to show them. Only what there is:
// without predictions no likeness, without choices no accuracy, without tokens no loss.
//   predict_bleu-N    mean over rows of sentence BLEU with runs of up to N words, 0 to 100; sacrebleu, effective order
//   predict_corpus_bleu-N    BLEU of all rows together; sacrebleu's corpus BLEU
//   predict_rouge-1, -2, -l  mean over rows of F1, 0 to 100; rouge-score, of zh over its words
OrderedJson scores_of(std::span<const Prediction> predictions, const ScoreOptions& options);

}  // namespace kt::inline cli
