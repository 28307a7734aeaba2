// Text with holes: text("{} of {}", 3, "four") for errors and log lines. Type-safe and small; it has no
// widths, no precisions and no positional arguments, and it is not meant for bulk output.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <span>
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

// text() over a list; `text` below is the form to call.
std::string text_from(std::string_view pattern, std::span<const TextArg> args);

// Replaces each "{}" by the next argument; "{{" and "}}" stand for single braces, any other brace for itself.
// Doubles print as integers where they are integers below 1e15, else with six significant digits, in no
// locale. A wrong number of arguments is never an error, because the text is usually on its way to report
// another one: a hole without an argument stays "{}", arguments without a hole follow in brackets, " [a, b]".
template <typename... Args>
std::string text(std::string_view pattern, const Args&... args) {
  const std::array<TextArg, sizeof...(Args)> list{TextArg(args)...};
  return text_from(pattern, list);
}

// "512 B", "1.5 KiB", "39.2 GiB": one decimal, powers of 1024.
std::string human_bytes(uint64_t bytes);

}  // namespace kt::inline base
