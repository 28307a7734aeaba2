#include "engine/perplexity.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace kt {
namespace {

constexpr int kStep = 256;  // tokens of one forward: logits of all of them are kept

// ln of the probabilities of one row of logits, in double.
void log_softmax(std::span<const float> logits, std::vector<double>& out) {
  out.assign(logits.begin(), logits.end());
  const double top = *std::max_element(out.begin(), out.end());
  double sum = 0;
  for (const double x : out) sum += std::exp(x - top);
  const double log_sum = top + std::log(sum);
  if (!std::isfinite(log_sum)) fail("logits: not finite numbers");
  for (double& x : out) x -= log_sum;
}

// A model's cache for one window.
struct Window {
  LoadedModel& model;
  KvCache cache;
  std::vector<int32_t> pages;
  std::vector<float> logits;

  Window(LoadedModel& m, int context)
      : model(m), cache(m.transformer().kv_shape(), (context + kPageTokens - 1) / kPageTokens) {
    for (int i = 0; i < cache.pages(); ++i) pages.push_back(i);
    logits.resize(static_cast<size_t>(kStep) * static_cast<size_t>(m.spec().vocab));
  }
  void feed(std::span<const int32_t> tokens, int position) {
    const SequenceInput input{
        .tokens = tokens, .position = position, .pages = pages.data(), .all_logits = true};
    model.transformer().forward(cache, {&input, 1}, logits.data());
  }
  std::span<const float> row(int i) const {
    const auto vocab = static_cast<size_t>(model.spec().vocab);
    return std::span(logits).subspan(static_cast<size_t>(i) * vocab, vocab);
  }
};

}  // namespace

double PerplexityResult::perplexity() const {
  return tokens > 0 ? std::exp(nll / static_cast<double>(tokens)) : 0;
}
double PerplexityResult::mean_kl() const { return tokens > 0 ? kl / static_cast<double>(tokens) : 0; }

std::vector<int32_t> document_tokens(const Tokenizer& tokenizer, std::string_view text,
                                     std::string_view separator) {
  const auto end = tokenizer.id_of(separator);
  std::vector<int32_t> out;
  while (!text.empty()) {
    const size_t at = text.find(separator);
    std::string_view document = text.substr(0, at);
    text = at == std::string_view::npos ? std::string_view{} : text.substr(at + separator.size());
    while (!document.empty() && document.front() == '\n') document.remove_prefix(1);
    while (!document.empty() && document.back() == '\n') document.remove_suffix(1);
    if (document.empty()) continue;
    const std::vector<int32_t> ids = tokenizer.encode(document, {.special = SpecialText::kAsText});
    out.insert(out.end(), ids.begin(), ids.end());
    if (end) out.push_back(*end);
  }
  return out;
}

PerplexityResult measure_perplexity(LoadedModel& model, LoadedModel* other,
                                    const std::vector<int32_t>& tokens, const PerplexityOptions& options,
                                    const std::function<void(int64_t, int64_t)>& progress) {
  if (options.context < 1 || options.context > model.spec().context)
    fail("context: expected 1 to {}, got {}", model.spec().context, options.context);
  if (tokens.size() < 2) fail("the text has {} tokens; at least 2 are needed", tokens.size());
  if (other && other->spec().vocab != model.spec().vocab)
    fail("{} has a vocabulary of {}, {} of {}", model.path(), model.spec().vocab, other->path(),
         other->spec().vocab);
  int64_t all = static_cast<int64_t>(tokens.size()) - 1;
  if (options.max_tokens > 0) all = std::min<int64_t>(all, options.max_tokens);
  Window window(model, options.context);
  std::unique_ptr<Window> reference = other ? std::make_unique<Window>(*other, options.context) : nullptr;
  PerplexityResult result;
  std::vector<double> ours, theirs;
  for (int64_t start = 0; start < all; start += options.context) {
    const int count = static_cast<int>(std::min<int64_t>(options.context, all - start));
    for (int at = 0; at < count; at += kStep) {
      const int some = std::min(kStep, count - at);
      const auto inputs =
          std::span(tokens).subspan(static_cast<size_t>(start + at), static_cast<size_t>(some));
      window.feed(inputs, at);
      if (reference) reference->feed(inputs, at);
      for (int i = 0; i < some; ++i) {
        log_softmax(window.row(i), ours);
        result.nll -= ours[static_cast<size_t>(tokens[static_cast<size_t>(start + at + i + 1)])];
        if (!reference) continue;
        log_softmax(reference->row(i), theirs);
        for (size_t v = 0; v < ours.size(); ++v) result.kl += std::exp(theirs[v]) * (theirs[v] - ours[v]);
      }
      result.tokens += some;
      if (progress) progress(result.tokens, all);
    }
  }
  return result;
}

}  // namespace kt
