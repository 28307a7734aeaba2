#include "text/jinja/lexer.h"

#include <algorithm>

#include "text/jinja/characters.h"

namespace kt::inline texts::jinja {

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool starts_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}
bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// One kind of line end, and without the last one.
std::string normalised(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  Lexer(std::string_view source, Meter& meter) : source_(normalised(source)), meter_(meter) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) root();
    emit(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  void emit(TokenKind kind, std::string text) { tokens_.push_back({kind, meter_.line, std::move(text)}); }
  bool looking_at(std::string_view what) const {
    return std::string_view(source_).substr(at_, what.size()) == what;
  }
  char peek(size_t ahead = 0) const { return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0'; }
  void skip(size_t count) {
    meter_.line += static_cast<int>(std::count(source_.begin() + at_, source_.begin() + at_ + count, '\n'));
    at_ += count;
  }
  void skip_blanks() {
    while (at_ < source_.size() && is_blank(source_[at_])) skip(1);
  }

  // Text up to the next tag, then that tag.
  void root() {
    size_t tag = source_.find('{', at_);
    while (tag != std::string::npos &&
           !(tag + 1 < source_.size() &&
             std::string_view("%{#").find(source_[tag + 1]) != std::string_view::npos)) {
      tag = source_.find('{', tag + 1);
    }
    if (tag == std::string::npos) {
      emit(TokenKind::kText, source_.substr(at_));
      skip(source_.size() - at_);
      return;
    }
    const char kind = source_[tag + 1];
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    text_until(tag, sign, kind != '{');
    at_ += sign == '-' || sign == '+' ? 3 : 2;
    if (kind == '#') {
      comment();
    } else if (kind == '{') {
      emit(TokenKind::kVariableBegin, "");
      inside("}}");
    } else if (!raw()) {
      emit(TokenKind::kBlockBegin, "");
      inside("%}");
    }
  }

  // Emits the text before the tag at `tag` as its sign and lstrip_blocks leave it, and moves there.
  void text_until(size_t tag, char sign, bool strips_line) {
    std::string_view before = std::string_view(source_).substr(at_, tag - at_);
    if (sign == '-') {
      before = strip_space(before, Side::kRight);
    } else if (sign != '+' && strips_line) {
      const size_t newline = before.rfind('\n');
      const size_t start = newline == std::string_view::npos ? 0 : newline + 1;
      if ((start > 0 || line_starting_) && strip_space(before.substr(start), Side::kBoth).empty()) {
        before = before.substr(0, start);
      }
    }
    if (!before.empty()) emit(TokenKind::kText, std::string(before));
    skip(tag - at_);
    line_starting_ = false;
  }

  // After a tag's end: "-" takes all white space, else a block's end takes one line end.
  void after_end(char sign, bool trims) {
    const size_t from = at_;
    if (sign == '-') {
      skip_blanks();
    } else if (trims && sign != '+' && peek() == '\n') {
      skip(1);
    }
    line_starting_ = at_ > from && source_[at_ - 1] == '\n';
  }

  void comment() {
    const size_t end = source_.find("#}", at_);
    if (end == std::string::npos) meter_.fail("missing end of comment tag");
    const char sign = end > at_ ? source_[end - 1] : '\0';
    skip(end + 2 - at_);
    after_end(sign, true);
  }

  // A raw block, if `{%` has just been passed and this is one.
  bool raw() {
    size_t end = at_;
    const auto blanks = [&] {
      while (end < source_.size() && is_blank(source_[end])) ++end;
    };
    const auto has = [&](std::string_view what) {
      if (std::string_view(source_).substr(end, what.size()) != what) return false;
      end += what.size();
      return true;
    };
    blanks();
    if (!has("raw")) return false;
    blanks();
    const bool trims = has("-%}");
    if (!trims && !has("%}")) return false;
    skip(end - at_);
    if (trims) skip_blanks();
    for (size_t tag = source_.find("{%", at_); tag != std::string::npos; tag = source_.find("{%", tag + 1)) {
      end = tag + 2;
      const char sign = end < source_.size() ? source_[end] : '\0';
      if (sign == '-' || sign == '+') ++end;
      blanks();
      if (!has("endraw")) continue;
      blanks();
      const char last = end < source_.size() ? source_[end] : '\0';
      if (!has("-%}") && !has("+%}") && !has("%}")) continue;
      text_until(tag, sign, true);
      skip(end - at_);
      after_end(last, true);
      return true;
    }
    meter_.fail("missing end of raw directive");
  }

  // Tokens up to the tag's end mark.
  void inside(std::string_view end) {
    const TokenKind end_kind = end == "}}" ? TokenKind::kVariableEnd : TokenKind::kBlockEnd;
    std::string open;  // closing brackets still to come
    while (at_ < source_.size()) {
      const char c = peek();
      if (open.empty()) {
        const bool signed_end =
            (c == '-' || (c == '+' && end == "%}")) && source_.compare(at_ + 1, 2, end) == 0;
        if (signed_end || looking_at(end)) {
          emit(end_kind, "");
          at_ += signed_end ? 3 : 2;
          after_end(signed_end ? c : '\0', end == "%}");
          return;
        }
      }
      if (is_blank(c)) {
        skip(1);
      } else if (is_digit(c)) {
        number();
      } else if (starts_name(c)) {
        size_t last = at_;
        while (last < source_.size() && (starts_name(source_[last]) || is_digit(source_[last]))) ++last;
        emit(TokenKind::kName, source_.substr(at_, last - at_));
        at_ = last;
      } else if (c == '\'' || c == '"') {
        string(c);
      } else {
        operation(open);
      }
    }
    meter_.fail("unexpected end of template, expected '{}'", end);
  }

  void operation(std::string& open) {
    for (std::string_view two : {"//", "**", "==", "!=", ">=", "<="}) {
      if (!looking_at(two)) continue;
      emit(TokenKind::kOperator, std::string(two));
      at_ += 2;
      return;
    }
    const char c = peek();
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos) {
      meter_.fail("unexpected char {}", quote(std::string_view(&c, 1)));
    }
    if (c == '{' || c == '(' || c == '[') open += c == '{' ? '}' : c == '(' ? ')' : ']';
    if (c == '}' || c == ')' || c == ']') {
      if (open.empty()) meter_.fail("unexpected '{}'", c);
      if (open.back() != c) meter_.fail("unexpected '{}', expected '{}'", c, open.back());
      open.pop_back();
    }
    if (open.size() > kMaxNesting) meter_.fail("brackets nested deeper than {}", kMaxNesting);
    emit(TokenKind::kOperator, std::string(1, c));
    ++at_;
  }

  // Digits with single underscores between them.
  std::string digits(bool (*good)(char)) {
    std::string out;
    while (good(peek()) || (!out.empty() && peek() == '_' && good(peek(1)))) {
      if (peek() != '_') out += peek();
      ++at_;
    }
    return out;
  }

  void number() {
    const auto hex = [](char c) { return is_digit(c) || ((c | 32) >= 'a' && (c | 32) <= 'f'); };
    const char mark = static_cast<char>(peek(1) | 32);
    if (peek() == '0' && (mark == 'x' || mark == 'o' || mark == 'b') && hex(peek(2))) {
      at_ += 2;
      const std::string all = digits(hex);
      const int base = mark == 'x' ? 16 : mark == 'o' ? 8 : 2;
      size_t used = 0;
      unsigned long long v = 0;
      try {
        v = std::stoull(all, &used, base);
      } catch (const std::exception&) {
        used = 0;
      }
      if (used != all.size() || v > INT64_MAX) meter_.fail("number 0{}{} is out of range", mark, all);
      return emit(TokenKind::kInteger, std::to_string(v));
    }
    const bool after_dot = at_ > 0 && source_[at_ - 1] == '.';
    std::string all = digits(is_digit);
    bool is_float = false;
    if (!after_dot) {
      if (peek() == '.' && is_digit(peek(1))) {
        ++at_;
        all += "." + digits(is_digit);
        is_float = true;
      }
      const size_t sign = peek(1) == '+' || peek(1) == '-' ? 1 : 0;
      if ((peek() | 32) == 'e' && is_digit(peek(1 + sign))) {
        all += source_.substr(at_, 1 + sign);
        at_ += 1 + sign;
        all += digits(is_digit);
        is_float = true;
      }
    }
    if (!is_float && all.size() > 1 && all[0] == '0' && all.find_first_not_of('0') != std::string::npos) {
      meter_.fail("number {} starts with 0", all);
    }
    emit(is_float ? TokenKind::kFloat : TokenKind::kInteger, all);
  }

  void string(char mark) {
    std::string out;
    size_t i = at_ + 1;
    for (; i < source_.size() && source_[i] != mark; ++i) {
      if (source_[i] != '\\') {
        out += source_[i];
      } else if (++i < source_.size()) {
        i = escape(i, out);
      }
    }
    if (i >= source_.size()) meter_.fail("unexpected char {}", quote(std::string_view(&mark, 1)));
    emit(TokenKind::kString, out);
    skip(i + 1 - at_);
  }

  // Resolves the escape whose letter is at i; gives the offset of its last byte.
  size_t escape(size_t i, std::string& out) {
    static constexpr std::string_view kLetters = "ntrabfv\\'\"", kMeanings = "\n\t\r\a\b\f\v\\'\"";
    const char c = source_[i];
    if (const size_t known = kLetters.find(c); known != std::string_view::npos) {
      out += kMeanings[known];
    } else if (c >= '0' && c <= '7') {
      uint32_t point = 0;
      size_t count = 0;
      for (;
           count < 3 && i + count < source_.size() && source_[i + count] >= '0' && source_[i + count] <= '7';
           ++count) {
        point = point * 8 + static_cast<uint32_t>(source_[i + count] - '0');
      }
      append_code_point(out, point);
      return i + count - 1;
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t length = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      uint32_t point = 0;
      for (size_t n = 1; n <= length; ++n) {
        const char h = i + n < source_.size() ? source_[i + n] : '\0';
        const char low = static_cast<char>(h | 32);
        if (!is_digit(h) && !(low >= 'a' && low <= 'f')) meter_.fail("truncated \\{} escape", c);
        point = point << 4 | static_cast<uint32_t>(is_digit(h) ? h - '0' : low - 'a' + 10);
      }
      if (point > 0x10FFFF || (point >= 0xD800 && point < 0xE000))
        meter_.fail("illegal character in \\{} escape", c);
      append_code_point(out, point);
      return i + length;
    } else if (c == 'N') {
      meter_.fail("\\N escapes are not supported");
    } else if (c != '\n') {
      out += '\\';
      out += c;
    }
    return i;
  }

  std::string source_;
  Meter& meter_;
  size_t at_ = 0;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source, Meter& meter) { return Lexer(source, meter).run(); }

}  // namespace kt::inline texts::jinja
