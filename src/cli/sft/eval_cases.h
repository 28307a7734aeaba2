// Rows made into questions for the engine: prompt, known answer and, of multiple choice, the letters, by the model's
// own chat template and tokenizer.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "cli/sft/rows.h"
#include "engine/described_model.h"
#include "engine/evaluation.h"
#include "text/chat_template.h"

namespace kt::inline cli {

struct EvalCase {
  std::string file;
  int64_t number = 0;  // of the row in it
  std::string prompt,
      label;              // as texts: what is asked, with all marks of the template; the answer's own words
  EvaluationCase tokens;  // of both
  std::string letters;    // of multiple choice, "ABCD"; else empty
  std::optional<size_t> right = {};  // which of them is the label
};

struct EvalCaseOptions {
  int cutoff = 2048;  // the most tokens of a row
  std::optional<bool> thinking = {};
};

// Makes one case after the other. The model must outlive it.
class EvalCases {
 public:
  // Error where the model has no chat template.
  EvalCases(const DescribedModel& model, const EvalCaseOptions& options);

  // Error for a template without a generation prompt. The answer is the last turn of a conversation, the chosen one of
  // a pair, or a judged one that was wanted. Rows that are no question are dropped with the reason.
  std::optional<EvalCase> make(const Row& row, DroppedRows& dropped);

  int64_t cut() const { return cut_; }  // cases whose known answer was cut at the cutoff
  // Whether letters cannot be told apart by one token, so that multiple choice is not counted.
  bool letters_unknown() const { return letters_unknown_; }

 private:
  std::string render(const OrderedJson& messages, const OrderedJson& tools, bool prompt) const;
  std::string common_head(const OrderedJson& before, const OrderedJson& tools, const std::string& prompt,
                          const std::string& whole) const;
  size_t answer_begin(const std::string& whole, const std::string& head,
                      const std::vector<TokenId>& ids) const;
  void check_prompt(const OrderedJson& answer, const OrderedJson& before, const OrderedJson& tools,
                    std::string_view rest) const;
  void add_end(std::vector<TokenId>& ids) const;
  void add_letters(const Row& row, EvalCase& out);

  const DescribedModel& model_;
  EvalCaseOptions options_;
  ChatTemplate template_;
  int64_t cut_ = 0;
  bool letters_unknown_ = false;
};

}  // namespace kt::inline cli
