#include "server/syntax/json_scanner.h"

namespace kt::inline server {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

}  // namespace

bool is_json_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

JsonScanner::Step JsonScanner::push(char c) {
  switch (state_) {
    case State::kString:
    case State::kEscape:
    case State::kHex:
      return string(c);
    case State::kWord:
      return word(c);
    case State::kValue:
    case State::kFirstItem:
    case State::kFirstKey:
    case State::kKey:
    case State::kColon:
    case State::kAfter:
      return structural(c);
    default:
      return number(c);
  }
}

JsonScanner::Step JsonScanner::structural(char c) {
  if (is_json_space(c)) return Step::kMore;
  switch (state_) {
    case State::kFirstItem:
      if (c == ']') return close(c);
      return value(c);
    case State::kFirstKey:
      if (c == '}') return close(c);
      [[fallthrough]];
    case State::kKey:
      if (c != '"') return Step::kBad;
      key_ = true;
      state_ = State::kString;
      return Step::kMore;
    case State::kColon:
      if (c != ':') return Step::kBad;
      state_ = State::kValue;
      return Step::kMore;
    case State::kAfter:
      if (c != ',') return close(c);
      state_ = stack_.back() == '{' ? State::kKey : State::kValue;
      return Step::kMore;
    default:
      return value(c);
  }
}

JsonScanner::Step JsonScanner::value(char c) {
  if (c == '{' || c == '[') return open(c);
  if (c == '"') {
    key_ = false;
    state_ = State::kString;
  } else if (c == 't' || c == 'f' || c == 'n') {
    word_ = c == 't' ? "rue" : c == 'f' ? "alse" : "ull";
    state_ = State::kWord;
  } else if (c == '-') {
    state_ = State::kMinus;
  } else if (is_digit(c)) {
    state_ = c == '0' ? State::kZero : State::kInteger;
  } else {
    return Step::kBad;
  }
  return Step::kMore;
}

JsonScanner::Step JsonScanner::open(char c) {
  if (stack_.size() == kDeepest) return Step::kBad;
  stack_.push_back(c);
  state_ = c == '{' ? State::kFirstKey : State::kFirstItem;
  return Step::kMore;
}

JsonScanner::Step JsonScanner::close(char c) {
  if (c != (stack_.back() == '{' ? '}' : ']')) return Step::kBad;
  stack_.pop_back();
  return ended();
}

JsonScanner::Step JsonScanner::ended() {
  if (stack_.empty()) return Step::kEnd;
  state_ = State::kAfter;
  return Step::kMore;
}

JsonScanner::Step JsonScanner::string(char c) {
  if (state_ == State::kHex) {
    if (!is_hex(c)) return Step::kBad;
    if (--hex_left_ == 0) state_ = State::kString;
    return Step::kMore;
  }
  if (state_ == State::kEscape) {
    if (std::string_view("\"\\/bfnrtu").find(c) == std::string_view::npos) return Step::kBad;
    state_ = c == 'u' ? State::kHex : State::kString;
    hex_left_ = 4;
    return Step::kMore;
  }
  if (c == '\\') {
    state_ = State::kEscape;
    return Step::kMore;
  }
  if (c != '"') return Step::kMore;
  if (!key_) return ended();
  state_ = State::kColon;
  return Step::kMore;
}

JsonScanner::Step JsonScanner::word(char c) {
  if (c != word_[0]) return Step::kBad;
  word_.remove_prefix(1);
  return word_.empty() ? ended() : Step::kMore;
}

bool JsonScanner::number_ends() const {
  return state_ == State::kZero || state_ == State::kInteger || state_ == State::kFraction ||
         state_ == State::kPower;
}

JsonScanner::Step JsonScanner::number(char c) {
  const State before = state_;
  const bool exponent = c == 'e' || c == 'E';
  if (before == State::kMinus && is_digit(c))
    state_ = c == '0' ? State::kZero : State::kInteger;
  else if (before == State::kInteger && is_digit(c))
    state_ = State::kInteger;
  else if ((before == State::kZero || before == State::kInteger) && c == '.')
    state_ = State::kPoint;
  else if ((before == State::kPoint || before == State::kFraction) && is_digit(c))
    state_ = State::kFraction;
  else if (number_ends() && before != State::kPower && exponent)
    state_ = State::kExponent;
  else if (before == State::kExponent && (c == '+' || c == '-'))
    state_ = State::kSign;
  else if ((before == State::kExponent || before == State::kSign || before == State::kPower) && is_digit(c))
    state_ = State::kPower;
  else if (!number_ends())
    return Step::kBad;
  else if (stack_.empty())
    return Step::kEndBefore;
  else {
    state_ = State::kAfter;
    return structural(c);
  }
  return Step::kMore;
}

bool is_json(std::string_view text) {
  JsonScanner scanner;
  for (size_t at = 0; at < text.size(); ++at) {
    const JsonScanner::Step step = scanner.push(text[at]);
    if (step == JsonScanner::Step::kMore) continue;
    if (step == JsonScanner::Step::kBad) return false;
    const size_t end = step == JsonScanner::Step::kEnd ? at + 1 : at;
    return text.find_first_not_of(" \n\r\t", end) == std::string_view::npos;
  }
  return scanner.could_end();
}

}  // namespace kt::inline server
