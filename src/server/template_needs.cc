#include "server/template_needs.h"

#include <algorithm>
#include <string>

#include "server/chat_prompt.h"
#include "server/syntax/call_syntax.h"

namespace kt::inline server {
namespace {

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// The code between {{ }} and {% %}, without white space but one blank between words, quotes all alike.
std::string code_of(std::string_view source) {
  std::string code;
  for (size_t at = 0; at + 1 < source.size();) {
    const char kind = source[at + 1];
    if (source[at] != '{' || (kind != '{' && kind != '%' && kind != '#')) {
      ++at;
      continue;
    }
    const std::string_view close = kind == '{' ? "}}" : kind == '%' ? "%}" : "#}";
    const size_t end = std::min(source.find(close, at + 2), source.size());
    std::string_view body = source.substr(at + 2, end - at - 2);
    at = end;
    if (kind == '#') continue;
    bool space = false;
    for (const char c : body) {
      if (c == ' ' || c == '\n' || c == '\r' || c == '\t') {
        space = true;
        continue;
      }
      if (space && !code.empty() && is_word(code.back()) && is_word(c)) code += ' ';
      space = false;
      code += c == '"' ? '\'' : c;
    }
    code += close;
  }
  return code;
}

// Calls visit(text behind) for each whole word.
template <typename Visit>
void each_word(std::string_view code, std::string_view word, Visit visit) {
  for (size_t at = code.find(word); at != std::string_view::npos; at = code.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at > 0 && is_word(code[at - 1])) || (end < code.size() && is_word(code[end]))) continue;
    visit(code.substr(end));
  }
}

// Behind x.name or x['name'].
std::string_view behind_member(std::string_view behind) {
  if (behind.starts_with("']")) behind.remove_prefix(2);
  return behind;
}

ArgumentForm argument_form(std::string_view code) {
  bool appended = false, taken_apart = false;
  each_word(code, "arguments", [&](std::string_view behind) {
    behind = behind_member(behind);
    taken_apart |= behind.starts_with("|") || behind.starts_with(".items") || behind.starts_with(" is ") ||
                   behind.starts_with("is ");
    appended |= behind.starts_with("+") || behind.starts_with("~") || behind.starts_with("}}") ||
                behind.starts_with("-}}");
  });
  return appended && !taken_apart ? ArgumentForm::kText : ArgumentForm::kObject;
}

}  // namespace

TemplateNeeds template_needs(std::string_view chat_template) {
  const std::string code = code_of(chat_template);
  TemplateNeeds needs{.arguments = argument_form(code)};
  if (code.find("id|length!=9") != std::string::npos) needs.ids = CallIds::kNine;
  if (chat_template.find(tool_markers(ToolSyntax::kKimiK2).separator) != std::string_view::npos)
    needs.ids = CallIds::kNamed;
  each_word(code, "thinking", [&](std::string_view) { needs.thinking = true; });
  each_word(code, "reasoning", [&](std::string_view) { needs.reasoning = true; });
  each_word(code, "content", [&](std::string_view behind) {
    behind = behind_member(behind);
    if (behind.starts_with(" ")) behind.remove_prefix(1);
    needs.null_content |= behind.starts_with("is none") || behind.starts_with("is not none");
  });
  return needs;
}

bool template_knows_tools(std::string_view chat_template) {
  bool knows = false;
  each_word(code_of(chat_template), "tools", [&](std::string_view) { knows = true; });
  return knows;
}

}  // namespace kt::inline server
