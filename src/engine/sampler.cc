#include "engine/sampler.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"

namespace kt::inline engine {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kMostLogprobs = 1000;
// exp(-60) of 10^6 tokens is below the resolution of a draw, 2^-53: such tokens cannot be drawn, and leaving
// them out spares their exponentials.
constexpr double kNegligible = -60;
constexpr double kLeastExponent = -700;  // of exponential()

void check_range(std::string_view name, double value, bool inside, std::string_view range) {
  if (!inside) fail("{}: expected a number {}, got {}", name, range, value);  // NaN is inside nothing
}

// The finaliser of splitmix64: a bijection in which every output bit depends on every input bit.
uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// e^x for x in [-700, 0], within 2 units in the last place, in basic arithmetic only: the same bits, and so
// the same tokens, with every C library and on every machine. e^x = 2^k e^r with |r| <= log(2) / 2; the
// series to r^12 leaves 2e-16 of it.
inline double exponential(double x) {
  constexpr double kShift = 0x1.8p52;  // adding it rounds to an integer
  const double shifted = x * 0x1.71547652b82fep+0 + kShift;
  const double k = shifted - kShift;
  const double r = (x - k * 0x1.62e42fefap-1) - k * 0x1.cf79abc9e3b39p-40;
  // In pairs of powers: a chain of twelve products would wait for each other.
  const double r2 = r * r, r4 = r2 * r2, r8 = r4 * r4;
  const double low = (1 + r) + r2 * (1.0 / 2 + r * (1.0 / 6));
  const double middle = (1.0 / 24 + r * (1.0 / 120)) + r2 * (1.0 / 720 + r * (1.0 / 5040));
  const double high = (1.0 / 40320 + r * (1.0 / 362880)) + r2 * (1.0 / 3628800 + r * (1.0 / 39916800));
  const double sum = (low + r4 * middle) + r8 * (high + r4 * (1.0 / 479001600));
  return sum * std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) + 1023) << 52);  // k is in low bits
}

// Lanes of a fixed number, which the compiler turns into vectors.
constexpr size_t kLanes = 8;
using Lanes = std::array<double, kLanes>;
inline void exponentials(Lanes& x) {
  for (double& lane : x) lane = exponential(lane);
}

// The value of the k-th highest logit.
float kth_highest(std::span<const float> logits, size_t k, std::vector<float>& scratch) {
  // A heap of the k best so far: most logits fail the first comparison.
  if (k <= 256) {
    scratch.assign(logits.begin(), logits.begin() + static_cast<ptrdiff_t>(k));
    std::ranges::make_heap(scratch, std::greater<>());
    for (float logit : logits.subspan(k)) {
      if (logit <= scratch.front()) continue;
      std::ranges::pop_heap(scratch, std::greater<>());
      scratch.back() = logit;
      std::ranges::push_heap(scratch, std::greater<>());
    }
    return scratch.front();
  }
  scratch.assign(logits.begin(), logits.end());
  const auto kth = scratch.begin() + static_cast<ptrdiff_t>(k - 1);
  std::ranges::nth_element(scratch, kth, std::greater<>());
  return *kth;
}

// The `count` best with their logprobs.
std::vector<TokenLogprob> best_logprobs(std::span<const float> logits, double log_sum, int count,
                                        std::vector<float>& scratch) {
  const size_t most = std::min(static_cast<size_t>(count), logits.size());
  std::vector<TokenLogprob> top;
  if (most == 0) return top;
  const float lowest = kth_highest(logits, most, scratch);
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] >= lowest) top.push_back({static_cast<TokenId>(i), logits[i] - log_sum});
  std::ranges::sort(top, [](const TokenLogprob& a, const TokenLogprob& b) {
    return a.logprob != b.logprob ? a.logprob > b.logprob : a.id < b.id;
  });
  top.resize(most);
  return top;
}

}  // namespace

void check_sampling(const SamplingOptions& options) {
  const auto within = [](double x, double low, double high) { return x >= low && x <= high; };
  const double most = std::numeric_limits<double>::max();
  check_range("temperature", options.temperature, within(options.temperature, 0, most), "of at least 0");
  check_range("top_k", options.top_k, options.top_k >= -1, "of at least 0, or -1 for all");
  check_range("top_p", options.top_p, options.top_p > 0 && options.top_p <= 1, "in (0, 1]");
  check_range("min_p", options.min_p, within(options.min_p, 0, 1), "in [0, 1]");
  check_range("repetition_penalty", options.repetition_penalty,
              options.repetition_penalty > 0 && options.repetition_penalty <= most, "above 0");
  check_range("presence_penalty", options.presence_penalty, within(options.presence_penalty, -2, 2),
              "in [-2, 2]");
  check_range("frequency_penalty", options.frequency_penalty, within(options.frequency_penalty, -2, 2),
              "in [-2, 2]");
  for (const auto& [id, bias] : options.logit_bias)
    if (!within(bias, -100, 100))
      fail("logit_bias: expected numbers in [-100, 100], got {} for token {}", bias, id);
  const int logprobs = options.logprobs.value_or(0);
  if (logprobs < 0 || logprobs > kMostLogprobs)
    fail("logprobs: expected a number in [0, {}], got {}", kMostLogprobs, logprobs);
}

double uniform(uint64_t seed, uint64_t index) {
  // Two rounds, so that neighbouring seeds are not the same stream shifted.
  const uint64_t start = mixed(seed + 0x9E3779B97F4A7C15u);
  const uint64_t bits = mixed(mixed(start + (index + 1) * 0x9E3779B97F4A7C15u) ^ start);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

float highest_logit(std::span<const float> logits) {
  // Lanes without branches, because this pass over all logits is most of what greedy picking costs.
  constexpr size_t kWide = 16;
  std::array<float, kWide> lanes;
  lanes.fill(-kInfinity);
  std::array<uint32_t, kWide> strange{};
  const auto take = [&](size_t lane, float logit) {
    strange[lane] |= !(logit < kInfinity);
    lanes[lane] = lanes[lane] < logit ? logit : lanes[lane];
  };
  const size_t whole = logits.size() / kWide * kWide;
  for (size_t i = 0; i < whole; i += kWide)
    for (size_t lane = 0; lane < kWide; ++lane) take(lane, logits[i + lane]);
  for (size_t i = whole; i < logits.size(); ++i) take(i - whole, logits[i]);
  const float highest = *std::ranges::max_element(lanes);
  const bool number = std::ranges::count(strange, 0u) == kWide;
  if (number && highest > -kInfinity) return highest;
  for (size_t i = 0; i < logits.size(); ++i)
    if (!(logits[i] < kInfinity))
      fail("logits: {} for token {} of {}", std::isnan(logits[i]) ? "NaN" : "+inf", i, logits.size());
  if (logits.empty()) fail("logits: none");
  fail("logits: all {} are -inf", logits.size());
}

double log_sum_exp(std::span<const float> logits, float highest) {
  double sum = 0;
  for (size_t i = 0; i < logits.size(); i += kLanes) {
    const size_t count = std::min(kLanes, logits.size() - i);
    Lanes lanes;
    lanes.fill(kLeastExponent);
    for (size_t lane = 0; lane < count; ++lane)
      lanes[lane] = std::max(static_cast<double>(logits[i + lane]) - highest, kLeastExponent);
    exponentials(lanes);
    for (double lane : lanes) sum += lane;
  }
  return highest + std::log(sum);
}

SampledToken scored_token(std::span<const float> logits, TokenId id, int top) {
  const double log_sum = log_sum_exp(logits, highest_logit(logits));
  std::vector<float> scratch;
  return {.id = id,
          .logprob = logits[static_cast<size_t>(id)] - log_sum,
          .top = best_logprobs(logits, log_sum, top, scratch)};
}

Sampler::Sampler(const SamplingOptions& options, std::span<const TokenId> prompt) : options_(options) {
  check_sampling(options);
  penalises_ = options.repetition_penalty != 1 || options.presence_penalty != 0 ||
               options.frequency_penalty != 0 || !options.logit_bias.empty();
  if (options.repetition_penalty != 1)
    for (TokenId id : prompt) output_counts_.emplace(id, 0);
}

SampledToken Sampler::pick(std::span<float> logits, TokenConstraint* constraint) {
  float highest = highest_logit(logits);
  SampledToken result;
  double log_sum = 0;
  std::vector<float> said;  // a penalty may change the logit of the token that is chosen
  if (options_.logprobs) {
    log_sum = log_sum_exp(logits, highest);
    result.top = best_logprobs(logits, log_sum, *options_.logprobs, scratch_);
    if (penalises_) said.assign(logits.begin(), logits.end());
  }
  if (constraint) constraint->mask(logits);
  if (penalises_) penalise(logits);
  if (constraint || penalises_) highest = highest_logit(logits);  // an extreme penalty may overflow
  result.id = options_.temperature == 0
                  ? static_cast<TokenId>(std::ranges::find(logits, highest) - logits.begin())
                  : draw(logits, highest);
  if (options_.logprobs) {
    const auto index = static_cast<size_t>(result.id);
    result.logprob = (penalises_ ? said[index] : logits[index]) - log_sum;
  }
  ++picked_;
  if (penalises_) ++output_counts_[result.id];
  return result;
}

void Sampler::penalise(std::span<float> logits) const {
  for (const auto& [id, bias] : options_.logit_bias) {
    if (id < 0 || static_cast<size_t>(id) >= logits.size())
      fail("logit_bias: token {} is outside the vocabulary of {}", id, logits.size());
    logits[static_cast<size_t>(id)] += static_cast<float>(bias);
  }
  const auto repetition = static_cast<float>(options_.repetition_penalty);
  for (const auto& [id, count] : output_counts_) {
    if (id < 0 || static_cast<size_t>(id) >= logits.size())
      fail("token {} of the prompt is outside the vocabulary of {}", id, logits.size());
    float& logit = logits[static_cast<size_t>(id)];
    logit = logit > 0 ? logit / repetition : logit * repetition;
    if (count == 0) continue;
    logit -= static_cast<float>(options_.frequency_penalty * count);
    logit -= static_cast<float>(options_.presence_penalty);
  }
}

// Fills candidates_ with what temperature, top-k and (where it may come early) min-p leave, by rising id.
void Sampler::collect(std::span<const float> logits, float highest) {
  float lowest = -kInfinity;  // of the logits that stay
  if (options_.top_k > 0 && static_cast<size_t>(options_.top_k) < logits.size())
    lowest = kth_highest(logits, static_cast<size_t>(options_.top_k), scratch_);
  // Probabilities fall with logits, so the bound of min-p is one of logits. With top-p it waits: what it
  // takes away would no longer count in the sum of probabilities.
  double least = kNegligible;
  if (options_.min_p > 0 && options_.top_p == 1) least = std::max(least, std::log(options_.min_p));
  // Most logits fail a comparison with a bound that lies a rounding error too low; the rest is scaled.
  const double bound = highest + least * options_.temperature * (1 + 1e-9) - 1e-6;
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] < lowest || logits[i] < bound) continue;
    const double scaled = (static_cast<double>(logits[i]) - highest) / options_.temperature;
    if (scaled >= least) candidates_.push_back({static_cast<TokenId>(i), scaled});
  }
  for (size_t i = 0; i < candidates_.size(); i += kLanes) {
    const size_t count = std::min(kLanes, candidates_.size() - i);
    Lanes lanes{};
    for (size_t lane = 0; lane < count; ++lane) lanes[lane] = candidates_[i + lane].scaled;
    exponentials(lanes);
    for (size_t lane = 0; lane < count; ++lane) candidates_[i + lane].weight = lanes[lane];
  }
}

// Keeps the fewest most probable candidates that hold top_p of the sum. Sums over slices of logits find the
// slice in which that sum is reached; only its candidates are sorted.
void Sampler::keep_top_p() {
  constexpr size_t kSlices = 2048;
  std::array<double, kSlices> sums{};
  const auto slice_of = [](const Candidate& candidate) {
    return std::min(static_cast<size_t>(candidate.scaled * (kSlices / kNegligible)), kSlices - 1);
  };
  for (const Candidate& candidate : candidates_) sums[slice_of(candidate)] += candidate.weight;
  const double enough = options_.top_p * std::accumulate(sums.begin(), sums.end(), 0.0);
  double held = 0;
  size_t last = 0;
  while (last + 1 < kSlices && held + sums[last] < enough) held += sums[last++];

  std::vector<Candidate> edge;
  for (const Candidate& candidate : candidates_)
    if (slice_of(candidate) == last) edge.push_back(candidate);
  std::erase_if(candidates_, [&](const Candidate& candidate) { return slice_of(candidate) >= last; });
  std::ranges::sort(edge, [](const Candidate& a, const Candidate& b) {
    return a.scaled != b.scaled ? a.scaled > b.scaled : a.id < b.id;
  });
  for (const Candidate& candidate : edge) {
    if (held >= enough) break;
    held += candidate.weight;
    candidates_.push_back(candidate);
  }
}

TokenId Sampler::draw(std::span<const float> logits, float highest) {
  collect(logits, highest);
  if (options_.top_p < 1) {
    keep_top_p();
    // The most probable token weighs 1.
    if (options_.min_p > 0)
      std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < options_.min_p; });
  }
  double sum = 0;
  for (const Candidate& candidate : candidates_) sum += candidate.weight;
  double left = uniform(options_.seed, picked_) * sum;
  for (const Candidate& candidate : candidates_) {
    left -= candidate.weight;
    if (left < 0) return candidate.id;
  }
  return candidates_.back().id;  // rounding
}

}  // namespace kt::inline engine
