// Names that other servers have for syntaxes of calls and of thoughts: one table for both.
#include <algorithm>

#include "server/syntax/call_syntax.h"
#include "server/syntax/chat_syntax.h"

namespace kt::inline server {
namespace {

enum class Thoughts {
  kUnsaid,    // the name is none of a syntax of thoughts
  kNone,      //
  kThink,     // <think> and </think>
  kOpen,      // <think:opensource> and </think:opensource>
  kBrackets,  // [THINK] and [/THINK]
  kMiniMax,   // <mm:think> and </mm:think>
  kAnalysis,  // the channel of that name
  kFrames,    // messages of that kind
};

struct ParserRow {
  std::string_view name;
  std::optional<ToolSyntax> tools;
  Thoughts thoughts = Thoughts::kUnsaid;
};

// The first name of a syntax is the one that people are shown.
constexpr std::array kParsers = {
    ParserRow{"hermes", ToolSyntax::kHermes},
    ParserRow{"qwen3", ToolSyntax::kHermes, Thoughts::kThink},
    ParserRow{"deepseek-r1", std::nullopt, Thoughts::kThink},
    ParserRow{"qwen", ToolSyntax::kHermes},
    ParserRow{"qwen25", ToolSyntax::kHermes},
    ParserRow{"qwen3-thinking", std::nullopt, Thoughts::kThink},
    ParserRow{"deepseekv3", ToolSyntax::kDeepSeekV3, Thoughts::kThink},
    ParserRow{"deepseekv31", ToolSyntax::kDeepSeekV31, Thoughts::kThink},
    ParserRow{"deepseekv32", ToolSyntax::kDeepSeekV32, Thoughts::kThink},
    ParserRow{"deepseekv4", ToolSyntax::kDeepSeekV4, Thoughts::kThink},
    ParserRow{"glm45", ToolSyntax::kGlm45, Thoughts::kThink},
    ParserRow{"glm47", ToolSyntax::kGlm47, Thoughts::kThink},
    ParserRow{"glm", ToolSyntax::kGlm45, Thoughts::kThink},
    ParserRow{"glm4", ToolSyntax::kGlm45, Thoughts::kThink},
    ParserRow{"glm46", ToolSyntax::kGlm45, Thoughts::kThink},
    ParserRow{"glm4_moe", ToolSyntax::kGlm45, Thoughts::kThink},
    ParserRow{"glm5", ToolSyntax::kGlm47, Thoughts::kThink},
    ParserRow{"qwen3_coder", ToolSyntax::kQwen3Coder, Thoughts::kThink},
    ParserRow{"qwen3_xml", ToolSyntax::kQwen3Coder},
    ParserRow{"qwen35", ToolSyntax::kQwen3Coder, Thoughts::kThink},
    ParserRow{"step3p5", ToolSyntax::kQwen3Coder, Thoughts::kThink},
    ParserRow{"minimax-m2", ToolSyntax::kMiniMaxM2, Thoughts::kThink},
    ParserRow{"minimax", std::nullopt, Thoughts::kThink},
    ParserRow{"minimax-append-think", std::nullopt, Thoughts::kThink},
    ParserRow{"minimax-m2-append-think", std::nullopt, Thoughts::kThink},
    ParserRow{"minimax-m3", std::nullopt, Thoughts::kMiniMax},
    ParserRow{"kimi_k2", ToolSyntax::kKimiK2, Thoughts::kThink},
    ParserRow{"gpt-oss", ToolSyntax::kGptOss, Thoughts::kAnalysis},
    ParserRow{"openai", ToolSyntax::kGptOss, Thoughts::kAnalysis},
    ParserRow{"openai-gptoss", std::nullopt, Thoughts::kAnalysis},
    ParserRow{"harmony", ToolSyntax::kGptOss, Thoughts::kAnalysis},
    ParserRow{"mistral", ToolSyntax::kMistral, Thoughts::kBrackets},
    ParserRow{"mistral-list", ToolSyntax::kMistralList},
    ParserRow{"hy_v3", ToolSyntax::kHy3, Thoughts::kThink},
    ParserRow{"hunyuan", ToolSyntax::kHy3, Thoughts::kThink},
    ParserRow{"hy_v3-opensource", ToolSyntax::kHy3Open, Thoughts::kOpen},
    ParserRow{"solar_open", ToolSyntax::kSolarOpen, Thoughts::kFrames},
    ParserRow{"none", ToolSyntax::kNone, Thoughts::kNone},
};

bool same_name(std::string_view a, std::string_view b) {
  const auto plain = [](std::string_view name) {
    std::string out;
    for (const char c : name)
      if (c != '-' && c != '_') out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    return out;
  };
  return plain(a) == plain(b);
}

const ParserRow* parser_named(std::string_view name, const ChatSyntax& shown) {
  auto row = std::ranges::find_if(kParsers, [&](const ParserRow& one) { return same_name(one.name, name); });
  if (row == kParsers.end()) return nullptr;
  // Others have one name for Hy3's two spellings.
  if (row->tools == ToolSyntax::kHy3 && shown.tools == ToolSyntax::kHy3Open)
    row = std::ranges::find(kParsers, std::optional(shown.tools), &ParserRow::tools);
  return &*row;
}

ChatSyntax syntax_of(Thoughts thoughts) {
  switch (thoughts) {
    case Thoughts::kThink:
      return {.think_begin = "<think>", .think_end = "</think>"};
    case Thoughts::kOpen:
      return {.think_begin = "<think:opensource>", .think_end = "</think:opensource>"};
    case Thoughts::kFrames:
      return {
          .think_begin = std::string(kFrames.thought), .think_end = std::string(kFrames.end), .frames = true};
    case Thoughts::kBrackets:
      return {.think_begin = "[THINK]", .think_end = "[/THINK]"};
    case Thoughts::kMiniMax:
      return {.think_begin = "<mm:think>", .think_end = "</mm:think>"};
    case Thoughts::kAnalysis:
      return {.think_begin = std::string(kChannels.channel) + "analysis" + std::string(kChannels.message),
              .think_end = std::string(kChannels.end),
              .channels = true};
    default:
      return {};
  }
}

}  // namespace

std::optional<ToolSyntax> tool_syntax_named(std::string_view name, const ChatSyntax& shown) {
  const ParserRow* const row = parser_named(name, shown);
  return row ? row->tools : std::nullopt;
}

std::optional<ChatSyntax> reasoning_syntax_named(std::string_view name, const ChatSyntax& shown) {
  const ParserRow* const row = parser_named(name, shown);
  if (!row || row->thoughts == Thoughts::kUnsaid) return std::nullopt;
  return syntax_of(row->thoughts);
}

std::vector<std::string> tool_parser_names() {
  std::vector<std::string> out;
  std::vector<ToolSyntax> seen;
  for (const ParserRow& row : kParsers) {
    if (!row.tools || std::ranges::find(seen, *row.tools) != seen.end()) continue;
    seen.push_back(*row.tools);
    out.emplace_back(row.name);
  }
  return out;
}

std::vector<std::string> reasoning_parser_names() {
  std::vector<std::string> out;
  for (const ParserRow& row : kParsers)
    if (row.thoughts != Thoughts::kUnsaid) out.emplace_back(row.name);
  return out;
}

std::vector<std::string> all_parser_names() {
  std::vector<std::string> out;
  for (const ParserRow& row : kParsers) out.emplace_back(row.name);
  return out;
}

std::string name_of(ToolSyntax syntax) {
  const auto row = std::ranges::find(kParsers, std::optional(syntax), &ParserRow::tools);
  return row == kParsers.end() ? "" : std::string(row->name);
}

ChatSyntax with_tool_syntax(ChatSyntax shown, ToolSyntax tools) {
  shown.tools = tools;
  if (tools == ToolSyntax::kGptOss && !shown.channels)
    return with_reasoning(std::move(shown), syntax_of(Thoughts::kAnalysis));
  if (tools == ToolSyntax::kSolarOpen && !shown.frames)
    return with_reasoning(std::move(shown), syntax_of(Thoughts::kFrames));
  return shown;
}

ChatSyntax with_reasoning(ChatSyntax shown, const ChatSyntax& named) {
  shown.think_begin = named.think_begin;
  shown.think_end = named.think_end;
  // Headers are read whether thoughts are wanted or not; other thoughts do not come in messages.
  const bool own = shown.tools == ToolSyntax::kGptOss || shown.tools == ToolSyntax::kSolarOpen;
  if (named.channels || named.frames || (!named.think_begin.empty() && !own)) {
    shown.channels = named.channels;
    shown.frames = named.frames;
  }
  return shown;
}

}  // namespace kt::inline server
