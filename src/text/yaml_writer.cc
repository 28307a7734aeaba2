#include "base/error.h"
#include "base/utf8.h"
#include "text/shown.h"
#include "text/yaml.h"
#include "text/yaml_plain.h"

namespace kt::inline texts {
namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_word(char c) { return is_letter(c) || (c >= '0' && c <= '9') || c == '_' || c == '/'; }

// Whether every reader takes these characters without quotes for the same text. Stricter than YAML.
bool is_plainly_text(std::string_view characters) {
  if (characters.empty() || !(is_word(characters[0]) && is_word(characters.back()))) return false;
  for (size_t i = 0; i < characters.size(); ++i) {
    const char c = characters[i];
    if (is_word(c) || c == '.' || c == '-' || c == '+') continue;
    if ((c != ' ' && c != ':') || characters[i + 1] == ' ') return false;  // neither is the last
  }
  if (characters[0] >= '0' && characters[0] <= '9') return false;  // perhaps a date
  constexpr std::string_view kBooleans = "yYnN";                   // to some readers
  if (characters.size() == 1 && kBooleans.find(characters[0]) != kBooleans.npos) return false;
  return read_plain(characters).value.is_string();
}

// Characters that only an escape can show: control characters, line separators, marks of byte order.
bool needs_escape(CodePoint code) {
  return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x2028 || code == 0x2029 || code == 0xFEFF ||
         code == 0xFFFE || code == 0xFFFF;
}

void append_escape(std::string& out, CodePoint code) {
  constexpr std::string_view kHex = "0123456789ABCDEF";
  if (code == '\n') return void(out += "\\n");
  if (code == '\t') return void(out += "\\t");
  out += code < 0x100 ? "\\x" : "\\u";
  for (int shift = code < 0x100 ? 4 : 12; shift >= 0; shift -= 4) out += kHex[code >> shift & 15];
}

// Single quotes, in which a backslash is itself, wherever they can hold the text: regexes stay readable.
std::string in_quotes(std::string_view characters) {
  std::string single, twice;
  bool escaped = false;
  for (size_t at = 0; at < characters.size();) {
    const size_t start = at;
    const CodePoint code = next_code_point(characters, at);
    const std::string_view character = characters.substr(start, at - start);
    single += character;
    if (code == '\'') single += '\'';
    if (code == '"' || code == '\\') twice += '\\';
    if (needs_escape(code)) {
      escaped = true;
      append_escape(twice, code);
    } else {
      twice += character;
    }
  }
  return escaped ? '"' + twice + '"' : '\'' + single + '\'';
}

std::string string_text(const std::string& characters) {
  if (!is_valid_utf8(characters)) fail("YAML of \"{}\": expected UTF-8", shown(characters));
  return is_plainly_text(characters) ? characters : in_quotes(characters);
}

std::string number_text(const Json& value) {
  std::string out = value.dump();
  if (out == "null") fail("YAML of a number: expected a finite one");
  // 1e-05 would be text to PyYAML.
  if (const size_t exponent = out.find('e'); value.is_number_float() && exponent != out.npos)
    if (out.find('.') == out.npos) out.insert(exponent, ".0");
  return out;
}

std::string scalar_text(const Json& value) {
  if (value.is_string()) return string_text(value.get_ref<const std::string&>());
  if (value.is_number()) return number_text(value);
  if (value.is_null()) return "null";
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_structured() && value.empty()) return value.is_array() ? "[]" : "{}";
  fail("YAML of a value of type {}: expected one that JSON has", value.type_name());
}

// Lines at this indentation, the first of them without it: the caller stands there already.
void append_lines(std::string& out, const Json& value, size_t indentation) {
  const std::string spaces(indentation, ' ');
  bool first = true;
  const auto begin_entry = [&] {
    if (!first) out += spaces;
    first = false;
  };
  if (value.empty() || !value.is_structured()) {
    out += scalar_text(value) + '\n';
  } else if (value.is_array()) {
    for (const Json& entry : value) {
      begin_entry();
      out += "- ";
      append_lines(out, entry, indentation + 2);
    }
  } else {
    for (const auto& [key, entry] : value.items()) {
      begin_entry();
      out += string_text(key) + ':';
      const bool below = entry.is_structured() && !entry.empty();
      out += below ? '\n' + spaces + "  " : " ";
      append_lines(out, entry, indentation + 2);
    }
  }
}

}  // namespace

std::string to_yaml(const Json& value) {
  std::string out;
  append_lines(out, value, 0);
  return out;
}

}  // namespace kt::inline texts
