#include "server/syntax/json_call_reader.h"

#include <algorithm>

#include "base/utf8.h"

namespace kt::inline server {
namespace {

// Four hexadecimal digits, known to be such.
CodePoint hex4(std::string_view digits) {
  CodePoint value = 0;
  for (const char c : digits.substr(0, 4))
    value = value * 16 + static_cast<CodePoint>(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
  return value;
}
bool is_high(CodePoint code) { return code >= 0xD800 && code < 0xDC00; }
bool is_low(CodePoint code) { return code >= 0xDC00 && code < 0xE000; }

}  // namespace

JsonCallReader::JsonCallReader(const CallSyntax& syntax)
    : syntax_(syntax),
      markers_(syntax.markers),
      phase_(syntax.form == CallForm::kObject ? Phase::kOpen : Phase::kType),
      object_(syntax.form == CallForm::kObject) {}

JsonCallReader::JsonCallReader(const CallSyntax& syntax, std::string name)
    : syntax_(syntax), markers_(syntax.markers), phase_(Phase::kFence), object_(false) {
  name_ = std::move(name);
}

void JsonCallReader::begin_item() {
  phase_ = Phase::kOpen;
  object_ = listed_ = true;
}

bool JsonCallReader::settled() const {
  if (!certain_) return false;
  if (phase_ == Phase::kTail) return word_.empty();
  return phase_ == Phase::kObject || phase_ == Phase::kNext || (phase_ == Phase::kString && escape_.empty());
}

CallReader::Step JsonCallReader::read(char c) {
  const Step done = take(c);
  if (done != Step::kBad && settled()) told_ = pushed_;
  return done;
}

CallReader::Step JsonCallReader::take(char c) {
  switch (phase_) {
    case Phase::kType:
      return type(c);
    case Phase::kName:
      return name_line(c);
    case Phase::kFence:
      return fence(c);
    case Phase::kTail:
      return tail(c);
    case Phase::kInKey:
    case Phase::kInName:
    case Phase::kOther:
    case Phase::kObject:
    case Phase::kString:
    case Phase::kNull:
      return scan(c);
    default:
      return is_json_space(c) ? Step::kMore : structural(c);
  }
}

CallReader::Step JsonCallReader::structural(char c) {
  switch (phase_) {
    case Phase::kOpen:
      if (c != '{') return Step::kBad;
      phase_ = Phase::kFirstKey;
      return Step::kMore;
    case Phase::kFirstKey:
    case Phase::kKey:
      if (c != '"') return Step::kBad;
      start_scan(Phase::kInKey, c);
      return Step::kMore;
    case Phase::kColon:
      if (c != ':') return Step::kBad;
      phase_ = Phase::kValue;
      return Step::kMore;
    case Phase::kValue:
      return start_value(c);
    default:
      return next(c);
  }
}

void JsonCallReader::start_scan(Phase phase, char first) {
  phase_ = phase;
  scanner_ = {};
  scanner_.push(first);
  word_.assign(1, first);
}

CallReader::Step JsonCallReader::start_value(char c) {
  if (key_ == "name" && name_.empty()) {
    if (c != '"') return Step::kBad;
    start_scan(Phase::kInName, c);
    return Step::kMore;
  }
  if ((key_ == "arguments" || key_ == "parameters") && !has_arguments_) {
    if (c != '{' && c != '"' && c != 'n') return Step::kBad;
    start_scan(c == '{' ? Phase::kObject : c == '"' ? Phase::kString : Phase::kNull, c);
    if (c != '{') return Step::kMore;
    arguments_begin();
    add_byte(c);
    return Step::kMore;
  }
  if (JsonScanner().push(c) == JsonScanner::Step::kBad) return Step::kBad;
  start_scan(Phase::kOther, c);
  return Step::kMore;
}

CallReader::Step JsonCallReader::scan(char c) {
  const bool in_string = scanner_.in_string();
  const JsonScanner::Step step = scanner_.push(c);
  if (step == JsonScanner::Step::kBad) return Step::kBad;
  if (step == JsonScanner::Step::kEndBefore) {
    phase_ = Phase::kNext;
    return take(c);
  }
  const bool last = step == JsonScanner::Step::kEnd;
  if (phase_ == Phase::kInKey || phase_ == Phase::kInName) word_ += c;
  if (phase_ == Phase::kObject) {
    // A control character in a string is no JSON, but its escape is.
    if (in_string && static_cast<unsigned char>(c) < 0x20)
      for (const char escaped : nlohmann::json(std::string(1, c)).dump().substr(1))
        if (escaped != '"') add_byte(escaped);
    if (!in_string || static_cast<unsigned char>(c) >= 0x20) add_byte(c);
  }
  if (phase_ == Phase::kString && !last && !add_unescaped(c)) return Step::kBad;
  return last ? end_scan() : Step::kMore;
}

CallReader::Step JsonCallReader::end_scan() {
  if (phase_ == Phase::kInKey || phase_ == Phase::kInName) {
    if (!end_key_or_name()) return Step::kBad;
    return Step::kMore;
  }
  if (phase_ == Phase::kString && !escape_.empty() && !add_text(kReplacement)) return Step::kBad;
  if (phase_ == Phase::kString || phase_ == Phase::kNull) arguments_begin();
  if (phase_ != Phase::kOther && !any_argument_) add_text("{}");
  phase_ = object_ ? Phase::kNext : Phase::kTail;
  word_.clear();
  return phase_ == Phase::kTail && markers_.call_end.empty() && syntax_.form != CallForm::kChannel
             ? Step::kDone
             : Step::kMore;
}

bool JsonCallReader::end_key_or_name() {
  const auto parsed = nlohmann::json::parse(word_, nullptr, false);
  if (!parsed.is_string()) return false;
  if (phase_ == Phase::kInKey) {
    key_ = parsed.get<std::string>();
    phase_ = Phase::kColon;
    return true;
  }
  name_ = parsed.get<std::string>();
  if (name_.empty()) return false;
  phase_ = Phase::kNext;
  update_certain();
  return true;
}

CallReader::Step JsonCallReader::next(char c) {
  if (c == ',') {
    phase_ = Phase::kKey;
    return Step::kMore;
  }
  if (c != '}' || name_.empty()) return Step::kBad;
  if (!has_arguments_) {
    arguments_begin();
    add_text("{}");
  }
  phase_ = Phase::kTail;
  word_.clear();
  return listed_ ? Step::kDone : Step::kMore;
}

CallReader::Step JsonCallReader::type(char c) {
  if (syntax_.lists && word_.empty() && (c == '[' || is_json_space(c))) {
    if (c == '[') begin_item();
    return Step::kMore;
  }
  if (c == '\n' || word_.size() > kLongestCallName) return Step::kBad;
  word_ += c;
  const size_t bracket = word_.find(markers_.separator[0], behind_mark_);
  if (bracket == std::string::npos) return Step::kMore;
  const std::string_view end = std::string_view(word_).substr(bracket);
  const std::string_view mark = behind_mark_ == 0 ? markers_.id_mark : std::string_view();
  if (!markers_.separator.starts_with(end) && !mark.starts_with(end)) return Step::kBad;
  if (end == mark) {
    id_mark_ = bracket;
    behind_mark_ = word_.size();
  }
  if (end != markers_.separator) return Step::kMore;
  if (!take_head(std::string_view(word_).substr(0, bracket))) return Step::kBad;
  word_.clear();
  phase_ = syntax_.form == CallForm::kFenced ? Phase::kName : Phase::kFence;
  return Step::kMore;
}

// What stands before the separator: a word of no interest, or the name, perhaps with an id.
bool JsonCallReader::take_head(std::string_view head) {
  if (syntax_.ids == IdPlace::kInName) return take_kimis_head(trimmed(head));
  const bool marked = behind_mark_ > 0, before = syntax_.ids == IdPlace::kBeforeName;
  const std::string first = trimmed(head.substr(0, marked ? id_mark_ : head.size())),
                    second = trimmed(marked ? head.substr(behind_mark_) : std::string_view());
  name_ = marked && before ? second : first;
  if (name_.empty()) return false;
  if (syntax_.form == CallForm::kFenced) {
    name_.clear();
    return true;
  }
  if (!marked) return true;
  id_ = before ? first : second;
  if (!is_call_name(id_)) id_.clear();
  return is_call_name(name_);
}

// The name in an id, functions.NAME:0, or alone.
bool JsonCallReader::take_kimis_head(std::string_view head) {
  name_ = head;
  constexpr std::string_view kFunctions = "functions.";
  if (head.starts_with(kFunctions)) head.remove_prefix(kFunctions.size());
  const size_t colon = head.rfind(':');
  const std::string_view number = colon == std::string_view::npos ? "" : head.substr(colon + 1);
  if (!number.empty() && std::ranges::all_of(number, [](char c) { return c >= '0' && c <= '9'; })) {
    id_ = name_;
    head = head.substr(0, colon);
  }
  name_ = head;
  return is_call_name(name_);
}

CallReader::Step JsonCallReader::name_line(char c) {
  if (c == '<' || word_.size() > kLongestCallName) return Step::kBad;
  if (c != '\n') {
    word_ += c;
    return Step::kMore;
  }
  name_ = trimmed(word_);
  if (name_.empty()) return Step::kBad;
  word_.clear();
  phase_ = Phase::kFence;
  return Step::kMore;
}

CallReader::Step JsonCallReader::fence(char c) {
  constexpr std::string_view kFence = "```json";
  if (is_json_space(c) && (word_.empty() || word_ == kFence)) return Step::kMore;
  if (c == '{' && (word_.empty() || word_ == kFence)) {
    start_scan(Phase::kObject, c);
    arguments_begin();
    add_byte(c);
    return Step::kMore;
  }
  word_ += c;
  return kFence.starts_with(word_) ? Step::kMore : Step::kBad;
}

CallReader::Step JsonCallReader::tail(char c) {
  constexpr std::string_view kFence = "```";
  if (word_.empty() && is_json_space(c)) return Step::kMore;
  word_ += c;
  const bool fence = !object_ && !fence_closed_ && word_[0] == '`';
  const std::string_view expected = fence ? kFence : markers_.call_end;
  if (!expected.starts_with(word_)) return Step::kBad;
  if (word_ != expected) return Step::kMore;
  word_.clear();
  if (!fence) return Step::kDone;
  fence_closed_ = true;
  return Step::kMore;
}

void JsonCallReader::add_byte(char c) {
  arguments_ += c;
  any_argument_ = true;
}

bool JsonCallReader::add_unescaped(char c) {
  const bool waits = escape_.size() == 6;  // the first half of a pair
  if (escape_.empty() || waits) {
    if (c == '\\') {
      escape_ += c;
      return true;
    }
    if (waits && !add_text(kReplacement)) return false;
    escape_.clear();
    return add_text({&c, 1});
  }
  escape_ += c;
  return end_escape();
}

bool JsonCallReader::end_escape() {
  constexpr std::string_view kLetters = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
  if (escape_.size() == 8 && escape_[7] != 'u') {
    escape_.erase(0, 6);
    if (!add_text(kReplacement)) return false;
  }
  if (escape_.size() == 2 && escape_[1] != 'u') {
    const char meant = kMeant[kLetters.find(escape_[1])];
    escape_.clear();
    return add_text({&meant, 1});
  }
  if (escape_.size() == 12) {
    const CodePoint high = hex4(std::string_view(escape_).substr(2)),
                    low = hex4(std::string_view(escape_).substr(8));
    if (is_low(low)) {
      escape_.clear();
      return add_text(to_utf8(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)));
    }
    escape_.erase(0, 6);
    if (!add_text(kReplacement)) return false;
  }
  if (escape_.size() != 6) return true;
  const CodePoint code = hex4(std::string_view(escape_).substr(2));
  if (is_high(code)) return true;
  escape_.clear();
  return add_text(is_low(code) ? std::string(kReplacement) : to_utf8(code));
}

bool JsonCallReader::add_text(std::string_view text) {
  if (!has_arguments_) {
    if (text.size() == 1 && is_json_space(text[0])) return true;
    if (text[0] != '{') return false;
    arguments_begin();
  }
  arguments_ += text;
  any_argument_ = true;
  return true;
}

void JsonCallReader::arguments_begin() {
  has_arguments_ = true;
  update_certain();
}

void JsonCallReader::update_certain() { certain_ = !name_.empty() && has_arguments_; }

}  // namespace kt::inline server
