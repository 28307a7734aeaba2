#include <gmock/gmock.h>

#include <chrono>
#include <random>

#include "server/syntax/chat_syntax.h"
#include "server/syntax/json_scanner.h"

namespace kt::inline server {
namespace {

using Kind = ReplyPiece::Kind;
using ::testing::ElementsAre;

const ChatSyntax kQwen{.think_begin = "<think>", .think_end = "</think>", .tools = ToolSyntax::kHermes};
const ChatSyntax kPlain{};

ChatSyntax with(ToolSyntax tools) {
  return {.think_begin = "<think>", .think_end = "</think>", .tools = tools};
}

ReplyPiece thought(std::string text) { return {Kind::kReasoning, 0, std::move(text)}; }
ReplyPiece content(std::string text) { return {Kind::kContent, 0, std::move(text)}; }
ReplyPiece call(int number, std::string name) { return {Kind::kCall, number, std::move(name)}; }
ReplyPiece arguments(int number, std::string text) { return {Kind::kArguments, number, std::move(text)}; }

void join(std::vector<ReplyPiece>& all, const std::vector<ReplyPiece>& more) {
  for (const ReplyPiece& piece : more) {
    EXPECT_FALSE(piece.text.empty());
    if (!all.empty() && piece.kind != Kind::kCall && all.back().kind == piece.kind &&
        all.back().call == piece.call)
      all.back().text += piece.text;
    else
      all.push_back(piece);
  }
}

// The text in pieces that end at `cuts`.
std::vector<ReplyPiece> parse(const ChatSyntax& syntax, ReplyParser::Start start, std::string_view text,
                              const std::vector<size_t>& cuts = {}) {
  ReplyParser parser(syntax, start);
  std::vector<ReplyPiece> all;
  size_t done = 0;
  for (const size_t cut : cuts) {
    join(all, parser.push(text.substr(done, cut - done)));
    done = cut;
  }
  join(all, parser.push(text.substr(done)));
  join(all, parser.flush());
  return all;
}

std::vector<ReplyPiece> parse(std::string_view text) { return parse(kQwen, {.tools = true}, text); }

std::string all_of(const std::vector<ReplyPiece>& pieces, Kind kind) {
  std::string text;
  for (const ReplyPiece& piece : pieces)
    if (piece.kind == kind) text += piece.text;
  return text;
}

TEST(ReplyParser, PlainTextGoesStraightThrough) {
  ReplyParser parser(kPlain, {.tools = true});
  EXPECT_THAT(parser.push("a <tool_call> b "), ElementsAre(content("a <tool_call> b ")));
  EXPECT_THAT(parser.flush(), ElementsAre());
}

TEST(ReplyParser, SplitsThoughtFromAnswer) {
  EXPECT_THAT(parse("<think>\nhm\n\nso\n</think>\n\nYes."),
              ElementsAre(thought("hm\n\nso"), content("Yes.")));
  EXPECT_THAT(parse(" \n<think>a</think>b"), ElementsAre(thought("a"), content("b")));
  EXPECT_THAT(parse(kQwen, {.thinking = true}, "hm</think>\nYes."),
              ElementsAre(thought("hm"), content("Yes.")));
  EXPECT_THAT(parse(kQwen, {.thinking = true}, "\n<think>\nhm</think>Yes."),
              ElementsAre(thought("hm"), content("Yes.")));
  EXPECT_THAT(parse("<think>\n\n</think>\n\nYes."), ElementsAre(content("Yes.")));
  EXPECT_THAT(parse("\n</think>\n\nYes. </think>"), ElementsAre(content("Yes. </think>")));
  EXPECT_THAT(parse("</thin"), ElementsAre(content("</thin")));
}

TEST(ReplyParser, AnUnfinishedThoughtIsAllThought) {
  EXPECT_THAT(parse(kQwen, {.thinking = true}, "on and on </thi"), ElementsAre(thought("on and on </thi")));
  EXPECT_THAT(parse("<think>on <tool_call>{}</tool_call>\n"),
              ElementsAre(thought("on <tool_call>{}</tool_call>\n")));
  EXPECT_THAT(parse("<thin"), ElementsAre(content("<thin")));
}

TEST(ReplyParser, ThinkingMarkersLaterOnAreContent) {
  EXPECT_THAT(parse("Write <think> and </think>."), ElementsAre(content("Write <think> and </think>.")));
  EXPECT_THAT(parse(kPlain, {}, "<think>a</think>"), ElementsAre(content("<think>a</think>")));
}

TEST(ReplyParser, ReadsHermesCalls) {
  EXPECT_THAT(parse("<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\": [1, 2]}}\n</tool_call>"),
              ElementsAre(call(0, "get"), arguments(0, "{\"a\": [1, 2]}")));
  EXPECT_THAT(parse("<tool_call>{\"arguments\":{\"a\":\"}\\\"\"},\"name\":\"g\"}</tool_call>"),
              ElementsAre(call(0, "g"), arguments(0, "{\"a\":\"}\\\"\"}")));
  EXPECT_THAT(parse("<tool_call>{\"name\":\"g\",\"parameters\":{}}</tool_call>"),
              ElementsAre(call(0, "g"), arguments(0, "{}")));
  EXPECT_THAT(parse("<tool_call>{\"id\": 3, \"name\":\"g\"}</tool_call>"),
              ElementsAre(call(0, "g"), arguments(0, "{}")));
  EXPECT_THAT(parse("<tool_call>{\"name\":\"g\", \"arguments\": null, \"x\": [{}, -1.5e+3]}</tool_call>"),
              ElementsAre(call(0, "g"), arguments(0, "{}")));
}

TEST(ReplyParser, ReadsArgumentsInAString) {
  EXPECT_THAT(
      parse(R"(<tool_call>{"name":"g","arguments":"{\"a\": \"\u00e9\ud83d\ude00\\n\"}"}</tool_call>)"),
      ElementsAre(call(0, "g"), arguments(0, "{\"a\": \"\u00e9\U0001F600\\n\"}")));
  EXPECT_THAT(
      parse(R"(<tool_call>{"name":"g","arguments":"{\"a\": \"\ud83d\t\udc00\ud83dx\"}"}</tool_call>)"),
      ElementsAre(call(0, "g"), arguments(0, "{\"a\": \"\uFFFD\t\uFFFD\uFFFDx\"}")));
  EXPECT_THAT(parse(R"(<tool_call>{"arguments":"","name":"g"}</tool_call>)"),
              ElementsAre(call(0, "g"), arguments(0, "{}")));
  const std::string reply = R"(<tool_call>{"name":"g","arguments":"Berlin"}</tool_call>)";
  EXPECT_THAT(parse(reply), ElementsAre(content(reply)));
}

TEST(ReplyParser, ArgumentsStreamAsTheyCome) {
  ReplyParser parser(kQwen, {.tools = true});
  EXPECT_THAT(parser.push("Let me see. <tool"), ElementsAre(content("Let me see.")));
  EXPECT_THAT(parser.push("_call>\n{\"name\": \"get\", \"argu"), ElementsAre());
  EXPECT_THAT(parser.push("ments\": {\"ci"), ElementsAre(call(0, "get"), arguments(0, "{\"ci")));
  EXPECT_EQ(parser.calls(), 1);
  EXPECT_THAT(parser.push("ty\": \"<tool"), ElementsAre(arguments(0, "ty\": \"<tool")));
  EXPECT_THAT(parser.push("_call>\"}"), ElementsAre(arguments(0, "_call>\"}")));
  EXPECT_THAT(parser.push("}\n</tool_call>\n"), ElementsAre());
  EXPECT_THAT(parser.flush(), ElementsAre());
}

TEST(ReplyParser, SeveralCallsWithTextAround) {
  const std::string one = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";
  EXPECT_THAT(parse("<think>x</think>\nI look.\n\n" + one + "\n" + one + "\nDone. "),
              ElementsAre(thought("x"), content("I look."), call(0, "f"), arguments(0, "{}"), call(1, "f"),
                          arguments(1, "{}"), content("\n\nDone. ")));
  EXPECT_THAT(parse("\n" + one + "\n\n"), ElementsAre(call(0, "f"), arguments(0, "{}")));
  // The end marker is missing, as some models have it.
  EXPECT_THAT(parse("<tool_call>{\"name\":\"f\"}\n" + one),
              ElementsAre(call(0, "f"), arguments(0, "{}"), call(1, "f"), arguments(1, "{}")));
  EXPECT_THAT(parse("<tool_call>{\"name\":\"f\"}"), ElementsAre(call(0, "f"), arguments(0, "{}")));
}

TEST(ReplyParser, MalformedCallsAreContentAndNothingIsLost) {
  for (const std::string bad :
       {"<tool_call>{'name': 'f'}</tool_call>", "a <tool_call>\n[1]\n</tool_call> b",
        "<tool_call>{\"name\": \"f\"", "<tool_call>{\"name\": 3, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>", "<tool_call>", "x\n<tool_call>\n",
        "</tool_call>", "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key></tool_call>"})
    EXPECT_THAT(parse(bad), ElementsAre(content(bad)));
  EXPECT_THAT(parse("<tool_call>\n<tool_call>{\"name\":\"f\"}</tool_call>"),
              ElementsAre(content("<tool_call>"), call(0, "f"), arguments(0, "{}")));
}

TEST(ReplyParser, WhatBreaksWithinArgumentsGoesOnAsContent) {
  EXPECT_THAT(parse("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": tru3}}</tool_call>"),
              ElementsAre(call(0, "f"), arguments(0, "{\"a\": tru"), content("3}}</tool_call>")));
  EXPECT_THAT(parse("<tool_call>{\"name\": \"f\", \"arguments\": {}; \"x\"}</tool_call>"),
              ElementsAre(call(0, "f"), arguments(0, "{}"), content("; \"x\"}</tool_call>")));
  EXPECT_THAT(parse(R"(<tool_call>{"name": "f", "arguments": "{\q"}</tool_call>)"),
              ElementsAre(call(0, "f"), arguments(0, "{"), content(R"(\q"}</tool_call>)")));
  EXPECT_THAT(parse("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"unfini"),
              ElementsAre(call(0, "f"), arguments(0, "{\"a\": \"unfini")));
}

TEST(ReplyParser, ControlCharactersInStringsComeOutEscaped) {
  EXPECT_THAT(parse("<tool_call>{\"name\": \"f\", \"arguments\": {\n\"a\": \"x\ny\x01\"}}</tool_call>"),
              ElementsAre(call(0, "f"), arguments(0, "{\n\"a\": \"x\\ny\\u0001\"}")));
}

TEST(ReplyParser, NoCallsWithoutTools) {
  const std::string text = "<tool_call>{\"name\":\"f\"}</tool_call>\n";
  EXPECT_THAT(parse(kQwen, {}, text), ElementsAre(content(text)));
}

const std::string kV3Calls =
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{\"a\": "
    "1}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>put\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
const std::string kV31Calls =
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>put<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";

TEST(ReplyParser, ReadsDeepSeekCalls) {
  const auto both = ElementsAre(thought("hm"), content("I look."), call(0, "get"), arguments(0, "{\"a\": 1}"),
                                call(1, "put"), arguments(1, "{}"));
  EXPECT_THAT(parse(with(ToolSyntax::kDeepSeekV3), {.thinking = true, .tools = true},
                    "hm</think>\n\nI look." + kV3Calls),
              both);
  EXPECT_THAT(parse(with(ToolSyntax::kDeepSeekV31), {.thinking = true, .tools = true},
                    "hm</think>I look.\n" + kV31Calls + "\n"),
              both);
  EXPECT_THAT(parse(with(ToolSyntax::kDeepSeekV3), {.tools = true},
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n{}"),
              ElementsAre(call(0, "get"), arguments(0, "{}")));
}

TEST(ReplyParser, MalformedDeepSeekCallsAreContent) {
  for (const std::string bad :
       {"<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>\n",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n{}",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```xml\n{}",
        "<｜tool▁call▁begin｜>fun\nction<｜tool▁sep｜>f", "<｜tool▁call▁begin｜><｜tool▁sep｜>f\n{}"})
    EXPECT_THAT(parse(with(ToolSyntax::kDeepSeekV3), {.tools = true}, bad), ElementsAre(content(bad)));
  EXPECT_THAT(parse(with(ToolSyntax::kDeepSeekV31), {.tools = true},
                    "<｜tool▁call▁begin｜>fun<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
              ElementsAre(content("<｜tool▁call▁begin｜>fun"), call(0, "f"), arguments(0, "{}")));
}

// Whichever form the template shows, a model may write the other.
TEST(ReplyParser, ReadsBothOfMistralsForms) {
  struct Row {
    std::string text;
    std::vector<ReplyPiece> pieces;
  };
  const std::string item = R"({"name": "f", "arguments": {"a": [1]}})", list = "[TOOL_CALLS] [" + item;
  const ReplyPiece f = call(0, "f"), a = arguments(0, R"({"a": [1]})"), g = call(1, "g"),
                   none = arguments(1, "{}");
  for (const Row& row : {
           Row{list + "]", {f, a}},
           Row{R"([TOOL_CALLS][{"id": "abc123def", "name": "f"}])", {f, arguments(0, "{}")}},
           Row{"[TOOL_CALLS]\n[ " + item + " ,\n{\"name\": \"g\", \"id\": null} ]\n ", {f, a, g, none}},
           Row{list + R"(,{"arguments": "{\"b\": 2}", "name": "g"}])",
               {f, a, g, arguments(1, R"({"b": 2})")}},
           Row{"I look.\n" + list + "]\n\nDone", {content("I look."), f, a, content("\nDone")}},
           Row{list + "][TOOL_CALLS]g[ARGS]{}", {f, a, g, none}},
           Row{"[TOOL_CALLS] f[ARGS]{\"a\": [1]}[TOOL_CALLS] [{\"name\": \"g\"}]", {f, a, g, none}},
           // Broken: content from there on, where markers are looked for again.
           Row{list + ", {\"name\": 3}] x", {f, a, content(", {\"name\": 3}] x")}},
           Row{list + ", ]", {f, a, content(", ]")}},
           Row{list + " x]", {f, a, content("x]")}},
           Row{list + "}]", {f, a, content("}]")}},
           Row{list + ", x[TOOL_CALLS]g[ARGS]{}", {f, a, content(", x"), g, none}},
           Row{list + R"(, {"name": "g", "arguments": {"b": tru3}}, )" + item + "]",
               {f, a, g, arguments(1, "{\"b\": tru"), content("3}}, " + item + "]")}},
           // The answer ends.
           Row{list, {f, a}},
           Row{list + ", ", {f, a, content(", ")}},
           Row{list + ", {\"name\": \"g\"", {f, a, content(", {\"name\": \"g\"")}},
           Row{list + R"(, {"name": "g", "arguments": {"b": "x)", {f, a, g, arguments(1, "{\"b\": \"x")}},
       })
    for (const ToolSyntax syntax : {ToolSyntax::kMistral, ToolSyntax::kMistralList}) {
      const std::string& text = row.text;
      std::vector<size_t> bytes;
      for (size_t cut = 0; cut <= text.size(); ++cut) {
        EXPECT_EQ(parse(with(syntax), {.tools = true}, text, {cut}), row.pieces) << text << cut;
        bytes.push_back(cut);
      }
      EXPECT_EQ(parse(with(syntax), {.tools = true}, text, bytes), row.pieces) << text;
    }
}

TEST(ReplyParser, CallsOfAListStreamAndMayBeCutOff) {
  ReplyParser parser(with(ToolSyntax::kMistralList), {.tools = true});
  EXPECT_THAT(parser.push("[TOOL_CALLS] [{\"name\": \"f\", \"argu"), ElementsAre());
  EXPECT_THAT(parser.push("ments\": {\"a"), ElementsAre(call(0, "f"), arguments(0, "{\"a")));
  EXPECT_THAT(parser.push("\": 1}"), ElementsAre(arguments(0, "\": 1}")));
  EXPECT_THAT(parser.push(", \"id\": \"abc123def\"}, {\"name\": \"g"), ElementsAre());
  EXPECT_THAT(parser.push("\", \"arguments\": {}"), ElementsAre(call(1, "g"), arguments(1, "{}")));
  EXPECT_THAT(parser.push("}]"), ElementsAre());
  EXPECT_THAT(parser.flush(), ElementsAre());
  EXPECT_EQ(parser.calls(), 2);
  EXPECT_FALSE(parser.cut_off());
  const std::string first = R"([TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"})";
  for (const auto& [text, cut_off] :
       std::to_array<std::pair<std::string, bool>>({{first, false},
                                                    {first + ", {\"name\"", false},
                                                    {first + "]", false},
                                                    {first.substr(0, first.size() - 2), true},
                                                    {first + R"(, {"name": "g", "arguments": {"a)", true}})) {
    ReplyParser ended(with(ToolSyntax::kMistralList), {.tools = true});
    ended.push(text);
    ended.flush();
    EXPECT_EQ(ended.cut_off(), cut_off) << text;
  }
}

struct Sample {
  ChatSyntax syntax;
  std::string text;
};
std::vector<Sample> samples() {
  const std::string one = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";
  return {
      {kQwen, "<think>\na < b </thin\n </think>\n\nText <tool\n" + one + " \n" + one + " after "},
      {kQwen,
       "<tool_call>\n{\"arguments\": {\"a\": \"<tool_call> \\\\\\\"\nx\"}, \"name\": "
       "\"g\\u0041\"}\n</tool_call>"},
      {kQwen,
       R"(<tool_call>{"name":"g","arguments":" {\"a\": \"\ud83d\ude00\ud83d\n\ud83dx\\\"\"}"}</tool_call>x)"},
      {kQwen,
       "  <tool_call>{\"name\": <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1.5e}}</tool_call> b"},
      {kQwen,
       "x <tool_call>{\"name\": \"f\", \"n\": -12, \"arguments\": {\"a\": [true, null]} , }</tool_call>"},
      {kQwen, "\n\n" + one + "\n<tool_call>{\"name\": \"f\" <tool_call>{\"name\": \"h\"}</tool_c"},
      {with(ToolSyntax::kDeepSeekV3), "hm " + kV3Calls + "\n more <｜tool▁calls▁end｜>"},
      {with(ToolSyntax::kDeepSeekV3),
       "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>function<｜tool▁sep｜>f <x"},
      {with(ToolSyntax::kDeepSeekV31), kV31Calls + "<｜tool▁calls▁begin｜>x" + kV31Calls},
      {with(ToolSyntax::kMistralList),
       "<think>so</think>a [TOOL_CALLS] [ {\"name\": \"f\", \"id\": 1} , {\"name\": \"g\", \"arguments\": "
       "{\"a\": "
       "\"]}\"}}]\n[TOOL_CALLS] [{\"name\": \"h\"}, {\"name\" [TOOL_CALLS]k[ARGS]{} b"},
  };
}

TEST(ReplyParser, AnySplitGivesTheSame) {
  for (const auto& [syntax, text] : samples())
    for (const ReplyParser::Start& start :
         {ReplyParser::Start{.tools = true}, {.thinking = true, .tools = true}, {}}) {
      const std::vector<ReplyPiece> whole = parse(syntax, start, text);
      for (size_t first = 0; first <= text.size(); ++first) {
        ASSERT_EQ(parse(syntax, start, text, {first}), whole) << text << " cut at " << first;
        for (const size_t gap : {1, 2, 3, 7, 20})
          ASSERT_EQ(parse(syntax, start, text, {first, std::min(first + gap, text.size())}), whole)
              << text << " cut at " << first << " and " << gap << " on";
      }
    }
}

// Random texts from the pieces that matter, in random cuts.
TEST(ReplyParser, RandomTextsInRandomCuts) {
  const std::vector<std::string> words = {"<tool_call>{\"name\": \"f\", \"arguments\": {",
                                          "}}</tool_call>",
                                          "<tool_call>{\"name\": \"f\"}",
                                          "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
                                          "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n",
                                          "{}",
                                          "<tool_call>",
                                          "</tool_call>",
                                          "<think>",
                                          "</think>",
                                          "\n",
                                          " ",
                                          "{\"name\": \"f\"",
                                          ", \"arguments\": {",
                                          "}",
                                          "\"",
                                          "\\",
                                          "a",
                                          "\"k\": 1",
                                          "<",
                                          "<tool_",
                                          "[",
                                          "]",
                                          ",",
                                          "{\"name\": \"f\", \"arguments\": \"{",
                                          "\\u00e9",
                                          "\\ud83d",
                                          "\\ude00",
                                          "-1",
                                          "<｜tool▁calls▁begin｜>",
                                          "<｜tool▁call▁begin｜>",
                                          "function",
                                          "<｜tool▁sep｜>",
                                          "f\n",
                                          "```json\n",
                                          "{",
                                          "\n```",
                                          "<｜tool▁call▁end｜>",
                                          "<｜tool▁calls▁end｜>"};
  std::mt19937 random(7);
  const auto below = [&](size_t n) { return random() % n; };
  size_t called = 0;
  for (int round = 0; round < 20000; ++round) {
    const ToolSyntax tools =
        std::array{ToolSyntax::kHermes, ToolSyntax::kDeepSeekV3, ToolSyntax::kDeepSeekV31}[below(3)];
    const ReplyParser::Start start{.thinking = below(4) == 0, .tools = below(8) != 0};
    std::string text;
    for (size_t n = below(14); n > 0; --n) text += words[below(words.size())];
    std::vector<size_t> cuts;
    for (size_t at = below(4); at < text.size(); at += below(6)) cuts.push_back(at);
    const std::vector<ReplyPiece> whole = parse(with(tools), start, text);
    ASSERT_EQ(parse(with(tools), start, text, cuts), whole) << text;
    called += std::ranges::any_of(whole, [](const ReplyPiece& piece) { return piece.kind == Kind::kCall; });
    if (called == 0 && !start.thinking && text.find("think>") == std::string::npos && !start.tools) {
      ASSERT_EQ(all_of(whole, Kind::kContent), text);
    }
  }
  EXPECT_GT(called, 100u);
}

double seconds_of(std::string_view text, size_t piece) {
  const auto begin = std::chrono::steady_clock::now();
  ReplyParser parser(kQwen, {.tools = true});
  size_t size = 0;
  const auto count = [&](const std::vector<ReplyPiece>& pieces) {
    for (const ReplyPiece& out : pieces) size += out.text.size();
  };
  for (size_t at = 0; at < text.size(); at += piece) count(parser.push(text.substr(at, piece)));
  count(parser.flush());
  if (!text.starts_with("<think>")) {
    EXPECT_GE(size, text.size() / 2);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A quadratic parser would take hours, this one a second on any machine that is not busy.
TEST(ReplyParser, HostileTextTakesLinearTime) {
  constexpr double kPatience = 600;
  for (const std::string unit :
       {"<tool_ca", "<tool_call>", "<tool_call>{\"", "<tool_call>{\"a\":[\"<tool_call>{\",1,",
        "<tool_call>{\"name\":\"f\"", "</tool_call>", "<", " ", "<think>", "<tool_call>{\"a\":\"",
        "<tool_call>{\"arguments\":{\"a\":["}) {
    std::string text;
    while (text.size() < (unit == "<tool_ca" ? 10'000'000u : 1'000'000u)) text += unit;
    EXPECT_LT(seconds_of(text, text.size()), kPatience) << unit;
    EXPECT_LT(seconds_of(text, 5), kPatience) << unit;
  }
  std::string one = "<tool_call>{\"arguments\": {\"a\": \"";
  one.append(1'000'000, 'x');
  EXPECT_LT(seconds_of(one, 5), kPatience);
  EXPECT_LT(seconds_of("<think>" + one, 5), kPatience);
}

TEST(JsonScanner, AgreesWithTheReader) {
  const std::vector<std::string> parts = {"{",   "}",  "[",   "]",  ",",  ":",    "\"a\"", "\"\\n\\u00e9\"",
                                          "1",   "-0", "0.5", "01", "1.", "true", "false", "null",
                                          "nul", " ",  "\n",  "\""};
  std::mt19937 random(3);
  size_t valid = 0;
  for (int round = 0; round < 200000; ++round) {
    std::string text;
    for (size_t n = 1 + random() % 7; n > 0; --n) text += parts[random() % parts.size()];
    const bool reads = !nlohmann::json::parse(text, nullptr, false).is_discarded();
    // The scanner takes control characters in strings.
    if (!reads && text.find("\"") != std::string::npos && text.find('\n') != std::string::npos) continue;
    ASSERT_EQ(is_json(text), reads) << text;
    valid += reads;
  }
  EXPECT_GT(valid, 1000u);
  for (const std::string_view number : {"1e9", "-1.5E-3", "0e+0", "1E01"})
    EXPECT_TRUE(is_json(number)) << number;
  for (const std::string_view number : {"1e", "1e+", "e1", ".5", "1.e1", "+1", "-", "1e1.5"})
    EXPECT_FALSE(is_json(number)) << number;
  EXPECT_FALSE(is_json(std::string(300, '[') + std::string(300, ']')));
}

}  // namespace
}  // namespace kt::inline server
