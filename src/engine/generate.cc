#include "engine/generate.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "engine/detokenizer.h"
#include "engine/stop_matcher.h"

namespace kt {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr int kPrefillTokens = 512;  // of one step

}  // namespace

Generation generate(LoadedModel& model, std::vector<int32_t> prompt, const GenerateOptions& options,
                    const std::function<void(std::string_view)>& emit) {
  const ModelSpec& spec = model.spec();
  const int length = static_cast<int>(prompt.size());
  if (length == 0) fail("the prompt is empty");
  if (length >= spec.context)
    fail("the prompt has {} tokens; the model's context of {} leaves no room for an answer", length,
         spec.context);
  const int most = std::min(options.max_tokens, spec.context - length);
  if (most < 1) fail("max_tokens: expected at least 1, got {}", options.max_tokens);
  const int pages = (length + most + kPageTokens - 1) / kPageTokens;
  KvCache cache(model.transformer().kv_shape(), pages);
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (int i = 0; i < pages; ++i) table[static_cast<size_t>(i)] = i;

  Generation out{.prompt = std::move(prompt), .finish = "length"};
  std::vector<float> logits(static_cast<size_t>(spec.vocab));
  const auto step = [&](std::span<const int32_t> tokens, int position) {
    const SequenceInput input{.tokens = tokens, .position = position, .pages = table.data()};
    model.transformer().forward(cache, {&input, 1}, logits.data());
  };
  const auto start = Clock::now();
  for (int at = 0; at < length; at += kPrefillTokens)
    step(std::span(out.prompt)
             .subspan(static_cast<size_t>(at), static_cast<size_t>(std::min(kPrefillTokens, length - at))),
         at);
  out.prefill_seconds = seconds_since(start);

  Sampler sampler(options.sampling, out.prompt);
  Detokenizer detokenizer(model.tokenizer());
  StopMatcher stops(options.stops);
  const auto show = [&](std::string_view text) {
    out.text += text;
    if (emit && !text.empty()) emit(text);
  };
  const auto first = Clock::now();
  for (int i = 0; i < most; ++i) {
    const int32_t id = sampler.pick(logits).id;
    const auto& ends = model.end_ids();
    if (!options.ignore_end && std::find(ends.begin(), ends.end(), id) != ends.end()) {
      out.finish = "stop";
      break;
    }
    out.tokens.push_back(id);
    const StopMatcher::Result piece = stops.push(detokenizer.push(id));
    show(piece.text);
    if (piece.stop) {
      out.finish = "stop";
      out.decode_seconds = seconds_since(first);
      return out;
    }
    if (i + 1 < most) step(std::span(&out.tokens.back(), 1), length + i);
  }
  out.decode_seconds = seconds_since(first);
  show(stops.push(detokenizer.flush()).text);
  show(stops.flush());
  return out;
}

}  // namespace kt
