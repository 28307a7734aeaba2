#include "terminal/prompts.h"

#include <gtest/gtest.h>

#include <cstring>

#include "cli/questions.h"
#include "weights/testing/files.h"

namespace kt {
namespace {

// Answers as if typed, and what was shown.
class Typed {
 public:
  explicit Typed(std::string answers)
      : answers_(std::move(answers)),
        in_(fmemopen(answers_.data(), answers_.size(), "r")),
        out_(open_memstream(&shown_, &size_)),
        prompts(in_, out_) {}
  ~Typed() {
    std::fclose(in_);
    std::fclose(out_);
    std::free(shown_);
  }
  std::string shown() {
    std::fflush(out_);
    return {shown_, size_};
  }

 private:
  std::string answers_;
  char* shown_ = nullptr;
  size_t size_ = 0;
  std::FILE *in_, *out_;

 public:
  Prompts prompts;
};

TEST(Prompts, TextTakesTheDefaultAndAsksAgain) {
  Typed typed("\n  b \n\n\nx\n");
  EXPECT_EQ(typed.prompts.ask_text({.question = "Q", .standard = "a"}), "a");
  EXPECT_EQ(typed.prompts.ask_text({.question = "Q", .standard = "a"}), "b");
  EXPECT_EQ(typed.prompts.ask_text({.question = "Q", .optional = true}), "");
  EXPECT_EQ(typed.prompts.ask_text({.question = "R"}), "x");
  EXPECT_NE(typed.shown().find("Q [a]: "), std::string::npos);
  EXPECT_NE(typed.shown().find("an answer is needed"), std::string::npos);
}

TEST(Prompts, ChoicesByNumberWordAndBeginning) {
  const Prompts::Choices asked{.question = "Q", .choices = {{"list"}, {"link"}, {"add"}}, .standard = 2};
  Typed typed("2\nadd\na\n\nli\n4\n0\nlist\n");
  EXPECT_EQ(typed.prompts.ask_choice(asked), "link");
  EXPECT_EQ(typed.prompts.ask_choice(asked), "add");
  EXPECT_EQ(typed.prompts.ask_choice(asked), "add");
  EXPECT_EQ(typed.prompts.ask_choice(asked), "add");
  EXPECT_EQ(typed.prompts.ask_choice(asked), "list") << "after 'li', 4 and 0, which mean nothing";
  EXPECT_NE(typed.shown().find("expected a number from 1 to 3 or a word of the list, got 'li'"),
            std::string::npos);
}

TEST(Prompts, NumbersStayInRange) {
  Typed typed("x\n0\n11\n1.5\n10\n\n");
  EXPECT_EQ(typed.prompts.ask_number("N", 3, 1, 10), 10);
  EXPECT_EQ(typed.prompts.ask_number("N", 3, 1, 10), 3);
}

TEST(Prompts, YesAndNo) {
  Typed typed("\n\ny\nNo\nmaybe\nyes\n");
  EXPECT_TRUE(typed.prompts.ask_yes("Q", true));
  EXPECT_FALSE(typed.prompts.ask_yes("Q", false));
  EXPECT_TRUE(typed.prompts.ask_yes("Q", false));
  EXPECT_FALSE(typed.prompts.ask_yes("Q", true));
  EXPECT_TRUE(typed.prompts.ask_yes("Q", false));
}

TEST(Prompts, TheEndOfInputEndsTheQuestions) {
  Typed typed("half a line");
  EXPECT_THROW(typed.prompts.ask_text({.question = "Q"}), PromptEnded);
}

TEST(Prompts, BytesThatAreNoTextAreRefused) {
  Typed typed("\xff\xfe\nok\n");
  EXPECT_EQ(typed.prompts.ask_text({.question = "Q"}), "ok");
}

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
