#include "server/syntax/call_syntax.h"

namespace kt::inline server {
namespace {

constexpr ToolMarkers kSeekMarkers{.section_begin = "<｜tool▁calls▁begin｜>",
                                   .section_end = "<｜tool▁calls▁end｜>",
                                   .call_begin = "<｜tool▁call▁begin｜>",
                                   .separator = "<｜tool▁sep｜>",
                                   .call_end = "<｜tool▁call▁end｜>"};

constexpr TagMarkers kGlmTags{.key_begin = "<arg_key>",
                              .key_end = "</arg_key>",
                              .value_begin = "<arg_value>",
                              .value_end = "</arg_value>"};

constexpr TagMarkers kHyTags{.name_end = "<tool_sep>",
                             .key_begin = "<arg_key>",
                             .key_end = "</arg_key>",
                             .value_begin = "<arg_value>",
                             .value_end = "</arg_value>"};
constexpr TagMarkers kHyOpenTags{.name_end = "<tool_sep:opensource>",
                                 .key_begin = "<arg_key:opensource>",
                                 .key_end = "</arg_key:opensource>",
                                 .value_begin = "<arg_value:opensource>",
                                 .value_end = "</arg_value:opensource>"};

constexpr TagMarkers kDsmlTags{.name_end = "\">",
                               .key_begin = "<｜DSML｜parameter name=\"",
                               .key_end = "\">",
                               .string_key_end = "\" string=\"true\">",
                               .json_key_end = "\" string=\"false\">",
                               .value_end = "</｜DSML｜parameter>"};

constexpr CallSyntax kNoCalls{};
constexpr CallSyntax kHermes{.form = CallForm::kObject,
                             .markers = {.call_begin = "<tool_call>", .call_end = "</tool_call>"},
                             .line = "\n"};
constexpr CallSyntax kSeekV3{.form = CallForm::kFenced, .markers = kSeekMarkers, .line = "\n"};
constexpr CallSyntax kSeekV31{.form = CallForm::kNamed, .markers = kSeekMarkers};
constexpr CallSyntax dsml(std::string_view section_begin, std::string_view section_end) {
  return {.form = CallForm::kTags,
          .markers = {.section_begin = section_begin,
                      .section_end = section_end,
                      .call_begin = "<｜DSML｜invoke name=\"",
                      .call_end = "</｜DSML｜invoke>"},
          .tags = kDsmlTags,
          .line = "\n",
          .name_line = "\n",
          .needs_section = true};
}
constexpr CallSyntax kSeekV32 = dsml("<｜DSML｜function_calls>", "</｜DSML｜function_calls>");
constexpr CallSyntax kSeekV4 = dsml("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>");
constexpr CallSyntax kGlmLines{.form = CallForm::kTags,
                               .markers = {.call_begin = "<tool_call>", .call_end = "</tool_call>"},
                               .tags = kGlmTags,
                               .line = "\n",
                               .name_line = "\n"};
constexpr CallSyntax kGlmTight{.form = CallForm::kTags,
                               .markers = {.call_begin = "<tool_call>", .call_end = "</tool_call>"},
                               .tags = kGlmTags};
constexpr CallSyntax kCoder{.form = CallForm::kTags,
                            .markers = {.call_begin = "<tool_call>", .call_end = "</tool_call>"},
                            .tags = {.name_begin = "<function=",
                                     .name_end = ">",
                                     .key_begin = "<parameter=",
                                     .key_end = ">",
                                     .value_end = "</parameter>",
                                     .body_end = "</function>",
                                     .value_lines = true},
                            .line = "\n",
                            .name_line = "\n"};
constexpr CallSyntax kMiniMax{.form = CallForm::kTags,
                              .markers = {.section_begin = "<minimax:tool_call>",
                                          .section_end = "</minimax:tool_call>",
                                          .call_begin = "<invoke name=\"",
                                          .call_end = "</invoke>"},
                              .tags = {.name_end = "\">",
                                       .key_begin = "<parameter name=\"",
                                       .key_end = "\">",
                                       .value_end = "</parameter>"},
                              .line = "\n",
                              .name_line = "\n",
                              .needs_section = true};
constexpr CallSyntax kKimi{.form = CallForm::kNamed,
                           .markers = {.section_begin = "<|tool_calls_section_begin|>",
                                       .section_end = "<|tool_calls_section_end|>",
                                       .call_begin = "<|tool_call_begin|>",
                                       .separator = "<|tool_call_argument_begin|>",
                                       .call_end = "<|tool_call_end|>"},
                           .ids = IdPlace::kInName,
                           .ends_thought = true};
constexpr CallSyntax kChannelCalls{.form = CallForm::kChannel};
constexpr ToolMarkers kMistralMarkers{
    .call_begin = "[TOOL_CALLS]", .separator = "[ARGS]", .id_mark = "[CALL_ID]"};
constexpr CallSyntax mistral(CallForm form) {
  return {.form = form, .markers = kMistralMarkers, .lists = true, .ids = IdPlace::kBehindName};
}
constexpr CallSyntax kMistral = mistral(CallForm::kNamed), kMistralList = mistral(CallForm::kList);
constexpr CallSyntax hy3(const ToolMarkers& markers, const TagMarkers& tags) {
  return {.form = CallForm::kTags, .markers = markers, .tags = tags, .line = "\n", .name_line = "\n"};
}
constexpr CallSyntax kHy = hy3({.section_begin = "<tool_calls>",
                                .section_end = "</tool_calls>",
                                .call_begin = "<tool_call>",
                                .call_end = "</tool_call>"},
                               kHyTags);
constexpr CallSyntax kHyOpen = hy3({.section_begin = "<tool_calls:opensource>",
                                    .section_end = "</tool_calls:opensource>",
                                    .call_begin = "<tool_call:opensource>",
                                    .call_end = "</tool_call:opensource>"},
                                   kHyOpenTags);
constexpr CallSyntax kSolar{.form = CallForm::kNamed,
                            .markers = {.section_begin = "<|tool_calls|>",
                                        .section_end = "<|calls|>",
                                        .call_begin = "<|tool_call:begin|>",
                                        .separator = "<|tool_call:args|>",
                                        .call_end = "<|tool_call:end|>",
                                        .id_mark = "<|tool_call:name|>"},
                            .ids = IdPlace::kBeforeName,
                            .ends_thought = true,
                            .section_ends_answer = true};

}  // namespace

const CallSyntax& call_syntax(ToolSyntax syntax) {
  switch (syntax) {
    case ToolSyntax::kNone:
      break;
    case ToolSyntax::kHermes:
      return kHermes;
    case ToolSyntax::kDeepSeekV3:
      return kSeekV3;
    case ToolSyntax::kDeepSeekV31:
      return kSeekV31;
    case ToolSyntax::kDeepSeekV32:
      return kSeekV32;
    case ToolSyntax::kDeepSeekV4:
      return kSeekV4;
    case ToolSyntax::kGlm45:
      return kGlmLines;
    case ToolSyntax::kGlm47:
      return kGlmTight;
    case ToolSyntax::kQwen3Coder:
      return kCoder;
    case ToolSyntax::kMiniMaxM2:
      return kMiniMax;
    case ToolSyntax::kKimiK2:
      return kKimi;
    case ToolSyntax::kGptOss:
      return kChannelCalls;
    case ToolSyntax::kMistral:
      return kMistral;
    case ToolSyntax::kMistralList:
      return kMistralList;
    case ToolSyntax::kHy3:
      return kHy;
    case ToolSyntax::kHy3Open:
      return kHyOpen;
    case ToolSyntax::kSolarOpen:
      return kSolar;
  }
  return kNoCalls;
}

std::vector<std::string_view> markers_of(const CallSyntax& syntax) {
  const ToolMarkers& around = syntax.markers;
  const TagMarkers& tags = syntax.tags;
  std::vector<std::string_view> all = {
      around.section_begin, around.section_end, around.call_begin, around.separator, around.call_end,
      around.id_mark,       tags.name_begin,    tags.name_end,     tags.key_begin,   tags.key_end,
      tags.string_key_end,  tags.json_key_end,  tags.value_begin,  tags.value_end,   tags.body_end};
  std::erase_if(all, [](std::string_view marker) { return marker.empty(); });
  return all;
}

}  // namespace kt::inline server
