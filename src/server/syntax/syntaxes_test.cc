// Every syntax of calls in one table: what is written comes back, however it is cut.
#include <gmock/gmock.h>

#include <chrono>
#include <random>

#include "server/syntax/call_syntax.h"

namespace kt::inline server {
namespace {

using Kind = ReplyPiece::Kind;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

const OrderedJson& all_tools() {
  static const OrderedJson made = template_tools(OrderedJson::parse(R"([
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object",
      "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}, "word": {"type": "string"}},
      "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "part": {"type": "number"}, "now": {"type": "boolean"},
        "none": {"type": "null"}, "tags": {"type": "array", "items": {"type": "string"}},
        "at": {"$ref": "#/$defs/place"},
        "word": {"$ref": "#/$defs/word"}, "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]}, "unit": {"enum": ["c", "f"]}, "any": {}}}}},
    {"type": "function", "function": {"name": "ns.now-2"}}])"));
  return made;
}

ReplyParser::Start with_tools() {
  static const auto types = std::make_shared<const ArgumentTypes>(all_tools());
  return {.tools = true, .types = types};
}

ChatSyntax plain(ToolSyntax tools) { return with_tool_syntax({}, tools); }

struct Call {
  std::string name;
  OrderedJson arguments;
};

// A call as the documents of its family show it, spelled here once more.
std::string written(ToolSyntax syntax, const std::vector<Call>& calls) {
  const auto text_of = [](const OrderedJson& value) {
    return value.is_string() ? value.get<std::string>() : spaced_json(value);
  };
  std::string out;
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto& [name, arguments] = calls[i];
    const std::string json = spaced_json(arguments);
    std::string keys;
    const auto each = [&](auto part) {
      for (const auto& [key, value] : arguments.items()) keys += part(key, value);
    };
    switch (syntax) {
      case ToolSyntax::kNone:
        break;
      case ToolSyntax::kHermes:
        out += (i > 0 ? "\n" : "") + ("<tool_call>\n{\"name\": \"" + name + "\", \"arguments\": ") + json +
               "}\n</tool_call>";
        break;
      case ToolSyntax::kDeepSeekV3:
        out += (i > 0 ? "\n" : "<｜tool▁calls▁begin｜>") +
               ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + name + "\n```json\n" + json) +
               "\n```<｜tool▁call▁end｜>";
        break;
      case ToolSyntax::kDeepSeekV31:
        out += (i > 0 ? "" : "<｜tool▁calls▁begin｜>") +
               ("<｜tool▁call▁begin｜>" + name + "<｜tool▁sep｜>" + json + "<｜tool▁call▁end｜>");
        break;
      case ToolSyntax::kDeepSeekV32:
      case ToolSyntax::kDeepSeekV4:
        each([&](const std::string& key, const OrderedJson& value) {
          return "<｜DSML｜parameter name=\"" + key + "\" string=\"" +
                 (value.is_string() ? "true" : "false") + "\">" + text_of(value) + "</｜DSML｜parameter>\n";
        });
        if (i == 0)
          out += syntax == ToolSyntax::kDeepSeekV4 ? "<｜DSML｜tool_calls>\n" : "<｜DSML｜function_calls>\n";
        out += "<｜DSML｜invoke name=\"" + name + "\">\n" + keys + "</｜DSML｜invoke>\n";
        break;
      case ToolSyntax::kGlm45:
        each([&](const std::string& key, const OrderedJson& value) {
          return "<arg_key>" + key + "</arg_key>\n<arg_value>" + text_of(value) + "</arg_value>\n";
        });
        out += (i > 0 ? "\n" : "") + ("<tool_call>" + name + "\n" + keys + "</tool_call>");
        break;
      case ToolSyntax::kGlm47:
        each([&](const std::string& key, const OrderedJson& value) {
          return "<arg_key>" + key + "</arg_key><arg_value>" + text_of(value) + "</arg_value>";
        });
        out += "<tool_call>" + name + keys + "</tool_call>";
        break;
      case ToolSyntax::kQwen3Coder:
        each([&](const std::string& key, const OrderedJson& value) {
          return "<parameter=" + key + ">\n" + text_of(value) + "\n</parameter>\n";
        });
        out += (i > 0 ? "\n" : "") +
               ("<tool_call>\n<function=" + name + ">\n" + keys + "</function>\n</tool_call>");
        break;
      case ToolSyntax::kMiniMaxM2:
        each([&](const std::string& key, const OrderedJson& value) {
          return "<parameter name=\"" + key + "\">" + text_of(value) + "</parameter>\n";
        });
        out += (i > 0 ? "" : "<minimax:tool_call>\n") +
               ("<invoke name=\"" + name + "\">\n" + keys + "</invoke>\n");
        break;
      case ToolSyntax::kKimiK2:
        out += (i > 0 ? "" : "<|tool_calls_section_begin|>") +
               ("<|tool_call_begin|>functions." + name + ":" + std::to_string(i) +
                "<|tool_call_argument_begin|>" + json + "<|tool_call_end|>");
        break;
      case ToolSyntax::kGptOss:
        out += (i > 0 ? "<|start|>assistant" : "") + ("<|channel|>commentary to=functions." + name +
                                                      " <|constrain|>json<|message|>" + json + "<|call|>");
        break;
      case ToolSyntax::kMistral:
        // Some of its models write ids.
        out +=
            "[TOOL_CALLS]" + name + (i > 0 ? "[CALL_ID]abc123de" + std::to_string(i) : "") + "[ARGS]" + json;
        break;
      case ToolSyntax::kHy3:
      case ToolSyntax::kHy3Open: {
        const std::string more = syntax == ToolSyntax::kHy3 ? ">" : ":opensource>";
        each([&](const std::string& key, const OrderedJson& value) {
          return "<arg_key" + more + key + "</arg_key" + more + "\n<arg_value" + more + text_of(value) +
                 "</arg_value" + more + "\n";
        });
        out += (i > 0 ? "" : "<tool_calls" + more + "\n") +
               ("<tool_call" + more + name + "<tool_sep" + more + "\n" + keys + "</tool_call" + more + "\n");
        break;
      }
      case ToolSyntax::kSolarOpen:
        out += (i > 0 ? "" : "<|tool_calls|>") + ("<|tool_call:begin|>a1b2c3d4e" + std::to_string(i)) +
               "<|tool_call:name|>" + name + "<|tool_call:args|>" + json + "<|tool_call:end|>";
        break;
      case ToolSyntax::kMistralList:
        out += (i > 0 ? ", " : "[TOOL_CALLS] [") +
               ("{\"name\": \"" + name + "\", \"arguments\": " + json + ", \"id\": \"abc123de") +
               std::to_string(i) + "\"}";
        break;
    }
  }
  constexpr auto kEnds = std::to_array<std::pair<ToolSyntax, std::string_view>>(
      {{ToolSyntax::kDeepSeekV3, "<｜tool▁calls▁end｜>"},
       {ToolSyntax::kDeepSeekV31, "<｜tool▁calls▁end｜>"},
       {ToolSyntax::kDeepSeekV32, "</｜DSML｜function_calls>"},
       {ToolSyntax::kDeepSeekV4, "</｜DSML｜tool_calls>"},
       {ToolSyntax::kMiniMaxM2, "</minimax:tool_call>"},
       {ToolSyntax::kKimiK2, "<|tool_calls_section_end|>"},
       {ToolSyntax::kMistralList, "]"},
       {ToolSyntax::kHy3, "</tool_calls>"},
       {ToolSyntax::kHy3Open, "</tool_calls:opensource>"},
       {ToolSyntax::kSolarOpen, "<|calls|>"}});
  for (const auto& [of, end] : kEnds)
    if (of == syntax) out += end;
  return out;
}

struct Parsed {
  std::string thought = {}, content = {};
  std::vector<std::string> names = {}, arguments = {}, ids = {};
  bool cut_off = false;
  bool operator==(const Parsed&) const = default;
};

Parsed parsed(const ChatSyntax& syntax, std::string_view text, const std::vector<size_t>& cuts = {},
              ReplyParser::Start start = with_tools(), AnswerEnd end = AnswerEnd::kStop) {
  ReplyParser parser(syntax, std::move(start));
  Parsed out;
  const auto add = [&](const std::vector<ReplyPiece>& pieces) {
    for (const ReplyPiece& piece : pieces) {
      EXPECT_FALSE(piece.text.empty());
      if (piece.kind == Kind::kReasoning) out.thought += piece.text;
      if (piece.kind == Kind::kContent) out.content += piece.text;
      if (piece.kind == Kind::kArguments) out.arguments.at(static_cast<size_t>(piece.call)) += piece.text;
      if (piece.kind != Kind::kCall) continue;
      EXPECT_EQ(piece.call, static_cast<int>(out.names.size()));
      out.names.push_back(piece.text);
      out.ids.push_back(piece.id);
      out.arguments.emplace_back();
    }
  };
  size_t done = 0;
  for (const size_t cut : cuts) {
    add(parser.push(text.substr(done, cut - done)));
    done = cut;
  }
  add(parser.push(text.substr(done)));
  add(parser.flush(end));
  out.cut_off = parser.cut_off();
  return out;
}

std::vector<size_t> every_byte(std::string_view text) {
  std::vector<size_t> cuts;
  for (size_t i = 1; i < text.size(); ++i) cuts.push_back(i);
  return cuts;
}

// Arguments of several shapes; markers of all syntaxes stand in them as text.
std::vector<std::vector<Call>> shapes() {
  const std::string hard =
      "a \"q\" \\ \t é😀\n\n</tool_call> <arg_value>x</arg_key> </function> <|call|> [ARGS] </invoke> "
      "<parameter=x> </parameter </arg_valu ｜DSML｜ <tool_sep> </tool_calls> <|tool_call:end|> <|calls|> "
      "<|end|> <|begin|>assistant<|content|> [CALL_ID] </arg_value:opensourc ";
  return {
      {{"ns.now-2", OrderedJson::object()}},
      {{"get_weather", {{"city", "Rome"}}}},
      {{"get_weather", {{"city", "5"}, {"days", 5}, {"part", -0.25}, {"now", true}, {"none", nullptr}}}},
      {{"get_weather", {{"city", ""}, {"word", "{\"a\": 1}"}, {"maybe", "nulls"}, {"unit", "f"}}}},
      {{"get_weather",
        {{"maybe", nullptr}, {"either", "5x"}, {"tags", {"a", "b\n"}}, {"at", {{"lat", 1.5}}}}}},
      {{"get_weather", {{"either", 7}, {"any", {1, {{"x", "y"}}}}, {"tags", OrderedJson::array()}}}},
      {{"get_weather",
        {{"city", hard},
         {"tags",
          {hard, "</parameter>", "</arg_value>", "</｜DSML｜parameter>", "</arg_value:opensource>"}}}}},
      {{"get_weather", {{"city", "\n two\n\nlines \n"}, {"word", "true"}}},
       {"ns.now-2", OrderedJson::object()}},
      {{"get_weather", {{"city", "a"}}}, {"get_weather", {{"days", 2}}}, {"get_weather", {{"word", " "}}}},
  };
}

TEST(Syntaxes, WhatIsWrittenComesBack) {
  for (const ToolSyntax syntax : kToolSyntaxes)
    for (const std::vector<Call>& calls : shapes()) {
      const std::string text = written(syntax, calls);
      const Parsed whole = parsed(plain(syntax), text);
      EXPECT_EQ(whole.content, "") << name_of(syntax) << text;
      EXPECT_FALSE(whole.cut_off) << name_of(syntax);
      ASSERT_EQ(whole.names.size(), calls.size()) << name_of(syntax) << "\n" << text;
      for (size_t i = 0; i < calls.size(); ++i) {
        EXPECT_EQ(whole.names[i], calls[i].name) << name_of(syntax);
        EXPECT_EQ(OrderedJson::parse(whole.arguments[i], nullptr, false), calls[i].arguments)
            << name_of(syntax) << "\n"
            << text << "\n"
            << whole.arguments[i];
      }
      ASSERT_EQ(parsed(plain(syntax), text, every_byte(text)), whole) << name_of(syntax);
      for (size_t cut = 0; cut <= text.size(); ++cut)
        ASSERT_EQ(parsed(plain(syntax), text, {cut}), whole) << name_of(syntax) << text << " cut at " << cut;
    }
}

TEST(Syntaxes, TextAndThoughtsAroundCalls) {
  for (const ToolSyntax syntax : kToolSyntaxes) {
    const ChatSyntax own = plain(syntax);
    const ChatSyntax thinks =
        own.channels || own.frames ? own : with_tool_syntax(*reasoning_syntax_named("qwen3"), syntax);
    const std::string call = written(syntax, {{"get_weather", {{"city", "Rome"}}}});
    std::string text = "<think>\nhm\n</think>\n\nI look.\n" + call;
    if (own.channels)
      text =
          "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
          "<|message|>I look.<|end|><|start|>assistant" +
          call;
    if (own.frames)
      text = "<|think|>hm<|end|><|begin|>assistant<|content|>I look.<|end|><|begin|>assistant" + call;
    const Parsed whole = parsed(thinks, text);
    EXPECT_EQ(whole.thought, "hm") << name_of(syntax);
    EXPECT_EQ(whole.content, "I look.") << name_of(syntax);
    EXPECT_THAT(whole.names, ElementsAre("get_weather")) << name_of(syntax);
    EXPECT_THAT(whole.arguments, ElementsAre("{\"city\": \"Rome\"}")) << name_of(syntax);
    ASSERT_EQ(parsed(thinks, text, every_byte(text)), whole) << name_of(syntax);
  }
}

// As max_tokens ends an answer anywhere: what was told stays, and nothing is told that was not written.
TEST(Syntaxes, AnswersThatEndAnywhere) {
  for (const ToolSyntax syntax : kToolSyntaxes)
    for (const std::vector<Call>& calls : shapes()) {
      const std::string text = written(syntax, calls);
      const Parsed all = parsed(plain(syntax), text);
      for (size_t end = 0; end < text.size(); ++end) {
        const std::string_view part = std::string_view(text).substr(0, end);
        const Parsed some = parsed(plain(syntax), part, {}, with_tools(), AnswerEnd::kCut);
        ASSERT_EQ(parsed(plain(syntax), part, every_byte(part), with_tools(), AnswerEnd::kCut), some)
            << name_of(syntax) << part;
        ASSERT_LE(some.names.size(), all.names.size());
        for (size_t i = 0; i < some.names.size(); ++i) {
          ASSERT_EQ(some.names[i], all.names[i]);
          const bool last = i + 1 == some.names.size();
          if (!last || !some.cut_off) {
            ASSERT_EQ(some.arguments[i], all.arguments[i]) << name_of(syntax) << part;
          } else if (call_syntax(syntax).form == CallForm::kTags) {
            ASSERT_FALSE(nlohmann::json::accept(some.arguments[i])) << name_of(syntax) << part;
          }
        }
      }
    }
}

// An answer that stopped of its own accord, or at a stop string that is the call's end: nothing else is missing.
TEST(Syntaxes, CallsThatLackOnlyTheirEnd) {
  for (const ToolSyntax syntax : kToolSyntaxes) {
    const CallSyntax& row = call_syntax(syntax);
    const std::string text = written(syntax, {{"get_weather", {{"days", 5}, {"city", "Rome"}}}});
    const std::string_view last = row.form == CallForm::kTags ? row.tags.value_end : "\"Rome\"}";
    const size_t least = text.rfind(last) + last.size();
    const size_t whole = row.form == CallForm::kTags ? text.rfind(row.markers.call_end) : least;
    for (size_t end = least; end < text.size(); ++end) {
      const Parsed some = parsed(plain(syntax), text.substr(0, end));
      ASSERT_THAT(some.arguments, ElementsAre("{\"days\": 5, \"city\": \"Rome\"}")) << text.substr(0, end);
      // Cut by max_tokens, more of it may have been to come.
      const Parsed cut = parsed(plain(syntax), text.substr(0, end), {}, with_tools(), AnswerEnd::kCut);
      if (row.form == CallForm::kTags && end < whole && row.tags.body_end.empty()) {
        EXPECT_TRUE(cut.cut_off) << text.substr(0, end);
        EXPECT_THAT(cut.arguments, ElementsAre("{\"days\": 5, \"city\": \"Rome\"")) << text.substr(0, end);
      }
    }
  }
  // Another key may have been meant, or a longer value.
  for (const char* more : {"<arg_key>", "<arg_k", "x", "<tool_call>"}) {
    const Parsed some = parsed(
        plain(ToolSyntax::kGlm47),
        std::string("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>") + more);
    EXPECT_TRUE(some.cut_off) << more;
    EXPECT_FALSE(nlohmann::json::accept(some.arguments.at(0))) << more;
  }
}

// The first value has streamed when the second one comes.
TEST(Syntaxes, KeysThatComeTwiceHaveTheirFirstValue) {
  for (const ToolSyntax syntax : kToolSyntaxes) {
    const CallSyntax& row = call_syntax(syntax);
    if (row.form != CallForm::kTags) continue;
    const std::string text =
        written(syntax, {{"get_weather", {{"city", "Rome"}, {"days", 1}, {"part", 2.5}, {"tags", {"x"}}}}});
    const auto argument = [&](std::string_view key) {
      const size_t at = text.find(row.tags.key_begin, text.find(key) - row.tags.key_begin.size());
      return text.substr(at, text.find(row.tags.value_end, at) + row.tags.value_end.size() - at);
    };
    const std::string city = argument("city"), days = argument("days"), part = argument("part"),
                      tags = argument("tags");
    const size_t begin = text.find(city), end = text.rfind(row.tags.value_end) + row.tags.value_end.size();
    std::string again = city, one = days;
    again.replace(again.find("Rome"), 4, "Bonn </arg_value>");
    one.replace(one.rfind('1'), 1, "7");
    for (const auto& [body, wanted] : std::vector<std::pair<std::string, std::string>>{
             {city + again, R"({"city": "Rome"})"},
             {days + city + one + again + part, R"({"days": 1, "city": "Rome", "part": 2.5})"},
             {tags + tags + tags + one, R"({"tags": ["x"], "days": 7})"}}) {
      const std::string twice = text.substr(0, begin) + body + text.substr(end);
      const Parsed whole = parsed(plain(syntax), twice);
      EXPECT_THAT(whole.arguments, ElementsAre(wanted)) << twice;
      EXPECT_EQ(whole.content, "") << twice;
      EXPECT_EQ(parsed(plain(syntax), twice, every_byte(twice)), whole) << twice;
    }
    const std::string open = text.substr(0, begin) + city + again;
    EXPECT_THAT(parsed(plain(syntax), open).arguments, ElementsAre(R"({"city": "Rome"})")) << open;
  }
}

TEST(Syntaxes, WithoutToolsCallsAreContent) {
  for (const ToolSyntax syntax : kToolSyntaxes) {
    const std::string text = written(syntax, {{"get_weather", {{"city", "Rome"}}}});
    const Parsed whole = parsed(plain(syntax), text, {}, {});
    EXPECT_THAT(whole.names, IsEmpty());
    const std::string_view wanted = std::string_view(text).substr(0, text.find("<|call|>"));
    EXPECT_EQ(whole.content, wanted) << name_of(syntax);
  }
}

// Random texts from the markers of one syntax, in random cuts; all bytes come out again, or are markers.
TEST(Syntaxes, RandomTextsInRandomCuts) {
  std::mt19937 random(5);
  const auto below = [&](size_t n) { return random() % n; };
  for (const ToolSyntax syntax : kToolSyntaxes) {
    const CallSyntax& row = call_syntax(syntax);
    std::vector<std::string> words = {"\n", " ", "get_weather", "city", "days",
                                      "5",  "x", "<",           "{",    "}",
                                      "\"", ":", "[",           "]",    "{\"a\": 1}",
                                      "\\", ">", "functions.",  ":0",   "to=functions.get_weather",
                                      "é",  ","};
    for (const std::string_view marker : markers_of(row)) words.emplace_back(marker);
    if (syntax == ToolSyntax::kSolarOpen)
      for (const std::string_view marker :
           {kFrames.role, kFrames.begin, kFrames.thought, kFrames.text, kFrames.end, kFrames.answer_end})
        words.emplace_back(marker);
    if (syntax == ToolSyntax::kGptOss)
      for (const std::string_view marker : {kChannels.start, kChannels.channel, kChannels.constrain,
                                            kChannels.message, kChannels.end, kChannels.call, kChannels.role})
        words.emplace_back(marker);
    for (const std::vector<Call>& calls : shapes()) words.push_back(written(syntax, calls));
    if (row.lists)
      words.insert(words.end(), {"[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS] [{\"name\": \"f\"}",
                                 ", {\"name\": \"f\", \"arguments\": {", "}, \"id\": 5}"});
    size_t called = 0;
    for (int round = 0; round < 700; ++round) {
      std::string text;
      for (size_t n = below(16); n > 0; --n) text += words[below(words.size())];
      if (text.size() > 1500) text.resize(1500);
      std::vector<size_t> cuts;
      for (size_t at = below(4); at < text.size(); at += below(7)) cuts.push_back(at);
      const Parsed whole = parsed(plain(syntax), text);
      ASSERT_EQ(parsed(plain(syntax), text, cuts), whole) << name_of(syntax) << text;
      called += !whole.names.empty();
    }
    EXPECT_GT(called, 50u) << name_of(syntax);
  }
}

// A quadratic reader would take hours.
TEST(Syntaxes, HostileTextTakesLinearTime) {
  for (const ToolSyntax syntax : kToolSyntaxes) {
    const CallSyntax& row = call_syntax(syntax);
    const std::string begin = std::string(row.markers.section_begin) + std::string(row.markers.call_begin);
    const std::string call = written(syntax, {{"get_weather", {{"city", "x"}, {"tags", {"y"}}}}});
    const std::string value = call.substr(0, call.find('x')), list = call.substr(0, call.find('y'));
    const std::string ends = std::string(row.tags.value_end) + "  ";
    for (const auto& [head, unit] : std::vector<std::pair<std::string, std::string>>{
             {"", begin},
             {"", begin + "f"},
             {begin, " "},
             {begin, "f"},
             {"", begin + " "},
             {value, "z"},
             {value, ends + "<"},
             {value, " "},
             {list, "z"},
             {list, ends},
             {"", "<|start|>assistant<|channel|>"},
             {"", "<|channel|>commentary to=functions.f<|message|>"},
             {"<|channel|>", " "},
             {"", "<|begin|>assistant<|content|>"},
             {"", "<|end|> <|think|>x"},
             {"<|think|>", " <|begin|>"},
             {"[TOOL_CALLS] [{\"name\": \"f\"}", ", {\"name\": \"f\"}"},
             {"[TOOL_CALLS] [{\"name\": \"f\"}", ", {\"name\": [TOOL_CALLS] [{\"name\": \"f\"}"},
             {"", call}}) {
      std::string text = head;
      if (unit.empty()) continue;
      while (text.size() < 100'000) text += unit;
      const auto started = std::chrono::steady_clock::now();
      ReplyParser parser(plain(syntax), with_tools());
      for (size_t at = 0; at < text.size(); at += 5) parser.push(std::string_view(text).substr(at, 5));
      parser.flush();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
      EXPECT_LT(took.count(), 120) << name_of(syntax) << " " << head << unit;
    }
  }
}

TEST(Syntaxes, ValuesByTheirTypes) {
  const auto value = [](const std::string& key, const std::string& text) {
    return parsed(plain(ToolSyntax::kGlm47), "<tool_call>get_weather<arg_key>" + key +
                                                 "</arg_key><arg_value>" + text + "</arg_value></tool_call>")
        .arguments.at(0);
  };
  EXPECT_EQ(value("city", "5"), R"({"city": "5"})");
  EXPECT_EQ(value("city", "null"), R"({"city": "null"})");
  EXPECT_EQ(value("word", "[1]"), R"({"word": "[1]"})");
  EXPECT_EQ(value("unit", "c"), R"({"unit": "c"})");
  EXPECT_EQ(value("days", " 5\n"), R"({"days": 5})");
  EXPECT_EQ(value("days", "five"), R"({"days": "five"})");
  EXPECT_EQ(value("now", "True"), R"({"now": true})");
  EXPECT_EQ(value("none", "None"), R"({"none": null})");
  EXPECT_EQ(value("maybe", "null"), R"({"maybe": null})");
  EXPECT_EQ(value("maybe", "5"), R"({"maybe": "5"})");
  EXPECT_EQ(value("either", "5"), R"({"either": 5})");
  EXPECT_EQ(value("either", "5.5"), R"({"either": "5.5"})");
  EXPECT_EQ(value("any", "5"), R"({"any": 5})");
  EXPECT_EQ(value("any", "five"), R"({"any": "five"})");
  EXPECT_EQ(value("unknown", "{\"a\": [true]}"), R"({"unknown": {"a": [true]}})");
  EXPECT_EQ(value("unknown", "\"quoted\""), R"({"unknown": "quoted"})");
  EXPECT_EQ(value("unknown", "{broken"), R"({"unknown": "{broken"})");
  EXPECT_EQ(value("at", "{\"lat\": \"a\nb\"}"), R"({"at": {"lat": "a\nb"}})");
  EXPECT_EQ(value("at", "{\"lat\": \"</arg_value></tool_call>\"}"),
            R"({"at": {"lat": "</arg_value></tool_call>"}})");
  // What ends a value counts only where another tag follows.
  EXPECT_EQ(value("city", "a</arg_value>b"), R"({"city": "a</arg_value>b"})");
  EXPECT_EQ(value("city", "a</arg_value></arg_value>"), R"({"city": "a</arg_value></arg_value>"})");
}

TEST(Syntaxes, TypesOfSchemas) {
  const auto types = [](const char* schema, const char* root = "{}") {
    return types_of_schema(OrderedJson::parse(schema), OrderedJson::parse(root)).bits();
  };
  using T = TypeSet;
  EXPECT_EQ(types(R"({"type": "string"})"), T::kString);
  EXPECT_EQ(types(R"({"type": "number"})"), T::kNumber | T::kInteger);
  EXPECT_EQ(types(R"({"type": ["integer", "null"]})"), T::kInteger | T::kNull);
  EXPECT_EQ(types(R"({"type": "string", "nullable": true})"), T::kString | T::kNull);
  EXPECT_EQ(types(R"({"enum": ["a", 1, null]})"), T::kString | T::kInteger | T::kNull);
  EXPECT_EQ(types(R"({"const": true})"), T::kBoolean);
  EXPECT_EQ(types(R"({"oneOf": [{"type": "array"}, {"type": "boolean"}]})"), T::kArray | T::kBoolean);
  EXPECT_EQ(types(R"({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]})"), T::kString);
  EXPECT_EQ(types(R"({"properties": {}})"), T::kObject);
  EXPECT_EQ(types(R"({"pattern": "x"})"), T::kString);
  EXPECT_EQ(types(R"({"$ref": "#/$defs/a"})", R"({"$defs": {"a": {"type": "integer"}}})"), T::kInteger);
  for (const char* unclear :
       {"{}", "true", "5", R"({"type": "str"})", R"({"type": []})", R"({"$ref": "#/nowhere"})",
        R"({"allOf": [{"type": "string"}, {"type": "null"}]})"})
    EXPECT_EQ(types(unclear), T::kAll) << unclear;
  // A reference to itself ends, and says nothing.
  EXPECT_EQ(types(R"({"$ref": "#"})", R"({"$ref": "#"})"), T::kAll);
}

// References that lead to large schemas again and again: a time that does not grow with them.
TEST(Syntaxes, TypesOfHostileSchemas) {
  OrderedJson parameters = OrderedJson::object();
  parameters["$defs"]["y"]["anyOf"] = std::vector<int>(100000, 1);
  for (int i = 0; i < 900; ++i) parameters["$defs"]["x"]["anyOf"].push_back({{"$ref", "#/$defs/y"}});
  for (int i = 0; i < 500; ++i) parameters["properties"]["p" + std::to_string(i)] = {{"$ref", "#/$defs/x"}};
  const OrderedJson tools = {{{"function", {{"name", "f"}, {"parameters", parameters}}}}};
  const auto began = std::chrono::steady_clock::now();
  EXPECT_TRUE(ArgumentTypes(tools).of("f", "p499").any());
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::minutes(1));
}

TEST(Syntaxes, MalformedCallsAreContent) {
  const auto content = [](ToolSyntax syntax, const std::string& text) {
    const Parsed whole = parsed(plain(syntax), text);
    EXPECT_THAT(whole.names, IsEmpty()) << text;
    EXPECT_EQ(parsed(plain(syntax), text, every_byte(text)), whole) << text;
    EXPECT_EQ(whole.content, text);
  };
  for (const ToolSyntax syntax : {ToolSyntax::kGlm45, ToolSyntax::kGlm47})
    for (const char* bad :
         {"<tool_call></tool_call>", "<tool_call>two words\n</tool_call>", "<tool_call>f\n<arg_value>",
          "a <tool_call>{\"name\": \"f\"}\n</tool_call> b", "<tool_call>f", "</tool_call>",
          "<tool_call>f\n<arg_key></arg_key>", "<tool_call>f<arg_key>a</arg_key>x"})
      content(syntax, bad);
  for (const char* bad :
       {"<tool_call>\n<function=>\n</function>\n</tool_call>", "<tool_call>\nf\n</tool_call>",
        "<function=f></function>", "<tool_call>\n<function=f>\n<parameter=\na>"})
    content(ToolSyntax::kQwen3Coder, bad);
  for (const char* bad :
       {"<invoke name=\"f\"></invoke>", "<minimax:tool_call>\nf", "<minimax:tool_call>\n<invoke name=\"f\">x",
        "<minimax:tool_call></minimax:tool_call>"})
    content(ToolSyntax::kMiniMaxM2, bad);
  for (const char* bad :
       {"<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}", "<|tool_calls_section_begin|>x",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[]"})
    content(ToolSyntax::kKimiK2, bad);
  for (const char* bad :
       {"<tool_calls>\n<tool_call>f</tool_call>\n</tool_calls>", "<tool_calls>x",
        "<tool_call>f\n<arg_key>a</arg_key>", "<tool_call><tool_sep></tool_call>",
        "<tool_call>two words<tool_sep>\n</tool_call>", "<tool_call:opensource>f<tool_sep:opensource>"})
    content(ToolSyntax::kHy3, bad);
  for (const char* bad :
       {"<tool_calls>\n<tool_call>f<tool_sep>\n</tool_call>\n</tool_calls>", "<tool_calls:opensource>\nf",
        "<tool_call:opensource>f<tool_sep>\n</tool_call:opensource>"})
    content(ToolSyntax::kHy3Open, bad);
  for (const ToolSyntax syntax : {ToolSyntax::kMistral, ToolSyntax::kMistralList})
    for (const char* bad :
         {"[TOOL_CALLS]f{}", "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS]f[CALL_ID]", "[TOOL", "[TOOL_CALLS] ",
          "[TOOL_CALLS] []", "[TOOL_CALLS] [{'name': 'f'}]", "a [TOOL_CALLS] [{\"name\": 3}] b",
          "[TOOL_CALLS] [[{\"name\": \"f\"}]]", "[TOOL_CALLS] {\"name\": \"f\"}",
          "[TOOL_CALLS] [{\"name\": \"f\"", "[TOOL_CALLS] [\"f\"]", "[TOOL_CALLS] [{\"arguments\": {}}]",
          "[TOOL_CALLS] [, {\"name\": \"f\"}]"})
      content(syntax, bad);
  // What is wrong later on: the rest is content.
  const Parsed later =
      parsed(plain(ToolSyntax::kGlm47),
             "<tool_call>get_weather<arg_key>days</arg_key><arg_value>5</arg_value><arg_key>\n</tool_call>");
  EXPECT_THAT(later.arguments, ElementsAre("{\"days\": 5"));
  EXPECT_EQ(later.content, "<arg_key>\n</tool_call>");
}

TEST(Syntaxes, StringsStreamAsTheyCome) {
  ReplyParser parser(plain(ToolSyntax::kQwen3Coder), with_tools());
  EXPECT_THAT(parser.push("<tool_call>\n<function=get_weather>\n<parameter=ci"), IsEmpty());
  EXPECT_THAT(parser.push("ty>"), ElementsAre(ReplyPiece{Kind::kCall, 0, "get_weather"},
                                              ReplyPiece{Kind::kArguments, 0, "{\"city\": \""}));
  EXPECT_THAT(parser.push("\nRo"), ElementsAre(ReplyPiece{Kind::kArguments, 0, "Ro"}));
  EXPECT_THAT(parser.push("me\n</par"), ElementsAre(ReplyPiece{Kind::kArguments, 0, "me"}));
  EXPECT_THAT(parser.push("k\n</parameter>\n"), ElementsAre(ReplyPiece{Kind::kArguments, 0, "\\n</park"}));
  EXPECT_THAT(parser.push("<parameter=days>\n1"),
              ElementsAre(ReplyPiece{Kind::kArguments, 0, "\", \"days\": "}));
  EXPECT_THAT(parser.push("2\n</parameter>\n</function>"),
              ElementsAre(ReplyPiece{Kind::kArguments, 0, "12}"}));
  EXPECT_THAT(parser.push("\n</tool_call>"), IsEmpty());
  EXPECT_THAT(parser.flush(), IsEmpty());
}

TEST(Syntaxes, KimisIdsAreKept) {
  const Parsed calls = parsed(
      plain(ToolSyntax::kKimiK2),
      "<|tool_calls_section_begin|><|tool_call_begin|>functions.a.b:3<|tool_call_argument_begin|>{}"
      "<|tool_call_end|><|tool_call_begin|>functions.a.b:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
      "<|tool_call_begin|> c <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>");
  EXPECT_THAT(calls.names, ElementsAre("a.b", "a.b", "c"));
  EXPECT_THAT(calls.ids, ElementsAre("functions.a.b:3", "", ""));
  // A thought that was left open ends where calls begin.
  const ChatSyntax thinks = with_tool_syntax(*reasoning_syntax_named("kimi_k2"), ToolSyntax::kKimiK2);
  const std::string text = "<think>so " + written(ToolSyntax::kKimiK2, {{"a", OrderedJson::object()}});
  EXPECT_EQ(parsed(thinks, text).thought, "so");
  EXPECT_THAT(parsed(thinks, text).names, ElementsAre("a"));
}

TEST(Syntaxes, IdsBesideNames) {
  const Parsed mistral =
      parsed(plain(ToolSyntax::kMistral),
             "[TOOL_CALLS]a[CALL_ID]123456789[ARGS]{}[TOOL_CALLS] b [CALL_ID][ARGS]{\"x\": "
             "1}[TOOL_CALLS]c[ARGS]{}[TOOL_CALLS]d[CALL_ID]123456789[ARGS]{}");
  EXPECT_THAT(mistral.names, ElementsAre("a", "b", "c", "d"));
  EXPECT_THAT(mistral.ids, ElementsAre("123456789", "", "", ""));
  EXPECT_EQ(mistral.content, "");
  const Parsed solar =
      parsed(plain(ToolSyntax::kSolarOpen),
             "<|tool_calls|><|tool_call:begin|>k1<|tool_call:name|>a<|tool_call:args|>{}<|tool_call:end|>"
             "<|tool_call:begin|><|tool_call:name|>b<|tool_call:args|>{}<|tool_call:end|>"
             "<|tool_call:begin|>two words<|tool_call:name|> c <|tool_call:args|>{}<|tool_call:end|>"
             "<|tool_call:begin|>d<|tool_call:args|>{}<|tool_call:end|><|calls|>");
  EXPECT_THAT(solar.names, ElementsAre("a", "b", "c", "d"));
  EXPECT_THAT(solar.ids, ElementsAre("k1", "", "", ""));
  for (const char* bad :
       {"[TOOL_CALLS][CALL_ID]123456789[ARGS]{}", "[TOOL_CALLS]f[CALL_ID]1[CALL_ID]2[ARGS]{}",
        "[TOOL_CALLS]f[CALL_ID]123456789", "[TOOL_CALLS]f[CALL_ID]123456789{}"})
    EXPECT_EQ(parsed(plain(ToolSyntax::kMistral), bad).content, bad);
  for (const char* bad :
       {"<|tool_call:begin|>1<|tool_call:name|><|tool_call:args|>{}", "<|tool_calls|><|calls|>",
        "<|tool_call:begin|>1<|tool_call:name|>a b<|tool_call:args|>{}<|tool_call:end|>",
        "<|tool_call:begin|>1<|tool_call:name|>f<|tool_call:name|>g<|tool_call:args|>{}"})
    EXPECT_EQ(parsed(plain(ToolSyntax::kSolarOpen), bad).content, bad);
}

TEST(Syntaxes, Frames) {
  const ChatSyntax syntax = plain(ToolSyntax::kSolarOpen);
  const std::string call =
      "<|tool_calls|><|tool_call:begin|>k1<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|><|calls|>";
  const auto check = [&](const std::string& text, const std::string& thought, const std::string& content,
                         const std::vector<std::string>& names) {
    for (const AnswerEnd end : {AnswerEnd::kStop, AnswerEnd::kCut}) {
      const Parsed whole = parsed(syntax, text, {}, with_tools(), end);
      EXPECT_EQ(whole.thought, thought) << text;
      EXPECT_EQ(whole.content, content) << text;
      EXPECT_EQ(whole.names, names) << text;
      ASSERT_EQ(parsed(syntax, text, every_byte(text), with_tools(), end), whole) << text;
      for (size_t cut = 0; cut <= text.size(); ++cut)
        ASSERT_EQ(parsed(syntax, text, {cut}, with_tools(), end), whole) << text << cut;
    }
  };
  check("<|think|>a<|end|><|begin|>assistant<|content|>b<|end|>", "a", "b", {});
  check("<|content|>b<|flush|>", "", "b", {});
  check("<|think|>a<|end|><|begin|>assistant" + call, "a", "", {"f"});
  check("<|content|>I look. <|end|><|begin|>assistant" + call, "", "I look.", {"f"});
  check("<|content|>I look.<|flush|>" + call + "<|begin|>assistant<|content|> Then.", "", "I look.\n\nThen.",
        {"f"});
  check("<|think|>a<|end|>\n<|begin|>assistant<|think|>b<|end|><|begin|>assistant<|content|>c", "a\n\nb", "c",
        {});
  check("<|content|>a<|end|><|begin|>assistant<|think|>b<|end|><|content|>c", "b", "a\n\nc", {});
  // Without headers, without ends.
  check("Hello <|content|> <|x|>", "", "Hello <|content|> <|x|>", {});
  check("  hello", "", "  hello", {});
  check("<|think|>a<|end|>\n b", "a", "b", {});
  check("<|think|>a<|begin|>assistant<|content|>b<|begin|>assistant<|content|>c", "a", "b\n\nc", {});
  check("<|think|>a <|tool_calls|>" + call.substr(14), "a", "", {"f"});
  check("<|think|>a <tool_call> <|begin|>user", "a <tool_call> <|begin|>user", "", {});
  check("<|content|><|begin|>user<|content|>x", "", "<|begin|>user<|content|>x", {});
  // Cut off within a header.
  check("<|content|>a<|end|><|begin|>", "", "a", {});
  check("<|content|>a<|end|><|begin|>assis", "", "a", {});
  check("<|content|>a<|end|><|begin|>assistant<|content|>", "", "a", {});
  check("<|think|>a<|end|><|begin|>assistant<|think|> ", "a", "", {});
  check("", "", "", {});
  check("<", "", "<", {});
  EXPECT_EQ(parsed(syntax, "on<|end|><|begin|>assistant<|content|>b", {}, {.thinking = true}).thought, "on");
  // Thoughts that are not wanted apart are content; markers of calls without tools, too.
  EXPECT_EQ(parsed(with_reasoning(syntax, {}), "<|think|>a<|end|><|begin|>assistant<|content|>b").content,
            "a\n\nb");
  EXPECT_EQ(parsed(syntax, "<|begin|>assistant" + call, {}, {}).content, call);
}

TEST(Syntaxes, WhatIsNoHeaderIsContent) {
  for (const char* answer :
       {"<", "<|channel|> w1z578", "<|channel|>w1z40<|start|>assistant<|end|>w4z398finalw6z118",
        "<|channel|>final w7", "to=functions.f w8", "<|start|>user w9"}) {
    const Parsed whole = parsed(plain(ToolSyntax::kGptOss), answer);
    const std::string_view spelled(answer);
    const std::string last(spelled.substr(spelled.find_last_of(' ') + 1));
    EXPECT_THAT(whole.content, ::testing::HasSubstr(last == spelled ? last.substr(last.size() - 1) : last))
        << answer;
  }
  // An answer that was cut off within a header.
  for (const char* answer :
       {"<|channel|>fin", "<|channel|>analysis<|mess", "<|start|>assistant<|channel|>comm",
        "<|channel|>commentary to=functions.f <|constrain|>js"})
    EXPECT_EQ(parsed(plain(ToolSyntax::kGptOss), answer).content, "") << answer;
}

TEST(Syntaxes, Channels) {
  const ChatSyntax syntax = plain(ToolSyntax::kGptOss);
  const auto check = [&](const std::string& text, const std::string& thought, const std::string& content,
                         const std::vector<std::string>& names) {
    const Parsed whole = parsed(syntax, text);
    EXPECT_EQ(whole.thought, thought) << text;
    EXPECT_EQ(whole.content, content) << text;
    EXPECT_EQ(whole.names, names) << text;
    ASSERT_EQ(parsed(syntax, text, every_byte(text)), whole) << text;
    for (size_t cut = 0; cut <= text.size(); ++cut)
      ASSERT_EQ(parsed(syntax, text, {cut}), whole) << text << cut;
  };
  check("<|channel|>final<|message|>Hi <|x|> there<|return|>", "", "Hi <|x|> there", {});
  check(
      "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
      "<|start|>assistant<|channel|>final<|message|>c",
      "a\n\nb", "c", {});
  check(
      "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>Then.<|"
      "return|>",
      "", "First.\n\nThen.", {});
  // Both orders of whom and channel, and no type.
  check(" to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}<|call|>", "", "", {"f"});
  check("<|channel|>commentary to=functions.f<|message|>{}", "", "", {"f"});
  check(
      "<|start|>assistant to=functions.f<|channel|>commentary<|constrain|>json<|message|> {\"a\": "
      "\"<|call|>\"}\n<|call|>",
      "", "", {"f"});
  check("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", "", "", {"f"});
  // No header, no end, other tools, what is no object.
  check("Hello", "", "Hello", {});
  check("  to be", "", "  to be", {});
  check("<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b", "", "a\n\nb", {});
  check("<|channel|>analysis to=browser.search<|message|>x<|call|>", "",
        "<|channel|>analysis to=browser.search<|message|>x", {});
  check("<|channel|>commentary to=functions.f<|message|>[1]<|call|>", "",
        "<|channel|>commentary to=functions.f<|message|>[1]", {});
  check("<|start|>user<|message|>x<|end|>", "", "<|start|>user<|message|>x", {});
  check("<|channel|>final\n<|message|>x", "", "<|channel|>final\n<|message|>x", {});
  check("<|channel|>ana", "", "", {});
  check("", "", "", {});
  const std::string blank(600, ' ');
  check(blank + "<|channel|>final<|message|>x", "", blank + "\n\nx", {});
  const Parsed broken = parsed(syntax, "<|channel|>commentary to=functions.f<|message|>{\"a\": 1<|call|>");
  EXPECT_THAT(broken.arguments, ElementsAre("{\"a\": 1"));
  EXPECT_EQ(broken.content, "");
  const Parsed cut = parsed(syntax, "<|channel|>commentary to=functions.f<|message|>{\"a\": \"x");
  EXPECT_TRUE(cut.cut_off);
  EXPECT_THAT(cut.arguments, ElementsAre("{\"a\": \"x"));
  EXPECT_FALSE(parsed(syntax, "<|channel|>commentary to=functions.f<|message|>{}").cut_off);
  EXPECT_EQ(parsed(syntax, "on<|end|><|start|>assistant<|channel|>final<|message|>b", {}, {.thinking = true})
                .thought,
            "on");
  // Calls of another syntax within messages, as models are told that we tell in ours.
  const Parsed inner =
      parsed(with_tool_syntax(syntax, ToolSyntax::kHermes),
             "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
             "<tool_call>{\"name\": \"f\"}</tool_call><|return|>");
  EXPECT_EQ(inner.thought, "hm");
  EXPECT_THAT(inner.names, ElementsAre("f"));
  // Thoughts that are not wanted apart are content.
  EXPECT_EQ(parsed(with_reasoning(syntax, {}), "<|channel|>analysis<|message|>a<|end|>").content, "a");
}

}  // namespace
}  // namespace kt::inline server
