// Counts and distributions of a server's requests, as Prometheus reads them. Any thread.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "engine/scheduler.h"

namespace kt::inline server {

// Prometheus text, name by name.
class MetricsText {
 public:
  void counter(std::string_view name, std::string_view help, double value);
  void gauge(std::string_view name, std::string_view help, double value);
  // A name whose samples carry labels, such as {path="/health"}.
  void head(std::string_view name, std::string_view help, std::string_view type);
  void sample(std::string_view name, std::string_view labels, double value);
  const std::string& str() const { return text_; }

 private:
  std::string text_;
};

// Counts below fixed bounds, and the sum.
class Histogram {
 public:
  void add(double seconds);
  void write(MetricsText& out, std::string_view name, std::string_view help) const;

 private:
  static constexpr std::array<double, 16> kBounds{0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
                                                  0.1,    0.2,    0.5,   1,     2,     5,    20,   60};
  std::array<uint64_t, kBounds.size() + 1> counts_{};
  double sum_ = 0;
};

// Counted like a status where a client went before its answer was whole; as other servers' logs have it.
inline constexpr int kClientLeft = 499;

class RequestMetrics {
 public:
  void count_reply(int status);
  void count_end(const Finish& finish);
  void write(MetricsText& out) const;
  uint64_t requests() const;  // generations that ended

 private:
  mutable std::mutex mutex_;
  std::map<int, uint64_t> replies_;           // by status
  std::map<std::string, uint64_t> finishes_;  // by reason
  uint64_t prompt_tokens_ = 0, output_tokens_ = 0, cached_tokens_ = 0;
  Histogram first_token_, per_token_, whole_;
};

}  // namespace kt::inline server
