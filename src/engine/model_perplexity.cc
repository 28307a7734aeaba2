#include "engine/model_perplexity.h"

#include <algorithm>

#include "base/error.h"
#include "engine/calibration/dataset_files.h"
#include "engine/calibration/document_tokens.h"
#include "engine/calibration/sample_rows.h"

namespace kt::inline engine {
namespace {

// The logits of one window after the other, from a runner whose cache holds one.
class Window {
 public:
  Window(LoadedModel& model, const PerplexityOptions& options)
      : runner_(model.make_runner(pages_of(model, options.context))),
        logits_(options.chunk * static_cast<size_t>(runner_->vocabulary())) {
    for (int i = 0; i < runner_->cache_pages(); ++i) pages_.push_back(i);
  }

  std::span<const float> operator()(std::span<const TokenId> window, size_t first, size_t count) {
    const StepSequence sequence{.tokens = window.subspan(first, count),
                                .position = static_cast<int>(first),
                                .pages = pages_,
                                .logits = StepSequence::Logits::kAll,
                                .slot = runner_->state_slots() > 0 ? 0 : -1,
                                .adapter = runner_->adapters() - 1};
    const auto rows = std::span(logits_).first(count * static_cast<size_t>(runner_->vocabulary()));
    runner_->step({&sequence, 1}, rows);
    return rows;
  }

 private:
  static int pages_of(const LoadedModel& model, size_t context) {
    if (context > static_cast<size_t>(model.spec().context))
      fail("`context`: {} has a context of {}, got {}", model.path(), model.spec().context, context);
    return static_cast<int>((context + kPageTokens - 1) / kPageTokens);
  }

  std::unique_ptr<Runner> runner_;
  std::vector<int32_t> pages_;
  std::vector<float> logits_;
};

}  // namespace

std::vector<TokenId> file_tokens(const DescribedModel& model, const std::string& path, TokenId end,
                                 std::string_view separator, size_t most) {
  std::vector<TokenId> out;
  const auto add = [&](const std::vector<TokenId>& tokens) {
    out.insert(out.end(), tokens.begin(), tokens.end());
  };
  const std::vector<TextFile> files(1, TextFile(path));
  if (dataset_kind(path) == DatasetKind::kRows) {
    const SampleRows rows(model);
    TextLineReader lines(files.front());
    for (TextLine line; out.size() < most && lines.next(line);) {
      const std::vector<TokenId> tokens = rows.tokens(line.text, text("{} line {}", path, line.number));
      if (tokens.empty()) continue;
      add(tokens);
      if (tokens.back() != end) out.push_back(end);
    }
  } else {
    DocumentTokens documents(model.tokenizer(), files, end, separator);
    while (out.size() < most && documents.next()) add(documents.tokens());
  }
  out.resize(std::min(out.size(), most));
  return out;
}

Divergence measure_models(std::span<const TokenId> tokens, LoadedModel& model, LoadedModel* reference,
                          const MeasureOptions& options) {
  const auto show = [&](size_t done, size_t all) {
    if (options.show) options.show(done, all);
    return true;
  };
  PerplexityOptions windows = options.windows;
  windows.on_window = show;
  windows.chunk = std::min(windows.chunk, static_cast<size_t>(model.max_tokens()));
  Pool pool({.threads = options.threads});
  Window window(model, windows);
  if (!reference) return {.model = measure_perplexity(tokens, window, windows, &pool), .reference = {}};
  Window other(*reference, windows);
  return measure_divergence(tokens, other, window, windows, &pool);
}

}  // namespace kt::inline engine
