#include "models/rules.h"

#include <gmock/gmock.h>

#include "base/testing/error_of.h"
#include "base/testing/temp_folder.h"

namespace kt::inline models {
namespace {

using testing::HasSubstr;

std::string refusal_of(std::string_view characters) {
  const std::string message = error_of([&] { parse_rules(characters, "r.yaml"); });
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_LT(message.size(), 700);
  return message;
}

TEST(Rules, AreRead) {
  const RuleFile file = parse_rules(
      "# two\n- match:\n    name: \"^model\\\\.layers\\\\..*$\"  # x\n    class: torch.nn.Linear\n"
      "  replace:\n    class: a.b.KTransformersLinear\n    kwargs:\n      generate_device: \"cuda:1\"\n"
      "      num_bits: 8\n  recursive: False\n- match: {class: 'x.Y'}\n  replace: {}\n",
      "r.yaml");
  ASSERT_EQ(file.rules.size(), 2);
  const Rule& first = file.rules[0];
  EXPECT_EQ(first.name->pattern(), "^model\\.layers\\..*$");
  EXPECT_EQ(first.match_class, "torch.nn.Linear");
  EXPECT_EQ(first.replace, "a.b.KTransformersLinear");
  EXPECT_EQ(first.kwargs, (Json{{"generate_device", "cuda:1"}, {"num_bits", 8}}));
  EXPECT_FALSE(first.recursive);
  EXPECT_EQ(first.number, 1);
  EXPECT_EQ(first.line, 2);
  EXPECT_EQ(first.line_of_kwarg("num_bits"), 9);
  EXPECT_EQ(file.place(first), "r.yaml:2: rule 1");
  const Rule& second = file.rules[1];
  EXPECT_FALSE(second.name);
  EXPECT_EQ(second.replace, "default");
  EXPECT_TRUE(second.kwargs.empty());
  EXPECT_TRUE(second.recursive);
  EXPECT_EQ(file.place(second, 12), "r.yaml:12: rule 2");
  // A pattern may be empty, as the root's name is; dots may be bare.
  EXPECT_TRUE(parse_rules("- match: {name: ''}\n  replace: {}", "r").rules[0].name);
  EXPECT_TRUE(parse_rules("- match: {name: ^model.norm}\n  replace: {}", "r").rules[0].name);
}

TEST(Rules, FaultsHaveRuleAndLine) {
  const auto rule = [](std::string_view rest) {
    return refusal_of("- match: {name: a}\n  replace: {}\n- " + std::string(rest) + "\n");
  };
  const std::pair<std::string, std::string> cases[] = {
      {refusal_of(""), "r.yaml: empty, expected a list of rules"},
      {refusal_of("# nothing\n"), "r.yaml: empty, expected a list of rules"},
      {refusal_of("\n[]"), "r.yaml:2: no rule in the list"},
      {refusal_of("\nmatch: {name: a}"), "r.yaml:2: expected a list of rules, found a mapping"},
      {refusal_of("rules"), "r.yaml:1: expected a list of rules, found text"},
      {rule("text"),
       "r.yaml:3: rule 2: expected a mapping with match, replace, recursive, found text \"text\""},
      {rule("replace: {}"), "r.yaml:3: rule 2: no match"},
      {rule("match: {name: a}"), "r.yaml:3: rule 2: no replace"},
      {rule("match: {}\n  replace: {}"), "r.yaml:3: rule 2: match: neither name nor class"},
      {rule("match: a\n  replace: {}"),
       "r.yaml:3: rule 2: match: expected a mapping with name, class, found text \"a\""},
      {rule("match: {name: 3}\n  replace: {}"),
       "r.yaml:3: rule 2: match: name: expected text, found an integer"},
      {rule("match:\n    name:\n  replace: {}"),
       "r.yaml:4: rule 2: match: name: expected text, found nothing"},
      {rule("match:\n    name: a\n    class: [b]\n  replace: {}"),
       "r.yaml:5: rule 2: match: class: expected text, found a list"},
      {rule("match: {class: ''}\n  replace: {}"), "r.yaml:3: rule 2: match: class: empty"},
      {rule("match: {name: a}\n  replace: default"),
       "r.yaml:4: rule 2: replace: expected a mapping with class, kwargs, found text \"default\""},
      {rule("match: {name: a}\n  replace:\n    class: 1"),
       "r.yaml:5: rule 2: replace: class: expected text, found an integer"},
      {rule("match: {name: a}\n  replace:\n    kwargs: [1]"),
       "r.yaml:5: rule 2: replace: kwargs: expected a mapping of names to values, found a list"},
      {rule("match: {name: a}\n  replace: {}\n  recursive: \"False\""),
       "r.yaml:5: rule 2: recursive: expected true or false without quotes, found text \"False\""},
      {rule("match: {name: a}\n  replaces: {}"),
       "r.yaml:4: rule 2: no key \"replaces\"; the nearest is replace"},
      {rule("match:\n    nmae: a\n  replace: {}"),
       "r.yaml:4: rule 2: match: no key \"nmae\"; the nearest is name"},
      {rule("match: {name: a}\n  replace:\n    klass: x\n"),
       "r.yaml:5: rule 2: replace: no key \"klass\"; the nearest is class"},
      {rule("match:\n    name: \"a(\"\n  replace: {}"),
       "r.yaml:4: rule 2: match: name: pattern \"a(\": missing ')' at byte 2"},
      {rule("match: {name: a}\n  match: {name: b}"),
       "r.yaml:4:3: rule 2: found the key \"match\" a second time, expected each key once"},
      {rule("match: &x {name: a}"),
       "r.yaml:3:10: rule 2: found \"&\", expected a value: anchors and aliases are not read"},
      {rule("match: {name: !!str a}"),
       "r.yaml:3:17: rule 2: found \"!\", expected a value: tags are not read"},
      {rule("match:\n\tname: a"), "r.yaml:4:1: rule 2: found a tab in the indentation, expected spaces"},
  };
  for (const auto& [message, expected] : cases) EXPECT_THAT(message, testing::StartsWith(expected));
}

TEST(Rules, FilesAreBounded) {
  EXPECT_THAT(refusal_of(std::string((16 << 20) + 1, ' ')), HasSubstr("16777217 bytes"));
  std::string many;
  for (int i = 0; i < 100'000; ++i) many += "- match: {name: a}\n  replace: {}\n";
  EXPECT_EQ(refusal_of(many), "r.yaml: 100000 rules, at most 4096 are read");
  EXPECT_THAT(refusal_of("- " + std::string(1000, '[')),
              HasSubstr("r.yaml:1:66: rule 1: found a collection inside"));
  EXPECT_THAT(refusal_of("- match: {name: '\xFF'}\n"),
              HasSubstr("r.yaml:1:18: found a byte 255, expected UTF-8"));
  EXPECT_THAT(refusal_of("- match: {name: '" + std::string(20000, 'a') + "'}\n  replace: {}\n"),
              HasSubstr("rule 1: match: name: a pattern of 20000 bytes"));
  const testing_files::TempFolder folder;
  EXPECT_THAT(error_of([&] { read_rules(folder.path() + "/none.yaml"); }), HasSubstr("none.yaml"));
  EXPECT_EQ(read_rules(folder.put("r.yaml", "- match: {name: a}\n  replace: {}\n")).rules.size(), 1);
}

}  // namespace
}  // namespace kt::inline models
