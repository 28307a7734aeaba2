#include "cli/questions.h"

#include <gtest/gtest.h>

#include "base/testing/temp_folder.h"
#include "terminal/testing/typed.h"

namespace kt {
namespace {

TEST(Questions, OtherWordsComeBackAsTheyAre) {
  Typed typed("x\n");
  const std::vector<std::string> words{"quant", "./model"};
  EXPECT_EQ(with_answers(words, typed.prompts), words);
  EXPECT_EQ(with_answers({}, typed.prompts), std::vector<std::string>());
  EXPECT_EQ(typed.shown(), "");
}

TEST(Questions, AnswersBecomeArguments) {
  const testing_files::TempFolder folder;
  ::setenv("KT_HOME", folder.path().c_str(), 1);
  const std::string model = folder.put("a model/config.json", "{}");
  const std::string path = folder.at("a model");
  Typed typed(path + "\nint8\n-o\n");
  EXPECT_EQ(with_answers({"quant"}, typed.prompts),
            (std::vector<std::string>{"quant", path, "--method", "int8", "--output=-o"}));
  EXPECT_NE(typed.shown().find("Folder to write [./a model-int8]: "), std::string::npos) << typed.shown();
  EXPECT_NE(typed.shown().find("$ kt quant '" + path + "' --method int8 --output=-o\n"), std::string::npos);
  ::unsetenv("KT_HOME");
}

TEST(Questions, MenusGoOnWithWhatWasChosen) {
  const testing_files::TempFolder folder;
  ::setenv("KT_HOME", folder.path().c_str(), 1);
  Typed typed("set\nserver.port\n8080\npath\n");
  EXPECT_EQ(with_answers({"config"}, typed.prompts),
            (std::vector<std::string>{"config", "set", "server.port", "8080"}));
  EXPECT_EQ(with_answers({"config"}, typed.prompts), (std::vector<std::string>{"config", "path"}));
  ::unsetenv("KT_HOME");
}

TEST(Questions, CommandLinesAreQuoted) {
  EXPECT_EQ(command_line({"generate", "it's", "", "--n=1", "a b"}), "kt generate 'it'\\''s' '' --n=1 'a b'");
}

}  // namespace
}  // namespace kt
