#include "cli/questions.h"

#include <gtest/gtest.h>

#include "base/testing/temp_folder.h"
#include "cli/chinese_words.h"
#include "cli/help/command_tree.h"
#include "cli/verbs.h"
#include "terminal/testing/typed.h"

namespace kt::inline cli {
namespace {

// The program's verbs, and a kt folder of its own for the life of a test.
class Questions : public ::testing::Test {
 protected:
  Questions() {
    ::setenv("KT_HOME", folder_.path().c_str(), 1);
    for (const auto add : {add_quant, add_generate, add_run, add_config, add_model}) add(app_, invocation_);
  }
  ~Questions() override { ::unsetenv("KT_HOME"); }
  std::vector<std::string> asked(const std::vector<std::string>& words, Typed& typed) {
    return with_answers(app_, words, typed.prompts);
  }

  std::string a_model() {
    folder_.put("a model/config.json", "{}");
    return folder_.at("a model");
  }

  testing_files::TempFolder folder_;
  Invocation invocation_;
  CLI::App app_{"", "kt"};
};

TEST_F(Questions, OtherWordsComeBackAsTheyAre) {
  Typed typed("x\n");
  const std::vector<std::string> words{"quant", "./model"};
  EXPECT_EQ(asked(words, typed), words);
  EXPECT_EQ(asked({}, typed), std::vector<std::string>());
  EXPECT_EQ(typed.shown(), "");
}

TEST_F(Questions, AnswersBecomeArguments) {
  const std::string path = a_model();
  Typed typed(path + "\nint8\n-o\n");
  EXPECT_EQ(asked({"quant"}, typed),
            (std::vector<std::string>{"quant", path, "--method", "int8", "--output=-o"}));
  EXPECT_NE(typed.shown().find("Folder to write [./a model-int8]: "), std::string::npos) << typed.shown();
  EXPECT_NE(typed.shown().find("$ kt quant '" + path + "' --method int8 --output=-o\n"), std::string::npos);
}

TEST_F(Questions, ChoicesAndDefaultsAreTheFlagsOwn) {
  const CLI::App& gpu = find_verb(std::as_const(app_), {"quant", "gpu"});
  const OptionInfo method = describe_option(*gpu.get_option("--method"));
  ASSERT_EQ(method.choices, (std::vector<std::string>{"GPTQ", "RTN"}));
  const std::string model = a_model();
  Typed typed(model + "\n\n\ntext.jsonl\n\n" + model + "\nRTN\nW4A16\n\n");
  const auto calibrated = asked({"quant", "gpu"}, typed), rounded = asked({"quant", "gpu"}, typed);
  ASSERT_EQ(calibrated.size(), 11u);
  EXPECT_EQ(std::vector(calibrated.begin(), calibrated.end() - 1),
            (std::vector<std::string>{"quant", "gpu", model, "--method", method.preset, "--type",
                                      describe_option(*gpu.get_option("--type")).preset, "--dataset",
                                      "text.jsonl", "--output"}));
  EXPECT_EQ(
      std::vector(rounded.begin(), rounded.end() - 1),
      (std::vector<std::string>{"quant", "gpu", model, "--method", "RTN", "--type", "W4A16", "--output"}));
  for (const char* line : {"GPTQ  calibrated with text\n", "RTN   round to nearest\n", "method [GPTQ]: "})
    EXPECT_NE(typed.shown().find(line), std::string::npos) << typed.shown();
}

TEST_F(Questions, ChecksAreTheFlagsOwn) {
  const std::string model = a_model();
  Typed typed(model + "\nOnce\nmany\n0\n4\n");
  EXPECT_EQ(asked({"generate"}, typed),
            (std::vector<std::string>{"generate", model, "--prompt", "Once", "--max-tokens", "4"}));
  for (const char* line :
       {"got 'many'", "expected a number above 0, got '0'", "Tokens to generate at most [256]: "})
    EXPECT_NE(typed.shown().find(line), std::string::npos) << typed.shown();
  Typed port(model + "\n70000\n8080\n");
  EXPECT_EQ(asked({"run"}, port), (std::vector<std::string>{"run", model, "--port", "8080"}));
}

TEST_F(Questions, AnswersMeanTheSameInChinese) {
  const std::string model = a_model();
  const std::string answers = model + "\n\n\ntext.jsonl\nout\n";
  Typed english(answers), chinese(answers);
  const auto first = asked({"quant", "gpu"}, english);
  speak(chinese_words());
  const auto second = asked({"quant", "gpu"}, chinese);
  speak({});
  EXPECT_EQ(first, second);
  for (const char* line :
       {"GPTQ  用文本校准\n", "RTN   就近舍入\n", "方法 [GPTQ]: ", "权重和激活的位数", "要写入的目录"})
    EXPECT_NE(chinese.shown().find(line), std::string::npos) << chinese.shown();
}

TEST_F(Questions, MenusGoOnWithWhatWasChosen) {
  Typed typed("set\nserver.port\n8080\npath\n");
  EXPECT_EQ(asked({"config"}, typed), (std::vector<std::string>{"config", "set", "server.port", "8080"}));
  EXPECT_EQ(asked({"config"}, typed), (std::vector<std::string>{"config", "path"}));
}

TEST(CommandLine, IsQuoted) {
  EXPECT_EQ(command_line({"generate", "it's", "", "--n=1", "a b"}), "kt generate 'it'\\''s' '' --n=1 'a b'");
}

}  // namespace
}  // namespace kt::inline cli
