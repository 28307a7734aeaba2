#include "text/grammar/schema_numbers.h"

#include <map>
#include <numeric>
#include <optional>

#include "base/error.h"

namespace kt::inline texts {
namespace {

using Json = nlohmann::ordered_json;
constexpr int64_t kMostDivisor = 1000;
constexpr int kMostScale = 9;  // decimals of multipleOf

// A bound as a decimal: [-]whole.fraction without needless zeros.
struct Decimal {
  bool negative = false;
  std::string whole = "0", fraction = {};
  bool exclusive = false;
  bool zero() const { return whole == "0" && fraction.empty(); }
};

Decimal decimal_of(const Json& number, const std::string& path) {
  if (!number.is_number()) fail("{}: expected a number", path);
  const std::string dumped = number.dump();
  std::string digits;
  int64_t point = 0;  // digits before it
  bool after_point = false;
  Decimal out{.negative = dumped[0] == '-'};
  size_t at = out.negative;
  for (; at < dumped.size() && dumped[at] != 'e' && dumped[at] != 'E'; ++at) {
    after_point |= dumped[at] == '.';
    if (dumped[at] == '.') continue;
    digits += dumped[at];
    point += !after_point;
  }
  if (at < dumped.size()) point += std::stol(dumped.substr(at + 1));
  if (digits.find_first_not_of('0') == std::string::npos) return {};
  if (point < 0) digits = std::string(static_cast<size_t>(-point), '0').append(digits);
  if (point > std::ssize(digits)) digits.append(static_cast<size_t>(point) - digits.size(), '0');
  point = std::max<int64_t>(point, 0);
  out.whole = digits.substr(0, static_cast<size_t>(point));
  out.fraction = digits.substr(static_cast<size_t>(point));
  out.whole.erase(0, std::min(out.whole.find_first_not_of('0'), out.whole.size()));
  out.fraction.erase(out.fraction.find_last_not_of('0') + 1);
  if (out.whole.empty()) out.whole.push_back('0');  // g++ 12 warns of = "0"
  if (out.zero()) out.negative = false;
  return out;
}

// -1, 0, 1 as sizes without signs compare.
int compared_sizes(const Decimal& a, const Decimal& b) {
  if (a.whole.size() != b.whole.size()) return a.whole.size() < b.whole.size() ? -1 : 1;
  const int whole = a.whole.compare(b.whole);
  const int order = whole != 0 ? whole : a.fraction.compare(b.fraction);
  return order < 0 ? -1 : order > 0;
}

int compared(const Decimal& a, const Decimal& b) {
  if (a.negative != b.negative) return a.negative ? -1 : 1;
  return a.negative ? -compared_sizes(a, b) : compared_sizes(a, b);
}

// The stricter of `plain` and `exclusive`, if any is there; sign -1 for lower bounds, 1 for upper ones.
std::optional<Decimal> bound_of(const Json& schema, const char* plain, const char* exclusive, int sign,
                                const std::string& path) {
  std::optional<Decimal> bound;
  if (schema.contains(plain)) bound = decimal_of(schema.at(plain), text("{}.{}", path, plain));
  if (!schema.contains(exclusive)) return bound;
  Decimal other = decimal_of(schema.at(exclusive), text("{}.{}", path, exclusive));
  other.exclusive = true;
  if (bound && compared(other, *bound) * sign > 0) return bound;
  return other;
}

// Multiples of divisor / 10^scale.
struct Steps {
  int64_t divisor = 1;
  int scale = 0;
};

Steps steps_of(const Json& schema, bool whole, const std::string& path) {
  if (!schema.contains("multipleOf")) return {1, whole ? 0 : kMostFraction};
  const std::string place = path + ".multipleOf";
  const Decimal step = decimal_of(schema.at("multipleOf"), place);
  if (step.negative || step.zero()) fail("{}: expected a number above 0", place);
  Steps out{.scale = static_cast<int>(std::min<size_t>(step.fraction.size(), 100))};
  const std::string digits = step.whole + step.fraction;
  if (out.scale > kMostScale || digits.size() > 18)
    fail("{}: expected at most {} decimals and 18 digits", place, kMostScale);
  out.divisor = std::stoll(digits);
  if (whole) {
    int64_t unit = 1;
    for (int i = 0; i < out.scale; ++i) unit *= 10;
    out = {out.divisor / std::gcd(out.divisor, unit), 0};
  }
  if (out.divisor > kMostDivisor) fail("{}: not supported; {} is above {}", place, digits, kMostDivisor);
  return out;
}

// Numbers without sign from `low` to `high`, digit by digit. A digit string is tight to a bound as long as it
// is that bound's beginning; loose ones share their states.
class Magnitudes {
 public:
  Magnitudes(RuleBuilder& builder, StateId end, std::optional<Decimal> low, std::optional<Decimal> high,
             Steps steps)
      : builder_(builder), end_(end), low_(std::move(low)), high_(std::move(high)), steps_(steps) {}

  void add(StateId from) {
    const int longest = high_ ? static_cast<int>(high_->whole.size()) : kMostDigits;
    const int shortest = low_ ? static_cast<int>(low_->whole.size()) : 1;
    for (int length = shortest; length <= longest; ++length) {
      const Place place{.left = length,
                        .at_low = low_ && std::ssize(low_->whole) == length,
                        .at_high = high_ && std::ssize(high_->whole) == length};
      add_digits(from, place, length > 1 ? 1 : 0);
    }
  }

 private:
  struct Place {
    int left = 0;  // digits before the point; below 0: behind it
    bool at_low = false, at_high = false;
    int64_t rest = 0;  // of what was read, by the divisor
    auto operator<=>(const Place&) const = default;
  };

  // The digit of a bound that stands at a place.
  static int digit_of(const Decimal& bound, const Place& place) {
    const auto back = static_cast<size_t>(place.left);
    if (place.left > 0) return bound.whole[bound.whole.size() - back] - '0';
    const auto index = static_cast<size_t>(-place.left);
    return index < bound.fraction.size() ? bound.fraction[index] - '0' : 0;
  }

  void add_digits(StateId from, const Place& place, int least) {
    for (int digit = least; digit <= 9; ++digit) {
      const int low = place.at_low ? digit_of(*low_, place) : 0;
      const int high = place.at_high ? digit_of(*high_, place) : 9;
      if (digit < low || digit > high) continue;
      builder_.byte(from,
                    state_at({.left = place.left - 1,
                              .at_low = place.at_low && digit == low,
                              .at_high = place.at_high && digit == high,
                              .rest = (place.rest * 10 + digit) % steps_.divisor}),
                    static_cast<char>('0' + digit));
    }
  }

  // Where that many digits are left to read, or -left were read behind the point.
  StateId state_at(const Place& place) {
    const auto [found, is_new] = states_.emplace(place, 0);
    if (!is_new) return found->second;
    const StateId state = builder_.state();
    found->second = state;
    if (place.left > 0) {
      add_digits(state, place, 0);
      return state;
    }
    if (may_end(place)) builder_.empty(state, end_);
    if (-place.left >= steps_.scale) return state;
    add_digits(place.left == 0 ? builder_.bytes(state, ".") : state, place, 0);
    return state;
  }

  bool may_end(const Place& place) const {
    const auto read = static_cast<size_t>(-place.left);
    // Zeros follow, in thought.
    if (place.at_low && (low_->exclusive || read < low_->fraction.size())) return false;
    if (place.at_high && high_->exclusive && read >= high_->fraction.size()) return false;
    if (steps_.divisor == 1) return true;
    int64_t rest = place.rest;
    for (int i = static_cast<int>(read); i < steps_.scale; ++i) rest = rest * 10 % steps_.divisor;
    return rest == 0;
  }

  RuleBuilder& builder_;
  StateId end_;
  std::optional<Decimal> low_, high_;
  Steps steps_;
  std::map<Place, StateId> states_;
};

Decimal size_of(Decimal bound) {
  bound.negative = false;
  return bound;
}

void check_digits(const std::optional<Decimal>& bound, const std::string& path) {
  if (!bound) return;
  if (std::ssize(bound->whole) > kMostDigits)
    fail("{}: bounds beyond {} digits are not supported", path, kMostDigits);
  if (std::ssize(bound->fraction) >= kMostFraction)
    fail("{}: bounds with {} decimals are not supported", path, bound->fraction.size());
}

}  // namespace

StateId number_rule(RuleBuilder& builder, JsonRules& json, const Json& schema, bool whole,
                    const std::string& path) {
  std::optional<Decimal> low = bound_of(schema, "minimum", "exclusiveMinimum", -1, path);
  std::optional<Decimal> high = bound_of(schema, "maximum", "exclusiveMaximum", 1, path);
  // A bound that no number we write reaches is none.
  if (low && low->negative && std::ssize(low->whole) > kMostDigits) low.reset();
  if (high && !high->negative && std::ssize(high->whole) > kMostDigits) high.reset();
  if (!low && !high && !schema.contains("multipleOf")) return whole ? json.integer() : json.number();
  check_digits(low, path);
  check_digits(high, path);
  const Steps steps = steps_of(schema, whole, path);
  const StateId start = builder.state(), end = builder.state();
  builder.ends(end);
  if (low && high && compared(*low, *high) > 0) fail("{}: the minimum is above the maximum", path);
  if (!high || !high->negative) {
    const bool bounded = low && !low->negative;
    Magnitudes(builder, end, bounded ? low : std::nullopt, high, steps).add(start);
  }
  if (!low || low->negative) {
    const StateId minus = builder.bytes(start, "-");
    // Without a bound of its own, above 0: there is no need of "-0".
    Decimal nearest{.exclusive = true};
    if (high && high->negative) nearest = size_of(*high);
    Magnitudes(builder, end, nearest, low ? std::optional(size_of(*low)) : std::nullopt, steps).add(minus);
  }
  return start;
}

}  // namespace kt::inline texts
