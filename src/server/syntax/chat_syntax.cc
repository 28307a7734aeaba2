#include "server/syntax/chat_syntax.h"

#include <algorithm>

#include "server/syntax/call_syntax.h"

namespace kt {
namespace {

struct ThinkMarkers {
  std::string_view begin, end;
};
// The first whose markers a template shows is the one.
constexpr std::array kThinkMarkers = {ThinkMarkers{"<think>", "</think>"},
                                      ThinkMarkers{"[THINK]", "[/THINK]"}};

bool shows(std::string_view chat_template, std::string_view part) {
  return chat_template.find(part) != std::string_view::npos;
}

bool shows_channels(std::string_view chat_template) {
  return shows(chat_template, kChannels.channel) && shows(chat_template, kChannels.message);
}

// Some templates put markers together, so parts of them are looked for.
ToolSyntax shown_tools(std::string_view source) {
  if (shows(source, "｜DSML｜"))
    return shows(source, "function_calls") ? ToolSyntax::kDeepSeekV32 : ToolSyntax::kDeepSeekV4;
  if (shows(source, tool_markers(ToolSyntax::kDeepSeekV3).call_begin))
    return shows(source, "```json") ? ToolSyntax::kDeepSeekV3 : ToolSyntax::kDeepSeekV31;
  if (shows(source, tool_markers(ToolSyntax::kMiniMaxM2).section_begin)) return ToolSyntax::kMiniMaxM2;
  if (shows(source, tool_markers(ToolSyntax::kKimiK2).separator)) return ToolSyntax::kKimiK2;
  if (shows_channels(source)) return ToolSyntax::kGptOss;
  if (shows(source, tool_markers(ToolSyntax::kMistral).call_begin))
    return shows(source, tool_markers(ToolSyntax::kMistral).separator) ? ToolSyntax::kMistral
                                                                       : ToolSyntax::kMistralList;
  if (!shows(source, "<tool_call>")) return ToolSyntax::kNone;
  // Three write something else between the same markers, and Hy3 something that we do not read.
  if (shows(source, "tool_sep")) return ToolSyntax::kNone;
  if (shows(source, "<arg_key>"))
    return shows(source, "</arg_key><arg_value>") ? ToolSyntax::kGlm47 : ToolSyntax::kGlm45;
  if (shows(source, "<function=")) return ToolSyntax::kQwen3Coder;
  // MiniMax M3 writes arguments as tags of their own names, which we do not read.
  return shows(source, "<invoke name=") ? ToolSyntax::kNone : ToolSyntax::kHermes;
}

}  // namespace

ChatSyntax chat_syntax_of(std::string_view chat_template, const Tokenizer& tokenizer) {
  ChatSyntax syntax{.tools = shown_tools(chat_template)};
  if (shows_channels(chat_template)) return with_reasoning(syntax, *reasoning_syntax_named("gpt-oss"));
  for (const ThinkMarkers& markers : kThinkMarkers) {
    const bool thinks = chat_template.empty()
                            ? tokenizer.id_of(markers.begin) && tokenizer.id_of(markers.end)
                            : shows(chat_template, markers.begin) || shows(chat_template, markers.end);
    if (!thinks) continue;
    syntax.think_begin = markers.begin;
    syntax.think_end = markers.end;
    break;
  }
  return syntax;
}

bool prompt_opens_thinking(const ChatSyntax& syntax, std::string_view rendered_prompt) {
  if (syntax.think_begin.empty()) return false;
  const size_t last = rendered_prompt.find_last_not_of(" \n\r\t");
  return last != std::string_view::npos && rendered_prompt.substr(0, last + 1).ends_with(syntax.think_begin);
}

SpecialTokens answer_decoding(const ChatSyntax& syntax, const Tokenizer& tokenizer) {
  const CallSyntax& calls = call_syntax(syntax.tools);
  std::vector<std::string_view> spelled = {
      syntax.think_begin,        syntax.think_end,         calls.markers.section_begin,
      calls.markers.section_end, calls.markers.call_begin, calls.markers.separator,
      calls.markers.call_end,    calls.tags.key_begin,     calls.tags.key_end,
      calls.tags.value_begin,    calls.tags.value_end,     calls.tags.body_end};
  if (syntax.channels)
    spelled.insert(spelled.end(), {kChannels.start, kChannels.channel, kChannels.message, kChannels.end});
  const auto has_special = [&](const AddedToken& token) {
    return token.special && !token.content.empty() &&
           std::ranges::any_of(spelled,
                               [&](std::string_view marker) { return shows(marker, token.content); });
  };
  return std::ranges::any_of(tokenizer.added_tokens(), has_special) ? SpecialTokens::kKeep
                                                                    : SpecialTokens::kSkip;
}

std::vector<TokenId> answer_end_tokens(const ChatSyntax& syntax, const Tokenizer& tokenizer) {
  std::vector<TokenId> out;
  if (syntax.channels)
    for (const std::string_view marker : {kChannels.call, kChannels.answer_end})
      if (const auto id = tokenizer.id_of(marker); id && tokenizer.is_special(*id)) out.push_back(*id);
  return out;
}

}  // namespace kt
