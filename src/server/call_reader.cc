#include "server/call_reader.h"

#include "base/utf8.h"

namespace kt {
namespace {

constexpr size_t kLongestCallName = 512;

std::string trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \n\r\t");
  if (first == std::string_view::npos) return {};
  return std::string(text.substr(first, text.find_last_not_of(" \n\r\t") + 1 - first));
}

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

CallReader::CallReader(ToolSyntax syntax)
    : syntax_(syntax),
      markers_(tool_markers(syntax)),
      phase_(syntax == ToolSyntax::kHermes ? Phase::kOpen : Phase::kType) {}

std::optional<std::string> CallReader::take_name() {
  if (!certain_ || told_) return std::nullopt;
  told_ = true;
  return name_;
}

std::string CallReader::take_arguments() {
  if (!certain_) return {};
  std::string out;
  out.swap(arguments_);
  return out;
}

bool CallReader::settled() const {
  if (!certain_) return false;
  if (phase_ == Phase::kTail) return word_.empty();
  return phase_ == Phase::kObject || phase_ == Phase::kNext || (phase_ == Phase::kString && escape_.empty());
}

CallReader::Step CallReader::push(char c) {
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

CallReader::Step CallReader::structural(char c) {
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

void CallReader::start_scan(Phase phase, char first) {
  phase_ = phase;
  scanner_ = {};
  scanner_.push(first);
  word_.assign(1, first);
}

CallReader::Step CallReader::start_value(char c) {
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

CallReader::Step CallReader::scan(char c) {
  const bool in_string = scanner_.in_string();
  const JsonScanner::Step step = scanner_.push(c);
  if (step == JsonScanner::Step::kBad) return Step::kBad;
  if (step == JsonScanner::Step::kEndBefore) {
    phase_ = Phase::kNext;
    return push(c);
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

CallReader::Step CallReader::end_scan() {
  if (phase_ == Phase::kInKey || phase_ == Phase::kInName) {
    if (!end_key_or_name()) return Step::kBad;
    return Step::kMore;
  }
  if (phase_ == Phase::kString && !escape_.empty() && !add_text(kReplacement)) return Step::kBad;
  if (phase_ == Phase::kString || phase_ == Phase::kNull) arguments_begin();
  if (phase_ != Phase::kOther && !any_argument_) add_text("{}");
  phase_ = syntax_ == ToolSyntax::kHermes ? Phase::kNext : Phase::kTail;
  word_.clear();
  return Step::kMore;
}

bool CallReader::end_key_or_name() {
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

CallReader::Step CallReader::next(char c) {
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
  return Step::kMore;
}

CallReader::Step CallReader::type(char c) {
  if (c == '\n' || word_.size() > kLongestCallName) return Step::kBad;
  word_ += c;
  const size_t bracket = word_.find('<');
  if (bracket == std::string::npos) return Step::kMore;
  const std::string_view end = std::string_view(word_).substr(bracket);
  if (!markers_.separator.starts_with(end)) return Step::kBad;
  if (end != markers_.separator) return Step::kMore;
  const std::string head = trimmed(std::string_view(word_).substr(0, bracket));
  if (head.empty()) return Step::kBad;
  word_.clear();
  if (syntax_ == ToolSyntax::kDeepSeekV31) name_ = head;
  phase_ = syntax_ == ToolSyntax::kDeepSeekV31 ? Phase::kFence : Phase::kName;
  return Step::kMore;
}

CallReader::Step CallReader::name_line(char c) {
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

CallReader::Step CallReader::fence(char c) {
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

CallReader::Step CallReader::tail(char c) {
  constexpr std::string_view kFence = "```";
  if (word_.empty() && is_json_space(c)) return Step::kMore;
  word_ += c;
  const bool fence = syntax_ != ToolSyntax::kHermes && !fence_closed_ && word_[0] == '`';
  const std::string_view expected = fence ? kFence : markers_.call_end;
  if (!expected.starts_with(word_)) return Step::kBad;
  if (word_ != expected) return Step::kMore;
  word_.clear();
  if (!fence) return Step::kDone;
  fence_closed_ = true;
  return Step::kMore;
}

void CallReader::add_byte(char c) {
  arguments_ += c;
  any_argument_ = true;
}

bool CallReader::add_unescaped(char c) {
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

bool CallReader::end_escape() {
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

bool CallReader::add_text(std::string_view text) {
  if (!has_arguments_) {
    if (text.size() == 1 && is_json_space(text[0])) return true;
    if (text[0] != '{') return false;
    arguments_begin();
  }
  arguments_ += text;
  any_argument_ = true;
  return true;
}

void CallReader::arguments_begin() {
  has_arguments_ = true;
  update_certain();
}

void CallReader::update_certain() { certain_ = !name_.empty() && has_arguments_; }

}  // namespace kt
