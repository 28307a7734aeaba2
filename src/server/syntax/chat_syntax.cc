#include "server/syntax/chat_syntax.h"

#include <algorithm>

#include "server/syntax/call_syntax.h"

namespace kt::inline server {
namespace {

// Names of parsers: the first whose markers a template shows is the one.
constexpr std::array kThoughts = {"qwen3", "mistral", "minimax-m3"};

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
  if (shows(source, tool_markers(ToolSyntax::kSolarOpen).call_begin)) return ToolSyntax::kSolarOpen;
  if (shows(source, "<tool_sep") && shows(source, "<arg_key")) {
    if (shows(source, ":opensource")) return ToolSyntax::kHy3Open;
    return shows(source, call_syntax(ToolSyntax::kHy3).tags.name_end) ? ToolSyntax::kHy3 : ToolSyntax::kNone;
  }
  if (!shows(source, "<tool_call>")) return ToolSyntax::kNone;
  // Three write something else between the same markers.
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
  if (syntax.tools == ToolSyntax::kHy3Open || syntax.tools == ToolSyntax::kSolarOpen)
    return with_reasoning(syntax, *reasoning_syntax_named(name_of(syntax.tools)));
  for (const char* name : kThoughts) {
    const ChatSyntax named = *reasoning_syntax_named(name);
    const bool thinks =
        chat_template.empty()
            ? tokenizer.id_of(named.think_begin) && tokenizer.id_of(named.think_end)
            : shows(chat_template, named.think_begin) || shows(chat_template, named.think_end);
    if (thinks) return with_reasoning(syntax, named);
  }
  return syntax;
}

bool prompt_opens_thinking(const ChatSyntax& syntax, std::string_view rendered_prompt) {
  if (syntax.think_begin.empty()) return false;
  const size_t last = rendered_prompt.find_last_not_of(" \n\r\t");
  return last != std::string_view::npos && rendered_prompt.substr(0, last + 1).ends_with(syntax.think_begin);
}

SpecialTokens answer_decoding(const ChatSyntax& syntax, const Tokenizer& tokenizer) {
  std::vector<std::string_view> spelled = markers_of(call_syntax(syntax.tools));
  spelled.insert(spelled.end(), {syntax.think_begin, syntax.think_end});
  if (syntax.channels)
    spelled.insert(spelled.end(), {kChannels.start, kChannels.channel, kChannels.message, kChannels.end});
  if (syntax.frames)
    spelled.insert(spelled.end(), {kFrames.begin, kFrames.thought, kFrames.text, kFrames.end});
  const auto has_special = [&](const AddedToken& token) {
    return token.special && !token.content.empty() &&
           std::ranges::any_of(spelled,
                               [&](std::string_view marker) { return shows(marker, token.content); });
  };
  return std::ranges::any_of(tokenizer.added_tokens(), has_special) ? SpecialTokens::kKeep
                                                                    : SpecialTokens::kSkip;
}

std::vector<TokenId> answer_end_tokens(const ChatSyntax& syntax, const Tokenizer& tokenizer) {
  std::vector<std::string_view> markers;
  if (syntax.channels) markers = {kChannels.call, kChannels.answer_end};
  if (syntax.frames) markers = {kFrames.answer_end, tool_markers(ToolSyntax::kSolarOpen).section_end};
  std::vector<TokenId> out;
  for (const std::string_view marker : markers)
    if (const auto id = tokenizer.id_of(marker); id && tokenizer.is_special(*id)) out.push_back(*id);
  return out;
}

}  // namespace kt::inline server
