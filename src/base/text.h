// Text with holes: text("{} of {}", 3, "four") for errors and log lines. Type-safe and small; holes are
// counted when a call is compiled. It has no widths, no precisions and no positional arguments, and it is not
// meant for bulk output.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace kt::inline base {

// One argument of text(), viewed for the duration of the call: a number by value, a string by reference.
class TextArg {
 public:
  TextArg(bool v) : kind_(Kind::kBool), unsigned_(v) {}
  TextArg(char v) : kind_(Kind::kChar), unsigned_(static_cast<unsigned char>(v)) {}
  template <std::signed_integral T>
  TextArg(T v) : kind_(Kind::kSigned), signed_(v) {}
  template <std::unsigned_integral T>
  TextArg(T v) : kind_(Kind::kUnsigned), unsigned_(v) {}
  template <std::floating_point T>
  TextArg(T v) : kind_(Kind::kDouble), double_(static_cast<double>(v)) {}
  TextArg(const char* v) : kind_(Kind::kString), string_(v ? std::string_view(v) : "(null)") {}
  TextArg(std::string_view v) : kind_(Kind::kString), string_(v) {}
  TextArg(const std::string& v) : kind_(Kind::kString), string_(v) {}

  void append_to(std::string& out) const;

 private:
  enum class Kind { kBool, kChar, kSigned, kUnsigned, kDouble, kString };
  Kind kind_;
  union {
    int64_t signed_;
    uint64_t unsigned_;
    double double_;
    std::string_view string_;
  };
};

// The holes "{}" of a pattern; "{{" and "}}" are none.
constexpr size_t holes_of(std::string_view pattern) {
  size_t holes = 0;
  for (size_t i = 0; i + 1 < pattern.size(); ++i) {
    const char c = pattern[i], following = pattern[i + 1];
    if (c == '{' && following == '}') ++holes;
    if ((c == '{' && following == '}') || ((c == '{' || c == '}') && following == c)) ++i;
  }
  return holes;
}

// A pattern that is exchanged for one of the same holes when it is used: terminal/language.h translates so.
struct ExchangedPattern {
  std::string_view pattern;
  std::string (*exchange)(std::string_view pattern);
};

// A constant pattern with that many holes. Another number does not compile.
template <size_t holes>
class TextPattern {
 public:
  template <std::convertible_to<std::string_view> Pattern>
  consteval TextPattern(const Pattern& pattern) : pattern_(checked(pattern)) {}
  consteval TextPattern(const ExchangedPattern& pattern)
      : pattern_(checked(pattern.pattern)), exchange_(pattern.exchange) {}

  std::string fill(std::span<const TextArg> args) const;

 private:
  static consteval std::string_view checked(std::string_view pattern) {
    if (holes_of(pattern) != holes)
      throw std::invalid_argument("the pattern has another number of holes than there are arguments");
    return pattern;
  }
  std::string_view pattern_;
  std::string (*exchange_)(std::string_view) = nullptr;
};

// text_of() over a list.
std::string text_from(std::string_view pattern, std::span<const TextArg> args);

template <size_t holes>
std::string TextPattern<holes>::fill(std::span<const TextArg> args) const {
  return exchange_ ? text_from(exchange_(pattern_), args) : text_from(pattern_, args);
}

// Replaces each "{}" by the next argument; "{{" and "}}" stand for single braces, any other brace for itself.
// Doubles print as integers where they are integers below 1e15, else with six significant digits, in no
// locale.
template <typename... Args>
std::string text(TextPattern<sizeof...(Args)> pattern, const Args&... args) {
  const std::array<TextArg, sizeof...(Args)> list{TextArg(args)...};
  return pattern.fill(list);
}

// text() with a pattern that is known only when the program runs, such as one of a table. A wrong number of
// arguments is no error then, because the text is usually on its way to report another one: a hole without an
// argument stays "{}", arguments without a hole follow in brackets, " [a, b]".
template <typename... Args>
std::string text_of(std::string_view pattern, const Args&... args) {
  const std::array<TextArg, sizeof...(Args)> list{TextArg(args)...};
  return text_from(pattern, list);
}

// "512 B", "1.5 KiB", "39.2 GiB": one decimal, powers of 1024.
std::string human_bytes(uint64_t bytes);

}  // namespace kt::inline base
