#include "server/chat_syntax.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/utf8.h"

namespace kt {
namespace {

constexpr std::string_view kThinkBegin = "<think>", kThinkEnd = "</think>";

template <typename Row, size_t count>
std::string names_of(const std::array<Row, count>& rows) {
  std::string names;
  for (const Row& row : rows) names += text("{}{}", names.empty() ? "" : ", ", row.name);
  return names;
}

struct ToolRow {
  std::string_view name;
  ToolSyntax syntax;
};
constexpr std::array kToolRows = {ToolRow{"hermes", ToolSyntax::kHermes},
                                  ToolRow{"qwen", ToolSyntax::kHermes},
                                  ToolRow{"qwen25", ToolSyntax::kHermes},
                                  ToolRow{"qwen3", ToolSyntax::kHermes},
                                  ToolRow{"deepseekv3", ToolSyntax::kDeepSeekV3},
                                  ToolRow{"deepseek_v3", ToolSyntax::kDeepSeekV3},
                                  ToolRow{"deepseekv31", ToolSyntax::kDeepSeekV31},
                                  ToolRow{"deepseek_v31", ToolSyntax::kDeepSeekV31},
                                  ToolRow{"none", ToolSyntax::kNone}};

struct ReasoningRow {
  std::string_view name;
  bool thinks;
};
constexpr std::array kReasoningRows = {ReasoningRow{"qwen3", true},       ReasoningRow{"deepseek-r1", true},
                                       ReasoningRow{"deepseek_r1", true}, ReasoningRow{"deepseek-v3", true},
                                       ReasoningRow{"glm45", true},       ReasoningRow{"none", false}};

ToolSyntax tool_syntax_of(std::string_view chat_template) {
  const auto has = [&](std::string_view part) { return chat_template.find(part) != std::string_view::npos; };
  if (has(tool_markers(ToolSyntax::kDeepSeekV3).call_begin))
    return has("```json") ? ToolSyntax::kDeepSeekV3 : ToolSyntax::kDeepSeekV31;
  // GLM and Qwen3-Coder write something else than JSON between the same markers.
  if (has("<tool_call>") && !has("<arg_key>") && !has("<function=")) return ToolSyntax::kHermes;
  return ToolSyntax::kNone;
}

bool is_thinking(std::string_view chat_template, const Tokenizer& tokenizer) {
  if (chat_template.empty()) return tokenizer.id_of(kThinkBegin) && tokenizer.id_of(kThinkEnd);
  return chat_template.find(kThinkBegin) != std::string_view::npos ||
         chat_template.find(kThinkEnd) != std::string_view::npos;
}

}  // namespace

ToolMarkers tool_markers(ToolSyntax syntax) {
  switch (syntax) {
    case ToolSyntax::kNone:
      return {};
    case ToolSyntax::kHermes:
      return {.call_begin = "<tool_call>", .call_end = "</tool_call>"};
    case ToolSyntax::kDeepSeekV3:
    case ToolSyntax::kDeepSeekV31:
      return {.section_begin = "<｜tool▁calls▁begin｜>",
              .section_end = "<｜tool▁calls▁end｜>",
              .call_begin = "<｜tool▁call▁begin｜>",
              .separator = "<｜tool▁sep｜>",
              .call_end = "<｜tool▁call▁end｜>"};
  }
  return {};
}

ChatSyntax chat_syntax_of(std::string_view chat_template, const Tokenizer& tokenizer) {
  ChatSyntax syntax{.tools = tool_syntax_of(chat_template)};
  if (!is_thinking(chat_template, tokenizer)) return syntax;
  syntax.think_begin = kThinkBegin;
  syntax.think_end = kThinkEnd;
  return syntax;
}

ToolSyntax tool_syntax_named(std::string_view name) {
  const auto row = std::ranges::find(kToolRows, name, &ToolRow::name);
  if (row == kToolRows.end())
    fail("unknown syntax of tool calls \"{}\"; expected one of {}", printable(name), names_of(kToolRows));
  return row->syntax;
}

ChatSyntax reasoning_syntax_named(std::string_view name) {
  const auto row = std::ranges::find(kReasoningRows, name, &ReasoningRow::name);
  if (row == kReasoningRows.end())
    fail("unknown syntax of reasoning \"{}\"; expected one of {}", printable(name), names_of(kReasoningRows));
  if (!row->thinks) return {};
  return {.think_begin = std::string(kThinkBegin), .think_end = std::string(kThinkEnd)};
}

bool prompt_opens_thinking(const ChatSyntax& syntax, std::string_view rendered_prompt) {
  if (syntax.think_begin.empty()) return false;
  const size_t last = rendered_prompt.find_last_not_of(" \n\r\t");
  return last != std::string_view::npos && rendered_prompt.substr(0, last + 1).ends_with(syntax.think_begin);
}

SpecialTokens answer_decoding(const ChatSyntax& syntax, const Tokenizer& tokenizer) {
  const ToolMarkers markers = tool_markers(syntax.tools);
  for (const std::string_view spelled :
       {std::string_view(syntax.think_begin), std::string_view(syntax.think_end), markers.section_begin,
        markers.section_end, markers.call_begin, markers.separator, markers.call_end})
    if (const auto id = tokenizer.id_of(spelled); id && tokenizer.is_special(*id))
      return SpecialTokens::kKeep;
  return SpecialTokens::kSkip;
}

}  // namespace kt
