#include "text/yaml_plain.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <optional>

#include "base/text.h"
#include "text/shown.h"

namespace kt::inline texts {
namespace {

constexpr std::string_view kDigits = "0123456789", kDigitsAnd_ = "0123456789_", kSigns = "+-";

// What is left of a scalar while a pattern is matched against it.
struct Rest {
  std::string_view left;

  bool take_one_of(std::string_view set) {
    if (left.empty() || set.find(left[0]) == set.npos) return false;
    left.remove_prefix(1);
    return true;
  }
  bool take(std::string_view word) {
    if (!left.starts_with(word)) return false;
    left.remove_prefix(word.size());
    return true;
  }
  size_t take_all_of(std::string_view set) {
    const size_t count = std::min(left.find_first_not_of(set), left.size());
    left.remove_prefix(count);
    return count;
  }
  bool is_all_of(std::string_view set) const {
    return !left.empty() && left.find_first_not_of(set) == left.npos;
  }
};

bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool is_core_float(std::string_view word) {
  Rest rest{word};
  rest.take_one_of(kSigns);
  const size_t whole = rest.take_all_of(kDigits);
  const size_t fraction = rest.take_one_of(".") ? rest.take_all_of(kDigits) : 0;
  if (whole + fraction == 0) return false;
  if (rest.take_one_of("eE")) {
    rest.take_one_of(kSigns);
    if (rest.take_all_of(kDigits) == 0) return false;
  }
  return rest.left.empty();
}

// A number in YAML 1.1, which PyYAML reads: 1_000, 0b11, 1:30 (ninety), 1_0.5, +0x1F.
bool is_older_number(std::string_view word) {
  Rest rest{word};
  rest.take_one_of(kSigns);
  if (rest.take("0b")) return rest.is_all_of("01_");
  if (rest.take("0x")) return rest.is_all_of("0123456789abcdefABCDEF_");
  const bool starts_with_digit = rest.take_one_of(kDigits);
  rest.take_all_of(starts_with_digit ? kDigitsAnd_ : "");
  bool sixties = false;
  while (starts_with_digit && rest.take_one_of(":")) {
    sixties = true;
    const bool tens = rest.take_one_of("012345");
    if (!rest.take_one_of(kDigits) && !tens) return false;
  }
  if (rest.take_one_of(".")) {
    if (!starts_with_digit && !rest.take_one_of(kDigits)) return false;
    rest.take_all_of(kDigitsAnd_);
    if (!sixties && rest.take_one_of("eE") && !(rest.take_one_of(kSigns) && rest.take_all_of(kDigits) > 0))
      return false;
    return rest.left.empty();
  }
  // 08:30 is text to everybody.
  return rest.left.empty() && starts_with_digit &&
         !(sixties && word.find_first_of("0") == word.find_first_of(kDigits));
}

PlainScalar refuse(std::string_view word, std::string_view expected) {
  return {.refused = text("found {}, expected {}", shown(word), expected)};
}

PlainScalar integer(std::string_view word, std::string_view digits, int base) {
  const bool negative = digits[0] == '-';
  if (digits[0] == '+') digits.remove_prefix(1);
  const char* end = digits.data() + digits.size();
  // Without a sign it is unsigned, as in JSON.
  int64_t below = 0;
  uint64_t above = 0;
  const std::from_chars_result done = negative ? std::from_chars(digits.data(), end, below, base)
                                               : std::from_chars(digits.data(), end, above, base);
  if (done.ec != std::errc()) return refuse(word, "an integer of at most 64 bits");
  return {.value = negative ? Json(below) : Json(above)};
}

PlainScalar decimal(std::string_view word) {
  const std::string_view digits = word.substr(kSigns.find(word[0]) == kSigns.npos ? 0 : 1);
  if (digits.size() > 1 && digits[0] == '0')
    return refuse(word, "no zero in front: some readers take it for octal; write 0o17, 15 or quotes");
  return integer(word, word, 10);
}

PlainScalar floating(std::string_view word) {
  const std::string_view digits = word[0] == '+' ? word.substr(1) : word;
  double value = 0;
  const auto done = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (done.ec != std::errc()) return refuse(word, "a number in the range of a double");
  return {.value = value};
}

}  // namespace

PlainScalar read_plain(std::string_view word) {
  if (word.empty() || is_one_of(word, {"~", "null", "Null", "NULL"})) return {};
  if (is_one_of(word, {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"}))
    return {.value = true};
  if (is_one_of(word, {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"}))
    return {.value = false};
  const std::string_view unsigned_word = word.substr(kSigns.find(word[0]) == kSigns.npos ? 0 : 1);
  if (is_one_of(unsigned_word, {".inf", ".Inf", ".INF"}) || is_one_of(word, {".nan", ".NaN", ".NAN"}))
    return refuse(word, "a finite number, or quotes around text");
  if (Rest{unsigned_word}.is_all_of(kDigits)) return decimal(word);
  if (word.starts_with("0o") && Rest{word.substr(2)}.is_all_of("01234567"))
    return integer(word, word.substr(2), 8);
  if (word.starts_with("0x") && Rest{word.substr(2)}.is_all_of("0123456789abcdefABCDEF"))
    return integer(word, word.substr(2), 16);
  if (is_core_float(word)) return floating(word);
  if (is_older_number(word))
    return refuse(word, "decimal digits only, or quotes: a number to some readers and text to others");
  return {.value = std::string(word)};
}

}  // namespace kt::inline texts
