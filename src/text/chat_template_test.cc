#include "text/chat_template.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "text/jinja/characters.h"

namespace kt::inline texts {
namespace {

std::string render(std::string source, const TemplateVariables& variables = TemplateVariables::object(),
                   TemplateBudget budget = {}) {
  return ChatTemplate(std::move(source), "t").render(variables, budget);
}

// The message of the Error, or "no error: " and the output.
std::string template_error(std::string source,
                           const TemplateVariables& variables = TemplateVariables::object(),
                           TemplateBudget budget = {}) {
  try {
    return "no error: " + render(std::move(source), variables, budget);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInput);
    return e.what();
  }
}

TEST(ChatTemplate, RendersChatMl) {
  const auto variables = TemplateVariables::parse(
      R"({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": true})");
  EXPECT_EQ(render("{% for m in messages %}\n"
                   "<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n"
                   "{% endfor %}\n"
                   "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n",
                   variables),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
}

TEST(ChatTemplate, KeepsTheOrderOfKeys) {
  const auto variables = TemplateVariables::parse(R"({"x": {"b": 1, "a": 2.0, "é": "<\n>"}})");
  EXPECT_EQ(render("{{ x|tojson }}", variables), R"({"b": 1, "a": 2.0, "é": "<\n>"})");
  EXPECT_EQ(render("{{ x|tojson }}", nlohmann::json{{"x", {{"b", 1}, {"a", 2}}}}), R"({"a": 2, "b": 1})");
}

TEST(ChatTemplate, SettlesWhiteSpaceAsPublishedTemplatesExpect) {
  EXPECT_EQ(render("a\n  {% if true %}\n  b\n  {% endif %}\nc\n"), "a\n  b\nc");
  EXPECT_EQ(render("a\n  {%- if true -%}\n  b\n  {%- endif -%}\nc"), "abc");
  EXPECT_EQ(render("a\n  {%+ if true +%}\n  b{% endif %}"), "a\n  \n  b");
  EXPECT_EQ(render(" {{ 1 }}\n {{- 2 -}}\n 3"), " 123");
}

TEST(ChatTemplate, ErrorsNameTheTemplateAndTheLine) {
  EXPECT_EQ(template_error("a\n\n{{ 1 + }}"),
            "chat template t line 3: unexpected end of the tag, expected an expression");
  EXPECT_EQ(template_error("\n{% nosuch %}"), "chat template t line 2: encountered unknown tag 'nosuch'");
  EXPECT_EQ(template_error("{% include 'x' %}"),
            "chat template t line 1: tag 'include' is not supported in chat templates");
  EXPECT_EQ(template_error("\n\n{{ a.b }}"), "chat template t line 3: 'a' is undefined");
  EXPECT_EQ(template_error("{% if x %}\n"),
            "chat template t line 1: unexpected end of template, expected endif");
  EXPECT_EQ(template_error("{{ raise_exception('roles\nmust alternate') }}"),
            "chat template t line 1: roles must alternate");
  EXPECT_EQ(template_error("x", TemplateVariables::array()),
            "chat template t line 1: variables must be an object, not array");
}

TEST(ChatTemplate, NothingReachesOutsideTheValues) {
  EXPECT_EQ(render("{{ ''.__class__ }}{{ x.__init__ }}", {{"x", {1}}}), "");
  EXPECT_NE(template_error("{{ ''.__class__.__mro__ }}").find("no attribute '__class__'"), std::string::npos);
  EXPECT_NE(template_error("{{ x.append(1) }}", {{"x", {1}}}).find("unsafe"), std::string::npos);
}

TEST(ChatTemplate, BudgetsEndEveryTemplate) {
  const std::string loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
  EXPECT_EQ(template_error(loops, TemplateVariables::object(), {.steps = 1000}),
            "chat template t line 1: more than 1000 steps");
  EXPECT_EQ(template_error("{{ 'x' * 10**9 }}"),
            "chat template t line 1: a value of 953.7 MiB is larger than 16.0 MiB");
  EXPECT_EQ(template_error("\n{{ range(10**9) }}"),
            "chat template t line 2: range() of more than 100000 elements");
  EXPECT_EQ(template_error("{% macro m() %}\n{{ m() }}{% endmacro %}{{ m() }}"),
            "chat template t line 2: nested deeper than 600 levels");
  EXPECT_EQ(template_error("{% for i in range(9) %}abc{% endfor %}", TemplateVariables::object(),
                           {.output_bytes = 20}),
            "chat template t line 1: output larger than 20 B");
  EXPECT_EQ(template_error("{{ " + std::string(10000, '(') + " }}"),
            "chat template t line 1: brackets nested deeper than 200");
  EXPECT_EQ(template_error(std::string(5u << 20, 'x')),
            "chat template t line 1: 5.0 MiB of source is larger than 4.0 MiB");
}

TEST(ChatTemplate, RingsOfOwnersAreFreed) {  // for the leak checker
  EXPECT_EQ(
      render(
          "{% set ns = namespace() %}{% set ns.self = [ns] %}{% macro m() %}{{ m is callable }}{% endmacro %}"
          "{% set ns.m = m %}{{ ns.m() }}"),
      "True");
}

TEST(ChatTemplate, TheClockIsTheCallers) {
  setenv("TZ", "UTC", 1);
  ChatTemplate chat("{{ strftime_now('%d %b %Y') }}", "t");
  chat.set_clock([] { return std::time_t{1735787045}; });
  EXPECT_EQ(chat.render(TemplateVariables::object()), "02 Jan 2025");
}

TEST(ChatTemplate, RendersOnManyThreadsAtOnce) {
  const ChatTemplate chat("{% for i in range(100) %}{{ 'a' ~ i }}{% endfor %}", "t");
  const std::string wanted = chat.render(TemplateVariables::object());
  std::vector<std::string> got(4);
  std::vector<std::thread> threads;
  for (std::string& out : got) threads.emplace_back([&] { out = chat.render(TemplateVariables::object()); });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& out : got) EXPECT_EQ(out, wanted);
}

TEST(Characters, FloatsPrintAsInPython) {
  const std::pair<double, const char*> cases[] = {
      {1, "1.0"},           {0.1, "0.1"},      {1e16, "1e+16"}, {1e15, "1000000000000000.0"},
      {1e-4, "0.0001"},     {1e-5, "1e-05"},   {-0.0, "-0.0"},  {1.5e300, "1.5e+300"},
      {123.456, "123.456"}, {5e-324, "5e-324"}};
  for (const auto& [v, text] : cases) EXPECT_EQ(jinja::float_digits(v), text);
}

TEST(Characters, StripWorksInCodePoints) {
  EXPECT_EQ(jinja::strip("éaé", "é", jinja::Side::kBoth), "a");
  EXPECT_EQ(jinja::strip("\xa9"
                         "a",
                         "é", jinja::Side::kBoth),
            "\xa9"
            "a");  // half of é is not é
  EXPECT_EQ(jinja::strip_space("\u3000 a\n", jinja::Side::kRight), "\u3000 a");
  EXPECT_EQ(jinja::count_characters("a\xff\xe2\x82é"), 5u);
}

}  // namespace
}  // namespace kt::inline texts
