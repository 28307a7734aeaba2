#include "cli/parser_flags.h"

#include <cstdio>

#include "base/error.h"
#include "base/utf8.h"
#include "cli/home.h"
#include "terminal/language.h"

namespace kt::inline cli {
namespace {

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

// The nearest may be another spelling than those that are listed.
template <typename Known>
[[noreturn]] void refuse_parser(const char* flag, const std::string& name, Known known,
                                const std::vector<std::string>& names) {
  std::vector<std::string> spellings;
  for (const std::string& one : all_parser_names())
    if (known(one)) spellings.push_back(one);
  fail(tr("{}: no syntax \"{}\"; did you mean {}? There are {}"), flag, printable(name),
       nearest_name(name, spellings), listed(names));
}

void warn(const std::string& message) { std::fprintf(stderr, "kt: warning: %s\n", message.c_str()); }

std::string shown_marker(const ChatSyntax& syntax) {
  return syntax.think_begin.empty() ? "none" : syntax.think_begin;
}

}  // namespace

void ParserFlags::add_options(CLI::App& verb) {
  verb.add_option("--tool-call-parser", tools,
                  "Syntax of tool calls, by the names of other servers: " + listed(tool_parser_names()) +
                      "; default: by the template");
  verb.add_option(
      "--reasoning-parser", reasoning,
      "Syntax of thinking: qwen3, deepseek-r1, glm45, minimax-m2, kimi_k2, gpt-oss, mistral, hy_v3, "
      "solar_open, none; "
      "default: by the template");
}

ChatSyntax ParserFlags::syntax(const std::string& chat_template, const Tokenizer& tokenizer) const {
  const ChatSyntax shown = chat_syntax_of(chat_template, tokenizer);
  ChatSyntax out = shown;
  if (!tools.empty()) {
    const auto named = tool_syntax_named(tools, shown);
    if (!named)
      refuse_parser(
          "--tool-call-parser", tools, [](const std::string& name) { return tool_syntax_named(name); },
          tool_parser_names());
    out = with_tool_syntax(std::move(out), *named);
    if (*named != shown.tools && shown.tools != ToolSyntax::kNone)
      warn(text("--tool-call-parser {}: the chat template shows the syntax {}; the flag counts", tools,
                name_of(shown.tools)));
    const bool told = *named == ToolSyntax::kHermes || *named == ToolSyntax::kNone;
    if (!told && !chat_template.empty() && !template_knows_tools(chat_template))
      warn(
          text("--tool-call-parser {}: the chat template has no place for tools; they are told, and calls "
               "are read, "
               "in the syntax hermes",
               tools));
  }
  if (reasoning.empty()) return out;
  const auto named = reasoning_syntax_named(reasoning, shown);
  if (!named)
    refuse_parser(
        "--reasoning-parser", reasoning, [](const std::string& name) { return reasoning_syntax_named(name); },
        reasoning_parser_names());
  out = with_reasoning(std::move(out), *named);
  if (named->think_begin != shown.think_begin && !shown.think_begin.empty())
    warn(text("--reasoning-parser {}: the chat template shows thoughts in {}, not {}; the flag counts",
              reasoning, shown_marker(shown), shown_marker(*named)));
  return out;
}

}  // namespace kt::inline cli
