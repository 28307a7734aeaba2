#include "server/metrics.h"

#include <algorithm>
#include <charconv>

#include "base/text.h"

namespace kt::inline server {
namespace {

std::string shortest(double value) {
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value);
  return {buffer, end.ptr};
}

}  // namespace

void MetricsText::head(std::string_view name, std::string_view help, std::string_view type) {
  text_ += text("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
}

void MetricsText::sample(std::string_view name, std::string_view labels, double value) {
  text_ += text("{}{} {}\n", name, labels, shortest(value));
}

void MetricsText::counter(std::string_view name, std::string_view help, double value) {
  head(name, help, "counter");
  sample(name, "", value);
}

void MetricsText::gauge(std::string_view name, std::string_view help, double value) {
  head(name, help, "gauge");
  sample(name, "", value);
}

void Histogram::add(double seconds) {
  const auto bound = std::ranges::lower_bound(kBounds, seconds);
  ++counts_[static_cast<size_t>(bound - kBounds.begin())];
  sum_ += seconds;
}

void Histogram::write(MetricsText& out, std::string_view name, std::string_view help) const {
  out.head(name, help, "histogram");
  uint64_t below = 0;
  const std::string bucket = std::string(name) + "_bucket";
  for (size_t i = 0; i < kBounds.size(); ++i) {
    below += counts_[i];
    out.sample(bucket, text("{{le=\"{}\"}}", shortest(kBounds[i])), static_cast<double>(below));
  }
  below += counts_.back();
  out.sample(bucket, "{le=\"+Inf\"}", static_cast<double>(below));
  out.sample(std::string(name) + "_sum", "", sum_);
  out.sample(std::string(name) + "_count", "", static_cast<double>(below));
}

void RequestMetrics::count_reply(int status) {
  const std::lock_guard lock(mutex_);
  ++replies_[status];
}

void RequestMetrics::count_end(const Finish& finish) {
  const std::lock_guard lock(mutex_);
  ++finishes_[std::string(name_of(finish.reason))];
  prompt_tokens_ += static_cast<uint64_t>(finish.prompt_tokens);
  output_tokens_ += static_cast<uint64_t>(finish.output_tokens);
  cached_tokens_ += static_cast<uint64_t>(finish.cached_tokens);
  if (finish.output_tokens == 0) return;
  first_token_.add(finish.seconds_to_first);
  whole_.add(finish.seconds);
  if (finish.output_tokens > 1)
    per_token_.add((finish.seconds - finish.seconds_to_first) / (finish.output_tokens - 1));
}

uint64_t RequestMetrics::requests() const {
  const std::lock_guard lock(mutex_);
  uint64_t sum = 0;
  for (const auto& [reason, count] : finishes_) sum += count;
  return sum;
}

void RequestMetrics::write(MetricsText& out) const {
  const std::lock_guard lock(mutex_);
  out.head("kt_http_replies_total", "Replies by status; 499: the client left before.", "counter");
  for (const auto& [status, count] : replies_)
    out.sample("kt_http_replies_total", text("{{status=\"{}\"}}", status), static_cast<double>(count));
  out.head("kt_generations_total", "Answers that ended, by reason.", "counter");
  for (const auto& [reason, count] : finishes_)
    out.sample("kt_generations_total", text("{{reason=\"{}\"}}", reason), static_cast<double>(count));
  const auto total = [&](std::string_view name, std::string_view help, uint64_t value) {
    out.counter(name, help, static_cast<double>(value));
  };
  total("kt_prompt_tokens_total", "Tokens of prompts.", prompt_tokens_);
  total("kt_prompt_tokens_cached_total", "Tokens of prompts found in the cache.", cached_tokens_);
  total("kt_generated_tokens_total", "Tokens generated.", output_tokens_);
  first_token_.write(out, "kt_time_to_first_token_seconds", "From submission to the first token.");
  per_token_.write(out, "kt_time_per_output_token_seconds", "Between tokens, the mean of an answer.");
  whole_.write(out, "kt_request_seconds", "From submission to the last token.");
}

}  // namespace kt::inline server
