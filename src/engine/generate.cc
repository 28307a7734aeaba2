#include "engine/generate.h"

#include <algorithm>
#include <exception>
#include <optional>

#include "base/checked.h"
#include "base/error.h"
#include "engine/scheduler.h"

namespace kt::inline engine {

Generation generate(LoadedModel& model, std::vector<int32_t> prompt, const GenerateOptions& options,
                    const std::function<void(std::string_view)>& emit) {
  if (prompt.size() >= static_cast<size_t>(model.spec().context))  // before a cache as large as the context
    fail("prompt: {} tokens leave no room for an answer in a context of {}", prompt.size(),
         model.spec().context);
  const auto most = std::min<int64_t>(static_cast<int64_t>(prompt.size()) + std::max(1, options.max_tokens),
                                      model.spec().context);
  const std::unique_ptr<Runner> runner =
      model.make_runner(static_cast<int>(ceil_div(most, int64_t{kPageTokens})));
  Scheduler scheduler(*runner, &model.tokenizer(), {.step_tokens = runner->max_tokens(), .sequences = 1});
  Generation out{.prompt = prompt};
  std::optional<Finish> finish;
  std::exception_ptr thrown;  // by emit; the scheduler ends a request whose caller throws
  GenerateRequest request{.prompt = std::move(prompt),
                          .max_tokens = options.max_tokens,
                          .sampling = options.sampling,
                          .stop = options.stops,
                          .adapter = options.adapter};
  if (!options.ignore_end) request.end_tokens = model.end_ids();
  request.on_event = [&](const GenerateEvent& event) {
    if (out.tokens.empty() && event.token) out.prefill_work = runner->totals().work;
    if (event.token && !(event.finish && event.finish->end_token)) out.tokens.push_back(event.token->id);
    out.text += event.text;
    if (event.finish) finish = *event.finish;
    if (!emit || event.text.empty()) return;
    try {
      emit(event.text);
    } catch (...) {
      thrown = std::current_exception();
      throw;
    }
  };
  scheduler.submit(std::move(request));
  while (scheduler.run_once()) {
  }
  if (thrown) std::rethrow_exception(thrown);
  KT_CHECK(finish, "a request without an end");
  if (finish->reason == FinishReason::kError) throw Error(finish->error_kind, finish->error);
  out.decode_work = runner->totals().work;
  out.decode_work -= out.prefill_work;
  if (const ExpertCounts* counts = runner->expert_counts()) out.experts = expert_use(*counts);
  out.finish = name_of(finish->reason);
  out.decode_steps = std::max(0, finish->output_tokens - 1);
  out.prefill_seconds = finish->seconds_to_first;
  out.decode_seconds = finish->seconds - finish->seconds_to_first;
  return out;
}

}  // namespace kt::inline engine
