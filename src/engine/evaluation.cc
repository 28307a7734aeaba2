#include "engine/evaluation.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "base/error.h"

namespace kt::inline engine {
namespace {

// Only the choices can come: the one with the highest logit is taken.
class OneOf : public TokenConstraint {
 public:
  explicit OneOf(const std::vector<TokenId>& choices) : choices_(choices) {}
  void mask(std::span<float> logits) override {
    std::vector<float> kept;
    for (const TokenId id : choices_) kept.push_back(logits[static_cast<size_t>(id)]);
    std::ranges::fill(logits, -std::numeric_limits<float>::infinity());
    for (size_t i = 0; i < choices_.size(); ++i) logits[static_cast<size_t>(choices_[i])] = kept[i];
  }
  void accept(TokenId) override {}

 private:
  std::vector<TokenId> choices_;
};

class Evaluation {
 public:
  Evaluation(StepModel& model, const Tokenizer& tokenizer, const std::vector<EvaluationCase>& cases,
             const EvaluationOptions& options, const std::function<void(EvaluationAnswer)>& on_answer)
      : cases_(cases),
        options_(options),
        on_answer_(on_answer),
        scheduler_(model, &tokenizer, {.step_tokens = options.step_tokens, .sequences = options.sequences}) {}

  void run(const std::atomic<bool>& stop) {
    while (true) {
      while (!stop && next_ < cases_.size() && open_ < options_.sequences) begin(next_++);
      if (stop) {
        stopped_ = true;
        scheduler_.cancel_all();
      }
      if (!scheduler_.run_once() && (stop || next_ == cases_.size())) break;
      if (failed_ && !stop) throw Error(failed_->error_kind, failed_->error);
    }
  }

 private:
  // What is asked about one case, one after the other: the later requests find the prompt in the cache.
  struct Open {
    EvaluationAnswer answer;
    enum class Step { kGenerate, kScore, kChoose, kDone } step = Step::kGenerate;
  };

  void begin(size_t index) {
    ++open_;
    const auto open = std::make_shared<Open>();
    open->answer.index = index;
    go_on(open);
  }

  const EvaluationCase& case_of(const Open& open) const { return cases_[open.answer.index]; }

  // Submits the next request about it that there is; the last one over, it is answered.
  void go_on(const std::shared_ptr<Open>& open) {
    const EvaluationCase& one = case_of(*open);
    using Step = Open::Step;
    const Step step = open->step;
    if (step == Step::kDone) {
      --open_;
      return on_answer_(std::move(open->answer));
    }
    open->step = static_cast<Step>(static_cast<int>(step) + 1);
    GenerateRequest request;
    if (step == Step::kGenerate && options_.generate)
      request = generating(one, open->answer.index);
    else if (step == Step::kScore && one.whole.size() > one.answer_begins)
      request = {.prompt = one.whole,
                 .max_tokens = 0,
                 .prompt_logprobs = 0,
                 .prompt_logprobs_from = one.answer_begins};
    else if (step == Step::kChoose && !one.choices.empty())
      request = {.prompt = one.prompt,
                 .max_tokens = 1,
                 .sampling = {.temperature = 0},
                 .constraint = std::make_shared<OneOf>(one.choices)};
    else
      return go_on(open);
    request.adapter = options_.adapter;
    request.on_event = [this, open, step](const GenerateEvent& event) { take(open, step, event); };
    scheduler_.submit(std::move(request));
  }

  GenerateRequest generating(const EvaluationCase& one, size_t index) const {
    int most = options_.max_tokens;
    if (options_.longest > 0) most = std::min(most, options_.longest - static_cast<int>(one.prompt.size()));
    GenerateRequest out{.prompt = one.prompt,
                        .max_tokens = std::max(1, most),
                        .sampling = options_.sampling,
                        .end_tokens = options_.end_tokens};
    out.sampling.seed += index;
    return out;
  }

  void take(const std::shared_ptr<Open>& open, Open::Step step, const GenerateEvent& event) {
    EvaluationAnswer& answer = open->answer;
    for (const SampledToken& token : event.prompt) answer.nll -= *token.logprob;
    answer.scored += static_cast<int64_t>(event.prompt.size());
    if (step == Open::Step::kGenerate) {
      answer.text += event.text;
      answer.tokens += event.token != nullptr;
    } else if (step == Open::Step::kChoose && event.token) {
      const auto& choices = case_of(*open).choices;
      answer.choice = static_cast<size_t>(std::ranges::find(choices, event.token->id) - choices.begin());
    }
    if (!event.finish) return;
    if (event.finish->reason == FinishReason::kError && !failed_) failed_ = *event.finish;
    if (stopped_ || failed_) return;
    if (step == Open::Step::kGenerate) answer.cut = event.finish->reason == FinishReason::kLength;
    go_on(open);
  }

  const std::vector<EvaluationCase>& cases_;
  const EvaluationOptions& options_;
  const std::function<void(EvaluationAnswer)>& on_answer_;
  size_t next_ = 0;
  int open_ = 0;
  bool stopped_ = false;
  std::optional<Finish> failed_;
  Scheduler scheduler_;
};

}  // namespace

void evaluate(StepModel& model, const Tokenizer& tokenizer, const std::vector<EvaluationCase>& cases,
              const EvaluationOptions& options, const std::function<void(EvaluationAnswer)>& on_answer,
              const std::atomic<bool>& stop) {
  Evaluation(model, tokenizer, cases, options, on_answer).run(stop);
}

}  // namespace kt::inline engine
