// Tells byte by byte where one JSON value ends, or that it is none. Strict but for control characters in
// strings, which models write; UTF-8 and the values themselves are not its business.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

namespace kt::inline server {

bool is_json_space(char c);

class JsonScanner {
 public:
  static constexpr size_t kDeepest = 256;  // containers within each other

  enum class Step {
    kMore,       // the byte belongs to the value, which goes on
    kEnd,        // the byte is the last of the value
    kEndBefore,  // the value ended before this byte: only numbers do
    kBad,        // the byte cannot be here
  };
  // Not after kEnd, kEndBefore or kBad. White space before the value is part of it.
  Step push(char c);
  // Whether the next byte is within a string, after its opening quote.
  bool in_string() const {
    return state_ == State::kString || state_ == State::kEscape || state_ == State::kHex;
  }
  // Whether the bytes so far are a value if no more come.
  bool could_end() const { return stack_.empty() && number_ends(); }

 private:
  enum class State : uint8_t {
    kValue,      // a value must come
    kFirstItem,  // a value or ]
    kFirstKey,   // a key or }
    kKey,        // a key must come
    kColon,      //
    kAfter,      // , or the end of the container
    kString,     //
    kEscape,     // after the backslash
    kHex,        // within \uXXXX
    kWord,       // true, false, null
    kMinus,      // numbers: after -
    kZero,       // a leading 0
    kInteger,    //
    kPoint,      // after the point
    kFraction,   //
    kExponent,   // after e
    kSign,       // after its sign
    kPower,      // its digits
  };
  Step structural(char c);
  Step value(char c);
  Step string(char c);
  Step word(char c);
  Step number(char c);
  Step open(char c);
  Step close(char c);
  Step ended();
  bool number_ends() const;

  State state_ = State::kValue;
  bool key_ = false;  // the string is a key
  uint8_t hex_left_ = 0;
  std::string_view word_ = {};  // what is left of it
  std::vector<char> stack_;     // '{' and '['
};

// Whether the text is one JSON value with nothing but white space around it.
bool is_json(std::string_view text);

}  // namespace kt::inline server
